"""Weights on their way from the trainer to the engine, and whether they arrived."""
import math

import torch
import torch.distributed as dist
from transformers.core_model_loading import revert_weight_conversion


def full_weights(policy, dtype=None, naming=None):
    """Yield (name, whole tensor) one parameter at a time, cast to dtype if one is given.

    Gathering a sharded parameter is a collective, so every rank has to run through the whole iterator. In
    addition to the shards it takes about two copies of the largest parameter: the gathered pieces and the
    whole. naming: how the tensors are called. If it is given, frozen parameters are left out, and of a policy
    with adapters the merged weights are yielded.
    None        each parameter once, under its name in the module
    module      the same, but a head that shares the embedding's weight comes under its own name as well
    checkpoint  as module, but with the names of a checkpoint and split as there, because a module may store
                several tensors as one, such as the experts of a layer. vLLM expects these names, and its CPU
                build refreshes its packed copy of a tied head only under the head's own name
    """
    # After a forward without backward FSDP2 leaves the root's parameters gathered.
    policy.reshard()
    adapters = getattr(policy, "adapters", None)
    tensors = adapters.merged() if adapters and naming else (
        # The cast comes before the gather, so that there is less to send.
        (name, (parameter.detach().to(dtype) if dtype else parameter.detach()).full_tensor())
        for name, parameter in policy.hf.named_parameters(remove_duplicate=naming is None)
        # Frozen parameters, which read images, never change, and the engine may not have them.
        if parameter.requires_grad or not (naming or adapters))
    for name, tensor in tensors:
        one = {name: tensor}
        yield from (revert_weight_conversion(policy.hf, one) if naming == "checkpoint" else one).items()


def compare_logprobs(rollouts, logps, bound, tokenizer, version=None, may_be_stale=False):
    """Compare the trainer's logprobs, {s: [len]}, with the engine's for the same tokens; return metrics.

    Both sides have the same weights. A mean gap over `bound` nats, or a NaN, therefore means a broken weight
    sync, a wrong temperature, or a model that one side computes wrongly, and raises RuntimeError with the
    worst tokens. Pass an infinite bound for weights that are known to differ. version: that of the policy, or
    None to compare all rollouts. Rollouts of an older version are not compared, because another policy is
    their pi_old, and they raise RuntimeError unless they may be stale. docs/metrics.md explains the metrics:
    importance_sampling_ratio is exp(trainer - engine), and kl is KL(engine || trainer) by k3. A collective,
    also for a rank without any logprobs.
    """
    oldest = {s: min(sampled_by for _, sampled_by in rollouts[s].versions) for s in logps}
    stale = {s for s in logps if version not in (None, oldest[s])}
    if stale and not may_be_stale:
        raise RuntimeError(
            f"step {version} trains on rollouts of step {oldest[min(stale)]}'s policy: "
            "take the engine's as old logprobs (train_grpo.py --old_logprobs=engine), or a correction")
    logps = {s: logp for s, logp in logps.items() if s not in stale}
    # On the CPU, where the engine's are, in one transfer.
    ours = torch.cat([*logps.values()]).cpu() if logps else torch.empty(0)                      # [C]
    theirs = torch.cat([torch.empty(0), *(torch.from_numpy(rollouts[s].logprobs) for s in logps)])      # [C]
    gap, ratio = (ours - theirs).abs(), (ours - theirs).exp()
    sums = torch.stack([torch.tensor(float(len(x))) for x in (stale, gap)]
                       + [x.sum() for x in (gap, ratio, ratio.square(), ratio - 1 - (ours - theirs))])
    peaks = torch.full((4,), -math.inf)
    if len(gap):
        p99 = gap.kthvalue(math.ceil(0.99 * len(gap))).values
        peaks = torch.stack([p99, gap.max(), ratio.max(), -ratio.min()])
    dist.all_reduce(sums)
    dist.all_reduce(peaks, dist.ReduceOp.MAX)
    if sums[1] == 0:                                    # no rank compares a token, so nothing can be wrong
        sums[1:], peaks = torch.tensor([1.0, 0, 1, 1, 0]), torch.tensor([0.0, 0, 1, -1])
    gap_mean, ratio_mean, square_mean, kl = (sums[2:] / sums[1]).tolist()
    gap_p99, gap_max, ratio_max, minus_ratio_min = peaks.tolist()
    if not (gap_mean <= bound and math.isfinite(gap_mean)):
        raise RuntimeError(
            f"engine and trainer logprobs differ by {gap_mean:.2g} on average, over logprob_gap={bound:g}. "
            f"The worst tokens here:\n{worst_tokens(rollouts, logps, gap, tokenizer)}")
    return {f"sampling/{name}": value for name, value in {
        "stale_rollouts": int(sums[0]),
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
