"""
Micro-batches that are cut over ranks, for sequences that are too long for one device. Runs without
sequence_parallel_size do not open this file.

This is Ulysses, https://arxiv.org/abs/2309.14509. With sequence_parallel_size=P each of P neighbouring ranks
holds 1 / P of the tokens of a micro-batch and computes everything except attention for them. Attention needs
all tokens, so before it the ranks exchange tokens for heads: each rank then has all tokens for 1 / P of the
heads. After attention they exchange them back. Some losses need all tokens of a sequence. The rank whose
sequences the micro-batch holds is therefore the leader of its group: it gets the logprobs or values of all
parts, [C] as for any micro-batch, and on the other ranks C = 0. Losses and scripts do not notice the cut.

    check_ranks     refuses a model whose micro-batches cannot be cut
    cut_over        cuts the micro-batches of a group of ranks
    Cut             how one is cut, and what the ranks exchange
"""
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_reduce, all_to_all_single_autograd

from configurator import InputError


def check_ranks(label, config, packed, P):
    """Raise InputError if P ranks cannot share the micro-batches of a model with this text config.

    packed: whether a micro-batch of the model may hold several sequences. label: the message's beginning.
    """
    if not packed:
        raise InputError(f"{label}: sequence_parallel_size={P} cannot be used: layers other than attention "
                         "read earlier tokens, and on each rank they would see only its part of a row")
    for layer in getattr(config, "per_layer_config", [config]):         # layers may differ, as in Gemma 4
        for key in ("num_attention_heads", "num_key_value_heads"):
            heads = getattr(layer, key, None) or P
            if heads % P:
                raise InputError(f"{label}: sequence_parallel_size={P} does not divide {key}={heads}")


def cut_over(group, batch):
    """Gather the MicroBatches of a group's ranks and return this rank's part of each, in the order of ranks.

    batch: this rank's MicroBatch, on the CPU. The group's size divides its T. A collective of the group.
    """
    batches = [None] * group.size()
    dist.all_gather_object(batches, batch, group)
    return [part(batch, leader, group) for leader, batch in enumerate(batches)]


def part(batch, leader, group):
    # Returns this rank's part of the leader's MicroBatch.
    width = batch.input_ids.shape[1] // group.size()
    start = group.rank() * width
    stop = start + width
    indices = ((start <= batch.index) & (batch.index < stop)).nonzero()[:, 0]
    share = replace(batch, cut=Cut(group, leader, len(batch.index), indices))
    share.input_ids = batch.input_ids[:, start:stop]
    share.position_ids = batch.position_ids[:, start:stop]
    share.index = batch.index[indices] - start
    share.targets = batch.targets[indices]
    if batch.kept is not None:
        share.kept = batch.kept[indices]
    if group.rank() != leader:
        share.sequences = []
    return share


@dataclass
class Cut:
    """How a micro-batch is cut over a group of P ranks."""
    group: dist.ProcessGroup
    leader: int                 # the rank within the group whose sequences these are
    count: int                  # C on the leader
    indices: torch.Tensor       # which of these C tokens are predicted in this rank's part, on the CPU

    def exchange(self, x):
        """Exchange tokens for heads: each rank gives its [1, a, b / P, d] and gets [1, a / P, b, d].

        Before attention a are the heads and b the tokens. After attention a are the tokens and b the heads.
        The gradient is exchanged back. A collective of the group.
        """
        sent = torch.stack(x.chunk(self.group.size(), 1))                           # a part for each rank
        received = all_to_all_single_autograd(sent, None, None, self.group)         # a part from each rank
        return torch.cat(received.unbind(), 2)

    def part_of(self, heads):
        """Return the entries of this rank's heads, from a tensor with an entry for each head."""
        return heads.chunk(self.group.size())[self.group.rank()]

    def join(self, values):
        """Join values that each rank computed for its part: [C] on the leader, [0] on other ranks.

        The gradient goes back to the rank that computed a value. A collective of the group.
        """
        joined = values.new_zeros(self.count, *values.shape[1:])
        joined[self.indices] = values
        joined = all_reduce(joined, "sum", self.group)
        if self.group.rank() != self.leader:
            return joined[:0]
        return joined
