"""What lets a run fit one card of 24 GB: SGD, an adapter to begin with, a merged model, a base in host memory."""
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

import runs
from model import load_policy, make_optimizer
from options.critic import load_critic
from runs import refused, without_times

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


def test_a_rate_for_adamw_is_refused_with_sgd(tmp_path):
    refused(["--optimizer=sgd"], "learning_rate=0.0001: a default for AdamW; with optimizer=sgd it would teach "
            "nothing. Give SGD its own, 3 for the tiny model", tmp_path)
    refused(["--optimizer=adam"], "optimizer=adam: choose adamw, sgd", tmp_path)
