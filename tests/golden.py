"""
Golden figures: the first steps of short runs, and what they were when somebody last meant to change them.

    python tests/golden.py                      # compares all runs, about a minute and a half on two cores
    python tests/golden.py grpo ppo             # compares these
    python tests/golden.py --write              # makes the figures anew; the commit says why

tests/golden/ has a file of metrics per run. On the kind of processor and with the packages of machine.json every
figure has to be equal, to the last bit. Elsewhere sums are rounded differently, so there figures may differ by
TOLERANCE, relative to the figure where it is above 1. A run in 16 bits, or of many steps, soon samples other
tokens for such a reason; there only the names of its figures are compared.
"""
import importlib.metadata
import json
import os
import sys
import tempfile
from pathlib import Path

# Before torch, as in conftest.py: sums of two threads are rounded differently.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["PYTHONWARNINGS"] = "ignore"             # of semaphores that runs leave to the end of the forkserver

import torch

from runs import forked, lines, without_times

FOLDER = Path(__file__).parent / "golden"
TOLERANCE = 1e-3
SHORT = ("--max_steps=3", "--eval_prompts=16", "--seed=0")
EPISODES = ("--model=tiny_episodes", "--num_generations=4", "--prompts_per_step=8", "--max_prompt_length=96")

# {name: (ranks, script, arguments)}
RUNS = {
    "grpo": (1, "train_grpo.py", ()),
    "grpo_hf": (1, "train_grpo.py", ("--engine=hf",)),
    "ppo": (1, "train_ppo.py", ("--critic_warmup_steps=1",)),
    "ppo_hf": (1, "train_ppo.py", ("--critic_warmup_steps=1", "--engine=hf")),
    "dapo": (1, "train_dapo.py", ()),
    "dapo_hf": (1, "train_dapo.py", ("--engine=hf",)),
    "async": (2, "train_async.py", ()),
    "async_hf": (2, "train_async.py", ("--engine=hf",)),
    "sft_hf": (1, "train_sft.py", ("--engine=hf",)),
    "updates": (1, "train_grpo.py", ("--num_mini_batches=4", "--kl_coef=0.01", "--entropy_coef=0.01")),
    "lora": (1, "train_grpo.py", ("--lora_rank=8",)),
    "bfloat16": (1, "train_grpo.py", ("--dtype=bfloat16",)),
    "two_ranks": (2, "train_grpo.py", ("--token_budget=1024",)),
    "environment": (1, "train_grpo.py", (
        "config/tasks/guess.py", *EPISODES, "--max_completion_length=192")),
    "images": (1, "train_grpo.py", ("config/tasks/squares.py",)),
    "agent": (1, "train_grpo.py", (
        *EPISODES, "--task=arithmetic", f"--agent={FOLDER / 'agent.py'}:solve", "--max_completion_length=96")),
}
ROUNDED = {"bfloat16"}          # runs whose figures are compared only on the same kind of machine


def machine():
    """What decides how sums are rounded, and which random numbers are drawn."""
    kind = {"torch instructions": torch.backends.cpu.get_cpu_capability()}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("vendor_id", "cpu family", "model"):
            kind[name.strip()] = value.strip()
    for package in ("torch", "transformers", "numpy", "vllm"):
        kind[package] = version(package)
    return kind


def version(package):
    # vLLM's build for CPUs is a package of another name.
    for name in (package, f"{package}-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def figures(name, folder):
    """Run a short run, and return its metrics, a dict per line, without times."""
    ranks, script, arguments = RUNS[name]
    out_dir = os.path.join(folder, name)
    forked(f"{out_dir}.log", script, *arguments, *SHORT, f"--out_dir={out_dir}", ranks=ranks)
    return without_times(lines(out_dir))


def equal(figure, golden, exact):
    if exact or not isinstance(figure, (int, float)):
        return figure == golden
    return abs(figure - golden) <= TOLERANCE * max(1, abs(golden))


def differences(name, metrics, exact):
    """Return a line for each figure that is not as it was."""
    golden = [json.loads(line) for line in (FOLDER / f"{name}.jsonl").read_text().splitlines()]
    if len(metrics) != len(golden):
        return [f"{len(metrics)} lines of metrics, and {len(golden)} before"]
    problems = []
    for now, before in zip(metrics, golden):
        for key in sorted(now.keys() ^ before.keys()):
            problems.append(f"step {before['step']}  {key} is {'new' if key in now else 'gone'}")
        if name in ROUNDED and not exact:
            continue
        for key in now.keys() & before.keys():
            if not equal(now[key], before[key], exact):
                problems.append(f"step {before['step']}  {key}  {now[key]!r}, and {before[key]!r} before")
    return problems


def main(arguments):
    write = "--write" in arguments
    names = [name for name in arguments if name != "--write"] or [*RUNS]
    here = json.dumps(machine(), indent=1) + "\n"
    record = FOLDER / "machine.json"
    exact = not write and record.read_text() == here
    if write and names != [*RUNS] and record.read_text() != here:
        sys.exit("this is another kind of machine than that of the other runs' figures: make all of them anew")
    if not write:
        print("every figure has to be equal" if exact else
              f"another kind of machine: figures may differ by {TOLERANCE:g}", flush=True)
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            metrics = figures(name, folder)
            if write:
                record.write_text(here)
                text = "".join(json.dumps(line) + "\n" for line in metrics)
                (FOLDER / f"{name}.jsonl").write_text(text)
                continue
            problems = differences(name, metrics, exact)
            print(f"{name}: {len(problems) or 'no'} differences", *problems[:10], sep="\n    ", flush=True)
            if problems:
                failed.append(name)
    if failed:
        sys.exit(f"figures of {', '.join(failed)} are not as they were. If that is meant, run "
                 "`python tests/golden.py --write`, and say why in the commit.")


if __name__ == "__main__":
    main(sys.argv[1:])
