"""
The set of tokens that each sampled token was drawn from. Runs without a top_k do not open this file.

An engine samples from the tokens that temperature, min_p, top_k and top_p leave, and its logprobs are
normalised over these. A trainer that normalised over all tokens would compute another policy, and give every
sampled token a lower probability than the engine does. So each rollout keeps these sets, and the trainer
normalises every logprob and entropy over them. After an update the policy would leave other tokens, and so
would the reference model, but the same sets are used for both. DeepSeek-V3.2 calls this "keep sampling mask"
(https://arxiv.org/abs/2512.02556, section 3.1).

rollout.py has the sets from its engines (rollout.kept_sets reads vLLM's), and `table` makes them a tensor.
"""
import numpy as np
import torch


def table(batch, rollouts):
    """Return the sets of a packing.MicroBatch of rollouts, int32 [C, largest set]. Smaller sets are filled up
    with the sampled token itself. Raises ValueError if a rollout has sets for other tokens than it sampled,
    or if a sampled token is not in its set."""
    ids = []
    sizes = []
    for s, tokens, total in batch.sequences:
        r = rollouts[s]
        if len(r.kept_sizes) != total:
            raise ValueError(f"a rollout has {total} sampled tokens, and sets (kept_ids, kept_sizes) for "
                             f"{len(r.kept_sizes)}: a copy with other spans needs sets of its own, by r.keep")
        first = r.kept_sizes[:tokens.start].sum()
        sizes.append(r.kept_sizes[tokens])
        ids.append(r.kept_ids[first:first + sizes[-1].sum()])
    sizes = np.concatenate(sizes)[:, None]                                                      # [C, 1]
    targets = batch.targets.numpy().astype(np.int32)[:, None]                                   # [C, 1]
    inside = np.arange(sizes.max()) < sizes                                                     # [C, M]
    kept = np.where(inside, 0, targets)
    kept[inside] = np.concatenate(ids)
    present = (inside & (kept == targets)).any(1)                                               # [C]
    if not present.all():
        token = targets[present.argmin(), 0]
        raise ValueError(f"token {token} was sampled, and is not among the tokens that it was drawn from")
    return torch.from_numpy(kept)
