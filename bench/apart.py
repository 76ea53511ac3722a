"""
Seconds per step of train_async.py, one trainer and one engine, and of train_grpo.py on the same two ranks.

    python -m bench.apart                                       # all workloads, three runs of each in turns
    python -m bench.apart --workloads=skewed --runs=1

default         the default run
skewed          completions of 12 tokens, and one in eight of 192: the length is drawn, no token ends one earlier
environment     episodes of three turns, each answered after 0.2 seconds, by 32 threads in all

Each workload runs with train_grpo.py, and with train_async.py at max_staleness=1 and at 2 in flight. The
seconds are the mean over the steps from the fourth on, without evaluations.
"""
import json
import os
import runpy
import subprocess
import sys
import tempfile
import time
import zlib

import numpy as np

from configurator import check, configure
# ------------------------------------------------------------------------------------------------------------
workloads = "default,skewed,environment"
steps = 24                      # of each run
runs = 3                        # of each workload and way, in turns; the table has their medians
# ------------------------------------------------------------------------------------------------------------
COMMON = ["--eval_interval=1000", "--eval_prompts=8", "--eval_samples=1", "--save_interval=1000"]
WORKLOADS = {
    "default": [],
    "skewed": ["--prompts_per_step=16", "--max_completion_length=192", f"--reward={__file__}:even_letters"],
    "environment": ["--prompts_per_step=16", f"--environment={__file__}:Slow", "--max_prompt_length=96",
                    "--max_completion_length=160", "--call_workers=WORKERS"]}
WAYS = {"train_grpo.py": ["train_grpo.py"],
        "max_staleness=1": ["train_async.py", "--max_staleness=1"],
        "2, in flight": ["train_async.py", "--max_staleness=2", "--in_flight=true"]}


def even_letters(prompts, completions, **_):
    """A reward that varies whatever is sampled."""
    return [sum(ord(c) % 2 == 0 for c in m[0]["content"]) / len(m[0]["content"] or "-") for m in completions]


class Slow:
    """An environment that takes its time."""
    def reset(self, **row):
        self.turns = 0

    def step(self, text):
        time.sleep(0.2)
        self.turns += 1
        return "Go on.", sum(ord(c) % 2 == 0 for c in text) / len(text or "-"), self.turns == 3


def run_with_drawn_lengths():
    """In a process of torchrun: the script named on the command line, whose engine draws the lengths."""
    import rollout
    from runtime import model_folder
    add = rollout.Engine.add

    def add_drawn(engine, request):
        drawn = 192 if zlib.crc32(str(request.seed).encode()) % 8 == 0 else 12
        add(engine, request._replace(max_tokens=min(drawn, request.max_tokens)))

    rollout.Engine.add = add_drawn
    model_folder.end_tokens = lambda *_: [1]                    # a byte that no text has
    del sys.argv[0]
    sys.path.insert(0, os.getcwd())
    runpy.run_path(sys.argv[0], run_name="__main__")


def seconds_per_step(workload, way, folder):
    script, *arguments = WAYS[way]
    workers = "16" if script == "train_grpo.py" else "32"       # two ranks play, or one
    arguments += [argument.replace("WORKERS", workers) for argument in WORKLOADS[workload]]
    command = ["-m", "bench.apart", script] if workload == "skewed" else [script]
    subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
                    *command, *COMMON, *arguments, f"--max_steps={steps}", f"--out_dir={folder}"],
                   env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True, capture_output=True)
    with open(f"{folder}/metrics.jsonl") as file:
        lines = [json.loads(line) for line in file]
    lines = [line for line in lines if 3 <= line["step"] < steps]
    return np.mean([line["timing_s/step"] for line in lines])


def main():
    chosen = workloads.split(",")
    check(set(chosen) <= WORKLOADS.keys(), f"workloads={workloads}: choose from {', '.join(WORKLOADS)}")
    check(steps > 4, f"steps={steps}: the first three do not count, so take at least five")
    found = {(workload, way): [] for workload in chosen for way in WAYS}
    for run in range(runs):
        for workload, way in found:
            with tempfile.TemporaryDirectory() as folder:
                found[workload, way].append(seconds_per_step(workload, way, f"{folder}/run"))
            print(f"run {run}, {workload}, {way}: {found[workload, way][-1]:.2f} s", flush=True)
    print(f"\n{'seconds per step':20}" + "".join(f"{way:>18}" for way in WAYS))
    for workload in chosen:
        medians = [np.median(found[workload, way]) for way in WAYS]
        print(f"{workload:20}" + "".join(f"{one:11.2f} ({medians[0] / one:.2f}x)" for one in medians))


if __name__ == "__main__":
    if "RANK" in os.environ:
        run_with_drawn_lengths()
    else:
        configure(globals())
        main()
