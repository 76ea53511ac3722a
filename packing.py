"""
Micro-batches: several sequences packed into one line of tokens, without padding.

A sequence is a prompt, then the tokens that the policy sampled, in one span or in several with other tokens
between them. A rollout is one sequence, or several if an agent has begun several conversations in an episode.
A micro-batch is one line of T tokens that holds S sequences, and attention stays inside each of them. If
several sequences begin with the same tokens, such as the prompt of a group, it holds these tokens only
once, because a hidden state depends only on the tokens up to its own. Each sequence adds only the tokens that
follow. For example, this is that of the prompt 5 6 with two completions, 7 8 and 9 8:

    input_ids       5 6 7 9     the last token of each sequence is left out: nothing is predicted from it
    position_ids    0 1 2 2
    attention       causal in 5 6 7 and in 5 6 9; 7 and 9 do not see each other
    targets         7 8 9 8     the sampled tokens
    index           1 2 1 3     the place in the line from which each target is predicted

Per-token tensors are flat, [C], and hold only sampled tokens, in the order of the sequences. Entry c belongs
to sampled token c and is computed from the hidden state one place before it. Prompts and inserted tokens are
never in them, so there is no mask that could be wrong.

options/sequence_parallel.py cuts micro-batches over ranks, and options/stateful.py makes those of models in
which several sequences cannot stand in one line.
"""
import math
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import torch


@dataclass
class MicroBatch:
    # what the network reads, and where it predicts
    input_ids: torch.Tensor      # [1, T]; or [S, longest], a line for each sequence
    position_ids: torch.Tensor   # the same shape: each token's place in its sequence, from 0
    segments: object             # Segments: which tokens attend to which
    index: torch.Tensor          # [C] the place from which each sampled token is predicted
    targets: torch.Tensor        # [C] the sampled tokens
    # which sequences the tokens belong to
    sequences: list              # S triples (s, tokens, total), the first fields of each Sequence, in order
    # If top_k restricts sampling, the tokens that each sampled token was drawn from, int32 [C, largest set]
    # (options/kept_sets.py).
    kept: torch.Tensor = None
    members: list = ()           # triples (Sequence, size, shared), as in micro_batch
    shown: tuple = ()            # what it shows, in runs with images: see images.Reader.attach
    # A Cut (options/sequence_parallel.py) if this rank has only a part of the line. Then input_ids and
    # position_ids are [1, T / P], and index and targets hold only what is predicted in this part.
    cut: object = None

    @property
    def lengths(self):
        """How many sampled tokens each of the S sequences has; the numbers sum to C."""
        return [tokens.stop - tokens.start for _, tokens, _ in self.sequences]

    def sequence_lengths(self):
        """For each token the number of sampled tokens of its sequence, [C]."""
        lengths = torch.tensor(self.lengths).long()
        return lengths.repeat_interleave(lengths).to(self.index.device)

    def flat(self, values):
        """A tensor of one number or of [len] for each rollout -> the values of the tokens here, [C]."""
        parts = [values[s].expand(total)[tokens] for s, tokens, total in self.sequences]
        return torch.cat(parts or [torch.empty(0)]).to(self.index.device)

    def mean(self, values):
        """For each token the mean of the values of its sequence; [C] -> [C], with gradient."""
        parts = [part.mean().expand_as(part) for part in values.split(self.lengths)]
        return torch.cat(parts or [values])

    def put(self, values, target):
        """Put the values of this micro-batch's tokens, [C], into their places in target, {s: [len]}.

        A rollout that target does not have yet is added. If it has several sequences, its other values are 0
        until the micro-batches with these sequences are put.
        """
        for (s, tokens, total), part in zip(self.sequences, values.split(self.lengths)):
            if s not in target:
                target[s] = values.new_zeros(total, *values.shape[1:])
            target[s][tokens] = part

    def to(self, device):
        """Return a copy with its tensors on the device."""
        tensors = {name: x.to(device) for name, x in vars(self).items() if isinstance(x, torch.Tensor)}
        return replace(self, **tensors)


# The keys and values of shared tokens are copied for each sequence that sees them, and kept for the backward
# pass. A line may have at most KEYS * token_budget keys.
KEYS = 4


# ---------------------------------------------------------------- sequences and shared prefixes

class Sequence(NamedTuple):
    """A sequence of a rollout: what the network reads, and what it predicts."""
    s: int                  # the index of the rollout
    tokens: slice           # which of the rollout's sampled tokens it has
    total: int              # how many sampled tokens the rollout has
    ids: np.ndarray         # its tokens before the last sampled one, which are all that are computed
    index: np.ndarray       # [len] the places in ids before its sampled tokens, which predict them
    targets: np.ndarray     # [len] these tokens


def sequences_of(rollouts, chosen):
    """Return the Sequences of rollouts[s] for s in chosen, those of a rollout one after the other."""
    sequences = []
    for s in chosen:
        r = rollouts[s]
        places = r.places
        ends = [*r.sequence_starts[1:, 1].tolist(), len(places)]
        for (start, first, _), end in zip(r.sequence_starts.tolist(), ends):
            sampled = places[first:end]
            sequences.append(Sequence(s, slice(first, end), len(places), r.ids[start:sampled[-1]],
                                      sampled - start - 1, r.ids[sampled]))
    return sequences


def prefix_order(sequences):
    """Sort Sequences so that those which begin with the same tokens are neighbours.

    Returns a list of (sequence, size, shared). size: how many tokens it has to compute. shared: how many of
    its first tokens the sequence before it in the list has as well.
    """
    order = []
    before = np.empty(0)
    # Sorting by bytes is another order than by token ids, but it puts equal beginnings together as well.
    for sequence in sorted(sequences, key=lambda sequence: sequence.ids.tobytes()):
        ids = sequence.ids
        length = min(len(before), len(ids))
        same = np.append(before[:length] == ids[:length], False)        # False stands for the end
        order.append((sequence, len(ids), int(same.argmin())))          # argmin: the place of the first False
        before = ids
    return order


def packed_size(neighbours):
    """Return the number of tokens in a line of these neighbours in prefix_order's list, without repeated
    prefixes."""
    (_, first, _), *others = neighbours
    return first + sum(size - shared for _, size, shared in others)


def deal(rollouts, chosen, num_ranks):
    """Deal rollouts[s] for s in chosen to num_ranks lists with about the same number of tokens to compute.

    Rollouts whose first sequences have the same prompt are a group, which stays together. The largest group
    goes first, and each one to the rank with the fewest tokens so far (Graham 1969, LPT). The same is tried
    with half groups, quarters and so on, although each piece computes the prompt again. The result is the
    deal whose heaviest rank has the fewest tokens. All sequences of a rollout go to the same rank.
    Example: groups of 9, 5, 4, 3 tokens for 2 ranks -> 9 + 3 and 5 + 4.
    """
    groups = []
    sequences = {s: sequences_of(rollouts, [s]) for s in chosen}
    for first, _, shared in prefix_order([sequences[s][0] for s in chosen]):
        if shared <= first.index[0]:                            # its prompt is not that of the one before
            groups.append([])
        size = packed_size(prefix_order(sequences[first.s]))       # of all its sequences
        groups[-1].append((first.s, size, shared))
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
    for piece in sorted(pieces, key=packed_size, reverse=True):
        least = loads.index(min(loads))
        shares[least] += [s for s, _, _ in piece]
        loads[least] += packed_size(piece)
    return shares, max(loads)


# ---------------------------------------------------------------- lines

def pack(rollouts, chosen, token_budget, packed=True, multiple=1):
    """Pack rollouts[s] for s in chosen (anything with ids, places and sequence_starts) into few MicroBatches.

    Each has at most token_budget tokens and KEYS * token_budget keys, plus padding that makes T a multiple of
    `multiple`. Only a sequence that is longer has more, alone. The targets are exactly the tokens inside the
    spans, including an EOS token even if padding has the same id. packed=False gives each sequence a line of
    its own, and its padding counts in the budget.
    """
    order = prefix_order(sequences_of(rollouts, chosen))
    if not packed:
        from options.stateful import padded
        return [*padded(order, token_budget)]
    lines = []
    for sequence, size, shared in order:
        for line in lines:
            # The sequences are in order, so from one to the next a line's prefix only gets shorter.
            line.prefix = min(line.prefix, shared)
        fitting = [line for line in lines if size - line.prefix <= line.room and size <= line.room_for_keys]
        if not fitting:
            fitting = [Line(token_budget, KEYS * token_budget)]
            lines += fitting
        # Among the lines with room for it, a sequence goes to the one that holds the longest prefix of it.
        best = max(fitting, key=attrgetter("prefix"))           # the first one, if there are several
        best.members.append((sequence, size, best.prefix))
        added = size - best.prefix
        best.room -= added
        best.room_for_keys -= size
        best.pairs += added * size
        best.prefix = size
    # The heaviest first on every rank, because under FSDP all ranks wait for the slowest.
    lines.sort(key=attrgetter("pairs"), reverse=True)
    return [micro_batch(line.members, multiple) for line in lines]


@dataclass
class Line:
    """A line in the making."""
    room: int               # how many more tokens it may have
    room_for_keys: int      # how many more keys
    prefix: int = 0         # how many tokens the last member has in common with the sequence that comes next
    pairs: int = 0          # about how many pairs of tokens there are in which one sees the other
    members: list = field(default_factory=list)         # triples (sequence, size, shared)


def micro_batch(members, multiple):
    # Builds the MicroBatch of members (sequence, size, shared); `shared` tokens are those of the one before.
    # Without members it predicts nothing, C = 0, so that any loss computed from it is 0, with gradient 0.
    ids, positions, seen = [], [], []           # of each segment: its tokens, their positions, what they see
    T = 0
    places = np.arange(0)
    index = [places]
    targets = [places]
    for sequence, size, shared in members:
        # The place of each of its tokens in the line. The shared ones stand where the member before has them.
        places = np.concatenate([places[:shared], np.arange(T, T + size - shared)])
        index.append(places[sequence.index])
        targets.append(sequence.targets)
        if size > shared:                               # otherwise it adds no token to the line
            ids.append(sequence.ids[shared:])
            positions.append(np.arange(shared, size))
            seen.append(places)
            T += size - shared
    padding = -T % multiple if T else multiple
    if padding:                                         # a segment from which nothing is predicted
        ids.append(np.zeros(padding))
        positions.append(np.arange(padding))
        seen.append(np.arange(T, T + padding))
    return MicroBatch(
        input_ids=joined(ids)[None], position_ids=joined(positions)[None],
        segments=Segments([*map(len, ids)], seen), index=joined(index), targets=joined(targets),
        sequences=[sequence[:3] for sequence, _, _ in members], members=members)


def joined(arrays):
    # Returns arrays of numbers as one tensor.
    return torch.from_numpy(np.concatenate(arrays).astype(np.int64))


class Segments:
    """Which tokens of a packed line attend to which.

    A segment consists of the tokens that one sequence adds to the line. They attend to the prefix that the
    sequence shares with others, wherever it stands in the line, and causally to each other. In the line
    5 6 7 9 above, sizes are 3 1, key_sizes 3 3, and places 0 1 2 | 0 1 3.
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
