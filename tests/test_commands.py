"""The commands of README.md, CONTRIBUTING.md and docs/: what needs neither a network nor a GPU is played, in small, here or
by another test, which is named. What is not played has a reason, and its settings have to be accepted.
The commands that run a recipe are played by test_docs.py."""
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import configurator
import runs
from configurator import check_values, configure
from losses import CHOICES, RULES
from runs import RECIPES, ROOT, script_path
from test_configurator import defaults_of
from test_docs import BLOCKS, TEXTS, TINY, copy  # noqa: F401

with open(os.path.join(ROOT, "CONTRIBUTING.md")) as file:
    PAGES = {**TEXTS, **RECIPES, "CONTRIBUTING.md": file.read()}

# Commands are known by a text in them. These are played below, in this order, with the settings behind them, and then
# all others that have no reason not to be.
HF = "--engine=hf --eval_prompts=2 --max_completion_length=8"
PLAYED = {
    "--train_file=train.jsonl --eval_file=eval.jsonl": "",
    "--reward=my_rewards.py:brief --call_timeout=0": "",
    "guess.py --environment=my_game.py:Guess": "",
    "--engine=hf --environment=my_game.py:Guess": "",
    "train_grpo.py --lora_rank=8": "",
    "train_grpo.py --top_p=0.95": "",
    "train_ppo.py config/tasks/guess.py --max_steps=24": "--critic_warmup_steps=0",
    "train_async.py config/tasks/guess.py": "",
    "train_sft.py --task=file": "",
    "--model=out/warm/checkpoint-60": "",
    "--resume=RUN/checkpoint-40 --out_dir=out/same": "--max_steps=2",
    '--prompt="Solve 2(3(x+1)-4)=10"': HF,
    "bench.checksums": "--engine=hf --syncs=4",
    "bench.gather --completion_length=7800": "--tokens=40000 --completion_length=200 --repeats=1",
    "bench.save": "--steps=200 --repeats=1",
    "sums.py > sums.jsonl": "",
    "--train_file=sums.jsonl": ""}
# Why the others are not played here: the first pattern that is in a command holds for it.
REASONS = {
    r"pytest|ruff|tests/": "it is the suite, or what .ci/run adds to it",
    r"gsm8k|Qwen/|huggingface_hub|pip install|tensorboard": "it needs a network or a browser",
    r"my_agent": "test_agents.py plays the agents of the page",
    r"bench\.(apart|episodes|load|against_trl|answers|splits|step|unbiased|peers|hardware)": "a test runs it in small",
    r"--eval_prompts=0 --samples=8|'mean@8'": "test_first_run.py plays both",
    r"(report|evaluate_model)\.py \S+( out/run1 out/run2)?$": "test_report.py and test_evaluate.py play it",
    r"options\.merge_adapter|--lora_from": "test_one_card.py plays it",
    r"--save_rollouts": "test_run_log.py plays it",
    r"smollm2|out/teacher|warm0|leap_|other_years|\$\{run": "it needs a larger model than the repository has",
    r"config/|train_\w+\.py$|train_ppo\.py --seed": "test_recipes.py plays each script and each config",
    r"bench[./]|tiny\.pretrain": "it takes ten seconds to hours, and measures or makes what the repository has",
    r"--engine=vllm|--max_staleness=4|--dtype|--eval_interval=2|--max_steps=8|--prompts_per_step=16|--lora_rank=R|--optimizer=sgd":
        "it is a measurement, of settings that other tests play",
    "--rise_above|=spo|recipes/|train_muon": "it is of a recipe, which test_docs.py applies and runs, or test_recipes.py",
    r"--nproc_per_node=\d$|--shutdown_timeout=300$": "it is a part of a command"}
# A page's name for something, and what stands for it here
STANDS_FOR = {"out/smollm2": "tiny", "out/warm/checkpoint-60": "out/warm/checkpoint-1", " ...": "",
              "RUN/checkpoint-40": "RUN/checkpoint-1", "out/grpo-algebra-.../checkpoint-60": "RUN/checkpoint-1",
              "config/methods/NAME": "config/methods/rloo",
              "=NAME": "=turns", "=SEED": "=0", "_rank=R": "_rank=8", "seed=S": "seed=0"}


def commands():
    """Return all commands except those that run a recipe, which stand in no block."""
    every = []
    for text in PAGES.values():
        for language, block, inline in re.findall(r"^ *```(\w*)\n(.*?)^ *```$|`([^`]+)`", text, re.M | re.S):
            lines = [inline]
            if language:
                lines = block.replace("\\\n", " ").splitlines() * (language == "sh")
            for line in lines:
                line = re.sub(r"\s+", " ", line.partition("  #")[0]).strip()
                if re.match(r"(\./run |\w+=\S+ )*(torchrun|python|pytest|ruff|\S+/python) ", line):
                    every.append(line)
    return every


def parts(command):
    """Return a script, its arguments and the number of ranks; the script is empty if it has no settings."""
    for text, ours in STANDS_FOR.items():
        command = command.replace(text, ours)
    words = shlex.split(command.partition(" > ")[0])
    ranks = int("".join(re.findall(r"--nproc_per_node=(\d+)", command)) or 1)
    for number, word in enumerate(words):
        path = Path(ROOT, word.replace(".", "/") + ".py" if words[number - 1] == "-m" else word)
        if path.suffix == ".py" and path.exists() and "configure(globals()" in path.read_text():
            return str(path.relative_to(ROOT)), words[number + 1:], ranks
    return "", [], ranks


COMMANDS = commands()


def to_play():
    """Return {command: the settings that are put behind it}."""
    some = {next(command for command in COMMANDS if text in command): more for text, more in PLAYED.items()}
    others = [command for command in COMMANDS if not any(re.search(text, command) for text in REASONS)]
    return some | {command: "" for command in others if not any(text in command for text in PLAYED)}


def test_every_reason_is_that_of_a_command():
    for text in REASONS:
        assert any(re.search(text, command) for command in COMMANDS), text


def test_the_settings_of_every_command_are_accepted(monkeypatch):
    monkeypatch.setattr(configurator, "overridden", {})
    monkeypatch.chdir(ROOT)
    count = 0
    for command in COMMANDS:
        script, arguments, ranks = parts(command)
        if script and not re.search("--rise_above=|=spo", command):     # which a diff adds
            training = script.startswith(("train_", "evaluate_"))
            settings = configure(defaults_of(Path(ROOT, script_path(script))), arguments, choices=CHOICES if training else {},
                                 rules=RULES if training else ())
            count += 1
            if training:
                engines = getattr(settings, "rollout_ranks", 0)
                check_values(SimpleNamespace(**vars(settings), trainers=ranks - engines, samplers=engines or ranks,
                                             engines=engines or ranks))
    assert count > 60


def small(script):
    """Settings that make a run small, as far as the script has them."""
    known = defaults_of(Path(ROOT, script_path(script))).keys()
    return [one for one in [*TINY, "--save_interval=1", "--max_completion_length=24"]
            if one[2:].partition("=")[0] in known and "mini_batches" not in one]


def test_what_is_played(copy):  # noqa: F811
    shutil.copytree(os.path.join(ROOT, "bench"), copy / "bench")
    texts = {name: text for _, language, text in BLOCKS for name in re.findall("# (my_rewards.py)\n", text)}
    (copy / "my_rewards.py").write_text(texts["my_rewards.py"])
    (sums,) = [text for _, _, text in BLOCKS if text.startswith("# sums.py")]
    (copy / "sums.py").write_text(sums)
    (game,) = [text for _, _, text in BLOCKS if text.startswith("# my_game.py")]
    (copy / "my_game.py").write_text(game)
    (worked,) = [text for _, language, text in BLOCKS if language == "json" and '"completion"' in text]
    rows = [{"prompt": f"Solve x+{i}={2 * i}", "answer": str(i)} for i in range(16)]
    for name in ("train", "eval"):
        (copy / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in ("worked", "held_out"):
        (copy / f"{name}.jsonl").write_text("".join(worked.replace("17", str(i)) for i in range(16)))
    log = copy / "log"
    runs.forked(log, "train_grpo.py", *small("train_grpo.py"), "--out_dir=RUN", root=copy)
    for command, more in to_play().items():
        script, arguments, ranks = parts(command)
        if script.startswith("train_"):
            runs.forked(log, script, *arguments, *small(script), *more.split(), ranks=ranks, root=copy)
        elif script.startswith("bench/"):
            runs.forked(log, "-m", script[:-3].replace("/", "."), *arguments, *more.split(), root=copy)
        elif script == "evaluate_model.py":
            runs.forked(log, script, *arguments, *more.split(), root=copy)
        else:
            command = command.replace("python", sys.executable).replace("rows.jsonl", "train.jsonl")
            subprocess.run(["sh", "-c", command], cwd=copy, check=True)
