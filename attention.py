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
    """The segments of a packed row: the tokens that each sequence adds to it, and what these attend to.

    Where sequences share what they begin with, the first of them has it in its segment. The keys of a later
    one are gathered: those of the shared tokens, then its own.
    """
    sizes: list                     # S: tokens of each segment; they sum to T
    key_sizes: list                 # S: tokens of its sequence, which are its keys; they sum to K
    places: torch.Tensor            # [K] where in the row each key stands; None: nothing is shared, K = T
    offsets: torch.Tensor           # [S + 1] where each segment begins in the row, int32
    key_offsets: torch.Tensor       # [S + 1] where its keys begin in places, int32
    group: object = None            # of a row that is cut over ranks, their process group
    masks: dict = field(default_factory=dict)       # band's, which all layers use

    @classmethod
    def of(cls, sizes, paths):
        """From the size of each segment, and the places where the tokens of its sequence stand, in order."""
        key_sizes = [len(path) for path in paths]
        places = None if key_sizes == sizes else torch.from_numpy(np.concatenate(paths))
        starts = [torch.tensor([0, *accumulate(x)], dtype=torch.int32) for x in (sizes, key_sizes)]
        return cls(sizes, key_sizes, places, *starts)

    def band(self, size, key_size, window, dtype):
        """What is added to a segment's scores: 0 where a token sees a key, otherwise -inf; [size, key_size].

        The last token of a segment sees the last of its keys. All segments' are parts of one mask, in which
        `most` keys stand before the first token.
        """
        longest, most = max(self.sizes), max(b - a for a, b in zip(self.sizes, self.key_sizes))
        if (window, dtype) not in self.masks:
            place = torch.arange(-most, longest, device=self.offsets.device, dtype=torch.int32)
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


def packed_attention(module, query, key, value, attention_mask, scaling, segments, sliding_window=None,
                     softcap=None, s_aux=None, **_):
    """Causal attention inside each sequence of a packed row; query [1, heads, T, d] -> [1, T, heads, d].

    Several rows have the same segments. sliding_window: how many tokens a token sees, counting itself.
    softcap and s_aux ([heads], sinks): see explicit_attention. The work grows with the pairs of tokens that
    see each other, not with T^2, and no T x T mask exists. A row that is cut over P ranks arrives as
    [1, heads, T / P, d] and leaves as [1, T / P, heads, d]. Raises ValueError where P does not divide heads.
    """
    group = segments.group
    if group is None:
        return attend(query, key, value, scaling, segments, sliding_window, softcap, s_aux), None
    P = group.size()
    if query.shape[1] % P or key.shape[1] % P:
        raise ValueError(f"sequence_parallel_size={P} does not divide the heads of its attention, "
                         f"{query.shape[1]} of queries and {key.shape[1]} of keys")
    query, key, value = (Exchange.apply(x, group) for x in (query, key, value))         # [1, heads / P, T, d]
    sinks = None if s_aux is None else s_aux.chunk(P)[group.rank()]
    output = attend(query, key, value, scaling, segments, sliding_window, softcap, sinks)
    return Exchange.apply(output, group), None


def attend(query, key, value, scaling, segments, sliding_window, softcap, sinks):
    # packed_attention where each rank has all tokens of the row
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
        mask = None if plain else segments.band(size, key_size, window, q.dtype)
        outputs.append(
            explicit_attention(q, k, v, mask, scaling, softcap, sinks) if explicit else
            F.scaled_dot_product_attention(q, k, v, mask, is_causal=plain, scale=scaling, enable_gqa=True))
    return torch.cat(outputs, dim=2).transpose(1, 2)


def gathered(x, places):
    # [1, heads, T, d] -> [1, heads, K, d]; all heads of a token at once, which a CPU does three times as fast
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
    scores = (query @ key.transpose(2, 3) * scaling).float()                        # [S, heads, len, keys]
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    scores = scores + mask
    if sinks is not None:
        column = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], dim=3)
    return scores.softmax(3)[..., :key.shape[2]].to(value.dtype) @ value


# No mask function is registered with it, so transformers makes no mask.
AttentionInterface.register("packed", packed_attention)
