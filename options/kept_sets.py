"""
The set of tokens that each sampled token was drawn from. Runs without top_k,
top_p and min_p do not open this file.

An engine samples from the tokens that temperature, min_p, top_k and top_p leave, and its logprobs are
normalised over these. A trainer that normalised over all tokens would compute another policy, and give every
sampled token a lower probability than the engine does. So each rollout keeps these sets, and the trainer
normalises every logprob and entropy over them. After an update the policy would leave other tokens, and so
would the reference model, but the same sets are used for both. DeepSeek-V3.2 calls this "keep sampling mask"
(https://arxiv.org/abs/2512.02556, section 3.1).

    truncated    leaves probabilities only to the tokens that the plain engine draws from
    read_sets    reads the sets that vLLM has drawn from
    table        makes the sets of a micro-batch a tensor
"""
import numpy as np
import torch

# vLLM's top_k also keeps all tokens that are as likely as the k-th. So vLLM is asked for the logprobs of TIES
# more tokens than top_k, and read_sets checks that these were enough.
TIES = 4


def truncated(probs, top_p, top_k, min_p):
    """Return the probabilities with 0 for all tokens that hf_engine.sample_tokens does not draw from."""
    ranked, order = probs.sort(-1, descending=True)
    ranked[ranked < min_p * ranked[:, :1]] = 0
    if top_k:
        ranked[:, top_k:] = 0
    # A token is dropped if the likelier ones already hold top_p of the probability that is left.
    ranked[ranked.cumsum(-1) - ranked >= top_p * ranked.sum(-1, keepdim=True)] = 0
    return torch.zeros_like(probs).scatter(-1, order, ranked)


def read_sets(flat, vocab_size):
    """Return the set that each sampled token was drawn from, as in Answer.kept, from vLLM's FlatLogprobs.

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
