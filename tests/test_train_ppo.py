"""train_ppo.py as a user runs it: whole short runs, resume, and bad input of its own."""
import math
import random
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, Qwen3Config, Qwen3ForCausalLM

import runs
from runs import kept_rollouts, refused, without_times
from test_train_grpo import NAMES

SMALL = {"prompts_per_step": 16, "max_completion_length": 12, "train_prompts": 64, "eval_prompts": 8,
         "eval_samples": 2, "max_steps": 3, "save_interval": 1, "warmup_steps": 0, "learning_rate": 1e-3,
         "critic_learning_rate": 3e-3, "critic_warmup_steps": 1, "keep_checkpoints": 3, "engine": "hf"}


def train(folder, out_dir, reward, **settings):
    defaults = SMALL | {"model": folder} | settings
    return runs.train("train_ppo.py", out_dir, [reward], defaults)[0]


@pytest.fixture(scope="module")
def plain_run(folder, reward_file, tmp_path_factory):
    out_dir = str(tmp_path_factory.mktemp("run") / "plain")
    return out_dir, train(folder, out_dir, reward_file)


def test_a_run_leaves_what_it_promises(plain_run):
    out_dir, metrics = plain_run
    names = set(NAMES) - {"reward_std", "frac_reward_zero_std"} | {
        "critic/vf_loss", "critic/vf_explained_var", "critic/vf_clipfrac", "critic/values/mean",
        "critic/returns/mean", "critic/advantages/mean", "critic/advantages/max", "critic/advantages/min",
        "critic/rewards/mean", "critic/lr", "critic/grad_norm", "actor/ppo_kl",
        "timing_s/values", "timing_s/update_critic"}
    assert [line["step"] for line in metrics] == [0, 1, 2, 3] and "eval/mean@2" in metrics[3]
    assert not names - set(metrics[1]) and not names - set(metrics[2])
    for line in metrics[:3]:
        # Without a KL the reward is just the score.
        assert line["critic/rewards/mean"] == pytest.approx(line["reward"])
    # A new critic, which learns alone first.
    assert metrics[0]["critic/values/mean"] == metrics[0]["critic/vf_explained_var"] == 0
    assert not {"grad_norm", "loss", "entropy"} & metrics[0].keys() and metrics[1]["grad_norm"] > 0
    policies = [AutoModelForCausalLM.from_pretrained(f"{out_dir}/checkpoint-{n}") for n in (1, 2)]
    assert any(not torch.equal(a, b) for a, b in zip(*(p.parameters() for p in policies)))
    critic = AutoModelForTokenClassification.from_pretrained(f"{out_dir}/checkpoint-3/critic")
    assert critic.num_labels == 1 and critic.score.weight.any()


def test_a_resumed_run_repeats_the_steps_of_an_unbroken_one(plain_run, folder, reward_file, tmp_path):
    out_dir, metrics = plain_run
    shutil.copytree(out_dir, tmp_path / "run")
    for n in (2, 3):
        shutil.rmtree(tmp_path / "run" / f"checkpoint-{n}")
    resumed = train(folder, tmp_path / "run", reward_file, resume="auto")
    assert without_times(resumed) == without_times(metrics)


def test_saving_before_the_first_update_changes_nothing(plain_run, folder, reward_file, tmp_path):
    # The other run saves at step 1.
    seldom = train(folder, tmp_path / "run", reward_file, save_interval=100)
    assert without_times(seldom) == without_times(plain_run[1])


def test_another_algorithms_checkpoint_is_refused(plain_run, folder, reward_file, tmp_path):
    checkpoint = shutil.copytree(f"{plain_run[0]}/checkpoint-3", tmp_path / "run" / "checkpoint-3")
    arguments = [f"--model={folder}", reward_file, f"--resume={checkpoint}"]
    refused(arguments, "checkpoint-3 holds critic, which train_grpo.py would lose", tmp_path)


def test_micro_batches_change_nothing(plain_run, folder, reward_file, tmp_path):
    split = train(folder, tmp_path / "run", reward_file, token_budget=100)
    for key in ("critic/vf_loss", "critic/grad_norm", "loss", "grad_norm", "entropy"):
        # The policy's are those of the second step: in the first the critic learns alone.
        for ours, theirs in [*zip(split[:2], plain_run[1])]["critic/" not in key:]:
            assert ours[key] == pytest.approx(theirs[key], rel=1e-3, abs=1e-6), key


def test_what_is_not_scored_teaches_nothing(plain_run, folder, tmp_path):
    """A prompt whose completion has no score (None) leaves no trace in the losses except in their count."""
    (tmp_path / "rewards.py").write_text(
        "def some(prompts, completions, **_):\n"
        "    return [None if len(p[0]['content']) % 2 else len(c[0]['content']) / 12\n"
        "            for p, c in zip(prompts, completions)]\n"
        "def none(prompts, completions, **_):\n    return [None] * len(completions)\n")
    # The values of this critic are not 0, so that it could err.
    critic = f"{plain_run[0]}/checkpoint-3/critic"
    settings = {"critic_warmup_steps": 0, "critic_model": critic, "entropy_coef": 0.01}
    some = train(folder, tmp_path / "some", f"--reward={tmp_path}/rewards.py:some", **settings)
    none = train(folder, tmp_path / "none", f"--reward={tmp_path}/rewards.py:none", **settings)
    assert some[0]["grad_norm"] > 0 and some[0]["critic/vf_loss"] > 0
    assert some[0]["critic/advantages/min"] < 0 < some[0]["critic/advantages/max"]
    for line in none[:3]:
        assert line["critic/values/mean"] != 0
        assert line["grad_norm"] == line["critic/grad_norm"] == line["critic/vf_loss"] == line["loss"] == 0


def test_kl_in_the_reward(folder, reward_file, tmp_path):
    metrics = train(folder, tmp_path / "run", reward_file, kl_coef=0.1, max_steps=4, num_epochs=2,
                    num_mini_batches=2, entropy_coef=0.01, lam=0.95)
    # The policy is the reference.
    assert metrics[0]["kl"] == pytest.approx(0, abs=1e-5)
    line = metrics[3]
    assert line["kl"] > 1e-4
    expected = line["reward"] - 0.1 * line["kl"] * line["completions/mean_length"]
    assert line["critic/rewards/mean"] == pytest.approx(expected, rel=1e-4)


def test_values_that_move_far_are_clipped(folder, reward_file, tmp_path):
    metrics = train(folder, tmp_path / "run", reward_file, num_epochs=4, num_mini_batches=2,
                    value_clip=1e-3)
    assert all(0.05 < line["critic/vf_clipfrac"] < 0.95 for line in metrics[:3])


class SlowAdam:
    """AdamW without decay, in float64, that goes on with the moments in a checkpoint of two ranks."""

    def __init__(self, folder, network):
        self.network = network
        parts = [load_file(f"{folder}/trainer/optimizer-{rank:05}.safetensors") for rank in range(2)]
        self.state = {key: torch.cat([part[key] for part in parts]).double() if parts[0][key].ndim
                      else parts[0][key].double() for key in parts[0]}

    def step(self, loss, rate):
        """Return the norm of the gradient, which is cut to 1."""
        names, parameters = zip(*self.network.named_parameters())
        gradients = torch.autograd.grad(loss, parameters)
        norm = math.sqrt(sum(g.square().sum().item() for g in gradients))
        with torch.no_grad():
            for name, p, g in zip(names, parameters, gradients):
                (key,) = {k.removesuffix(".step") for k in self.state if k.endswith(f"{name}.step")}
                m, v, n = (self.state[f"{key}.{of}"] for of in ("exp_avg", "exp_avg_sq", "step"))
                g = g * min(1, 1 / norm)
                m += 0.1 * (g - m)
                v += 0.05 * (g * g - v)
                n += 1
                p -= rate * (m / (1 - 0.9 ** n)) / ((v / (1 - 0.95 ** n)).sqrt() + 1e-8)
        return norm


def test_a_step_is_that_of_slow_loops_in_float64(folder, reward_file, tmp_path):
    """Step 2 of two ranks: after the critic's warm-up, in the decay, with a KL, two passes of two updates."""
    metrics = runs.train("train_ppo.py", tmp_path / "run", [reward_file], SMALL | {
        "model": folder, "temperature": 0.7, "num_epochs": 2, "num_mini_batches": 2, "kl_coef": 0.2,
        "lam": 0.8, "epsilon": 0.02, "epsilon_high": 0.03, "value_clip": 0.02,
        "entropy_coef": 0.01, "save_interval": 1, "eval_prompts": 4, "eval_samples": 1}, ranks=2)[0][2]
    rows, checkpoint = kept_rollouts(tmp_path / "run", 2), tmp_path / "run" / "checkpoint-2"
    network = lambda path, kind: kind.from_pretrained(path).double()
    policy, reference = network(checkpoint, AutoModelForCausalLM), network(folder, AutoModelForCausalLM)
    critic = network(checkpoint / "critic", AutoModelForTokenClassification)
    actor_adam, critic_adam = SlowAdam(checkpoint, policy), SlowAdam(checkpoint / "critic", critic)

    def read(model, row):
        """Return what a model has at each token that was sampled, in the row before that token."""
        ids, ((start, end),) = torch.tensor([row["ids"]]), row["spans"]
        return model(ids).logits[0, start - 1:end - 1], ids[0, start:end, None]

    def logprobs(model, row):
        logits, ids = read(model, row)
        table = (logits / 0.7).log_softmax(-1)
        return table.gather(1, ids)[:, 0], -(table.exp() * table).sum(-1)

    values = lambda row: read(critic, row)[0][:, 0]
    with torch.no_grad():
        for row in rows:
            row["old"], row["value"] = logprobs(policy, row)[0], values(row)
            row["kl"] = row["old"] - logprobs(reference, row)[0]
            row["reward"] = [-0.2 * kl for kl in row["kl"].tolist()]
            row["reward"][-1] += row["score"]
            later, value_later, row["raw"] = 0.0, 0.0, []
            for reward, value in zip(row["reward"][::-1], row["value"].tolist()[::-1]):
                later = reward + value_later - value + 0.8 * later
                value_later, row["raw"] = value, [later, *row["raw"]]
    raw = torch.tensor([a for row in rows for a in row["raw"]], dtype=torch.float64)
    for row in rows:
        own = torch.tensor(row["raw"], dtype=torch.float64)
        row["adv"], row["return"] = (own - raw.mean()) / raw.std(correction=0), own + row["value"]

    before, returns = (torch.cat([row[name].double() for row in rows]) for name in ("value", "return"))

    draw, figures = random.Random("0 2"), []
    orders = [draw.sample(range(16), 16) for _ in range(2)]
    assert orders[0] != orders[1]
    for update in [order[u::2] for order in orders for u in range(2)]:
        tokens, loss, vf_loss = sum(rows[s]["length"] for s in update), 0.0, 0.0
        clipped, entropies, divergences = [], [], []
        for row in (rows[s] for s in update):
            value = values(row)
            near = row["value"] + (value - row["value"]).clamp(-0.02, 0.02)
            vf_loss = vf_loss + torch.max((value - row["return"]) ** 2, (near - row["return"]) ** 2).sum() / 2
            logp, entropy = logprobs(policy, row)
            for new, old, adv, bonus in zip(logp, row["old"], row["adv"], entropy):
                ratio = (new - old).exp()
                cut = ratio.clamp(0.98, 1.03)
                loss = loss - torch.min(ratio * adv, cut * adv) - 0.01 * bonus
                clipped.append((cut * adv < ratio * adv).item())
                divergences.append((ratio - 1 - ratio.log()).item())
                entropies.append(bonus.item())
        vf_loss, loss = vf_loss / tokens, loss / tokens
        # A third of the steps is left for the critic, and half of those for the policy.
        norms = critic_adam.step(vf_loss, 3e-3 / 3), actor_adam.step(loss, 1e-3 / 2)
        figures.append((vf_loss.item(), loss.item(), *norms, entropies, clipped, divergences))
    vf_losses, losses, critic_norms, norms, *of_tokens = zip(*figures)
    entropy, clipped, divergence = (sum(map(sum, of)) / sum(map(len, of)) for of in of_tokens)
    expected = {
        "critic/vf_loss": sum(vf_losses) / 4, "critic/grad_norm": sum(critic_norms) / 4,
        "loss": sum(losses) / 4, "grad_norm": sum(norms) / 4, "entropy": entropy, "clip_ratio/region_mean": clipped,
        "actor/ppo_kl": divergence, "kl": torch.cat([row["kl"] for row in rows]).mean().item(),
        "critic/vf_explained_var": (1 - (returns - before).var() / returns.var()).item(),
        "critic/values/mean": before.mean().item(), "critic/returns/mean": returns.mean().item(),
        "critic/advantages/mean": raw.mean().item(), "critic/lr": 1e-3, "learning_rate": 5e-4,
        "critic/advantages/max": max(row["adv"].max().item() for row in rows),
        "critic/advantages/min": min(row["adv"].min().item() for row in rows)}
    assert {key: metrics[key] for key in expected} == pytest.approx(expected, rel=1e-3, abs=1e-6)
    assert 0.05 < clipped < 0.95 and 0.05 < metrics["critic/vf_clipfrac"] < 0.95 and expected["kl"] > 1e-4
    for place, ours in (("", policy), ("critic", critic)):
        kind = AutoModelForTokenClassification if place else AutoModelForCausalLM
        before, after = (dict(network(tmp_path / "run" / f"checkpoint-{n}" / place, kind).named_parameters())
                         for n in (2, 3))
        moved = sum((after[name] - before[name]).square().sum() for name in before).sqrt()
        apart = sum((after[name] - p).square().sum() for name, p in ours.named_parameters()).sqrt()
        assert apart < 0.01 * moved


@pytest.mark.parametrize("arguments, message", [
    (["--lam=1.5"], "lam=1.5: must be from 0 to 1"), (["--lam=-0.1"], "lam=-0.1: must not be negative"),
    (["--epsilon=-1"], "epsilon=-1.0: must not be negative"), (["--value_clip=-1"], "value_clip=-1.0"),
    (["--num_mini_batches=3"], "num_mini_batches=3 does not divide"), (["--num_epochs=0"], "num_epochs=0"),
    (["--critic_warmup_steps=50"], "no step"),
    (["--reference_model=tiny"], "reference_model=tiny needs a kl_coef above 0"),
    (["--critic_model=BAD"], "vocabulary of 77 for one of"), (["--critic_model=BAD/nothing"], "no such folder"),
    (["--advantage=grpo"], "unknown setting")])
def test_bad_input(folder, tmp_path, arguments, message):
    config = Qwen3Config(vocab_size=77, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                         num_attention_heads=1, num_key_value_heads=1, head_dim=8)
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "critic")
    arguments = [argument.replace("BAD", str(tmp_path / "critic")) for argument in arguments]
    refused([f"--model={folder}", *arguments], message, tmp_path, script="train_ppo.py")
