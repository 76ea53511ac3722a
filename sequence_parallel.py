"""
Rows cut over ranks (Ulysses, https://arxiv.org/abs/2309.14509), for sequences too long for one device.

With sequence_parallel_size=P each of P neighbouring ranks holds 1 / P of the tokens of a row and computes all
but the attention for them. Attention needs the whole row, so before it the ranks exchange tokens for heads:
each then has all tokens, of 1 / P of the heads. After it they change back.

A loss by sequence needs all tokens of a sequence. So one rank of the group, the leader, gets the logprobs or
values of all parts: the rank whose sequences the row holds. There they are the [C] of any micro-batch, and on
the others C = 0. Losses and scripts need to know nothing of the cut.
"""
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist


@dataclass
class Cut:
    """How a micro-batch is cut over a group of ranks."""
    group: dist.ProcessGroup
    leader: int                 # the rank, in the group, whose sequences these are
    count: int                  # C on the leader
    mine: torch.Tensor          # which of these C are predicted in this rank's part


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


def all_to_all(x, group, split, join):
    # Each rank keeps a part of the dimension `split` and gets all parts of the dimension `join`.
    parts = torch.stack(x.chunk(group.size(), split))
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return torch.cat(received.unbind(), join)
