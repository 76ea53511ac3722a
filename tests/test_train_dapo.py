"""train_dapo.py has train_grpo.py's figures where its own settings are off, and does what these say."""
import json
import os
import shutil

import pytest

from runs import refused, with_defaults, without_times
from test_train_grpo import REAL, train

# train_grpo.py's defaults.
PLAIN = {"filter_groups": False, "max_num_gen_batches": 1, "overlong_buffer": 0, "updates_per_step": 1,
         "epsilon_high": 0.2}


def dapo(out_dir, *arguments, folder=None):
    return train(folder, out_dir, *arguments, script="train_dapo.py")[0]


# ---------------------------------------------------------------- its own settings off

@pytest.mark.parametrize("arguments", [
    [],
    ["--updates_per_step=2", "--advantage=grpo_batch", "--loss_type=clip_cov", "--cov_share=0.05",
     "--kl_coef=0.1", "--engine_correction=token_mask", "--entropy_coef=0.01"],
    ["--updates_per_step=3", "--old_logprobs=engine", "--advantage=remax", "--kl_coef=0.1", "--kl_in=reward",
     "--kl_estimator=k1", "--loss_type=gspo", "--loss_aggregation=sequence_mean", "--token_budget=200"]])
def test_the_figures_are_those_of_train_grpo(tmp_path, arguments):
    grpo, _ = train(None, tmp_path / "grpo", *REAL, *arguments)
    metrics = dapo(tmp_path / "dapo", *REAL, *with_defaults(arguments, PLAIN))
    added = {"train/num_gen_batches": 1, "train/frac_counted": 1, "train/resting_prompts": 0}
    steps = [line | (added if "loss" in line else {}) for line in without_times(grpo)]
    assert without_times(metrics) == steps and len(steps) == 3 and steps[1]["grad_norm"] > 0
    for name in ("samples.jsonl", "checkpoint-2/model.safetensors"):
        assert (tmp_path / "dapo" / name).read_bytes() == (tmp_path / "grpo" / name).read_bytes()


def test_a_run_of_train_grpo_goes_on(tmp_path):
    """The next step takes the prompts that train_grpo.py would have taken."""
    grpo, _ = train(None, tmp_path / "grpo", *REAL)
    shutil.copytree(tmp_path / "grpo", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoint-2")
    metrics = dapo(tmp_path / "run", *REAL, *with_defaults([], PLAIN), "--resume=auto")
    assert metrics[1]["train/frac_counted"] == 1
    assert metrics[1].items() >= without_times(grpo)[1].items()


# ---------------------------------------------------------------- and on

@pytest.fixture(scope="module")
def dapo_run(tmp_path_factory):
    path = tmp_path_factory.mktemp("dapo")
    arguments = [*REAL, "--filter_groups=true", "--max_num_gen_batches=3", "--skip_after=1", "--max_steps=4",
                 "--mask_truncated=true", "--overlong_buffer=8", "--updates_per_step=1", "--train_prompts=20",
                 "--keep_checkpoints=9"]
    return path, arguments, dapo(path / "run", *arguments)


def test_groups_without_spread_are_replaced(dapo_run):
    """The rollouts in the checkpoints show what was kept, and what the denominator counts."""
    path, _, metrics = dapo_run
    assert {1, 2, 3} >= {line["train/num_gen_batches"] for line in metrics[:4]} != {1}
    # Of all that was sampled.
    assert any(line["frac_reward_zero_std"] > 0 for line in metrics[:4])
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
    assert len(state["alike"]) == len(state["rests"]) and max(state["alike"]) > 0
    assert max(line["train/resting_prompts"] for line in metrics[:4]) > 0 and state["position"] > drawn


def test_a_resumed_run_remembers_prompts_and_their_history(dapo_run):
    path, arguments, metrics = dapo_run
    shutil.copytree(path / "run", path / "again")
    for step in (3, 4):
        shutil.rmtree(path / "again" / f"checkpoint-{step}", ignore_errors=True)
    assert os.path.isdir(path / "again" / "checkpoint-2")
    resumed = dapo(path / "again", *arguments, "--resume=auto")
    assert without_times(resumed) == without_times(metrics)


# ---------------------------------------------------------------- bad input

def test_train_grpo_does_not_lose_what_a_run_remembers(dapo_run, tmp_path):
    path, _, _ = dapo_run
    shutil.copytree(path / "run", tmp_path / "run")
    refused([*REAL, f"--out_dir={tmp_path}/run", "--resume=auto"],
            "checkpoint-4 holds alike, rests, which train_grpo.py would lose", tmp_path)


@pytest.mark.parametrize("arguments, message", [
    (["--max_num_gen_batches=5", "--train_prompts=100"], "times max_num_gen_batches=5 is more than the 100 "),
    (["--max_num_gen_batches=0"], "max_num_gen_batches=0: must be above 0"),
    (["--filter_groups=false"], "needs --filter_groups=true"),
    (["--skip_after=-1"], "skip_after=-1: must not be negative"),
    (["--overlong_buffer=100"], "overlong_buffer=100: more than max_completion_length=64"),
    (["--overlong_buffer=-1"], "overlong_buffer=-1: must not be negative"),
    (["--overlong_penalty=-1"], "overlong_penalty=-1.0: must not be negative"),
    (["--advantage=pass_at_k"], "for scores of 0 and 1: without overlong_buffer"),
    (["--advantage=reinforce++"], "which teach something with advantage=reinforce++"),
    (["--advantage=remax"], "which teach something with advantage=remax"),
    (["PLAIN", "--advantage=remax", "--num_generations=1", "--skip_after=1"],
     "which teach something with advantage=remax"),
    (["PLAIN", "--advantage=remax", "--overlong_buffer=8"], "knows no overlong_buffer"),
    (["--updates_per_step=3"], "updates_per_step=3 does not divide"),
    (["--filter_group=true"], "did you mean --filter_groups?")])
def test_bad_input(folder, tmp_path, arguments, message):
    plain = PLAIN if "PLAIN" in arguments else {}
    arguments = with_defaults([argument for argument in arguments if argument != "PLAIN"], plain)
    refused([f"--model={folder}", *arguments], message, tmp_path, script="train_dapo.py")
