"""Weights on their way from the trainer to the engine."""
from transformers.core_model_loading import revert_weight_conversion


def full_weights(policy, dtype=None, names=None):
    """Yield (name, whole tensor) one parameter at a time, cast to dtype where one is given.

    Gathering a sharded parameter is a collective, so every rank has to run through the whole iterator. On top
    of the shards it takes about two copies of the largest parameter: the gathered pieces and the whole.
    names: where it is given, frozen parameters are left out.
    None        each parameter once, under its name in the module
    module      the same, but a head that shares the embedding's weight comes under its own name as well
    checkpoint  as module, but under the names that a checkpoint has, so that what the module stores fused
                (the experts of a mixture-of-experts layer) comes apart. vLLM expects these names, and its CPU
                build refreshes its packed copy of a tied head only under the head's own name
    """
    # After a forward without backward FSDP2 leaves the root's parameters gathered.
    policy.reshard()
    for name, parameter in policy.hf.named_parameters(remove_duplicate=names is None):
        # Frozen parameters, those that read images, never change, and the engine may not have them.
        if names and not parameter.requires_grad:
            continue
        # Cast before the gather: there is less to send.
        shard = parameter.detach().to(dtype) if dtype else parameter.detach()
        tensor = shard.full_tensor()
        if names == "checkpoint":
            yield from revert_weight_conversion(policy.hf, {name: tensor}).items()
        else:
            yield name, tensor
