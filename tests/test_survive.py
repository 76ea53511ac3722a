"""Runs that are killed, stopped, starved of disk or given damaged checkpoints: nothing is lost.

pytest tests/test_survive.py --kills=50 kills each run that many times instead of once.
"""
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from configurator import input_errors, tell_launcher
from runtime import checkpoint, distributed
from runtime.metrics import RunLog, rewind
from tiny import pretrain
from runs import ROOT, TORCHRUN, begin, begin_torchrun, change_state, finish, forked, launch, lines, refused, without_times

SMALL = {"prompts_per_step": 4, "num_generations": 4, "max_completion_length": 12, "train_prompts": 64,
         "eval_prompts": 4, "eval_samples": 1, "max_steps": 12, "save_interval": 1, "warmup_steps": 0,
         "learning_rate": 1e-3, "eval_interval": 3, "engine": "hf", "keep_checkpoints": 2}
PPO = {"critic_warmup_steps": 1, "kl_coef": 0.05}


def command(script, folder, out_dir, reward_file, **settings):
    values = SMALL | (PPO if "ppo" in script else {})
    return [script, f"--model={folder}", f"--out_dir={out_dir}", reward_file,
            *(f"--{key}={value}" for key, value in (values | settings).items())]


def train(folder, out_dir, reward_file, ranks=1, code=0, **settings):
    """Run train_grpo.py in forked processes; returns what it printed."""
    arguments = command("train_grpo.py", folder, out_dir, reward_file, **settings)
    return forked(f"{out_dir}.log", *arguments, ranks=ranks, code=code)


def count_lines(out_dir):
    path = os.path.join(out_dir, "metrics.jsonl")
    return len(open(path).readlines()) if os.path.exists(path) else 0


def start(arguments, log):
    with open(log, "a") as output:
        return subprocess.Popen(arguments, cwd=ROOT, stdout=output, stderr=output, start_new_session=True)


def code_of(process):
    """The exit code of a process, forked or not; None while it runs."""
    return process.poll() if isinstance(process, subprocess.Popen) else process.exitcode


def wait_for(condition, process, seconds=120):
    """Wait until it holds, or the process has ended."""
    deadline = time.monotonic() + seconds
    while not condition() and code_of(process) is None:
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.002)


# ---------------------------------------------------------------- kill -9 at any moment

@pytest.mark.parametrize("script, engine, ranks", [("train_grpo.py", "vllm", 1), ("train_ppo.py", "hf", 2)])
def test_a_run_that_is_killed_again_and_again(folder, talker, games, reward_file, tmp_path, request, script,
                                              engine, ranks):
    """Half of the kills fall into a save; in the end every figure is that of a run that was never killed.

    vLLM plays episodes of several turns with an environment. Several kills are of a torchrun and its workers.
    """
    pytest.importorskip("vllm") if engine == "vllm" else None
    kills, rng = request.config.getoption("--kills"), random.Random(0)
    steps = {"max_steps": max(5, 3 * kills), "engine": engine}
    if engine == "vllm":
        folder = talker
        steps |= {"environment": f"{games}:Letters", "task": "arithmetic", "max_completion_length": 48}
    out_dir, log, killed, in_a_save = tmp_path / "run", tmp_path / "log", 0, 0
    launcher = [*TORCHRUN, "--nproc_per_node=2"] if ranks == 2 and kills > 1 else None

    def to_the_end(arguments):
        forked(tmp_path / "other log", *arguments, ranks=ranks)

    to_the_end(command(script, folder, tmp_path / "whole", reward_file, **steps))
    again = command(script, folder, out_dir, reward_file, resume="auto", **steps)
    while killed < kills:
        processes = [start([*launcher, *again], log)] if launcher else begin(log, *again, ranks=ranks)
        process, before = processes[0], count_lines(out_dir)
        # Until it has made a step of its own.
        wait_for(lambda: count_lines(out_dir) > before, process)
        if killed % 2 == 0:
            wait_for((out_dir / "checkpoint.part").exists, process)
            time.sleep(rng.random() * 0.03)
        else:
            time.sleep(rng.random() * 0.5)
        # It may have come to its end before.
        if code_of(process) is not None:
            break
        in_a_save += (out_dir / "checkpoint.part").exists()
        pids = [each.pid for each in processes]
        # Every third time torchrun alone is killed: its workers notice, and the next run waits for them.
        if launcher and killed % 3:
            pgrep = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True)
            pids += map(int, pgrep.stdout.split())
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for each in processes:
            wait_for(lambda: False, each)
        killed += 1
    print(f"{killed} kills, {in_a_save} in a save")
    to_the_end(again)
    assert killed == kills, log.read_text()[-3000:]
    assert without_times(lines(out_dir)) == without_times(lines(tmp_path / "whole"))
    assert lines(out_dir, "samples.jsonl") == lines(tmp_path / "whole", "samples.jsonl")
    assert [line["step"] for line in lines(out_dir)] == list(range(steps["max_steps"] + 1))


# ---------------------------------------------------------------- signals

@pytest.fixture(scope="module")
def whole(folder, reward_file, tmp_path_factory):
    out_dir = str(tmp_path_factory.mktemp("whole") / "run")
    train(folder, out_dir, reward_file)
    return out_dir


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_finishes_the_step_saves_and_exits(whole, folder, reward_file, tmp_path, number):
    out_dir, log = tmp_path / "run", tmp_path / "log"
    (process,) = begin(log, *command("train_grpo.py", folder, out_dir, reward_file, save_interval=100))
    wait_for(lambda: lines(out_dir), process)
    os.kill(process.pid, number)
    wait_for(lambda: False, process, 60)
    steps = int(re.search(r"stopped by a signal after (\d+) steps", log.read_text())[1])
    assert 0 < steps < 12 and os.listdir(out_dir).count(f"checkpoint-{steps}") == 1
    assert process.exitcode == 0
    train(folder, out_dir, reward_file, resume="auto")
    assert without_times(lines(out_dir)) == without_times(lines(whole))


def test_under_nohup_a_closed_terminal_is_no_signal(folder, reward_file, tmp_path):
    arguments = command("train_grpo.py", folder, tmp_path / "run", reward_file, max_steps=3)
    process = start(["nohup", sys.executable, *arguments], tmp_path / "log")
    wait_for(lambda: lines(tmp_path / "run"), process)
    process.send_signal(signal.SIGHUP)
    assert process.wait(120) == 0 and len(lines(tmp_path / "run")) == 4


# From the third step on each turn takes its time, unless a file says otherwise.
SLOW = """
import os, time
here, begun = os.path.dirname(__file__), 0
class Slow:
    def reset(self, **row):
        global begun
        begun += 1
    def step(self, text):
        if begun > LIMIT and not os.path.exists(f"{here}/go on"):
            open(f"{here}/slow", "w").close()
            time.sleep(0.3)
        return "More.", sum(ord(c) % 2 == 0 for c in text) / 12, len(text) % 4 == 0
"""


@pytest.mark.parametrize("script, ranks, reached", [
    ("train_grpo.py", 2, "torchrun"), ("train_dapo.py", 2, 1), ("train_ppo.py", 1, 0)])
def test_a_signal_ends_sampling_and_saves_the_start_of_the_step(talker, tmp_path, script, ranks, reached):
    """On whichever rank, though prompts have been drawn; the figures are those of a run that went on."""
    out_dir, log = tmp_path / "run", tmp_path / "log"
    # The trial, 4 held-out prompts, and 2 steps of 16 episodes.
    (tmp_path / "slow.py").write_text(SLOW.replace("LIMIT", str(2 + (4 + 2 * 16) // ranks)))
    settings = {"environment": f"{tmp_path}/slow.py:Slow", "task": "arithmetic", "max_completion_length": 48,
                "save_interval": 100, "eval_interval": 0, "max_steps": 4, "max_num_gen_batches": 1}
    if script != "train_dapo.py":
        del settings["max_num_gen_batches"]
    arguments = command(script, talker, out_dir, "--reward=", **settings)
    if reached == "torchrun":
        processes, number = begin_torchrun(log, ranks, *arguments), 0
    else:
        processes, number = begin(log, *arguments, ranks=ranks), reached
    wait_for(lambda: (tmp_path / "slow").exists() and len(lines(out_dir)) == 2, processes[0])
    os.kill(processes[number].pid, signal.SIGTERM)
    for process in processes:
        wait_for(lambda: False, process, 60)
    # torchrun has its own way to exit, once its workers have ended.
    assert "SignalException" in log.read_text() if reached == "torchrun" else processes[number].exitcode == 0
    assert "stopped by a signal after 2 steps" in log.read_text(), log.read_text()[-3000:]
    assert [os.path.basename(path) for path in checkpoint.checkpoints(out_dir)] == ["checkpoint-2"]
    (tmp_path / "go on").touch()
    forked(log, *arguments, "--resume=auto", ranks=ranks)
    whole = command(script, talker, tmp_path / "whole", "--reward=", **settings)
    forked(log, *whole, ranks=ranks)
    assert without_times(lines(out_dir)) == without_times(lines(tmp_path / "whole"))


# In the first step of training, after a trial and an evaluation, it waits for a file.
WAITING = """
import os, time
calls, here = 0, os.path.dirname(__file__)
def score(prompts, completions, **_):
    global calls
    calls += 1
    if calls == 3:
        open(f"{here}/waiting", "w").close()
        while not os.path.exists(f"{here}/go on"):
            time.sleep(0.01)
    return [0.5 * (i % 2) for i in range(len(completions))]
"""
NOTICE = ("The run saves and stops: soon if it samples, otherwise when this step is finished. "
          "Ctrl-C again ends it at once.")


@pytest.fixture()
def waiting_run(folder, tmp_path):
    """A run in the middle of its first step, which ends once there is a file "go on"."""
    (tmp_path / "waiting.py").write_text(WAITING)
    reward = f"--reward={tmp_path}/waiting.py:score"
    arguments = command("train_grpo.py", folder, tmp_path / "run", reward, call_timeout=0,
                        save_interval=100)
    (process,) = begin(tmp_path / "out", *arguments, errors=tmp_path / "errors")
    wait_for((tmp_path / "waiting").exists, process)
    yield process
    process.kill()


def test_signals_in_quick_succession_count_as_one(waiting_run, tmp_path):
    """A launcher passes on what the process has had itself. A later SIGTERM is no second Ctrl-C either."""
    for number, pause in ((signal.SIGINT, 0.1), (signal.SIGINT, 1.2), (signal.SIGTERM, 0.1), (signal.SIGHUP, 0.1),
                          (signal.SIGUSR2, 0.1)):
        os.kill(waiting_run.pid, number)
        time.sleep(pause)
    assert (tmp_path / "out").read_text().count(NOTICE) == 1 and waiting_run.is_alive()
    (tmp_path / "go on").touch()
    assert "stopped by a signal after 1 steps" in finish([waiting_run], tmp_path / "out")
    assert (tmp_path / "out").read_text().count(NOTICE) == 1
    assert [os.path.basename(path) for path in checkpoint.checkpoints(tmp_path / "run")] == ["checkpoint-1"]


def test_a_second_ctrl_c_ends_the_run_at_once(waiting_run, tmp_path):
    os.kill(waiting_run.pid, signal.SIGINT)
    wait_for(lambda: NOTICE in (tmp_path / "out").read_text(), waiting_run, 5)
    time.sleep(1.1)
    assert waiting_run.is_alive()
    os.kill(waiting_run.pid, signal.SIGINT)
    waiting_run.join(5)
    assert waiting_run.exitcode == 130
    assert not checkpoint.checkpoints(tmp_path / "run") and not lines(tmp_path / "run")


# ---------------------------------------------------------------- damaged checkpoints, other ranks

def cut_short(path):
    os.truncate(path, os.path.getsize(path) - 100)


@pytest.mark.parametrize("name, message", [
    ("model.safetensors", "model={}: its weights cannot be read: SafetensorError"),
    ("trainer/optimizer-00000.safetensors", "resume={}: its optimizer's state cannot be read"),
    ("trainer/state.json", "resume={}: its state cannot be read: JSONDecodeError")])
def test_a_damaged_checkpoint_is_named_and_without_it_the_one_before_is_taken(
        whole, folder, reward_file, tmp_path, name, message):
    newest = shutil.copytree(whole, tmp_path / "run") / "checkpoint-12"
    cut_short(newest / name)
    arguments = [*command("train_grpo.py", folder, tmp_path / "run", reward_file, resume="auto")[1:]]
    refused(arguments, message.format(newest), tmp_path, loads=name != "trainer/state.json")
    assert without_times(lines(tmp_path / "run")) == without_times(lines(whole))
    shutil.rmtree(newest)
    output = train(folder, tmp_path / "run", reward_file, resume="auto")
    assert f"resumes {tmp_path}/run/checkpoint-11\n" in output
    assert without_times(lines(tmp_path / "run")) == without_times(lines(whole))


def test_other_ranks_go_on(whole, folder, reward_file, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    output = train(folder, tmp_path / "run", reward_file, ranks=2, max_steps=14, resume="auto")
    assert f"resumes {tmp_path}/run/checkpoint-12\n" in output and len(lines(tmp_path / "run")) == 15
    alone = shutil.copytree(whole, tmp_path / "alone")
    train(folder, alone, reward_file, max_steps=14, resume="auto")
    policies = map(AutoModelForCausalLM.from_pretrained, (
        f"{whole}/checkpoint-12", tmp_path / "run" / "checkpoint-14", f"{alone}/checkpoint-14"))
    start, ours, theirs = (torch.cat([p.flatten() for p in policy.parameters()]) for policy in policies)
    # With Adam's moments, on either.
    assert (ours - theirs).norm() < 0.02 * (theirs - start).norm()


def test_the_best_checkpoint_stays(whole):
    scores = {line["step"]: line["eval/mean@1"] for line in lines(whole)[1:] if "eval/mean@1" in line}
    best = max(scores, key=lambda step: (scores[step], step))
    kept = [os.path.basename(path) for path in checkpoint.checkpoints(whole)]
    assert kept == [f"checkpoint-{step}" for step in sorted({best, 11, 12})]


def test_a_folder_has_one_run_at_a_time(tmp_path):
    """A second one waits for the end of the first, however that comes."""
    (tmp_path / "holds.py").write_text(
        "import time; from runtime import checkpoint; "
        f"checkpoint.lock({str(tmp_path / 'run')!r}); print('in', flush=True); time.sleep(600)")
    logs, said = [tmp_path / "log 0", tmp_path / "log 1"], lambda log: log.exists() and log.read_text()
    (holder,) = begin(logs[0], tmp_path / "holds.py")
    wait_for(lambda: said(logs[0]) == "in\n", holder)
    (waiter,) = begin(logs[1], tmp_path / "holds.py")
    wait_for(lambda: str(said(logs[1])).endswith("\n"), waiter)
    assert said(logs[1]).endswith("another run is writing there; waiting for its end\n") and holder.is_alive()
    holder.kill()
    wait_for(lambda: said(logs[1]).endswith("in\n"), waiter)
    waiter.kill()


# ---------------------------------------------------------------- files that changed in between

ROWS = [{"prompt": [{"role": "user", "content": f"{i}+{i}=?"}], "answer": str(2 * i)} for i in range(80)]


def test_other_prompts_under_the_same_name_are_refused(folder, reward_file, tmp_path):
    """A changed reward may have been mended."""
    def write(name, rows):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    write("train.jsonl", ROWS)
    write("eval.jsonl", ROWS[:8])
    shutil.copy(reward_file.removeprefix("--reward=").removesuffix(":score"), tmp_path / "rewards.py")
    template = tmp_path / "mine.jinja"
    template.write_text(pretrain.CHAT_TEMPLATE)
    settings = {"task": "file", "train_file": f"{tmp_path}/train.jsonl", "chat_template": template,
                "eval_file": f"{tmp_path}/eval.jsonl", "train_prompts": 0, "max_steps": 2}
    reward = f"--reward={tmp_path}/rewards.py:score"
    train(folder, tmp_path / "run", reward, **settings)
    go_on = command("train_grpo.py", folder, tmp_path / "run", reward, resume="auto",
                    **settings | {"max_steps": 3})
    write("train.jsonl", ROWS[:-1] + [ROWS[-1] | {"answer": "0"}])
    refused(go_on[1:], f"the train_prompts are not those of {tmp_path}/run/checkpoint-2", tmp_path)
    write("train.jsonl", ROWS)
    write("eval.jsonl", ROWS[1:9])
    refused(go_on[1:], "the eval_prompts are not those of", tmp_path)
    write("eval.jsonl", ROWS[:8])
    template.write_text("\n" + pretrain.CHAT_TEMPLATE)
    refused(go_on[1:], "the eval_prompts are not those of", tmp_path)
    template.write_text(pretrain.CHAT_TEMPLATE)
    with open(tmp_path / "rewards.py", "a") as file:
        file.write("# mended\n")
    # Other held-out prompts are no surprise where another number of them is asked for.
    output = train(folder, tmp_path / "run", reward, resume="auto",
                   **settings | {"max_steps": 3, "eval_prompts": 6})
    assert f"resumes {tmp_path}/run/checkpoint-2" in output


def test_a_resumed_run_may_take_larger_steps(whole, folder, reward_file, tmp_path):
    """It goes on behind the rows that it has drawn. Rollouts in a checkpoint are those of steps of the old size."""
    path = shutil.copytree(f"{whole}/checkpoint-12", tmp_path / "run" / "checkpoint-12")
    (tmp_path / "run" / ".lock").touch()
    larger = {"resume": "auto", "max_steps": 13, "prompts_per_step": 6, "num_generations": 2}
    save_file({"ids": torch.zeros(1)}, path / "trainer" / "arrays.safetensors")
    refused(command("train_grpo.py", folder, tmp_path / "run", reward_file, **larger)[1:],
            f"prompts_per_step=6, but {path} comes from a run with prompts_per_step=4", tmp_path)
    os.remove(path / "trainer" / "arrays.safetensors")
    output = train(folder, tmp_path / "run", reward_file, **larger)
    for text in ("prompts_per_step=6", "num_generations=2"):
        assert f"{text} is new: the run goes on behind the rows that it has drawn" in output
    state = json.loads((tmp_path / "run/checkpoint-13/trainer/state.json").read_text())
    assert state["position"] == 12 * 4 + 6


def test_state_that_the_script_would_lose(whole, folder, reward_file, tmp_path):
    path = shutil.copytree(f"{whole}/checkpoint-12", tmp_path / "run" / "checkpoint-12")
    (tmp_path / "run" / ".lock").touch()
    change_state(path, lambda state: state | {"extra": 1})
    refused(command("train_grpo.py", folder, tmp_path / "run", reward_file, resume="auto")[1:],
            "holds extra, which train_grpo.py would lose", tmp_path)


# ---------------------------------------------------------------- a full disk, gradients that are not finite

FULL_DISK = """
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (300 * 1024, 300 * 1024))
sys.argv[0] = "train_grpo.py"
runpy.run_path("train_grpo.py", run_name="__main__")
"""


def test_a_full_disk_during_a_save(whole, folder, reward_file, tmp_path):
    """No file may grow over 300 KiB from step 12 on, the model's is larger: a stand-in for a full disk."""
    shutil.copytree(whole, tmp_path / "run")
    go_on = command("train_grpo.py", folder, tmp_path / "run", reward_file, max_steps=15, resume="auto")
    (tmp_path / "full.py").write_text(FULL_DISK)
    output = forked(tmp_path / "log", tmp_path / "full.py", *go_on[1:], code=2)
    assert f"{tmp_path}/run/checkpoint-13 could not be saved, the older ones stand: " in output.splitlines()[-1]
    assert "FrameSummary" not in output
    assert not os.path.exists(tmp_path / "run" / "checkpoint.part")
    assert checkpoint.checkpoints(tmp_path / "run")[-1].endswith("checkpoint-12")
    # With space again, from the older checkpoint.
    forked(tmp_path / "log", *go_on)
    assert [line["step"] for line in lines(tmp_path / "run")] == list(range(16))


FULL_ON_ONE = """
import os, runpy, sys
from runtime import checkpoint
save = checkpoint.save_optimizer
def full(*arguments):
    if os.environ["RANK"] == "1":
        raise OSError(28, "No space left on device")
    save(*arguments)
checkpoint.save_optimizer = full
sys.argv[0] = "train_grpo.py"
runpy.run_path("train_grpo.py", run_name="__main__")
"""


def test_a_full_disk_of_one_rank_ends_all(folder, reward_file, tmp_path):
    """The others do not take the checkpoint for whole, and none waits."""
    (tmp_path / "full.py").write_text(FULL_ON_ONE)
    arguments = command("train_grpo.py", folder, tmp_path / "run", reward_file, save_interval=2)
    output = forked(tmp_path / "log", tmp_path / "full.py", *arguments[1:], ranks=2, code=2)
    assert "checkpoint-2 could not be saved, the older ones stand: OSError: [Errno 28] No space" in output
    assert not checkpoint.checkpoints(tmp_path / "run")


# ---------------------------------------------------------------- the cause comes last

def test_torchrun_ends_with_the_cause(tmp_path):
    """Of a refusal, with which every script may end."""
    (tmp_path / "refuses.py").write_text("import configurator\nconfigurator.check(False, 'max_steps=0')\n")
    output = launch(tmp_path / "refuses.py", launcher=(*TORCHRUN, "--nproc_per_node=1"), code=1,
                    env={"PYTHONPATH": ROOT})
    assert "traceback : refuses.py: max_steps=0" in output.splitlines()[-2]


def test_torchrun_gets_what_was_said_first_and_not_what_came_of_it(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "first"))
    tell_launcher("ValueError: the cause")
    tell_launcher("RuntimeError: another")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "second"))
    monkeypatch.setattr(sys, "__excepthook__", lambda *_: None)
    monkeypatch.setattr(distributed.atexit, "register", lambda *_: None)
    distributed.failed(RuntimeError, RuntimeError("[gloo/pair.cc:547] Connection closed by peer"), None)
    first, second = (json.loads((tmp_path / name).read_text())["message"] for name in ("first", "second"))
    assert first["message"] == "ValueError: the cause"
    assert int(second["extraInfo"]["timestamp"]) > int(first["extraInfo"]["timestamp"]) + 30


def test_an_error_is_the_last_that_a_run_says(folder, tmp_path):
    (tmp_path / "bad.py").write_text("calls = []\ndef score(completions, **_):\n    calls.append(1)\n"
                                     "    return [1 / (len(calls) < 3)] * len(completions)\n")
    output = launch(*command("train_grpo.py", folder, tmp_path / "run", f"--reward={tmp_path}/bad.py:score"),
                    code=1)
    assert "InputError: reward score raised ZeroDivisionError" in output.splitlines()[-1]


REWARDS = """
import itertools
calls = itertools.count()
def sometimes(prompts, completions, **_):
    scale = 1e38 if next(calls) in (5, 6) else 1.0
    return [scale * (i % 2) for i in range(len(completions))]
def always(prompts, completions, **_):
    return [1e38 * (i % 2) for i in range(len(completions))]
"""


def test_updates_that_are_not_finite_are_skipped_and_counted(folder, tmp_path):
    (tmp_path / "rewards.py").write_text(REWARDS)
    settings = {"advantage": "dr_grpo", "eval_interval": 100}
    train(folder, tmp_path / "run", f"--reward={tmp_path}/rewards.py:sometimes", **settings)
    skipped = [line["actor/skipped_updates"] for line in lines(tmp_path / "run")[:-1]]
    assert sum(skipped) == 2 and len(skipped) == 12
    output = train(folder, tmp_path / "always", f"--reward={tmp_path}/rewards.py:always", code=1,
                   **settings)
    assert "5 updates of the actor in a row were skipped" in output and len(lines(tmp_path / "always")) == 4


def test_a_full_disk_ends_the_run(mesh, tmp_path, capsys):
    """It says so; the line that was cut off is dropped when the run is resumed."""
    os.mkdir(tmp_path / "run")
    state = {"step": 0, "checksums": {}, "evaluated": {}, "eval_scores": {}}
    log = RunLog(str(tmp_path / "run"), __file__, {"max_steps": 3}, state)
    log.metrics["reward"] = 0.5
    log.write()
    full = resource.getrlimit(resource.RLIMIT_FSIZE)
    # The file ends in the middle of the next line.
    resource.setrlimit(resource.RLIMIT_FSIZE, (40, full[1]))
    try:
        log.start(1)
        log.metrics["reward"] = 0.25
        with pytest.raises(SystemExit), input_errors():
            log.write()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, full)
    said = capsys.readouterr().err
    assert f"out_dir={tmp_path}/run cannot be written: [Errno 27]" in said and "the checkpoints in it stand" in said
    assert [line["step"] for line in rewind(str(tmp_path / "run" / "metrics.jsonl"), 9)] == [0]


def test_the_thread_of_tensorboard_does_not_write_over_the_message(mesh, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)
    state = {"step": 0, "checksums": {}, "evaluated": {}, "eval_scores": {}}
    log = RunLog(str(tmp_path), __file__, {"max_steps": 3}, state)
    log.board.flush()
    (events,) = tmp_path.glob("events.out.*")
    events.unlink()
    events.mkdir()
    log.metrics["reward"] = 0.5
    with pytest.raises(SystemExit), input_errors():
        log.write()
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"out_dir={tmp_path} cannot be written: [Errno 21]" in said
    # Other threads are heard.
    thread = threading.Thread(target=failing)
    thread.start()
    thread.join()
    assert "ZeroDivisionError" in capsys.readouterr().err


def failing():
    return 1 / 0


# ---------------------------------------------------------------- the end of the script

AFTER = """
import atexit
from pathlib import Path
atexit.register(Path(f"{out_dir}/handler-{rank}").touch)
kept = open(f"{out_dir}/kept-{rank}", "w")
kept.write("not flushed")
run.end()
Path(f"{out_dir}/ranks-{rank}").write_text(str(distributed.gathered([rank])))
try:
    sys.exit(7)
except SystemExit:
    pass
"""


def test_a_script_goes_on_after_run_end(folder, reward_file, tmp_path):
    """Its lines run, ranks can talk, exit handlers are called, files are flushed, and its exit code is its own."""
    text = open(f"{ROOT}/train_sft.py").read().replace("run.end() ", f"{AFTER}sys.exit(3)\n#")
    script = tmp_path / "train_mine.py"
    script.write_text(text.replace("import math\n", "import math, sys\n", 1))
    arguments = command(str(script), folder, tmp_path / "run", "--reward=none", max_steps=1)
    arguments.remove("--num_generations=4")
    output = launch(*arguments, launcher=(*TORCHRUN, "--nproc_per_node=2"), code=1, env={"PYTHONPATH": ROOT})
    assert "exitcode  : 3 " in output
    for rank in range(2):
        assert (tmp_path / f"run/handler-{rank}").exists()
        assert (tmp_path / f"run/kept-{rank}").read_text() == "not flushed"
        assert (tmp_path / f"run/ranks-{rank}").read_text() == "[0, 1]"


def test_a_signal_after_run_end_ends_the_process(folder, reward_file, tmp_path):
    script = tmp_path / "train_mine.py"
    script.write_text(open(f"{ROOT}/train_sft.py").read() + "\nimport os, time\nos.kill(os.getpid(), 15)\ntime.sleep(99)\n")
    arguments = command(str(script), folder, tmp_path / "run", "--reward=none", max_steps=1)
    arguments.remove("--num_generations=4")
    assert "The run saves and stops" not in launch(*arguments, code=143, env={"PYTHONPATH": ROOT})


@pytest.mark.parametrize("last, code", [
    ("kept.close()", 0), ("raise SystemExit(4)", 4), ("sys.exit('no')", 1), ("1 / 0", 1), ("sys.exit()", 0),
    ("with kept:\n    exit(5)", 5), ("try:\n    sys.exit(6)\nexcept SystemExit:\n    pass", 0)])
def test_the_exit_code_is_that_of_the_script(tmp_path, last, code):
    (tmp_path / "script.py").write_text(
        "import atexit, sys\nfrom runtime import distributed\natexit.register(print, 'handler')\n"
        "distributed.set_up()\nkept = open('kept', 'w')\nkept.write('not flushed')\ndistributed.ending.begin()\n" + last)
    output = launch("script.py", code=code, cwd=tmp_path, env={"PYTHONPATH": ROOT})
    assert "handler" in output and (tmp_path / "kept").read_text() == "not flushed"
    assert ("ZeroDivisionError" in output) == ("1 / 0" in last)
