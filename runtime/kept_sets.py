"""
The set of tokens that each sampled token was drawn from. Runs without a top_k do not open this file.

An engine samples from the tokens that temperature, min_p, top_k and top_p leave, and its logprobs are
normalised over these. A trainer that normalised over all tokens would compute another policy, and give every
sampled token a lower probability than the engine does. So each rollout keeps these sets, and the trainer
normalises every logprob and entropy over them. After an update the policy would leave other tokens, and so
would the reference model, but the same sets are used for both. DeepSeek-V3.2 calls this "keep sampling mask"
(https://arxiv.org/abs/2512.02556, section 3.1).

    of_logprobs   returns the sets of an answer of vLLM
    table         returns the sets of a micro-batch as a tensor
"""
import numpy as np
import torch


def of_logprobs(flat, vocab_size):
    """Return the set of each sampled token, a list of int32 arrays, from vLLM's FlatLogprobs of an answer.

    After the logprob of a sampled token FlatLogprobs holds those of the K likeliest tokens. Tokens outside of
    the set have -inf. If all K logprobs are finite, the set may be larger, and it raises RuntimeError.
    """
    shape = len(flat), -1
    ids = np.array(flat.token_ids, dtype=np.int32).reshape(shape)[:, 1:]                        # [C, K]
    kept = np.isfinite(flat.logprobs).reshape(shape)[:, 1:]
    K = ids.shape[1]
    if K < vocab_size and kept[:, -1].any():
        raise RuntimeError(f"vLLM drew a token from {K} tokens or more: too many tie at the last place of "
                           "top_k, so choose another top_k")
    return np.split(ids[kept], kept.sum(1).cumsum()[:-1])


def table(batch, rollouts):
    """Return the sets of a packing.MicroBatch of rollouts, int32 [C, largest set]. Smaller sets are filled up
    with the sampled token itself. Raises ValueError if a sampled token is not in its set."""
    ids = []
    sizes = []
    for s, tokens, _ in batch.sequences:
        r = rollouts[s]
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
