"""What only a GPU can show: the attention kernel, products kept in float32, a policy, vLLM's sleep."""
import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

import attention
import hf_engine
import vllm_engine
from attention import packed_attention
from model import load_policy, product
from packing import Segments, micro_batch, pack
from runs import requests, shut_down, split
from test_packing import episode
from weights import engine_weights

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture()
def mesh():
    torch.cuda.set_device(0)
    # Another module's, over gloo.
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    return dist.init_device_mesh("cuda", (1,))


def distance(x, expected):
    return ((x.double() - expected).norm() / expected.norm()).item()


# The tokens that each sequence adds to a row, behind the first `shared` ones of the sequence before it.
@pytest.mark.parametrize("row", [[(1, 0), (700, 0), (3, 0), (64, 0), (65, 0), (1300, 0)],
                                 [(300, 0), (1, 200), (64, 200), (65, 201), (500, 3), (130, 503), (7, 0)]])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("heads, kv_heads, size", [(16, 8, 128), (5, 5, 32), (8, 2, 64)])
def test_the_attention_kernel_is_as_exact_as_the_loop(monkeypatch, heads, kv_heads, size, window, row):
    """Values and gradients of both in bfloat16 against a float64 softmax, sequence by sequence.

    With shared prefixes a segment has more keys than tokens, so this shows how the kernel aligns its mask.
    """
    T, path, paths = 0, np.arange(0), []
    for own, shared in row:
        path = np.concatenate([path[:shared], np.arange(T, T + own)])
        paths.append(path)
        T += own
    segments = Segments([own for own, _ in row], paths)
    inputs = [torch.randn(1, count, T, size, device="cuda").bfloat16()
              for count in (heads, kv_heads, kv_heads)]
    upstream = torch.randn(1, T, heads, size, device="cuda").bfloat16()

    slow = [x.double().requires_grad_() for x in inputs]
    rows = []
    for (own, _), path in zip(row, paths):
        q, k, v = (x[0][:, torch.from_numpy(path).cuda()] for x in slow)
        k, v = (x.repeat_interleave(heads // kv_heads, 0) for x in (k, v))
        ones = torch.ones(len(path), len(path), dtype=torch.bool, device="cuda")
        hidden = ones.triu(1) | (ones.tril(-window) if window else ~ones)
        table = (q @ k.transpose(1, 2) / 8).masked_fill(hidden, -torch.inf).softmax(-1)
        rows.append((table @ v)[:, len(path) - own:])
    expected = torch.cat(rows, dim=1).transpose(0, 1)[None]
    expected.backward(upstream.double())

    distances = []
    for kernel in (True, False):
        monkeypatch.setattr(attention, "kernel_takes", lambda query, value: kernel)
        fast = [x.clone().requires_grad_() for x in inputs]
        output, _ = packed_attention(None, *fast, None, 1 / 8, segments, sliding_window=window)
        output.backward(upstream)
        distances.append([distance(output, expected),
                          *(distance(x.grad, y.grad) for x, y in zip(fast, slow))])
    for by_kernel, by_loop in zip(*distances):
        assert by_kernel < 1e-2 and by_kernel < 2 * by_loop, distances


def test_products_of_bfloat16_are_kept_in_float32():
    a, b = (torch.randn(shape, device="cuda").bfloat16() for shape in ((300, 1024), (1024, 5000)))
    # Row-major and column-major.
    for x, y in ((a, b), (a, b.T.contiguous().T), (a.T.contiguous().T, b)):
        assert distance(product(x, y), a.double() @ b.double()) < 1e-5


def test_a_policy_in_bfloat16_is_near_plain_forwards_in_float32(folder, mesh):
    rng = random.Random(0)
    part = lambda longest: [rng.randrange(256) for _ in range(rng.randint(1, longest))]
    # One span, or two with inserted tokens between them.
    prompts = [part(30) for _ in range(10)]
    rollouts = [episode(prompts[i // 4], part(90), *((part(30), part(60)) if i % 2 else ()))
                for i in range(40)]
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    policy, gaps = load_policy(folder, mesh, torch.bfloat16), []
    for batch in pack(rollouts, range(40), 1000):
        batch = batch.to("cuda")
        logp, _ = policy(batch, 1.0)
        logp.sum().backward()
        for s, values in split(batch, logp.detach().cpu()).items():
            ids, spans = torch.from_numpy(rollouts[s].ids).long(), rollouts[s].spans
            with torch.no_grad():
                table = plain(ids[None]).logits[0].log_softmax(-1)
            logps = table[:-1].gather(1, ids[1:, None])[:, 0]
            gaps.append((values - torch.cat([logps[start - 1:end - 1] for start, end in spans])).abs())
    assert torch.cat(gaps).mean() < 0.05
    assert all(p.grad.full_tensor().isfinite().all() for p in policy.parameters())
    policy.zero_grad()
    logp, _ = policy(micro_batch([], 1).to("cuda"), 1.0)
    logp.sum().backward()
    assert len(logp) == 0 and not any(p.grad.full_tensor().any() for p in policy.parameters())


def gap(policy, rollouts):
    (batch,) = pack(rollouts, range(len(rollouts)), 4096)
    batch = batch.to("cuda")
    with torch.no_grad():
        logp, _ = policy(batch, 1.0)
    policy.reshard()
    theirs = batch.flat([torch.from_numpy(r.logprobs).cuda() for r in rollouts])
    return (logp - theirs).abs().mean()


def test_the_plain_engine_samples_in_bfloat16(folder, mesh):
    engine = hf_engine.HFEngine(folder, torch.bfloat16, 64, [10], 0.2)
    rollouts = engine.generate(requests([[65, 66], [67]], 16, [0, 100], 24, 1.0))
    assert gap(load_policy(folder, mesh, torch.bfloat16), rollouts) < 0.05


def test_vllm_gives_its_memory_back_and_takes_new_weights(folder, mesh):
    """20 times: asleep it has released most of its share; after a sync it has the trainer's weights."""
    def in_use():
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return total - free
    policy, used = load_policy(folder, mesh, torch.bfloat16), []
    engine = vllm_engine.VLLMEngine(folder, torch.bfloat16, 64, [10], 0.1)
    engine._wake()
    awake = in_use()
    engine._sleep()
    for cycle in range(20):
        with torch.no_grad():
            for p in policy.parameters():
                p += 0.01 * torch.randn_like(p)
        engine.load_weights(engine_weights(policy, engine.naming, torch.bfloat16), cycle)
        rollouts = engine.generate(requests([[65, 66], [67]], 16, [cycle, 100 + cycle], 24, 1.0))
        used.append(in_use())
        assert gap(policy, rollouts) < 0.05
    total = torch.cuda.get_device_properties(0).total_memory
    assert awake - used[-1] > 0.05 * total and used[-1] - used[2] < 64e6, (awake, used)
    shut_down(engine)
