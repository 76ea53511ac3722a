"""The attention of packed rows against loops over segments, tokens and heads."""
import inspect

import numpy as np
import pytest
import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from attention import Pick, kernel_takes, packed_attention
from options import attention_kernel
from packing import Segments


class OnCuda(torch.Tensor):
    is_cuda = True


def row(*paths):
    """The Segments of a row from where the tokens of each sequence stand; a segment is what is new in it."""
    sizes, T = [], 0
    for path in paths:
        sizes.append(path[-1] + 1 - T)
        T += sizes[-1]
    return Segments(sizes, [np.array(path) for path in paths])


# Rows of 12 tokens: one sequence, three without and with shared beginnings, which for the last is 0 1 2 5.
ROWS = {"one": row(range(12)), "three": row(range(1), range(1, 5), range(5, 12)),
        "a prompt of five": row(range(8), [*range(5), 8], [*range(5), 9, 10, 11]),
        "a tree": row(range(5), [0, 1, 2, 5, 6, 7], [0, 1, 2, 5, 8, 9], [10, 11])}


def slow_attention(q, k, v, segments, scale, window=None, softcap=None, sinks=None):
    """q [1, heads, T, d] -> [1, T, heads, d]"""
    rows = torch.zeros(q.shape[2], q.shape[1], v.shape[3], dtype=q.dtype)
    places = list(range(q.shape[2])) if segments.places is None else segments.places.tolist()
    for i, size in enumerate(segments.sizes):
        start, first = sum(segments.sizes[:i]), sum(segments.key_sizes[:i])
        path = places[first:first + segments.key_sizes[i]]
        for t in range(start, start + size):
            seen = path[:path.index(t) + 1]
            seen = seen if window is None else seen[-window:]
            for head in range(q.shape[1]):
                shared = head // (q.shape[1] // k.shape[1])
                scores = [q[0, head, t].dot(k[0, shared, j]) * scale for j in seen]
                if softcap is not None:
                    scores = [softcap * torch.tanh(score / softcap) for score in scores]
                weights = [score.exp() for score in scores]
                total = sum(weights) + (sinks[head].exp() if sinks is not None else 0)
                rows[t, head] = sum(w / total * v[0, shared, j] for w, j in zip(weights, seen))
    return rows[None]


def random_attention(dtype=torch.float64):
    return [torch.randn(1, heads, 12, 8, dtype=dtype).requires_grad_() for heads in (4, 2, 2)]


def test_no_attention_mask_is_made_for_packed_rows():
    """To make one, transformers would search position_ids, and each forward would wait for the device."""
    assert "sdpa" in ALL_MASK_ATTENTION_FUNCTIONS and "packed" not in ALL_MASK_ATTENTION_FUNCTIONS


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("window", [None, 1, 3, 7, 12, 4096])
@pytest.mark.parametrize("softcap, with_sinks", [(None, False), (2.0, False), (None, True), (2.0, True)])
def test_attention_is_that_of_its_formula(name, window, softcap, with_sinks):
    """Values and gradients, with windows, softcaps and sinks, of rows with one sequence or several."""
    fast, sinks = random_attention(), torch.randn(4, dtype=torch.float64).requires_grad_()
    *slow, slow_sinks = (x.detach().clone().requires_grad_() for x in (*fast, sinks))
    found, _ = packed_attention(None, *fast, None, 0.3, segments=ROWS[name], sliding_window=window,
                                softcap=softcap, s_aux=sinks if with_sinks else None)
    expected = slow_attention(*slow, ROWS[name], 0.3, window, softcap,
                              slow_sinks if with_sinks else None)
    upstream = torch.randn(expected.shape, dtype=torch.float64)
    for output in (found, expected):
        (output * upstream).sum().backward()
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    for ours, theirs in zip([*fast, sinks][:3 + with_sinks], [*slow, slow_sinks]):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-6, rtol=1e-5)


def test_rows_of_their_own_are_attended_to_each_by_itself():
    q, k, v = (torch.cat([x.detach(), y.detach()]) for x, y in zip(random_attention(), random_attention()))
    found, _ = packed_attention(None, q, k, v, None, 0.3, ROWS["one"], sliding_window=5)
    for number in range(2):
        one = [x[number:number + 1] for x in (q, k, v)]
        torch.testing.assert_close(found[number:number + 1], slow_attention(*one, ROWS["one"], 0.3, 5))


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("window", [None, 3, 4, 64])
def test_attention_on_cuda_asks_for_causal_sequences(monkeypatch, window, name):
    """PyTorch's CUDA kernel replaced by what its arguments mean: the CPU path's values.

    Its mask is aligned at the bottom right: the last query of a segment sees the last of its keys.
    """
    real = inspect.signature(attention_kernel.varlen.varlen_attn)

    def loop(*args, **kwargs):
        q, k, v, starts, key_starts, longest, key_longest = args
        # What PyTorch's own would take.
        bound = real.bind(*args, **kwargs).arguments
        before, after = bound["window_size"]
        assert after == 0 and bound.get("enable_gqa", True)
        assert ("enable_gqa" in bound) == ("enable_gqa" in real.parameters)
        assert starts.dtype == key_starts.dtype == torch.int32
        assert (starts[-1], key_starts[-1]) == (len(q), len(k)) and len(k) == len(v)
        assert longest == max(starts.diff()) and key_longest == max(key_starts.diff())
        q, k, v = (x.as_subclass(torch.Tensor).float() for x in (q, k, v))
        outputs = []
        for i in range(len(starts) - 1):
            queries = q[starts[i]:starts[i + 1]]
            keys, values = (x[key_starts[i]:key_starts[i + 1]] for x in (k, v))
            keys, values = (x.repeat_interleave(2, 1) for x in (keys, values))
            ahead = len(keys) - len(queries)
            for t, query in enumerate(queries):
                # The window counts the tokens before, without the token itself.
                seen = slice(0 if before < 0 else max(0, t + ahead - before), t + ahead + 1)
                scores = torch.einsum("hd,khd->hk", query, keys[seen]) * kwargs["scale"]
                outputs.append(torch.einsum("hk,khd->hd", scores.softmax(1), values[seen]))
        return torch.stack(outputs)

    q, k, v = (x.detach() for x in random_attention(torch.float32))
    expected, _ = packed_attention(None, q, k, v, None, 0.3, segments=ROWS[name], sliding_window=window)
    monkeypatch.setattr(attention_kernel.varlen, "varlen_attn", loop)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    on_cuda, _ = packed_attention(None, *(x.bfloat16().as_subclass(OnCuda) for x in (q, k, v)), None, 0.3,
                                  segments=ROWS[name], sliding_window=window)
    torch.testing.assert_close(on_cuda.as_subclass(torch.Tensor).float(), expected, atol=0.05, rtol=0.05)


def test_gradients_of_shared_tokens_are_summed_in_float32(monkeypatch):
    """A thousand times 1: in bfloat16 the sum stops at 256. A CPU's own index_add_ would sum in float32."""
    def one_by_one(total, dim, places, values):
        for place, value in zip(places, values):
            total[place] += value
        return total
    monkeypatch.setattr(torch.Tensor, "index_add_", one_by_one)
    x = torch.ones(3, 2, dtype=torch.bfloat16).requires_grad_()
    picked = Pick.apply(x, torch.tensor([0] * 1000 + [2]))
    picked.sum().backward()
    assert picked.dtype == x.grad.dtype == torch.bfloat16
    assert x.grad[:, 0].tolist() == [1000, 0, 1]


def test_several_rows_are_not_for_the_kernel(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    one, two = (torch.zeros(rows, 2, 5, 8).bfloat16().as_subclass(OnCuda) for rows in (1, 2))
    assert kernel_takes(one, one) and not kernel_takes(two, two)


@pytest.mark.parametrize("mask, others, name", [
    (torch.ones(1), {}, "attention_mask"), (None, {"block_indices": torch.ones(1)}, "block_indices")])
def test_a_tensor_that_is_not_known_is_refused(mask, others, name):
    """Sparse attention comes as one, and short sequences are the same without it."""
    known = {"position_ids": torch.arange(12), "dropout": 0.0, "block_indices": None}
    packed_attention(None, *random_attention(), None, 0.3, ROWS["one"], **known)
    with pytest.raises(ValueError, match=f"its attention depends on {name}, which is not supported"):
        packed_attention(None, *random_attention(), mask, 0.3, ROWS["one"], **known | others)


def test_rows_without_segments_are_a_sequence_each():
    """Where a model's layers hand none on."""
    inputs = random_attention()
    found, expected = (packed_attention(None, *inputs, None, 0.3, segments)[0]
                       for segments in (None, ROWS["one"]))
    assert torch.equal(found, expected)
