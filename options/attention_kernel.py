"""
Attention for packed lines by PyTorch's kernel for sequences of several lengths. Only runs on a GPU open this
file.
"""
import inspect
from itertools import accumulate

import torch
from torch.nn.attention import varlen

# By default PyTorch 2.11's kernel takes fewer heads of keys and values than of queries. Later versions need
# enable_gqa for that. To be removed together with 2.11.
GROUPED = {}
if "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters:
    GROUPED["enable_gqa"] = True


def attend_by_kernel(query, key, value, scaling, segments, window):
    """Compute all segments of a packed line in one call; the tensors are those of packed_attention."""
    tensors = [x.squeeze(0).transpose(0, 1) for x in (query, key, value)]                      # [T, heads, d]
    # window_size: how many tokens before and after a token it sees; -1 stands for all. If a segment has fewer
    # tokens than keys, the kernel aligns their ends: the last token sees the last key.
    longest = max(segments.key_sizes)
    before = -1
    if window < longest:
        before = window - 1
    if "offsets" not in segments.made:
        segments.made["offsets"] = (offsets(segments.sizes, query.device),
                                    offsets(segments.key_sizes, query.device))
    output = varlen.varlen_attn(*tensors, *segments.made["offsets"], max(segments.sizes), longest,
                                scale=scaling, window_size=(before, 0), **GROUPED)          # [T, heads, d]
    return output[None]


def offsets(sizes, device):
    # Returns where each part of a line begins, for parts of these sizes, and where the last one ends.
    return torch.tensor([0, *accumulate(sizes)], dtype=torch.int32, device=device)
