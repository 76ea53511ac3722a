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
from dataclasses import dataclass, replace
from types import SimpleNamespace

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
        return replace(self, **{name: x.to(device) for name, x in vars(self).items() if hasattr(x, "to")})


# The keys and values of shared tokens are copied for each sequence that sees them, and kept for the backward
# pass. A row may have at most KEYS * token_budget keys.
KEYS = 4


# ---------------------------------------------------------------- shared prefixes

def prefix_order(rollouts, chosen):
    """Sort rollouts[s] for s in chosen so that rollouts which begin with the same tokens are neighbours.

    Returns a list of (s, size, shared). size: the number of its tokens before the last sampled one, which are
    all that is computed. shared: how many of its first tokens the rollout before it in the list has as well.
    """
    ids = {s: rollouts[s].ids[:rollouts[s].spans[-1, 1] - 1] for s in chosen}
    order, before = [], np.empty(0)
    # Sorting by bytes is another order than by token ids, but it puts equal beginnings together as well.
    for s in sorted(chosen, key=lambda s: ids[s].tobytes()):
        length = min(len(before), len(ids[s]))
        same = np.append(before[:length] == ids[s][:length], False)
        order.append((s, len(ids[s]), int(same.argmin())))              # the place of the first False
        before = ids[s]
    return order


def row_size(neighbours):
    """Return the number of tokens in a row of these neighbours in prefix_order's list, without repeated
    prefixes."""
    return sum(size - (shared if i else 0) for i, (_, size, shared) in enumerate(neighbours))


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
    most = max(map(len, groups), default=1)                     # rollouts in a piece
    tries = [largest_first([group[i:i + n] for group in groups for i in range(0, len(group), n)], num_ranks)
             for n in (most >> k for k in range(most.bit_length()))]
    return min(tries, key=lambda one: one[0])[1]


def largest_first(pieces, num_ranks):
    # Deals each piece to the rank with the fewest tokens so far. Returns the largest sum of tokens, and the
    # list of each rank.
    shares, loads = [[] for _ in range(num_ranks)], [0] * num_ranks
    for piece in sorted(pieces, key=row_size, reverse=True):
        least = loads.index(min(loads))
        shares[least] += [s for s, _, _ in piece]
        loads[least] += row_size(piece)
    return max(loads), shares


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
    # Each sequence goes to the row that already holds the longest prefix of it, among those with room for it.
    rows = []
    for s, size, shared in prefix_order(rollouts, chosen):
        for row in rows:
            # From one sequence to the next this only falls, because they are in order.
            row.prefix = min(row.prefix, shared)
        fitting = [row for row in rows if size - row.prefix <= row.room and size <= row.room_for_keys]
        if not fitting:
            fitting = [SimpleNamespace(members=[], prefix=0, room=token_budget, room_for_keys=KEYS * token_budget)]
            rows += fitting
        best = max(fitting, key=lambda row: row.prefix)
        best.members.append((s, size, best.prefix))
        best.room -= size - best.prefix
        best.room_for_keys -= size
        best.prefix = size
    # The heaviest first on every rank, because under FSDP all ranks wait for the slowest.
    pairs = lambda row: sum((size - shared) * size for _, size, shared in row.members)
    return [micro_batch(rollouts, row.members, multiple) for row in sorted(rows, key=pairs, reverse=True)]


def micro_batch(rollouts, members, multiple):
    # Builds the MicroBatch of members (s, size, shared); `shared` tokens are those of the member before.
    # Without members it predicts nothing, C = 0, so that any loss computed from it is 0, with gradient 0.
    parts, T, places = [], 0, np.arange(0)  # a part has the tokens of a segment, their positions and places
    index, targets = [places], [places]
    for s, size, shared in members:
        r = rollouts[s]
        # The place of each of its tokens in the row. The shared ones stand where the member before has them.
        places = np.concatenate([places[:shared], np.arange(T, T + size - shared)])
        # A token is predicted from the place of the token before it.
        index += [places[start - 1:stop - 1] for start, stop in r.spans]
        targets += [r.ids[start:stop] for start, stop in r.spans]
        if size > shared:                                       # otherwise it adds no token to the row
            parts.append((r.ids[shared:size], np.arange(shared, size), places))
            T += size - shared
    if padding := -T % multiple if T else multiple:     # a segment from which nothing is predicted
        parts.append((np.zeros(padding), np.arange(padding), np.arange(T, T + padding)))
    ids, positions, seen = zip(*parts)
    tensor = lambda arrays: torch.from_numpy(np.concatenate(arrays).astype(np.int64))
    sequences = [s for s, _, _ in members]
    return MicroBatch(tensor(ids)[None], tensor(positions)[None], Segments([*map(len, ids)], seen),
                      tensor(index), tensor(targets), sequences, [len(rollouts[s].logprobs) for s in sequences])


def rows_of_their_own(rollouts, chosen, token_budget):
    # Yields MicroBatches in which each sequence has a row. The longest come first, and all rows of a
    # MicroBatch are as long as its first one.
    order = sorted(prefix_order(rollouts, chosen), key=lambda one: -one[1])
    while order:
        longest = order[0][1]
        rows = [micro_batch(rollouts, [(s, size, 0)], longest)
                for s, size, _ in order[:max(1, token_budget // longest)]]
        order = order[len(rows):]
        yield MicroBatch(
            torch.cat([row.input_ids for row in rows]), torch.arange(longest).repeat(len(rows), 1),
            Segments([longest], [np.arange(longest)]),
            torch.cat([row.index + i * longest for i, row in enumerate(rows)]),
            torch.cat([row.targets for row in rows]),
            [s for row in rows for s in row.sequences], [length for row in rows for length in row.lengths])


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
        self.sizes, self.key_sizes, self.made = sizes, [len(part) for part in places], {}
        self.places = None if self.key_sizes == sizes else np.concatenate(places)
