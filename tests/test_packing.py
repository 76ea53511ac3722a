"""Packed rows: which tokens are trained, what they attend to, and what a row makes of per-token tensors."""
import random

import numpy as np
import pytest
import torch

import losses
import packing
from model import micro_batches
from packing import deal, micro_batch, pack, prefix_order, packed_size, sequences_of
from rollout import Rollout
from runs import split
from runtime import distributed


def single(prompt_ids, completion_ids):
    """A Rollout of one span, from lists of ids."""
    return Rollout.single(prompt_ids, completion_ids, [0.0] * len(completion_ids), "stop")


def episode(*parts):
    """A Rollout from lists of ids: the prompt, then by turns what was sampled and what was inserted."""
    ends = np.cumsum([len(part) for part in parts])
    spans = [ends[i:i + 2] for i in range(0, len(parts) - 1, 2)]
    return Rollout(np.array(sum(parts, []), dtype=np.int32), np.array(spans, dtype=np.int32),
                   np.zeros(sum(map(len, parts[1::2])), dtype=np.float32), "stop",
                   np.array([[0, 0, len(parts[0])]], dtype=np.int32))


def rows_of_parts(*rows):
    """A Rollout with a row for each list of parts."""
    alone = [episode(*parts) for parts in rows]
    ids = np.cumsum([0] + [len(r.ids) for r in alone], dtype=np.int32)
    tokens = np.cumsum([0] + [len(r.logprobs) for r in alone], dtype=np.int32)
    return Rollout(np.concatenate([r.ids for r in alone]),
                   np.concatenate([r.spans + start for r, start in zip(alone, ids)]).astype(np.int32),
                   np.concatenate([r.logprobs for r in alone]), "stop",
                   np.stack([ids[:-1], tokens[:-1], [len(r.prompt_ids) for r in alone]], 1))


def random_rows(count, vocab, **named):
    """For each of several rollouts the parts of its rows, of which there are one to three."""
    parts = iter(random_parts(3 * count, vocab, **named))
    return [[next(parts) for _ in range(1 + s % 3)] for s in range(count)]


def random_parts(count, vocab, seed=0, longest=20, parts=(2,), shared=0.6):
    """Lists of parts for `episode`. parts: how many each may have; of an odd number the last is inserted.

    shared: the share of them that begin as another does, with the same prompt or with more.
    """
    rng, lists = random.Random(seed), []
    ids = lambda: [rng.randrange(vocab) for _ in range(rng.choice([1, 1, 2, rng.randint(1, longest)]))]
    for _ in range(count):
        new = [ids() for _ in range(rng.choice(parts))]
        if lists and rng.random() < shared:
            other = rng.choice(lists)
            same = rng.randint(1, min(len(new), len(other)))
            new[:same] = [list(part) for part in other[:same]]
        lists.append(new)
    return lists


def random_rollouts(*arguments, **named):
    return [episode(*lists) for lists in random_parts(*arguments, **named)]


def members(batch):
    """The rollouts s of a micro-batch's sequences."""
    return [s for s, _, _ in batch.sequences]


def sampled_places(parts):
    """Where in the row of these parts each sampled token stands."""
    return [place for i in range(1, len(parts), 2)
            for place in range(sum(map(len, parts[:i])), sum(map(len, parts[:i + 1])))]


# ---------------------------------------------------------------- rows

@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_sequences_are_dealt_by_length(num_ranks):
    """Of skewed lengths each sequence goes to one rank, and every rank is within 5% of the mean."""
    rng = random.Random(num_ranks)
    length = lambda: 2000 if rng.random() < 0.1 else rng.randint(1, 200)
    rollouts = [single([i] * 20, [7] * length()) for i in range(400)]
    chosen = rng.sample(range(400), 320)
    shares = deal(rollouts, chosen, num_ranks)
    assert sorted(sum(shares, [])) == sorted(chosen)
    tokens = [sum(19 + len(rollouts[s].logprobs) for s in share) for share in shares]
    assert max(abs(count / (sum(tokens) / num_ranks) - 1) for count in tokens) < 0.05
    example = [single([i], [2] * size) for i, size in enumerate((9, 5, 4, 3))]
    assert deal(example, range(4), 2) == [[0, 3], [1, 2]] and deal(example, [2], 3) == [[2], [], []]
    assert deal(example, [], 2) == [[], []]


def computed(rollouts, chosen):
    """How many tokens a row of all these takes: as many as there are different beginnings."""
    beginnings = [tuple(rollouts[s].ids[:end]) for s in chosen
                  for end in range(1, rollouts[s].spans[-1, 1])]
    return len(set(beginnings))


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_groups_are_dealt_whole_where_that_is_fair(num_ranks):
    rng = random.Random(num_ranks)
    rollouts = [single([prompt] * 30, [rng.randrange(9, 300) for _ in range(rng.randint(1, 40))])
                for prompt in range(40) for _ in range(8)]
    chosen = rng.sample(range(320), 300)
    shares = deal(rollouts, chosen, num_ranks)
    assert sorted(sum(shares, [])) == sorted(chosen)
    groups = [{s // 8 for s in share} for share in shares]
    assert sum(map(len, groups)) == len(set.union(*groups))
    loads = [computed(rollouts, share) for share in shares]
    assert max(loads) < 1.1 * sum(loads) / num_ranks and sum(loads) == computed(rollouts, chosen)


def test_a_group_is_cut_where_a_rank_would_have_too_little():
    """Two groups for four ranks: halves. One group and one more rollout for two ranks: by tokens."""
    two = [single([prompt] * 10, [7, token] + [7] * 8) for prompt in (1, 2) for token in range(10, 18)]
    assert sorted(map(sorted, deal(two, range(16), 4))) == [[*range(4)], [*range(4, 8)], [*range(8, 12)],
                                                            [*range(12, 16)]]
    one = [single([5] * 4, [token] * 9) for token in range(6)]
    loads = [computed(one, share) for share in deal(one, range(6), 2)]
    assert loads == [4 + 3 * 8] * 2


def test_values_of_rollouts_go_to_the_device_as_those_of_a_micro_batch():
    (batch,) = pack(random_rollouts(3, 50), range(3), 10 ** 6)
    lengths, batch = batch.lengths, batch.to("meta")
    each = {s: torch.zeros(length) for s, length in zip(members(batch), lengths)}
    assert {batch.flat(each).device.type, batch.flat(torch.zeros(3)).device.type} == {"meta"}


def test_pack_by_hand():
    """The prompt 5 6 of two completions, of which a third's is the beginning, stands in the row once."""
    rollouts = [single([5, 6], [7, 8]), single([5], [9]), single([5, 6], [9, 8])]
    (batch,) = pack(rollouts, [0, 1, 2], 8)
    assert members(batch) == [1, 0, 2] and batch.lengths == [1, 2, 2]
    assert batch.input_ids.tolist() == [[5, 6, 7, 9]] and batch.position_ids.tolist() == [[0, 1, 2, 2]]
    segments = batch.segments
    assert segments.sizes == [1, 2, 1] and segments.key_sizes == [1, 3, 3]
    assert segments.places.tolist() == [0, 0, 1, 2, 0, 1, 3]
    assert batch.index.tolist() == [0, 1, 2, 1, 3] and batch.targets.tolist() == [9, 7, 8, 9, 8]
    assert batch.flat(torch.tensor([0.5, 2.0, 3.0])).tolist() == [2, 0.5, 0.5, 3, 3]
    tensors = [torch.tensor([1, 2]), torch.tensor([3]), torch.tensor([4, 5])]
    assert batch.flat(tensors).tolist() == [3, 1, 2, 4, 5]
    assert batch.mean(torch.tensor([5.0, 1.0, 2.0, 0.0, 1.0])).tolist() == [5, 1.5, 1.5, 0.5, 0.5]
    parts = split(batch, torch.tensor([3, 1, 2, 4, 5]))
    assert {s: part.tolist() for s, part in parts.items()} == {0: [1, 2], 1: [3], 2: [4, 5]}


def test_pack_of_several_spans_by_hand():
    """The tokens 7 8, 9 and 4 are sampled; 1 2 and 3 between them and the 3 at the end are inserted."""
    rows = [episode([6], [9]), episode([5, 6], [7, 8], [1, 2], [9], [3], [4], [3])]
    (batch,) = pack(rows, [0, 1], 12)
    assert members(batch) == [1, 0] and batch.input_ids.tolist() == [[5, 6, 7, 8, 1, 2, 9, 3, 6]]
    assert batch.position_ids.tolist() == [[*range(8), 0]]
    assert batch.segments.sizes == batch.segments.key_sizes == [8, 1] and batch.segments.places is None
    assert batch.index.tolist() == [1, 2, 5, 7, 8] and batch.targets.tolist() == [7, 8, 9, 4, 9]
    assert batch.flat(torch.tensor([2.0, 0.5])).tolist() == [0.5, 0.5, 0.5, 0.5, 2.0]
    # What has neither one value per rollout nor one per token would broadcast against [C] without a word.
    assert batch.flat(torch.tensor([[2.0], [0.5]])).tolist() == [0.5, 0.5, 0.5, 0.5, 2.0]
    with pytest.raises(RuntimeError, match="expanded size"):
        batch.flat(torch.ones(2, 2))
    assert batch.flat([torch.tensor([5]), torch.tensor([1, 2, 3, 4])]).tolist() == [1, 2, 3, 4, 5]
    assert batch.mean(torch.tensor([1.0, 2.0, 3.0, 6.0, 5.0])).tolist() == [3, 3, 3, 3, 5]
    parts = split(batch, torch.tensor([1, 2, 3, 4, 5]))
    assert {row: part.tolist() for row, part in parts.items()} == {1: [1, 2, 3, 4], 0: [5]}


def seen_from(batch):
    """For each token of a packed row, the places that it attends to, by the meaning of its segments."""
    segments, seen = batch.segments, []
    places = range(sum(segments.sizes)) if segments.places is None else segments.places.tolist()
    for i, (size, key_size) in enumerate(zip(segments.sizes, segments.key_sizes)):
        first = sum(segments.key_sizes[:i])
        seen += [list(places[first:first + key_size - later]) for later in reversed(range(size))]
    return seen


@pytest.mark.parametrize("longest, parts", [(20, (2,)), (5, (2, 3, 4, 5, 6, 7))])
@pytest.mark.parametrize("budget", [40, 64, 1000])
@pytest.mark.parametrize("multiple", [1, 4])
def test_pack_trains_every_sampled_token_once_and_no_other_token(budget, longest, parts, multiple):
    """And each from the tokens before it, of its own sequence, at their positions."""
    lists = random_parts(50, 300, longest=longest, parts=parts)
    rollouts = [episode(*row) for row in lists]
    rows = list(range(0, 50, 2))
    batches = pack(rollouts, rows, budget, multiple=multiple)
    assert sorted(row for batch in batches for row in members(batch)) == rows
    for batch in batches:
        T = computed(rollouts, members(batch))
        assert T <= budget and batch.input_ids.shape == (1, T + -T % multiple) == batch.position_ids.shape
        owners = batch.flat(torch.arange(50)).tolist()
        trained = iter(zip(batch.index.tolist(), batch.targets.tolist(), owners, strict=True))
        seen, ids, positions = seen_from(batch), batch.input_ids[0], batch.position_ids[0]
        for place in range(T, len(ids)):                        # padding sees padding: nothing would be NaN
            assert seen[place] == [*range(T, place + 1)]
        for row in members(batch):
            whole = sum(lists[row], [])
            for place in sampled_places(lists[row]):
                index, target, owner = next(trained)
                assert (target, owner) == (whole[place], row) and seen[index][-1] == index
                assert ids[seen[index]].tolist() == whole[:place]
                assert positions[seen[index]].tolist() == list(range(place))
        assert next(trained, None) is None


def test_a_beginning_that_a_whole_step_shares_is_computed_once_per_micro_batch(monkeypatch):
    """A system prompt of 30 tokens, ten questions, four answers to each."""
    monkeypatch.setattr(packing, "KEYS", 100)
    rng = random.Random(0)
    rollouts = [single([1] * 30 + [question] * 5, [rng.randrange(100, 300) for _ in range(6)])
                for question in range(2, 12) for _ in range(4)]
    order = prefix_order(sequences_of(rollouts, range(40)))
    assert packed_size(order) == 30 + 10 * 5 + 40 * 5 == computed(rollouts, range(40))
    (batch,) = pack(rollouts, rng.sample(range(40), 40), 280)
    assert batch.input_ids.shape == (1, 280)
    batches = pack(rollouts, range(40), 30 + 3 * 25)
    assert sorted(batch.input_ids.shape[1] for batch in batches) == [55, 105, 105, 105]


def test_a_sequence_goes_where_most_of_it_is():
    """The first row has room for the third, but the second has its prompt."""
    rollouts = [single([1, 1], [2, 2]), single([5] * 7, [6] * 4), single([5] * 7, [7, 7])]
    batches = pack(rollouts, range(3), 11)
    assert sorted(sorted(members(batch)) for batch in batches) == [[0], [1, 2]]


def test_a_row_has_a_limited_number_of_keys():
    """A prompt of 30 tokens with 40 answers of one or two: the tokens would fit one row of 70."""
    rollouts = [single([5] * 30, [token, token]) for token in range(100, 140)]
    batches = pack(rollouts, range(40), 70)
    assert len(batches) == -(-40 // (packing.KEYS * 70 // 31)) > 1
    assert all(sum(batch.segments.key_sizes) <= packing.KEYS * 70 for batch in batches)
    # Rows of 30 keys each: they may fill it to the last one.
    rollouts = [single([5] * 29, [token, token]) for token in range(100, 100 + 6 * packing.KEYS)]
    batches = pack(rollouts, range(len(rollouts)), 90)
    assert [sum(batch.segments.key_sizes) for batch in batches] == [packing.KEYS * 90] * 2


def test_the_heaviest_rows_come_first():
    rollouts = [single([i], [7] * size) for i, size in enumerate((9, 30, 4, 25, 10, 28))]
    sizes = [max(batch.segments.sizes) for batch in pack(rollouts, range(6), 30)]
    assert len(sizes) > 2 and sizes == sorted(sizes, reverse=True)


def test_groups_with_one_system_prompt_are_dealt_apart():
    rollouts = [single([1] * 9 + [question] * 3, [token] * 4) for question in (2, 3) for token in (5, 6, 7)]
    assert sorted(map(sorted, deal(rollouts, range(6), 2))) == [[0, 1, 2], [3, 4, 5]]


def test_rollouts_that_are_the_same_are_computed_once():
    rollouts = [single([5, 6], [7, 8, 9])] * 3 + [single([5, 6], [7, 8, 4])]
    (batch,) = pack(rollouts, range(4), 5)
    assert batch.input_ids.tolist() == [[5, 6, 7, 8]] and batch.segments.sizes == [4]
    assert batch.index.tolist() == 4 * [1, 2, 3] and batch.targets.tolist() == 3 * [7, 8, 9] + [7, 8, 4]


def test_rows_of_their_own_by_hand():
    rollouts = [single([5, 6], [7, 8]), single([5], [9]), episode([5], [3], [4, 4], [9], [2])]
    one, other = pack(rollouts, [0, 1, 2], 11, packed=False)
    # 4 + 4 tokens with padding; a third row of 4 would not fit.
    assert one.input_ids.tolist() == [[5, 3, 4, 4], [5, 6, 7, 0]]
    assert one.position_ids.tolist() == [[0, 1, 2, 3]] * 2 and one.segments.sizes == [4]
    assert one.index.tolist() == [0, 3, 5, 6] and one.targets.tolist() == [3, 9, 7, 8]
    assert members(one) == [2, 0] and one.lengths == [2, 2]
    assert other.input_ids.tolist() == [[5]] and members(other) == [1]


@pytest.mark.parametrize("budget", [40, 64, 1000])
def test_rows_of_their_own_train_the_same_tokens_within_the_budget(budget):
    lists = random_parts(50, 300, longest=9, parts=(2, 4, 5))
    rollouts, trained = [episode(*row) for row in lists], {}
    for batch in pack(rollouts, range(50), budget, packed=False):
        assert batch.input_ids.numel() <= budget and len(batch.input_ids) == len(batch.sequences)
        for s, ids in zip(members(batch), batch.input_ids.tolist()):
            read = rollouts[s].ids[:rollouts[s].spans[-1, 1] - 1].tolist()
            assert ids[:len(read)] == read
        before = batch.input_ids.flatten()[batch.index]
        batch.put(torch.stack([before, batch.targets], 1), trained)
    for s, parts in enumerate(lists):
        ids = sum(parts, [])
        assert trained[s].tolist() == [[ids[place - 1], ids[place]] for place in sampled_places(parts)]


def test_eos_is_trained_even_where_it_is_the_pad_token():
    eos = 0
    # The second is truncated.
    (batch,) = pack([single([eos, 3], [4, eos]), single([3], [4, 4])], [0, 1], 16)
    assert batch.targets.tolist() == [4, eos, 4, 4]


@pytest.mark.parametrize("packed", [True, False])
def test_a_sequence_over_the_budget_is_alone(packed):
    batches = pack([single([1, 2, 3], [4, 5, 6]), single([1, 2, 3], [4])], [0, 1], 4, packed)
    assert [batch.input_ids.tolist() for batch in batches] == [[[1, 2, 3, 4, 5]], [[1, 2, 3]]]


def test_a_rank_without_rollouts_gets_an_idle_micro_batch(mesh):
    network = torch.nn.Linear(1, 1)
    network.packed, network.sequence_group, network.reader, network.device = True, None, None, "cpu"
    (batch,) = micro_batches(network, random_rollouts(3, 300), [], 100)
    assert batch.sequences == batch.lengths == []
    assert batch.input_ids.shape == batch.position_ids.shape == (1, 1)
    assert len(batch.index) == len(batch.targets) == sum(batch.lengths) == 0
    assert len([*micro_batches(network, random_rollouts(3, 300), range(3), 200)]) == 1


@pytest.mark.parametrize("count", [0, 24])
def test_ranks_agree_on_the_number_of_micro_batches(monkeypatch, count):
    """Where another rank has nine, each has, and those that it adds are idle."""
    asked, rollouts = [], random_rollouts(24, 300)
    monkeypatch.setattr(distributed, "gathered", lambda numbers: asked.append(numbers) or [own, 9])
    network, own = torch.nn.Linear(1, 1), len(pack(rollouts, range(count), 60))
    network.packed, network.sequence_group, network.reader, network.device = True, None, None, "cpu"
    batches = [*micro_batches(network, rollouts, range(count), 60)]
    assert asked == [[own]] and own < 9 == len(batches) and (own > 1) == (count > 1)
    assert [len(batch.sequences) > 0 for batch in batches] == [True] * own + [False] * (9 - own)


# ---------------------------------------------------------------- rollouts of several rows

def test_rows_of_a_rollout_by_hand():
    """The second row of rollout 1 goes on where its first one was after 7 8, which it does not train again."""
    rollouts = [rows_of_parts([[5, 6], [4]]), rows_of_parts([[5, 6], [7, 8], [3], [2]], [[5, 6, 7, 8, 1], [9]])]
    r = rollouts[1]
    assert r.sequence_starts.tolist() == [[0, 0, 2], [6, 3, 5]] and r.lengths_of_sequences == [3, 1]
    assert r.places.tolist() == [2, 3, 5, 11] and r.sampled_ids.tolist() == [7, 8, 2, 9]
    assert r.prompt_ids.tolist() == [5, 6] and r.longest_tail == 4
    (batch,) = pack(rollouts, [0, 1], 8)
    assert batch.sequences == [(0, slice(0, 1), 1), (1, slice(3, 4), 4), (1, slice(0, 3), 4)]
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, 1, 3]] and batch.lengths == [1, 1, 3]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 4]] and batch.segments.sizes == [2, 3, 1]
    assert batch.index.tolist() == [1, 4, 1, 2, 5] and batch.targets.tolist() == [4, 9, 7, 8, 2]
    assert batch.flat(torch.tensor([0.5, 2])).tolist() == [0.5, 2, 2, 2, 2]
    assert batch.flat([torch.tensor([1]), torch.tensor([2, 3, 4, 5])]).tolist() == [1, 5, 2, 3, 4]
    assert batch.mean(torch.tensor([1.0, 9, 1, 2, 3])).tolist() == [1, 9, 2, 2, 2]
    assert batch.sequence_lengths().tolist() == [1, 1, 3, 3, 3]
    assert deal(rollouts, [0, 1], 2) == [[0, 1], []]            # apart, the heaviest rank has 6 tokens as well
    found = {}
    one, other = pack(rollouts, [1], 5)
    for batch, expected in ((one, [0, 0, 0, 4]), (other, [4, 4, 4, 4])):
        batch.put(4 * torch.ones(len(batch.targets)), found)
        assert found[1].tolist() == expected or found[1].tolist() == [4, 4, 4, 0]
    with pytest.raises(RuntimeError, match="expanded size"):
        one.flat({1: torch.ones(3)})


@pytest.mark.parametrize("budget", [40, 64, 1000])
@pytest.mark.parametrize("packed", [True, False])
def test_every_row_of_a_rollout_is_trained_within_the_budget(budget, packed):
    """Each sampled token once, from the tokens of its own row before it, wherever the rows are."""
    lists = random_rows(24, 300, longest=9, parts=(2, 3, 4, 5))
    rollouts, found, apart = [rows_of_parts(*rows) for rows in lists], {}, 0
    values = [torch.randn(len(r.logprobs)) for r in rollouts]
    for batch in pack(rollouts, range(0, 24), budget, packed):
        assert batch.input_ids.numel() <= budget
        apart += len({s for s in members(batch)} & found.keys())
        seen = seen_from(batch) if packed else [
            [*range(place - place % batch.input_ids.shape[1], place + 1)] for place in range(batch.input_ids.numel())]
        ids = batch.input_ids.flatten()
        before = [hash(tuple(ids[seen[index]].tolist())) for index in batch.index.tolist()]
        batch.put(torch.stack([torch.tensor(before), batch.targets], 1), found)
        flat = batch.flat(values)
        assert torch.equal(flat, batch.flat(dict(enumerate(values)))) and len(flat) == len(batch.targets)
        lengths = [length for length in batch.lengths for _ in range(length)]
        assert batch.sequence_lengths().tolist() == lengths
    assert (apart > 0) == (budget < 1000)
    for s, rows in enumerate(lists):
        expected = []
        for parts in rows:
            ids = sum(parts, [])
            expected += [[hash(tuple(ids[:place])), ids[place]] for place in sampled_places(parts)]
        assert found[s].tolist() == expected


def test_values_are_put_where_they_were_taken_from():
    rollouts = [rows_of_parts(*rows) for rows in random_rows(20, 300, longest=6, parts=(2, 4))]
    values, found, means = per_token_tensors(rollouts)(), {}, {}
    for batch in pack(rollouts, range(20), 30):
        flat = batch.flat(values)
        batch.put(flat, found)
        batch.put(batch.mean(flat), means)
    for s, r in enumerate(rollouts):
        assert torch.equal(found[s], values[s])
        expected = [part.mean().expand_as(part) for part in values[s].split(r.lengths_of_sequences)]
        torch.testing.assert_close(means[s], torch.cat(expected))


@pytest.mark.parametrize("num_ranks", [2, 5])
def test_a_rank_gets_rollouts_with_all_their_rows(num_ranks):
    """And about as many tokens as the others, where rollouts have one row or many."""
    rng = random.Random(0)
    row = lambda prompt: [[prompt] * 20, [rng.randrange(9, 300) for _ in range(rng.randint(1, 30))]]
    rollouts = []
    for prompt in range(40):
        for _ in range(4):
            # What an agent asks later depends on what it was answered.
            rollouts.append(rows_of_parts(row(prompt), *(row(rng.randrange(300)) for _ in range(prompt % 4))))
    shares = deal(rollouts, range(160), num_ranks)
    assert sorted(sum(shares, [])) == [*range(160)]
    loads = [packed_size(prefix_order(sequences_of(rollouts, share))) for share in shares]
    assert max(loads) < 1.1 * sum(loads) / num_ranks


# ---------------------------------------------------------------- per-token tensors of a micro-batch

def per_token_tensors(rollouts):
    """A function that makes random tensors, one [len] for each rollout, the same in each test."""
    generator = torch.Generator().manual_seed(0)
    return lambda: [torch.randn(len(r.logprobs), generator=generator) for r in rollouts]


@pytest.mark.parametrize("parts", [(2,), (2, 3, 4, 5, 6, 7)])
def test_a_micro_batch_keeps_the_tokens_of_each_sequence_together(parts):
    rollouts = random_rollouts(20, 300, longest=6, parts=parts)
    values, one_each = per_token_tensors(rollouts)(), torch.randn(20)
    batches = pack(rollouts, range(20), 25)
    assert len(batches) > 1 and max(len(batch.sequences) for batch in batches) > 1
    for batch in batches:
        flat = batch.flat(values)
        assert torch.equal(flat, torch.cat([values[s] for s in members(batch)]))
        assert torch.equal(flat, batch.flat(dict(enumerate(values))))
        assert list(split(batch, flat)) == members(batch)
        means, same = split(batch, batch.mean(flat)), split(batch, batch.flat(one_each))
        for s, part in split(batch, flat).items():
            assert torch.equal(part, values[s]) and (same[s] == one_each[s]).all()
            assert len(same[s]) == len(values[s])
            torch.testing.assert_close(means[s], values[s].mean().expand(len(values[s])))


@pytest.mark.parametrize("name", losses.LOSSES)
def test_a_loss_of_packed_rows_is_that_of_each_row_by_itself(name):
    """Values, gradients and what is clipped, where a sequence has up to three spans."""
    rollouts = random_rollouts(16, 300, longest=6, parts=(2, 4, 6))
    make = per_token_tensors(rollouts)
    logps, old_logps, engine_logps, upstream = (make() for _ in range(4))
    adv = torch.randn(16)
    by_itself = lambda x: x.mean().expand_as(x)
    for batch in pack(rollouts, range(16), 80):
        logp = batch.flat(logps).requires_grad_()
        loss, low, high = losses.LOSSES[name](logp, batch.flat(old_logps), batch.flat(adv), mean=batch.mean,
                                              lengths=batch.sequence_lengths,
                                              engine_logp=batch.flat(engine_logps), epsilon=0.2, epsilon_high=0.2)
        (loss * batch.flat(upstream)).sum().backward()
        found = [split(batch, x) for x in (loss.detach(), logp.grad, low, high)]
        for s in members(batch):
            alone = logps[s].clone().requires_grad_()
            loss, low, high = losses.LOSSES[name](alone, old_logps[s], adv[s].expand(len(alone)),
                                                  mean=by_itself, lengths=lambda: len(alone), engine_logp=engine_logps[s],
                                                  epsilon=0.2, epsilon_high=0.2)
            (loss * upstream[s]).sum().backward()
            for ours, expected in zip(found, (loss.detach(), alone.grad, low, high)):
                torch.testing.assert_close(ours[s], expected)


@pytest.mark.parametrize("correction", losses.CORRECTIONS)
def test_a_correction_of_packed_rows_is_that_of_each_row_by_itself(correction):
    rollouts = random_rollouts(16, 300, longest=6, parts=(2, 4, 6))
    make = per_token_tensors(rollouts)
    old_logps, engine_logps = ([0.3 * x for x in make()] for _ in range(2))
    lengths = torch.tensor([len(x) for x in old_logps])
    bounds, found = {"cap": 1.2, "low": 0.8, "high": 1.3}, {}
    for batch in pack(rollouts, range(16), 80):
        found |= split(batch, losses.CORRECTIONS[correction](
            batch.flat(old_logps), batch.flat(engine_logps), mean=batch.mean,
            lengths=batch.sequence_lengths, **bounds))
    for s in range(16):
        torch.testing.assert_close(found[s], losses.CORRECTIONS[correction](
            old_logps[s], engine_logps[s], mean=lambda x: x.mean().expand_as(x),
            lengths=lambda: lengths[s].expand(len(old_logps[s])), **bounds))
    assert correction == "none" or len({round(x.item(), 4) for x in torch.cat(list(found.values()))}) > 1


def test_the_tensors_of_an_idle_micro_batch_are_empty():
    batch, values = micro_batch([], 1), torch.randn(5)
    assert batch.flat(values).tolist() == batch.mean(torch.empty(0)).tolist() == []
    assert batch.flat({}).tolist() == batch.flat([values]).tolist() == []
    assert split(batch, torch.empty(0)) == {}
    assert batch.flat({}).dtype == torch.float32
