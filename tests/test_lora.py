"""Adapters: formula, rounding, what the engine gets, folders, resume; and small steps in bfloat16."""
import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import data
from options import lora
import rollout
import runs
from bench.models import make
from model import LogprobsFromHidden, Policy, load_policy, micro_batches, token_logprobs
from options.critic import load_critic
from options.spread_masters import even_offsets, spread_masters
from runs import ROOT, forked, load_rows, on_ranks, requests, shut_down, without_times
from runtime.model_folder import SHIPPED
from test_packing import episode, random_parts
from test_rollout import ENGINES
from weights import engine_weights

SMALL = {"prompts_per_step": 4, "num_generations": 4, "max_completion_length": 12, "train_prompts": 64,
         "eval_prompts": 4, "eval_samples": 1, "max_steps": 4, "save_interval": 2, "warmup_steps": 0,
         "learning_rate": 1e-2, "engine": "hf", "lora_rank": 3}


def adapted(path, mesh, dtype=torch.float32, folder=None, size=0.05, rank=3, **named):
    """A policy whose adapters do something."""
    policy = load_policy(path, mesh, dtype, adapter=(rank, 0, folder), **named)
    draw = torch.Generator().manual_seed(1)
    for part in policy.adapters.layers.values() if size else ():
        part.lora_B.data.to_local().normal_(0, size, generator=draw)
    return policy


def some_rollouts(vocabulary=261):
    return [episode(*parts) for parts in random_parts(8, vocabulary, longest=14, parts=(2, 4))]


def logps(policy, rollouts):
    found = token_logprobs(policy, rollouts, range(len(rollouts)), 100, 1.0)
    return torch.cat([found[s] for s in range(len(rollouts))])


# ---------------------------------------------------------------- the formula

@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_output_and_gradients_are_those_of_a_linear_layer_with_an_adapter(dtype, tolerance, with_bias):
    """By PEFT's form of it, x W' + scale * (x A') B', in float64."""
    torch.manual_seed(0)
    x, weight = torch.randn(2, 5, 24).to(dtype), torch.randn(40, 24).to(dtype)
    bias = torch.randn(40).to(dtype) if with_bias else None
    A, B, scale, d = torch.randn(3, 24), torch.randn(40, 3), 0.7, torch.randn(2, 5, 40).to(dtype)
    ours = [x.clone().requires_grad_(), A.clone().requires_grad_(), B.clone().requires_grad_()]
    output = lora.Merged.apply(ours[0], weight, bias, *ours[1:], scale)
    output.backward(d)
    theirs = [tensor.double().requires_grad_() for tensor in (x, A, B)]
    expected = theirs[0] @ weight.double().T + scale * (theirs[0] @ theirs[1].T) @ theirs[2].T
    expected = expected + bias.double() if with_bias else expected
    expected.backward(d.double())
    for found, right in zip((output, *(one.grad for one in ours)),
                            (expected, *(one.grad for one in theirs)), strict=True):
        assert (found.double() - right).norm() < tolerance * right.norm()
    assert ours[1].grad.dtype == ours[2].grad.dtype == torch.float32


def test_no_gradient_of_a_base_weight_is_made(folder, mesh):
    policy, rollouts = adapted(folder, mesh), some_rollouts()
    for batch in micro_batches(policy, rollouts, range(8), 100):
        policy(batch, 1.0)[0].sum().backward()
    for name, parameter in policy.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad == (".lora_" in name), name


def test_a_frozen_head_costs_no_gradient(folder, mesh, monkeypatch):
    made = []
    addmm = torch.Tensor.addmm_
    monkeypatch.setattr(torch.Tensor, "addmm_", lambda *factors: made.append(1) or addmm(*factors))
    for frozen, per_chunk in ((False, 1), (True, 0)):
        hidden, weight = torch.randn(5, 8).bfloat16().requires_grad_(), torch.randn(11, 8).bfloat16()
        logp, _ = LogprobsFromHidden.apply(hidden, weight.requires_grad_(not frozen), None,
                                                    torch.arange(5), 1.0)
        made.clear()
        logp.sum().backward()
        assert len(made) == per_chunk and (weight.grad is None) == frozen and hidden.grad.any()


# ---------------------------------------------------------------- the rounding

def weight_and_adapter(ratio, rows=512, columns=768):
    """A bfloat16 weight, A and B, with |B A| = ratio * |weight|."""
    draw = torch.Generator().manual_seed(0)
    weight = (0.02 * torch.randn(rows, columns, generator=draw)).bfloat16()
    A, B = torch.randn(8, columns, generator=draw), torch.randn(rows, 8, generator=draw)
    return weight, A, B * ratio * weight.float().norm() / (B @ A).norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_an_update_the_merged_weight_is_the_base_weight(dtype):
    weight, A, B = weight_and_adapter(1.0)
    weight = weight.to(dtype)
    weight[:7] = 0
    merged = lora.merge(weight, A, torch.zeros_like(B), 2.0)
    assert merged.dtype == dtype and torch.equal(merged, weight)


def test_in_float32_nothing_is_lost():
    weight, A, B = weight_and_adapter(0.1)
    exact = weight.double() + 2 * B.double() @ A.double()
    merged = lora.merge(weight.float(), A, B, 2.0)
    torch.testing.assert_close(merged.double(), exact, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("ratio", [1e-4, 3e-4, 1e-3, 1e-2])
def test_all_of_a_small_adapter_survives_in_bfloat16(ratio):
    """The share of B A that is left, by regression; rounded to the nearest it is 0.2 and less at 3e-4."""
    weight, A, B = weight_and_adapter(ratio)
    change = (B @ A).double()
    share = lambda merged: ((merged.double() - weight.double()) * change).sum() / change.square().sum()
    assert share(lora.merge(weight, A, B, 1.0)) == pytest.approx(1, abs=0.02)
    if ratio < 1e-3:
        assert share((weight.float() + B @ A).bfloat16()) < 0.3


def test_a_merged_weight_is_one_of_the_two_next_to_the_sum():
    weight, A, B = weight_and_adapter(1e-2)
    exact, merged = weight.float() + B @ A, lora.merge(weight, A, B, 1.0)
    step = torch.ldexp(torch.ones_like(exact), torch.frexp(exact)[1] - 8)
    assert ((merged.float() - exact).abs() <= step * 1.01).all() and (merged != exact.bfloat16()).any()


def test_the_spread_is_even_over_rows_columns_and_blocks():
    found = even_offsets(torch.empty(300, 400)).double() / 2 ** 16
    for part in (found, found[7], found[:, 9], found[40:60, 100:120]):
        assert part.mean().abs() < 0.02 and part.std() == pytest.approx(12 ** -0.5, rel=0.05)
        counts = part.flatten().histc(10, -0.5, 0.5) / part.numel()
        assert (counts - 0.1).abs().max() < 0.04
    assert even_offsets(torch.empty(3, 4, 5)).shape == (3, 4, 5)


# ---------------------------------------------------------------- trainer and engine

@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-5), (torch.bfloat16, 3e-3)])
def test_the_engine_computes_what_the_trainer_does(name, dtype, bound, mesh):
    base = SHIPPED["tiny"]
    tokenizer = AutoTokenizer.from_pretrained(base)
    rows = list(enumerate(load_rows("algebra", "eval", 16)))
    prompts = [prompt.ids for prompt in data.encode_rows(tokenizer, rows)]
    engine = rollout.engine_class(name)(base, dtype, 96, [tokenizer.eos_token_id], 0.4)
    policy, gaps = adapted(base, mesh, dtype, size=0.0), []
    for step, size in enumerate((0, 0.05)):
        for part in policy.adapters.layers.values():
            part.lora_B.data.to_local().normal_(0, 1).mul_(size)
        sent = [*engine_weights(policy, engine.naming, torch.float32)]
        assert all("_proj." in key and tensor.dtype == dtype for key, tensor in sent[:-1])
        engine.load_weights(sent, step)
        rollouts = engine.generate(requests(prompts, 8, range(0, 160, 10), 32, 1.0))
        theirs = torch.cat([torch.from_numpy(r.logprobs) for r in rollouts])
        gaps.append((logps(policy, rollouts) - theirs).abs().mean().item())
        apart = (logps(policy.adapters.initial, rollouts) - theirs).abs().mean().item()
    shut_down(engine)
    assert gaps[0] < bound and gaps[1] < max(2 * gaps[0], 1e-5) and apart > 0.01, (gaps, apart)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_reference_is_the_base_and_takes_no_memory(folder, mesh, dtype):
    rollouts, policy = some_rollouts(), adapted(folder, mesh, dtype)
    with_adapters = logps(policy, rollouts)
    alone = logps(load_policy(folder, mesh, dtype, trained=False), rollouts)
    reference = policy.adapters.initial
    assert torch.equal(logps(reference, rollouts), alone) and (with_adapters - alone).abs().max() > 0.05
    assert torch.equal(logps(policy, rollouts), with_adapters)
    assert next(reference.parameters()) is next(policy.parameters())
    for name, parameter in policy.named_parameters():
        assert parameter.dtype == (torch.float32 if ".lora_" in name else dtype)


def test_an_error_in_the_reference_leaves_the_adapters_on(folder, mesh):
    policy = adapted(folder, mesh)
    with pytest.raises(Exception):
        policy.adapters.initial(None, 1.0)
    assert lora.Adapted.on


@pytest.mark.parametrize("checkpointing", [False, True])
def test_recomputed_layers_have_the_same_gradient(folder, mesh, checkpointing):
    rollouts, found = some_rollouts(), []
    for again in (False, checkpointing):
        policy = adapted(folder, mesh, gradient_checkpointing=again)
        for batch in micro_batches(policy, rollouts, range(8), 100):
            policy(batch, 1.0)[0].square().sum().backward()
        found.append([p.grad.full_tensor() for p in policy.parameters() if p.requires_grad])
    assert len(found[0]) == 2 * 14
    for one, other in zip(*found):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name, kinds", [
    ("qwen3_moe", "k_proj, o_proj, q_proj, v_proj"),
    ("gemma3", "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"),
    ("falcon_h1", "down_proj, gate_proj, in_proj, k_proj, o_proj, out_proj, q_proj, up_proj, v_proj")])
def test_what_has_an_adapter_is_named_and_everything_else_frozen(name, kinds, mesh, tmp_path, capsys):
    make(name, str(tmp_path))
    policy = adapted(str(tmp_path), mesh)
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("lora_rank=3: ") and f"({kinds}); everything else is frozen" in said
    assert not any("vision" in key for key in policy.adapters.layers)
    merged = dict([*engine_weights(policy, "module", torch.float32)][:-1])
    plain = load_policy(str(tmp_path), mesh, torch.float32)
    rollouts, own = some_rollouts(256), dict(plain.hf.named_parameters())
    for key, tensor in merged.items():
        own[key].data.to_local().copy_(tensor)
    torch.testing.assert_close(logps(policy, rollouts), logps(plain, rollouts), rtol=1e-5, atol=1e-6)


def gradient_on_ranks(path):
    import torch.distributed as dist
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    policy, rollouts = load_policy(path, mesh, torch.bfloat16, adapter=(3, 0, None)), some_rollouts()
    for part in policy.adapters.layers.values():
        part.lora_B.data.copy_(0.1)
    for s in range(dist.get_rank(), 8, dist.get_world_size()):
        for batch in micro_batches(policy, rollouts, [s], 100):
            (policy(batch, 1.0)[0].sum() * dist.get_world_size()).backward()
    found = {key: p.grad.full_tensor() for key, p in policy.named_parameters() if p.requires_grad}
    held = sum(p.to_local().nbytes for p in policy.parameters())
    return found, dict([*engine_weights(policy, "module", torch.float32)][:-1]), held


# ---------------------------------------------------------------- runs

def train(out_dir, folder, reward_file, script="train_grpo.py", ranks=1, code=0, **settings):
    extra = {"critic_warmup_steps": 1, "num_generations": 1} if script == "train_ppo.py" else {}
    return runs.train(script, out_dir, [reward_file], SMALL | {"model": folder} | extra | settings,
                      ranks=ranks, code=code)


@pytest.mark.parametrize("script, ranks, dtype", [
    ("train_grpo.py", 1, "float32"), ("train_grpo.py", 1, "bfloat16"), ("train_dapo.py", 1, "bfloat16"),
    ("train_ppo.py", 1, "float32"), ("train_ppo.py", 1, "bfloat16"), ("train_async.py", 2, "bfloat16")])
def test_a_resumed_run_is_an_unbroken_one(script, ranks, dtype, folder, reward_file, tmp_path):
    settings = {"kl_coef": 0.01, "dtype": dtype, "logprob_gap": 0.5}
    whole, _ = train(tmp_path / "whole", folder, reward_file, script, ranks, **settings)
    later, said = train(tmp_path / "later", folder, reward_file, script, ranks,
                        resume=tmp_path / "whole" / "checkpoint-2", **settings)
    assert without_times(later) == without_times(whole)[2:] and "Traceback" not in said
    tensors = [load_file(tmp_path / run / "checkpoint-4" / lora.WEIGHTS) for run in ("whole", "later")]
    assert tensors[0].keys() == tensors[1].keys()
    assert all(torch.equal(tensor, tensors[1][key]) for key, tensor in tensors[0].items())
    assert all(tensor.any() for tensor in tensors[0].values())
    assert whole[2]["kl"] != 0


@pytest.fixture(scope="module")
def checkpoint(folder, reward_file, tmp_path_factory):
    """Of a short run of train_ppo.py in float32."""
    out_dir = tmp_path_factory.mktemp("lora") / "run"
    train(out_dir, folder, reward_file, "train_ppo.py")
    return str(out_dir / "checkpoint-4")


def test_two_ranks_have_the_gradient_of_one(folder, mesh, tmp_path):
    one, two = gradient_on_ranks(folder), on_ranks(2, tmp_path, gradient_on_ranks, folder)
    for found, merged, held in two:
        assert held < 0.6 * one[2]
        for key, tensor in one[0].items():
            assert (found[key] - tensor).norm() < 2e-2 * tensor.norm(), key
        assert all(torch.equal(merged[key], tensor) for key, tensor in one[1].items())


def test_a_run_on_two_ranks_is_that_on_one(folder, reward_file, tmp_path):
    metrics = [train(tmp_path / str(ranks), folder, reward_file, ranks=ranks, max_steps=2)[0]
               for ranks in (1, 2)]
    for key in ("reward", "loss", "grad_norm", "entropy", "num_tokens"):
        assert metrics[1][1][key] == pytest.approx(metrics[0][1][key], rel=1e-3, abs=1e-6), key
    one, two = (load_file(tmp_path / ranks / "checkpoint-2" / lora.WEIGHTS) for ranks in "12")
    moved = sum((one[key] - two[key]).norm() for key in one) / sum(tensor.norm() for tensor in one.values())
    assert moved < 1e-2


def test_a_reference_that_is_named_is_loaded(folder, reward_file, tmp_path):
    other = shutil.copytree(folder, tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    save_file({key: 1.05 * tensor for key, tensor in tensors.items()}, other / "model.safetensors",
              {"format": "pt"})
    kls = [train(tmp_path / name, folder, reward_file, max_steps=1, kl_coef=0.01, **settings)[0][0]["kl"]
           for name, settings in (("own", {}), ("named", {"reference_model": other}))]
    assert abs(kls[0]) < 1e-6 and kls[1] > 1e-4


def test_a_run_without_adapters_never_opens_their_file(folder, reward_file, tmp_path):
    left_out = shutil.ignore_patterns(".*", "out", "tests", "docs")
    files = shutil.copytree(ROOT, tmp_path / "files", ignore=left_out)
    os.remove(files / "options/lora.py")
    forked(tmp_path / "log", "train_grpo.py", reward_file, *(
        f"--{key}={value}" for key, value in (SMALL | {"model": folder, "lora_rank": 0}).items()), root=files)


# ---------------------------------------------------------------- folders

def test_a_checkpoint_is_a_folder_of_peft(checkpoint, folder):
    """PEFT is not installed: names and keys are those of its documentation, and vLLM's reader takes them."""
    with open(f"{checkpoint}/adapter_config.json") as file:
        config = json.load(file)
    assert config["peft_type"] == "LORA" and config["task_type"] == "CAUSAL_LM" and config["bias"] == "none"
    assert config["base_model_name_or_path"] == folder and (config["r"], config["lora_alpha"]) == (3, 32)
    tensors = load_file(f"{checkpoint}/adapter_model.safetensors")
    hf = AutoModelForCausalLM.from_pretrained(folder)
    expected = {}
    for name in config["target_modules"]:
        part = hf.get_submodule(name)
        expected[f"base_model.model.{name}.lora_A.weight"] = (3, part.in_features)
        expected[f"base_model.model.{name}.lora_B.weight"] = (part.out_features, 3)
    assert {key: tuple(tensor.shape) for key, tensor in tensors.items()} == expected and len(expected) == 28
    assert "config.json" not in os.listdir(checkpoint) and "tokenizer.json" in os.listdir(checkpoint)
    assert "config.json" in os.listdir(f"{checkpoint}/critic")
    if rollout.importlib.util.find_spec("vllm"):
        from vllm.lora.peft_helper import PEFTHelper
        from vllm.lora.utils import parse_fine_tuned_lora_name
        helper = PEFTHelper.from_local_dir(checkpoint, 128)
        assert helper.vllm_lora_scaling_factor == pytest.approx(32 / 3)
        for key in tensors:
            name, is_A = parse_fine_tuned_lora_name(key)[:2]
            assert name in config["target_modules"] and is_A == ("lora_A" in key)


def test_each_seed_draws_its_own_adapters(folder, mesh):
    drawn = [[part.lora_A.full_tensor() for part in load_policy(
        folder, mesh, torch.float32, adapter=(3, seed, None)).adapters.layers.values()] for seed in (0, 0, 1)]
    assert all(map(torch.equal, drawn[0], drawn[1]))
    assert not any(map(torch.equal, drawn[0], drawn[2])) and len({x.sum().item() for x in drawn[0]}) == 14


def test_frozen_adapters_are_saved_and_an_adapter_that_is_lost_is_named(folder, mesh, tmp_path):
    policy = adapted(folder, mesh)
    policy.decoder.layers[0].requires_grad_(False)
    policy.save(tmp_path)
    saved = load_file(tmp_path / lora.WEIGHTS)
    again = adapted(folder, mesh, folder=str(tmp_path), size=0)
    for name, layer in policy.adapters.layers.items():
        for part in ("lora_A", "lora_B"):
            assert torch.equal(getattr(again.adapters.layers[name], part), getattr(layer, part))
            if ".layers.0." in name:
                del saved[f"{lora.PREFIX}{name}.{part}.weight"]
    save_file(saved, tmp_path / lora.WEIGHTS)
    with pytest.raises(ValueError, match="lacks 7 adapters, such as that of model.layers.0.mlp.down_proj"):
        adapted(folder, mesh, folder=str(tmp_path))


class WithValues(Policy):
    """A policy with a module of a user's own."""

    def __init__(self, hf):
        super().__init__(hf)
        self.value = torch.nn.Linear(64, 1)


def test_what_is_trained_and_not_saved_is_refused(folder, mesh, monkeypatch):
    policy = adapted(folder, mesh)
    policy.begin_training(False)
    policy.hf.model.norm.requires_grad_(True)
    with pytest.raises(ValueError, match="^hf.model.norm.weight: trained, but no checkpoint would hold it"):
        policy.begin_training(False)
    monkeypatch.setattr("model.Policy", WithValues)
    policy = load_policy(folder, mesh, torch.float32)
    with pytest.raises(ValueError, match="^value.weight, value.bias: trained, but no checkpoint would hold it"):
        policy.begin_training(False)
    policy.value.requires_grad_(False)
    policy.begin_training(False)


def test_what_the_engine_gets_does_not_depend_on_what_is_frozen(mesh, tmp_path):
    """A layer may be frozen between an update and its sync. What reads images is never sent."""
    make("gemma3", str(tmp_path))
    policy = load_policy(str(tmp_path), mesh, torch.float32)
    before = [name for name, _ in engine_weights(policy, "module", torch.float32)]
    policy.requires_grad_(False)
    after = [name for name, _ in engine_weights(policy, "module", torch.float32)]
    policy.requires_grad_(True)
    assert before == after == [name for name, _ in engine_weights(policy, "module", torch.float32)]
    assert len(before) > 10 and not any("vision" in name for name in before)


def test_an_adapter_is_not_taken_for_a_model(checkpoint, folder, reward_file, tmp_path):
    for script, key in (("evaluate_model.py", "model"), ("train_grpo.py", "model"),
                        ("train_ppo.py", "critic_model")):
        runs.refused([f"--{key}={checkpoint}", "--engine=hf"] + [f"--model={folder}"] * (key != "model"),
                     f"{key}={checkpoint}: the folder holds an adapter (adapter_config.json) and not a "
                     "model; lora_from begins with it, and docs/lora.md says how to merge it", tmp_path, script)


@pytest.mark.parametrize("settings, message", [
    ({"lora_rank": 4}, "lora_rank=4, but {} comes from a run with lora_rank=3"),
    ({"lora_rank": 0}, "lora_rank=0, but {} comes from a run with lora_rank=3"),
    ({"lora_rank": -1}, "lora_rank=-1: must not be negative")])
def test_settings_that_do_not_fit_are_refused(checkpoint, folder, reward_file, tmp_path, settings, message):
    _, said = train(tmp_path / "run", folder, reward_file, "train_ppo.py", code=2, resume=checkpoint,
                    **settings)
    assert message.format(checkpoint) in said.splitlines()[-1] and "Traceback" not in said


def test_a_model_without_plain_linear_layers_is_refused(mesh, tmp_path):
    make("gpt2", str(tmp_path))
    with pytest.raises(ValueError, match="lora_rank=3: the layers of this model have no plain linear layers"):
        adapted(str(tmp_path), mesh)


# ---------------------------------------------------------------- small steps in bfloat16

def test_master_weights_between_the_steps_of_bfloat16_round_to_the_same():
    weight = weight_and_adapter(1.0)[0]
    weight[3], weight[4, :3] = 0, torch.tensor([1.0, -2.0 ** -100, 3.0e38])
    master = weight.float()
    spread_masters([master])
    assert torch.equal(master.bfloat16(), weight) and (master[3] == 0).all()
    places = (master.view(torch.int32) - weight.float().view(torch.int32))[5:].double() / 2 ** 16
    assert places.std() == pytest.approx(12 ** -0.5, rel=0.02) and places.mean().abs() < 1e-3
    again = master.clone()
    spread_masters([again])
    assert torch.equal(again, master)
    other = torch.full((3, 5), 1 / 3)
    spread_masters([other])
    assert (other == 1 / 3).all()


@pytest.mark.parametrize("step", [1e-6, 1e-5])
def test_all_of_a_small_step_reaches_the_rounded_weights(step):
    """On the grid itself nearly all of it is lost."""
    weight = weight_and_adapter(1.0)[0].float()
    direction = torch.randn(weight.shape, generator=torch.Generator().manual_seed(2)).sign()

    def share(master):
        moved = (master + step * direction).bfloat16().double() - master.bfloat16().double()
        return ((moved * direction).mean() / step).item()

    master = weight.clone()
    spread_masters([master])
    assert share(master) == pytest.approx(1, abs=0.05) and share(weight) < 0.5


def test_only_what_is_trained_in_bfloat16_is_moved(folder, mesh, tmp_path):
    """Also where a script has frozen a part of a network after it was loaded."""
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    for load, dtype, moves, named in (
            (load_policy, torch.bfloat16, True, {}), (load_policy, torch.float32, False, {}),
            (load_policy, torch.bfloat16, False, {"trained": False}),
            (load_critic, torch.bfloat16, True, {})):
        network = load(str(tmp_path), mesh, dtype, **named)
        network.decoder.layers[0].requires_grad_(False)
        network.begin_training(dtype == torch.bfloat16)
        found = dict(network.hf.named_parameters())
        off = [key for key, tensor in stored.items()
               if not torch.equal(found[key].full_tensor().float(), tensor.float())]
        assert len(off) > 10 if moves else not off
        assert not any(".layers.0." in key for key in off)
        assert all(torch.equal(found[key].full_tensor().bfloat16(), tensor) for key, tensor in stored.items())


@pytest.mark.parametrize("spread", [True, False])
def test_masters_stay_on_the_grid_if_spread_masters_is_off(folder, reward_file, tmp_path, spread):
    base = shutil.copytree(folder, tmp_path / "base")
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(base)
    train(tmp_path / "run", base, reward_file, dtype="bfloat16", lora_rank=0, learning_rate=0.0, logprob_gap=0.5,
          max_steps=1, save_interval=1, spread_masters=spread)
    saved = load_file(tmp_path / "run" / "checkpoint-1" / "model.safetensors")
    moved = [not torch.equal(tensor, tensor.bfloat16().float()) for tensor in saved.values()]
    assert any(moved) == spread


def test_a_resumed_run_keeps_its_masters(folder, reward_file, tmp_path):
    base = shutil.copytree(folder, tmp_path / "base")
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(base)
    settings = {"dtype": "bfloat16", "lora_rank": 0, "learning_rate": 1e-5, "logprob_gap": 0.5}
    whole, _ = train(tmp_path / "whole", base, reward_file, **settings)
    later, _ = train(tmp_path / "later", base, reward_file, resume=tmp_path / "whole" / "checkpoint-2",
                     **settings)
    assert without_times(later) == without_times(whole)[2:]
    one, two = (load_file(tmp_path / run / "checkpoint-4" / "model.safetensors")
                for run in ("whole", "later"))
    assert all(torch.equal(one[key], two[key]) for key in one)
    # float32, and off the grid.
    assert all((tensor.view(torch.int32) & 0xffff).any() for key, tensor in one.items() if tensor.dim() > 1)
