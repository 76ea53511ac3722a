"""
The same work here and under TRL's GRPOTrainer, in alternating pairs. TRL has an environment of its own:

    python -m venv out/trl && out/trl/bin/pip install torch==2.13.0 transformers==5.19.0 trl==1.16.0
    python -m bench.against_trl                                                              # half an hour

The update is bench/step.py's. TRL gets its model and rollouts (by rollout_func), so both train on the same
tokens; it is timed from the moment they are scored until the optimizer has stepped. "Unshared" is the update
here with the prompt computed for each of its eight completions, as TRL does. The whole step is
train_grpo.py's with --engine=hf, generation and reward included. Model, problems, batch and optimizer are the
same; TRL generates with its own code, and train_grpo.py skips completions whose advantage is 0. The line on
worked answers is train_sft.py beside SFTTrainer: ten steps of 32 rows, whose losses are printed as well.
Figures are medians over the pairs. TRL is used as it comes: on a CPU without its Triton kernel for the
logprobs, which CUDA machines have. On a GPU both compute in bfloat16 from float32 weights, and Qwen3-0.6B's
shape is one more line.
"""
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

import torch

from configurator import check, configure
# ------------------------------------------------------------------------------------------------------------
trl = "out/trl/bin/python"      # the interpreter that has TRL
only = ""                       # a word in the name of the lines to measure; empty: all
pairs = 5
# of the runs under TRL, which this script starts itself
work = ""                       # a folder that bench/step.py left, or a model's to generate with
micro_batch = 64                # sequences TRL trains on at a time
repeats = 5                     # steps, after one that is left out
# ------------------------------------------------------------------------------------------------------------
configure(globals())


# ---------------------------------------------------------------- under TRL
def run_under_trl():
    """GRPOTrainer on bench/step.py's rollouts or algebra problems; prints a line per step, then results."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from tasks.generate_problems import generated_rows
    import rewards
    from tiny import pretrain
    given, cuda = os.path.exists(f"{work}/rollouts.json"), torch.cuda.is_available()
    settings = {"num_generations": 8, "per_device_train_batch_size": micro_batch, "beta": 0.0,
                "loss_type": "dapo", "gradient_checkpointing": False, "bf16": cuda, "use_cpu": not cuda,
                "model_init_kwargs": {"dtype": "float32"}, "max_steps": repeats + 1, "report_to": [],
                "save_strategy": "no", "logging_steps": 1000, "disable_tqdm": True}
    if given:
        with open(f"{work}/rollouts.json") as file:
            rollouts = json.load(file)
        column = lambda name: [r[name] for r in rollouts]
        generation = {"rollout_func": lambda prompts, trainer: {
            name: column(name) for name in ("prompt_ids", "completion_ids", "logprobs")}}
        settings |= {"gradient_accumulation_steps": len(rollouts) // micro_batch,
                     "max_completion_length": max(map(len, column("completion_ids")))}
        model, tokenizer = f"{work}/model", pretrain.make_tokenizer()
        rows = [{"prompt": str(i)} for i in range(len(rollouts))]
        reward = lambda completions, **_: torch.randn(len(completions)).tolist()
    else:
        generation = {}
        settings |= {"gradient_accumulation_steps": 256 // micro_batch, "max_completion_length": 64,
                     "learning_rate": 1e-4, "warmup_steps": 5, "adam_beta2": 0.95}
        model, tokenizer = work, AutoTokenizer.from_pretrained(work)
        rows = [row for _, row in generated_rows("algebra", "train", 4096)]
        reward = rewards.accuracy
    times, began = [], [0.0]

    def now():
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    class Trainer(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            result = super()._generate_and_score_completions(inputs)
            if given:
                began[0] = now()
            return result

    class Clock(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            times.append(now() - began[0])
            began[0] = now()
            print("step", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        Trainer(model, reward, GRPOConfig(folder, **settings), train_dataset=Dataset.from_list(rows),
                processing_class=tokenizer, callbacks=[Clock()], **generation).train()
    peak = (torch.cuda.max_memory_allocated() if cuda else
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    print(json.dumps({"s": statistics.median(times[1:]), "GB": peak / 1e9}))


def run_sft_under_trl():
    """SFTTrainer on the rows of train.jsonl in the folder `work`, which are in the order of the steps."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer
    with open(f"{work}/train.jsonl") as file:
        rows = [json.loads(line) for line in file]
    times, losses = [], []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_, **__):
            self.began = time.perf_counter()

        def on_step_end(self, *_, **__):
            times.append(time.perf_counter() - self.began)

        def on_log(self, args, state, control, logs, **_):
            if "loss" in logs:
                losses.append(float(logs["loss"]))

    with tempfile.TemporaryDirectory() as folder:
        settings = SFTConfig(
            folder, per_device_train_batch_size=32, learning_rate=1e-4, lr_scheduler_type="constant", adam_beta2=0.95,
            max_steps=len(rows) // 32, logging_steps=1, train_sampling_strategy="sequential", report_to=[],
            save_strategy="no", disable_tqdm=True, use_cpu=True, bf16=False, gradient_checkpointing=False,
            model_init_kwargs={"dtype": "float32"})
        columns = [{key: row[key] for key in ("prompt", "completion")} for row in rows]
        SFTTrainer("tiny/algebra", settings, train_dataset=Dataset.from_list(columns), callbacks=[Clock()]).train()
    print(json.dumps({"s": statistics.median(times[1:]), "losses": losses,
                      "GB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9}))


if work:
    run_sft_under_trl() if os.path.exists(f"{work}/train.jsonl") else run_under_trl()
    sys.exit()


# ---------------------------------------------------------------- side by side
def run(sign, *command):
    """Run it: seconds from the launch to the first line with the sign in it, and its last line."""
    launch, seen, line = time.perf_counter(), None, ""
    with (tempfile.TemporaryFile("w+") as errors,
          subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process):
        for line in process.stdout:
            if sign in line and seen is None:
                seen = time.perf_counter() - launch
        if process.wait():
            errors.seek(0)
            sys.exit(f"{errors.read()[-3000:]}\n{' '.join(command)}: exit code {process.returncode}")
    return seen, line


def compare(name, unit, *figures):
    here, *others = map(statistics.median, figures)
    print(f"{name:48} {here:8.3f} {unit:2}" + "".join(
        f" {other:8.3f} {unit:2} {other / here:6.2f}x" for other in others), flush=True)


has_trl = "import importlib.util; assert importlib.util.find_spec('trl')"
check(shutil.which(trl) and not subprocess.run([trl, "-c", has_trl], stderr=subprocess.DEVNULL).returncode,
      f"trl={trl}: no interpreter that has TRL")
print(f"{'':48} {'here':>11} {'TRL':>11}   ratio {'unshared':>11}   ratio")
# size: the sequences at a time that TRL is fastest with, of 8, 16 and 64; a guess for the last one
for name, steps, size, *arguments in (
        ("update, completions of 1 to 64 tokens", 5, 64),
        ("update, every eighth 512 tokens, others 32", 5, 8, "--lengths=skewed", "--completion_length=512"),
        ("update, prompts of 512 tokens", 3, 16, "--prompt_length=512"),
        ("update, vocabulary 151,936", 1, 64, "--vocab_size=151936"),
        ("update, Qwen3-0.6B's shape", 3, 8, "--vocab_size=151936", "--hidden_size=1024", "--num_layers=28",
         "--num_heads=16", "--head_dim=128", "--completion_length=1024", "--token_budget=16384")):
    if only in name and (torch.cuda.is_available() or "Qwen3" not in name):
        ours, unshared, theirs = [], [], []
        for _ in range(pairs):
            with tempfile.TemporaryDirectory() as folder:
                same = f"--work={folder}", f"--repeats={steps}"
                here = (sys.executable, "-m", "bench.step", "--json=true", *arguments)
                for figures, command in ((ours, here), (unshared, (*here, "--shared=false")),
                                         (theirs, (trl, "-m", "bench.against_trl", f"--micro_batch={size}"))):
                    figures.append(json.loads(run("", *command, *same)[1]))
        column = lambda key, all_figures: [figures[key] for figures in all_figures]
        compare(name, "s", column("update (s)", ours), column("s", theirs), column("update (s)", unshared))
        compare("    its peak memory", "GB", column("peak memory (GB)", ours), column("GB", theirs),
                column("peak memory (GB)", unshared))
if only in "whole step, launch":
    ours, theirs, launch_here, launch_there = [], [], [], []
    for _ in range(pairs):
        with tempfile.TemporaryDirectory() as folder:
            seconds, _ = run("  grad ", sys.executable, "-u", "train_grpo.py", f"--out_dir={folder}/run",
                             "--engine=hf", "--max_steps=10", "--eval_prompts=1", "--eval_samples=1",
                             "--skip_zero_advantage=true")
            launch_here.append(seconds)
            with open(f"{folder}/run/metrics.jsonl") as file:
                ours.append(statistics.median(json.loads(line)["timing_s/step"] for line in list(file)[1:10]))
        seconds, figures = run("step", trl, "-m", "bench.against_trl", "--work=tiny/algebra", "--repeats=9")
        launch_there.append(seconds)
        theirs.append(json.loads(figures)["s"])
    compare("whole step", "s", ours, theirs)
    compare("launch to the end of the first step", "s", launch_here, launch_there)
if only in "worked answers, 32 rows":
    import data                                                 # not under TRL
    from tasks.generate_problems import generated_rows
    ours, theirs = [], []
    for _ in range(pairs):
        with tempfile.TemporaryDirectory() as folder:
            rows = []
            for _, row in generated_rows("algebra", "train", 320):
                row["completion"] = [{"role": "assistant", "content": row["solution"]}]
                rows.append(json.dumps(row) + "\n")
            for name, numbers in (("rows", range(320)), ("train", data.epoch_order(320, 0, 0))):
                with open(f"{folder}/{name}.jsonl", "w") as file:
                    file.writelines(rows[number] for number in numbers)
            run("", sys.executable, "train_sft.py", f"--out_dir={folder}/run", "--task=file", "--reward=none",
                f"--train_file={folder}/rows.jsonl", f"--eval_file={folder}/rows.jsonl", "--eval_prompts=1",
                "--max_steps=10", "--lr_decay=constant", "--warmup_steps=0", "--save_interval=0")
            with open(f"{folder}/run/metrics.jsonl") as file:
                steps = [json.loads(line) for line in file][:10]
            ours.append({"losses": [step["token_loss"] for step in steps],
                         "s": statistics.median(step["timing_s/update_actor"] for step in steps[1:]),
                         "GB": steps[-1]["perf/max_memory_allocated_gb"]})
            theirs.append(json.loads(run("", trl, "-m", "bench.against_trl", f"--work={folder}")[1]))
    for key, unit, name in (("s", "s", "worked answers, 32 rows"), ("GB", "GB", "    its peak memory")):
        compare(name, unit, *([figures[key] for figures in side] for side in (ours, theirs)))
    for name, side in (("here", ours), ("TRL", theirs)):
        print(f"    losses {name:5}", *(f"{loss:.5f}" for loss in side[0]["losses"]))
