"""train_dapo.py has train_grpo.py's figures where its own settings are off, and does what these say."""
import json
import shutil

import pytest

from runs import kept_rollouts, refused, with_defaults, without_times
from runtime import checkpoint
from test_train_grpo import REAL, train

# train_grpo.py's defaults.
PLAIN = {"max_num_gen_batches": 0, "overlong_buffer": 0, "num_mini_batches": 1, "epsilon_high": 0.2}


def dapo(out_dir, *arguments, folder=None):
    return train(folder, out_dir, *arguments, script="train_dapo.py")[0]


# ---------------------------------------------------------------- its own settings off

@pytest.mark.parametrize("arguments", [
    [],
    ["--num_mini_batches=2", "--advantage=grpo_batch", "--loss_type=gmpo",
     "--kl_coef=0.1", "--engine_correction=token_mask", "--entropy_coef=0.01"],
    ["--num_mini_batches=3", "--old_logprobs=engine", "--advantage=rloo", "--kl_coef=0.1", "--kl_estimator=k1_reward",
     "--loss_type=gspo", "--loss_aggregation=sequence_mean", "--token_budget=200"]])
def test_the_figures_are_those_of_train_grpo(tmp_path, arguments):
    grpo, _ = train(None, tmp_path / "grpo", *REAL, *arguments)
    metrics = dapo(tmp_path / "dapo", *REAL, *with_defaults(arguments, PLAIN))
    own = {"train/num_gen_batches", "train/frac_counted", "rewards/shaped/mean"}
    steps = [{key: value for key, value in line.items() if key not in own} for line in without_times(metrics)]
    assert steps == without_times(grpo) and len(steps) == 3 and steps[1]["grad_norm"] > 0
    assert all(line["train/num_gen_batches"] == line["train/frac_counted"] == 1 for line in metrics[:2])
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
    arguments = [*REAL, "--max_num_gen_batches=3", "--max_steps=4",
                 "--mask_truncated=true", "--overlong_buffer=8", "--num_mini_batches=1", "--train_prompts=20",
                 "--keep_checkpoints=9"]
    return path, arguments, dapo(path / "run", *arguments)


def test_groups_without_spread_are_replaced(dapo_run):
    """The rollouts that it deals out show what was kept, and what the denominator counts."""
    path, _, metrics = dapo_run
    assert {1, 2, 3} >= {line["train/num_gen_batches"] for line in metrics[:4]} != {1}
    # Of all that was sampled.
    assert any(line["frac_reward_zero_std"] > 0 for line in metrics[:4])
    for step in (1, 2, 3):
        rows = kept_rollouts(path / "run", step)
        groups = [rows[i:i + 6] for i in range(0, 24, 6)]
        mixed = [len({row["score"] for row in group}) > 1 for group in groups]
        # The first that differ are kept, in the order in which they were sampled.
        scores = json.loads((path / "run.rollouts" / f"scores-{step}.json").read_text())
        every = [scores[i:i + 6] for i in range(0, len(scores), 6)]
        first = sorted(sorted(range(len(every)), key=lambda p: len({*every[p]}) == 1)[:4])
        assert [every[p] for p in first] == [[row["score"] for row in group] for group in groups]
        assert len(rows) == 24 and (all(mixed) or metrics[step]["train/num_gen_batches"] == 3)
        counted = sum(row["finish_reason"] == "stop" for group, kept in zip(groups, mixed) if kept
                      for row in group)
        assert metrics[step]["train/frac_counted"] == pytest.approx(counted / 24) and counted > 0
    assert min(line["train/frac_counted"] for line in metrics[:4]) < 1
    drawn = sum(4 * line["train/num_gen_batches"] for line in metrics[:4])
    assert state_of(path / "run" / "checkpoint-4")["position"] == drawn


def state_of(checkpoint):
    return json.loads((checkpoint / "trainer" / "state.json").read_text())


def at_step_2(run, path, change={}):
    """A copy of a run that has ended at its checkpoint 2, with another state in it."""
    shutil.copytree(run, path)
    for step in (3, 4):
        shutil.rmtree(path / f"checkpoint-{step}")
    folder = path / "checkpoint-2"
    state = state_of(folder)
    checkpoint.write_state(folder, state | change | {"settings": state["settings"] | change.get("settings", {})})
    return path


def test_a_resumed_run_goes_on_with_the_prompts_behind_those_drawn(dapo_run, tmp_path):
    path, arguments, metrics = dapo_run
    resumed = dapo(at_step_2(path / "run", tmp_path / "run", {}), *arguments, "--resume=auto")
    assert without_times(resumed) == without_times(metrics)


# ---------------------------------------------------------------- bad input

@pytest.mark.parametrize("change, message", [
    # Those of an older version, which counted for each prompt how often its scores were alike.
    ({"alike": [0], "rests": [0]}, "checkpoint-2 holds alike, rests, which train_dapo.py would lose"),
    ({"mood": 1}, "checkpoint-2 holds mood, which train_dapo.py would lose")])
def test_a_run_does_not_lose_what_it_remembers(dapo_run, tmp_path, change, message):
    path, arguments, _ = dapo_run
    run = at_step_2(path / "run", tmp_path / "run", change)
    refused([*with_defaults(arguments, {"prompts_per_step": 4, "engine": "hf"}), f"--out_dir={run}",
             "--resume=auto"], message, tmp_path, script="train_dapo.py")


@pytest.mark.parametrize("arguments, message", [
    (["--max_num_gen_batches=-1"], "max_num_gen_batches=-1: must not be negative"),
    (["--overlong_buffer=100"], "overlong_buffer=100: more than max_completion_length=64"),
    (["--overlong_buffer=-1"], "overlong_buffer=-1: must not be negative"),
    (["--advantage=reinforce++"],
     "max_num_gen_batches=10 leaves out prompts that teach something with advantage=reinforce++"),
    (["--advantage=turns"], "max_num_gen_batches=10 leaves out prompts that teach something with advantage=turns"),
    (["--num_mini_batches=3"], "num_mini_batches=3 does not divide"),
    (["--max_num_gen_batch=1"], "did you mean --max_num_gen_batches?")])
def test_bad_input(folder, tmp_path, arguments, message):
    refused([f"--model={folder}", *arguments], message, tmp_path, script="train_dapo.py")
