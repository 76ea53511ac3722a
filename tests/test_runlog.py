"""What a run writes down: a step's figures over all ranks, samples, and the same scalars for TensorBoard."""
import json
import math
import os

import pytest
import torch
import torch.distributed as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from files import rewind
from rollout import Rollout
from runlog import RunLog, rollout_metrics
from runs import lines, on_ranks


def sampled(row, completion, score, parts, length=3, finish_reason="stop"):
    r = Rollout.single([1, 2], list(range(length)), [-1.0] * length, finish_reason)
    r.row, r.completion, r.score, r.parts = row, completion, score, parts
    return r


# ---------------------------------------------------------------- over all ranks

def log_figures(out_dir):
    """Two steps of figures that differ from rank to rank; returns what each rank keeps of the first."""
    rank = dist.get_rank()
    log = RunLog(out_dir, __file__, {"sample_interval": 20}, 0, 2)
    log.metrics["agreed"] = 0.5
    # Rank 0 gives two values and then one, rank 1 gives one and then none.
    log.mean("mean", torch.tensor([[1.0, 2.0], [6.0]][rank], requires_grad=True))
    log.mean("mean", [[7.0], []][rank])
    log.mean("share", torch.tensor([[True, False, True], [False]][rank]))
    if rank == 1:
        log.mean("of one rank", [2.0, 5.0])
    log.mean("big", torch.full((2 ** 20,), 0.1, dtype=torch.float64))
    log.sum("sum", rank + 1)
    log.sum("sum", torch.tensor(10.0 * rank, requires_grad=True))
    log.sum("sum of one rank" if rank else "sum", 4)
    log.nothing("never", "mean", "skipped")
    log.sum("timeouts", 0)
    # The prompt 5 6 7 of three rollouts, one of them in another update, and a rollout that is not chosen.
    group = [Rollout.single([5, 6, 7], [token, 9, 9], [-1.0] * 3, "stop") for token in (1, 2, 3, 4)]
    log.shared_tokens(group, [0, 1, 2], [[[0], [1]], [[2], []]][rank])
    keeps_graph = any(torch.is_tensor(total) and total.requires_grad for total, _ in log.totals.values())
    log.write()
    first = dict(log.metrics)
    log.start(1)
    log.mean("mean", [float(rank)])
    log.write()
    log.close()
    return first, keeps_graph


def test_figures_are_taken_over_all_ranks(tmp_path):
    expected = {"step": 0, "agreed": 0.5, "mean": 4.0, "share": 0.5, "of one rank": 3.5,
                "big": pytest.approx(0.1), "sum": 17.0, "sum of one rank": 4.0, "never": 0.0, "skipped": 0.0,
                "timeouts": 0.0, "perf/shared_tokens": 0.0, "perf/shareable_tokens": pytest.approx(6 / 15)}
    for first, keeps_graph in on_ranks(2, tmp_path, log_figures, str(tmp_path / "run")):
        assert first == expected and not keeps_graph
    # Rank 0 alone has written, and a step begins without the figures of the last one.
    assert lines(tmp_path / "run") == [expected, {"step": 1, "mean": 0.5}]


# ---------------------------------------------------------------- a step

def test_the_metrics_of_rollouts():
    row = {"prompt": "?"}
    found = rollout_metrics([sampled(row, "a", 1.0, {"right": 1.0, "short": 0.0}, 2),
                             sampled(row, "b", 0.0, {"right": 0.0}, 6, "length"),
                             sampled(row, "c", math.nan, {"right": math.nan}, 4)])
    assert found == {"reward": 0.5, "rewards/unscored": 1, "rewards/right/mean": 0.5,
                     "rewards/short/mean": 0.0, "completions/mean_length": 4.0, "completions/min_length": 2,
                     "completions/max_length": 6, "completions/clipped_ratio": pytest.approx(1 / 3)}
    assert rollout_metrics([sampled(row, "c", math.nan, {"right": math.nan})])["reward"] == 0.0


def test_a_step_leaves_its_figures_and_a_sample_of_each_of_eight_prompts(mesh, tmp_path, capsys):
    rows = [{"prompt": [{"role": "user", "content": f"{i}?"}], "answer": str(i)} for i in range(9)]
    log = RunLog(str(tmp_path / "run"), __file__, {"sample_interval": 20, "max_steps": 3}, 0, 3)
    for step in range(2):
        log.start(step)
        with log.timed("gen"):
            pass
        log.rollouts([sampled(row, [{"role": "assistant", "content": f"{step} {row['answer']} {g}"}],
                              float(g), {"score": float(g)}) for row in rows for g in range(2)], timeouts=3)
        log.groups(torch.tensor([0.0, 0.5]))
        log.end(tokens=90)
    log.start(2)
    log.evaluation({"eval/mean@2": 0.25, "eval/sums/mean@2": 0.75})
    log.write()
    log.close()

    metrics = lines(tmp_path / "run")
    timing = {"timing_s/gen", "timing_s/step", "perf/throughput"}
    assert [line["step"] for line in metrics] == [0, 1, 2] and timing <= set(metrics[1])
    assert metrics[1]["perf/throughput"] == pytest.approx(90 / metrics[1]["timing_s/step"])
    assert {name: value for name, value in metrics[1].items() if name not in timing} == {
        "step": 1, "reward": 0.5, "rewards/unscored": 0, "rewards/score/mean": 0.5, "rewards/timeouts": 3.0,
        "completions/mean_length": 3.0, "completions/min_length": 3, "completions/max_length": 3,
        "completions/clipped_ratio": 0.0, "reward_std": 0.25, "frac_reward_zero_std": 0.5}
    assert metrics[2] == {"step": 2, "eval/mean@2": 0.25, "eval/sums/mean@2": 0.75}
    assert log.eval_scores == {2: 0.25}

    # The first completion of each of the first eight prompts.
    assert lines(tmp_path / "run", "samples.jsonl") == [
        {"step": step, "prompt": row["prompt"], "completion": f"{step} {row['answer']} 0", "reward": 0.0,
         "finish_reason": "stop", "truth": row["answer"]} for step in range(2) for row in rows[:8]]
    output = capsys.readouterr().out
    assert "'0?'" in output and "'0 3 0'" in output and "reward 0, truth 3" in output
    assert "'0 4 0'" not in output and "'1 0 0'" not in output
    assert "step    1 | reward 0.500 | length   3.0 | " in output
    assert "eval/mean@2 0.250" in output and "sums" not in output

    board = EventAccumulator(str(tmp_path / "run")).Reload()
    assert set(board.Tags()["scalars"]) == {name for line in metrics for name in line}
    for line in metrics:
        for name, value in line.items():
            (event,) = [event for event in board.Scalars(name) if event.step == line["step"]]
            assert event.value == pytest.approx(value, rel=1e-6)
    assert json.loads((tmp_path / "run" / "config.json").read_text()) == {
        "sample_interval": 20, "max_steps": 3, "out_dir": str(tmp_path / "run")}
    assert (tmp_path / "run" / "test_runlog.py").exists()


@pytest.mark.parametrize("bad", ["", "   ", "\0\0\0", "half a li", "[1]", '"step"', '{"reward": 1}',
                                 '{"step": "3"}', "[" * 100_000, "\udcff"])
def test_a_bad_line_is_passed_over_and_named(tmp_path, capsys, bad):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(f'{{"step": 0}}\n{bad}\n{{"step": 1}}\n'.encode(errors="surrogateescape"))
    assert rewind(str(path), 2) == [{"step": 0}, {"step": 1}]
    assert capsys.readouterr().err == f"{path}:2 is passed over, because it is not a line of a run's log\n"
    assert path.read_text() == '{"step": 0}\n{"step": 1}\n'


def test_a_log_is_rewound_to_the_step_that_goes_on(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 1, "a": 2}\n{"step": 2}\n{"step": 1, "cut o')
    rewind(str(path), 2)
    assert path.read_text() == '{"step": 0}\n{"step": 1, "a": 2}\n'
    rewind(str(tmp_path / "nothing.jsonl"), 2)
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]
    # A kill leaves a line that was cut off: no news.
    assert capsys.readouterr().err == ""


def test_the_scores_of_a_resumed_run_are_known(mesh, tmp_path):
    os.makedirs(tmp_path / "run")
    (tmp_path / "run" / "metrics.jsonl").write_text(
        '{"step": 0, "eval/mean@4": 0.25}\n{"step": 1, "eval/mean@4": null}\n'
        '{"step": 2, "eval/mean@4": 0.5}\n')
    log = RunLog(str(tmp_path / "run"), __file__, {"sample_interval": 20}, 2, 3)
    assert log.eval_scores == {0: 0.25}
    log.start(2)
    log.evaluation({"eval/mean@4": 0.75})
    assert log.eval_scores == {0: 0.25, 2: 0.75}
