"""
Weights from the trainer to the engine, and whether they arrived.

    engine_weights     what an engine is handed: the trained weights, under the names that it knows them by,
                       and at the end their checksums
    load_checked       lets an engine load them, and stops the run if they did not arrive as they were sent
"""
import torch
from transformers.core_model_loading import revert_weight_conversion

SUMS = "checksums"              # the name that weights.engine_weights gives to its last pair


def engine_weights(policy, naming, dtype):
    """Yield (name, whole tensor) for each weight of a Policy that training changes, for an engine.

    The last pair is (SUMS, {name: checksum}), with which the engine proves that all have arrived.

    naming: the names by which the engine knows weights. "module" stands for those of the Hugging Face module,
    "checkpoint" for those of a checkpoint. A module may store several tensors of a checkpoint as one, such as
    the experts of a layer. dtype: the one in which policy and engine compute. If the policy has adapters,
    they are merged into the weights of their layers. This is a collective, so every rank has to run through
    the whole iterator.
    """
    # After a forward without a backward, FSDP2 leaves the root's parameters gathered.
    policy.reshard()
    in_module = naming == "module"
    if policy.adapters:
        tensors = policy.adapters.merged()
    else:
        # A parameter with two names comes twice in a checkpoint: the CPU build of vLLM refreshes its packed
        # copy of a tied head only under the head's own name. Parameters that read images never change, and
        # the engine may not have them. The cast comes before the gather: there is less to send.
        text = policy.text_parameters()
        tensors = ((name, parameter.detach().to(dtype).full_tensor())
                   for name, parameter in policy.hf.named_parameters(remove_duplicate=in_module)
                   if parameter in text)
    sums = {}
    for name, tensor in tensors:
        converted = {name: tensor}
        if not in_module:
            converted = revert_weight_conversion(policy.hf, converted)
        sums |= {name: checksum(x) for name, x in converted.items()}
        yield from converted.items()
    yield SUMS, sums


def checksum(tensor):
    """Return the sum of a tensor's bits, read as whole numbers, modulo 2 ** 64, as an int.

    If a row, along the last dimension, is a whole number of words of 8 bytes, these words are the numbers:
    PyTorch adds them forty times as fast as shorter ones. Otherwise, and in a vector, each element is a
    number. So the checksums of pieces add up to that of the whole, modulo 2 ** 64, if the cuts are between
    rows, or between words of rows, or anywhere in a vector. A checksum does not change if numbers change
    places inside a tensor.
    """
    tensor = tensor.contiguous()
    if tensor.storage_offset() % 8:         # in a message a tensor may begin in the middle of a word
        tensor = tensor.clone()
    size = tensor.element_size()
    if tensor.ndim > 1 and tensor.shape[-1] * size % 8 == 0:
        size = 8
    return tensor.view(getattr(torch, f"int{8 * size}")).sum().item()


def load_checked(load, named_tensors, version):
    """Let an engine load what engine_weights yields. Raise RuntimeError if it then has other weights.

    load(named_tensors) loads them, and returns {name: checksum} of the tensors that the engine has got.
    """
    sums = {}                               # {name: checksum} of the trainer's tensors, once they have come

    def tensors():
        for name, tensor in named_tensors:
            if name == SUMS:
                sums.update(tensor)
            else:
                yield name, tensor

    stream = tensors()
    held = load(stream)
    for _ in stream:                        # the sums come last, even if the engine has not taken everything
        pass
    wrong = [name for name in sums if held.get(name) != sums[name]]
    if wrong or not sums:
        raise RuntimeError(
            f"the sync of version {version} has failed: the trainer has {len(sums)} weights, the engine got "
            f"{len(held)}, and these are missing or differ: {wrong[:8]}. If none is named, the weights broke "
            "off before the trainer's list of them came")
