"""Weights: from a folder to the ranks, and whether they have arrived in the engine.

    read_model          a model from a folder or hub id, whole
    spread_masters      moves weights that bfloat16 rounds, so that small steps are not lost
    put_under_fsdp      shards a network over the ranks, with the weights of rank 0
    compare_logprobs    compares the trainer's logprobs with the engine's
"""
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from runtime.check_model import check_loaded, reading

# ---------------------------------------------------------------- from a folder to the ranks

def read_model(what, kind, path, config, has_head=True, may_lack=()):
    """Return the model of the class `kind` in a folder or hub id, whole, in float32 on the CPU.

    has_head: False leaves out the head of a causal language model, which the folder may then lack. may_lack:
    names of parameters that stay as the class makes them if the folder has none. Raises ValueError, with a
    message that begins with `what`, if the weights cannot be read, do not fit the config, or have NaN or
    infinite numbers.
    """
    with reading(f"{what}: its weights"):
        hf, info = kind.from_pretrained(
            path, config=config, dtype=torch.float32, attn_implementation="eager", output_loading_info=True,
            ignore_mismatched_sizes=True, trust_remote_code=False)
    if not has_head:
        head = hf.get_output_embeddings()
        for name in [name for name, part in hf.named_modules() if part is head]:
            hf.set_submodule(name, nn.Identity())
            may_lack = [key for key in info["missing_keys"] if key.startswith(f"{name}.")]
    check_loaded(what, info, may_lack)
    for name, x in hf.named_parameters():
        if not all(map(torch.isfinite, x.aminmax())):
            raise ValueError(f"{what}: {name} has NaN or infinite numbers in its weights")
    # In eval mode no dropout acts. The engine has none either.
    return hf.eval()


def spread(weight):
    """Return an int16 for each place of a weight, always the same, spread evenly over rows and columns."""
    def along(count, step):
        return (torch.arange(count, device=weight.device) * step).to(torch.int16)               # it wraps

    columns = weight.numel() // max(len(weight), 1)
    return (along(len(weight), 49471)[:, None] + along(columns, 37345)).view(weight.shape)


@torch.no_grad()
def spread_masters(parameters):
    """Move float32 weights, in place, off the grid of bfloat16 without changing what they are rounded to.

    On the grid, an optimizer step that is much smaller than the grid's would change no rounded weight, and
    neither trainer nor engine would compute anything new. Once the weights are spread over the intervals that
    are rounded to the same bfloat16, a step of a third of the grid's takes a third of them to the next
    bfloat16. Zeros stay as they are, and so do parameters that are not on the grid, such as those of a run's
    checkpoint.
    """
    for parameter in parameters:
        bits = parameter.view(torch.int32)
        if not (bits & 0xffff).any():
            # Exactly half a step might be rounded to the next bfloat16.
            bits.add_(torch.where(parameter == 0, 0, spread(parameter).clamp_(min=1 - 2 ** 15)))


def put_under_fsdp(network, units, mesh, dtype):
    """Put a network under FSDP2, computing in dtype: each of the units by itself, then the rest.

    On rank 0 the network is whole. On all other ranks its parameters are on the meta device, and each rank
    gets its rows of rank 0's, one tensor after the other. dtype: None computes in that of the parameters.
    mesh: its last dimension shards. If there are two, all ranks along the first have the same rows. A
    collective.
    """
    whole = network.state_dict() if dist.get_rank() == 0 else {}
    for part in [*units, network]:
        fully_shard(part, mesh=mesh, mp_policy=MixedPrecisionPolicy(dtype, torch.float32))
    if dist.get_rank() > 0:
        # This empties the buffers as well, and a state dict lacks some, such as the frequencies of positions.
        buffers = [*network.named_buffers(remove_duplicate=False)]
        network.to_empty(device=mesh.device_type)
        for (_, empty), (_, buffer) in zip(network.named_buffers(remove_duplicate=False), buffers):
            empty.copy_(buffer)
    set_model_state_dict(network, whole, options=StateDictOptions(
        full_state_dict=True, broadcast_from_rank0=True))


# ---------------------------------------------------------------- from the trainer to the engine

def compare_logprobs(rollouts, logps, bound, tokenizer, version=None):
    """Compare the trainer's logprobs, {s: [len]}, with the engine's for the same tokens; return metrics.

    Both sides have the same weights. A mean gap over `bound` nats, or a NaN, therefore means a broken weight
    sync, a wrong temperature, or a model that one side computes wrongly, and raises RuntimeError with the
    worst tokens. Pass an infinite bound for weights that are known to differ. version: that of the policy;
    rollouts of another version raise RuntimeError, because another policy is their pi_old. None accepts all.
    docs/metrics.md explains the metrics: importance_sampling_ratio is exp(trainer - engine), and kl is
    KL(engine || trainer) by k3. A collective, also for a rank without any logprobs.
    """
    stale = {sampled_by for s in logps for _, sampled_by in rollouts[s].versions} - {version}
    if stale and version is not None:
        raise RuntimeError(f"step {version} trains on rollouts of step {min(stale)}'s policy: take the "
                           "engine's old logprobs (--old_logprobs=engine), and compare none of them")
    # On the CPU, where the engine's are, in one transfer.
    ours = torch.cat([*logps.values()]).cpu() if logps else torch.empty(0)                      # [C]
    theirs = torch.cat([torch.empty(0), *(torch.from_numpy(rollouts[s].logprobs) for s in logps)])      # [C]
    gap, ratio = (ours - theirs).abs(), (ours - theirs).exp()
    sums = torch.stack([x.sum() for x in (torch.ones_like(gap), gap, ratio, ratio.square(),
                                          ratio - 1 - (ours - theirs))])
    peaks = torch.full((4,), -math.inf)
    if len(gap):
        p99 = gap.kthvalue(math.ceil(0.99 * len(gap))).values
        peaks = torch.stack([p99, gap.max(), ratio.max(), -ratio.min()])
    dist.all_reduce(sums)
    dist.all_reduce(peaks, dist.ReduceOp.MAX)
    if sums[0] == 0:                                    # no rank compares a token, so nothing can be wrong
        sums, peaks = torch.tensor([1.0, 0, 1, 1, 0]), torch.tensor([0.0, 0, 1, -1])
    gap_mean, ratio_mean, square_mean, kl = (sums[1:] / sums[0]).tolist()
    gap_p99, gap_max, ratio_max, minus_ratio_min = peaks.tolist()
    if not (gap_mean <= bound and math.isfinite(gap_mean)):
        raise RuntimeError(
            f"engine and trainer logprobs differ by {gap_mean:.2g} on average, over logprob_gap={bound:g}. "
            f"The worst tokens here:\n{worst_tokens(rollouts, logps, gap, tokenizer)}")
    return {f"sampling/{name}": value for name, value in {
        "sampling_logp_difference/mean": gap_mean, "sampling_logp_difference/p99": gap_p99,
        "sampling_logp_difference/max": gap_max, "importance_sampling_ratio/min": -minus_ratio_min,
        "importance_sampling_ratio/mean": ratio_mean, "importance_sampling_ratio/max": ratio_max,
        "effective_sample_size": ratio_mean ** 2 / square_mean, "kl": kl}.items()}


def worst_tokens(rollouts, logps, gap, tokenizer):
    # A line for each of the eight tokens with the largest gap, [C]: the text before it and both logprobs.
    tokens = [(rollouts[s], t, logp) for s in logps for t, logp in enumerate(logps[s].tolist())]
    return "\n".join(
        f"  {tokenizer.decode(r.sampled_ids[:t])!r} + {tokenizer.decode(r.sampled_ids[t])!r}: "
        f"trainer {logp:.4f}, engine {r.logprobs[t]:.4f}"
        for r, t, logp in (tokens[c] for c in gap.argsort(descending=True)[:8].tolist()))
