"""Weights are proved at each sync: what a checksum adds up over, and faults between trainer and engine."""
import importlib.util
import random
from types import SimpleNamespace

import pytest
import torch

import rollout
import runs
from model import load_policy
from vllm_engine import reload_vllm
from weights import checksum, engine_weights

ENGINES = ["hf"] + (["vllm"] if importlib.util.find_spec("vllm") else [])
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


# ---------------------------------------------------------------- checksum, without a model

def slow_checksum(tensor):
    """The same in Python's whole numbers, byte by byte."""
    content = [byte % 256 for byte in tensor.contiguous().flatten().view(torch.int8).tolist()]
    row = tensor.shape[-1] * tensor.element_size()
    size = 8 if tensor.ndim > 1 and row % 8 == 0 else tensor.element_size()
    total = 0
    for start in range(0, len(content), size):
        total += int.from_bytes(content[start:start + size], "little", signed=True)
    return signed(total)


def signed(total):
    return (total + 2 ** 63) % 2 ** 64 - 2 ** 63


def cuts(length, step=1):
    """A random way to cut this length into three pieces whose ends are multiples of step."""
    ends = sorted(step * random.randint(0, length // step) for _ in range(2))
    return [ends[0], ends[1] - ends[0], length - ends[1]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_checksums_of_pieces_add_up(dtype):
    """Over shards and fused layers, experts, the parts of a row, and vectors."""
    random.seed(0)
    torch.manual_seed(0)
    word = 8 // dtype.itemsize
    for shape, dim, step in [((33, 8 * word), 0, 1), ((5, 6, 4 * word), 0, 1), ((5, 6, 4 * word), 1, 1),
                             ((7, 12 * word), 1, word), ((101,), 0, 1), ((33, 3 * word + 1), 0, 1), ((1, word), 0, 1)]:
        for _ in range(20):
            whole = torch.randn(shape).to(dtype)
            pieces = whole.split(cuts(shape[dim], step), dim)
            assert signed(sum(map(checksum, pieces))) == checksum(whole) == slow_checksum(whole), (shape, dim)
    assert checksum(torch.empty(0, word, dtype=dtype)) == 0
    # An expert is a matrix of its own.
    experts = torch.randn(4, 6, 2 * word).to(dtype)
    assert signed(sum(map(checksum, experts.unbind()))) == checksum(experts)
    # In a message the pieces begin anywhere.
    for start in range(9):
        message = torch.randn(start + 6 * word).to(dtype)
        assert checksum(message[start:].view(3, 2 * word)) == slow_checksum(message[start:].view(3, 2 * word))
    assert checksum(torch.tensor(1.5, dtype=dtype)) == slow_checksum(torch.tensor([1.5], dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_checksum_sees_each_bit_but_no_permutation(dtype):
    torch.manual_seed(0)
    whole = torch.randn(4, 16).to(dtype)
    for place in range(whole.numel()):
        for bit in range(8 * dtype.itemsize):
            other = whole.clone()
            bits = other.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]).view(-1)
            bits[place] ^= torch.tensor(1, dtype=bits.dtype) << bit
            assert checksum(other) != checksum(whole)
    assert checksum(whole.flip(0)) == checksum(whole)


# ---------------------------------------------------------------- faults between trainer and engine

@pytest.fixture(scope="module", params=[(name, dtype) for name in ENGINES for dtype in DTYPES[:2]],
                ids=lambda pair: f"{pair[0]}-{pair[1]}")
def both(request, folder, mesh):
    """A policy, and an engine with its weights."""
    name, dtype = request.param
    policy = load_policy(folder, mesh, dtype)
    engine = rollout.engine_class(name)(folder, dtype, 64, [10], 0.4)
    yield policy, engine, dtype
    runs.shut_down(engine)


def moved(policy, engine, dtype):
    """The weights of the next sync."""
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.to_local().mul_(1 + 0.05 * torch.randn(parameter.shape))
    return engine_weights(policy, engine.naming, dtype)


ONE, OTHER = (f"model.layers.{i}.mlp.up_proj.weight" for i in (0, 1))
FAULTS = {
    "not sent": lambda pairs: [(name, x) for name, x in pairs if name != ONE],
    "a norm is not sent": lambda pairs: [(name, x) for name, x in pairs if name != "model.norm.weight"],
    "a layer is sent twice": lambda pairs: [(name.replace("layers.0", "layers.1"), x) for name, x in pairs],
    "layers change places": lambda pairs: [
        (name.translate({48: "1", 49: "0"}) if "layers" in name else name, x) for name, x in pairs],
    "a row is stale": lambda pairs: [
        (name, torch.cat([x[:3], x[3:4] * 1.01, x[4:]]) if name == ONE else x) for name, x in pairs],
    "all are those of before": None,
    "it ends early": lambda pairs: pairs[:9],
    "nothing comes": lambda pairs: []}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_found_at_its_sync(both, fault):
    policy, engine, dtype = both
    engine.load_weights(moved(*both), 1)
    before = [*engine_weights(policy, engine.naming, dtype)]
    before = [(name, x.clone()) for name, x in before[:-1]]
    pairs = [*moved(*both)]
    if fault == "all are those of before":
        harmed = [*before, pairs[-1]]
    else:
        harmed = FAULTS[fault](pairs)
    names = {"a norm is not sent": "model.norm.weight", "nothing comes": "broke off before",
             "it ends early": "broke off before", "all are those of before": "model.embed_tokens.weight",
             "layers change places": "model.layers.0.self_attn.q_proj.weight",
             "a layer is sent twice": "model.layers.0.self_attn.q_proj.weight"}
    with pytest.raises(RuntimeError, match="the sync of version 2 has failed") as error:
        engine.load_weights(harmed, 2)
    assert names.get(fault, ONE) in str(error.value)
    engine.load_weights(moved(*both), 3)


def test_vllm_counts_by_its_own_function_again_after_a_sync_that_fails():
    layerwise = pytest.importorskip("vllm.model_executor.model_loader.reload.layerwise")
    count = layerwise.get_numel_loaded

    def fails(*_, **__):
        assert layerwise.get_numel_loaded is not count
        raise ConnectionError

    with pytest.raises(ConnectionError):
        reload_vllm(SimpleNamespace(collective_rpc=fails), [], 1, True)
    assert layerwise.get_numel_loaded is count


def test_an_engine_that_leaves_weights_out_is_found(both, monkeypatch):
    """A whole sync, or a tensor that the engine has received but not written."""
    policy, engine, dtype = both
    engine.load_weights(moved(*both), 1)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_load", lambda pairs: {})
        with pytest.raises(RuntimeError, match="the engine got 0, .*model.embed_tokens.weight"):
            engine.load_weights(moved(*both), 2)
    with monkeypatch.context() as patch:
        if engine.name == "hf":
            class Deaf(torch.nn.Parameter):
                def copy_(self, tensor):
                    return self
            layer = engine.model.model.layers[0].mlp.up_proj
            patch.setitem(layer._parameters, "weight", Deaf(layer.weight.detach(), False))
        else:
            (model,) = engine.llm.apply_model(lambda model: model)
            load = model.load_weights
            patch.setattr(model, "load_weights",
                          lambda pairs: load((name, x) for name, x in pairs if name != ONE))
        with pytest.raises(RuntimeError, match="sync of version 3 has failed.*" + ONE):
            engine.load_weights(moved(*both), 3)
    engine.load_weights(moved(*both), 4)


# ---------------------------------------------------------------- trainers and engines apart

MISSED = """
import os, runpy
import vllm_engine
load = vllm_engine.VLLMEngine._load
def missed(engine, pairs):
    return {} if os.environ["ROLE_NAME"] == "engine0" and os.environ["RANK"] == "1" else load(engine, pairs)
vllm_engine.VLLMEngine._load = missed
runpy.run_path("train_async.py", run_name="__main__")
"""
SMALL = {"prompts_per_step": 4, "num_generations": 4, "max_completion_length": 8, "train_prompts": 16,
         "eval_prompts": 4, "eval_samples": 1, "max_steps": 3, "warmup_steps": 0, "learning_rate": 1e-3,
         "eval_interval": 0, "save_interval": 0, "engine": "vllm", "rollout_ranks": 2, "vllm_tensor_parallel_size": 2}


def test_a_rank_of_an_engine_that_misses_a_sync(folder, reward_file, tmp_path):
    """With train_async.py. The other rank has taken it."""
    pytest.importorskip("vllm")
    (tmp_path / "missed.py").write_text(MISSED)
    _, output = runs.train(tmp_path / "missed.py", tmp_path / "run", [reward_file], SMALL | {"model": folder},
                           ranks=3, code=1)
    assert "the sync of version 1 has failed" in output and "'model.embed_tokens.weight'" in output
