"""
How many tokens a method samples on config/tasks/compose.py until held-out mean@4 is 0.5, and until it is 0.8.

    python -m bench.record grpo --learning_rate=1e-3                # a name in bench/methods.py, and settings
    python -m bench.record train_mine.py --max_steps=320            # a script of your own

A record is that of five runs, with seeds 0 to 4, one after the other on one core. All settings are the
method's, except those in FIXED. Every tenth step is evaluated, and the tokens are those that were sampled
before the first evaluation that reached the figure. How fast the machine is changes nothing, and processors
of one family repeat a run bit for bit. So one command checks a claim: the SHA-256 is that of all figures of
the five runs except times and memory. recipes/README.md#records has the table.
"""
import hashlib
import json
import math
import os
import shutil
import statistics
import sys

from bench.methods import METHODS, RECIPE, SHARED, half_width, launch

WORK = "out/record"
SEEDS = range(5)
TARGETS = (0.5, 0.8)
FIXED = {"model": SHARED["model"], "task": SHARED["task"], "train_prompts": 0, "engine": SHARED["engine"],
         "max_completion_length": SHARED["max_completion_length"], "eval_prompts": SHARED["eval_prompts"],
         "eval_samples": 4, "eval_temperature": 1, "eval_top_p": 1, "eval_top_k": 0, "eval_min_p": 0,
         "eval_interval": 10, "save_interval": 0}


def command_of(method, settings):
    """Return the command of a method, a name in METHODS or a script, with these settings, but no seed."""
    command = METHODS.get(method, f"{method} {RECIPE}")
    fixed = [f"--{key}={value}" for key, value in FIXED.items()]
    return " ".join([command, *settings, *fixed])


def figures_of(folder):
    """Return the figures of each step of a run, as dicts, without times and memory."""
    steps = []
    with open(f"{folder}/metrics.jsonl") as file:
        for line in file:
            figures = json.loads(line)
            steps.append({key: value for key, value in figures.items()
                          if not key.startswith(("timing_s/", "perf/"))})
    return steps


def tokens_until(target, steps):
    """Return how many tokens were sampled before an evaluation first reached the target, or NaN if none did."""
    sampled = 0
    for figures in steps:
        if figures.get("eval/mean@4", 0.0) >= target:
            return sampled
        # A method may sample apart from its steps, and then logs these tokens under another prefix.
        sampled += sum(value for key, value in figures.items() if key.endswith("/sampled_tokens"))
    return math.nan


def row_of(name, runs):
    """Return a line of the table for runs, a list of what figures_of returns."""
    cells = []
    for target in TARGETS:
        tokens = [tokens_until(target, steps) for steps in runs]
        reached = [count for count in tokens if not math.isnan(count)]
        if len(reached) == len(runs):
            cells.append(f"{statistics.mean(tokens):,.0f} ± {half_width(tokens):,.0f}")
        else:
            cells.append(f"{len(reached)} of {len(runs)} seeds")
    digest = hashlib.sha256(json.dumps(runs, sort_keys=True).encode()).hexdigest()
    return f"| `{name}` | {' | '.join(cells)} | `{digest[:16]}` |"


def main(method, *settings):
    """Make the five runs of a method and print its line."""
    os.makedirs(WORK, exist_ok=True)
    command = command_of(method, settings)
    runs = []
    for seed in SEEDS:
        folder = f"{WORK}/{seed}"
        shutil.rmtree(folder, ignore_errors=True)
        launch(f"{command} --seed={seed} --out_dir={folder}", f"{folder}.log")
        runs.append(figures_of(folder))
        print(f"seed {seed}: {[tokens_until(target, runs[-1]) for target in TARGETS]} tokens", flush=True)
    print(row_of(" ".join([method, *settings]), runs))


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("python -m bench.record METHOD [--key=value ...]: METHOD is a script, or one of "
                 f"{', '.join(METHODS)}")
    main(*sys.argv[1:])
