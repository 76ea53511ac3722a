"""
Packed rows: several sequences in one row of tokens, without padding.

A sequence is a rollout: a prompt, then the tokens that the policy sampled, in one span or in several with
other tokens between them. A micro-batch is one row of T tokens that holds S sequences, and attention stays
inside each of them. What several sequences begin with stands in the row once, for example the prompt of a
group: they have the same hidden states there, and each adds to the row only what follows. Of prompt 5 6 with
the completions 7 8 and 9 8, which both were sampled:

    input_ids       5 6 7 9     from its last token a sequence predicts nothing, so that token is left out
    position_ids    0 1 2 2
    attention       5 6 7 are one segment and see themselves; 9 is another and sees 5 6 9
    targets         7 8 9 8
    index           1 2 1 3     the places where they are predicted

Per-token tensors hold sampled tokens only, flat, [C], in the order of the sequences: entry c is about sampled
token c and is read from the hidden state one place before it. Prompts and inserted tokens are never in them,
so there is no mask that could be wrong.

With sequence_parallel_size=P a row is cut, and each of P ranks has T / P of its tokens. The micro-batch
predicts something on the rank whose sequences they are, which gets the logprobs or values of all parts; on the
others C = 0.

Layers that carry a state from token to token, such as Mamba's, would carry it into the next sequence of a
row. For models that have them each sequence gets a row of its own: S rows, padded at the end to the longest.
"""
from dataclasses import dataclass, fields, is_dataclass, replace

import numpy as np
import torch

import ranks
from attention import Segments
from sequence_parallel import Joined, cut_over


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
    cut: object = None           # of a row that is cut, a Cut: index and targets are then of this rank's part

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
        """What the network computed at `index` -> [C] of all parts of the row, with gradient. A collective."""
        return Joined.apply(values, self.cut) if self.cut else values


# ---------------------------------------------------------------- shared prefixes

def prefix_order(rollouts, chosen):
    """Sort rollouts[s] for s in chosen so that those that begin with the same tokens are neighbours.

    Returns a list of (s, size, shared): the tokens of it that are computed, which are those before the last
    sampled one, and how many of them, from the first on, it has in common with the one before.
    """
    ids = {s: rollouts[s].ids[:rollouts[s].spans[-1, 1] - 1] for s in chosen}
    order = sorted(chosen, key=lambda s: ids[s].tobytes())
    return [(s, len(ids[s]), common_prefix(ids[before], ids[s]) if i else 0)
            for i, (before, s) in enumerate(zip([None, *order], order))]


def common_prefix(a, b):
    """How many tokens two arrays have in common at their beginning."""
    length = min(len(a), len(b))
    different = a[:length] != b[:length]
    return int(different.argmax()) if different.any() else length


def num_tokens(stretch):
    """How many tokens a stretch of prefix_order's list takes as a row: of the first all, of others what is new."""
    return sum(size - shared for _, size, shared in stretch) + (stretch[0][2] if stretch else 0)


def deal(rollouts, chosen, num_ranks):
    """Deal rollouts[s] for s in chosen to num_ranks lists of about equally many tokens, largest first.

    Each group, the rollouts of one prompt, goes to the rank that has the fewest tokens so far (Graham 1969,
    LPT). Where the groups are too few or too different for that, they are cut into halves, quarters and so
    on, each with a copy of the prompt, and of all these ways the one is taken whose heaviest rank has the
    fewest tokens to compute. It has at most 4/3 of the best possible share, and is within a few percent of the
    mean where each rank has many.
    Example: groups of 9, 5, 4, 3 tokens for 2 ranks -> 9 + 3 and 5 + 4.
    """
    if num_ranks == 1:
        return [list(chosen)]
    groups = []
    for entry in prefix_order(rollouts, chosen):
        if entry[2] < rollouts[entry[0]].spans[0, 0]:           # it shares less than its prompt
            groups.append([])
        groups[-1].append(entry)
    most, best = max(map(len, groups), default=1), None
    while True:
        pieces = [group[i:i + most] for group in groups for i in range(0, len(group), most)]
        shares, loads = [[] for _ in range(num_ranks)], [0] * num_ranks
        for piece in sorted(pieces, key=num_tokens, reverse=True):
            least = loads.index(min(loads))
            shares[least] += [s for s, *_ in piece]
            loads[least] += num_tokens(piece)
        if best is None or max(loads) < best[0]:
            best = max(loads), shares
        if most == 1:
            return best[1]
        most = (most + 1) // 2


# ---------------------------------------------------------------- rows

def pack(rollouts, chosen, token_budget, device, packed=True, multiple=1):
    """Pack rollouts[s] for s in chosen (anything with ids, spans and logprobs) into few MicroBatches.

    Each computes at most token_budget tokens. A sequence goes to the one that already has most of what it
    begins with, of those that it fits; otherwise to the first that it fits. The tokens inside the spans are
    the targets, the EOS among them even where the pad token has the same id; no other token is. packed=False
    gives each sequence a row of its own, whose padding counts in token_budget. multiple: of what T has to be a
    multiple. Raises ValueError for a sequence that is longer than token_budget.
    """
    order = prefix_order(rollouts, chosen)
    if not packed:                                              # the longest first, and nothing is shared
        order = [(s, size, 0) for s, size, _ in sorted(order, key=lambda entry: entry[1], reverse=True)]
    bins, room, present = [], [], []        # present: how many tokens of the sequence at hand each has already
    for s, size, shared in order:
        if size > token_budget:
            raise ValueError(f"a sequence of {size} tokens does not fit token_budget={token_budget}")
        present = [min(known, shared) for known in present]
        # In rows of their own all take as much room as the first, which is the longest.
        taken = [size - known if packed else others[0][1] for others, known in zip(bins, present)]
        fits = [b for b in range(len(bins)) if taken[b] <= room[b]]
        if not fits:
            fits = [len(bins)]
            bins.append([])
            room.append(token_budget)
            present.append(0)
            taken.append(size)
        best = max(fits, key=lambda b: present[b])
        bins[best].append((s, size, present[best]))
        room[best] -= taken[best]
        present[best] = size
    return [on(device, micro_batch(rollouts, members, packed, multiple)) for members in bins]


def micro_batch(rollouts, members, packed, multiple):
    # The MicroBatch of these (s, size, shared), on the CPU.
    longest = max(size for _, size, _ in members)
    ids, positions, paths, index, targets, T, path = [], [], [], [], [], 0, np.arange(0)
    for s, size, shared in members:
        r, end = rollouts[s], size if packed else longest
        # path: where in the row each token of this sequence stands.
        path = np.concatenate([path[:shared], np.arange(T, T + end - shared)])
        # A token is predicted one place before itself.
        index += [path[start - 1:stop - 1] for start, stop in r.spans]
        targets += [r.ids[start:stop] for start, stop in r.spans]
        if end > shared:
            ids.append(np.pad(r.ids[shared:size], (0, end - size)))
            positions.append(np.arange(shared, end))
            paths.append(path)
            T += end - shared
    if padding := -T % multiple:                                # a segment that nobody reads
        ids.append(np.zeros(padding))
        positions.append(np.arange(padding))
        paths.append(np.arange(T, T + padding))
    sequences, lengths = zip(*((s, len(rollouts[s].logprobs)) for s, *_ in members))
    rows = 1 if packed else len(members)
    segments = (Segments.of([len(part) for part in ids], paths) if packed else
                Segments.of([longest], [np.arange(longest)]))
    return MicroBatch(
        joined(ids).view(rows, -1), joined(positions).view(rows, -1), segments, joined(index), joined(targets),
        list(sequences), torch.tensor(sequences), joined([np.repeat(np.arange(len(members)), lengths)]),
        list(lengths))


def joined(arrays):
    return torch.from_numpy(np.concatenate(arrays).astype(np.int64))


def on(device, batch):
    # A dataclass, with all its tensors on the device.
    move = lambda x: x.to(device) if torch.is_tensor(x) else on(device, x) if is_dataclass(x) else x
    return replace(batch, **{field.name: move(getattr(batch, field.name)) for field in fields(batch)})


def idle(device, T=1):
    # A MicroBatch that predicts nothing, C = 0: whatever is made of it has the value 0 and a gradient of 0.
    zero, none = torch.zeros(1, T, dtype=torch.long), torch.empty(0, dtype=torch.long)
    return on(device, MicroBatch(zero, zero, Segments.of([T], [np.arange(T)]), none, none, [], none, none, []))


def micro_batches(network, rollouts, chosen, token_budget):
    """The MicroBatches of the chosen rollouts for a Policy or Critic, the same number on every rank.

    The network is sharded, so its forward and backward are collectives. A rank that has fewer MicroBatches
    than another therefore also gets idle ones that predict nothing: each of their per-token tensors is empty.
    Where rows are cut over P ranks, these compute each other's in turn. A collective itself.
    """
    device = next(network.parameters()).device
    group = ranks.sequence_group if network.packed else None
    multiple = group.size() if group else 1
    batches = pack(rollouts, chosen, token_budget, "cpu", network.packed, multiple)
    # At least one, so that every rank has a gradient, even if it is 0.
    turns = max(1, int(ranks.largest([len(batches)])[0]))
    batches += [idle("cpu", multiple)] * (turns - len(batches))
    if group:
        batches = [part for batch in batches for part in cut_over(group, batch)]
    return [on(device, batch) for batch in batches]
