"""
Attention by its formula, for models whose scores no fused kernel computes: those of Gemma 2 have a softcap,
those of gpt-oss sinks. Runs with other models do not open this file.
"""
import torch


def explicit_attention(query, key, value, mask, scaling, softcap=None, sinks=None):
    """Compute attention by its formula, where no fused kernel does it. The memory grows with len^2.

    mask: a tensor to add to the scores. softcap: a score becomes softcap * tanh(score / softcap) (Gemma 2,
    https://arxiv.org/abs/2408.00118). sinks [heads]: each softmax has this additional score, which belongs to
    no value (gpt-oss).
    """
    groups = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(groups, 1)
    value = value.repeat_interleave(groups, 1)
    scores = (query @ key.transpose(2, 3) * scaling).float()                       # [lines, heads, len, keys]
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    scores = scores + mask
    if sinks is not None:
        column = sinks.float().view(1, -1, 1, 1)
        scores = torch.cat([scores, column.expand(*scores.shape[:3], 1)], dim=3)
    weights = scores.softmax(3)[..., :key.shape[2]]
    return weights.to(value.dtype) @ value
