"""The forecast of memory: against PyTorch's own peaks, against bytes that are counted, and its advice."""
import json
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from bench.hardware import SIZES
from model import load_policy, micro_batches
from options.critic import load_critic
from rollout import Rollout
from runs import ROOT, forked, on_ranks, refused
from options import memory
from options.memory import forecast, forecast_note, sizes

SETTINGS = dict(dtype="float32", token_budget=512, gradient_checkpointing=False, kl_coef=0.0,
                entropy_coef=0.0, offload_optimizer=False, sequence_parallel_size=1, engine="hf",
                max_prompt_length=64, max_completion_length=64, prompts_per_step=8, num_generations=4,
                reference_model="", lora_rank=0, shard_ranks=0, optimizer="adamw", lora_from="",
                offload_base=False,
                vllm_tensor_parallel_size=1, vllm_gpu_memory_utilization=0.4)
LLAMA = dict(vocab_size=4096, hidden_size=128, intermediate_size=384, num_hidden_layers=4,
             num_attention_heads=4, num_key_value_heads=2, head_dim=32, tie_word_embeddings=False)
TIED, CHECKPOINTED = {"tie_word_embeddings": True}, {"gradient_checkpointing": True}
QWEN3, LLAMA3 = (Qwen3ForCausalLM, Qwen3Config), (LlamaForCausalLM, LlamaConfig)
# What differs from LLAMA, and from SETTINGS.
SHAPES = {
    "dense": (QWEN3, {}, {"token_budget": 2048}),
    "tied": (LLAMA3, TIED | {"vocab_size": 32000}, {}),
    "untied": (LLAMA3, {"vocab_size": 32000}, {}),
    "few tokens": (LLAMA3, {"vocab_size": 32000, "hidden_size": 256}, {"token_budget": 64}),
    "few tokens, tied": (LLAMA3, TIED | {"vocab_size": 32000, "hidden_size": 256}, {"token_budget": 64}),
    "deep": (QWEN3, {"vocab_size": 512, "num_hidden_layers": 12}, {"token_budget": 1024}),
    "wide": (QWEN3, {"vocab_size": 512, "hidden_size": 512, "intermediate_size": 2048},
             CHECKPOINTED | {"token_budget": 512}),
    "checkpointed": (QWEN3, {"num_hidden_layers": 8}, CHECKPOINTED | {"token_budget": 2048}),
    "few tokens, bfloat16": (LLAMA3, TIED | {"vocab_size": 32000, "hidden_size": 256},
                             {"dtype": "bfloat16", "token_budget": 64}),
    "adapters": (LLAMA3, {"vocab_size": 8192}, {"token_budget": 2048, "lora_rank": 8}),
    "bfloat16": (LLAMA3, {"vocab_size": 8192}, {"dtype": "bfloat16", "token_budget": 2048})}


def settings(model, **changes):
    return SimpleNamespace(**SETTINGS | {"model": str(model)} | changes)


def make(name, folder):
    (kind, config), changes, others = SHAPES[name]
    torch.manual_seed(0)
    kind(config(**LLAMA | changes)).save_pretrained(folder)
    return settings(folder, **others)


def bytes_of(tensors):
    return sum(x.to_local().nbytes for x in tensors)


def trained(network, s):
    """Two functions: one makes an update in two micro-batches without a step, the other makes the step."""
    optimizer = torch.optim.AdamW(network.parameters(), 1e-4, fused=True)
    rng, length = np.random.default_rng(0), min(128, s.token_budget)
    count, size = 2 * s.token_budget // length, network.hf.config.vocab_size
    draw = lambda count: rng.integers(0, size, count)
    rollouts = [Rollout.single(draw(4), draw(length - 4), np.zeros(length - 4), "") for _ in range(count)]

    def update():
        for batch in micro_batches(network, rollouts, range(count), s.token_budget):
            found = network(batch, 1.0)[0] if "Policy" in type(network).__name__ else network(batch)
            found.sum().backward()

    def step():
        optimizer.step()
        optimizer.zero_grad()
    return update, step, optimizer


@pytest.mark.parametrize("name", SHAPES)
def test_peaks_of_an_update_are_those_of_pytorch(mesh, tmp_path, name):
    """Within 16% of what its profiler counts, with what was there before the profiler began."""
    s = make(name, tmp_path)
    adapter = (s.lora_rank, 0, None) if s.lora_rank else None
    policy = load_policy(tmp_path, mesh, getattr(torch, s.dtype), s.gradient_checkpointing, adapter=adapter)
    update, step, optimizer = trained(policy, s)
    update()
    step()
    before = bytes_of(policy.parameters()) + bytes_of(
        x for state in optimizer.state.values() for key, x in state.items() if key != "step")
    cpu = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[cpu], profile_memory=True) as profile:
        update()
        step()
    events = profile.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    peak = before + max(np.cumsum([change for _, change in changes]))
    _, forecasted = forecast(settings(**vars(s) | {"rollout_ranks": 1}), 1, 1e12, False)
    print(f"{name}: {peak / 1e6:.1f} MB, forecast {forecasted / 1e6:.1f} MB ({forecasted / peak - 1:+.1%})")
    assert forecasted == pytest.approx(peak, rel=0.16)


def held(folder):
    """Bytes on this rank, of policy and critic: of parameters, gradients, and Adam's moments."""
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    found = []
    for kind in (load_policy, load_critic):
        network = kind(folder, mesh, torch.float32)
        update, step, optimizer = trained(network, settings(folder, token_budget=128))
        update()
        gradients = bytes_of(p.grad for p in network.parameters() if p.grad is not None)
        step()
        moments = bytes_of(x for state in optimizer.state.values() for key, x in state.items() if key != "step")
        found.append((bytes_of(network.parameters()), gradients, moments))
    return found


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", ["tied", "dense"])
def test_shards_are_those_of_fsdp(mesh, tmp_path, name, ranks):
    make(name, tmp_path / "model")
    s = settings(tmp_path / "model", critic_model="", kl_coef=0.1, rollout_ranks=1)
    resting, _ = forecast(s, ranks, 1e12, False)
    policy, critic = held(s.model) if ranks == 1 else np.mean(on_ranks(2, tmp_path, held, s.model), axis=0)
    # Weights and moments of both, and a reference. The critic is counted with the head of the model.
    expected = 2 * policy[0] + critic[0] + policy[2] + critic[2]
    head = 0 if name == "tied" else LLAMA["vocab_size"] * LLAMA["hidden_size"] * 12 / ranks
    assert resting == pytest.approx(expected + head, rel=2e-3)
    bfloat16, _ = forecast(settings(**vars(s) | {"dtype": "bfloat16"}), ranks, 1e12, False)
    assert resting - bfloat16 == pytest.approx(policy[0] / 2)                           # of the reference


def test_sgd_has_no_moments_and_a_critic_still_does(folder):
    for more in ({}, {"critic_model": ""}):
        adamw, sgd = (forecast(settings(folder, rollout_ranks=1, optimizer=name, **more), 1, 1e12, False)[0]
                      for name in ("adamw", "sgd"))
        assert adamw - sgd == 8 * sizes(str(folder)).whole


def test_an_offloaded_base_is_in_host_memory_and_a_critic_is_not(folder):
    m, adapters = sizes(str(folder)), {"lora_rank": 8, "engine": "vllm", "vllm_gpu_memory_utilization": 1e-9}
    trained = 8 * m.through
    for more, others in (({}, 0), ({"critic_model": ""}, 12 * m.whole),
                         ({"kl_coef": 0.1, "reference_model": str(folder)}, 4 * m.whole), ({"kl_coef": 0.1}, 0)):
        (resting, _), (offloaded, _) = (forecast(settings(folder, offload_base=offload, rollout_ranks=1, **adapters, **more),
                                                 1, 1e12, True) for offload in (False, True))
        # The base in float32, adapters and moments.
        assert offloaded == others and resting == others + 4 * m.whole + 12 * trained, more
    # On a CPU it is the same memory.
    assert forecast(settings(folder, offload_base=True, **adapters), 1, 1e12, False) == forecast(
        settings(folder, **adapters), 1, 1e12, False)
    # A sync takes a merged weight in float32 and its base, and not two heads.
    sampling, _ = forecast(settings(folder, **adapters, offload_base=True), 1, 1e12, True)
    hf = AutoModelForCausalLM.from_pretrained(folder)
    largest = max(part.weight.numel() for part in hf.model.modules() if type(part) is torch.nn.Linear)
    assert sampling == 4 * m.whole + 12 * largest
    # The first adapters are kept as well.
    begun = forecast(settings(folder, lora_rank=8, lora_from="some", rollout_ranks=1), 1, 1e12, False)[0]
    assert begun - forecast(settings(folder, lora_rank=8, rollout_ranks=1), 1, 1e12, False)[0] == 4 * trained


def test_host_memory_is_what_rank_0_reads_or_what_sleeps_there(folder):
    m = sizes(str(folder))
    trained = 8 * m.through
    in_host = lambda local=1, ranks=1, **changes: memory.beside_gpus(settings(folder, **{"dtype": "bfloat16"} | changes), ranks, local)
    assert in_host() == 4 * m.whole and in_host(lora_rank=8) == 2 * m.whole
    assert in_host(4, 8) == 2 * m.whole * 4 and in_host(4, 8, vllm_tensor_parallel_size=4) == 4 * m.whole
    assert in_host(offload_optimizer=True) == (4 + 8) * m.whole
    # The base, adapters, gradients and moments of half of the ranks, and a sleeping engine for each.
    assert in_host(4, 8, lora_rank=8, offload_base=True) == (2 * m.whole + 16 * trained) / 2 + 8 * m.whole


def test_one_card_of_24_gb(tmp_path):
    """The table of docs/measured/lora.md, of Qwen3 by its configs."""
    table = (Path(ROOT) / "docs/measured/lora.md").read_text()
    for name in ("4 B", "8 B"):
        hidden, intermediate, layers, heads, tied = SIZES[name]
        Qwen3Config(vocab_size=151936, hidden_size=hidden, intermediate_size=intermediate, head_dim=128,
                    num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=8,
                    tie_word_embeddings=tied, architectures=["Qwen3ForCausalLM"]).save_pretrained(tmp_path / name)
        card = settings(tmp_path / name, dtype="bfloat16", lora_rank=16, gradient_checkpointing=True, engine="vllm",
                        vllm_gpu_memory_utilization=0.0)
        for offload, place in ((False, "on the card"), (True, "in host memory")):
            card.offload_base = offload
            row = []
            for card.token_budget in (4096, 16384):
                sampling, update = forecast(card, 1, 1e12, True)
                row.append(f"{update / 1e9:.1f}")
            cache = (22e9 - sampling) / 2 / sizes(card.model).cached
            row += [f"{sampling / 1e9:.1f}", f"{cache / 1000:.0f},000" if cache > 0 else "none",
                    f"{memory.beside_gpus(card, 1, 1) / 1e9:.1f}"]
            assert f"| {name} | {place} | {' | '.join(row)} |" in table


def test_a_script_may_have_dropped_settings(folder):
    mine = settings(folder)
    before = forecast(mine, 1, 1e12, False)
    for key in ("kl_coef", "reference_model", "entropy_coef"):
        delattr(mine, key)
    assert forecast(mine, 1, 1e12, False) == before


def test_an_engine_holds_its_weights_and_its_cache(folder):
    hf = AutoModelForCausalLM.from_pretrained(folder)
    cache = hf(input_ids=torch.zeros(32, 128, dtype=torch.long), use_cache=True).past_key_values
    keys = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    weights = sum(p.nbytes for p in hf.parameters())
    added = lambda ranks, memory, cuda, **changes: [a - b for a, b in zip(
        forecast(settings(folder, **changes), ranks, memory, cuda),
        forecast(settings(folder, **changes, rollout_ranks=1), ranks, memory, cuda))]
    whole = 2 * max(p.nbytes for p in hf.parameters())
    assert added(1, 1e12, False) == [weights + keys, weights] and keys > whole
    # Two ranks share the rows, and vLLM on a GPU takes what it may and sleeps in the update.
    assert added(2, 1e12, False)[0] == weights + keys / 2
    assert added(1, 1e9, True, engine="vllm") == [0.4e9, 0]
    # Where its weights take more, a sync takes two copies of the largest parameter in addition.
    assert added(1, 1e12, False, num_generations=1, prompts_per_step=1)[0] == weights + max(whole, keys / 32)
    assert added(2, 1e7, True, engine="vllm", vllm_tensor_parallel_size=2,
                 vllm_gpu_memory_utilization=1e-3)[0] == weights / 2 + whole
    assert added(1, 1e12, False, engine="vllm")[0] in (weights + 2 ** 30, weights + keys)     # without vLLM


def test_settings_that_move_it_move_it(folder):
    update = lambda **changes: forecast(settings(
        folder, **{"token_budget": 8192} | changes), 2, 1e12, True)[1]
    base = update()
    assert base - update(token_budget=4096) > 4096 * 2 * 8 * 3 * sizes(folder).H
    assert base - update(sequence_parallel_size=2) == pytest.approx(base - update(token_budget=4096))
    assert base - update(gradient_checkpointing=True) > 0
    # Moments that wait in host memory are there for the step alone.
    moments = 8 * sizes(folder).whole / 2
    assert base - update(offload_optimizer=True) == pytest.approx(moments)
    assert update(offload_optimizer=True, token_budget=1) > moments


def test_adapters_leave_gradients_and_moments_to_themselves(folder):
    hf = AutoModelForCausalLM.from_pretrained(folder)
    ends = sum(sum(part.weight.shape) for part in hf.model.layers.modules() if type(part) is torch.nn.Linear)
    whole = sum(p.numel() for p in hf.parameters())
    resting, _ = forecast(settings(folder, lora_rank=8, dtype="bfloat16", rollout_ranks=1), 1, 1e12, False)
    assert resting == 2 * whole + (4 + 8) * 8 * ends



# ---------------------------------------------------------------- what it says

LARGE = LLAMA | dict(hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16,
                     head_dim=64, vocab_size=32000)


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """The config.json of a model of 0.5 B parameters, with nothing else in its folder."""
    path = tmp_path_factory.mktemp("large")
    LlamaConfig(**LARGE).save_pretrained(path)
    return path / "config.json"


def test_what_takes_less_where_it_does_not_fit(large):
    """Each of the settings that docs/placement.md names does."""
    s = settings(large, engine="vllm", token_budget=32768, prompts_per_step=128,
                 vllm_gpu_memory_utilization=0.9)
    peaks = lambda s, ranks=2: forecast(s, ranks, 9e9, True)
    sampling, update = peaks(s)
    for changes in ({"gradient_checkpointing": True}, {"offload_optimizer": True}, {"token_budget": 8192},
                    {"sequence_parallel_size": 2}):
        assert peaks(settings(**vars(s) | changes))[1] < update, changes
    for changes in ({"vllm_gpu_memory_utilization": 0.5}, {"vllm_tensor_parallel_size": 2}):
        assert peaks(settings(**vars(s) | changes))[0] <= sampling, changes
    for other in (peaks(s, 4), peaks(settings(**vars(s) | {"lora_rank": 16}))):
        assert other[0] < sampling and other[1] < update


def test_only_shards_that_exceed_the_device_are_refused(large, monkeypatch):
    with torch.device("meta"):
        parameters = sum(p.numel() for p in LlamaForCausalLM(LlamaConfig(**LARGE)).parameters())
    host = {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": 80e9}
    monkeypatch.setattr(memory.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(memory.os, "sysconf", host.get)
    line = forecast_note(settings(large), 8)
    assert re.fullmatch(r"forecast of memory per rank: sampling \S+, update \S+ of \S+ GB", line)
    assert len(line) <= 80
    host["SC_PHYS_PAGES"] = 16 * parameters / 2 + 1
    assert "GB\nIt does not fit: docs/placement.md" in forecast_note(settings(large), 2)
    host["SC_PHYS_PAGES"] -= 2
    with pytest.raises(ValueError, match=r"alone take .* GB on each of 2 ranks, a device has"):
        forecast_note(settings(large), 2)


def test_a_run_refuses_what_no_device_can_hold(folder, tmp_path):
    run = ["--train_prompts=16", "--eval_prompts=2", "--eval_samples=1", "--prompts_per_step=2",
           "--engine=hf", "--num_generations=2", "--max_steps=1", "--token_budget=256"]
    said = forked(tmp_path / "log", "train_grpo.py", f"--model={folder}", f"--out_dir={tmp_path}/run", *run)
    assert "forecast" not in said                               # so small a model fits by a rough count
    shutil.copytree(folder, tmp_path / "giant")
    config = json.loads((tmp_path / "giant/config.json").read_text())
    (tmp_path / "giant/config.json").write_text(json.dumps(config | {"intermediate_size": 2 ** 34}))
    os.truncate(tmp_path / "giant/model.safetensors", 2 ** 42)  # without contents
    refused([f"--model={tmp_path}/giant", *run], "weights, gradients and Adam's moments alone take", tmp_path)
