"""float16: gradients with a loss scale, and what happens where they overflow."""
import pytest
import torch
import torch.distributed as dist

import runs
from model import load_policy, micro_batches
from options.critic import load_critic
from options.float16 import set_loss_scale
from runs import change_state, lines, on_ranks, without_times
from test_lora import some_rollouts

SMALL = {"prompts_per_step": 4, "num_generations": 4, "max_completion_length": 12, "train_prompts": 64,
         "eval_prompts": 4, "eval_samples": 1, "save_interval": 3, "eval_interval": 0, "keep_checkpoints": 9,
         "warmup_steps": 0, "lr_decay": "constant", "learning_rate": 1e-4, "engine": "hf", "dtype": "float16"}
# Times 65536, the gradient of the first is too large for float16.
REWARDS = """
def large(prompts, completions, **_):
    return [500.0 * (i % 2) for i in range(len(completions))]
def endless(prompts, completions, **_):
    return [1e38 * (i % 2) for i in range(len(completions))]
"""


def gradients(path, kind, dtype, scale):
    """Of a sum whose gradient at each token is 1e-6."""
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    if kind == "critic":
        network = load_critic(path, mesh, dtype)
        network.hf.score.weight.data.copy_(0.1)
    else:
        network = load_policy(path, mesh, dtype, adapter=(3, 0, None) if kind == "lora" else None)
    for part in network.adapters.layers.values() if kind == "lora" else ():
        part.lora_B.data.copy_(0.1)
    set_loss_scale(network, scale)
    rollouts = some_rollouts()
    for s in range(dist.get_rank(), len(rollouts), 2 * dist.get_world_size()):
        # The second micro-batch adds to the gradient of the first.
        for batch in micro_batches(network, rollouts, [s, s + dist.get_world_size()], 24):
            outputs = (network(batch),) if kind == "critic" else network(batch, 1.0)
            (1e-6 * sum(output.sum() for output in outputs) * dist.get_world_size()).backward()
    return torch.cat([p.grad.full_tensor().flatten() for p in network.parameters() if p.requires_grad])


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ["policy", "lora", "critic"])
def test_scaled_gradients_are_those_of_float32(folder, mesh, tmp_path, kind, ranks):
    expected = gradients(folder, kind, torch.float32, 1.0)
    scaled, plain = (
        gradients(folder, kind, torch.float16, scale) if ranks == 1 else
        on_ranks(ranks, tmp_path, gradients, folder, kind, torch.float16, scale)[0]
        for scale in (2.0 ** 16, 1.0))
    error = lambda other: (other - expected).norm() / expected.norm()
    assert error(scaled) < 0.01 and error(plain) > 0.1 and expected.norm() > 0


@pytest.mark.parametrize("script, ranks", [("train_grpo.py", 1), ("train_grpo.py", 2), ("train_ppo.py", 1)])
def test_a_gradient_that_overflows_halves_the_scale(folder, tmp_path, script, ranks):
    """No update is made, and none counted; a resumed run goes on with the same scale, bit for bit."""
    (tmp_path / "rewards.py").write_text(REWARDS)
    more = {"critic_warmup_steps": 0} if "ppo" in script else {"advantage": "dr_grpo"}

    def run(name, reward="large", code=0, **settings):
        return runs.train(script, tmp_path / name, [f"--reward={tmp_path}/rewards.py:{reward}"],
                          SMALL | more | {"model": folder} | settings, ranks=ranks, code=code)

    metrics, said = run("run", max_steps=8)
    first, *_, last = [line for line in metrics if "critic/loss_scale" in line or "actor/loss_scale" in line]
    name = "critic" if "ppo" in script else "actor"
    assert first[f"{name}/loss_scale"] < 2 ** 16
    assert f"a gradient of the {name} is too large for float16" in said
    assert last["grad_norm"] > 0 and sum(line.get(f"{name}/skipped_updates", 0) for line in metrics) == 0
    resumed, _ = run("resumed", max_steps=8, resume=f"{tmp_path}/run/checkpoint-3")
    assert without_times(resumed) == without_times(metrics)[-len(resumed):] and len(resumed) == 6
    change_state(tmp_path / "run" / "checkpoint-3", lambda state: state | {
        "loss_scale": dict.fromkeys(state["loss_scale"], 3.995)})
    grown, _ = run("grown", max_steps=4, resume=f"{tmp_path}/run/checkpoint-3")
    assert grown[0][f"{name}/loss_scale"] == 16
    if ranks == 1 and "grpo" in script:
        _, said = run("endless", "endless", code=1, max_steps=40)
        assert "5 updates of the actor in a row were skipped" in said
        assert len(lines(tmp_path / "endless")) == 20
