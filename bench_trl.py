"""
The same work here and under TRL's GRPOTrainer, in alternating pairs. TRL has an environment of its own:

    python -m venv out/trl && out/trl/bin/pip install torch==2.13.0 transformers==5.19.0 trl==1.16.0
    python bench_trl.py --trl=out/trl/bin/python

The update is bench.py's: TRL gets model and rollouts from it (by rollout_func), so both train on the same
tokens, and it counts from having scored them until the optimizer has stepped. The whole step is that of
train_grpo.py with --engine=hf, generation and reward included: model, problems, batch, sampling and optimizer
are the same, TRL generates by itself. Figures are medians over the pairs.
"""
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time

from configurator import configure
# ------------------------------------------------------------------------------------------------------------
trl = "out/trl/bin/python"      # the interpreter that has TRL
only = ""                       # a word in the name of the cases to run; empty: all
pairs = 5
# of a run under TRL, which this script starts itself
work = ""                       # a folder of bench.py's, or that of the model to generate with
micro_batch = 64                # sequences that it trains on at a time
repeats = 5                     # steps, after one that is left out
# ------------------------------------------------------------------------------------------------------------
configure(globals())
CASES = {  # name: arguments of bench.py, repeats
    "update": ([], 5),
    "update, lengths 512 and seven of 32": (["--lengths=skewed", "--completion_length=512"], 5),
    "update, vocabulary 151,936": (["--vocab_size=151936"], 1)}
WHOLE = ["--engine=hf", "--max_steps=10", "--eval_prompts=1", "--eval_samples=1"]


def run_under_trl():
    """Train under TRL and print the figures: update (s), peak memory (GB); for each step its seconds."""
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    import data
    import rewards
    import tiny
    replayed = os.path.exists(f"{work}/rollouts.json")
    times, began = [], [time.perf_counter()]

    class Trainer(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            result = super()._generate_and_score_completions(inputs)
            if replayed:
                began[0] = time.perf_counter()
            return result

    class Clock(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            times.append(time.perf_counter() - began[0])
            began[0] = time.perf_counter()
            print("step", flush=True)

    if replayed:
        with open(f"{work}/rollouts.json") as file:
            rollouts = json.load(file)
        rows = [{"prompt": str(i)} for i in range(len(rollouts))]
        settings = {"num_generations": 8, "gradient_accumulation_steps": len(rollouts) // micro_batch,
                    "max_completion_length": max(len(r["completion_ids"]) for r in rollouts)}
        tokenizer, reward = tiny.make_tokenizer(), lambda completions, **_: torch.randn(len(completions)).tolist()
        source = {"rollout_func": lambda prompts, trainer: {
            "prompt_ids": [r["prompt_ids"] for r in rollouts],
            "completion_ids": [r["completion_ids"] for r in rollouts],
            "logprobs": [[-1.0] * len(r["completion_ids"]) for r in rollouts]}}
    else:
        rows = data.load_rows("algebra", "train", 4096, 0, 1)
        settings = {"num_generations": 8, "gradient_accumulation_steps": 256 // micro_batch,
                    "max_completion_length": 64, "learning_rate": 1e-4, "warmup_steps": 5, "adam_beta2": 0.95}
        tokenizer, reward, source = AutoTokenizer.from_pretrained(work), rewards.load_reward("", "algebra"), {}
    with tempfile.TemporaryDirectory() as out:
        Trainer(work if not replayed else f"{work}/model", reward, train_dataset=Dataset.from_list(rows),
                processing_class=tokenizer, callbacks=[Clock()], **source,
                args=GRPOConfig(out, max_steps=repeats + 1, per_device_train_batch_size=micro_batch, beta=0.0,
                                loss_type="dapo", gradient_checkpointing=False, bf16=False, use_cpu=True,
                                report_to=[], save_strategy="no", logging_steps=1000, disable_tqdm=True,
                                model_init_kwargs={"dtype": "float32"}, **settings)).train()
    print(json.dumps({"s": statistics.median(times[1:]),
                      "GB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9}))


def started(command, sign):
    """(its last line as JSON, or None; seconds from its launch to the first line that has the sign)."""
    launch, first, last = time.perf_counter(), None, ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        for line in process.stdout:
            first = first or (time.perf_counter() - launch if sign in line else None)
            last = line
    if process.returncode:
        sys.exit(f"{' '.join(command)}: exit code {process.returncode}")
    return json.loads(last) if last.startswith("{") else None, first


def compare(name, unit, ours, theirs):
    ours, theirs = statistics.median(ours), statistics.median(theirs)
    print(f"{name:48} {ours:8.3f} {unit:3} {theirs:8.3f} {unit:3} {theirs / ours:6.2f}x", flush=True)


if work:
    run_under_trl()
    sys.exit()
print(f"{'':48} {'here':>12} {'TRL':>12}   ratio")
for name, (arguments, steps) in CASES.items():
    if only in name:
        with tempfile.TemporaryDirectory() as folder:
            results = [(started([sys.executable, "bench.py", f"--work={folder}", f"--repeats={steps}",
                                 "--json=true", *arguments], "{")[0],
                        started([trl, "bench_trl.py", f"--work={folder}", f"--repeats={steps}"], "step")[0])
                       for _ in range(pairs)]
        compare(name, "s", *zip(*((ours["update (s)"], theirs["s"]) for ours, theirs in results)))
        compare(name + ": peak memory", "GB",
                *zip(*((ours["peak memory (GB)"], theirs["GB"]) for ours, theirs in results)))
if only in "whole step, launch to the first":
    steps, launches = [], []
    for _ in range(pairs):
        with tempfile.TemporaryDirectory() as folder:
            _, here = started([sys.executable, "train_grpo.py", *WHOLE, f"--out_dir={folder}/run"], "| reward")
            with open(f"{folder}/run/metrics.jsonl") as file:
                seconds = [json.loads(line).get("timing_s/step") for line in file][1:-1]
        theirs, there = started([trl, "bench_trl.py", "--work=out/tiny", "--repeats=9"], "step")
        steps.append((statistics.median(seconds), theirs["s"]))
        launches.append((here, there))
    compare("whole step", "s", *zip(*steps))
    compare("launch to the end of the first step", "s", *zip(*launches))
