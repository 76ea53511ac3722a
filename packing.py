"""
Packed rows: several sequences in one row of tokens, without padding.

A sequence is a rollout: a prompt, then the tokens that the policy sampled, in one span or in several with
other tokens between them. A micro-batch is one row of T tokens that holds S sequences, and attention stays
inside each of them. What several sequences begin with stands in the row once, for example the prompt of a
group: they have the same hidden states there, and each adds to the row only what follows. Of prompt 5 6 with
the completions 7 8 and 9 8, which both were sampled:

    input_ids       5 6 7 9     without the last token of each, from which nothing is predicted
    position_ids    0 1 2 2
    segments        5 6 7 see themselves, 9 sees 5 6 9
    targets         7 8 9 8
    index           1 2 1 3     where these are predicted

Per-token tensors hold sampled tokens only, flat, [C], in the order of the sequences: entry c is about sampled
token c and is read from the hidden state one place before it. Prompts and inserted tokens are never in them,
so there is no mask that could be wrong.

With sequence_parallel_size=P a row is cut, and each of P ranks has T / P of its tokens. Logprobs and
values go to the rank whose sequences they are of; on the others C = 0 (sequence_parallel.py).

Layers that carry a state from token to token, such as Mamba's, would carry it into the next sequence of a
row. For models that have them each sequence gets a row of its own: S rows, padded at the end to the longest.
"""
from dataclasses import dataclass, fields, is_dataclass, replace

import numpy as np
import torch

import ranks
from attention import Segments
from sequence_parallel import Cut, Joined, cut_over


@dataclass
class MicroBatch:
    # what the network reads, and where it predicts
    input_ids: torch.Tensor      # [1, T], of a row that is cut [1, T / P]; or [S, longest], a row for each
    position_ids: torch.Tensor   # the same shape: each token's place in its sequence, from 0
    segments: Segments           # what its tokens attend to
    index: torch.Tensor          # [C] where each sampled token is predicted: one place before it
    targets: torch.Tensor        # [C] the sampled tokens
    # whose tokens these are
    sequences: list              # which of all sequences are in it, in order
    rows: torch.Tensor           # [S] `sequences` as a tensor
    owner: torch.Tensor          # [C] which of this micro-batch's sequences each sampled token belongs to
    lengths: list                # S: sampled tokens of each sequence; they sum to C
    cut: Cut = None              # of a row that is cut, where index and targets are those of this rank's part

    def flat(self, tensors, dtype=torch.float32):
        """Per-token tensors by sequence (a dict or list of [len]) -> those of this micro-batch, flat [C].

        dtype: of the empty tensor that an idle micro-batch gets.
        """
        none = torch.empty(0, dtype=dtype, device=self.index.device)
        return torch.cat([tensors[s] for s in self.sequences] or [none])

    def spread(self, values):
        """One value per sequence, for all sequences [N] -> that value at each sampled token here, [C]."""
        return values[self.rows][self.owner]

    def mean(self, values):
        """Mean of per-token values over their sequence, at each of its tokens; [C] -> [C], with gradient."""
        sums = lambda x: x.new_zeros(len(self.sequences)).index_add(0, self.owner, x)
        return (sums(values) / sums(torch.ones_like(values)).clamp(min=1))[self.owner]

    def split(self, flat):
        """Per-token values of this micro-batch [C] -> {sequence: its [len] values}."""
        return dict(zip(self.sequences, flat.split(self.lengths)))

    def joined(self, values):
        """What a network computed at `index` -> that of all parts of the row, [C], with gradient."""
        return Joined.apply(values, self.cut) if self.cut else values


# ---------------------------------------------------------------- shared prefixes

def prefix_order(rollouts, chosen):
    """Sort rollouts[s] for s in chosen so that those that begin with the same tokens are neighbours.

    Returns a list of (s, size, shared). size: its tokens that are computed, all before the last sampled one.
    shared: how many of these, from the first on, are also those of the rollout before it in the list.
    """
    ids = {s: rollouts[s].ids[:rollouts[s].spans[-1, 1] - 1] for s in chosen}
    order = sorted(chosen, key=lambda s: ids[s].tobytes())
    shared = [common_prefix(ids[before], ids[s]) for before, s in zip(order, order[1:])]
    return [(s, len(ids[s]), common) for s, common in zip(order, [0, *shared])]


def common_prefix(a, b):
    """How many tokens two arrays have in common at their beginning."""
    length = min(len(a), len(b))
    different = a[:length] != b[:length]
    return int(different.argmax()) if different.any() else length


def num_tokens(stretch):
    """How many tokens a stretch of prefix_order's list makes in a row: the first all, others what is new."""
    return sum(size - shared for _, size, shared in stretch) + (stretch[0][2] if stretch else 0)


def deal(rollouts, chosen, num_ranks):
    """Deal rollouts[s] for s in chosen to num_ranks lists of about equally many tokens, largest first.

    Each group, the rollouts of one prompt, goes to the rank that has the fewest tokens so far (Graham 1969,
    LPT). The same is tried with halves of groups, with quarters and so on, each with a copy of the prompt, and
    of all these ways the one is taken whose heaviest rank has the fewest tokens to compute. Where each rank
    has many rollouts that rank is within a few percent of the mean.
    Example: groups of 9, 5, 4, 3 tokens for 2 ranks -> 9 + 3 and 5 + 4.
    """
    if num_ranks == 1:
        return [list(chosen)]
    groups = []
    for s, size, shared in prefix_order(rollouts, chosen):
        if shared < rollouts[s].spans[0, 0]:                    # not even all of its prompt
            groups.append([])
        groups[-1].append((s, size, shared))
    most, lightest, best = max(map(len, groups), default=1), None, None
    while True:
        pieces = [group[i:i + most] for group in groups for i in range(0, len(group), most)]
        shares, loads = [[] for _ in range(num_ranks)], [0] * num_ranks
        for piece in sorted(pieces, key=num_tokens, reverse=True):
            least = loads.index(min(loads))
            shares[least] += [s for s, _, _ in piece]
            loads[least] += num_tokens(piece)
        if best is None or max(loads) < lightest:
            lightest, best = max(loads), shares
        if most == 1:
            return best
        most = (most + 1) // 2


# ---------------------------------------------------------------- rows

def pack(rollouts, chosen, token_budget, device, packed=True, multiple=1):
    """Pack rollouts[s] for s in chosen (anything with ids, spans and logprobs) into few MicroBatches.

    Each computes at most token_budget tokens. Of those that a sequence fits it goes to the one that has most of
    what it begins with, or to the first where none has any of it. The tokens inside the spans are the targets,
    the EOS among them even where the pad token has the same id; no other token is. packed=False
    gives each sequence a row of its own, whose padding counts in token_budget. multiple: a number that has to
    divide T. Raises ValueError for a sequence that is longer than token_budget. 256 sequences take 8 ms.
    """
    order = prefix_order(rollouts, chosen)
    if not packed:                                              # the longest first, and nothing is shared
        order = [(s, size, 0) for s, size, _ in sorted(order, key=lambda entry: entry[1], reverse=True)]
    # has: how many of the tokens that the sequence at hand begins with each of them has.
    batches, room, has = [], [], []
    for s, size, shared in order:
        if size > token_budget:
            raise ValueError(f"a sequence of {size} tokens does not fit token_budget={token_budget}")
        has = [min(before, shared) for before in has]
        # In rows of their own all take as much room as the first, which is the longest.
        needs = [size - h if packed else members[0][1] for members, h in zip(batches, has)]
        fits = [b for b in range(len(batches)) if needs[b] <= room[b]]
        best = max(fits, key=lambda b: has[b], default=len(batches))
        if not fits:
            batches, room, has, needs = batches + [[]], room + [token_budget], has + [0], needs + [size]
        batches[best].append((s, size, has[best]))
        room[best] -= needs[best]
        has[best] = size
    return [on_device(micro_batch(rollouts, members, packed, multiple), device) for members in batches]


def micro_batch(rollouts, members, packed, multiple):
    # The MicroBatch of these (s, size, shared), on the CPU.
    ids, positions, paths, index, targets, T, path = [], [], [], [], [], 0, np.arange(0)
    longest = max(size for _, size, _ in members)
    for s, size, shared in members:
        r, end = rollouts[s], size if packed else longest
        # path: where in the row its tokens stand, those that it shares where they stand for the one before.
        path = np.concatenate([path[:shared], np.arange(T, T + end - shared)])
        # A token is predicted one place before itself.
        index += [path[start - 1:stop - 1] for start, stop in r.spans]
        targets += [r.ids[start:stop] for start, stop in r.spans]
        if end > shared:                                        # otherwise it adds nothing to the row
            ids.append(np.pad(r.ids[shared:size], (0, end - size)))
            positions.append(np.arange(shared, end))
            paths.append(path)
            T += end - shared
    if padding := -T % multiple:                                # a segment from which nothing is read
        ids.append(np.zeros(padding))
        positions.append(np.arange(padding))
        paths.append(np.arange(T, T + padding))
    segments = (Segments.of([len(part) for part in ids], paths) if packed else
                Segments.of([longest], [np.arange(longest)]))
    tensor = lambda parts: torch.from_numpy(np.concatenate(parts).astype(np.int64))
    row = lambda parts: tensor(parts).view(1 if packed else len(members), -1)
    sequences = [s for s, _, _ in members]
    lengths = [len(rollouts[s].logprobs) for s in sequences]
    return MicroBatch(row(ids), row(positions), segments, tensor(index), tensor(targets), sequences,
                      torch.tensor(sequences), tensor([np.repeat(np.arange(len(members)), lengths)]), lengths)


def idle(device, T=1):
    # A MicroBatch that predicts nothing, C = 0: whatever is made of it has the value 0 and a gradient of 0.
    zeros, none = torch.zeros(1, T, dtype=torch.long), torch.empty(0, dtype=torch.long)
    segments = Segments.of([T], [np.arange(T)])
    return on_device(MicroBatch(zeros, zeros, segments, none, none, [], none, none, []), device)


def on_device(batch, device):
    # A dataclass with all its tensors there, those of dataclasses in it as well.
    move = lambda x: x.to(device) if torch.is_tensor(x) else on_device(x, device) if is_dataclass(x) else x
    return replace(batch, **{field.name: move(getattr(batch, field.name)) for field in fields(batch)})


def micro_batches(network, rollouts, chosen, token_budget):
    """The MicroBatches of the chosen rollouts for a Policy or Critic, the same number on every rank.

    The network is sharded, so its forward and backward are collectives. A rank that has fewer MicroBatches
    than another therefore also gets idle ones that predict nothing: each of their per-token tensors is empty.
    Where rows are cut over P ranks, these compute each other's MicroBatches in turn. A collective itself.
    """
    device = next(network.parameters()).device
    group = ranks.sequence_group if network.packed else None
    P = group.size() if group else 1
    batches = pack(rollouts, chosen, token_budget, "cpu", network.packed, multiple=P)
    # At least one, so that every rank has a gradient, even if it is 0.
    turns = max(1, int(ranks.largest([len(batches)])[0]))
    batches += [idle("cpu", T=P)] * (turns - len(batches))
    if group:
        batches = [part for batch in batches for part in cut_over(group, batch)]
    return [on_device(batch, device) for batch in batches]
