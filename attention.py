"""
Attention for packed rows (packing.py): a sequence sees itself and nothing else in the row.

Hugging Face models call packed_attention by the name "packed" in place of their own. It is PyTorch's CUDA
kernel for sequences of several lengths where kernel_takes says so, otherwise a loop over the sequences.
"""
import inspect
import math
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention import varlen
from transformers import AttentionInterface

from packing import Segments


# PyTorch 2.11's kernel takes fewer heads of key and value than of query by default; later ones need
# enable_gqa.
GROUPED = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters else {}


def kernel_takes(query, value):
    """Whether PyTorch's CUDA kernel for sequences of several lengths computes such attention."""
    head = query.shape[-1]
    return (query.is_cuda and len(query) == 1 and query.dtype in (torch.bfloat16, torch.float16)
            and head % 8 == 0 and head <= 256 and value.shape[-1] == head
            and torch.cuda.get_device_capability(query.device) >= (8, 0))


def packed_attention(module, query, key, value, attention_mask, scaling, segments=None, cut=None,
                     sliding_window=None, softcap=None, s_aux=None, position_ids=None, **others):
    """Causal attention inside each sequence of a packed row; query [1, heads, T, d] -> [1, T, heads, d].

    Several rows have the same segments; without any each row is one sequence. sliding_window: how many
    tokens a token sees, counting itself. softcap, s_aux ([heads], sinks): see explicit_attention. The work
    grows with the pairs of tokens of which one sees the other: no T x T mask exists. Of a row cut over P
    ranks it takes [1, heads, T / P, d] and returns [1, T / P, heads, d]. Raises ValueError where P does not
    divide the heads, and for any other tensor.
    """
    for name, given in {"attention_mask": attention_mask, **others}.items():
        if isinstance(given, torch.Tensor):                     # which is the model's own, even if a mask
            raise ValueError(f"its attention depends on {name}, which is not supported")
    segments = segments or Segments([query.shape[2]], [np.arange(query.shape[2])]).to(query.device)
    if cut is not None:
        query, key, value = exchanged(query, key, value, cut.group)                     # [1, heads / P, T, d]
        s_aux = None if s_aux is None else s_aux.chunk(cut.group.size())[cut.group.rank()]
    if segments.places is not None:
        key, value = (pick(x, segments.places) for x in (key, value))                       # [1, heads, K, d]
    window = sliding_window or math.inf
    if softcap is None and s_aux is None and kernel_takes(query, value):
        output = attend_by_kernel(query, key, value, scaling, segments, window)
    else:
        output = attend_in_turn(query, key, value, scaling, segments, window, softcap, s_aux)
    return output if cut is None else Exchange.apply(output, cut.group), None


def attend_by_kernel(query, key, value, scaling, segments, window):
    # All segments in one call of PyTorch's kernel.
    rows = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))                      # [T, heads, d]
    # window_size: how many tokens before and after are seen; -1 is all. Where a segment has fewer tokens than
    # keys, the kernel lets its last token see the last key.
    longest = max(segments.key_sizes)
    before = window - 1 if window < longest else -1
    return varlen.varlen_attn(*rows, segments.offsets, segments.key_offsets, max(segments.sizes), longest,
                              scale=scaling, window_size=(before, 0), **GROUPED)[None]


def attend_in_turn(query, key, value, scaling, segments, window, softcap, sinks):
    # The segments one after the other.
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
    tokens = Pick.apply(x.transpose(1, 2).flatten(2)[0], places)
    return tokens[None].unflatten(2, (x.shape[1], -1)).transpose(1, 2)


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


# ---------------------------------------------------------------- rows cut over ranks
# Ulysses, https://arxiv.org/abs/2309.14509, for sequences too long for one device. With
# sequence_parallel_size=P each of P neighbouring ranks holds 1 / P of the tokens of a row and computes
# everything but attention for them. Attention needs the whole row, so before it the ranks exchange tokens for
# heads: each then has all tokens, of 1 / P of the heads. After it they change back.
# A loss by sequence needs all tokens of a sequence. So the leader, which is the rank of the group whose
# sequences the row holds, gets the logprobs or values of all parts: on it they are the [C] of any
# micro-batch, and on the other ranks C = 0. Losses and scripts need to know nothing of the cut.

@dataclass
class Cut:
    """How a micro-batch is cut over a group of ranks."""
    group: dist.ProcessGroup
    leader: int                 # the rank, in the group, whose sequences these are
    count: int                  # C on the leader
    mine: torch.Tensor          # which of these C are predicted in this rank's part

    def to(self, device):
        """A copy with its tensor on the device."""
        return replace(self, mine=self.mine.to(device))


def cut_over(group, batch):
    """Gather the MicroBatch of each rank of a group; return this rank's part of each, in the order of ranks.

    batch: this rank's, on the CPU; the group's size divides its T. A collective of the group.
    """
    batches = [None] * group.size()
    dist.all_gather_object(batches, batch, group)
    return [part(batch, leader, group) for leader, batch in enumerate(batches)]


def part(batch, leader, group):
    # This rank's part of the leader's MicroBatch.
    here, width = group.rank(), batch.input_ids.shape[1] // group.size()
    of_row = lambda row: row.chunk(group.size(), 1)[here]                           # [1, T] -> [1, T / P]
    mine = (batch.index // width == here).nonzero()[:, 0]
    none = batch.index[:0]
    emptied = {} if here == leader else {"sequences": [], "numbers": none, "owner": none, "lengths": []}
    return replace(batch, input_ids=of_row(batch.input_ids), position_ids=of_row(batch.position_ids),
                   index=batch.index[mine] - here * width, targets=batch.targets[mine],
                   cut=Cut(group, leader, len(batch.index), mine), **emptied)


class Joined(torch.autograd.Function):
    """What was computed for this rank's part of a row -> that of all parts, [C] on the leader, elsewhere [0].

    Its gradient goes back to the ranks that computed it. A collective of the group.
    """

    @staticmethod
    def forward(ctx, values, cut):
        ctx.cut, ctx.shape = cut, (cut.count, *values.shape[1:])
        joined = values.new_zeros(ctx.shape)
        joined[cut.mine] = values
        dist.all_reduce(joined, group=cut.group)
        return joined if cut.group.rank() == cut.leader else joined[:0].clone()

    @staticmethod
    def backward(ctx, gradient):
        cut = ctx.cut
        joined = gradient.contiguous() if cut.group.rank() == cut.leader else gradient.new_empty(ctx.shape)
        dist.broadcast(joined, group=cut.group, group_src=cut.leader)
        return joined[cut.mine], None


join = Joined.apply             # (values, cut) -> the values of the whole row


class Exchange(torch.autograd.Function):
    """All-to-all of [1, a, b / P, d] on each of P ranks -> [1, a / P, b, d].

    Heads and tokens are a and b before attention, tokens and heads after it. The gradient goes the same way
    back. A collective of the group.
    """

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return all_to_all(x, group, 1, 2)

    @staticmethod
    def backward(ctx, gradient):
        return all_to_all(gradient, ctx.group, 2, 1), None


def exchanged(query, key, value, group):
    # All tokens of a row, of 1 / P of the heads, for this rank's part of the row with all heads.
    P = group.size()
    if query.shape[1] % P or key.shape[1] % P:
        raise ValueError(f"sequence_parallel_size={P} does not divide its {query.shape[1]} heads of queries "
                         f"and {key.shape[1]} of keys")
    return [Exchange.apply(x, group) for x in (query, key, value)]


def all_to_all(x, group, split, join):
    # Each rank keeps a part of the dimension `split` and gets all parts of the dimension `join`.
    parts = torch.stack(x.chunk(group.size(), split))
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return torch.cat(received.unbind(), join)


# No mask function is registered with it, so transformers makes no mask.
AttentionInterface.register("packed", packed_attention)
