"""
Packed rows: several sequences in one row of tokens, without padding.

A sequence is a rollout: a prompt, then the tokens that the policy sampled, in one span or in several with
other tokens between them. A micro-batch is one row of T tokens that holds S sequences, and attention stays
inside each of them. If several sequences begin with the same tokens, such as the prompt of a group, the row
holds these tokens only once, because a hidden state depends only on the tokens up to its own. Each sequence
adds only the tokens that follow. For example, this is the row of the prompt 5 6 with two completions, 7 8 and
9 8:

    input_ids       5 6 7 9     the last token of each sequence is left out: nothing is predicted from it
    position_ids    0 1 2 2
    attention       causal in 5 6 7 and in 5 6 9; 7 and 9 do not see each other
    targets         7 8 9 8     the sampled tokens
    index           1 2 1 3     the place in the row from which each target is predicted

Per-token tensors are flat, [C], and hold only sampled tokens, in the order of the sequences. Entry c belongs
to sampled token c and is computed from the hidden state one place before it. Prompts and inserted tokens are
never in them, so there is no mask that could be wrong.

With sequence_parallel_size=P a row is cut, and each of P ranks holds T / P of its tokens. The rank that the
sequences belong to gets all C logprobs or values; on the other ranks C = 0 (attention.py).

Layers that carry a state from token to token, such as Mamba's, would carry it into the next sequence of a
row. In models with such layers each sequence gets a row of its own: S rows, padded at the end to the longest.
"""
import math
from dataclasses import dataclass, replace
from operator import attrgetter, itemgetter

import numpy as np
import torch


@dataclass
class MicroBatch:
    # what the network reads, and where it predicts
    input_ids: torch.Tensor      # [1, T]; or [S, longest], a row for each sequence
    position_ids: torch.Tensor   # the same shape: each token's place in its sequence, from 0
    segments: object             # Segments: which tokens attend to which
    index: torch.Tensor          # [C] the place from which each sampled token is predicted
    targets: torch.Tensor        # [C] the sampled tokens
    # which sequences the tokens belong to
    sequences: list              # S numbers: the rollouts in this micro-batch, in order
    lengths: list                # S numbers: how many sampled tokens each sequence has; they sum to C
    # An attention.Cut if this rank has only a part of the row. Then input_ids and position_ids are
    # [1, T / P], and index and targets hold only what is predicted in this part, about C / P entries.
    cut: object = None

    def flat(self, values):
        """A tensor of one number or of [len] for each rollout -> the values of the tokens here, [C]."""
        parts = [values[s].expand(length) for s, length in zip(self.sequences, self.lengths)]
        return torch.cat(parts or [torch.empty(0)]).to(self.index.device)

    def mean(self, values):
        """For each token the mean of the values of its sequence; [C] -> [C], with gradient."""
        parts = [part.mean().expand_as(part) for part in values.split(self.lengths)]
        return torch.cat(parts or [values])

    def split(self, values):
        """The values of this micro-batch's tokens, [C] -> {s: [len]}."""
        return dict(zip(self.sequences, values.split(self.lengths)))

    def to(self, device):
        """Return a copy with its tensors on the device."""
        moved = {}
        for name, value in vars(self).items():
            if isinstance(value, torch.Tensor):
                moved[name] = value.to(device)
        return replace(self, **moved)


# The keys and values of shared tokens are copied for each sequence that sees them, and kept for the backward
# pass. A row may have at most KEYS * token_budget keys.
KEYS = 4


# ---------------------------------------------------------------- shared prefixes

def prefix_order(rollouts, chosen):
    """Sort rollouts[s] for s in chosen so that rollouts which begin with the same tokens are neighbours.

    Returns a list of (s, size, shared). size: the number of its tokens before the last sampled one, which are
    all that is computed. shared: how many of its first tokens the rollout before it in the list has as well.
    """
    # Sorting by bytes is another order than by token ids, but it puts equal beginnings together as well.
    ids = {}
    keys = {}
    for s in chosen:
        ids[s] = rollouts[s].ids[:rollouts[s].spans[-1, 1] - 1]
        keys[s] = ids[s].tobytes()
    order = []
    before = np.empty(0)
    for s in sorted(chosen, key=keys.get):
        length = min(len(before), len(ids[s]))
        same = before[:length] == ids[s][:length]
        shared = length if same.all() else int(same.argmin())           # argmin: the place of the first False
        order.append((s, len(ids[s]), shared))
        before = ids[s]
    return order


def row_size(neighbours):
    """Return the number of tokens in a row of these neighbours in prefix_order's list, without repeated
    prefixes."""
    (_, first, _), *others = neighbours
    return first + sum(size - shared for _, size, shared in others)


def deal(rollouts, chosen, num_ranks):
    """Deal rollouts[s] for s in chosen to num_ranks lists with about the same number of tokens to compute.

    The rollouts of one prompt stay together and go to the rank with the fewest tokens so far, the largest
    group first (Graham 1969, LPT). The same is tried with half groups, quarters and so on, although each
    piece computes the prompt again. The result is the deal whose heaviest rank has the fewest tokens.
    Example: groups of 9, 5, 4, 3 tokens for 2 ranks -> 9 + 3 and 5 + 4.
    """
    groups = []
    for s, size, shared in prefix_order(rollouts, chosen):
        if shared < rollouts[s].spans[0, 0]:                    # its prompt is not that of the one before
            groups.append([])
        groups[-1].append((s, size, shared))
    best_shares = None
    lightest = math.inf
    piece_size = max(map(len, groups), default=1)               # in rollouts
    while piece_size:
        pieces = []
        for group in groups:
            pieces += [group[i:i + piece_size] for i in range(0, len(group), piece_size)]
        shares, heaviest = largest_first(pieces, num_ranks)
        if heaviest < lightest:
            best_shares = shares
            lightest = heaviest
        piece_size //= 2
    return best_shares


def largest_first(pieces, num_ranks):
    # Deals each piece to the rank with the fewest tokens so far. Returns the list of each rank, and how many
    # tokens the rank with most tokens has.
    shares = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for piece in sorted(pieces, key=row_size, reverse=True):
        least = loads.index(min(loads))
        shares[least] += [s for s, _, _ in piece]
        loads[least] += row_size(piece)
    return shares, max(loads)


# ---------------------------------------------------------------- rows

def pack(rollouts, chosen, token_budget, packed=True, multiple=1):
    """Pack rollouts[s] for s in chosen (anything with ids, spans and logprobs) into few MicroBatches.

    Each has at most token_budget tokens and KEYS * token_budget keys, plus padding that makes T a multiple of
    `multiple`. Only a sequence that is longer has more, alone. The targets are exactly the tokens inside the
    spans, including an EOS token even if padding has the same id. packed=False gives each sequence a row of
    its own, and its padding counts in the budget.
    """
    if not packed:
        return [*rows_of_their_own(rollouts, chosen, token_budget)]
    rows = []
    for s, size, shared in prefix_order(rollouts, chosen):
        for row in rows:
            # The sequences are in order, so from one to the next a row's prefix only gets shorter.
            row.prefix = min(row.prefix, shared)
        fitting = [row for row in rows if size - row.prefix <= row.room and size <= row.room_for_keys]
        if not fitting:
            fitting = [Row(token_budget, KEYS * token_budget)]
            rows += fitting
        # Among the rows with room for it, a sequence goes to the one that holds the longest prefix of it.
        longest = max(row.prefix for row in fitting)
        best = next(row for row in fitting if row.prefix == longest)
        best.add(s, size)
    # The heaviest first on every rank, because under FSDP all ranks wait for the slowest.
    rows.sort(key=attrgetter("pairs"), reverse=True)
    return [micro_batch(rollouts, row.members, multiple) for row in rows]


class Row:
    """A row in the making: its members (s, size, shared), the tokens and keys for which it has room, how many
    tokens the last member has in common with the sequence that comes next, and about how many pairs of tokens
    there are in which one sees the other."""

    def __init__(self, room, room_for_keys):
        self.members = []
        self.room = room
        self.room_for_keys = room_for_keys
        self.prefix = 0
        self.pairs = 0

    def add(self, s, size):
        self.members.append((s, size, self.prefix))
        added = size - self.prefix
        self.room -= added
        self.room_for_keys -= size
        self.pairs += added * size
        self.prefix = size


def micro_batch(rollouts, members, multiple):
    # Builds the MicroBatch of members (s, size, shared); `shared` tokens are those of the member before.
    # Without members it predicts nothing, C = 0, so that any loss computed from it is 0, with gradient 0.
    ids, positions, seen = [], [], []           # of each segment: its tokens, their positions, what they see
    T = 0
    places = np.arange(0)
    index = [places]
    targets = [places]
    for s, size, shared in members:
        r = rollouts[s]
        # The place of each of its tokens in the row. The shared ones stand where the member before has them.
        places = np.concatenate([places[:shared], np.arange(T, T + size - shared)])
        for start, stop in r.spans:
            index.append(places[start - 1:stop - 1])    # a token is predicted from the place before its own
            targets.append(r.ids[start:stop])
        if size > shared:                               # otherwise it adds no token to the row
            ids.append(r.ids[shared:size])
            positions.append(np.arange(shared, size))
            seen.append(places)
            T += size - shared
    padding = -T % multiple if T else multiple
    if padding:                                         # a segment from which nothing is predicted
        ids.append(np.zeros(padding))
        positions.append(np.arange(padding))
        seen.append(np.arange(T, T + padding))
    sequences = [s for s, _, _ in members]
    return MicroBatch(
        input_ids=joined(ids)[None], position_ids=joined(positions)[None],
        segments=Segments([*map(len, ids)], seen), index=joined(index), targets=joined(targets),
        sequences=sequences, lengths=[len(rollouts[s].logprobs) for s in sequences])


def joined(arrays):
    # Returns arrays of numbers as one tensor.
    return torch.from_numpy(np.concatenate(arrays).astype(np.int64))


def rows_of_their_own(rollouts, chosen, token_budget):
    # Yields MicroBatches in which each sequence has a row. The longest come first, and all rows of a
    # MicroBatch are as long as its first one.
    members = [(size, s) for s, size, _ in prefix_order(rollouts, chosen)]
    members.sort(key=itemgetter(0), reverse=True)
    while members:
        longest, _ = members[0]
        rows = [micro_batch(rollouts, [(s, size, 0)], longest)
                for size, s in members[:max(1, token_budget // longest)]]
        members = members[len(rows):]
        yield MicroBatch(
            input_ids=torch.cat([row.input_ids for row in rows]),
            position_ids=torch.arange(longest).repeat(len(rows), 1),
            segments=Segments([longest], [np.arange(longest)]),
            index=torch.cat([row.index + i * longest for i, row in enumerate(rows)]),
            targets=torch.cat([row.targets for row in rows]),
            sequences=sum([row.sequences for row in rows], []),
            lengths=sum([row.lengths for row in rows], []))


class Segments:
    """Which tokens of a packed row attend to which.

    A segment consists of the tokens that one sequence adds to the row. They attend to the prefix that the
    sequence shares with others, wherever it stands in the row, and causally to each other. In the row 5 6 7 9
    above, sizes are 3 1, key_sizes 3 3, and places 0 1 2 | 0 1 3.
    sizes: the number of tokens in each segment; they sum to T. places: for each segment an array with the
    places of the tokens that it attends to, its own at the end. The attribute places has them joined to [K],
    or is None if no tokens are shared.
    made: what attention.py makes of this on its device, once for all layers. Segments is no dataclass,
    because FSDP2 hands each layer a copy of a dataclass.
    """

    def __init__(self, sizes, places):
        self.sizes = sizes
        self.key_sizes = [len(part) for part in places]
        self.places = None if self.key_sizes == sizes else np.concatenate(places)
        self.made = {}
