"""What lets a run fit one card of 24 GB: SGD, an adapter to begin with, a merged model, a base in host memory."""
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import CPUOffloadPolicy
from transformers import AutoConfig, AutoModelForCausalLM

import runs
from configurator import InputError
from model import Policy, check_same, load_policy, make_optimizer
from options import lora
from options.critic import load_critic
from runs import kept_rollouts, refused, without_times
from runtime.model_folder import model_class, read_model
from test_lora import logps, some_rollouts
from weights import engine_weights

SMALL = {"prompts_per_step": 4, "num_generations": 4, "max_completion_length": 12, "train_prompts": 64,
         "eval_prompts": 4, "eval_samples": 1, "max_steps": 4, "save_interval": 2, "warmup_steps": 0,
         "learning_rate": 1e-2, "engine": "hf"}


def train(out_dir, folder, reward_file, script="train_grpo.py", ranks=1, code=0, **settings):
    return runs.train(script, out_dir, [reward_file], SMALL | {"model": folder} | settings, ranks=ranks, code=code)


# ---------------------------------------------------------------- optimizer=sgd

def test_sgd_moves_a_policy_by_its_formula_and_a_critic_has_adamw(folder, mesh):
    settings = SimpleNamespace(optimizer="sgd", weight_decay=0.3, adam_beta1=0.9, adam_beta2=0.95,
                               offload_optimizer=False)
    policy = load_policy(folder, mesh, torch.float32)
    policy.decoder.layers[0].requires_grad_(False)
    optimizer = make_optimizer(policy, 0.5, settings)
    before = {name: p.full_tensor().double() for name, p in policy.named_parameters()}
    draw = torch.Generator().manual_seed(0)
    for _ in range(2):
        for name, parameter in policy.named_parameters():
            if parameter.requires_grad:
                gradient = torch.randn(parameter.shape, generator=draw)
                parameter.grad = torch.zeros_like(parameter)
                parameter.grad.to_local().copy_(gradient)
                before[name] -= 0.5 * (gradient.double() + 0.3 * before[name])
        optimizer.step()
    for name, parameter in policy.named_parameters():
        torch.testing.assert_close(parameter.full_tensor().double(), before[name], rtol=1e-5, atol=1e-6)
    assert not any(optimizer.state.values())
    assert type(make_optimizer(load_critic(folder, mesh, torch.float32), 0.5, settings)) is torch.optim.AdamW


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_resumed_run_with_sgd_is_an_unbroken_one(ranks, folder, reward_file, tmp_path):
    settings = {"optimizer": "sgd", "learning_rate": 1.0, "offload_optimizer": True, "ranks": ranks}
    whole, said = train(tmp_path / "whole", folder, reward_file, **settings)
    assert "optimizer=sgd has no moments: for the policy adam_beta1, adam_beta2 and offload_optimizer are not " in said
    checkpoint = tmp_path / "whole" / "checkpoint-2"
    later, _ = train(tmp_path / "later", folder, reward_file, resume=checkpoint, **settings)
    assert without_times(later) == without_times(whole)[2:] and whole[3]["grad_norm"] > 0
    weights = [load_file(tmp_path / run / "checkpoint-4/model.safetensors") for run in ("whole", "later")]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
    # Its file has no moments, and AdamW does not go on with it.
    assert not load_file(checkpoint / "trainer/optimizer-00000.safetensors")
    _, said = train(tmp_path / "other", folder, reward_file, resume=checkpoint, code=2, ranks=ranks)
    assert "SGD has written it: use that, or begin with --model=" in said.splitlines()[-1]


@pytest.mark.parametrize("name", "RMSprop NAdam RAdam Adamax Adagrad Adadelta ASGD Adafactor Rprop".split())
def test_another_optimizer_moves_sharded_parameters_as_plain_ones(folder, mesh, name):
    policy = load_policy(folder, mesh, torch.float32)
    plain = {key: torch.nn.Parameter(p.full_tensor().clone()) for key, p in policy.named_parameters()}
    sharded, unsharded = (getattr(torch.optim, name)(parameters, lr=0.01)
                          for parameters in (policy.parameters(), plain.values()))
    draw = torch.Generator().manual_seed(0)
    for _ in range(3):
        for key, parameter in policy.named_parameters():
            plain[key].grad = torch.randn(parameter.shape, generator=draw)
            parameter.grad = torch.zeros_like(parameter)
            parameter.grad.to_local().copy_(plain[key].grad)
        unsharded.step()
        if name in ("Adafactor", "Rprop"):
            with pytest.raises((RuntimeError, NotImplementedError)):
                sharded.step()
            return
        sharded.step()
    for key, parameter in policy.named_parameters():
        torch.testing.assert_close(parameter.full_tensor(), plain[key].data)


def test_a_rate_for_adamw_is_refused_with_sgd(tmp_path):
    refused(["--optimizer=sgd"], "learning_rate=0.0001: a default for AdamW, at which optimizer=sgd learns nothing. "
            "Give it its own, as 3 for model=tiny", tmp_path)
    refused(["--optimizer=adam"], "optimizer=adam: choose adamw, sgd", tmp_path)


# ---------------------------------------------------------------- lora_from

# What PEFT 0.21 writes for LoraConfig(task_type="CAUSAL_LM"), apart from the layers.
PEFT = {"alora_invocation_tokens": None, "alpha_pattern": {}, "arrow_config": None, "auto_mapping": None,
        "base_model_name_or_path": None, "bias": "none", "corda_config": None, "ensure_weight_tying": False,
        "eva_config": None, "exclude_modules": None, "fan_in_fan_out": False, "inference_mode": True,
        "init_lora_weights": True, "kasa_config": None, "layer_replication": None, "layers_pattern": None,
        "layers_to_transform": None, "loftq_config": {}, "lora_alpha": 8, "lora_bias": False, "lora_dropout": 0.1,
        "lora_ga_config": None, "megatron_config": None, "megatron_core": "megatron.core", "modules_to_save": None,
        "monteclora_config": None, "peft_type": "LORA", "peft_version": "0.21.0", "qalora_group_size": 16, "r": 8,
        "rank_pattern": {}, "revision": None, "target_parameters": None, "task_type": "CAUSAL_LM",
        "trainable_token_indices": None, "use_bdlora": None, "use_dora": False, "use_qalora": False,
        "use_rslora": False, "velora_config": None}
ALL = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj".split()


def write_adapter(path, base, kinds=ALL, layers=(0, 1), size=0.1, **config):
    """A folder as PEFT writes it, with an adapter that does something; returns its path."""
    config = PEFT | {"base_model_name_or_path": str(base), "target_modules": kinds} | config
    draw = torch.Generator().manual_seed(5)
    tensors = {}
    for name, part in AutoModelForCausalLM.from_pretrained(base).named_modules():
        number = int((name.split(".") + ["-1"] * 3)[2]) if name.startswith("model.layers.") else -1
        if number in layers and name.rpartition(".")[2] in kinds:
            for key, shape in (("A", (config["r"], part.in_features)), ("B", (part.out_features, config["r"]))):
                tensors[f"base_model.model.{name}.lora_{key}.weight"] = size * torch.randn(shape, generator=draw)
    Path(path).mkdir()
    Path(path, "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, Path(path, "adapter_model.safetensors"))
    return str(path)


def merged_weights(base, adapter):
    """{name: W + scale * B A} in float64, by the formulas of the papers of LoRA and rsLoRA."""
    config = json.loads(Path(adapter, "adapter_config.json").read_text())
    tensors = load_file(Path(adapter, "adapter_model.safetensors"))
    scale = config["lora_alpha"] / (config["r"] ** 0.5 if config["use_rslora"] else config["r"])
    weights = {name: x.double() for name, x in AutoModelForCausalLM.from_pretrained(base).named_parameters()}
    for key in tensors:
        if "lora_A" in key:
            B = tensors[key.replace("lora_A", "lora_B")].double()
            name = key.removeprefix("base_model.model.").replace("lora_A.", "")
            weights[name] = weights[name] + scale * B @ tensors[key].double()
    return weights


def merged_logps(base, adapter, rollouts):
    """Logprobs of sampled tokens by transformers, in float64, one sequence at a time."""
    hf = AutoModelForCausalLM.from_pretrained(base).double()
    hf.load_state_dict(merged_weights(base, adapter), strict=False)
    found = []
    for r in rollouts:
        ids = torch.tensor(r["ids"] if isinstance(r, dict) else r.ids).long()
        places = [place for start, end in (r["spans"] if isinstance(r, dict) else r.spans) for place in range(start, end)]
        with torch.no_grad():
            logp = hf(input_ids=ids[None]).logits[0].log_softmax(-1)
        found += [logp[place - 1, ids[place]].item() for place in places]
    return torch.tensor(found)


FORMS = {"all layers": {}, "rank, alpha, two kinds": {"r": 4, "lora_alpha": 16, "kinds": ["q_proj", "v_proj"]},
         "rslora": {"use_rslora": True, "lora_alpha": 16},
         "a regex and one layer": {"layers": [1], "kinds": ["up_proj", "down_proj"]}}


@pytest.mark.parametrize("form", FORMS)
def test_an_adapter_of_peft_is_taken_and_written_back(form, folder, mesh, tmp_path):
    adapter = write_adapter(tmp_path / "adapter", folder, **FORMS[form])
    if "regex" in form:
        config = json.loads(Path(adapter, "adapter_config.json").read_text())
        config |= {"target_modules": r".*layers\.1\.mlp.(up|down)_proj", "layers_to_transform": [1]}
        Path(adapter, "adapter_config.json").write_text(json.dumps(config))
    rank = FORMS[form].get("r", 8)
    rollouts = some_rollouts()
    policy = load_policy(folder, mesh, torch.float32, adapter=(rank, 0, adapter, adapter))
    expected = merged_logps(folder, adapter, rollouts)
    for network in (policy, policy.adapters.initial):
        assert (logps(network, rollouts) - expected).abs().max() < 1e-5
    base = load_policy(folder, mesh, torch.float32, trained=False)
    assert (logps(base, rollouts) - expected).abs().max() > 0.05
    for layer in policy.adapters.layers.values():
        layer.lora_B.data.to_local().mul_(1.5)
    # What is trained goes into the folder, and what the run began with into a folder in it.
    policy.save(tmp_path / "saved")
    assert (logps(policy, rollouts) - merged_logps(folder, tmp_path / "saved", rollouts)).abs().max() < 1e-5
    for part in ("adapter_model.safetensors", "adapter_config.json"):
        assert Path(tmp_path, "saved/initial", part).exists()
    assert torch.equal(logps(policy.adapters.initial, rollouts), logps(load_policy(
        folder, mesh, torch.float32, adapter=(rank, 0, str(tmp_path / "saved/initial"))), rollouts))
    saved = json.loads((tmp_path / "saved/adapter_config.json").read_text())
    read = json.loads(Path(adapter, "adapter_config.json").read_text())
    assert all(saved[key] == read[key] for key in ("r", "lora_alpha", "use_rslora"))


@pytest.mark.parametrize("changes, message", [
    ({"use_dora": True}, "{}: its adapter has use_dora=True, which cannot be trained here"),
    ({"modules_to_save": ["lm_head"]}, "{}: its adapter has modules_to_save=['lm_head'], which cannot"),
    ({"rank_pattern": {"q_proj": 4}}, "{}: its adapter has rank_pattern={{'q_proj': 4}}, which cannot"),
    ({"alpha_pattern": {"q_proj": 4}}, "{}: its adapter has alpha_pattern={{'q_proj': 4}}, which cannot"),
    ({"bias": "all"}, "{}: its adapter has bias='all', which cannot"),
    ({"lora_bias": True}, "{}: its adapter has lora_bias=True, which cannot"),
    ({"init_lora_weights": "pissa"}, "{}: its adapter has init_lora_weights='pissa', which cannot"),
    ({"trainable_token_indices": [3]}, "{}: its adapter has trainable_token_indices=[3], which cannot"),
    ({"peft_type": "LOHA"}, "{}: its adapter has peft_type='LOHA', which cannot"),
    ({"r": 4}, "lora_rank=8, but the adapter in {} has the rank 4")])
def test_what_is_more_than_an_adapter_is_refused_before_a_model_is_loaded(changes, message, folder, tmp_path):
    adapter = write_adapter(tmp_path / "adapter", folder, ["q_proj"], **changes)
    refused([f"--model={folder}", f"--lora_from={adapter}", "--lora_rank=8", "--learning_rate=1e-3"],
            message.format(adapter), tmp_path)


@pytest.mark.parametrize("key, message", [
    ("base_model.model.model.embed_tokens.lora_embedding_A", "it has {}, and only plain linear layers of"),
    ("base_model.model.lm_head.lora_A.weight", "it has {}, and only plain linear layers of"),
    ("base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector", "it has {}, and only plain linear"),
    ("base_model.model.model.layers.2.self_attn.q_proj.lora_A.weight", "it has {}, and only plain linear layers of"),
    ("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", "the adapter of model.layers.0.self_attn."
     "q_proj has other shapes than")])
def test_tensors_that_are_no_adapters_of_the_layers_are_refused(key, message, folder, tmp_path):
    adapter = write_adapter(tmp_path / "adapter", folder, ["q_proj"])
    tensors = load_file(f"{adapter}/adapter_model.safetensors")
    save_file(tensors | {key: torch.zeros(8, 3)}, f"{adapter}/adapter_model.safetensors")
    refused([f"--model={folder}", f"--lora_from={adapter}", "--lora_rank=8", "--learning_rate=1e-3"],
            f"{adapter}: " + message.format(key), tmp_path)


@pytest.mark.parametrize("missing", ["r", "lora_alpha", "tensors", "object"])
def test_a_folder_that_lacks_a_part_of_an_adapter_is_refused(missing, folder, tmp_path):
    adapter = Path(write_adapter(tmp_path / "adapter", folder, ["q_proj"]))
    config = json.loads((adapter / "adapter_config.json").read_text())
    config.pop(missing, None)
    if missing == "tensors":
        save_file({}, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text(json.dumps([config] if missing == "object" else config))
    with pytest.raises(InputError, match="not an object" if missing == "object" else "this lacks one of them"):
        lora.read_adapter(str(adapter), {})


def test_settings_that_do_not_fit_an_adapter_are_refused(folder, tmp_path):
    adapter = write_adapter(tmp_path / "adapter", folder)
    start = [f"--model={folder}", f"--lora_from={adapter}", "--learning_rate=1e-3"]
    refused(start, f"lora_rank=0: lora_from={adapter} and offload_base=False need adapters, lora_from those of its "
            "rank", tmp_path)
    refused(["--offload_base=true"], "lora_rank=0: lora_from= and offload_base=True need adapters", tmp_path)
    refused([*start, "--lora_rank=8", "--kl_coef=0.1", f"--reference_model={folder}"],
            f"reference_model={folder}: with lora_from the reference is the model with that adapter", tmp_path)
    refused([*start[:1], f"--lora_from={tmp_path}/none", "--lora_rank=8"],
            f"{tmp_path}/none/adapter_config.json cannot be read: FileNotFoundError", tmp_path)


@pytest.mark.parametrize("script, ranks", [("train_grpo.py", 1), ("train_grpo.py", 2), ("train_async.py", 2),
                                           ("train_ppo.py", 1)])
def test_a_run_begins_with_an_adapter_and_resumes_without_its_folder(script, ranks, folder, reward_file, tmp_path):
    adapter = write_adapter(tmp_path / "adapter", folder, r=4, lora_alpha=16)
    settings = {"lora_from": adapter, "lora_rank": 4, "kl_coef": 0.01}
    if script == "train_ppo.py":
        settings |= {"critic_warmup_steps": 0, "num_generations": 1}
    whole, said = train(tmp_path / "whole", folder, reward_file, script, ranks, **settings)
    assert "by its config the adapter belongs to" not in said
    # The engine has the adapter before step 0, and the KL compares with it, not with the base.
    rollouts = kept_rollouts(tmp_path / "whole", 0)
    by_engine = torch.tensor([logp for r in rollouts for logp in r["logprobs"]])
    assert (by_engine - merged_logps(folder, adapter, rollouts)).abs().max() < 1e-5
    assert abs(whole[0]["kl"]) < 1e-6 < abs(whole[3]["kl"])
    gone = tmp_path / "gone"
    shutil.move(adapter, gone)
    later, _ = train(tmp_path / "later", folder, reward_file, script, ranks,
                     resume=tmp_path / "whole/checkpoint-2", **settings)
    assert without_times(later) == without_times(whole)[2:]
    for part in ("", "initial/"):
        tensors = [load_file(tmp_path / run / "checkpoint-4" / part / lora.WEIGHTS) for run in ("whole", "later")]
        assert all(torch.equal(tensor, tensors[1][name]) for name, tensor in tensors[0].items())
    # The second pair of tensors is what the run began with.
    first = load_file(gone / "adapter_model.safetensors")
    assert first.keys() == tensors[0].keys() and all(torch.equal(tensor, first[name]) for name, tensor in tensors[0].items())


def test_an_adapter_of_another_base_is_named(folder, reward_file, tmp_path):
    adapter = write_adapter(tmp_path / "adapter", folder, base_model_name_or_path="some/other-model")
    _, said = train(tmp_path / "run", folder, reward_file, lora_from=adapter, lora_rank=8, max_steps=1)
    assert f"lora_from={adapter}: by its config the adapter belongs to some/other-model, and here it changes" in said
    _, said = train(tmp_path / "later", folder, reward_file, lora_from="", lora_rank=8, code=2,
                    resume=tmp_path / "run/checkpoint-1")
    assert f"lora_from=, but {tmp_path}/run/checkpoint-1 comes from a run with lora_from={adapter}" in said


# ---------------------------------------------------------------- a merged model

def merge_by_command(tmp_path, *arguments, code=0):
    return runs.forked(tmp_path / "merge.log", "-m", "options.merge_adapter", *arguments, code=code)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_merged_folder_has_the_bits_that_the_engine_got(dtype, folder, reward_file, mesh, tmp_path):
    train(tmp_path / "run", folder, reward_file, lora_rank=8, dtype=dtype, logprob_gap=0.5, max_steps=2)
    checkpoint = str(tmp_path / "run/checkpoint-2")
    merge_by_command(tmp_path, folder, checkpoint, tmp_path / "merged", dtype)
    policy = load_policy(folder, mesh, getattr(torch, dtype), adapter=(8, 0, checkpoint))
    sent = dict([*engine_weights(policy, "checkpoint", getattr(torch, dtype))][:-1])
    merged = load_file(tmp_path / "merged/model.safetensors")
    base = load_file(Path(folder, "model.safetensors"))
    assert len(sent) == 14 and merged.keys() == base.keys()
    for name, tensor in merged.items():
        assert torch.equal(tensor, sent.get(name, base[name].to(tensor.dtype))), name
        assert tensor.dtype == getattr(torch, dtype)
        assert torch.equal(tensor, base[name].to(tensor.dtype)) == (name not in sent), name
    assert json.loads((tmp_path / "merged/config.json").read_text())["dtype"] == dtype
    # Other scripts take it for a model.
    rollouts = some_rollouts()
    plain = load_policy(str(tmp_path / "merged"), mesh, getattr(torch, dtype), trained=False)
    assert (logps(policy, rollouts) - logps(plain, rollouts)).abs().max() < 1e-5
    said = merge_by_command(tmp_path, folder, checkpoint, tmp_path / "merged", code=2)
    assert f"{tmp_path}/merged exists already" in said.splitlines()[-1]


def test_a_folder_of_peft_is_merged_with_its_own_scale(folder, tmp_path):
    adapter = write_adapter(tmp_path / "adapter", folder, ["q_proj", "up_proj"], r=4, lora_alpha=3, use_rslora=True)
    merge_by_command(tmp_path, folder, adapter, tmp_path / "merged")
    merged = load_file(tmp_path / "merged/model.safetensors")
    expected = merged_weights(folder, adapter)
    assert all((tensor - expected[name]).abs().max() < 1e-5 for name, tensor in merged.items())
    assert (tmp_path / "merged/tokenizer.json").exists()
    said = merge_by_command(tmp_path, folder, write_adapter(tmp_path / "dora", folder, use_dora=True), tmp_path / "out",
                            code=2)
    assert "its adapter has use_dora=True" in said.splitlines()[-1] and not (tmp_path / "out").exists()


# ---------------------------------------------------------------- offload_base

@pytest.mark.parametrize("script, ranks, dtype", [
    ("train_grpo.py", 1, "float32"), ("train_grpo.py", 1, "bfloat16"), ("train_grpo.py", 2, "bfloat16"),
    ("train_ppo.py", 1, "float32"), ("train_sft.py", 2, "float32"), ("train_async.py", 2, "float32")])
def test_a_run_with_its_base_in_host_memory_has_the_same_figures(script, ranks, dtype, folder, reward_file, tmp_path):
    settings = {"lora_rank": 3, "dtype": dtype, "logprob_gap": 0.5, "gradient_checkpointing": True}
    small = SMALL | {"model": folder, "kl_coef": 0.01} | settings
    if script == "train_ppo.py":
        small |= {"critic_warmup_steps": 0, "num_generations": 1}
    if script == "train_sft.py":
        del small["num_generations"], small["kl_coef"]
    arguments = ["--reward=none" if script == "train_sft.py" else reward_file]
    figures, adapters = [], []
    for offload in ("false", "true"):
        metrics, said = runs.train(script, tmp_path / offload, arguments, small | {"offload_base": offload}, ranks=ranks)
        assert ("offload_base=True saves nothing on a CPU" in said) == (offload == "true")
        figures.append(without_times(metrics))
        adapters.append(load_file(tmp_path / offload / "checkpoint-4" / lora.WEIGHTS))
    assert figures[0] == figures[1] and len(figures[0]) >= 4
    assert all(torch.equal(tensor, adapters[1][name]) for name, tensor in adapters[0].items())
    # A run with the base on its device can go on so.
    if script == "train_grpo.py":
        resume = {"offload_base": "true", "resume": tmp_path / "false/checkpoint-2"}
        later, _ = runs.train(script, tmp_path / "later", arguments, small | resume, ranks=ranks)
        assert without_times(later) == figures[0][2:]


def test_fsdp_offloads_every_layer_and_pins_nothing_on_a_cpu(folder, mesh):
    for offload in (False, True):
        policy = load_policy(folder, mesh, torch.float32, adapter=(3, 0, None, None, offload))
        policies = [part._get_fsdp_state()._fsdp_param_group.offload_policy for part in (policy, *policy.layers)]
        assert [type(x) is CPUOffloadPolicy and not x.pin_memory for x in policies] == [offload] * 3
        assert policy.device == "cpu"


# ---------------------------------------------------------------- a base that is read in 16 bits

@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_base_in_16_bits_is_compared_in_float32_one_layer_at_a_time(dtype, folder):
    config = AutoConfig.from_pretrained(folder)
    policy = lora.AdaptedPolicy(read_model("", model_class(config), folder, config, dtype=dtype))
    # As if it had been read in float32 and then rounded.
    rounded = read_model("", model_class(config), folder, config)
    for parameter in rounded.parameters():
        parameter.data = parameter.data.to(dtype).float()
    before = {name: parameter.clone() for name, parameter in policy.named_parameters()}
    assert all(torch.equal(x.float(), before[f"hf.{name}"].float()) for name, x in rounded.named_parameters())
    wide = []

    def count(*_):
        wide.append(sum(p.dtype == torch.float32 for layer in policy.layers for p in layer.parameters()))
    for layer in policy.layers:
        layer.mlp.register_forward_hook(count)
    ids = torch.arange(3, 23)
    with policy.in_float32():
        found = policy.by_transformers(ids)
    assert torch.equal(found, Policy(rounded).by_transformers(ids)) and found.dtype == torch.float32
    assert wide == [len([*policy.layers[0].parameters()])] * 2
    with policy.in_float32():
        assert check_same("", policy, 1) is True
    for name, parameter in policy.named_parameters():
        assert parameter.dtype == dtype and torch.equal(parameter, before[name])
    if dtype == torch.float16:
        return
    # As a whole in bfloat16 it would have been refused.
    with pytest.raises(ValueError, match="computed here it differs from what transformers computes"):
        check_same("", policy, 1)
