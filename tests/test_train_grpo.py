"""train_grpo.py and sample.py as a user runs them: short runs, resume, two ranks, every kind of bad input."""
import importlib.util
import json
import multiprocessing
import os
import re
import runpy
import shutil
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SMALL = ["--prompts_per_step=4", "--num_generations=4", "--max_completion_length=12", "--train_prompts=64",
         "--eval_prompts=8", "--eval_samples=2", "--max_steps=2", "--save_interval=1", "--warmup_steps=0",
         "--learning_rate=1e-3"]
NAMES = """reward reward_std frac_reward_zero_std rewards/score/mean completions/mean_length
    completions/min_length completions/max_length completions/clipped_ratio entropy kl clip_ratio/low_mean
    clip_ratio/high_mean clip_ratio/region_mean sampling/sampling_logp_difference/mean
    sampling/sampling_logp_difference/max sampling/importance_sampling_ratio/min
    sampling/importance_sampling_ratio/mean sampling/importance_sampling_ratio/max loss grad_norm
    learning_rate num_tokens timing_s/gen timing_s/reward timing_s/update_actor timing_s/sync timing_s/step
    perf/throughput perf/max_memory_allocated_gb""".split()


def launch(*arguments, launcher=(sys.executable,), code=0):
    result = subprocess.run([*launcher, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == code, result.stdout[-3000:] + result.stderr[-3000:]
    return result.stdout + result.stderr


def train(folder, out_dir, *arguments, launcher=(sys.executable,)):
    given = {argument.partition("=")[0] for argument in arguments}
    small = [argument for argument in SMALL if argument.partition("=")[0] not in given]
    small += [] if "--model" in given else [f"--model={folder}"]
    output = launch("train_grpo.py", f"--out_dir={out_dir}", *small, *arguments, launcher=launcher)
    with open(os.path.join(out_dir, "metrics.jsonl")) as file:
        return [json.loads(line) for line in file], output


@pytest.fixture(scope="module")
def plain_run(folder, reward_file, tmp_path_factory):
    out_dir = str(tmp_path_factory.mktemp("run") / "plain")
    return out_dir, *train(folder, out_dir, reward_file, "--engine=hf")


def without_times(metrics):
    return [{k: v for k, v in line.items() if not k.startswith(("timing_s/", "perf/"))} for line in metrics]


# ---------------------------------------------------------------- whole runs

def test_a_run_leaves_what_it_promises(plain_run, folder):
    out_dir, metrics, output = plain_run
    assert [line["step"] for line in metrics] == [0, 1, 2]
    for line in metrics[:2]:
        assert not set(NAMES) - set(line) and line["grad_norm"] > 0
        assert line["sampling/sampling_logp_difference/max"] < 1e-4
    for line in (metrics[0], metrics[2]):                       # the first and the last model are evaluated
        assert {"eval/mean@2", "eval/pass@2", "eval/maj@2", "eval/nested_linear/mean@2"} <= set(line)
        assert line["eval/pass@2"] >= line["eval/mean@2"] > 0
    assert sorted(os.listdir(out_dir)) == sorted(
        [".lock", "checkpoint-1", "checkpoint-2", "config.json", "metrics.jsonl", "samples.jsonl",
         "train_grpo.py"]
        + [name for name in os.listdir(out_dir) if "tfevents" in name])
    with open(os.path.join(out_dir, "samples.jsonl")) as file:
        samples = [json.loads(line) for line in file]
    assert {s["step"] for s in samples} == {0, 1} and set(samples[0]) == {
        "step", "prompt", "completion", "reward", "finish_reason", "truth"}
    with open(os.path.join(out_dir, "config.json")) as file:
        assert json.load(file)["prompts_per_step"] == 4
    assert "4 prompts x 4 completions = 16 sequences" in output and "engine hf" in output


def test_a_checkpoint_is_a_model_folder(plain_run, folder):
    out_dir, _, _ = plain_run
    before, after = (AutoModelForCausalLM.from_pretrained(path)
                     for path in (folder, f"{out_dir}/checkpoint-2"))
    assert AutoTokenizer.from_pretrained(f"{out_dir}/checkpoint-2").chat_template
    assert any(not torch.equal(a, b) for a, b in zip(before.parameters(), after.parameters()))
    assert after.lm_head.weight.data_ptr() == after.model.embed_tokens.weight.data_ptr()


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_vllm_run_and_sample(folder, reward_file, tmp_path):
    metrics, output = train(folder, tmp_path / "run", reward_file, "--engine=vllm")
    assert "engine vllm" in output and len(metrics) == 3
    assert max(line["sampling/sampling_logp_difference/max"] for line in metrics[:2]) < 1e-4
    scores = {}
    for engine in ("vllm", "hf"):
        output = launch("sample.py", f"--model={tmp_path}/run/checkpoint-2", "--eval_prompts=8",
                        "--samples=2", reward_file, "--max_completion_length=12", f"--engine={engine}",
                        f"--output={tmp_path}/samples.jsonl")
        scores[engine] = float(re.search(r"eval/mean@2 +(\S+)", output)[1])
        assert "eval/pass@2" in output and "eval/maj@2" in output
        assert len((tmp_path / "samples.jsonl").read_text().splitlines()) == 16
    # The final evaluation drew the same seeds from the same weights, so sampling the checkpoint repeats it.
    assert scores["vllm"] == pytest.approx(metrics[2]["eval/mean@2"], abs=1e-4)


def test_sample_a_prompt_and_without_chat(folder):
    output = launch("sample.py", f"--model={folder}", "--prompt=2+2=", "--engine=hf", "--samples=3")
    assert output.count("-" * 40) == 2
    output = launch("sample.py", f"--model={folder}", "--chat=false", "--engine=hf", "--samples=2",
                    "--eval_prompts=4", "--task=countdown", "--temperature=0.5", "--top_p=0.9", "--top_k=20")
    assert "eval/mean@2" in output


def test_a_run_repeats_exactly(plain_run, folder, reward_file, tmp_path):
    again, _ = train(folder, tmp_path / "again", reward_file, "--engine=hf")
    assert without_times(again) == without_times(plain_run[1])


def test_micro_batches_change_neither_loss_nor_gradient(plain_run, folder, reward_file, tmp_path):
    split, output = train(folder, tmp_path / "split", reward_file, "--engine=hf", "--token_budget=80",
                          "--max_steps=1")
    assert "about 16 micro-batch(es)" in output
    for key in ("loss", "grad_norm", "entropy"):
        assert split[0][key] == pytest.approx(plain_run[1][0][key], rel=1e-5, abs=1e-7)


def test_a_resumed_run_repeats_the_steps_of_an_unbroken_one(plain_run, folder, reward_file, tmp_path):
    out_dir, metrics, _ = plain_run
    shutil.copytree(out_dir, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoint-2")
    resumed, _ = train(folder, tmp_path / "run", reward_file, "--engine=hf", "--resume=auto")
    assert [line["step"] for line in resumed] == [0, 1, 2]
    assert without_times(resumed) == without_times(metrics)


@pytest.mark.parametrize("arguments", [
    ["--kl_coef=0.1", "--updates_per_step=2", "--loss_type=cispo", "--advantage=rloo",
     "--gradient_checkpointing=true"],
    ["--kl_coef=0.1", "--kl_estimator=k2", "--loss_aggregation=constant_length", "--advantage=dr_grpo",
     "--temperature=0.7", "--engine_correction=sequence_mask"],
    ["--kl_coef=0.1", "--kl_estimator=k3+", "--updates_per_step=2", "--loss_type=gspo", "--advantage=remax",
     "--old_logprobs=engine", "--entropy_coef=0.01", "--entropy_decay=cosine"],
    ["--kl_coef=0.1", "--kl_estimator=k3_is", "--updates_per_step=2", "--loss_type=kl_cov", "--advantage=opo",
     "--engine_correction=token_truncate", "--cov_share=0.01"]])
def test_other_algorithms(folder, reward_file, tmp_path, arguments):
    metrics, _ = train(folder, tmp_path / "run", reward_file, "--engine=hf", *arguments)
    assert metrics[0]["kl"] < metrics[1]["kl"] and metrics[1]["kl"] > 1e-3  # the policy leaves the reference
    assert metrics[1]["grad_norm"] > 0


# The shipped model on algebra with short completions: right and wrong ones, some of them cut off.
REAL = ["--model=tiny", "--engine=hf", "--max_completion_length=24", "--num_generations=6",
        "--learning_rate=1e-4"]


@pytest.fixture(scope="module")
def dapo_run(tmp_path_factory):
    path = tmp_path_factory.mktemp("dapo")
    arguments = [*REAL, "--filter_groups=true", "--max_num_gen_batches=3", "--skip_after=1", "--max_steps=4",
                 "--mask_truncated=true", "--overlong_buffer=8", "--train_prompts=20",
                 "--keep_checkpoints=9"]
    return path, arguments, train(None, path / "run", *arguments)[0]


def test_groups_without_spread_are_replaced(dapo_run):
    """Replayed from the rollouts beside the checkpoints: what was kept, and what the denominator counts."""
    path, _, metrics = dapo_run
    assert {1, 2, 3} >= {line["train/num_gen_batches"] for line in metrics[:4]} != {1}
    assert any(line["frac_reward_zero_std"] > 0 for line in metrics[:4])    # of all that was sampled
    for step in (1, 2, 3):
        with open(path / "run" / f"checkpoint-{step}" / "rollouts.jsonl") as file:
            _, *rows = map(json.loads, file)
        groups = [rows[i:i + 6] for i in range(0, 24, 6)]
        mixed = [len({row["score"] for row in group}) > 1 for group in groups]
        assert len(rows) == 24 and (all(mixed) or metrics[step]["train/num_gen_batches"] == 3)
        counted = sum(row["finish_reason"] == "stop" for group, kept in zip(groups, mixed) if kept
                      for row in group)
        assert metrics[step]["train/frac_counted"] == pytest.approx(counted / 24) and counted > 0
    assert min(line["train/frac_counted"] for line in metrics[:4]) < 1
    with open(path / "run" / "checkpoint-4" / "trainer" / "state.json") as file:
        state = json.load(file)
    drawn = sum(4 * line["train/num_gen_batches"] for line in metrics[:4])
    assert sum(len(visits["means"]) for visits in state["history"].values()) == drawn
    assert max(line["train/resting_prompts"] for line in metrics[:4]) > 0 and state["position"] > drawn


def test_a_resumed_run_remembers_prompts_and_their_history(dapo_run):
    path, arguments, metrics = dapo_run
    shutil.copytree(path / "run", path / "again")
    for step in (3, 4):
        shutil.rmtree(path / "again" / f"checkpoint-{step}", ignore_errors=True)
    assert os.path.isdir(path / "again" / "checkpoint-2")
    resumed, _ = train(None, path / "again", *arguments, "--resume=auto")
    assert without_times(resumed) == without_times(metrics)


# ---------------------------------------------------------------- replay.py

def replay(*arguments):
    lines = [line.split() for line in launch("replay.py", *map(str, arguments)).splitlines()]
    return {line[0]: tuple(map(float, line[1:])) for line in lines if len(line) == 3 and line[0] != "the"}


@pytest.mark.parametrize("settings", [
    ["--advantage=remax", "--loss_type=gspo", "--loss_aggregation=sequence_mean", "--temperature=0.7",
     "--engine_correction=token_mask", "--kl_coef=0.1", "--kl_estimator=k2", "--entropy_coef=0.01"],
    ["--advantage=grpo_batch", "--loss_type=clip_cov", "--cov_share=0.05", "--overlong_buffer=6",
     "--mask_truncated=true", "--filter_groups=true", "--kl_coef=0.1",
     "--kl_in=reward", "--kl_estimator=k1"]])
def test_a_replayed_step_has_the_figures_of_the_run(tmp_path, settings):
    metrics, _ = train(None, tmp_path / "run", *REAL, *settings)
    figures = replay(tmp_path / "run" / "checkpoint-1")
    assert len(figures) == 21 and figures["loss"][0] != 0 and figures["grad_norm"][0] > 0
    for name, (logged, again) in figures.items():
        assert logged == pytest.approx(metrics[1][name], rel=1e-4) == pytest.approx(again, rel=1e-3, abs=1e-6)


def test_a_bfloat16_run_that_had_no_setting_for_its_head_is_replayed(tmp_path):
    metrics, _ = train(None, tmp_path / "run", *REAL, "--dtype=bfloat16", "--float32_head=false")
    path = tmp_path / "run" / "checkpoint-1" / "rollouts.jsonl"
    settings, *rows = path.read_text().splitlines(keepends=True)
    path.write_text(settings.replace('"float32_head": false, ', "") + "".join(rows))
    assert path.read_text() != settings + "".join(rows)
    name = "sampling/sampling_logp_difference/mean"
    as_it_was, in_float32 = (replay(path.parent, *more)[name][1] for more in ([], ["--float32_head=true"]))
    assert as_it_was == pytest.approx(metrics[1][name], rel=1e-4) != pytest.approx(in_float32, rel=1e-2)


def test_replay_may_count_what_the_run_has_filtered(dapo_run):
    path, _, metrics = dapo_run
    figures = replay(path / "run" / "checkpoint-1", "--filter_groups=false", "--mask_truncated=false")
    assert figures["train/frac_counted"] == pytest.approx((metrics[1]["train/frac_counted"], 1), rel=1e-4)


def test_replay_with_another_loss_and_another_policy(plain_run, tmp_path):
    out_dir, metrics, _ = plain_run
    (tmp_path / "recipe.py").write_text("epsilon = 1e-3\nlearning_rate = 1e-4\n")
    same = replay(f"{out_dir}/checkpoint-1", "--loss_type=sapo", tmp_path / "recipe.py")
    assert same["grad_norm"] == pytest.approx((metrics[1]["grad_norm"],) * 2, rel=1e-4)     # all ratios are 1
    stale = replay(f"{out_dir}/checkpoint-1", f"--new_policy={out_dir}/checkpoint-2", tmp_path / "recipe.py")
    assert stale["clip_ratio/region_mean"][1] > 0 and stale["sampling/kl"][1] > 1e-6
    assert stale["reward"][0] == stale["reward"][1]


@pytest.mark.parametrize("arguments, message", [
    ([], "name a checkpoint"),
    (["checkpoint-2"], "checkpoint-2 holds no rollouts.jsonl"),
    (["checkpoint-1", "--loss_type=ppo"], "loss_type='ppo'"),
    (["checkpoint-1", "--learning_rate=1.0"], "unknown setting --learning_rate"),
    (["checkpoint-1", "--kl_in=both"], "kl_in=both: choose loss, reward"),
    (["checkpoint-1", "--temperature=0.0"], "temperature=0.0"),
    (["checkpoint-1", "--epsilon=-1.0"], "epsilon=-1.0"),
    (["checkpoint-1", "--advantage=remax"], "no greedy completions"),
    (["checkpoint-1", "--new_policy=out/none"], "no such folder")])
def test_bad_input_to_replay(plain_run, arguments, message, tmp_path):
    arguments = [f"{plain_run[0]}/{a}" if a.startswith("checkpoint") else a for a in arguments]
    refused(arguments, message, tmp_path, script="replay.py")


@pytest.mark.parametrize("decay, last", [("linear", 2e-3 / 3), ("cosine", 0.75e-3)])
def test_learning_rate(folder, reward_file, tmp_path, decay, last):
    metrics, _ = train(folder, tmp_path / "run", reward_file, "--engine=hf", "--warmup_steps=2",
                       "--max_steps=5", f"--lr_decay={decay}")
    assert [line["learning_rate"] for line in metrics[:4]] == pytest.approx([0.5e-3, 1e-3, 1e-3, last])


def test_two_ranks_see_disjoint_prompts_and_compute_the_same_first_step(
        plain_run, folder, reward_file, tmp_path):
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    both, output = train(folder, tmp_path / "run", reward_file, "--engine=hf", launcher=launcher)
    one = plain_run[1]
    assert len(both) == 3 and "on 2 x cpu" in output
    for key in ("reward", "loss", "grad_norm", "entropy", "completions/mean_length", "num_tokens",
                "eval/mean@2"):
        assert both[0][key] == pytest.approx(one[0][key], rel=1e-4, abs=1e-6), key


# ---------------------------------------------------------------- bad input: one clear line, no model loaded

def run_in_child(script, arguments, log, hide_vllm):
    """Runs a script in this process, in which no model can be loaded."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.chdir(ROOT)
    sys.path.insert(0, ROOT)
    AutoModelForCausalLM.from_pretrained = None
    if hide_vllm:
        find_spec = importlib.util.find_spec
        importlib.util.find_spec = lambda name, *rest: None if name == "vllm" else find_spec(name, *rest)
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


# A server process that has imported torch once forks a fresh child for each case: seconds saved each time.
forkserver = multiprocessing.get_context("forkserver")
forkserver.set_forkserver_preload(["torch.distributed.fsdp", "torch.utils.tensorboard", "transformers"])

FILES = {
    "typo.py": "learning_rte = 1e-4\n",
    "empty.jsonl": "",
    "broken.jsonl": '{"prompt": "a", "answer": "1"}\n{"prompt": \n',
    "no_prompt.jsonl": '{"prompt": "a", "answer": "1"}\n{"question": "b", "answer": "1"}\n',
    "empty_prompt.jsonl": '{"prompt": "a", "answer": "1"}\n{"prompt": " ", "answer": "1"}\n',
    "good.jsonl": "".join(json.dumps({"prompt": "x" * 50 + str(i), "answer": "1"}) + "\n" for i in range(40)),
    "rewards.py": "import time\n"
                  "def raises(prompts, completions, **_):\n    raise KeyError('colour')\n"
                  "def short(prompts, completions, **_):\n    return [1.0]\n"
                  "def hangs(prompts, completions, **_):\n    time.sleep(60)\n"
                  "def text(prompts, completions, **_):\n    return ['good'] * len(completions)\n"
                  "def wants(prompts, completions, colour):\n    return [0.0] * len(completions)\n",
    "crash.py": "import nonsuch\n",
    "old_run/metrics.jsonl": "{}\n"}


@pytest.fixture(scope="module")
def bad(tmp_path_factory, folder):
    path = tmp_path_factory.mktemp("bad")
    (path / "old_run").mkdir()
    for name, text in FILES.items():
        (path / name).write_text(text)
    for name in ("model.safetensors", "tokenizer.json"):
        copy = shutil.copytree(folder, path / f"without_{name.split('.')[0]}")
        for file in os.listdir(copy):
            if file.startswith(name.split(".")[0]):
                os.remove(copy / file)
    return path


@pytest.mark.parametrize("arguments, message", [
    (["--learnig_rate=1e-4"], "did you mean --learning_rate?"),
    (["--num-generations=4"], "did you mean --num_generations?"),
    (["--max_steps=many"], "max_steps"),
    (["--temperature=warm"], "temperature"),
    (["--chat=1"], "chat"),
    (["BAD/typo.py"], "typo.py:1: unknown setting learning_rte; did you mean learning_rate?"),
    (["config/nonsuch.py"], "config/nonsuch.py"),
    (["--task=algbra"], "task must be"),
    (["--task=algebra", "--difficulty=0"], "difficulty"),
    (["--task=file"], "train_file"),
    (["--task=file", "--train_file=BAD/nonsuch.jsonl"], "nonsuch.jsonl: no such file"),
    (["--task=file", "--train_file=BAD/empty.jsonl"], "empty.jsonl: no rows"),
    (["--task=file", "--train_file=BAD/broken.jsonl"], "broken.jsonl:2: not JSON"),
    (["--task=file", "--train_file=BAD/no_prompt.jsonl"], "no_prompt.jsonl:2: no prompt"),
    (["--task=file", "--train_file=BAD/empty_prompt.jsonl"], "empty_prompt.jsonl:2: empty prompt"),
    (["--task=file", "--train_file=BAD/good.jsonl", "--eval_file=BAD/good.jsonl", "--max_prompt_length=10"],
     "max_prompt_length=10: only 0 training and 0 evaluation prompts fit it, of 40 and 40"),
    (["--filter_groups=true", "--max_num_gen_batches=5", "--train_prompts=100"],
     "times max_num_gen_batches=5"),
    (["--advantage=remax", "--overlong_buffer=8"], "knows no overlong_buffer"),
    (["--cov_share=2.0"], "cov_share=2.0"),
    (["--num_generations=1"], "num_generations=1"),
    (["--advantage=pass_at_k", "--pass_k=9"], "pass_k=9"),
    (["--engine_correction=tis"], "engine_correction='tis'"),
    (["--old_logprobs=reference"], "old_logprobs=reference"),
    (["--old_logprobs=engine", "--engine_correction=token_mask"], "would do nothing"),
    (["--kl_coef=0.1", "--kl_estimator=k1"], "kl_estimator=k1"),
    (["--kl_coef=0.1", "--kl_in=reward", "--kl_estimator=k3+"], "kl_estimator=k3+"),
    (["--kl_in=score"], "kl_in=score"),
    (["--entropy_decay=step"], "entropy_decay=step"),
    (["--max_num_gen_batches=2"], "needs --filter_groups=true"),
    (["--advantage=remax", "--num_generations=1", "--skip_after=1"], "teach something by advantage=remax"),
    (["--advantage=pass_at_k", "--overlong_buffer=8"], "for scores of 0 and 1"),
    (["--loss_type=gpg", "--old_logprobs=engine"], "gpg has no ratio"),
    (["--loss_type=sapo", "--dual_clip=3.0"], "dual_clip=3.0 would do nothing"),
    (["--overlong_buffer=100"], "overlong_buffer=100"),
    (["--dual_clip=1.0"], "dual_clip=1.0"),
    (["--correction_low=3.0"], "correction_low=3.0"),
    (["--epsilon=1.0"], "epsilon=1.0"),
    (["--updates_per_step=3"], "updates_per_step=3 does not divide"),
    (["--prompts_per_step=0"], "prompts_per_step=0"),
    (["--token_budget=100"], "token_budget=100"),
    (["--top_p=0.9"], "top_p=0.9"),
    (["--top_k=50"], "top_k=50"),
    (["--temperature=0"], "temperature=0"),
    (["--advantage=gae"], "advantage='gae'"),
    (["--loss_type=ppo"], "loss_type='ppo'"),
    (["--kl_estimator=k4"], "kl_estimator='k4'"),
    (["--dtype=float16"], "dtype=float16"),
    (["--engine=sglang"], "engine=sglang"),
    (["--engine=vllm", "HIDE_VLLM"], "engine=vllm, but vLLM is not installed"),
    (["--reward=BAD/nonsuch.py:score"], "nonsuch.py"),
    (["--reward=BAD/rewards.py:nonsuch"], "nonsuch"),
    (["--reward=BAD/rewards.py"], "file.py:function"),
    (["--reward=BAD/crash.py:score"], "nonsuch"),
    (["--reward=BAD/rewards.py:raises"], "colour"),
    (["--reward=BAD/rewards.py:short"], "short"),
    (["--reward=BAD/rewards.py:text"], "text"),
    (["--reward=BAD/rewards.py:wants"], "colour"),
    (["--reward=BAD/rewards.py:hangs", "--reward_timeout=0.3"], "reward_timeout=0.3"),
    (["--model=BAD/nonsuch"], "no such folder"),
    (["--model=BAD/without_model"], "no weights"),
    (["--model=BAD/without_tokenizer"], "no tokenizer"),
    (["--out_dir=BAD/old_run"], "old_run holds another run"),
    (["--resume=BAD/old_run"], "not a checkpoint folder"),
    (["--resume=auto"], "out_dir")])
def test_bad_input(folder, bad, tmp_path, arguments, message):
    arguments = [argument.replace("BAD", str(bad)) for argument in arguments]
    if not any(argument.startswith("--model=") for argument in arguments):
        arguments.append(f"--model={folder}")
    refused(arguments, message, tmp_path)


def refused(arguments, message, tmp_path, script="train_grpo.py"):
    plain = [argument for argument in arguments if argument != "HIDE_VLLM"]
    child = forkserver.Process(target=run_in_child,
                               args=(script, plain, tmp_path / "log", "HIDE_VLLM" in arguments))
    child.start()
    child.join(60)
    log = (tmp_path / "log").read_text()
    assert child.exitcode not in (0, None), log
    assert message in log.splitlines()[-1], log
    assert "Traceback" not in log, log


@pytest.mark.parametrize("arguments, message", [
    (["--resume=RUN/checkpoint-1"], "checkpoint-2 is newer; remove it, or name a new out_dir"),
    (["--resume=RUN/checkpoint-2", "--out_dir=BAD/old_run"], "old_run holds another run"),
    (["--resume=RUN/checkpoint-2"], "max_steps=1, but"),
    (["--resume=auto", "--out_dir=RUN", "--seed=7"], "seed=7, but"),
    (["--resume=auto", "--out_dir=RUN", "--task=countdown"], "task=countdown, but"),
    (["--out_dir=RUN"], "holds another run")])
def test_bad_resume(plain_run, folder, reward_file, bad, tmp_path, arguments, message):
    arguments = [argument.replace("BAD", str(bad)).replace("RUN", plain_run[0]) for argument in arguments]
    small = [argument for argument in SMALL if not argument.startswith("--max_steps")]
    refused([f"--model={folder}", reward_file, *small, "--max_steps=1", *arguments], message, tmp_path)
    assert len(open(os.path.join(plain_run[0], "metrics.jsonl")).readlines()) == 3      # nothing is lost
