"""What a step of train_grpo.py and train_dapo.py computes, by a slow reading of its rollouts."""
import math
import random
import statistics

import pytest
import torch
from transformers import AutoModelForCausalLM

from runs import kept_rollouts, script_path, with_defaults
from test_changes import logprobs, of_groups
from test_train_dapo import PLAIN, dapo
from test_train_grpo import REAL, train

# Without learning to speak of: all ratios are 1, and the policy is the reference.
STILL = [*REAL[:-1], "--learning_rate=1e-9", "--max_steps=2"]
# An engine that reports other logprobs than it samples from.
SHIFTED = """
import runpy, sys
import hf_engine
step = hf_engine.HFEngine.step
def shifted(self):
    return [answer._replace(logprobs=[x + 0.05 for x in answer.logprobs]) for answer in step(self)]
hf_engine.HFEngine.step = shifted
sys.argv[0] = "SCRIPT"
runpy.run_path("SCRIPT", run_name="__main__")
"""


def groups_of(rows, G=6):
    return [rows[i:i + G] for i in range(0, len(rows), G)]


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_the_loss_of_what_is_counted(tmp_path, aggregation):
    """Filtered groups in no statistics, truncated completions in no denominator, the penalty in the score."""
    metrics = dapo(tmp_path, *STILL, "--advantage=grpo_batch", "--max_num_gen_batches=1",
                   "--mask_truncated=true", "--overlong_buffer=8", "--num_mini_batches=2",
                   "--epsilon_high=0.2", f"--loss_aggregation={aggregation}")
    rows = kept_rollouts(tmp_path, 1)
    for row in rows:
        assert row["length"] == len(row["logprobs"])
        row["shaped"] = row["score"] + min(0, max(-1, (24 - 8 - row["length"]) / 8))
    mixed = [group for group in groups_of(rows) if len({row["score"] for row in group}) > 1]
    # Some are left out.
    assert 0 < len(mixed) < 4
    std = statistics.stdev(row["shaped"] for group in mixed for row in group)
    for group in mixed:
        for row in group:
            row["adv"] = (row["shaped"] - statistics.mean(other["shaped"] for other in group)) / (std + 1e-4)
    counted = [row for row in rows if "adv" in row and row["finish_reason"] == "stop"]
    assert 0 < len(counted) < 6 * len(mixed)
    order = random.Random("0 1").sample(counted, len(counted))
    expected = []
    for update in (order[0::2], order[1::2]):
        tokens = sum(row["length"] for row in update)
        weight = lambda row: row["length"] / tokens if aggregation == "token_mean" else 1 / len(update)
        expected.append(sum(-row["adv"] * weight(row) for row in update))
    assert metrics[1]["loss"] == pytest.approx(statistics.mean(expected), rel=1e-4)
    assert metrics[1]["reward"] == pytest.approx(statistics.mean(row["score"] for row in rows))
    assert metrics[1]["train/frac_counted"] == pytest.approx(len(counted) / 24)


def test_kl_in_the_reward_correction_and_entropy_bonus(tmp_path):
    (tmp_path / "shifted.py").write_text(SHIFTED.replace("SCRIPT", "train_grpo.py"))
    metrics, _ = train(None, tmp_path / "run", *STILL, "--advantage=dr_grpo", "--kl_coef=0.5",
                       "--kl_estimator=k1_reward", "--entropy_coef=0.1",
                       "--engine_correction=token_truncate,sequence_mask", "--correction_cap=0.9",
                       f"--correction_low={math.exp(-0.05 * 12.5)}", "--logprob_gap=1.0",
                       script=tmp_path / "shifted.py")
    rows = kept_rollouts(tmp_path / "run", 1)
    lengths = [row["length"] for row in rows]
    # The ratio of a token is exp(-0.05), which the cap lowers. The mask drops completions of over 12 tokens.
    weights = [0.9 * (n <= 12) for n in lengths]
    assert 0 < sum(weights) < 0.9 * len(weights)
    # Each token's k1 is the shift.
    shaped = [row["score"] - 0.5 * 0.05 * n for row, n in zip(rows, lengths)]
    adv = [r - statistics.mean(group) for group in groups_of(shaped) for r in group]
    policy = sum(-a * n * weight for a, n, weight in zip(adv, lengths, weights)) / sum(lengths)
    expected = policy - 0.1 * metrics[1]["entropy"]
    assert metrics[1]["loss"] == pytest.approx(expected, rel=1e-3) and abs(policy) > 0.01
    assert metrics[1]["kl"] == pytest.approx(0.05, rel=1e-3)
    mean_weight = sum(weight * n for weight, n in zip(weights, lengths)) / sum(lengths)
    assert metrics[1]["sampling/correction_mean"] == pytest.approx(mean_weight, rel=1e-4)
    assert metrics[1]["sampling/sampling_logp_difference/mean"] == pytest.approx(0.05, rel=1e-3)


@pytest.mark.parametrize("script, own", [
    ("train_grpo.py", []), ("train_dapo.py", with_defaults([], PLAIN)),
    ("train_async.py", ["--max_staleness=0"])])
def test_a_kl_in_the_loss_after_an_update_at_another_temperature(folder, reward_file, tmp_path, script, own):
    """The engine is off by 0.05, which weighs the policy's loss, and not the KL."""
    (tmp_path / "shifted.py").write_text(SHIFTED.replace("SCRIPT", script_path(script)))
    (_, line, _), _ = train(folder, tmp_path / "run", reward_file, *own, "--temperature=0.7", "--kl_coef=0.5",
                            "--engine_correction=token_truncate", "--logprob_gap=1", "--learning_rate=3e-3",
                            script=tmp_path / "shifted.py", ranks=1 + (script == "train_async.py"))
    rows, loss = kept_rollouts(tmp_path / "run", 1), 0.0
    policy, reference = (AutoModelForCausalLM.from_pretrained(path).double()
                         for path in (tmp_path / "run" / "checkpoint-1", folder))
    kls = []
    for row, adv in zip(rows, of_groups(rows)):
        logps, ref_logps = logprobs(policy, row, 0.7), logprobs(reference, row, 0.7).detach()
        for logp, ref, engine, a in zip(logps, ref_logps, row["logprobs"], adv):
            ratio, d = (logp - logp.detach()).exp(), ref - logp
            assert engine - logp.item() == pytest.approx(0.05, abs=1e-3)
            loss = loss - math.exp(-0.05) * ratio * a + 0.5 * (d.exp() - 1 - d)
            kls.append(engine - ref.item())
    loss = loss / len(kls)
    loss.backward()
    norm = math.sqrt(sum(p.grad.square().sum().item() for p in policy.parameters()))
    assert line["loss"] == pytest.approx(loss.item(), rel=1e-3) and abs(line["loss"]) > 0.01
    assert line["grad_norm"] == pytest.approx(norm, rel=1e-3)
    assert line["kl"] == pytest.approx(statistics.mean(kls), rel=1e-3)


def test_a_second_update_leaves_the_policy_that_sampled(folder, reward_file, tmp_path):
    ratios = {}
    for updates in (1, 2):
        metrics, _ = train(folder, tmp_path / str(updates), reward_file, "--epsilon=1e-6",
                           "--epsilon_high=1e-6", f"--num_mini_batches={updates}", "--max_steps=1")
        ratios[updates] = metrics[0]["clip_ratio/region_mean"]
    # Half of the tokens, pushed either way.
    assert ratios[1] == 0 and 0.1 < ratios[2] < 0.5


def test_where_nothing_is_counted_nothing_moves(folder, reward_file, tmp_path):
    metrics = dapo(tmp_path, reward_file, *with_defaults([], PLAIN), "--mask_truncated=true",
                   "--max_completion_length=1", folder=folder)
    assert all(line["train/frac_counted"] == line["loss"] == line["grad_norm"] == 0 for line in metrics[:2])
    before, after = (AutoModelForCausalLM.from_pretrained(path)
                     for path in (folder, f"{tmp_path}/checkpoint-2"))
    assert all(torch.equal(a, b) for a, b in zip(before.parameters(), after.parameters()))
