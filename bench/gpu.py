"""
All that needs a GPU to be tested or measured, each part under its command.

    python -m bench.gpu                                      # all parts
    python -m bench.gpu --parts=default,speed                # some

    tests       tests/test_cuda.py
    default     train_grpo.py and train_ppo.py on the tiny model
    speed       updates of Qwen3-0.6B's shape: long sequences, shared prompts, memory, the attention kernel
    faster      the same update with compiled layers, and in the ways of bench/faster.py
    rollouts    sampling and weight sync of that shape, short and long
    colocation  memory and time of vLLM's sleep, over many cycles of rollout, update and sync
    smollm2     SmolLM2-135M-Instruct learns sums (bench/smollm2.py says which packages it needs)
    episodes    train_grpo.py on a game of many turns and on problems with a tool
    apart       train_async.py, with its trainer and its engine on this one GPU
    trl         bench/against_trl.py's update of Qwen3-0.6B's shape
    base        a larger base model, made with tiny/pretrain.py
    larger      GRPO of that base, and the result sampled anew

The order is that of their worth. Each figure is printed as soon as it is known, so a run that is cut off has
lost nothing else. What fails is named at the end, and does not keep the rest from running.
"""
import json
import os
import statistics
import subprocess
import sys
import time

import torch

from configurator import check, configure
# ------------------------------------------------------------------------------------------------------------
parts = "tests,default,speed,faster,rollouts,colocation,smollm2,episodes,apart,trl,base,larger"
out_dir = "out/gpu"             # of runs and logs; those of the same parts must not be there yet
# of colocation, speed and rollouts
shape = "--hidden_size=1024 --num_layers=28 --num_heads=16 --head_dim=128 --vocab_size=151936"  # Qwen3-0.6B's
token_budget = 16384
length = 1024                   # tokens of a sequence; in speed also 4 and 16 times as many
sequences = 128                 # of that length; in speed also four times as many, for the memory
cycles = 22                     # of colocation
# of base, larger and trl
base = ("--difficulty=3 --train_prompts=50000 --harder_prompts=50000 --layers=8 --hidden_size=512 "
        "--intermediate_size=1536 --steps=4000 --batch_size=256")          # settings for tiny/pretrain.py
larger = "config/tasks/larger.py"  # settings for train_grpo.py
trl = "out/trl/bin/python"      # the interpreter that has TRL
# ------------------------------------------------------------------------------------------------------------
names = parts.split(",")        # all of them, until the command line chooses
configure(globals())
chosen = parts.split(",")
check(set(chosen) <= set(names), f"parts={parts}: choose from {', '.join(names)}")
check(torch.cuda.is_available() or set(chosen) <= {"base", "larger"}, f"parts={parts}: here is no GPU")
os.makedirs(out_dir, exist_ok=True)
failed = []
env = os.environ | {"PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"}      # for torchrun


def call(name, command):
    """Run a command with its output in out_dir/name.log; (what it printed, seconds), or None if it failed."""
    print(f"\n{time.strftime('%X')} $ {command}", flush=True)
    path, started = os.path.join(out_dir, f"{name}.log"), time.perf_counter()
    with open(path, "w") as log:
        code = subprocess.run(command, shell=True, stdout=log, stderr=subprocess.STDOUT, env=env).returncode
    seconds = time.perf_counter() - started
    with open(path) as log:
        output = log.read()
    if code:
        failed.append(name)
        print(f"  exit code {code} after {seconds:.0f} s:", *output.splitlines()[-40:], sep="\n  ")
        return None
    return output, seconds


def train(name, command):
    """A training run: its evaluations, its time, and the gap between trainer and engine."""
    folder = os.path.join(out_dir, name)
    if (done := call(name, f"{command} --out_dir={folder}")) is None:
        return None
    with open(os.path.join(folder, "metrics.jsonl")) as file:
        lines = [json.loads(line) for line in file]
    evaluations = [line for line in lines if any(key.startswith("eval/mean@") for key in line)]
    for key in evaluations[0]:
        if key.startswith("eval/") and key.count("/") == 1:
            print(f"  {key}: " + ", ".join(f"{line[key]:.3f}" for line in evaluations))
    steps = [line for line in lines if "loss" in line]
    gap = lambda line: " ".join(f"{line[f'sampling/sampling_logp_difference/{part}']:.1e}"
                                for part in ("mean", "p99", "max"))
    worst = max(steps, key=lambda line: line["sampling/sampling_logp_difference/mean"])
    middle = {key: statistics.median(line[key] for line in steps if key in line) for key in steps[0]}
    print(f"  {done[1]:.0f} s in all; a step {middle['timing_s/step']:.2f} s: " + ", ".join(
        f"{key.removeprefix('timing_s/')} {middle[key]:.3f}" for key in middle
        if key.startswith("timing_s/") and key.rpartition("/")[2] not in ("step", "eval", "save")))
    with open(os.path.join(folder, "config.json")) as file:
        settings = json.load(file)
    tokens = settings["prompts_per_step"] * settings["num_generations"] * middle["completions/mean_length"]
    took = {"sampled": middle.get("timing_s/gen"), "trained": middle.get("timing_s/update_actor")}
    print("  tokens a second: " + ", ".join(
        f"{word} {tokens / seconds:,.0f}" for word, seconds in took.items() if seconds))
    print(f"  logprob gap (mean, p99, max): step 0 {gap(steps[0])}; medians {gap(middle)}; largest mean, "
          f"at step {worst['step']}, {gap(worst)}\n  effective sample size at least "
          f"{min(line['sampling/effective_sample_size'] for line in steps):.4f}", flush=True)
    return folder


def bench(name, arguments):
    """bench/step.py's figures, on this shape; the first makes the model, in out_dir/shape."""
    made = os.path.join(out_dir, "shape", "model")
    arguments += f" --model={made}" if os.path.isdir(made) else f" {shape} --work={out_dir}/shape"
    command = f"{sys.executable} -m bench.step --token_budget={token_budget} --json=true {arguments}"
    if done := call(name, command):
        figures = next(json.loads(line) for line in done[0].splitlines() if line.startswith("{"))
        print(*(f"  {key:34} {value:12.4g}" for key, value in figures.items()), sep="\n", flush=True)


# ---------------------------------------------------------------- the parts
if "tests" in chosen and (done := call("tests", f"{sys.executable} -m pytest -rs tests/test_cuda.py")):
    print(" ", done[0].splitlines()[-1])
small = "--vllm_gpu_memory_utilization=0.05"        # vLLM visits every block of it in each step
if "default" in chosen:
    train("grpo", f"torchrun train_grpo.py {small}")
    train("ppo", f"torchrun train_ppo.py {small}")
work = lambda tokens, count: f"--sequences={count} --prompt_length=40 --completion_length={tokens - 40}"
equal = f"--lengths=equal {work(length, sequences)}"
if "speed" in chosen:
    for times in (1, 4, 16):
        bench(f"length_{times * length}", f"--lengths=equal {work(times * length, sequences // times)}")
    half = f"--sequences={sequences} --prompt_length={length // 2} --completion_length={length // 2}"
    bench("shared", half)
    bench("unshared", f"--shared=false {half}")
    bench("loop", f"--kernel=false {equal}")
    bench("four_times", f"--repeats=2 --lengths=equal {work(length, 4 * sequences)}")
    bench("checkpointing", f"--gradient_checkpointing=true --repeats=2 {equal}")
if "faster" in chosen:
    bench("compiled", f"--torch_compile=true {equal}")
    bench("head", f"--faster=head {equal}")
    bench("compiled_head", f"--torch_compile=true --faster=head {equal}")
    bench("host", f"--faster=host {equal}")
    bench("compiled_16384", f"--torch_compile=true --lengths=equal {work(16 * length, sequences // 16)}")
if "rollouts" in chosen:
    bench("rollouts_300", f"--engine=vllm --repeats=2 --lengths=equal {work(560, 256)}")
    bench("rollouts", f"--engine=vllm {equal}")
if "colocation" in chosen:
    bench("colocation", f"--engine=vllm --sequences=32 --completion_length=128 --cycles={cycles}")
if "smollm2" in chosen and call("smollm2", f"{sys.executable} -m bench.smollm2 {out_dir}/smollm2"):
    train("sums", f"torchrun train_grpo.py config/tasks/smollm2.py --model={out_dir}/smollm2 "
                  "--vllm_gpu_memory_utilization=0.2")
if "episodes" in chosen:
    train("guess", f"torchrun train_grpo.py config/tasks/guess.py {small}")
    train("calculator", f"torchrun train_grpo.py config/tasks/calculator.py {small}")
if "apart" in chosen:
    train("apart", f"torchrun --nproc_per_node=2 train_async.py {small}")
if "trl" in chosen:
    if done := call("trl", f"{sys.executable} -m bench.against_trl --trl={trl} --only=Qwen3 --pairs=3"):
        print(done[0])
command = f"{sys.executable} -m tiny.pretrain {base} --out={out_dir}/base"
if "base" in chosen and (done := call("base", command)):
    print(f"  {done[1]:.0f} s")
command = f"torchrun train_grpo.py {larger} --model={out_dir}/base"
if "larger" in chosen and (folder := train("larger", command)):
    with open(os.path.join(folder, "config.json")) as file:
        settings = json.load(file)
    same = " ".join(f"--{key}={settings[key]}"
                    for key in ("task", "eval_prompts", "max_completion_length", "engine"))
    if done := call("evaluate", f"{sys.executable} evaluate_model.py {same} --samples={settings['eval_samples']} "
                                f"--model={folder}/checkpoint-{settings['max_steps']}"):
        print(*("  " + line for line in done[0].splitlines() if line.startswith("eval/")
                and line.count("/") == 1), sep="\n")
sys.exit(f"failed: {', '.join(failed)}" if failed else 0)
