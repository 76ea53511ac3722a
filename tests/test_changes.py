"""The first changes a researcher makes, each compared with a slow computation, and what stops a wrong one."""
import json
import math
import os
import random
import re
import runpy
import shutil
import statistics
import subprocess
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import regex
import torch
from safetensors.numpy import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import losses
import runs
from bench import unbiased
from options.saved_rollouts import from_arrays
from runtime.model_folder import SHIPPED
from runtime.run import check_state
from runs import RECIPES, ROOT, forked, kept_rollouts, lines, without_times
from test_docs import copy, patch  # noqa: F401
from test_train_grpo import SMALL, train
from test_unbiased import slow_gradients

# A step of its own for each word of an answer: a tenth for one that begins with an even letter.
STEPS = '''
def words(prompts, completions, **_):
    texts = [completion[0]["content"] for completion in completions]
    return [[(m.end() - 1, 0.1 * (ord(m[0][0]) % 2 == 0)) for m in re.finditer(r"[^a-p]+|[a-p]", text)] or 0.0
            for text in texts]
'''


def changed(folder, *changes, script="train_grpo.py", diff=""):
    """A copy of a script in the folder, with these (before, after) and with a diff, which may copy it once more."""
    with open(os.path.join(ROOT, script)) as file:
        text = file.read()
    for before, after in changes:
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    (folder / script).write_text(text)
    for other in re.findall(r"^--- a/(\w+\.py)$", diff, re.M):
        if other != script:
            shutil.copy(os.path.join(ROOT, other), folder)
    if diff:
        script = ([script] + re.findall(r"^copy to (\S+)$", diff, re.M))[-1]
        if "copy to" in diff:
            (folder / script).unlink(missing_ok=True)
        subprocess.run(["patch", "-p1", "--fuzz=0"], input=diff, cwd=folder, text=True, check=True,
                       capture_output=True)
    return str(folder / script)


def small(folder, *arguments):
    return runs.with_defaults([f"--model={folder}", *arguments], SMALL)


def logprobs(model, row, temperature=1.0):
    """Of the sampled tokens of a kept rollout, with gradient, by a plain forward."""
    ids, ((start, end),) = torch.tensor([row["ids"]]), row["spans"]
    table = (model(ids).logits[0] / temperature).log_softmax(-1)
    return table[start - 1:end - 1].gather(1, ids[0, start:end, None])[:, 0]


def slow_step(model, rows, advantages, epsilon=0.2):
    """The loss and the norm of the gradient of PPO's loss over these tokens, one after the other."""
    total = 0.0
    for row, adv in zip(rows, advantages):
        for new, old, a in zip(logprobs(model, row), row["logprobs"], adv):
            ratio = (new - old).exp()
            total = total - torch.min(ratio * a, ratio.clamp(1 - epsilon, 1 + epsilon) * a)
    loss = total / sum(len(row["logprobs"]) for row in rows)
    loss.backward()
    return loss.item(), math.sqrt(sum(p.grad.square().sum().item() for p in model.parameters()))


def of_groups(rows, G=4):
    """GRPO's advantages, for every token."""
    found = []
    for first in range(0, len(rows), G):
        scores = torch.tensor([row["score"] for row in rows[first:first + G]], dtype=torch.float64)
        found += [[a] * len(row["logprobs"]) for row, a in zip(
            rows[first:first + G], ((scores - scores.mean()) / (scores.std() + 1e-4)).tolist())]
    return found


def test_rollouts_of_the_step_before(folder, reward_file, tmp_path):
    script = changed(tmp_path, diff=RECIPES["earlier_rollouts"])
    arguments = small(folder, reward_file, "--max_steps=3", "--learning_rate=3e-3")
    forked(tmp_path / "log", script, *arguments, f"--out_dir={tmp_path}/run")
    metrics = lines(tmp_path / "run")
    kept = lambda step, run="run": from_arrays(load_file(
        tmp_path / f"{run}/checkpoint-{step}/trainer/arrays.safetensors"))
    # What step 2 has sampled, and step 1.
    rows = [vars(r) | {"score": r.score} for r in kept(3) + kept(2)]
    assert [{v for _, v in row["versions"]} for row in rows] == [{2}] * 16 + [{1}] * 16
    model = AutoModelForCausalLM.from_pretrained(f"{tmp_path}/run/checkpoint-2")
    loss, norm = slow_step(model, rows, of_groups(rows))
    assert metrics[2]["loss"] == pytest.approx(loss, rel=1e-3, abs=1e-5)
    assert metrics[2]["grad_norm"] == pytest.approx(norm, rel=1e-3)
    with torch.no_grad():
        gaps = [(logprobs(model, row) - torch.tensor(row["logprobs"])).abs().max().item() for row in rows]
    # The policy has left those of the step before, and only the others are compared with the engine.
    assert max(gaps[:16]) < 1e-4 and min(gaps[16:]) > 1e-3
    assert metrics[2]["sampling/sampling_logp_difference/max"] < 1e-4
    # A run that goes on is the unbroken one.
    shutil.copytree(tmp_path / "run", tmp_path / "again", ignore=shutil.ignore_patterns("checkpoint-3"))
    forked(tmp_path / "log", script, *arguments, f"--out_dir={tmp_path}/again", "--resume=auto")
    assert without_times(lines(tmp_path / "again")) == without_times(metrics)
    # With a correction its weight does that, as in train_async.py, and on-policy the ratio is 1.
    forked(tmp_path / "log", script, *arguments, "--engine_correction=token_truncate",
           "--old_logprobs=trainer", "--correction_cap=1.01", f"--out_dir={tmp_path}/weighed")
    policy, line = AutoModelForCausalLM.from_pretrained(f"{tmp_path}/weighed/checkpoint-2"), lines(tmp_path / "weighed")[2]
    rows = [vars(r) | {"score": r.score} for r in kept(3, "weighed") + kept(2, "weighed")]
    weights = []
    with torch.no_grad():
        for row in rows:
            weights.append((logprobs(policy, row) - torch.tensor(row["logprobs"])).exp().clamp(max=1.01))
    tokens = sum(map(len, weights))
    loss = -sum((torch.tensor(adv) * weight).sum() for adv, weight in zip(of_groups(rows), weights)) / tokens
    assert line["sampling/correction_mean"] == pytest.approx(sum(w.sum().item() for w in weights) / tokens, abs=1e-5)
    assert line["sampling/correction_mean"] < 0.999 and line["loss"] == pytest.approx(loss.item(), rel=1e-3, abs=1e-5)
    # Nobody compares them with the engine by mistake.
    script = changed(tmp_path, diff=RECIPES["earlier_rollouts"].replace("if s < len(fresh)", ""))
    output = forked(tmp_path / "log", script, *arguments, f"--out_dir={tmp_path}/refused", code=1)
    assert "step 1 compares rollouts of step 0's policy with its own: leave them out" in output


STEP_7 = "    # ------------------------------------------------------------ 7 log\n"


@pytest.mark.parametrize("ranks, value, message", [
    (1, '{1: 0.5}', "run.state['mine'] is {1: 0.5}, and a resumed run would read {'1': 0.5}"),
    (2, "rank", "the ranks differ in ['mine'] of run.state, and a resumed run would have that of rank 0")])
def test_state_that_a_resume_would_not_have_stops_the_first_step(folder, reward_file, tmp_path, ranks, value,
                                                                 message):
    script = changed(tmp_path, (STEP_7, f"    run.state['mine'] = {value}\n" + STEP_7))
    output = forked(tmp_path / "log", script, *small(folder, reward_file), f"--out_dir={tmp_path}/run",
                    code=2, ranks=ranks)
    assert message in output.splitlines()[-1] and not lines(tmp_path / "run")


@pytest.mark.parametrize("value, ok", [
    ({"a": [1, 0.5, None, True, "é"], "b": {}}, True), (math.nan, True), (math.inf, True), ((1, 2), False),
    ([(1,)], False), (torch.ones(2), False), (np.float32(0.5), False), (defaultdict(int, a=1), False),
    ({("a", 1): 2}, False), ({1, 2}, False), ({"1": 1, 1: 2}, False)])
def test_state_survives_json(mesh, capsys, value, ok):
    run = SimpleNamespace(state={"step": 1, "mine": value, "own": (1,)}, run_keys={"own"})
    if ok:
        return check_state(run)
    with pytest.raises(SystemExit):
        check_state(run)
    assert "run.state['mine'] is " in capsys.readouterr().err


def test_a_setting_that_is_state_is_said_to_be_ignored(folder, reward_file, tmp_path):
    state = "Run(settings, __file__, entropy_coef=entropy_coef)"
    script = changed(tmp_path, ("Run(settings, __file__)", state),
                     (STEP_7, "    run.state['entropy_coef'] += 0.5\n" + STEP_7))

    def run(steps, *more):
        return forked(tmp_path / "log", script, *small(folder, reward_file, *more, f"--max_steps={steps}"),
                      f"--out_dir={tmp_path}/run", "--resume=auto")

    assert "is not read" not in run(1, "--entropy_coef=0.1") + run(2, "--entropy_coef=0.1")
    output = run(3, "--entropy_coef=5", "--lr_decay=cosine")
    assert "\nentropy_coef=5.0 is not read: the run goes on with entropy_coef=1.1 of its state\n" in output
    assert output.count("is not read") == 1


@pytest.mark.parametrize("script", ["train_grpo.py", "train_ppo.py"])
def test_a_price_for_length_acts_the_same_wherever_it_is_taken_off(folder, reward_file, tmp_path, script):
    scored = "        scorer(my_rollouts)                                     # sets r.score and r.rewards\n"
    counted = "    lengths = torch.tensor([len(r.logprobs) for r in rollouts])                         # [N], sampled tokens\n"
    places = {
        "nowhere": (scored, scored),
        "scores": (counted, counted + "    scores = scores - 0.125 * lengths\n"),
        "score": (scored, scored + "        for r in my_rollouts: r.score -= 0.125 * len(r.logprobs)\n"),
        "rewards": (scored, scored + "        for r in my_rollouts: r.rewards[len(r.logprobs) - 1] -= 0.125 * len(r.logprobs)\n")}
    weights = {}
    for name, change in places.items():
        arguments = small(folder, reward_file, "--max_steps=2", f"--out_dir={tmp_path}/{name}")
        if script == "train_ppo.py":
            arguments.append("--critic_warmup_steps=0")
        forked(tmp_path / "log", changed(tmp_path, change, script=script), *arguments)
        weights[name] = load_file(tmp_path / name / "checkpoint-2" / "model.safetensors")
    for key, weight in weights["scores"].items():
        for name in ("score", "rewards"):
            assert np.array_equal(weights[name][key], weight), (name, key)
    assert not all(np.array_equal(weights["nowhere"][key], weight) for key, weight in weights["scores"].items())


def test_rates_by_layer_follow_the_schedule_and_are_logged(folder, reward_file, tmp_path):
    """The first step of Adam moves the weights by the rate of their group. What is frozen stays."""
    frozen = "    policy.hf.model.norm.weight.requires_grad_(False)\n"
    script = changed(tmp_path, ("    reference = None\n", f"{frozen}    reference = None\n"),
                     diff=RECIPES["parameter_groups"])
    arguments = small(folder, reward_file, "--max_steps=3", "--warmup_steps=2", "--keep_checkpoints=9",
                      "--weight_decay=0.5")
    forked(tmp_path / "log", script, *arguments, f"--out_dir={tmp_path}/run", ranks=2)
    metrics = lines(tmp_path / "run")
    for name, rates in (("", [5e-4, 1e-3, 1e-3]), ("/1", [5e-5, 1e-4, 1e-4]), ("/2", [5e-4, 1e-3, 1e-3])):
        assert [line[f"learning_rate{name}"] for line in metrics[:3]] == pytest.approx(rates)
    before, after = (dict(AutoModelForCausalLM.from_pretrained(path).named_parameters())
                     for path in (folder, tmp_path / "run" / "checkpoint-1"))
    for name, weight in before.items():
        if name in ("model.embed_tokens.weight", "model.norm.weight"):
            assert torch.equal(after[name], weight)
            continue
        # A norm has the whole rate in every layer, and no decay.
        rate = 5e-5 if ".layers.0." in name and "norm" not in name else 5e-4
        decay = 0 if "norm" in name else 0.5
        moved = (after[name] - weight * (1 - rate * decay)).abs().max().item()
        assert moved == pytest.approx(rate, rel=2e-2), name
    # And in a resumed run.
    shutil.copytree(tmp_path / "run", tmp_path / "again", ignore=shutil.ignore_patterns("checkpoint-[23]"))
    forked(tmp_path / "log", script, *arguments, f"--out_dir={tmp_path}/again", "--resume=auto", ranks=2)
    assert without_times(lines(tmp_path / "again")) == without_times(metrics)


def test_the_kl_is_taken_off_the_rewards_of_tokens_too(folder, teacher, reward_file, tmp_path):
    """With one reward for each completion turns is rloo, also with a KL or a penalty."""
    how = ["--max_num_gen_batches=0", "--overlong_buffer=6", "--num_mini_batches=1", "--kl_coef=0.3",
           "--kl_estimator=k1_reward", f"--reference_model={teacher}", "--max_steps=1"]
    (rloo, _), (turns, _) = (
        train(folder, tmp_path / advantage, reward_file, *how, f"--advantage={advantage}",
              script="train_dapo.py")[0] for advantage in ("rloo", "turns"))
    assert turns["grad_norm"] == pytest.approx(rloo["grad_norm"], rel=1e-4)
    assert turns["rewards/shaped/mean"] < turns["reward"] - 0.3


@pytest.fixture
def grpo_process(tmp_path, monkeypatch):
    """The advantage that a diff adds to losses.py, which bench/unbiased.py then has as well."""
    changed(tmp_path, script="configurator.py")
    added = runpy.run_path(changed(tmp_path, script="losses.py", diff=RECIPES["grpo_process"]))
    monkeypatch.setitem(losses.ADVANTAGES, "grpo_process", added["grpo_process"])
    return added["grpo_process"]


def test_rewards_of_steps_are_normalised_together(grpo_process):
    """Each among all of its prompt, and it counts for its token and those before it."""
    lengths = [5, 3, 1, 4, 2, 6]
    given = [{0: 0.5, 3: -1.0}, {2: 2.0}, {0: math.nan}, {1: 0.25, 2: 0.25, 3: 1.0}, {1: 7.0}, {5: math.nan}]
    scores = torch.tensor([sum(own.values()) for own in given])
    # A penalty: it is taken off the last reward.
    scores[0] -= 0.5
    adv = grpo_process(scores, 3, lengths=torch.tensor(lengths), rewards=given)
    assert given[0] == {0: 0.5, 3: -1.0}
    shaped = [{0: 0.5, 3: -1.5}, *given[1:]]
    for first in (0, 3):
        values = [r for own in shaped[first:first + 3] for r in own.values() if not math.isnan(r)]
        mean, std = statistics.mean(values), statistics.stdev(values)
        for s in range(first, first + 3):
            expected = [sum((r - mean) / (std + 1e-4) for token, r in shaped[s].items()
                            if token >= t and not math.isnan(r)) for t in range(lengths[s])]
            assert adv[s].tolist() == pytest.approx(expected, abs=1e-6), s
    # The last prompt's only reward but one has nothing to be compared with.
    alone = grpo_process(scores[4:], 2, lengths=torch.tensor(lengths[4:]), rewards=given[4:])
    assert not alone[0].any() and not alone[1].any()


def test_rewards_of_steps_that_are_normalised_favour_early_ends(grpo_process):
    """And late ends if the mean reward is below 0, as docs/measured/methods.md says, which has the lines of the tables."""
    page = (Path(ROOT) / "docs/measured/methods.md").read_text()
    gradients = {make: unbiased.expected_gradients(make(), ["grpo_process"])["grpo_process", "sequence_sum"]
                 for make in unbiased.PROBLEMS.values()}
    [by_size] = [line for line in unbiased.table_by_size() if "grpo_process" in line]
    for line in (unbiased.line("grpo_process", gradients), by_size):
        assert f"\n{line}\n" in page, line
    assert gradients[unbiased.two_turns].tolist() == pytest.approx([0.1176, 0.3386], abs=1e-4)
    for G in (2, 3):
        slow = slow_gradients(G)
        for key, gradient in unbiased.expected_gradients(unbiased.two_turns(G), ["grpo_process"]).items():
            if key in slow:
                assert gradient.tolist() == pytest.approx(slow[key], rel=1e-5), key
    for shift, favours in ((0.0, "early ends"), (-0.8, "late ends")):
        problem = unbiased.two_turns()                          # the mean reward is 0.45
        [episodes] = problem.prompts
        shifted = [own._replace(rewards={t: reward + shift for t, reward in own.rewards.items()}) for own in episodes]
        problem = problem._replace(prompts=[shifted])
        true = unbiased.true_gradient(problem)
        gradients = unbiased.expected_gradients(problem, ["grpo_process", "turns"])
        [(more, _)] = unbiased.favoured(problem, gradients["grpo_process", "sequence_sum"], true)
        assert more == favours
        assert unbiased.compared(gradients["turns", "sequence_sum"], true)[0] < 1e-4


def test_wrong_completions_that_the_policy_has_left_are_masked(folder, reward_file, tmp_path):
    """DeepSeek-V3.2's equation, with an engine whose logprobs are off for every other completion."""
    script = changed(tmp_path, ("    with log.timed(\"reward\"):\n", "    for r in my_rollouts[1::2]:\n"
                                "        r.logprobs = r.logprobs + 0.2\n    with log.timed(\"reward\"):\n"),
                     diff=RECIPES["off_policy_mask"])
    arguments = small(folder, reward_file, "--max_steps=1", "--mask_above=0.19", "--logprob_gap=1",
                      "--token_budget=100")
    forked(tmp_path / "log", script, *arguments, f"--out_dir={tmp_path}/run", keep=True)
    (line, _), rows = lines(tmp_path / "run"), kept_rollouts(tmp_path / "run", 0)
    advantages = of_groups(rows)
    model, left = AutoModelForCausalLM.from_pretrained(folder), 0
    for s, (row, adv) in enumerate(zip(rows, advantages)):
        logps = logprobs(model, row).tolist()
        moved = sum(engine - own for engine, own in zip(row["logprobs"], logps)) / len(logps)
        assert moved == pytest.approx(0.2 * (s % 2), abs=1e-4)
        if moved > 0.19 and adv[0] < 0:
            advantages[s], left = [0.0] * len(adv), left + 1
        row["logprobs"] = logps                                     # the old ones, on-policy
    assert 2 < left < 8
    loss, norm = slow_step(model, rows, advantages)
    assert line["loss"] == pytest.approx(loss, rel=1e-3)
    assert line["grad_norm"] == pytest.approx(norm, rel=1e-3)


@pytest.mark.parametrize("ranks, budget", [(1, 8192), (2, 90)])
def test_high_entropy_tokens_are_those_of_the_whole_step(folder, reward_file, tmp_path, ranks, budget):
    """However it is dealt and packed; the entropy bonus of the other tokens is left out as well."""
    script = changed(tmp_path, diff=RECIPES["high_entropy"])
    arguments = small(folder, reward_file, "--max_steps=1", "--entropy_share=0.3", "--entropy_coef=0.1",
                      "--temperature=0.7", f"--token_budget={budget}")
    forked(tmp_path / "log", script, *arguments, f"--out_dir={tmp_path}/run", keep=True, ranks=ranks)
    (line, _), rows = lines(tmp_path / "run"), kept_rollouts(tmp_path / "run", 0)
    model, found = AutoModelForCausalLM.from_pretrained(folder), []
    for row, adv in zip(rows, of_groups(rows)):
        ids, ((start, end),) = torch.tensor([row["ids"]]), row["spans"]
        table = (model(ids).logits[0, start - 1:end - 1] / 0.7).log_softmax(-1)
        entropy = -(table.exp() * table).sum(-1)
        found += zip(table.gather(1, ids[0, start:end, None])[:, 0], entropy, adv)
    highest = sorted(found, key=lambda one: -one[1].item())[:round(0.3 * len(found))]
    loss = sum(-a * (logp - logp.detach()).exp() - 0.1 * entropy for logp, entropy, a in highest) / len(found)
    loss.backward()
    norm = math.sqrt(sum(p.grad.square().sum().item() for p in model.parameters()))
    assert line["loss"] == pytest.approx(loss.item(), rel=1e-3)
    assert line["grad_norm"] == pytest.approx(norm, rel=1e-3)


def test_solved_prompts_rest(folder, tmp_path):
    """From the second epoch on; where all are solved, none rests. A resumed run repeats the unbroken one."""
    (tmp_path / "half.py").write_text(
        "def half(prompts, completions, **_):\n"
        "    return [float(ord(p[0]['content'][-1]) % 2 or len(c[0]['content']) % 3 == 0)\n"
        "            for p, c in zip(prompts, completions)]\n"
        "def all(prompts, completions, **_):\n    return [1.0] * len(prompts)\n")
    script = changed(tmp_path, diff=RECIPES["resting_prompts"])
    arguments = small(folder, "--train_prompts=16", "--max_steps=9", "--lr_decay=constant",
                      "--save_interval=3")
    half = f"--reward={tmp_path}/half.py:half"
    forked(tmp_path / "log", script, *arguments, half, f"--out_dir={tmp_path}/run", keep=True)
    rates = {}
    for step in range(9):
        rows = kept_rollouts(tmp_path / "run", step)
        for group in (rows[i:i + 4] for i in range(0, 16, 4)):
            text = group[0]["row"]["prompt"][0]["content"]
            assert rates.get(text, 0) < 0.9
            rates[text] = sum(row["score"] > 0 for row in group) / 4
        resting = sum(rate >= 0.9 for rate in rates.values()) / 16
        assert lines(tmp_path / "run")[step]["train/resting"] == pytest.approx(resting)
    assert 0.2 < resting < 0.9
    shutil.copytree(tmp_path / "run", tmp_path / "again", ignore=shutil.ignore_patterns("checkpoint-9"))
    forked(tmp_path / "log", script, *arguments, half, f"--out_dir={tmp_path}/again", "--resume=auto")
    assert without_times(lines(tmp_path / "again")) == without_times(lines(tmp_path / "run"))
    forked(tmp_path / "log", script, *arguments, half.replace(":half", ":all"), f"--out_dir={tmp_path}/all")
    assert lines(tmp_path / "all")[8]["train/resting"] == 1


@pytest.mark.parametrize("ranks", [1, 2])
def test_harder_rows_join_in_when_the_easier_ones_are_solved(folder, tmp_path, ranks):
    """A level is a third of the rows; a resumed run repeats the unbroken one."""
    (tmp_path / "often.py").write_text(
        "def often(prompts, completions, **_):\n"
        "    return [float(len(c[0]['content']) % 3 > 0) for c in completions]\n")
    rows = [{"prompt": [{"role": "user", "content": f"{'abc'[i // 8]} {i}"}], "i": i} for i in range(24)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    script = changed(tmp_path, diff=RECIPES["levels"])
    arguments = small(folder, f"--reward={tmp_path}/often.py:often", "--task=file", "--rise_above=0.55",
                      f"--train_file={tmp_path}/rows.jsonl", f"--eval_file={tmp_path}/rows.jsonl",
                      "--train_prompts=0", "--max_steps=12", "--lr_decay=constant", "--save_interval=6")
    forked(tmp_path / "log", script, *arguments, f"--out_dir={tmp_path}/run", keep=True, ranks=ranks)
    level, seen, levels, drawn = 0, [], [], []
    for step in range(12):
        kept = kept_rollouts(tmp_path / "run", step)
        levels.append(level + 1)
        for group in (kept[i:i + 4] for i in range(0, 16, 4)):
            drawn.append(group[0]["row"]["i"])
            assert drawn[-1] // 8 <= level
            if drawn[-1] // 8 == level:
                seen.append(sum(row["score"] for row in group) / 4)
        if level < 2 and len(seen) >= 4 and sum(seen[-4:]) > 4 * 0.55:
            level, seen, start = level + 1, [], len(drawn)
    metrics = lines(tmp_path / "run")
    assert [line["train/level"] for line in metrics[:12]] == levels
    # Not at once, and before the last step; then every row comes once before any comes again.
    assert levels[-1] == 3 and levels.count(1) + levels.count(2) > 3 and len(drawn) - start > 4
    assert len({*drawn[start:start + 24]}) == len(drawn[start:start + 24])
    shutil.copytree(tmp_path / "run", tmp_path / "again", ignore=shutil.ignore_patterns("checkpoint-12"))
    forked(tmp_path / "log", script, *arguments, f"--out_dir={tmp_path}/again", "--resume=auto", ranks=ranks)
    assert without_times(lines(tmp_path / "again")) == without_times(metrics)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_teacher_is_the_policy_that_has_read_a_right_answer(folder, tmp_path, ranks):
    (tmp_path / "third.py").write_text(
        "def third(prompts, completions, **_):\n"
        "    return [float(len(c[0]['content']) % 3 == 0) for c in completions]\n")
    script = changed(tmp_path, diff=RECIPES["self_distillation"])
    shutil.copytree(os.path.join(ROOT, "config"), tmp_path / "config")
    arguments = small(folder, f"--reward={tmp_path}/third.py:third", "--num_generations=4",
                      "--prompts_per_step=4", "--max_steps=1", "--temperature=0.7")
    forked(tmp_path / "log", script, "config/methods/distill.py", *arguments, f"--out_dir={tmp_path}/run",
           keep=True, ranks=ranks)
    (line, _), rows = lines(tmp_path / "run"), kept_rollouts(tmp_path / "run", 0)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    total, hinted = 0.0, 0
    for s, row in enumerate(rows):
        logps = logprobs(model, row, 0.7)
        right = [one for one in rows[s // 4 * 4:s // 4 * 4 + 4] if one is not row and one["score"] > 0]
        if right:
            ((start, end),), text = row["spans"], right[0]["completion"][0]["content"]
            messages = [row["row"]["prompt"][0] | {"content": row["row"]["prompt"][0]["content"] +
                        f"\n\nThis answer is right:\n{text}\n\nAnswer in your own words."}]
            prompt = tokenizer.encode(tokenizer.apply_chat_template(messages, tokenize=False,
                                                                    add_generation_prompt=True),
                                      add_special_tokens=False)
            ids = prompt + row["ids"][start:end]
            teacher = logprobs(model, {"ids": ids, "spans": [[len(prompt), len(ids)]]}, 0.7).detach()
            ratio = (logps - logps.detach()).exp()
            total, hinted = total - ((teacher - logps.detach()) * ratio).sum(), hinted + 1
    loss = total / sum(len(row["logprobs"]) for row in rows)
    loss.backward()
    norm = math.sqrt(sum(p.grad.square().sum().item() for p in model.parameters()))
    assert 4 < hinted < 16 and line["loss"] == pytest.approx(loss.item(), rel=1e-3)
    assert line["grad_norm"] == pytest.approx(norm, rel=1e-3)


def test_a_reference_that_follows_the_policy(folder, reward_file, tmp_path):
    """Also in bfloat16, whose own steps would be too coarse; saved and resumed bit for bit."""
    script = changed(tmp_path, diff=RECIPES["moving_reference"])
    arguments = small(folder, reward_file, "--kl_coef=0.1", "--max_steps=4", "--keep_checkpoints=9",
                      "--dtype=bfloat16", "--lr_decay=constant", "--learning_rate=1e-5")
    forked(tmp_path / "log", script, *arguments, f"--out_dir={tmp_path}/run")
    weights = lambda path: dict(AutoModelForCausalLM.from_pretrained(path).named_parameters())
    first = weights(tmp_path / "run/checkpoint-1/ema")
    mean = {name: p.double() for name, p in first.items()}
    for step in range(2, 5):
        own = weights(tmp_path / f"run/checkpoint-{step}")
        mean = {name: 0.99 * p + 0.01 * own[name].double() for name, p in mean.items()}
    ema = weights(tmp_path / "run/checkpoint-4/ema")
    moved = [(ema[name] != first[name]).float().mean().item() for name in ema]
    assert sum(moved) / len(moved) > 0.5
    for name, p in ema.items():
        torch.testing.assert_close(p.double(), mean[name], rtol=0, atol=5e-7)
    shutil.copytree(tmp_path / "run", tmp_path / "again", ignore=shutil.ignore_patterns("checkpoint-[34]"))
    forked(tmp_path / "log", script, *arguments, f"--out_dir={tmp_path}/again", "--resume=auto")
    assert without_times(lines(tmp_path / "again")) == without_times(lines(tmp_path / "run"))


def test_rewards_of_steps_with_grpo_and_ppo(folder, tmp_path):
    (tmp_path / "steps.py").write_text("import re\n" + STEPS)
    reward = f"--reward={tmp_path}/steps.py:words"
    # turns: what is still to come, compared with the others' at the word of the same number.
    metrics, _ = train(folder, tmp_path / "turns", reward, "--advantage=turns", "--max_steps=1")
    rows = kept_rollouts(tmp_path / "turns", 0)
    to_go = []                                                      # per row what is still to come at its words
    for row in rows:
        earned = dict(row["rewards"])
        assert row["score"] == pytest.approx(sum(earned.values()))
        # The token of a word's last letter; this tokenizer knows bytes.
        text = row["completion"][0]["content"]
        ends = [m.end() - 1 for m in re.finditer(r"[^a-p]+|[a-p]", text)]
        if "\ufffd" not in text:
            assert sorted(earned) == [len(text[:end + 1].encode()) - 1 for end in ends]
        ends = sorted({t for t, _ in row["rewards"]} | {len(row["logprobs"]) - 1})
        to_go.append([sum(r for t, r in row["rewards"] if t >= end) for end in ends])
    advantages = []
    for s, row in enumerate(rows):
        group = [to_go[o] for o in range(s - s % 4, s - s % 4 + 4) if o != s]
        advantages.append([])
        for place in range(len(row["logprobs"])):
            word = sum(t < place for t, _ in row["rewards"])
            there = [other[word] for other in group if len(other) > word]
            advantages[-1].append(to_go[s][word] - (sum(there) / len(there) if there else 0.0))
    loss, norm = slow_step(AutoModelForCausalLM.from_pretrained(folder), rows, advantages)
    assert metrics[0]["loss"] == pytest.approx(loss, abs=1e-5)
    assert metrics[0]["grad_norm"] == pytest.approx(norm, rel=1e-4)
    # PPO's returns: what is still to come, for the mean over all tokens.
    metrics, _ = train(folder, tmp_path / "ppo", reward, "--max_steps=2", "--critic_warmup_steps=1",
                       script="train_ppo.py")
    rows = kept_rollouts(tmp_path / "ppo", 0)
    to_go = [sum(r for t, r in row["rewards"] if t >= place)
             for row in rows for place in range(len(row["logprobs"]))]
    assert metrics[0]["critic/returns/mean"] == pytest.approx(sum(to_go) / len(to_go), rel=1e-4)
    assert metrics[0]["critic/rewards/mean"] == pytest.approx(metrics[0]["reward"], rel=1e-4)


@pytest.fixture(scope="module")
def teacher(folder, tmp_path_factory):
    """Another model that reads the tokens of `folder`, and has two rows more in its table."""
    path = shutil.copytree(folder, tmp_path_factory.mktemp("teacher") / "model")
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    model.resize_token_embeddings(model.config.vocab_size + 2)
    model.save_pretrained(path)
    return str(path)


@pytest.mark.parametrize("ranks", [1, 2])
def test_distillation(folder, teacher, reward_file, tmp_path, ranks):
    metrics, _ = train(folder, tmp_path / "run", "config/methods/distill.py", reward_file, "--max_steps=1",
                       f"--reference_model={teacher}", "--prompts_per_step=16", ranks=ranks)
    rows = kept_rollouts(tmp_path / "run", 0)
    with torch.no_grad():
        judge = AutoModelForCausalLM.from_pretrained(teacher)
        advantages = [(logprobs(judge, row) - torch.tensor(row["logprobs"])).tolist() for row in rows]
    loss, norm = slow_step(AutoModelForCausalLM.from_pretrained(folder), rows, advantages)
    assert metrics[0]["loss"] == pytest.approx(loss, rel=1e-4) and loss > 0.1
    assert metrics[0]["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert metrics[0]["kl"] == pytest.approx(loss, rel=1e-4)


@pytest.mark.parametrize("change, message", [
    ({"vocab_size": 100}, "has a vocabulary of 100 for one of 261"),
    ({"swap": True}, "and other ids for ["),
    ({"max_position_embeddings": 20}, "the model takes 20")])
def test_a_reference_that_reads_other_tokens_is_refused(folder, teacher, tmp_path, change, message):
    path = shutil.copytree(teacher, tmp_path / "other")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | change))
    if "swap" in change:
        tokens = json.loads((path / "tokenizer.json").read_text())
        vocab = tokens["model"]["vocab"]
        vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
        (path / "tokenizer.json").write_text(json.dumps(tokens))
    for script in ("train_grpo.py", "train_ppo.py"):
        arguments = [f"--model={folder}", f"--reference_model={path}", "--kl_coef=0.1", "--engine=hf"]
        runs.refused(arguments, message, tmp_path, script=script)


def test_a_second_evaluation(folder, reward_file, tmp_path):
    """A greedy one of rows from a file, with longer completions, as evaluate_model.py finds it."""
    rows = [{"prompt": [{"role": "user", "content": f"{i} + {i}?"}], "answer": str(2 * i)} for i in range(5)]
    too_long = {"prompt": "1" * 1000, "answer": "1"}            # left out
    (tmp_path / "hard.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, too_long]))
    script = changed(
        tmp_path,
        ("    scorer = rewards.load_scorer(",
         "    _, hard_set, _ = data.load_split(tokenizer, settings, 'eval', sample.tools, task='file', "
         f"eval_file='{tmp_path}/hard.jsonl', eval_prompts=0)\n"
         "    scorer = rewards.load_scorer("),
        ("    if run.due(step, save_interval):",
         "        log.evaluate(hard_set, 1, sample, scorer, 'eval/hard', temperature=0, max_tokens=16)\n"
         "    if run.due(step, save_interval):"),
        ("longest = max_prompt_length + max_completion_length ", "longest = max_prompt_length + 16 "))
    arguments = small(folder, reward_file, "--max_steps=1")
    output = forked(tmp_path / "log", script, *arguments, f"--out_dir={tmp_path}/run", ranks=2)
    metrics = lines(tmp_path / "run")
    assert {"eval/mean@2", "eval/hard/mean@1", "eval/hard/rewards/score/mean"} <= metrics[1].keys()
    assert "eval/hard/mean@1 " in output and "eval/hard/rewards" not in output
    (tmp_path / "hard.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    again = forked(tmp_path / "log", "evaluate_model.py", f"--model={tmp_path}/run/checkpoint-1", reward_file,
                   "--task=file", f"--eval_file={tmp_path}/hard.jsonl", "--eval_prompts=0", "--samples=1",
                   "--temperature=0", "--max_completion_length=16", "--engine=hf")
    score = float(re.search(r"eval/mean@1 +(\S+)", again)[1])
    assert score == pytest.approx(metrics[1]["eval/hard/mean@1"], abs=1e-4)
    # The first evaluation is that of the script as it is.
    plain, _ = train(folder, tmp_path / "plain", reward_file, "--max_steps=1", ranks=2)
    assert plain[1]["eval/mean@2"] == metrics[1]["eval/mean@2"]
    script = changed(tmp_path, ("log.evaluate(eval_set, eval_samples, sample, scorer)",
                                "log.evaluate(eval_set, eval_samples, sample, scorer, max_tokens=99)"))
    output = forked(tmp_path / "log", script, *arguments, f"--out_dir={tmp_path}/cut", code=1)
    assert re.search(r"its completion of \d+ tokens: the engine was made for 76, which is max_prompt_length", output)


# A third network, which learns the score from the prompt and what has been said.
THIRD = [
    ("from model import (", "from options.critic import load_critic\nfrom model import ("),
    ("log = run.begin(policy, optimizer, rollout_engine)", '''
baseline = load_critic(f"{run.resumed}/baseline" if run.resumed else folders.policy, mesh, compute_dtype)
baseline_optimizer = torch.optim.AdamW(baseline.parameters(), 1e-3)
log = run.begin(policy, optimizer, rollout_engine, baseline=(baseline, baseline_optimizer))'''),
    ("    # ------------------------------------------------------------ 6 weight sync\n", '''
    for batch in micro_batches(baseline, rollouts, sum(shares, []), token_budget):
        loss = ((baseline(batch) - batch.flat(scores)) ** 2).sum() / lengths.sum()
        (loss * world_size).backward()
        log.add(sums={"baseline/loss": loss})
    norm = torch.nn.utils.clip_grad_norm_(baseline.parameters(), 1.0)
    if run.may_step("baseline", norm):
        baseline_optimizer.step()
    baseline_optimizer.zero_grad()

    # ------------------------------------------------------------ 6 weight sync
''')]


def test_a_third_network_is_logged_saved_and_resumed(folder, reward_file, tmp_path):
    script = changed(tmp_path, *THIRD)
    arguments = small(folder, reward_file, "--max_steps=3", "--lr_decay=constant")
    forked(tmp_path / "log", script, *arguments, f"--out_dir={tmp_path}/run")
    metrics = lines(tmp_path / "run")
    assert all(0 < line["baseline/grad_norm"] != line["grad_norm"] for line in metrics[:3])
    assert metrics[2]["baseline/loss"] < metrics[1]["baseline/loss"]
    shutil.copytree(tmp_path / "run", tmp_path / "again", ignore=shutil.ignore_patterns("checkpoint-[23]"))
    forked(tmp_path / "log", script, *arguments, f"--out_dir={tmp_path}/again", "--resume=auto")
    assert without_times(lines(tmp_path / "again")) == without_times(metrics)


def test_skipped_rollouts_have_no_gradient_but_a_weight(tmp_path):
    """The figures of a run that computes them all."""
    real = ["--model=tiny", "--max_completion_length=24", "--num_generations=4", "--prompts_per_step=8",
            "--learning_rate=1e-9", "--max_steps=2"]
    all_of_them, _ = train(None, tmp_path / "all", *real)
    some, _ = train(None, tmp_path / "some", *real, "--skip_zero_advantage=true")
    for line, other in zip(all_of_them[:2], some[:2]):
        assert 0 < line["frac_reward_zero_std"] < 1
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-4, abs=1e-6)
        assert line["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
        assert line["entropy"] != pytest.approx(other["entropy"], rel=1e-6)


# ---------------------------------------------------------------- methods of 2026, each a recipe

def added(folder, recipe):
    """The functions of losses.py with a recipe, by name."""
    changed(folder, script="configurator.py")
    return runpy.run_path(changed(folder, script="losses.py", diff=RECIPES[recipe]))


def slow_vespo(ratios, adv):
    k, c = (2, 3) if adv >= 0 else (3, 2)
    W = math.prod(ratios)
    return W ** k * math.exp(c * (1 - W)) * adv


@pytest.mark.parametrize("recipe", ["vespo", "dro"])
def test_a_loss_of_a_recipe_has_the_value_and_the_gradient_of_its_formula(tmp_path, recipe):
    """Of sequences of 3, 1 and 7 tokens, one of them with an advantage of 0 and one with a negative one."""
    loss = added(tmp_path, recipe)["LOSSES"][recipe]
    torch.manual_seed(0)
    sizes = [3, 1, 7]
    old = -torch.rand(11, dtype=torch.float64) * 3
    logp = (old + 0.3 * torch.randn(11, dtype=torch.float64)).requires_grad_()
    adv = torch.tensor([1.3, 0.0, -0.7], dtype=torch.float64).repeat_interleave(torch.tensor(sizes))

    def mean(values):
        return torch.cat([part.mean().expand_as(part) for part in values.split(sizes)])

    lengths = torch.tensor(sizes).repeat_interleave(torch.tensor(sizes))
    value, low, high = loss(logp, old, adv, mean=mean, lengths=lambda: lengths, epsilon=0.2, epsilon_high=0.2)
    value.sum().backward()
    assert not low.any() and not high.any()
    first = 0
    for size in sizes:
        ratios = [math.exp(logp[c].item() - old[c].item()) for c in range(first, first + size)]
        for c in range(first, first + size):
            new, a = logp[c].item(), adv[c].item()
            if recipe == "vespo":
                weight = slow_vespo(ratios, a)
                expected, slope = -weight * new, -weight
            else:
                gap = new - old[c].item()
                expected, slope = -(a * new - 0.05 / 2 * gap ** 2), -(a - 0.05 * gap)
            assert value[c].item() == pytest.approx(expected, rel=1e-9)
            assert logp.grad[c].item() == pytest.approx(slope, rel=1e-9)
        first += size
    # On-policy it is the gradient of every loss; far away nothing overflows.
    logp = old.clone().requires_grad_()
    loss(logp, old, adv, mean=mean, lengths=lambda: lengths)[0].sum().backward()
    assert logp.grad.tolist() == pytest.approx((-adv).tolist())
    assert loss(old + 90, old, adv, mean=mean, lengths=lambda: lengths)[0].isfinite().all()


@pytest.mark.parametrize("only_right, ranks", [(False, 1), (True, 1), (True, 2)])
def test_cross_entropy_on_ones_own_samples(folder, tmp_path, only_right, ranks):
    """They are sampled at temperature 0.6 from eight tokens; the loss is that of all tokens at temperature 1."""
    (tmp_path / "third.py").write_text(
        "def third(prompts, completions, **_):\n"
        "    return [float(len(c[0]['content']) % 3 == 0) for c in completions]\n")
    script = changed(tmp_path, diff=RECIPES["ssd"])
    arguments = small(folder, f"--reward={tmp_path}/third.py:third", "--max_steps=1", "--temperature=0.6",
                      "--top_k=8", "--top_p=0.95", f"--only_right={only_right}", "--token_budget=100")
    forked(tmp_path / "log", script, *arguments, f"--out_dir={tmp_path}/run", keep=True, ranks=ranks)
    (line, _), rows = lines(tmp_path / "run"), kept_rollouts(tmp_path / "run", 0)
    model = AutoModelForCausalLM.from_pretrained(folder)
    trained = [row for row in rows if row["score"] > 0 or not only_right]
    assert len(trained) == 16 if not only_right else 2 < len(trained) < 12
    loss = -sum(logprobs(model, row).sum() for row in trained) / sum(len(row["logprobs"]) for row in trained)
    loss.backward()
    norm = math.sqrt(sum(p.grad.square().sum().item() for p in model.parameters()))
    assert line["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert line["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert line["sampling/sampling_logp_difference/max"] < 1e-4


def test_distillation_that_trusts_the_teacher_less_behind_a_gap(folder, teacher, reward_file, tmp_path):
    script = changed(tmp_path, diff=RECIPES["iw_opd"])
    shutil.copytree(os.path.join(ROOT, "config"), tmp_path / "config")
    arguments = small(folder, reward_file, "--max_steps=1", f"--reference_model={teacher}")
    forked(tmp_path / "log", script, "config/methods/distill.py", *arguments, f"--out_dir={tmp_path}/run",
           keep=True)
    (line, _), rows = lines(tmp_path / "run"), kept_rollouts(tmp_path / "run", 0)
    with torch.no_grad():
        judge = AutoModelForCausalLM.from_pretrained(teacher)
        gaps = [(logprobs(judge, row) - torch.tensor(row["logprobs"])).tolist() for row in rows]
    advantages = []
    for own in gaps:
        total = sum(abs(a) for a in own)
        advantages.append([(1 + 0.5 * (1 - sum(abs(b) for b in own[:t]) / total)) * a for t, a in enumerate(own)])
    loss, norm = slow_step(AutoModelForCausalLM.from_pretrained(folder), rows, advantages)
    assert line["loss"] == pytest.approx(loss, rel=1e-4) and line["grad_norm"] == pytest.approx(norm, rel=1e-4)
    # The logged KL is that of the two models.
    assert line["kl"] == pytest.approx(-sum(map(sum, gaps)) / sum(map(len, gaps)), rel=1e-4)


NOTED = '''
import json
def score(prompts, completions, **_):
    scores = [float(len(c[0]["content"]) % 3 == 0) for c in completions]
    with open("{folder}/noted.jsonl", "a") as file:
        for p, c, s in zip(prompts, completions, scores):
            file.write(json.dumps([p[0]["content"], c[0]["content"], s]) + chr(10))
    return scores
'''


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_regression_on_what_the_best_policy_would_score(folder, teacher, tmp_path, ranks):
    """The table is that of the first samples of each prompt; with a reference that is not the policy."""
    (tmp_path / "noted.py").write_text(NOTED.replace("{folder}", str(tmp_path)))
    script = changed(tmp_path, diff=RECIPES["a_star"])
    arguments = small(folder, f"--reward={tmp_path}/noted.py:score", "--max_steps=2", "--table_samples=5",
                      "--num_generations=1", "--prompts_per_step=8", "--kl_coef=0.05", "--beta1=0.3",
                      "--advantage=reinforce++", "--loss_aggregation=sequence_sum",
                      f"--reference_model={teacher}", "--lr_decay=constant", "--token_budget=100")
    forked(tmp_path / "log", script, *arguments, f"--out_dir={tmp_path}/run", keep=True, ranks=ranks)
    metrics, rows = lines(tmp_path / "run"), kept_rollouts(tmp_path / "run", 0)
    values, counted = {}, defaultdict(list)
    for prompt, text, score in lines(tmp_path, "noted.jsonl"):
        if text not in ("Answer: 0", ""):                       # those of the trial
            counted[prompt].append(score)
    for row in rows:
        text = row["row"]["prompt"][0]["content"]
        first = counted[text][:5]
        values[text] = 0.3 * math.log(sum(math.exp(score / 0.3) for score in first) / 5)
    state = json.loads((tmp_path / "run/checkpoint-2/trainer/state.json").read_text())
    assert len(state["values"]) == 16 and metrics[0]["table/sampled_tokens"] > 5 * 16
    assert len({*values.values()}) > 2
    model, judge = (AutoModelForCausalLM.from_pretrained(path) for path in (folder, teacher))
    loss = 0.0
    for row in rows:
        log_ratio = (logprobs(model, row) - logprobs(judge, row).detach()).sum()
        right = row["score"] - values[row["row"]["prompt"][0]["content"]]
        loss = loss + (0.05 * log_ratio - right) ** 2 / len(rows)
    loss.backward()
    norm = math.sqrt(sum(p.grad.square().sum().item() for p in model.parameters()))
    assert metrics[0]["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert metrics[0]["grad_norm"] == pytest.approx(norm, rel=1e-4)
    # A resumed run has the table, and does not sample it again.
    shutil.copytree(tmp_path / "run", tmp_path / "again", ignore=shutil.ignore_patterns("checkpoint-2"))
    forked(tmp_path / "log", script, *arguments, f"--out_dir={tmp_path}/again", "--resume=auto", ranks=ranks)
    assert without_times(lines(tmp_path / "again")) == without_times(metrics)
    runs.refused([*arguments, "--max_steps=3", f"--out_dir={tmp_path}/again", "--resume=auto"],
                 "the table of the checkpoint lacks 8 prompts", tmp_path, script=script, ranks=ranks, loads=True)


@pytest.mark.parametrize("recipe, settings, message", [
    ("a_star", ["--num_generations=1", "--advantage=reinforce++"], "kl_coef=0: it is beta2"),
    ("ssd", ["--kl_coef=0.1"], "kl_coef and engine_correction compare logprobs"),
    ("ssd", ["--engine_correction=token_truncate"], "kl_coef and engine_correction compare logprobs"),
    ("echo", ["--top_k=5"], "top_k has no sets for inserted tokens"),
    ("echo", ["--skip_zero_advantage=true"], "skip_zero_advantage would leave out those of failed episodes"),
    ("tree", ["--siblings=2", "--top_k=5"], "only single answers without top_k have a beginning"),
    ("curriculum", ["--again=0"], "again=0: once all rows are solved or hopeless")])
def test_settings_that_a_recipe_cannot_read_are_refused(folder, reward_file, tmp_path, recipe, settings, message):
    script = changed(tmp_path, diff=RECIPES[recipe])
    runs.refused(small(folder, reward_file, *settings, f"--out_dir={tmp_path}/run"), message, tmp_path, script=script)


@pytest.mark.parametrize("recipe, settings", [
    ("tree", ["--siblings=2", "--trunk_tokens=1"]),
    ("self_distillation", ["config/methods/distill.py", "--max_prompt_length=200", "--task=squares"])])
def test_prompts_that_a_recipe_makes_show_the_images_of_their_rows(tmp_path, recipe, settings):
    """Engine and trainer read the same behind a beginning; the prompt with a hint has tokens of the picture."""
    script = changed(tmp_path, diff=RECIPES[recipe])
    shutil.copytree(os.path.join(ROOT, "config"), tmp_path / "config")
    text = Path(script).read_text()
    hinted = "    hinted = behind(r, prompt.ids)\n"
    noted = f"    print(sum(hinted.ids < 0), 'shown', file=open({str(tmp_path / 'noted')!r}, 'a'))\n"
    Path(script).write_text(text.replace(hinted, hinted + noted))
    arguments = ["config/tasks/squares.py", *settings, "--prompts_per_step=2", "--num_generations=4", "--max_steps=1",
                 "--train_prompts=64", "--eval_prompts=4", "--eval_samples=1", f"--out_dir={tmp_path}/run"]
    forked(tmp_path / "log", script, *arguments, keep=True)
    (line, _), rows = lines(tmp_path / "run"), kept_rollouts(tmp_path / "run", 0)
    assert line["sampling/sampling_logp_difference/max"] < 1e-4
    assert all(sum(token < 0 for token in row["ids"]) == 16 for row in rows)
    if recipe == "self_distillation":
        assert {*(tmp_path / "noted").read_text().splitlines()} == {"16 shown"}


def slow_otb(to_go, norms, G):
    """The advantages of each completion's tokens; to_go is None for one without a score."""
    result = []
    for first in range(0, len(to_go), G):
        group = [(own, [sum(squares[:t + 1]) for t in range(len(squares))])
                 for own, squares in zip(to_go[first:first + G], norms[first:first + G])]
        for own, weights in group:
            result.append([])
            for t in range(len(weights)):
                there = [(other[t], w[t]) for other, w in group if other is not None and len(w) > t]
                if own is None:
                    result[-1].append(0.0)
                else:
                    result[-1].append(own[t] - sum(g * w for g, w in there) / sum(w for _, w in there))
    return result


def test_the_optimal_baseline_of_each_token(tmp_path):
    """With rewards of single tokens, a penalty on a score, and completions without a score."""
    otb = added(tmp_path, "otb")["ADVANTAGES"]["otb"]
    torch.manual_seed(0)
    lengths = [5, 3, 1, 4, 2, 6, 3, 3, 3]
    rewards = [{0: 0.5, 4: -1.0}, {2: 2.0}, {0: math.nan}, {1: 0.25, 3: 1.0}, {1: 7.0}, {5: 0.5}] + [{2: 0.3}] * 3
    scores = torch.tensor([sum(own.values()) for own in rewards])
    scores[0] -= 0.5
    norms = {s: 2 * torch.rand(n) for s, n in enumerate(lengths)}
    adv = otb(scores, 3, lengths=torch.tensor(lengths), rewards=rewards, square_norms=norms)
    to_go = []
    for s, own in enumerate(rewards):
        difference = scores[s].item() - sum(own.values())
        to_go.append([sum(r for token, r in own.items() if token >= t) + difference for t in range(lengths[s])])
    to_go[2] = None
    for s, expected in enumerate(slow_otb(to_go, [norms[s].tolist() for s in range(9)], 3)):
        assert adv[s].tolist() == pytest.approx(expected, abs=1e-5), s
    assert not any(adv[s].any() for s in (6, 7, 8))             # exactly 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_norms_of_gradients_come_from_half_the_temperature(copy, folder, reward_file, tmp_path, ranks):
    patch(copy, RECIPES["otb"])
    arguments = small(folder, reward_file, "--max_steps=1", "--temperature=0.7", "--advantage=otb",
                      "--token_budget=100")
    forked(tmp_path / "log", "train_grpo.py", *arguments, f"--out_dir={tmp_path}/run", keep=True, ranks=ranks, root=copy)
    (line, _), rows = lines(tmp_path / "run"), kept_rollouts(tmp_path / "run", 0)
    model, norms = AutoModelForCausalLM.from_pretrained(folder), []
    for row in rows:
        ids, ((start, end),) = torch.tensor([row["ids"]]), row["spans"]
        table = (model(ids).logits[0, start - 1:end - 1] / 0.7).softmax(-1).double()
        hot = torch.nn.functional.one_hot(ids[0, start:end], table.shape[1])
        norms.append((hot - table).square().sum(1).tolist())    # of the logprob's gradient in the logits
        row["logprobs"] = logprobs(model, row, 0.7).tolist()
    to_go = [[row["score"]] * row["length"] for row in rows]
    total = 0.0
    for row, adv in zip(rows, slow_otb(to_go, norms, 4)):
        logp = logprobs(model, row, 0.7)
        total = total - ((logp - logp.detach()).exp() * torch.tensor(adv)).sum()
    loss = total / sum(row["length"] for row in rows)
    loss.backward()
    norm = math.sqrt(sum(p.grad.square().sum().item() for p in model.parameters()))
    assert line["loss"] == pytest.approx(loss.item(), rel=1e-3, abs=1e-6)
    assert line["grad_norm"] == pytest.approx(norm, rel=1e-3)


@pytest.mark.parametrize("ranks", [1, 2])
def test_solved_and_hopeless_rows_are_drawn_less_and_come_back(folder, tmp_path, ranks):
    """A third of the rows is always right, a third never; a resumed run repeats the unbroken one."""
    (tmp_path / "thirds.py").write_text(
        "def thirds(prompts, completions, **_):\n"
        "    kinds = [ord(p[0]['content'][-1]) % 3 for p in prompts]\n"
        "    return [float(kind == 0 or kind == 1 and len(c[0]['content']) % 2 == 0)\n"
        "            for kind, c in zip(kinds, completions)]\n")
    rows = [{"prompt": [{"role": "user", "content": f"{i} {'abc'[i % 3]}"}], "i": i} for i in range(18)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    script = changed(tmp_path, diff=RECIPES["curriculum"])
    arguments = small(folder, f"--reward={tmp_path}/thirds.py:thirds", "--task=file", "--train_prompts=0",
                      f"--train_file={tmp_path}/rows.jsonl", f"--eval_file={tmp_path}/rows.jsonl",
                      "--max_steps=14", "--lr_decay=constant", "--save_interval=7", "--again=0.3", "--newest=0.4")
    forked(tmp_path / "log", script, *arguments, f"--out_dir={tmp_path}/run", keep=True, ranks=ranks)
    position, rates, visits = 0, {}, defaultdict(list)
    for step in range(14):
        expected = []
        while len(expected) < 4:
            epoch, place = divmod(position, 18)
            number = random.Random(f"0 {epoch}").sample(range(18), 18)[place]
            draw = random.Random(f"0 {position}").random()
            position += 1
            if number not in rates or 0.1 <= rates[number] <= 0.9 or draw < 0.3:
                expected.append(number)
        kept = kept_rollouts(tmp_path / "run", step)
        assert [row["row"]["i"] for row in kept[::4]] == expected
        for place, number in enumerate(expected):
            share = sum(row["score"] > 0 for row in kept[4 * place:4 * place + 4]) / 4
            rates[number] = share if number not in rates else 0.6 * rates[number] + 0.4 * share
            visits[number].append(share)
        assert lines(tmp_path / "run")[step]["train/drawn_less"] == sum(
            not 0.1 <= rate <= 0.9 for rate in rates.values())
    # ord("c") is a multiple of 3, and such rows are solved at once.
    seen = {letter: sum(len(own) for i, own in visits.items() if "abc"[i % 3] == letter) for letter in "abc"}
    assert seen["a"] > 1.5 * seen["c"] and seen["a"] > 1.5 * seen["b"] and len(visits) == 18
    assert any(len(own) > 1 for i, own in visits.items() if "abc"[i % 3] == "c")
    shutil.copytree(tmp_path / "run", tmp_path / "again", ignore=shutil.ignore_patterns("checkpoint-14"))
    forked(tmp_path / "log", script, *arguments, f"--out_dir={tmp_path}/again", "--resume=auto", ranks=ranks)
    assert without_times(lines(tmp_path / "again")) == without_times(lines(tmp_path / "run"))


@pytest.mark.parametrize("ranks, updates", [(1, 1), (2, 1), (1, 2)])
def test_the_policy_also_learns_what_the_world_answers(tmp_path, ranks, updates):
    """Games of several turns; the loss of each token by a plain forward. Without the weight it is the plain run."""
    script = changed(tmp_path, diff=RECIPES["echo"])
    arguments = ["--model=tiny_episodes", "--task=guess", "--environment=environments/guess_number.py:Guess",
                 "--max_turns=3", "--max_prompt_length=96", "--max_completion_length=64", "--token_budget=300",
                 f"--num_mini_batches={updates}", "--grad_clip=0", "--eval_prompts=4", "--save_interval=0"]
    arguments = runs.with_defaults(arguments, {**SMALL, "max_steps": 1, "learning_rate": 1e-9})
    metrics = {}
    for name, coefficient in (("run", 0.1), ("none", 0.0)):
        forked(tmp_path / "log", script, *arguments, f"--echo_coef={coefficient}", f"--out_dir={tmp_path}/{name}",
               keep=True, ranks=ranks)
        metrics[name] = lines(tmp_path / name)[0]
    _, rows = lines(tmp_path / "run"), kept_rollouts(tmp_path / "run", 0)
    plain, _ = runs.train("train_grpo.py", tmp_path / "plain", arguments, {}, ranks=ranks)
    for key in ("loss", "grad_norm", "entropy", "sampling/sampling_logp_difference/mean"):
        assert metrics["none"][key] == pytest.approx(plain[0][key], rel=1e-4, abs=1e-7), key
    model = AutoModelForCausalLM.from_pretrained(SHIPPED["tiny_episodes"], dtype=torch.float32)
    shuffled, expected, norm = random.Random("0 0").sample(range(16), 16), 0.0, 0.0
    advantages = of_groups(rows)
    assert any(len(row["spans"]) > 1 for row in rows)
    for u in range(updates):
        update = shuffled[u::updates]
        policy_loss, echo_loss, tokens, inserted = 0.0, 0.0, 0, 0
        for s in update:
            ids = torch.tensor([rows[s]["ids"]])
            table = model(ids).logits[0].log_softmax(-1)
            own = {place for start, end in rows[s]["spans"] for place in range(start, end)}
            for place in range(rows[s]["spans"][0][0], rows[s]["spans"][-1][1]):
                logp = table[place - 1, ids[0, place]]
                if place in own:
                    policy_loss = policy_loss - (logp - logp.detach()).exp() * advantages[s][0]
                    tokens += 1
                else:
                    echo_loss = echo_loss - logp
                    inserted += 1
        assert inserted > 10
        model.zero_grad()
        loss = policy_loss / tokens + 0.1 * echo_loss / inserted
        loss.backward()
        expected += loss.item() / updates
        norm += math.sqrt(sum(p.grad.square().sum().item() for p in model.parameters())) / updates
    assert metrics["run"]["loss"] == pytest.approx(expected, rel=1e-4)
    assert metrics["run"]["grad_norm"] == pytest.approx(norm, rel=1e-3)


def sequences(row):
    """A kept rollout's sequences: the role, a rollout of one span after another, and the first sampled token."""
    starts = row["sequence_starts"] + [[len(row["ids"]), row["length"], 0]]
    for name, (start, first, _), (end, after, _) in zip(row["sequence_names"], starts, starts[1:]):
        ((a, b),) = [span for span in row["spans"] if start <= span[0] < end]
        yield name, {"ids": row["ids"][start:end], "spans": [(a - start, b - start)],
                     "logprobs": row["logprobs"][first:after]}


@pytest.mark.parametrize("ranks", [1, 2])
def test_each_role_of_a_game_has_a_baseline(talker, tmp_path, ranks):
    """Also after a resume. A role speaks in several sequences of an episode."""
    script = changed(tmp_path, diff=RECIPES["rae"])
    arguments = [f"--model={talker}", "--task=arithmetic", "--agent=environments/nim.py:play", "--decay=0.8",
                 "--max_prompt_length=96", "--lr_decay=constant", "--token_budget=300"]
    arguments = runs.with_defaults(arguments, SMALL)
    forked(tmp_path / "log", script, *arguments, f"--out_dir={tmp_path}/run", keep=True, ranks=ranks)
    metrics, baselines, roles = lines(tmp_path / "run"), {}, set()
    for step in (0, 1):
        rows, advantages, spoken = kept_rollouts(tmp_path / "run", step), [], []
        for row in rows:
            assert sorted(row["parts"].values()) == [-1, 1]
            before = dict(baselines)
            for name, reward in row["parts"].items():
                baselines[name] = 0.8 * before.get(name, 0.0) + 0.2 * reward
            for name, sequence in sequences(row):
                advantages.append([row["parts"][name] - before.get(name, 0.0)] * len(sequence["logprobs"]))
                spoken.append(sequence)
                roles.add(name)
        model = AutoModelForCausalLM.from_pretrained(f"{tmp_path}/run/checkpoint-1" if step else talker)
        loss, norm = slow_step(model, spoken, advantages)
        assert metrics[step]["loss"] == pytest.approx(loss, rel=1e-3, abs=1e-5)
        assert metrics[step]["grad_norm"] == pytest.approx(norm, rel=1e-3)
        for name, baseline in baselines.items():
            assert metrics[step][f"baseline/{name}"] == pytest.approx(baseline, rel=1e-6)
    assert {"first"} <= roles <= {"first", "second"} and len(baselines) == 2
    shutil.copytree(tmp_path / "run", tmp_path / "again", ignore=shutil.ignore_patterns("checkpoint-2"))
    forked(tmp_path / "log", script, *arguments, f"--out_dir={tmp_path}/again", "--resume=auto", ranks=ranks)
    again = lines(tmp_path / "again")
    assert {key: value for key, value in again[1].items() if key.startswith("baseline/")} == {
        key: value for key, value in metrics[1].items() if key.startswith("baseline/")}


@pytest.mark.parametrize("ranks, trunk", [(1, 8), (2, 8), (2, 12)])
def test_continuations_of_a_beginning_are_compared_with_each_other(tmp_path, ranks, trunk):
    """Of the shipped model, some of whose answers end within a beginning of 12 tokens, and go on in several ways after 8."""
    (tmp_path / "sevenths.py").write_text(
        "def sevenths(prompts, completions, **_):\n"
        "    return [sum(map(ord, c[0]['content'])) % 7 / 7 for c in completions]\n")
    script = changed(tmp_path, diff=RECIPES["tree"])
    arguments = runs.with_defaults(["--model=tiny", "--siblings=3", "--num_generations=6", f"--trunk_tokens={trunk}",
                                    "--max_completion_length=32", f"--reward={tmp_path}/sevenths.py:sevenths",
                                    "--max_steps=1", "--token_budget=200", "--prompts_per_step=12"], SMALL)
    forked(tmp_path / "log", script, *arguments, f"--out_dir={tmp_path}/run", keep=True, ranks=ranks)
    (line, _), rows = lines(tmp_path / "run"), kept_rollouts(tmp_path / "run", 0)
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED["tiny"])

    def normalised(values):
        mean, std = statistics.mean(values), statistics.stdev(values)
        return [(value - mean) / (std + 1e-4) for value in values]

    advantages, kinds, told_apart = [], defaultdict(int), 0
    for first in range(0, len(rows), 6):
        trunks = [rows[first:first + 3], rows[first + 3:first + 6]]
        prompt = trunks[0][0]["spans"][0][0]
        of_trunks = normalised([statistics.mean(row["score"] for row in own) for own in trunks])
        for own, of_trunk in zip(trunks, of_trunks):
            assert own[0]["spans"] == [[prompt, len(own[0]["ids"])]]
            ended = own[0]["length"] <= trunk and all(row["ids"] == own[0]["ids"] for row in own)
            kinds[ended] += 1
            for row, of_leaf in zip(own, normalised([row["score"] for row in own])):
                assert row["ids"][:prompt + trunk] == own[0]["ids"][:prompt + trunk]
                # What is scored is the whole answer.
                text = tokenizer.decode(row["ids"][prompt:], skip_special_tokens=True)
                assert row["completion"][0]["content"] == text
                if row is own[0]:
                    told_apart += not ended and abs(of_leaf) > 0.1
                    advantages.append([of_trunk] * min(trunk, row["length"]) + [of_leaf] * (row["length"] - trunk))
                else:
                    assert row["spans"] == [[len(row["ids"]) - 1 if ended else prompt + trunk, len(row["ids"])]]
                    advantages.append([of_leaf] * row["length"])
    assert kinds[False] > 1 and (kinds[True] > 1 if trunk == 12 else told_apart > 1)
    assert len({advantage for own in advantages for advantage in own}) > 4
    model = AutoModelForCausalLM.from_pretrained(SHIPPED["tiny"], dtype=torch.float32)
    loss, norm = slow_step(model, rows, advantages)
    assert line["loss"] == pytest.approx(loss, rel=1e-3, abs=1e-5)
    assert line["grad_norm"] == pytest.approx(norm, rel=1e-3)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_proposal_is_paid_by_the_spread_of_its_solutions(folder, tmp_path, ranks):
    (tmp_path / "half.py").write_text(
        "def half(prompts, completions, answer, **_):\n"
        "    return [float((len(c[0]['content']) + len(a)) % 2 == 0) for c, a in zip(completions, answer)]\n")
    script = changed(tmp_path, diff=RECIPES["proposer"])
    with open(script) as file:
        text = file.read()
    # This model writes no numbers, so every other text is a problem.
    pattern = '    match = re.search(r"(\\d{1,4}) *([-+*]) *(\\d{1,4})", text)\n'
    assert pattern in text
    with open(script, "w") as file:
        file.write(text.replace(pattern, "    match = re.match('(.)(.)(.)', f'{len(text) % 10}+2')\n"
                                         "    match = match if len(text) % 2 else None\n"))
    arguments = small(folder, f"--reward={tmp_path}/half.py:half", "--task=arithmetic", "--max_steps=1",
                      "--prompts_per_step=2", "--max_prompt_length=96", "--token_budget=300")
    forked(tmp_path / "log", script, *arguments, f"--out_dir={tmp_path}/run", keep=True, ranks=ranks)
    (line, _), rows = lines(tmp_path / "run"), kept_rollouts(tmp_path / "run", 0)
    # The rows of each rank: the proposals, then four solutions of each problem among these.
    place, groups = 0, []
    for _ in range(ranks):
        proposals = rows[place:place + 8 // ranks]
        place += len(proposals)
        for first in range(0, len(proposals), 4):
            groups.append(proposals[first:first + 4])
        for row in proposals:
            assert row["row"]["prompt"][0]["content"].startswith("Write another problem like: What is ")
            text = row["completion"][0]["content"]
            if len(text) % 2:
                solutions = rows[place:place + 4]
                place += 4
                groups.append(solutions)
                answer = str(len(text) % 10 + 2)
                assert all(other["row"]["answer"] == answer for other in solutions)
                assert row["score"] == pytest.approx(statistics.stdev(other["score"] for other in solutions))
            else:
                assert row["score"] == 0
    assert place == len(rows) > 16 and line["completions/sampled_tokens"] == sum(row["length"] for row in rows)
    flat = sum(groups, [])
    loss, norm = slow_step(AutoModelForCausalLM.from_pretrained(folder), flat, of_groups(flat))
    assert line["loss"] == pytest.approx(loss, rel=1e-3, abs=1e-5)
    assert line["grad_norm"] == pytest.approx(norm, rel=1e-3)


@pytest.mark.parametrize("ranks, more", [
    (1, []), (2, ["--temperature=0.7"]), (1, ["--top_k=4"]),
    (1, ["--engine=vllm"]), (2, ["--temperature=0.7", "--engine=vllm"]), (1, ["--top_k=4", "--engine=vllm"])])
def test_answers_match_a_grammar_and_the_ratio_is_one(copy, folder, reward_file, tmp_path, ranks, more):
    """The sets are those of a search that tries every token at every place."""
    patch(copy, RECIPES["grammar"])
    pattern = "[a-f]{1,3}(,[a-f0-3]{2})*"
    arguments = small(folder, reward_file, "--max_steps=1", f"--regex={pattern}", "--token_budget=100", *more)
    forked(tmp_path / "log", "train_grammar.py", *arguments, f"--out_dir={tmp_path}/run", keep=True, ranks=ranks,
           root=copy)
    (line, _), rows = lines(tmp_path / "run"), kept_rollouts(tmp_path / "run", 0)
    assert line["sampling/sampling_logp_difference/max"] < 1e-4
    assert line["sampling/importance_sampling_ratio/max"] == pytest.approx(1, abs=1e-4)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    texts = {token: tokenizer.decode([token]) for token in range(len(tokenizer))}
    temperature, total, ended = 0.7 if ranks == 2 else 1.0, 0.0, 0
    for row, adv in zip(rows, of_groups(rows)):
        text = row["completion"][0]["content"]
        ended += row["finish_reason"] == "stop"
        assert regex.fullmatch(pattern, text, partial=row["finish_reason"] != "stop")
        ((start, end),) = row["spans"]
        ids = torch.tensor([row["ids"]])
        logits = model(ids).logits[0] / temperature
        kept = np.split(row["kept_ids"], np.cumsum(row["kept_sizes"])[:-1])
        said = ""
        for place, own in zip(range(start, end), kept):
            allowed = []
            for token, more_text in texts.items():
                if token == tokenizer.eos_token_id:
                    fits = regex.fullmatch(pattern, said)
                else:
                    fits = len(more_text) == 1 and regex.fullmatch(pattern, said + more_text, partial=True)
                if fits:
                    allowed.append(token)
            if "--top_k=4" in more:
                likely = sorted(allowed, key=lambda token: -logits[place - 1, token].item())
                allowed = sorted(likely[:4])
            assert sorted(own.tolist()) == allowed
            token = row["ids"][place]
            logp = logits[place - 1, token] - logits[place - 1, allowed].logsumexp(0)
            assert row["logprobs"][place - start] == pytest.approx(logp.item(), abs=1e-4)
            total = total - adv[0] * (logp - logp.detach()).exp()
            said += texts[token]
    assert ended > 2
    loss = total / sum(row["length"] for row in rows)
    loss.backward()
    norm = math.sqrt(sum(p.grad.square().sum().item() for p in model.parameters()))
    assert line["loss"] == pytest.approx(loss.item(), rel=1e-3, abs=1e-5)
    assert line["grad_norm"] == pytest.approx(norm, rel=1e-3)


def test_answers_obey_a_json_schema(copy, folder, reward_file, tmp_path):
    patch(copy, RECIPES["grammar"])
    (tmp_path / "schema.json").write_text(json.dumps({
        "type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}))
    arguments = small(folder, reward_file, "--max_steps=1", f"--json_schema={tmp_path}/schema.json",
                      "--max_completion_length=32")
    forked(tmp_path / "log", "train_grammar.py", *arguments, f"--out_dir={tmp_path}/run", keep=True, root=copy)
    answers = [row["completion"][0]["content"] for row in kept_rollouts(tmp_path / "run", 0)
               if row["finish_reason"] == "stop"]
    assert len(answers) > 4 and {json.loads(answer)["a"] for answer in answers} <= {1, 2}
    for i, (setting, message) in enumerate((("--regex=[0-9", "regex=[0-9"), ("--regex=", "name one of them"),
                                            ("--json_schema=none.json", "No such file or directory: 'none.json'"))):
        output = forked(tmp_path / "log", "train_grammar.py", *small(folder, reward_file), setting,
                        f"--out_dir={tmp_path}/wrong-{i}", root=copy, code=2)
        assert message in output.splitlines()[-1], output


def normalising(experts, folder, normalised):
    """The mixture with more layers and experts, and with or without a sum of 1 over those that were chosen."""
    tokenizer, config = AutoTokenizer.from_pretrained(experts), AutoConfig.from_pretrained(experts)
    config.num_hidden_layers, config.num_experts, config.num_experts_per_tok = 4, 16, 4
    config.norm_topk_prob = normalised
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("ranks, normalised", [(1, True), (2, False)])
def test_experts_are_those_that_the_engine_chose(copy, experts, reward_file, tmp_path, ranks, normalised):
    """With the choices moved on by one expert, so that the trainer's own are others; loss and gradient as by a
    plain model whose routers are made to choose the same."""
    patch(copy, RECIPES["routing_replay"])
    experts = normalising(experts, tmp_path / "experts", normalised)
    path = copy / "train_routing_replay.py"
    before = "    with log.timed(\"reward\"):\n"
    assert path.read_text().count(before) == 1
    path.write_text(path.read_text().replace(
        before, "    for r in my_rollouts:\n        r.routes = (r.routes + 1) % 16\n" + before))
    arguments = small(experts, reward_file, "--max_steps=1", "--token_budget=100", "--logprob_gap=99")
    forked(tmp_path / "log", path.name, *arguments, f"--out_dir={tmp_path}/run", keep=True, ranks=ranks, root=copy)
    (line, _), rows = lines(tmp_path / "run"), kept_rollouts(tmp_path / "run", 0)
    model = AutoModelForCausalLM.from_pretrained(experts)
    routers = [module for module in model.modules() if type(module).__name__ == "Qwen3MoeTopKRouter"]
    forced = {}

    def force(router, inputs, outputs):
        own = forced[router]
        scores = []
        for logits, chosen in zip(outputs[0], own):
            shares = [math.e ** logits[e] for e in chosen]
            total = sum(shares) if normalised else sum(math.e ** logit for logit in logits)
            scores.append(torch.stack([share / total for share in shares]))
        return outputs[0], torch.stack(scores), torch.tensor(own)

    for router in routers:
        router.register_forward_hook(force)
    total, other = 0.0, []
    for row, adv in zip(rows, of_groups(rows)):
        assert len(row["routes"]) == len(row["ids"]) - 1
        for layer, router in enumerate(routers):
            forced[router] = [token[layer] for token in row["routes"]]
        shorter = {"ids": row["ids"][:-1], "spans": [[row["spans"][0][0], len(row["ids"]) - 1]]}
        start = shorter["spans"][0][0]
        table = model(torch.tensor([shorter["ids"]])).logits[0].log_softmax(-1)[start - 1:]
        logp = table.gather(1, torch.tensor(row["ids"][start:])[:, None])[:, 0]
        other += (logp.detach() - torch.tensor(row["logprobs"])).abs().tolist()
        total = total - (torch.tensor(adv) * (logp - logp.detach()).exp()).sum()
    loss = total / sum(row["length"] for row in rows)
    loss.backward()
    norm = math.sqrt(sum(p.grad.square().sum().item() for p in model.parameters() if p.grad is not None))
    assert line["loss"] == pytest.approx(loss.item(), rel=1e-3, abs=1e-5)
    assert line["grad_norm"] == pytest.approx(norm, rel=1e-3)
    assert line["sampling/sampling_logp_difference/mean"] == pytest.approx(statistics.mean(other), rel=1e-3)
    assert statistics.mean(other) > 0.01


def test_replayed_routes_close_the_gap(copy, folder, experts, reward_file, tmp_path):
    """In float32 there is none, and in bfloat16 it is smaller than without the recipe."""
    patch(copy, RECIPES["routing_replay"])
    experts = normalising(experts, tmp_path / "experts", True)
    gaps = {}
    for dtype in ("float32", "bfloat16"):
        arguments = small(experts, reward_file, "--max_steps=1", f"--dtype={dtype}", "--prompts_per_step=16",
                          "--max_completion_length=48")
        plain, _ = runs.train("train_grpo.py", tmp_path / f"plain-{dtype}", arguments, {})
        forked(tmp_path / "log", "train_routing_replay.py", *arguments, f"--out_dir={tmp_path}/{dtype}", root=copy)
        key = "sampling/sampling_logp_difference"
        gaps[dtype] = [(line[f"{key}/mean"], line[f"{key}/max"])
                       for line in (plain[0], lines(tmp_path / dtype)[0])]
    assert gaps["float32"][1][1] < 1e-4
    (mean, largest), (replayed_mean, replayed_largest) = gaps["bfloat16"]
    assert replayed_mean < 0.9 * mean and replayed_largest < 0.5 * largest
    output = forked(tmp_path / "log", "train_routing_replay.py", *small(folder, reward_file),
                    f"--out_dir={tmp_path}/dense", root=copy, code=2)
    assert "none of its modules is a TopKRouter" in output.splitlines()[-1]
