"""
Attention for packed rows (packing.py): a sequence sees itself and nothing else in the row.

Hugging Face models call packed_attention by the name "packed" in place of their own. It is PyTorch's CUDA
kernel for sequences of several lengths where kernel_takes says so, otherwise a loop over the sequences.
"""
import copy
import inspect
import math
from itertools import accumulate

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import varlen
from transformers import AttentionInterface

from sequence_parallel import Exchange


class Segments:
    """Which tokens of a packed row attend to which.

    A segment is the tokens that one sequence adds to the row. They attend to the tokens that this sequence
    shares with others, gathered from where these stand, and to each other. In the row 5 6 7 9 of packing.py
    sizes are 3 1, key_sizes 3 3, and places 0 1 2 | 0 1 3.
    sizes: tokens of each segment; they sum to T. places: where in the row the tokens stand that each segment
    attends to, itself at the end: an array for each, joined to [K]; None if nothing is shared.
    No dataclass, because FSDP2 hands each layer a copy of those, and the masks are for all layers.
    """

    def __init__(self, sizes, places):
        self.sizes, self.key_sizes, self.masks = sizes, [len(part) for part in places], {}
        self.places = None if self.key_sizes == sizes else torch.from_numpy(np.concatenate(places))
        # Where each segment begins in the row, and T; where its keys begin in places, and K.
        self.offsets, self.key_offsets = (torch.tensor([0, *accumulate(x)], dtype=torch.int32)
                                          for x in (sizes, self.key_sizes))

    def to(self, device):
        """A copy with its tensors on the device."""
        other = copy.copy(self)
        other.masks = {}
        for name in ("places", "offsets", "key_offsets"):
            tensor = getattr(self, name)
            setattr(other, name, None if tensor is None else tensor.to(device))
        return other

    def mask(self, size, before, window, dtype):
        """To be added to scores: 0 where a token sees a key, otherwise -inf; [size, before + size].

        Key j stands j - before tokens behind the first token. Made once for all layers.
        """
        kind = size, before, window, dtype
        if kind not in self.masks:
            place = torch.arange(-before, size, device=self.offsets.device, dtype=torch.int32)
            distance = place[before:, None] - place
            hidden = (distance < 0) | (distance >= window)
            self.masks[kind] = torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, -math.inf)
        return self.masks[kind]


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
    if segments.places is not None:
        key, value = (pick(x, segments.places) for x in (key, value))                       # [1, heads, K, d]
    window = sliding_window or math.inf
    if softcap is not None or sinks is not None or not kernel_takes(query, value):
        return attend_in_turn(query, key, value, scaling, segments, window, softcap, sinks)
    rows = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))                      # [T, heads, d]
    # window_size: how many tokens before and after are seen; -1 is all. Where a segment has fewer tokens than
    # keys, the kernel lets its last token see the last key.
    longest = max(segments.key_sizes)
    before = window - 1 if window < longest else -1
    return varlen.varlen_attn(*rows, segments.offsets, segments.key_offsets, max(segments.sizes), longest,
                              scale=scaling, window_size=(before, 0), **GROUPED)[None]


def attend_in_turn(query, key, value, scaling, segments, window, softcap, sinks):
    # attend, one segment after the other
    sizes, key_sizes = segments.sizes, segments.key_sizes
    shared = [key_size - size for size, key_size in zip(sizes, key_sizes)]
    explicit = softcap is not None or sinks is not None
    # Without a mask PyTorch wants a query for each key. For a long segment those of the tokens that it shares
    # are computed again, which costs less than its mask.
    plain = [not explicit and before + size <= window and (before == 0 or size >= max(256, before))
             for before, size in zip(shared, sizes)]
    if not all(plain):
        most, longest = (max(x for x, is_plain in zip(counts, plain) if not is_plain)
                         for counts in (shared, sizes))
        mask = segments.mask(longest, most, window, query.dtype)
    # split, not slices: the gradient of a slice is as large as the row, so S of them cost S * T, which is a
    # tenth of the update of 64 short sequences.
    queries, keys, values = query.split(sizes, 2), key.split(key_sizes, 2), value.split(key_sizes, 2)
    again = any(before and is_plain for before, is_plain in zip(shared, plain))
    all_queries = pick(query, segments.places).split(key_sizes, 2) if again else queries
    outputs = []
    for q, all_q, k, v, is_plain in zip(queries, all_queries, keys, values, plain):
        size, before = q.shape[2], k.shape[2] - q.shape[2]
        if is_plain:
            output = F.scaled_dot_product_attention(all_q, k, v, is_causal=True, scale=scaling,
                                                    enable_gqa=True)[:, :, before:]
        else:
            seen = mask[:size, most - before:most + size]
            # CUDA's kernels want aligned rows.
            seen = seen.contiguous() if seen.is_cuda else seen
            output = (explicit_attention(q, k, v, seen, scaling, softcap, sinks) if explicit else
                      F.scaled_dot_product_attention(q, k, v, seen, scale=scaling, enable_gqa=True))
        outputs.append(output)
    return torch.cat(outputs, dim=2).transpose(1, 2)


def pick(x, places):
    """The tokens at these places: [1, heads, T, d] -> [1, heads, K, d], or [T, H] -> [K, H]."""
    if x.dim() == 2:
        return Pick.apply(x, places)
    # A CPU takes a third of the time with all heads of a token at once.
    heads = x.shape[1]
    tokens = Pick.apply(x.transpose(1, 2).flatten(2)[0], places)
    return tokens[None].unflatten(2, (heads, -1)).transpose(1, 2)


class Pick(torch.autograd.Function):
    """index_select of rows, whose gradient is summed in float32: hundreds of sequences may share a token."""

    @staticmethod
    def forward(ctx, x, places):
        ctx.save_for_backward(places)
        ctx.length = len(x)
        return x.index_select(0, places)

    @staticmethod
    def backward(ctx, gradient):
        (places,) = ctx.saved_tensors
        wide = torch.promote_types(gradient.dtype, torch.float32)
        total = gradient.new_zeros(ctx.length, gradient.shape[1], dtype=wide)
        return total.index_add_(0, places, gradient.to(wide)).to(gradient.dtype), None


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
