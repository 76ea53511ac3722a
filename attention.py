"""
Attention for packed rows (packing.py): a sequence sees itself and nothing else in the row.

Hugging Face models call packed_attention by the name "packed" in place of their own. It is PyTorch's CUDA
kernel for sequences of several lengths where kernel_takes says so, otherwise a loop over the sequences.
"""
import inspect
import math
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import varlen
from transformers import AttentionInterface

from sequence_parallel import Exchange


@dataclass
class Segments:
    """Which tokens of a packed row attend to which.

    A segment is the tokens that one sequence adds to the row. They attend to the tokens that this sequence
    shares with others, gathered from where these stand, and to each other. In the row 5 6 7 9 of packing.py
    sizes are 3 1, key_sizes 3 3, and places 0 1 2 | 0 1 3.
    """
    sizes: list                     # tokens of each segment; they sum to T
    key_sizes: list                 # tokens that each segment attends to, itself included; they sum to K
    places: torch.Tensor            # [K] where in the row these stand; None: nothing is shared, and K = T
    offsets: torch.Tensor           # where each segment begins in the row, and T; int32
    key_offsets: torch.Tensor       # where its keys begin in places, and K; int32
    masks: dict = field(default_factory=dict)       # those that `mask` has made, for all layers

    @classmethod
    def of(cls, sizes, places):
        """From the size of each segment and the places that it attends to, an array for each."""
        key_sizes = [len(part) for part in places]
        joined = None if key_sizes == sizes else torch.from_numpy(np.concatenate(places))
        starts = [torch.tensor([0, *accumulate(x)], dtype=torch.int32) for x in (sizes, key_sizes)]
        return cls(sizes, key_sizes, joined, *starts)

    def mask(self, size, key_size, window, dtype):
        """To be added to a segment's scores: 0 where a token sees a key, otherwise -inf; [size, key_size].

        The last token of a segment is its last key. One mask is made, for the longest segment behind the most
        shared tokens; that of any other segment is a part of it.
        """
        most = max(key_size - size for size, key_size in zip(self.sizes, self.key_sizes))
        if (window, dtype) not in self.masks:
            place = torch.arange(-most, max(self.sizes), device=self.offsets.device, dtype=torch.int32)
            distance = place[most:, None] - place
            hidden = (distance < 0) | (distance >= window)
            self.masks[window, dtype] = torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, -math.inf)
        start = most - (key_size - size)
        return self.masks[window, dtype][:size, start:start + key_size]


# PyTorch 2.11's kernel takes fewer heads of key and value than of query by default; later ones need
# enable_gqa.
GROUPED = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters else {}


def kernel_takes(query, value):
    """Whether PyTorch's CUDA kernel for sequences of several lengths computes such attention."""
    head = query.shape[-1]
    return (query.is_cuda and len(query) == 1 and query.dtype in (torch.bfloat16, torch.float16)
            and head % 8 == 0 and head <= 256 and value.shape[-1] == head
            and torch.cuda.get_device_capability(query.device) >= (8, 0))


def packed_attention(module, query, key, value, attention_mask, scaling, segments, cut=None,
                     sliding_window=None, softcap=None, s_aux=None, **_):
    """Causal attention inside each sequence of a packed row; query [1, heads, T, d] -> [1, T, heads, d].

    If there are several rows, each has these segments. sliding_window: how many tokens a token sees, counting
    itself. softcap and s_aux ([heads], sinks): see explicit_attention. The work grows with the pairs of
    tokens of which one sees the other, not with T^2, and no T x T mask exists. Of a row that is cut over P
    ranks it takes [1, heads, T / P, d] and returns [1, T / P, heads, d]. Raises ValueError where P does not
    divide the heads.
    """
    if cut is None:
        return attend(query, key, value, scaling, segments, sliding_window, softcap, s_aux), None
    P = cut.group.size()
    if query.shape[1] % P or key.shape[1] % P:
        raise ValueError(f"sequence_parallel_size={P} does not divide its {query.shape[1]} heads of queries "
                         f"and {key.shape[1]} of keys")
    query, key, value = (Exchange.apply(x, cut.group) for x in (query, key, value))     # [1, heads / P, T, d]
    sinks = None if s_aux is None else s_aux.chunk(P)[cut.group.rank()]
    output = attend(query, key, value, scaling, segments, sliding_window, softcap, sinks)
    return Exchange.apply(output, cut.group), None


def attend(query, key, value, scaling, segments, sliding_window, softcap, sinks):
    # packed_attention for all tokens of the row, and all heads or a part of them
    sizes, key_sizes = segments.sizes, segments.key_sizes
    if segments.places is not None:
        key, value = (gathered(x, segments.places) for x in (key, value))                   # [1, heads, K, d]
    longest, window = max(key_sizes), sliding_window or math.inf
    explicit = softcap is not None or sinks is not None
    if kernel_takes(query, value) and not explicit:
        rows = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))                  # [T, heads, d]
        # window_size: how many tokens before and after are seen; -1 is all. Where a segment has fewer tokens
        # than keys, the kernel lets its last token see the last key.
        before = window - 1 if window < longest else -1
        return varlen.varlen_attn(*rows, segments.offsets, segments.key_offsets, max(sizes), longest,
                                  scale=scaling, window_size=(before, 0), **GROUPED)[None]
    outputs = []
    # split, not slices: the gradient of a slice is as large as the row, so S of them cost S * T, which is a
    # tenth of the update of 64 short sequences.
    for q, k, v in zip(query.split(sizes, 2), key.split(key_sizes, 2), value.split(key_sizes, 2)):
        size, key_size = q.shape[2], k.shape[2]
        plain = size == key_size <= window and not explicit
        mask = None if plain else segments.mask(size, key_size, window, q.dtype)
        outputs.append(
            explicit_attention(q, k, v, mask, scaling, softcap, sinks) if explicit else
            F.scaled_dot_product_attention(q, k, v, mask, is_causal=plain, scale=scaling, enable_gqa=True))
    return torch.cat(outputs, dim=2).transpose(1, 2)


def gathered(x, places):
    # [1, heads, T, d] -> [1, heads, K, d]; a CPU takes a third of the time with all heads of a token at once
    heads = x.shape[1]
    return x.transpose(1, 2).flatten(2).index_select(1, places).unflatten(2, (heads, -1)).transpose(1, 2)


def explicit_attention(query, key, value, mask, scaling, softcap=None, sinks=None):
    """Attention by its formula, in memory that grows with len^2, for scores that no fused kernel computes.

    mask: what is added to the scores. softcap: scores become softcap * tanh(score / softcap) (Gemma 2,
    https://arxiv.org/abs/2408.00118). sinks [heads]: a score in each token's softmax that belongs to no value
    (gpt-oss).
    """
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    scores = (query @ key.transpose(2, 3) * scaling).float()                        # [rows, heads, len, keys]
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    scores = scores + mask
    if sinks is not None:
        column = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], dim=3)
    return scores.softmax(3)[..., :key.shape[2]].to(value.dtype) @ value


# No mask function is registered with it, so transformers makes no mask.
AttentionInterface.register("packed", packed_attention)
