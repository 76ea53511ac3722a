"""train_grpo.py as a user runs it: short runs, resume, two ranks, every kind of bad input."""
import json
import os
import shutil
import sys

import pyarrow.parquet
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import runs
from runs import launch, lines, refused, without_times

SMALL = {"prompts_per_step": 4, "num_generations": 4, "max_completion_length": 12, "train_prompts": 64,
         "eval_prompts": 8, "eval_samples": 2, "max_steps": 2, "save_interval": 1, "warmup_steps": 0,
         "learning_rate": 1e-3, "engine": "hf"}
NAMES = """reward reward_std frac_reward_zero_std rewards/score/mean completions/mean_length
    completions/min_length completions/max_length completions/clipped_ratio entropy clip_ratio/low_mean
    clip_ratio/high_mean clip_ratio/region_mean sampling/sampling_logp_difference/mean
    sampling/sampling_logp_difference/max sampling/importance_sampling_ratio/min
    sampling/importance_sampling_ratio/mean sampling/importance_sampling_ratio/max loss grad_norm
    learning_rate num_tokens timing_s/gen timing_s/reward timing_s/update_actor timing_s/sync timing_s/step
    perf/throughput perf/max_memory_allocated_gb""".split()


# The shipped model on algebra with short completions: right and wrong ones, some of them cut off.
REAL = ["--model=tiny", "--max_completion_length=24", "--num_generations=6", "--learning_rate=1e-4"]


def train(folder, out_dir, *arguments, script="train_grpo.py", **how):
    return runs.train(script, out_dir, arguments, SMALL | {"model": folder}, **how)


@pytest.fixture(scope="module")
def plain_run(folder, reward_file, tmp_path_factory):
    out_dir = str(tmp_path_factory.mktemp("run") / "plain")
    return out_dir, *train(folder, out_dir, reward_file, launcher=(sys.executable,))


# ---------------------------------------------------------------- whole runs

def test_a_run_leaves_what_it_promises(plain_run, folder):
    out_dir, metrics, output = plain_run
    assert [line["step"] for line in metrics] == [0, 1, 2]
    for line in metrics[:2]:
        assert not set(NAMES) - set(line) and line["grad_norm"] > 0
        assert line["sampling/sampling_logp_difference/max"] < 1e-4
        # Nothing of an environment.
        assert not [name for name in line if name.startswith(("episodes/", "tools/", "timing_s/environment"))]
    # The first and the last model are evaluated.
    for line in (metrics[0], metrics[2]):
        assert {"eval/mean@2", "eval/pass@2", "eval/maj@2", "eval/nested_linear/mean@2"} <= set(line)
        assert line["eval/pass@2"] >= line["eval/mean@2"] > 0
    assert sorted(os.listdir(out_dir)) == sorted(
        [".lock", "changes.diff", "checkpoint-1", "checkpoint-2", "config.json", "metrics.jsonl", "report.html",
         "samples.jsonl", "train_grpo.py", "user_code"]
        + [name for name in os.listdir(out_dir) if "tfevents" in name])
    samples = lines(out_dir, "samples.jsonl")
    assert {s["step"] for s in samples} == {0, 1} and set(samples[0]) == {
        "step", "prompt", "completion", "reward", "finish_reason", "truth", "tokens", "logprobs"}
    for sample in samples:
        (tokens,) = sample["tokens"]
        # Letters outside ASCII are several tokens, each of them half a letter.
        assert "".join(tokens).startswith(sample["completion"]) or "\ufffd" in "".join(tokens)
        assert len(tokens) == len(sample["logprobs"]) and all(-30 < logp <= 0 for logp in sample["logprobs"])
    with open(os.path.join(out_dir, "config.json")) as file:
        assert json.load(file)["prompts_per_step"] == 4
    assert "4 x 4 = 16 completions" in output and "engine hf" in output
    # What is on stderr would come last: no library warns of what is fine.
    assert output.endswith("report.html: curves, samples and health\n")


@pytest.mark.parametrize("script", ["train_grpo.py", "train_ppo.py", "train_dapo.py", "train_async.py"])
def test_intervals_of_0_leave_the_first_and_the_last(folder, reward_file, tmp_path, script):
    more = ["--critic_warmup_steps=0"] if "ppo" in script else []
    metrics, _ = train(folder, tmp_path / "run", reward_file, "--eval_interval=0", "--save_interval=0",
                            *more, script=script, ranks=1 + ("async" in script))
    assert [line["step"] for line in metrics if "eval/mean@2" in line] == [0, 2]
    assert [name for name in os.listdir(tmp_path / "run") if "checkpoint" in name] == ["checkpoint-2"]


def test_a_checkpoint_is_a_model_folder(plain_run, folder):
    out_dir, _, _ = plain_run
    before, after = (AutoModelForCausalLM.from_pretrained(path)
                     for path in (folder, f"{out_dir}/checkpoint-2"))
    assert AutoTokenizer.from_pretrained(f"{out_dir}/checkpoint-2").chat_template
    assert any(not torch.equal(a, b) for a, b in zip(before.parameters(), after.parameters()))
    assert after.lm_head.weight.data_ptr() == after.model.embed_tokens.weight.data_ptr()


def test_a_run_repeats_exactly(plain_run, folder, reward_file, tmp_path):
    again, _ = train(folder, tmp_path / "again", reward_file)
    assert without_times(again) == without_times(plain_run[1])


def test_micro_batches_change_neither_loss_nor_gradient(plain_run, folder, reward_file, tmp_path):
    split, output = train(folder, tmp_path / "split", reward_file, "--token_budget=80",
                          "--max_steps=1")
    assert "in micro-batches of at most 80 tokens" in output
    # Even the completions of one prompt are too many for one micro-batch, so there are several.
    assert split[0]["num_tokens"] / 4 > 80 and split[0]["frac_reward_zero_std"] < 1
    for key in ("loss", "grad_norm", "entropy"):
        assert split[0][key] == pytest.approx(plain_run[1][0][key], rel=1e-5, abs=1e-7)


def test_a_resumed_run_repeats_the_steps_of_an_unbroken_one(plain_run, folder, reward_file, tmp_path):
    out_dir, metrics, _ = plain_run
    shutil.copytree(out_dir, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoint-2")
    resumed, _ = train(folder, tmp_path / "run", reward_file, "--resume=auto", "--save_rollouts=true")
    assert [line["step"] for line in resumed] == [0, 1, 2]
    assert without_times(resumed) == without_times(metrics)
    # It also kept the rollouts of the step that it made.
    kept = pyarrow.parquet.read_table(tmp_path / "run" / "rollouts" / "step-000001.parquet").to_pylist()
    expected = runs.kept_rollouts(tmp_path / "run", 1)
    assert len(kept) == 16 and os.listdir(tmp_path / "run" / "rollouts") == ["step-000001.parquet"]
    for row, r in zip(kept, expected, strict=True):
        assert [row[key] for key in ("ids", "spans", "logprobs", "score")] == [
            r[key] for key in ("ids", "spans", "logprobs", "score")]
        assert json.loads(row["parts"]) == r["parts"] and json.loads(row["completion"]) == r["completion"]


@pytest.mark.parametrize("arguments", [
    ["--kl_coef=0.1", "--num_mini_batches=2", "--loss_type=cispo", "--advantage=rloo",
     "--gradient_checkpointing=true"],
    ["--kl_coef=0.1", "--kl_estimator=k2", "--loss_aggregation=constant_length", "--advantage=dr_grpo",
     "--temperature=0.7", "--engine_correction=sequence_mask"],
    ["--kl_coef=0.1", "--kl_estimator=k3+", "--num_mini_batches=2", "--loss_type=gspo", "--old_logprobs=engine",
     "--advantage=reinforce++_baseline", "--entropy_coef=0.01"],
    ["--kl_coef=0.1", "--kl_estimator=k3_is", "--num_mini_batches=2", "--loss_type=sapo",
     "--advantage=turns", "--engine_correction=token_truncate", "--top_p=0.7", "--top_k=20", "--min_p=0.01",
     "--engine=auto"]])
def test_other_algorithms(folder, reward_file, tmp_path, arguments):
    """In the first step policy and reference are the same, also where all tokens but the likeliest are left out."""
    metrics, _ = train(folder, tmp_path / "run", reward_file, *arguments)
    for extreme in ("min", "max"):
        assert abs(metrics[0][f"sampling/importance_sampling_ratio/{extreme}"] - 1) < 1e-5
    # The policy leaves the reference. The mean of k1 over so few tokens may be below 0.
    assert abs(metrics[0]["kl"]) < 1e-5 and abs(metrics[1]["kl"]) > 1e-3
    assert metrics[1]["grad_norm"] > 0


@pytest.mark.parametrize("decay, last", [("linear", 2e-3 / 3), ("cosine", 0.75e-3)])
def test_learning_rate(folder, reward_file, tmp_path, decay, last):
    metrics, _ = train(folder, tmp_path / "run", reward_file, "--warmup_steps=2",
                       "--max_steps=5", f"--lr_decay={decay}")
    assert [line["learning_rate"] for line in metrics[:4]] == pytest.approx([0.5e-3, 1e-3, 1e-3, last])


def test_two_ranks_see_disjoint_prompts_and_compute_the_same_first_step(
        plain_run, folder, reward_file, tmp_path):
    both, output = train(folder, tmp_path / "run", reward_file, ranks=2)
    one = plain_run[1]
    assert len(both) == 3 and "on 2 x cpu" in output
    for key in ("reward", "loss", "grad_norm", "entropy", "completions/mean_length", "num_tokens",
                "eval/mean@2"):
        assert both[0][key] == pytest.approx(one[0][key], rel=1e-4, abs=1e-6), key


@pytest.mark.parametrize("copied", [False, True])
def test_a_run_from_another_folder(tmp_path, copied):
    """Config files, environments and models of the project are found; a copy of a script needs PYTHONPATH."""
    script, env = os.path.join(runs.ROOT, "train_grpo.py"), {}
    if copied:
        (tmp_path / "mine").mkdir()
        script, env = shutil.copy(script, tmp_path / "mine" / "train_mine.py"), {"PYTHONPATH": runs.ROOT}
    small = {"prompts_per_step": 2, "num_generations": 2, "max_completion_length": 48, "train_prompts": 16,
             "eval_prompts": 2, "eval_samples": 1, "max_steps": 2, "engine": "hf"}
    # It names a model and an environment.
    launch(script, "config/tasks/guess.py", *runs.with_defaults([], small), cwd=tmp_path, env=env)
    (out_dir,) = (tmp_path / "out").iterdir()
    assert out_dir.name.startswith(f"{'mine' if copied else 'grpo'}-guess-")
    assert [line["step"] for line in lines(out_dir)] == [0, 1, 2] and "episodes/turns" in lines(out_dir)[0]
    assert (out_dir / os.path.basename(script)).read_bytes() == open(script, "rb").read()


# ---------------------------------------------------------------- bad input: one clear line, no model loaded

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
    (["--task=algebra:0"], "task=algebra:0: a difficulty is a whole number from 1 to 100"),
    (["--task=algebra:x"], "task=algebra:x: a difficulty is"),
    (["--task=file"], "train_file"),
    (["--task=file", "--train_file=BAD/nonsuch.jsonl"], "nonsuch.jsonl: no such file"),
    (["--task=file", "--train_file=BAD/empty.jsonl"], "empty.jsonl: no rows"),
    (["--task=file", "--train_file=BAD/broken.jsonl"], "broken.jsonl:2: Expecting"),
    (["--task=file", "--train_file=BAD/no_prompt.jsonl"], "no_prompt.jsonl:2: no column prompt"),
    (["--task=file", "--train_file=BAD/empty_prompt.jsonl"], "empty_prompt.jsonl:2: empty prompt"),
    (["--task=file", "--train_file=BAD/good.jsonl", "--eval_file=BAD/good.jsonl", "--max_prompt_length=10"],
     "max_prompt_length=10: none of 40 train prompts fits; the shortest has 51 tokens"),
    (["--num_generations=1"], "num_generations=1"),
    (["--engine_correction=tis"], "engine_correction=tis: choose none, token_truncate, "),
    (["--engine_correction=token_truncate,token_truncate"],
     "engine_correction=token_truncate,token_truncate: choose none, "),
    (["--engine_correction=token_mask,sequence_mask"], "engine_correction=token_mask,sequence_mask: choose none, "),
    (["--old_logprobs=reference"], "old_logprobs=reference"),
    (["--old_logprobs=engine", "--engine_correction=token_mask"],
     "engine_correction=token_mask: with old_logprobs=engine the ratio corrects already"),
    (["--kl_coef=0.1", "--kl_estimator=k1"], "kl_estimator=k1: choose k2, "),
    (["--lr_decay=step"], "lr_decay=step"),
    (["--advantage=none"], "advantage=none teaches nothing without kl_estimator=k1_advantage"),
    (["--reference_model=tiny"], "reference_model=tiny needs a kl_coef above 0"),
    (["--kl_coef=0.1", "--skip_zero_advantage=true"], "skip_zero_advantage=True, but entropy_coef or a KL"),
    (["--entropy_coef=0.1", "--skip_zero_advantage=true"], "skip_zero_advantage=True, but entropy_coef or a KL"),
    (["--num_mini_batches=3"], "num_mini_batches=3 does not divide"),
    (["--prompts_per_step=0"], "prompts_per_step=0"),
    (["--token_budget=100"], "token_budget=100"),
    (["--top_p=0.9"], "top_k=0: with top_p=0.9 and min_p=0.0 training needs one, such as 20"),
    (["--min_p=0.1", "--top_p=1"], "top_k=0: with top_p=1.0 and min_p=0.1 training needs one, such as 20"),
    (["--top_p=0", "--top_k=5"], "top_p=0.0: must be above 0"), (["--top_p=1.1"], "top_p=1.1: must be from 0 to 1"),
    (["--top_k=-1"], "top_k=-1: must not be negative"), (["--min_p=-0.1"], "min_p=-0.1: must not be negative"),
    (["--min_p=1", "--top_k=5"], "min_p=1.0: must be below 1"),
    (["--max_num_gen_batches=2"], "unknown setting --max_num_gen_batches"),
    (["--temperature=0"], "temperature=0"),
    (["--advantage=gae"], "advantage=gae: choose grpo, dr_grpo, "),
    (["--loss_type=ppo"], "loss_type=ppo: choose clip, gspo, "),
    (["--kl_estimator=k4"], "kl_estimator=k4: choose k2, k3, "),
    (["--dtype=float8"], "dtype=float8"),
    (["--engine=sglang"], "engine=sglang: choose auto, vllm, hf"),
    (["--reward=BAD/nonsuch.py:score"], "nonsuch.py"),
    (["--reward=BAD/rewards.py:nonsuch"], "nonsuch"),
    (["--reward=score"], "reward must be file.py:function"),
    (["--reward=BAD/rewards.py"], "rewards.py has no function compute_score"),
    (["--reward=BAD/crash.py:score"], "nonsuch"),
    (["--reward=BAD/rewards.py:raises"], "colour"),
    (["--reward=BAD/rewards.py:short"], "short"),
    (["--reward=BAD/rewards.py:text"], "text"),
    (["--reward=BAD/rewards.py:wants"], "colour"),
    (["--reward=BAD/rewards.py:hangs", "--call_timeout=0.3"], "call_timeout=0.3"),
    (["--model=BAD/nonsuch"], "no such folder"),
    (["--model=BAD/without_tokenizer"], "no tokenizer"),
    (["--out_dir=BAD/old_run"], "old_run holds metrics.jsonl and is not the folder of a run"),
    (["--resume=BAD/old_run"], "not a checkpoint folder"),
    (["--resume=auto"], "out_dir")])
def test_bad_input(folder, bad, tmp_path, arguments, message):
    arguments = [argument.replace("BAD", str(bad)) for argument in arguments]
    if not any(argument.startswith("--model=") for argument in arguments):
        arguments.append(f"--model={folder}")
    refused(arguments, message, tmp_path)


@pytest.mark.parametrize("setting", ["model", "critic_model"])
def test_weights_that_are_not_there_are_found_when_they_are_loaded(folder, bad, tmp_path, setting):
    arguments = runs.with_defaults([f"--{setting}={bad}/without_model"], {"model": folder, "engine": "hf"})
    script = "train_ppo.py" if setting == "critic_model" else "train_grpo.py"
    refused(arguments, f"{setting}={bad}/without_model: its weights cannot be read: ", tmp_path, script,
            loads=True)


def test_a_run_that_is_refused_leaves_no_folder(folder, tmp_path):
    task = f"nonsuch{os.getpid()}"
    refused([f"--model={folder}", f"--task={task}"], "task must be", tmp_path)
    out = os.path.join(runs.ROOT, "out")
    assert not os.path.isdir(out) or not [name for name in os.listdir(out) if task in name]


@pytest.mark.parametrize("arguments, message", [
    (["--resume=RUN/checkpoint-1"], "checkpoint-2 is newer; remove it, or name a new out_dir"),
    (["--resume=RUN/checkpoint-2", "--out_dir=BAD/old_run"], "old_run holds metrics.jsonl and is not the"),
    (["--resume=RUN/checkpoint-2", "--out_dir=OTHER"], "other holds another run: name a new folder"),
    (["--resume=RUN/checkpoint-2"], "max_steps=1, but"),
    (["--resume=auto", "--out_dir=RUN", "--seed=7"], "seed=7, but"),
    (["--resume=auto", "--out_dir=RUN", "--task=arithmetic"], "task=arithmetic, but"),
    (["--out_dir=RUN"], "holds another run")])
def test_bad_resume(plain_run, folder, reward_file, bad, tmp_path, arguments, message):
    other = tmp_path / "other"
    shutil.copytree(plain_run[0], other)
    for name, path in (("BAD", bad), ("RUN", plain_run[0]), ("OTHER", other)):
        arguments = [argument.replace(name, str(path)) for argument in arguments]
    arguments = runs.with_defaults([reward_file, *arguments], SMALL | {"model": folder, "max_steps": 1})
    refused(arguments, message, tmp_path)
    # Nothing is lost.
    assert len(lines(plain_run[0])) == 3
