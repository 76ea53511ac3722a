"""The tokens that each sampled token was drawn from: read from vLLM, in packed rows, and in logprobs and gradients."""
import os
import pickle
import shutil

import numpy as np
import pytest
import torch
from runs import ROOT, forked
from test_lora import SMALL, adapted
from test_model import keep, plain_logps, random_sets
from test_packing import episode, random_parts, random_rows, rows_of_parts
from transformers import AutoModelForCausalLM

from model import load_policy, micro_batches
from options import kept_sets
from options.another_prompt import behind
from options.lora import merge
from packing import pack


@pytest.mark.parametrize("packed", [True, False])
def test_a_micro_batch_has_the_set_of_each_of_its_tokens(packed):
    """Also of a rollout with several rows, which may be in several micro-batches."""
    rows = random_rows(9, 200)
    rollouts, sets = [rows_of_parts(*lists) for lists in rows], random_sets([sum(lists, []) for lists in rows], 200)
    keep(rollouts, sets)
    seen = 0
    for batch in pack(rollouts, range(9), 60, packed):
        kept, numbers = kept_sets.table(batch, rollouts), {}
        assert kept.dtype == torch.int32 and len(kept) == len(batch.targets)
        batch.put(torch.arange(1, len(kept) + 1), numbers)
        for s, number in numbers.items():
            for t, c in enumerate(number.tolist()):
                assert c == 0 or {*kept[c - 1].tolist()} == {*sets[s][t]}
                seen += c > 0
    assert seen == sum(len(r.logprobs) for r in rollouts)


def test_a_token_outside_of_its_set_is_an_error():
    rollouts = [episode([1, 2], [3, 4, 5]), episode([1, 2], [3, 6])]
    keep(rollouts, [[[9, 3], [4], [5]], [[3], [7, 8, 4]]])
    (batch,) = pack(rollouts, range(2), 60)
    with pytest.raises(ValueError, match="token 6 was sampled, and is not among the tokens that it was drawn from"):
        kept_sets.table(batch, rollouts)


def test_sets_of_other_tokens_are_refused():
    rollouts = [episode([1, 2], [3, 4, 5])]
    keep(rollouts, [[[9, 3], [4], [5]]])
    rollouts[0].spans = rollouts[0].spans - np.int32([[0, 1]])      # a copy with fewer tokens
    (batch,) = pack(rollouts, range(1), 60)
    with pytest.raises(ValueError, match=r"has 2 sampled tokens, and sets \(kept_ids, kept_sizes\) for 3: a copy with"):
        kept_sets.table(batch, rollouts)


@pytest.mark.parametrize("prompt", [[7], [5, 6, 7, 8, 9], [3] * 30])
def test_behind_another_prompt_everything_else_stays(prompt):
    """Rows, spans, prompts and sets, of rollouts with one row or several. The rollouts are left as they were."""
    rows = random_rows(9, 200)
    rollouts, sets = [rows_of_parts(*lists) for lists in rows], random_sets([sum(lists, []) for lists in rows], 200)
    keep(rollouts, sets)
    for s, (r, (first, *others)) in enumerate(zip(rollouts, rows)):
        before = pickle.dumps(r)
        variant = behind(r, prompt)
        assert pickle.dumps(r) == before
        expected = rows_of_parts([prompt, *first[1:]], *others)
        for key in ("ids", "spans", "sequence_starts", "places"):
            assert np.array_equal(getattr(variant, key), getattr(expected, key)), key
            assert getattr(variant, key).dtype == getattr(r, key).dtype
        for batch in pack([variant], [0], 60):
            kept = kept_sets.table(batch, [variant])
            numbers = {}
            batch.put(torch.arange(1, len(kept) + 1), numbers)
            assert all({*kept[c - 1].tolist()} == {*sets[s][t]} for t, c in enumerate(numbers[0].tolist()) if c)


def test_a_list_of_logprobs_that_may_lack_tokens_is_an_error():
    vllm = pytest.importorskip("vllm.logprobs")
    flat = vllm.FlatLogprobs()
    flat.append_fast([4, 7, 4, 9], [-1.0, -0.5, -1.0, float("-inf")], [2, 1, 2, 3], [None] * 4)
    flat.append_fast([7, 7, 4, 9], [-0.7, -0.7, -1.0, -3.0], [1, 1, 2, 3], [None] * 4)
    with pytest.raises(RuntimeError, match="from 3 tokens or more: too many tie at the last place of top_k"):
        kept_sets.read_sets(flat, 100)
    # If these are all tokens that there are, the list is whole.
    assert [ids.tolist() for ids in kept_sets.read_sets(flat, 3)] == [[7, 4], [7, 4, 9]]


@pytest.mark.parametrize("rank", [0, 3])
def test_logprobs_and_gradients_are_those_of_a_slow_softmax(folder, mesh, rank):
    """In float64, without and with adapters, over rows with shared prefixes and several spans."""
    rows = random_parts(30, 250, parts=(2, 4))
    rollouts, sets = [episode(*row) for row in rows], random_sets(rows, 250)
    keep(rollouts, sets)
    policy = adapted(folder, mesh, rank=rank) if rank else load_policy(folder, mesh, torch.float32)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    layers = policy.adapters.layers if rank else {}
    for name, layer in layers.items():
        A, B = (tensor.detach().full_tensor().double() for tensor in (layer.lora_A, layer.lora_B))
        plain.get_submodule(name).weight.data = merge(plain.get_submodule(name).weight.data, A.float(), B.float(),
                                                      layer.scale).double()
    weights, total, seen = [torch.randn(len(r.logprobs)) for r in rollouts], 0.0, {}
    expected = [plain_logps(plain, row, 0.8, kept) for row, kept in zip(rows, sets)]
    for (logp, entropy), weight in zip(expected, weights):
        total = total + (weight * (logp + 0.3 * entropy)).sum()
    total.backward()
    for batch in micro_batches(policy, rollouts, range(30), 90):
        logp, entropy = policy(batch, 0.8)
        (batch.flat(weights) * (logp + 0.3 * entropy)).sum().backward()
        batch.put(torch.stack([logp, entropy], 1).detach(), seen)
    for s, both in enumerate(expected):
        torch.testing.assert_close(seen[s].double(), torch.stack(both, 1).detach(), atol=1e-5, rtol=1e-5)
    for name, parameter in policy.hf.named_parameters():
        ours = parameter.grad.full_tensor() if parameter.requires_grad else None
        if not rank:
            theirs = plain.get_parameter(name).grad
        elif parameter.requires_grad:
            # The chain rule for weight + scale B A.
            name, _, kind = name.rpartition(".")
            d_weight, layer = plain.get_submodule(name).weight.grad, layers[name]
            A, B = (tensor.detach().full_tensor().double() for tensor in (layer.lora_A, layer.lora_B))
            theirs = layer.scale * (d_weight @ A.T if kind == "lora_B" else B.T @ d_weight)
        if ours is not None:
            assert (ours - theirs).norm() < 1e-5 * theirs.norm(), name


def test_a_run_without_top_k_never_opens_the_file(folder, reward_file, tmp_path):
    files = shutil.copytree(ROOT, tmp_path / "files", ignore=shutil.ignore_patterns(".*", "out", "tests", "docs"))
    os.remove(files / "options" / "kept_sets.py")
    forked(tmp_path / "log", "train_grpo.py", reward_file, *(
        f"--{key}={value}" for key, value in (SMALL | {"model": folder, "lora_rank": 0, "max_steps": 1}).items()),
        root=files)
