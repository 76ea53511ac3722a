"""
Packed rows: several sequences in one row of tokens, without padding.

A sequence is a rollout: a prompt, then the tokens that the policy sampled, in one span or in several with
other tokens between them. A micro-batch is one row of T tokens that holds S sequences, and attention stays
inside each of them. Tokens that several sequences begin with, such as the prompt of a group, stand in the row
once, because a hidden state depends only on the tokens before it. Each sequence adds only what follows. For
example the prompt 5 6 with two completions, 7 8 and 9 8:

    input_ids       5 6 7 9     without the last token of each, from which nothing is predicted
    position_ids    0 1 2 2
    attention       5 6 7 see themselves, 9 sees 5 6 9
    targets         7 8 9 8
    index           1 2 1 3     where these are predicted

Per-token tensors hold sampled tokens only, flat, [C], in the order of the sequences: entry c is about sampled
token c and is read from the hidden state one place before it. Prompts and inserted tokens are never in them,
so there is no mask that could be wrong.

With sequence_parallel_size=P a row is cut, and each of P ranks holds T / P of its tokens. The rank whose
sequences these are gets all C logprobs or values; on the others C = 0 (attention.py).

Layers that carry a state from token to token, such as Mamba's, would carry it into the next sequence of a
row. For models that have them each sequence gets a row of its own: S rows, padded at the end to the longest.
"""
import copy
import math
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch


@dataclass
class MicroBatch:
    # what the network reads, and where it predicts
    input_ids: torch.Tensor      # [1, T]; or [S, longest], a row for each sequence
    position_ids: torch.Tensor   # the same shape: each token's place in its sequence, from 0
    segments: object             # Segments: which tokens attend to which
    index: torch.Tensor          # [C] where each sampled token is predicted: one place before it
    targets: torch.Tensor        # [C] the sampled tokens
    # whose tokens these are
    sequences: list              # which of all sequences are in it, in order
    numbers: torch.Tensor        # [S] `sequences` as a tensor
    owner: torch.Tensor          # [C] which of this micro-batch's sequences each sampled token belongs to
    lengths: list                # S: sampled tokens of each sequence; they sum to C
    # None: this rank has the whole row. Otherwise input_ids to targets are those of its part, [1, T / P] and
    # about C / P.
    cut: object = None           # attention.Cut

    def flat(self, tensors, dtype=torch.float32):
        """Per-token tensors by sequence (a dict or list of [len]) -> those of this micro-batch, flat [C].

        dtype: of the empty tensor that an idle micro-batch gets.
        """
        none = torch.empty(0, dtype=dtype, device=self.index.device)
        return torch.cat([tensors[s] for s in self.sequences] or [none])

    def spread(self, values):
        """A value per sequence, [N], or per token, {s: [len]} -> those of the sampled tokens here, [C]."""
        return self.flat(values) if isinstance(values, dict) else values[self.numbers][self.owner]

    def mean(self, values):
        """Mean of per-token values over their sequence, at each of its tokens; [C] -> [C], with gradient."""
        sums = lambda x: x.new_zeros(len(self.sequences)).index_add(0, self.owner, x)
        return (sums(values) / sums(torch.ones_like(values)).clamp(min=1))[self.owner]

    def split(self, flat):
        """Per-token values of this micro-batch [C] -> {sequence: its [len] values}."""
        return dict(zip(self.sequences, flat.split(self.lengths)))

    def to(self, device):
        """A copy with its tensors on the device."""
        return type(self)(*(x.to(device) if hasattr(x, "to") else x for x in vars(self).values()))


# A row gathers the keys and values of shared tokens for each sequence that sees them, and keeps these for the
# backward pass. There may be this many times token_budget of them.
KEYS = 4


# ---------------------------------------------------------------- shared prefixes

def prefix_order(rollouts, chosen):
    """Sort rollouts[s] for s in chosen so that those that begin with the same tokens are neighbours.

    Returns a list of (s, size, shared). size: its tokens before the last sampled one, which are all that is
    computed. shared: how many of these, from the first on, the rollout before it in the list has as well.
    """
    ids = {s: rollouts[s].ids[:rollouts[s].spans[-1, 1] - 1] for s in chosen}
    # The order of bytes is another one than that of tokens, but it puts the same tokens together as well.
    order = sorted(chosen, key=lambda s: ids[s].tobytes())
    shared = [common_prefix(ids[before], ids[s]) for before, s in zip(order, order[1:])]
    return [(s, len(ids[s]), common) for s, common in zip(order, [0, *shared])]


def common_prefix(a, b):
    """How many tokens two arrays have in common at their beginning."""
    length = min(len(a), len(b))
    different = a[:length] != b[:length]
    return int(different.argmax()) if different.any() else length


def row_size(neighbours):
    """Tokens in a row of these neighbours in prefix_order's list: all of the first, of others what is new."""
    return sum(size - (shared if i else 0) for i, (_, size, shared) in enumerate(neighbours))


def deal(rollouts, chosen, num_ranks):
    """Deal rollouts[s] for s in chosen to num_ranks lists of about equally many tokens to compute.

    The rollouts of one prompt stay together and go to the rank with the fewest tokens so far, the largest
    group first (Graham 1969, LPT). The same is tried with half groups, quarters and so on; each piece then
    computes the prompt again. The deal whose heaviest rank has the fewest tokens is returned.
    Example: groups of 9, 5, 4, 3 tokens for 2 ranks -> 9 + 3 and 5 + 4.
    """
    if num_ranks == 1:
        return [list(chosen)]
    groups = []
    for s, size, shared in prefix_order(rollouts, chosen):
        if shared < rollouts[s].spans[0, 0]:                    # not even all of its prompt
            groups.append([])
        groups[-1].append((s, size, shared))
    most = max(map(len, groups), default=1)                     # rollouts in a piece
    ways = [largest_first(groups, num_ranks)]
    while most > 1:
        most = (most + 1) // 2
        pieces = [group[i:i + most] for group in groups for i in range(0, len(group), most)]
        ways.append(largest_first(pieces, num_ranks))
    return min(ways, key=lambda way: way[0])[1]


def shared_tokens(rollouts, dealt):
    """The fraction of tokens saved by computing common prefixes once, and what it would be with all rollouts
    on one rank and in one update; a dict for the log. dealt: what deal returned for each update."""
    order = prefix_order(rollouts, [s for shares in dealt for share in shares for s in share])
    separate = max(1, sum(size for _, size, _ in order))
    computed = sum(row_size(prefix_order(rollouts, share)) for shares in dealt for share in shares)
    return {"perf/shared_tokens": 1 - computed / separate if order else 0.0,
            "perf/shareable_tokens": 1 - row_size(order) / separate if order else 0.0}


def largest_first(pieces, num_ranks):
    # Each piece to the rank with the fewest tokens so far: the most that a rank gets, and the lists.
    shares, loads = [[] for _ in range(num_ranks)], [0] * num_ranks
    for piece in sorted(pieces, key=row_size, reverse=True):
        least = loads.index(min(loads))
        shares[least] += [s for s, _, _ in piece]
        loads[least] += row_size(piece)
    return max(loads), shares


# ---------------------------------------------------------------- rows

def pack(rollouts, chosen, token_budget, packed=True, multiple=1):
    """Pack rollouts[s] for s in chosen (anything with ids, spans and logprobs) into few MicroBatches.

    Each computes at most token_budget tokens, for which at most KEYS times as many are gathered as keys, and
    up to multiple - 1 of padding that make T a multiple of it.
    The tokens inside the spans are the targets, the EOS among them even where the pad token has the same id;
    no other token is. packed=False gives each sequence a row of its own, whose padding counts in the budget.
    Raises ValueError for a sequence that is longer than token_budget.
    """
    order = prefix_order(rollouts, chosen)
    longest = max((size for _, size, _ in order), default=0)
    if longest > token_budget:
        raise ValueError(f"a sequence of {longest} tokens does not fit token_budget={token_budget}")
    share_out = in_packed_rows if packed else in_rows_of_their_own
    return [micro_batch(rollouts, members, packed, multiple) for members in share_out(order, token_budget)]


def in_packed_rows(order, token_budget):
    # To the row with room for it that holds the most of its first tokens, or to the first with room.
    rows, room, room_for_keys = [], [], []
    # How many of the first tokens of the sequence at hand each row holds: from one sequence to the next that
    # only falls, as they are in order, until the row takes one in.
    has = []
    for s, size, shared in order:
        has = [min(before, shared) for before in has]
        fits = [i for i in range(len(rows)) if size - has[i] <= room[i] and size <= room_for_keys[i]]
        if not fits:
            fits = [len(rows)]
            rows, room, has = rows + [[]], room + [token_budget], has + [0]
            room_for_keys += [KEYS * token_budget]
        best = max(fits, key=lambda i: has[i])
        rows[best].append((s, size, has[best]))
        room[best] -= size - has[best]
        room_for_keys[best] -= size
        has[best] = size
    # The heaviest first, as on the other ranks, because FSDP lets all of them wait for the slowest.
    pairs = lambda row: sum((size - shared) * size for _, size, shared in row)
    return sorted(rows, key=pairs, reverse=True)


def in_rows_of_their_own(order, token_budget):
    # The longest first. Each takes as much room as the first of a micro-batch, and nothing is shared.
    order = sorted(((s, size, 0) for s, size, _ in order), key=lambda entry: entry[1], reverse=True)
    batches = []
    while order:
        count = token_budget // order[0][1]
        batches, order = batches + [order[:count]], order[count:]
    return batches


def micro_batch(rollouts, members, packed, multiple):
    # The MicroBatch of these (s, size, shared), where shared is in common with the member before.
    ids, positions, seen, index, targets = [], [], [], [], []
    longest = max(size for _, size, _ in members)
    T, places = 0, np.arange(0)
    for s, size, shared in members:
        r = rollouts[s]
        end = size if packed else longest
        # Where in the row each of its tokens stands; the shared ones where the member before has them.
        places = np.concatenate([places[:shared], np.arange(T, T + end - shared)])
        # A token is predicted one place before itself.
        index += [places[start - 1:stop - 1] for start, stop in r.spans]
        targets += [r.ids[start:stop] for start, stop in r.spans]
        if end > shared:                                        # otherwise it adds nothing to the row
            ids.append(np.pad(r.ids[shared:size], (0, end - size)))
            positions.append(np.arange(shared, end))
            seen.append(places)
            T += end - shared
    if padding := -T % multiple:                                # a segment from which nothing is read
        ids.append(np.zeros(padding))
        positions.append(np.arange(padding))
        seen.append(np.arange(T, T + padding))
    segments = (Segments([len(part) for part in ids], seen) if packed else
                Segments([longest], [np.arange(longest)]))
    tensor = lambda parts: torch.from_numpy(np.concatenate(parts).astype(np.int64))
    row = lambda parts: tensor(parts).view(1 if packed else len(members), -1)
    sequences = [s for s, _, _ in members]
    lengths = [len(rollouts[s].logprobs) for s in sequences]
    return MicroBatch(row(ids), row(positions), segments, tensor(index), tensor(targets), sequences,
                      torch.tensor(sequences), tensor([np.repeat(np.arange(len(members)), lengths)]), lengths)


def idle(T=1):
    # A MicroBatch that predicts nothing, C = 0: every loss made of it is 0, and so is its gradient.
    zeros, none = torch.zeros(1, T, dtype=torch.long), torch.empty(0, dtype=torch.long)
    return MicroBatch(zeros, zeros, Segments([T], [np.arange(T)]), none, none, [], none, none, [])


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
        vars(other).update({name: x.to(device) for name, x in vars(self).items() if torch.is_tensor(x)})
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
