"""replay.py has a run's own figures, and those of other losses and policies, on the rollouts that it kept."""
import pytest

from runs import forked, refused
from test_train_grpo import REAL, train


@pytest.fixture(scope="module")
def run(folder, reward_file, tmp_path_factory):
    out_dir = tmp_path_factory.mktemp("run") / "plain"
    return out_dir, train(folder, out_dir, reward_file)[0]


def replay(log, *arguments):
    """{figure: (what the run logged, what replay.py computes)}."""
    table = [line.split() for line in forked(log, "replay.py", *arguments).splitlines()]
    return {line[0]: tuple(map(float, line[1:])) for line in table if len(line) == 3 and line[0] != "the"}


@pytest.mark.parametrize("script, settings", [
    ("train_grpo.py",
     ["--advantage=remax", "--loss_type=gspo", "--loss_aggregation=sequence_mean", "--temperature=0.7",
      "--engine_correction=token_mask", "--kl_coef=0.1", "--kl_estimator=k2", "--entropy_coef=0.01"]),
    ("train_dapo.py",
     ["--advantage=grpo_batch", "--loss_type=clip_cov", "--cov_share=0.05", "--overlong_buffer=6",
      "--mask_truncated=true", "--filter_groups=true", "--max_num_gen_batches=1", "--updates_per_step=1",
      "--kl_coef=0.1", "--kl_in=reward", "--kl_estimator=k1"])])
def test_a_replayed_step_has_the_figures_of_the_run(tmp_path, script, settings):
    metrics, _ = train(None, tmp_path / "run", *REAL, *settings, script=script)
    figures = replay(tmp_path / "log", tmp_path / "run" / "checkpoint-1")
    assert len(figures) == 21 and figures["loss"][0] != 0 and figures["grad_norm"][0] > 0
    for name, (logged, again) in figures.items():
        # train_grpo.py counts everything, and does not log that.
        expected = 1 if name == "train/frac_counted" and script == "train_grpo.py" else metrics[1][name]
        assert again == pytest.approx(expected, rel=1e-3, abs=1e-6)
        assert logged == pytest.approx(metrics[1].get(name, float("nan")), rel=1e-4, nan_ok=True)


def test_a_bfloat16_run_is_replayed_with_the_head_that_it_had(tmp_path):
    metrics, _ = train(None, tmp_path / "run", *REAL, "--dtype=bfloat16", "--float32_head=false")
    name = "sampling/sampling_logp_difference/mean"
    as_it_was, in_float32 = (replay(tmp_path / "log", tmp_path / "run" / "checkpoint-1", *more)[name][1]
                             for more in ([], ["--float32_head=true"]))
    assert as_it_was == pytest.approx(metrics[1][name], rel=1e-4) != pytest.approx(in_float32, rel=1e-2)


def test_replay_may_count_what_the_run_has_filtered(tmp_path):
    metrics, _ = train(None, tmp_path / "run", *REAL, "--filter_groups=true", "--max_num_gen_batches=3",
                       "--mask_truncated=true", "--overlong_buffer=8", "--updates_per_step=1",
                       script="train_dapo.py")
    path, everything = tmp_path / "run" / "checkpoint-1", ["--filter_groups=false", "--mask_truncated=false"]
    counted = metrics[1]["train/frac_counted"]
    assert 0 < counted < 1
    assert replay(tmp_path / "log", path)["train/frac_counted"] == pytest.approx((counted, counted), rel=1e-4)
    figures = replay(tmp_path / "log", path, *everything)
    assert figures["train/frac_counted"] == pytest.approx((counted, 1), rel=1e-4)


def test_replay_with_another_loss_and_another_policy(run, tmp_path):
    out_dir, metrics = run
    (tmp_path / "recipe.py").write_text("epsilon = 1e-3\nlearning_rate = 1e-4\n")
    same = replay(tmp_path / "log", out_dir / "checkpoint-1", "--loss_type=sapo", tmp_path / "recipe.py")
    # All ratios are 1.
    assert same["grad_norm"] == pytest.approx((metrics[1]["grad_norm"],) * 2, rel=1e-4)
    stale = replay(tmp_path / "log", out_dir / "checkpoint-1", f"--new_policy={out_dir}/checkpoint-2",
                   tmp_path / "recipe.py")
    assert stale["clip_ratio/region_mean"][1] > 0 and stale["sampling/kl"][1] > 1e-6
    assert stale["reward"][0] == stale["reward"][1]


def test_replay_of_rollouts_of_which_none_is_counted(folder, reward_file, tmp_path):
    """All of them were cut off: nothing has a gradient, whatever the loss marks."""
    train(folder, tmp_path / "run", reward_file, "--max_completion_length=1")
    for loss_type in ("clip_cov", "kl_cov"):
        figures = replay(tmp_path / "log", tmp_path / "run" / "checkpoint-1", "--mask_truncated=true",
                         f"--loss_type={loss_type}")
        assert figures["train/frac_counted"][1] == figures["loss"][1] == figures["grad_norm"][1] == 0


@pytest.mark.parametrize("arguments, message", [
    ([], "name a checkpoint"),
    (["checkpoint-2"], "checkpoint-2 holds no rollouts.jsonl"),
    (["checkpoint-1", "--loss_type=ppo"], "loss_type=ppo: choose clip, gspo, "),
    (["checkpoint-1", "--learning_rate=1.0"], "unknown setting --learning_rate"),
    (["checkpoint-1", "--kl_in=both"], "kl_in=both: choose loss, reward"),
    (["checkpoint-1", "--temperature=0.0"], "temperature=0.0"),
    (["checkpoint-1", "--epsilon=-1.0"], "epsilon=-1.0"),
    (["checkpoint-1", "--advantage=remax"], "no greedy completions"),
    (["checkpoint-1", "--new_policy=out/none"], "no such folder")])
def test_bad_input(run, arguments, message, tmp_path):
    arguments = [f"{run[0]}/{a}" if a.startswith("checkpoint") else a for a in arguments]
    refused(arguments, message, tmp_path, script="replay.py")
