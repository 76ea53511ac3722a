"""Packed rows: which tokens are trained, what a micro-batch makes of per-token tensors, and the attention."""
import inspect
import random

import numpy as np
import pytest
import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

import losses
import packing
from packing import deal, idle, micro_batches, pack, packed_attention
from rollout import Rollout


def single(prompt_ids, completion_ids):
    """A Rollout of one span, from lists of ids."""
    return Rollout.single(prompt_ids, completion_ids, [0.0] * len(completion_ids), "stop")


def episode(*parts):
    """A Rollout from lists of ids: the prompt, then by turns what was sampled and what was inserted."""
    ends = np.cumsum([len(part) for part in parts])
    spans = [ends[i:i + 2] for i in range(0, len(parts) - 1, 2)]
    return Rollout(np.array(sum(parts, []), dtype=np.int32), np.array(spans, dtype=np.int32),
                   np.zeros(sum(map(len, parts[1::2])), dtype=np.float32), "stop")


def random_parts(count, vocab, seed=0, longest=20, parts=(2,)):
    """Lists of parts for `episode`. parts: how many each may have; of an odd number the last is inserted."""
    rng = random.Random(seed)
    ids = lambda: [rng.randrange(vocab) for _ in range(rng.choice([1, 1, 2, rng.randint(1, longest)]))]
    return [[ids() for _ in range(rng.choice(parts))] for _ in range(count)]


def random_rollouts(count, vocab, seed=0, longest=20, parts=(2,)):
    return [episode(*lists) for lists in random_parts(count, vocab, seed, longest, parts)]


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
    rollouts = [single([5] * 20, [7] * length()) for _ in range(400)]
    chosen = rng.sample(range(400), 320)
    shares = deal(rollouts, chosen, num_ranks)
    assert sorted(sum(shares, [])) == sorted(chosen)
    tokens = [sum(20 + len(rollouts[s].logprobs) for s in share) for share in shares]
    assert max(abs(count / (sum(tokens) / num_ranks) - 1) for count in tokens) < 0.05
    example = [single([1], [2] * (size - 1)) for size in (9, 5, 4, 3)]
    assert deal(example, range(4), 2) == [[0, 3], [1, 2]] and deal(example, [2], 3) == [[2], [], []]


def test_pack_by_hand():
    (batch,) = pack([single([5, 6], [7, 8]), single([5], [9])], [0, 1], 8, "cpu")
    assert (batch.input_ids.tolist() == [[5, 6, 7, 8, 5, 9]]
            and batch.position_ids.tolist() == [[0, 1, 2, 3, 0, 1]])
    assert (batch.bounds == batch.offsets.tolist() == [0, 4, 6]
            and batch.index.tolist() == [1, 2, 4] and batch.targets.tolist() == [7, 8, 9])
    assert batch.spread(torch.tensor([0.5, 2.0])).tolist() == [0.5, 0.5, 2.0]
    assert batch.flat([torch.tensor([1, 2]), torch.tensor([3])]).tolist() == [1, 2, 3]
    assert batch.mean(torch.tensor([1.0, 2.0, 5.0])).tolist() == [1.5, 1.5, 5.0]
    parts = batch.split(torch.tensor([1, 2, 3]))
    assert {row: part.tolist() for row, part in parts.items()} == {0: [1, 2], 1: [3]}


def test_pack_of_several_spans_by_hand():
    """The tokens 7 8, 9 and 4 are sampled; 1 2 and 3 between them and the 3 at the end are inserted."""
    rows = [episode([5], [9]), episode([5, 6], [7, 8], [1, 2], [9], [3], [4], [3])]
    (batch,) = pack(rows, [0, 1], 12, "cpu")
    assert batch.sequences == [1, 0] and batch.input_ids.tolist() == [[5, 6, 7, 8, 1, 2, 9, 3, 4, 3, 5, 9]]
    assert batch.position_ids.tolist() == [[*range(10), 0, 1]] and batch.bounds == [0, 10, 12]
    assert batch.index.tolist() == [1, 2, 5, 7, 10] and batch.targets.tolist() == [7, 8, 9, 4, 9]
    assert batch.spread(torch.tensor([2.0, 0.5])).tolist() == [0.5, 0.5, 0.5, 0.5, 2.0]
    assert batch.flat([torch.tensor([5]), torch.tensor([1, 2, 3, 4])]).tolist() == [1, 2, 3, 4, 5]
    assert batch.mean(torch.tensor([1.0, 2.0, 3.0, 6.0, 5.0])).tolist() == [3, 3, 3, 3, 5]
    parts = batch.split(torch.tensor([1, 2, 3, 4, 5]))
    assert {row: part.tolist() for row, part in parts.items()} == {1: [1, 2, 3, 4], 0: [5]}


@pytest.mark.parametrize("longest, parts", [(20, (2,)), (5, (2, 3, 4, 5, 6, 7))])
@pytest.mark.parametrize("budget", [40, 64, 1000])
def test_pack_trains_every_sampled_token_once_and_no_other_token(budget, longest, parts):
    lists = random_parts(50, 300, longest=longest, parts=parts)
    rollouts = [episode(*row) for row in lists]
    rows = list(range(0, 50, 2))
    batches = pack(rollouts, rows, budget, "cpu")
    assert sorted(row for batch in batches for row in batch.sequences) == rows
    for batch in batches:
        assert batch.input_ids.shape[1] <= budget
        trained = iter(zip(batch.index.tolist(), batch.targets.tolist(), batch.owner.tolist()))
        for s, (row, start, end) in enumerate(zip(batch.sequences, batch.bounds, batch.bounds[1:])):
            ids = sum(lists[row], [])
            assert batch.input_ids[0, start:end].tolist() == ids
            assert batch.position_ids[0, start:end].tolist() == list(range(end - start))
            for place in sampled_places(lists[row]):
                assert next(trained) == (start + place - 1, ids[place], s)
        assert next(trained, None) is None


def test_rows_of_their_own_by_hand():
    rollouts = [single([5, 6], [7, 8]), single([5], [9]), episode([5], [3], [4], [9], [2])]
    one, other = pack(rollouts, [0, 1, 2], 11, "cpu", packed=False)
    # 5 + 5 tokens with padding; a third row of 5 would not fit.
    assert one.input_ids.tolist() == [[5, 3, 4, 9, 2], [5, 6, 7, 8, 0]]
    assert one.position_ids.tolist() == [[0, 1, 2, 3, 4]] * 2 and one.bounds is None
    assert one.index.tolist() == [0, 2, 6, 7] and one.targets.tolist() == [3, 9, 7, 8]
    assert one.sequences == [2, 0] and one.owner.tolist() == [0, 0, 1, 1]
    assert other.input_ids.tolist() == [[5, 9]] and other.sequences == [1]


@pytest.mark.parametrize("budget", [40, 64, 1000])
def test_rows_of_their_own_train_the_same_tokens_within_the_budget(budget):
    lists = random_parts(50, 300, longest=9, parts=(2, 4, 5))
    rollouts, trained = [episode(*row) for row in lists], {}
    for batch in pack(rollouts, range(50), budget, "cpu", packed=False):
        assert batch.input_ids.numel() <= budget and len(batch.input_ids) == len(batch.sequences)
        for s, ids in zip(batch.sequences, batch.input_ids.tolist()):
            assert ids[:len(rollouts[s].ids)] == rollouts[s].ids.tolist()
        before = batch.input_ids.flatten()[batch.index]
        trained |= batch.split(torch.stack([before, batch.targets], 1))
    for s, parts in enumerate(lists):
        ids = sum(parts, [])
        assert trained[s].tolist() == [[ids[place - 1], ids[place]] for place in sampled_places(parts)]


def test_eos_is_trained_even_where_it_is_the_pad_token():
    eos = 0
    # The second is truncated.
    (batch,) = pack([single([eos, 3], [4, eos]), single([3], [4, 4])], [0, 1], 16, "cpu")
    assert batch.targets.tolist() == [4, eos, 4, 4]


def test_a_sequence_over_the_budget_is_refused():
    with pytest.raises(ValueError, match="5 tokens does not fit token_budget=4"):
        pack([single([1, 2, 3], [4, 5])], [0], 4, "cpu")


def test_a_rank_without_rollouts_gets_an_idle_micro_batch(mesh):
    network = torch.nn.Linear(1, 1)
    network.packed = True
    (batch,) = micro_batches(network, random_rollouts(3, 300), [], 100)
    assert batch.sequences == batch.lengths == []
    assert batch.input_ids.shape == batch.position_ids.shape == (1, 1)
    assert len(batch.index) == len(batch.targets) == len(batch.owner) == len(batch.rows) == 0
    assert len(micro_batches(network, random_rollouts(3, 300), range(3), 200)) == 1


# ---------------------------------------------------------------- per-token tensors of a micro-batch

def per_token_tensors(rollouts):
    """A function that makes random tensors, one [len] for each rollout, the same in each test."""
    generator = torch.Generator().manual_seed(0)
    return lambda: [torch.randn(len(r.logprobs), generator=generator) for r in rollouts]


@pytest.mark.parametrize("parts", [(2,), (2, 3, 4, 5, 6, 7)])
def test_a_micro_batch_keeps_the_tokens_of_each_sequence_together(parts):
    rollouts = random_rollouts(20, 300, longest=6, parts=parts)
    values, one_each = per_token_tensors(rollouts)(), torch.randn(20)
    batches = pack(rollouts, range(20), 60, "cpu")
    assert len(batches) > 1 and max(len(batch.sequences) for batch in batches) > 1
    for batch in batches:
        flat = batch.flat(values)
        assert torch.equal(flat, torch.cat([values[s] for s in batch.sequences]))
        assert torch.equal(flat, batch.flat(dict(enumerate(values))))
        assert list(batch.split(flat)) == batch.sequences
        means, spread = batch.split(batch.mean(flat)), batch.split(batch.spread(one_each))
        for s, part in batch.split(flat).items():
            assert torch.equal(part, values[s]) and (spread[s] == one_each[s]).all()
            assert len(spread[s]) == len(values[s])
            torch.testing.assert_close(means[s], values[s].mean().expand(len(values[s])))


@pytest.mark.parametrize("name", losses.LOSSES)
def test_a_loss_of_packed_rows_is_that_of_each_row_by_itself(name):
    """Values, gradients and what is clipped, where a sequence has up to three spans."""
    rollouts = random_rollouts(16, 300, longest=6, parts=(2, 4, 6))
    make = per_token_tensors(rollouts)
    logps, old_logps, upstream = make(), make(), make()
    marks, adv = [x > 0.5 for x in make()], torch.randn(16)
    by_itself = lambda x: x.mean().expand_as(x)
    for batch in pack(rollouts, range(16), 80, "cpu"):
        logp = batch.flat(logps).requires_grad_()
        loss, low, high = losses.LOSSES[name](logp, batch.flat(old_logps), batch.spread(adv), mean=batch.mean,
                                              marked=batch.flat(marks))
        (loss * batch.flat(upstream)).sum().backward()
        found = [batch.split(x) for x in (loss.detach(), logp.grad, low, high)]
        for s in batch.sequences:
            alone = logps[s].clone().requires_grad_()
            loss, low, high = losses.LOSSES[name](alone, old_logps[s], adv[s].expand(len(alone)),
                                                  mean=by_itself, marked=marks[s])
            (loss * upstream[s]).sum().backward()
            for ours, expected in zip(found, (loss.detach(), alone.grad, low, high)):
                torch.testing.assert_close(ours[s], expected)


@pytest.mark.parametrize("correction", losses.CORRECTIONS)
def test_a_correction_of_packed_rows_is_that_of_each_row_by_itself(correction):
    rollouts = random_rollouts(16, 300, longest=6, parts=(2, 4, 6))
    make = per_token_tensors(rollouts)
    old_logps, engine_logps = ([0.3 * x for x in make()] for _ in range(2))
    lengths = torch.tensor([len(x) for x in old_logps])
    bounds, found = {"low": 0.8, "high": 1.3}, {}
    for batch in pack(rollouts, range(16), 80, "cpu"):
        found |= batch.split(losses.correction_weights(
            batch.flat(old_logps), batch.flat(engine_logps), correction, mean=batch.mean,
            lengths=batch.spread(lengths), **bounds))
    for s in range(16):
        torch.testing.assert_close(found[s], losses.correction_weights(
            old_logps[s], engine_logps[s], correction, mean=lambda x: x.mean().expand_as(x),
            lengths=lengths[s].expand(len(old_logps[s])), **bounds))
    assert correction == "none" or len({round(x.item(), 4) for x in torch.cat(list(found.values()))}) > 1


def test_the_tensors_of_an_idle_micro_batch_are_empty():
    batch, values = idle("cpu"), torch.randn(5)
    assert batch.spread(values).tolist() == batch.mean(torch.empty(0)).tolist() == []
    assert batch.flat({}).tolist() == batch.flat([values]).tolist() == []
    assert batch.split(torch.empty(0)) == {}
    assert batch.flat({}).dtype == torch.float32 and batch.flat({}, torch.bool).dtype == torch.bool


# ---------------------------------------------------------------- attention

def test_no_attention_mask_is_made_for_packed_rows():
    """To make one, transformers would search position_ids, and each forward would wait for the device."""
    assert "sdpa" in ALL_MASK_ATTENTION_FUNCTIONS and "packed" not in ALL_MASK_ATTENTION_FUNCTIONS


class OnCuda(torch.Tensor):
    is_cuda = True


def slow_attention(q, k, v, bounds, scale, window=None, softcap=None, sinks=None):
    """By loops over sequences, tokens and heads; q [1, heads, T, d] -> [1, T, heads, d]."""
    rows = torch.zeros(q.shape[2], q.shape[1], v.shape[3], dtype=q.dtype)
    for start, end in zip(bounds, bounds[1:]):
        for t in range(start, end):
            first = start if window is None else max(start, t - window + 1)
            for head in range(q.shape[1]):
                shared = head // (q.shape[1] // k.shape[1])
                scores = [q[0, head, t].dot(k[0, shared, j]) * scale for j in range(first, t + 1)]
                if softcap is not None:
                    scores = [softcap * torch.tanh(score / softcap) for score in scores]
                weights = [score.exp() for score in scores]
                total = sum(weights) + (sinks[head].exp() if sinks is not None else 0)
                rows[t, head] = sum(w / total * v[0, shared, j] for w, j in zip(weights, range(first, t + 1)))
    return rows[None]


def random_attention(dtype=torch.float64):
    return [torch.randn(1, heads, 12, 8, dtype=dtype).requires_grad_() for heads in (4, 2, 2)]


@pytest.mark.parametrize("bounds", [[0, 12], [0, 1, 5, 12], None])
@pytest.mark.parametrize("window", [None, 1, 3, 7, 12, 4096])
@pytest.mark.parametrize("softcap, with_sinks", [(None, False), (2.0, False), (None, True), (2.0, True)])
def test_attention_is_that_of_its_formula(bounds, window, softcap, with_sinks):
    """Values and gradients, with windows, softcapped scores and sinks, of a packed row or of a row alone."""
    fast, sinks = random_attention(), torch.randn(4, dtype=torch.float64).requires_grad_()
    *slow, slow_sinks = (x.detach().clone().requires_grad_() for x in (*fast, sinks))
    found, _ = packed_attention(None, *fast, None, 0.3, bounds=bounds, sliding_window=window, softcap=softcap,
                                s_aux=sinks if with_sinks else None)
    expected = slow_attention(*slow, bounds or [0, 12], 0.3, window, softcap,
                              slow_sinks if with_sinks else None)
    upstream = torch.randn(expected.shape, dtype=torch.float64)
    for output in (found, expected):
        (output * upstream).sum().backward()
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    for ours, theirs in zip([*fast, sinks][:3 + with_sinks], [*slow, slow_sinks]):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-6, rtol=1e-5)


def test_rows_of_their_own_are_attended_to_each_by_itself():
    q, k, v = (torch.cat([x.detach(), y.detach()]) for x, y in zip(random_attention(), random_attention()))
    found, _ = packed_attention(None, q, k, v, None, 0.3, sliding_window=5)
    for row in range(2):
        one = [x[row:row + 1] for x in (q, k, v)]
        torch.testing.assert_close(found[row:row + 1], slow_attention(*one, [0, 12], 0.3, 5))


@pytest.mark.parametrize("window", [None, 3, 4, 64])
def test_attention_on_cuda_asks_for_causal_sequences(monkeypatch, window):
    """PyTorch's CUDA kernel replaced by what its arguments mean: the CPU path's values."""
    real = inspect.signature(packing.varlen.varlen_attn)

    def loop(*args, **kwargs):
        q, k, v, starts, key_starts, longest, key_longest = args
        # What PyTorch's own would take.
        bound = real.bind(*args, **kwargs).arguments
        before, after = bound["window_size"]
        assert after == 0 and bound.get("enable_gqa", True)
        assert ("enable_gqa" in bound) == ("enable_gqa" in real.parameters)
        assert starts.dtype == torch.int32 and starts.tolist() == key_starts.tolist()
        assert longest == key_longest == max(starts.diff())
        q, k, v = (x.as_subclass(torch.Tensor).float().transpose(0, 1)[None] for x in (q, k, v))
        # Its window counts the tokens before, without the token itself.
        window = None if before < 0 else before + 1
        return slow_attention(q, k, v, starts.tolist(), kwargs["scale"], window)[0]

    q, k, v = (x.detach() for x in random_attention(torch.float32))
    bounds = [0, 1, 8, 12]
    expected, _ = packed_attention(None, q, k, v, None, 0.3, bounds=bounds, sliding_window=window)
    monkeypatch.setattr(packing.varlen, "varlen_attn", loop)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    on_cuda, _ = packed_attention(None, *(x.bfloat16().as_subclass(OnCuda) for x in (q, k, v)), None, 0.3,
                                  bounds=bounds, offsets=torch.tensor(bounds, dtype=torch.int32),
                                  sliding_window=window)
    torch.testing.assert_close(on_cuda.as_subclass(torch.Tensor).float(), expected, atol=0.05, rtol=0.05)
