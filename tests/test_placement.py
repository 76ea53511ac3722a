"""Trainers and engines apart: the same figures as together, older weights, kills, and a role that is gone."""
import datetime
import functools
import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM

from runtime import checkpoint
from options import placement
import runs
from options.saved_rollouts import as_arrays, from_arrays
from rollout import Rollout
from runs import begin, begin_torchrun, finish, forked, kept_rollouts, lines, refused, with_defaults
from test_many_ranks import bits
from test_survive import count_lines, wait_for
from tiny import pretrain

SMALL = {"prompts_per_step": 4, "num_generations": 4, "max_completion_length": 12, "train_prompts": 64,
         "eval_prompts": 4, "eval_samples": 1, "max_steps": 6, "save_interval": 1, "warmup_steps": 0,
         "learning_rate": 1e-3, "eval_interval": 3, "engine": "hf", "keep_checkpoints": 9}
LOST = "Connection (closed|reset) by peer"
GAME = {"task": "arithmetic", "max_turns": 3, "max_completion_length": 48, "max_steps": 4}


def command(out_dir, **settings):
    return [f"--out_dir={out_dir}", *with_defaults([], SMALL | settings)]


@pytest.fixture
def train(folder, reward_file, tmp_path):
    """Runs a script with the small model; returns its metrics and what it printed."""
    def run(name="run", script="train_async.py", ranks=2, code=0, **settings):
        defaults = SMALL | {"model": folder, "reward": reward_file.partition("=")[2]} | settings
        return runs.train(script, tmp_path / name, [], defaults, ranks=ranks, code=code)
    return run


@pytest.fixture(scope="module")
def whole(folder, reward_file, tmp_path_factory):
    """A run that nothing interrupts, whose completions are two steps old."""
    out_dir = tmp_path_factory.mktemp("whole") / "run"
    forked(f"{out_dir}.log", "train_async.py", *command(out_dir, model=folder, max_staleness=2), reward_file,
           ranks=2, keep=True)
    return out_dir


def sampled_for(run, step):
    """The Rollouts of a step."""
    fields = Rollout.__dataclass_fields__
    arrays = {"ids": np.int32, "spans": np.int32, "logprobs": np.float32, "sequence_starts": np.int32}
    return [Rollout(**{key: np.array(value, arrays[key]) if key in arrays else value
                       for key, value in row.items() if key in fields}
                    | {"versions": tuple(map(tuple, row["versions"])), "rewards": dict(row["rewards"])})
            for row in kept_rollouts(run, step)]


def figures(metrics):
    """What two runs of the same kind have in common."""
    apart = ("timing_s/", "perf/", "async/")
    return [{key: value for key, value in line.items() if not key.startswith(apart)} for line in metrics]


def ages(metrics):
    return [line["async/staleness/max"] for line in metrics[:-1]]


def cut_back(whole, run, step):
    """A copy of a run as it was when it had made that many steps."""
    shutil.copytree(whole, run)
    for path in checkpoint.checkpoints(run):
        if int(path.rpartition("-")[2]) > step:
            shutil.rmtree(path)
    (run / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines(whole) if line["step"] < step))


def wait_until(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


# ---------------------------------------------------------------- the weights that sampled

@pytest.mark.parametrize("settings", [
    {"num_mini_batches": 2, "kl_coef": 0.05, "loss_type": "cispo", "temperature": 0.7, "eval_temperature": 0},
    {"advantage": "rloo", "kl_coef": 0.05, "kl_estimator": "k1_reward", "eval_top_p": 0.9}])
def test_in_turns_the_figures_are_those_of_train_grpo(train, tmp_path, settings):
    """Also in evaluations that sample in another way. With a top_p alone nothing is compared there."""
    settings = {"max_steps": 4, "engine_correction": "none"} | settings
    together, _ = train("together", "train_grpo.py", 1, **settings)
    apart, output = train("apart", max_staleness=0, **settings)
    assert figures(apart) == figures(together) and not any(ages(apart)) and len(apart) > 1
    assert lines(tmp_path / "apart", "samples.jsonl") == lines(tmp_path / "together", "samples.jsonl")
    assert apart[0].keys() >= {"timing_s/wait_for_rollouts", "async/staleness/mean"}
    assert "Engines sample with weights that are at most 0 steps older\n" in output


def gap(r, model_of):
    """The largest difference between an engine's logprobs of a rollout and those of transformers.

    model_of: returns the model of a version. Where a version ends, its KV cache stays, as in the engine.
    """
    ids, start, cache, logits = torch.from_numpy(r.ids).long(), len(r.prompt_ids), None, []
    # A version that samples from the token t on reads the row from the token before.
    edges = [0, *(start + t - 1 for t, _ in r.versions[1:]), len(ids)]
    for (first, end), (_, version) in zip(itertools.pairwise(edges), r.versions, strict=True):
        with torch.no_grad():
            output = model_of(version)(ids[None, first:end], past_key_values=cache, use_cache=True)
        cache, logits = output.past_key_values, [*logits, output.logits[0]]
    logps = torch.cat(logits)[:-1].log_softmax(-1).gather(1, ids[1:, None])[start - 1:, 0]
    return np.abs(logps.numpy() - r.logprobs).max()


def models_of(run, base):
    """Returns the function version -> model for the checkpoints of a run."""
    return functools.cache(lambda version: AutoModelForCausalLM.from_pretrained(
        f"{run}/checkpoint-{version}" if version else base, dtype=torch.float32))


@pytest.mark.parametrize("max_staleness", [1, 2])
def test_completions_are_of_weights_that_many_steps_before(train, whole, folder, tmp_path, max_staleness):
    # How often it saves makes no difference, though a save waits for what is sampled ahead.
    metrics, output = train(max_staleness=max_staleness, save_interval={1: 1, 2: 4}[max_staleness])
    again = lines(whole) if max_staleness == 2 else train("again", max_staleness=1, save_interval=4)[0]
    assert figures(metrics) == figures(again)
    assert ages(metrics) == [min(step, max_staleness) for step in range(6)]
    assert f"Engines sample with weights that are at most {max_staleness} steps older\n" in output
    # At the first step both sides still have the same weights.
    gaps = [line["sampling/sampling_logp_difference/mean"] for line in metrics[:-1]]
    assert gaps[0] < 1e-5 and min(gaps[1:]) > 1e-2
    run = whole if max_staleness == 2 else tmp_path / "run"
    model_of = models_of(run, folder)
    for step in (2, 4):
        rollouts, version = sampled_for(run, step), step - max_staleness
        assert {r.versions for r in rollouts} == {((0, version),)} and len(rollouts) == 16
        assert max(gap(r, model_of) for r in rollouts) < 1e-4
        for other in {step, step - 1, step - 2} - {version}:
            assert max(gap(r, lambda _: model_of(other)) for r in rollouts) > 0.1


def test_older_completions_make_another_run_and_are_corrected_for(train, whole):
    in_turns, _ = train(max_staleness=0, max_steps=2, engine_correction="none")
    older = lines(whole)
    # The weights with which the first step is sampled are the same.
    for key in ("reward", "loss", "sampling/correction_mean"):
        assert in_turns[0][key] == pytest.approx(older[0][key], abs=1e-5), key
        assert in_turns[1][key] != pytest.approx(older[1][key], abs=1e-3), key
    assert in_turns[1]["sampling/correction_mean"] == 1


# ---------------------------------------------------------------- kills, signals, resumes

def same_as(whole, run):
    """Whether a run that was interrupted has the figures and the samples of one that was not."""
    return (figures(lines(run)) == figures(lines(whole)) and ages(lines(run)) == ages(lines(whole))
            and lines(run, "samples.jsonl") == lines(whole, "samples.jsonl"))


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_role_ends_the_other_and_a_resume_goes_on(whole, folder, reward_file, tmp_path, victim):
    run, log = tmp_path / "run", tmp_path / "log"
    arguments = ["train_async.py", *command(run, model=folder, max_staleness=2, save_interval=2,
                                            resume="auto"), reward_file]
    processes = begin(log, *arguments, ranks=2)
    wait_for(lambda: count_lines(run) > 3, processes[0])
    processes[victim].kill()
    processes[1 - victim].join(20)
    assert processes[1 - victim].exitcode == 1, log.read_text()[-3000:]
    assert re.search(LOST, log.read_text()) and 3 < count_lines(run) < 7
    output = forked(log, *arguments, ranks=2)
    assert re.search(r"^resumes .*checkpoint-[24]\n", output, re.M)
    assert same_as(whole, run)


def test_a_resumed_run_reads_the_prompts_of_the_day_on_which_it_began(train, tmp_path):
    (tmp_path / "template.jinja").write_text(
        "{{ strftime_now('%Y-%m-%d %H:%M:%S.%f') }}" + pretrain.CHAT_TEMPLATE)
    settings = {"chat_template": tmp_path / "template.jinja", "max_prompt_length": 128, "max_steps": 4}
    whole, _ = train(**settings)
    shutil.rmtree(tmp_path / "run" / "checkpoint-4")
    shutil.rmtree(tmp_path / "run" / "checkpoint-3")
    metrics, output = train(resume="auto", **settings)
    assert figures(metrics) == figures(whole) and "checkpoint-2\n" in output


def workers_of(process):
    """The ranks of a torchrun: {rank: pid}."""
    found = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
    environments = {int(pid): open(f"/proc/{pid}/environ").read() for pid in found}
    return {int(match[1]): pid for pid, text in environments.items()
            if (match := re.search(r"\0RANK=(\d+)\0", text))}


def test_torchrun_ends_what_is_left_of_a_run(whole, folder, reward_file, tmp_path):
    run, log = tmp_path / "run", tmp_path / "log"
    arguments = ["train_async.py", *command(run, model=folder, max_staleness=2, save_interval=2,
                                            resume="auto"), reward_file]
    (process,) = begin_torchrun(log, 2, *arguments)
    wait_for(lambda: count_lines(run) > 2, process)
    workers = workers_of(process)
    os.kill(workers[1], signal.SIGKILL)
    process.join(60)
    assert process.exitcode == 1 and "SIGKILL" in log.read_text() and workers.keys() == {0, 1}
    assert not any(os.path.exists(f"/proc/{pid}") for pid in workers.values())
    forked(log, *arguments, ranks=2)
    assert same_as(whole, run)


def test_a_signal_to_all_saves_what_is_sampled_ahead(whole, folder, reward_file, tmp_path):
    run, log = tmp_path / "run", tmp_path / "log"
    arguments = ["train_async.py", *command(run, model=folder, max_staleness=2, save_interval=100,
                                            resume="auto"), reward_file]
    processes = begin(log, *arguments, ranks=2)
    wait_for(lambda: count_lines(run) > 1, processes[0])
    for process in processes:
        os.kill(process.pid, signal.SIGTERM)
    steps = int(re.search(r"stopped by a signal after (\d+) steps", finish(processes, log))[1])
    state = json.loads((run / f"checkpoint-{steps}" / "trainer" / "state.json").read_text())
    assert 1 < steps < 6
    assert state["ahead"] == [*range(steps, min(6, steps + 2))]
    # The trainers have the rows, so nothing of them has been sent.
    arrays = load_file(run / f"checkpoint-{steps}" / "trainer" / "arrays.safetensors")
    assert [r.row for r in from_arrays(arrays)] == [{}] * 16 * len(state["ahead"])
    forked(log, *arguments, ranks=2)
    assert same_as(whole, run)


def test_more_engines_take_over_a_run_and_another_staleness(whole, train, tmp_path):
    cut_back(whole, tmp_path / "run", 2)
    metrics, output = train(ranks=3, rollout_ranks=2, max_staleness=2, resume="auto")
    # What was sampled ahead is taken over.
    assert ages(metrics) == [0, 1, 2, 2, 2, 2] and len(metrics) == 7
    cut_back(whole, tmp_path / "younger", 2)
    metrics, output = train("younger", max_staleness=1, resume="auto")
    assert ages(metrics) == [0, 1, 0, 1, 1, 1]


def test_a_run_of_train_grpo_goes_on_apart_but_not_back(train, folder, reward_file, tmp_path):
    whole, _ = train("whole", "train_grpo.py", 1)
    cut_back(tmp_path / "whole", tmp_path / "run", 3)
    metrics, output = train(max_staleness=0, engine_correction="none", resume="auto")
    assert figures(metrics) == figures(whole) and "resumes " in output
    refused([*command(tmp_path / "run", model=folder, resume="auto"), reward_file],
            "checkpoint-6 holds ahead, which train_grpo.py would lose", tmp_path)


# ---------------------------------------------------------------- more ranks

@pytest.mark.parametrize("cut", [1, 2])
def test_two_trainers_share_what_an_engine_samples(train, whole, cut):
    """Each has some of the rollouts, or a part of each row."""
    metrics, output = train(ranks=3, max_staleness=2, max_steps=3, lr_decay="constant",
                            sequence_parallel_size=cut)
    alone, _ = train("alone", max_staleness=2, max_steps=3, lr_decay="constant")
    assert "on 2 x cpu, engine hf, 1 apart" in output and ages(metrics) == [0, 1, 2]
    for key in ("reward", "loss", "grad_norm", "num_tokens", "sampling/sampling_logp_difference/mean"):
        assert [line[key] for line in metrics[:3]] == pytest.approx(
            [line[key] for line in alone[:3]], rel=1e-3, abs=1e-6), key


def test_two_engines_sample_what_one_samples(train, whole, tmp_path):
    metrics, output = train(ranks=3, rollout_ranks=2, max_staleness=2)
    assert "on 1 x cpu, engine hf, 2 apart" in output and ages(metrics) == ages(lines(whole))
    for key in ("reward", "completions/mean_length", "num_tokens", "rewards/score/mean"):
        assert [line[key] for line in metrics[:-1]] == [line[key] for line in lines(whole)[:-1]], key
    assert metrics[0]["eval/mean@1"] == pytest.approx(lines(whole)[0]["eval/mean@1"])
    # In another batch a logprob is rounded in another way.
    assert lines(tmp_path / "run", "samples.jsonl") == [
        sample | {"logprobs": pytest.approx(sample["logprobs"], abs=2e-3)}
        for sample in lines(whole, "samples.jsonl")]
    for step in (2, 4):
        found, expected = (sampled_for(run, step) for run in (tmp_path / "run", whole))
        assert [r.ids.tolist() for r in found] == [r.ids.tolist() for r in expected]


def test_an_engine_over_two_ranks_takes_weights_in_flight(train, folder, tmp_path):
    """Both of its ranks change weights between the same two tokens."""
    pytest.importorskip("vllm")
    metrics, output = train(ranks=3, engine="vllm", rollout_ranks=2, vllm_tensor_parallel_size=2,
                            in_flight=True, max_staleness=2, max_completion_length=96,
                            learning_rate=3e-3, lr_decay="constant", eval_interval=100)
    assert "engine vllm, 1 apart" in output
    assert max(ages(metrics)) <= 2
    model_of, several = models_of(tmp_path / "run", folder), 0
    for step in range(1, 6):
        for r in sampled_for(tmp_path / "run", step):
            assert gap(r, model_of) < 1e-4
            if len(r.versions) > 1:
                several += 1
                # Neither by the older weights alone nor by the newest.
                for _, version in (r.versions[0], r.versions[-1]):
                    assert gap(r, lambda _: model_of(version)) > 1e-3
    assert several > 10


def test_weights_that_are_the_same_have_to_agree(whole, train, tmp_path):
    """Without an evaluation first: in the update itself."""
    cut_back(whole, tmp_path / "run", 4)
    metrics, output = train(max_staleness=0, logprob_gap=1e-9, resume="auto", code=1)
    assert "over logprob_gap=1e-09" in output and metrics[-1]["step"] == 3


# ---------------------------------------------------------------- episodes

def test_episodes_apart(train, talker, games, tmp_path):
    settings = GAME | {"model": talker, "environment": f"{games}:Letters", "reward": "",
                       "engine_correction": "none"}
    together, _ = train("together", "train_grpo.py", 1, **settings)
    in_turns, _ = train("in turns", max_staleness=0, **settings)
    assert figures(in_turns) == figures(together) and in_turns[0]["episodes/turns"] > 1.2
    settings |= {"max_staleness": 1, "advantage": "turns"}
    older, _ = train("older", **settings)
    cut_back(tmp_path / "older", tmp_path / "run", 2)
    train("run", resume="auto", **settings)
    assert same_as(tmp_path / "older", tmp_path / "run") and ages(older) == [0, 1, 1, 1]


def test_episodes_in_flight_in_threads(train, talker, games):
    metrics, _ = train(model=talker, environment=f"{games}:Letters", reward="", call_workers=4,
                       in_flight=True, **GAME)
    assert max(ages(metrics)) <= 1 and metrics[0]["episodes/turns"] > 1.2 and len(metrics) == 5


# ---------------------------------------------------------------- a role that is gone

SOON = {"timeout": 3, "call_timeout": 0}


def standing_run(folder, reward_file, tmp_path, number, ranks=2, steps=2):
    """A run whose rank of that number stands still from some step on; returns its processes."""
    processes = begin(tmp_path / "log", "train_async.py", *command(
        tmp_path / "run", model=folder, max_steps=10_000, save_interval=10_000, eval_interval=10_000,
        keep_checkpoints=1, **SOON), reward_file, ranks=ranks)
    wait_for(lambda: count_lines(tmp_path / "run") > steps, processes[0])
    os.kill(processes[number].pid, signal.SIGSTOP)
    return processes


def all_end(processes, number, log):
    """The others after `timeout`, and this one as soon as it may."""
    try:
        for process in processes[:number] + processes[number + 1:]:
            process.join(25)
        others = [process.exitcode for n, process in enumerate(processes) if n != number]
        os.kill(processes[number].pid, signal.SIGCONT)
        processes[number].join(10)
        assert others == [1] * len(others) and processes[number].exitcode == 1, log.read_text()[-4000:]
    finally:
        for process in processes:
            process.kill()
    return log.read_text()


def test_an_engine_that_stands_still(folder, reward_file, tmp_path):
    output = all_end(standing_run(folder, reward_file, tmp_path, 1), 1, tmp_path / "log")
    assert re.search(r"has stood still for timeout=3 seconds, in step \d+, wait_for_rollouts", output)


def test_a_trainer_that_stands_still(folder, reward_file, tmp_path):
    output = all_end(standing_run(folder, reward_file, tmp_path, 0), 0, tmp_path / "log")
    assert re.search(r"has stood still for timeout=3 seconds, in engine 0, before the weights of step \d+",
                     output)


def test_a_lost_engine_ends_both_trainers(folder, reward_file, tmp_path):
    processes = begin(tmp_path / "log", "train_async.py", *command(
        tmp_path / "run", model=folder, max_steps=10_000, save_interval=10_000, eval_interval=10_000),
        reward_file, ranks=3)
    wait_for(lambda: count_lines(tmp_path / "run") > 1, processes[0])
    processes[2].kill()
    for process in processes:
        process.join(15)
    output = (tmp_path / "log").read_text()
    assert [process.exitcode for process in processes] == [1, 1, -signal.SIGKILL], output[-3000:]
    assert re.search(LOST, output), output


RAISES = """
calls = 0
def score(prompts, completions, **_):
    global calls
    calls += 1
    if calls > 5:
        raise KeyError("colour")
    return [0.5 * (i % 2) for i in range(len(completions))]
"""


def test_torchrun_says_why_a_reward_failed(folder, tmp_path):
    """The rank that fails shows the error, and the summary names it, and not what came of it."""
    (tmp_path / "raises.py").write_text(RAISES)
    processes = begin_torchrun(tmp_path / "log", 2, "train_async.py", *command(
        tmp_path / "run", model=folder, reward=f"{tmp_path}/raises.py:score"))
    output = finish(processes, tmp_path / "log", code=1)
    assert "reward score raised KeyError: 'colour'" in output, output
    summary = output.partition("Root Cause")[2].partition("=====")[0]
    assert "rank      : 1" in summary and "'colour'" in summary and "onnection" not in summary, summary


SLOW = """
import runpy, sys, time
from runtime import checkpoint, distributed
save = checkpoint.save_checkpoint
def slow(*arguments):
    for _ in range(5):
        time.sleep(1)
        distributed.watchdog.moved()
    return save(*arguments)
checkpoint.save_checkpoint = slow
sys.argv[0] = "train_async.py"
runpy.run_path("train_async.py", run_name="__main__")
"""


def test_after_the_last_weights_no_engine_waits_in_vain(folder, reward_file, tmp_path):
    """The last save may take longer than they wait for each other."""
    (tmp_path / "slow.py").write_text(SLOW)
    forked(tmp_path / "log", tmp_path / "slow.py", *command(
        tmp_path / "run", model=folder, max_steps=1, **SOON), reward_file, ranks=2)
    assert checkpoint.checkpoints(tmp_path / "run") == [str(tmp_path / "run" / "checkpoint-1")]


def logprobs(r, model):
    """Of the sampled tokens of a completion at temperature 0.7, by transformers."""
    ids = torch.from_numpy(r.ids).long()
    with torch.no_grad():
        logps = (model(ids[None]).logits[0, :-1] / 0.7).log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    return logps[len(r.prompt_ids) - 1:]


@pytest.mark.parametrize("estimator", ["k1_reward", "k3_is"])
def test_what_stale_completions_are_worth(train, folder, tmp_path, estimator):
    """The KL is the trained policy's, and the ratio in it and in a token's weight is to what sampled it."""
    metrics, _ = train(max_staleness=2, max_steps=3, kl_coef=0.05, kl_estimator=estimator, temperature=0.7)
    model = models_of(tmp_path / "run", folder)
    rollouts = sampled_for(tmp_path / "run", 2)
    trained = [logprobs(r, model(2)) for r in rollouts]
    kl = torch.cat([logp - logprobs(r, model(0)) for r, logp in zip(rollouts, trained)])
    ratios = torch.cat([(logp - torch.from_numpy(r.logprobs)).exp() for r, logp in zip(rollouts, trained)])
    assert metrics[2]["kl"] == pytest.approx(kl.mean().item(), rel=1e-3) and abs(kl.mean()) > 1e-5
    weight = ratios.clamp(max=2).mean().item()
    assert metrics[2]["sampling/correction_mean"] == pytest.approx(weight, rel=1e-4)
    if estimator == "k3_is":
        scores = torch.tensor([r.score for r in rollouts]).view(-1, 4)
        adv = (scores - scores.mean(1, keepdim=True)) / (scores.std(1, keepdim=True) + 1e-4)
        adv = adv.flatten().repeat_interleave(torch.tensor([len(r.logprobs) for r in rollouts]))
        loss = (0.05 * ((-kl).exp() - 1 + kl) * ratios - adv * ratios.clamp(max=2)).mean()
        assert metrics[2]["loss"] == pytest.approx(loss.item(), rel=1e-3, abs=1e-5)
    assert (ratios - 1).abs().max() > 0.01
    assert metrics[0]["sampling/correction_mean"] == pytest.approx(1, abs=1e-5)


# ---------------------------------------------------------------- settings that do not fit

@pytest.mark.parametrize("ranks, settings, message", [
    (1, {}, "leaves no trainer: there are 1 ranks (torchrun --nproc_per_node=2 train_async.py has two)"),
    (2, {"rollout_ranks": 2}, "rollout_ranks=2 leaves no trainer: there are 2 ranks"),
    (2, {"vllm_tensor_parallel_size": 2}, "vllm_tensor_parallel_size=2 does not divide the 1 ranks"),
    (3, {"rollout_ranks": 2, "vllm_tensor_parallel_size": 2},
     "vllm_tensor_parallel_size=2 needs engine=vllm"),
    (3, {"rollout_ranks": 2, "prompts_per_step": 5}, "prompts_per_step=5 is no multiple of 2"),
    (2, {"max_staleness": -1}, "max_staleness=-1: must not be negative"),
    (2, {"old_logprobs": "engine"}, "engine_correction=token_truncate: with old_logprobs=engine")])
def test_settings_that_do_not_fit_are_refused(folder, tmp_path, ranks, settings, message):
    arguments = with_defaults([], {"model": folder, "engine": "hf", "out_dir": tmp_path / "run"} | settings)
    refused(arguments, message, tmp_path, "train_async.py", ranks)


def test_ranks_cannot_share_an_engine_that_has_one_rank(folder, tmp_path):
    arguments = [f"--model={folder}", f"--out_dir={tmp_path}/run", "--vllm_tensor_parallel_size=2"]
    for more, forbidden in ((["--engine=hf"], []), ([], ["vllm"])):
        output = forked(tmp_path / "log", "train_grpo.py", *arguments, *more, ranks=2, code=2,
                        forbidden=forbidden)
        assert "vllm_tensor_parallel_size=2 needs engine=vllm" in output and "Traceback" not in output


@pytest.mark.parametrize("text, message", [
    (None, "no such file: "), ("def score(**_):\n    raise KeyError('colour')\n", "'colour'")])
def test_a_reward_that_cannot_work_is_refused_in_clear_words(folder, tmp_path, text, message):
    """Only engines call it, but trainers do not add a traceback of theirs."""
    if text:
        (tmp_path / "rewards.py").write_text(text)
    processes = begin(tmp_path / "log", "train_async.py", *command(
        tmp_path / "run", model=folder, reward=f"{tmp_path}/rewards.py:score"), ranks=2)
    for process in processes:
        process.join(60)
    output = (tmp_path / "log").read_text()
    assert all(process.exitcode in (1, 2) for process in processes) and message in output


# ---------------------------------------------------------------- without a run

def rollout_with(versions, length, **rest):
    ids = np.arange(3 + length, dtype=np.int32)
    return Rollout(ids, np.array([[3, 3 + length]], np.int32), np.linspace(-1, 0, length, dtype=np.float32),
                   "stop", np.array([[0, 0, 3]], np.int32), versions=versions, **rest)


def test_staleness_counts_tokens():
    some = [rollout_with(((0, 4),), 3), rollout_with(((0, 1), (2, 3), (5, 4)), 9), rollout_with(((0, 4),), 1)]
    slow = []
    for r in some:
        for t in range(len(r.logprobs)):
            slow.append(4 - [version for start, version in r.versions if start <= t][-1])
    assert placement.staleness(some, 4) == {"async/staleness/mean": pytest.approx(sum(slow) / len(slow)),
                                            "async/staleness/max": max(slow)}


def test_rollouts_come_back_from_arrays(tmp_path):
    row = [3, {"prompt": "What now?"}]
    some = [rollout_with(((0, 2), (3, 3)), 5, row=row, completion="So", rewards={4: 0.1}, parts={"score": 0.1},
                         problem="the reward took too long"),
            rollout_with(((0, 2),), 1, row=row, completion=[{"role": "assistant", "content": "\U0001f600"}],
                         rewards={0: 0.25}, counts={"calls": 1, "seconds": 0.5})]
    some[1].spans = np.array([[0, 1], [3, 4]], np.int32)
    assert some[1].score == 0.25
    save_file(as_arrays(some), tmp_path / "arrays.safetensors")
    found = from_arrays(load_file(tmp_path / "arrays.safetensors"))
    for ours, theirs in zip(found, some, strict=True):
        assert bits(ours) == bits(theirs) and ours.spans.tolist() == theirs.spans.tolist()
        for key in ("versions", "counts", "row", "parts", "problem", "finish_reason", "completion", "score"):
            assert getattr(ours, key) == getattr(theirs, key)
    assert [r.rewards for r in found] == [{4: 0.1}, {0: 0.25}]
    assert from_arrays({}) == from_arrays(as_arrays([])) == []


def test_rollouts_with_the_older_names_of_fields_come_back():
    arrays = as_arrays([rollout_with(((0, 2),), 3)])
    arrays["0.row_starts"] = arrays.pop("0.sequence_starts")
    [record] = json.loads(arrays["records"].tobytes())
    record["row_names"] = ["white"]
    del record["sequence_names"]
    arrays["records"] = np.frombuffer(json.dumps([record]).encode(), np.uint8)
    [r] = from_arrays(arrays)
    assert r.sequence_names == ["white"] and r.sequence_starts.tolist() == arrays["0.row_starts"].tolist()
    assert not {"row_names", "row_starts"} & set(vars(r))


def test_fields_of_your_own_come_back_as_they_were(tmp_path):
    r = rollout_with(((0, 2),), 3, row={"prompt": "?", "day": datetime.date(2026, 1, 2)}, rewards={2: 0.5})
    own = {"values": np.arange(6.0).reshape(2, 3)[:, ::2], "lists": {"a": [1, None, "b"]}, "text": "1",
           "half": np.float32(0.1), "count": 3, "nothing": None, "flag": True, "nan": math.nan}
    vars(r).update(own)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    checkpoint.write_state(tmp_path, {}, as_arrays([rollout_with(((0, 2),), 1), r]))
    _, again = from_arrays(load_file(tmp_path / "trainer" / "arrays.safetensors"))
    for key, value in own.items():
        found = getattr(again, key)
        assert type(found) is type(value) and repr(found) == repr(value), key
    assert again.row == {"prompt": "?", "day": "2026-01-02"} and again.rewards == {2: 0.5}
    for value in (torch.ones(2), (1, 2), {1: 2}, [np.ones(2)], datetime.date(2026, 1, 2),
                  np.array(["a"]), np.array([None])):
        r.mine = value
        with pytest.raises(ValueError, match="the field mine of a rollout is "):
            as_arrays([r])


@pytest.mark.parametrize("key", ["max_staleness", "temperature", "top_p", "top_k", "min_p", "max_completion_length",
                                 "max_turns", "reward_weights"])
def test_what_was_sampled_with_other_settings_is_not_taken(key):
    settings = dict.fromkeys(placement.SAMPLED_WITH, 1)
    run = SimpleNamespace(state={"ahead": [3, 4], "settings": settings},
                          arrays=as_arrays([rollout_with(((0, 2),), length) for length in (1, 2, 3, 4)]))
    for value, kept in ((1, {("step", 3): [1, 2], ("step", 4): [3, 4]}), (2, {})):
        now = SimpleNamespace(**settings | {key: value})
        assert {step: [len(r.logprobs) for r in rollouts]
                for step, rollouts in placement.kept_ahead(run, now).items()} == kept


def test_rollouts_of_an_older_version_are_refused():
    arrays = as_arrays([rollout_with(((0, 2),), 1)])
    arrays["rest"] = arrays.pop("records")                      # so it was called
    run = SimpleNamespace(state={"ahead": [3], "settings": dict.fromkeys(placement.SAMPLED_WITH, 1)}, arrays=arrays)
    now = SimpleNamespace(**run.state["settings"])
    with pytest.raises(ValueError, match="resume with that version, or with another max_staleness"):
        placement.kept_ahead(run, now)
    now.max_staleness = 2
    assert placement.kept_ahead(run, now) == {}
