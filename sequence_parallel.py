"""
Rows cut over ranks (Ulysses, https://arxiv.org/abs/2309.14509), for sequences too long for one device.

With sequence_parallel_size=P each of P neighbouring ranks has 1 / P of the tokens of a row, and computes all
that concerns a token by itself. For attention, which needs the whole row, they exchange tokens for heads:
each then has all tokens of 1 / P of the heads. Logprobs and values go to one of the ranks, the leader, whose
sequences the row holds. There they are the [C] of any micro-batch; on the other ranks C = 0.
"""
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist


@dataclass
class Cut:
    """How a micro-batch is cut over a group of ranks."""
    group: dist.ProcessGroup
    leader: int                 # the rank of the group that gets what is computed of all parts
    count: int                  # C on the leader
    mine: torch.Tensor          # which of these C are predicted in this rank's part


def cut_over(group, batch):
    """The MicroBatches of all ranks of a group, each cut over all of them.

    batch: this rank's, on the CPU; the group's size divides its T. A collective of the group.
    """
    batches = [None] * group.size()
    dist.all_gather_object(batches, batch, group)
    return [part(batch, leader, group) for leader, batch in enumerate(batches)]


def part(batch, leader, group):
    # This rank's part of the leader's MicroBatch.
    here = group.rank()
    piece = lambda row: row.chunk(group.size(), 1)[here]                            # [1, T] -> [1, T / P]
    width = batch.input_ids.shape[1] // group.size()
    mine = (batch.index // width == here).nonzero()[:, 0]
    none = batch.index[:0]
    others = {} if here == leader else {"sequences": [], "rows": none, "owner": none, "lengths": []}
    return replace(
        batch, input_ids=piece(batch.input_ids), position_ids=piece(batch.position_ids),
        segments=replace(batch.segments, group=group), index=batch.index[mine] - here * width,
        targets=batch.targets[mine], cut=Cut(group, leader, len(batch.index), mine), **others)


class Joined(torch.autograd.Function):
    """Per-token values of this rank's part of a row -> those of all parts, [C]; on the leader, elsewhere [0].

    Its gradient goes back to the ranks that computed them. A collective of the group.
    """

    @staticmethod
    def forward(ctx, values, cut):
        ctx.cut = cut
        joined = values.new_zeros(cut.count, *values.shape[1:])
        joined[cut.mine] = values
        dist.all_reduce(joined, group=cut.group)
        return joined if cut.group.rank() == cut.leader else joined.new_empty(0)

    @staticmethod
    def backward(ctx, gradient):
        cut = ctx.cut
        joined = gradient.contiguous() if cut.group.rank() == cut.leader else gradient.new_empty(cut.count)
        dist.broadcast(joined, group=cut.group, group_src=cut.leader)
        return joined[cut.mine], None


class Exchange(torch.autograd.Function):
    """[1, a, b / P, ...] on each of P ranks -> [1, a / P, b, ...]: heads and tokens, or tokens and heads.

    Its gradient is the same exchange backwards. A collective of the group.
    """

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return exchange(x, group, 1, 2)

    @staticmethod
    def backward(ctx, gradient):
        return exchange(gradient, ctx.group, 2, 1), None


def exchange(x, group, split, join):
    # Each rank keeps a part of the dimension `split`, and gets all parts of the dimension `join`.
    parts = torch.stack(x.chunk(group.size(), split))
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return torch.cat(received.unbind(), join)
