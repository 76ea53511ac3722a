"""What a run writes down: a step's figures over all ranks, samples, and the same scalars for TensorBoard."""
import contextlib
import datetime
import json
import math
import os
import shutil
import subprocess
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from losses import group_std
from options import kept_code
from rollout import Rollout
from runs import ROOT, launch, lines, on_ranks
from runtime import metrics
from runtime.metrics import RunLog, rewind, rollout_metrics
from runtime.run import Run, opening

TIMED_OUT = "the reward took too long (call_timeout)"


def sampled(row, completion, score, parts, length=3, finish_reason="stop", problem=""):
    r = Rollout.single([1, 2], list(range(length)), [-1.0] * length, finish_reason)
    r.row, r.completion, r.score, r.parts, r.problem = row, completion, score, parts, problem
    return r


def run_state(step=0, **more):
    """What a RunLog reads of a run's state."""
    return {"step": step, "checksums": {}, "evaluated": {}, "eval_scores": {}} | more


# ---------------------------------------------------------------- over all ranks

def log_figures(out_dir):
    """Two steps of figures that differ from rank to rank; returns what each rank keeps of the first."""
    rank = dist.get_rank()
    log = RunLog(out_dir, __file__, {"max_steps": 2}, run_state())
    log.metrics["agreed"] = 0.5
    # Rank 0 gives two values and then one, rank 1 gives one and then none.
    log.add(sums={"sum": rank + 1},
            means={"mean": torch.tensor([[1.0, 2.0], [6.0]][rank], requires_grad=True),
                   "share": torch.tensor([[True, False, True], [False]][rank])})
    log.add(means={"mean": [[7.0], []][rank]})
    if rank == 1:
        log.add(means={"of one rank": [2.0, 5.0]})
    log.add(means={"big": torch.full((2 ** 20,), 0.1, dtype=torch.float64)})
    log.add(sums={"sum": torch.tensor(10.0 * rank, requires_grad=True)})
    log.add(sums={"sum of one rank" if rank else "sum": 4})
    log.add(means={"entropy": torch.ones(3 + rank)})             # of each token of an update
    log.add(sums={"timeouts": 0}, means={"never": [], "mean": [], "skipped": torch.zeros(0)})
    keeps_graph = any(torch.is_tensor(total) and total.requires_grad for total in log.totals.values())
    log.write()
    first = dict(log.metrics)
    log.start(1)
    log.add(means={"mean": [float(rank)]})
    log.write()
    return first, keeps_graph


def test_figures_are_taken_over_all_ranks(tmp_path):
    expected = {"step": 0, "agreed": 0.5, "mean": 4.0, "share": 0.5, "of one rank": 3.5,
                "big": pytest.approx(0.1), "sum": 17.0, "sum of one rank": 4.0, "timeouts": 0.0,
                "entropy": 1.0, "completions/trained_tokens": 7}
    (tmp_path / "run").mkdir()
    for first, keeps_graph in on_ranks(2, tmp_path, log_figures, str(tmp_path / "run")):
        assert first == expected and not keeps_graph
    # Rank 0 alone has written, and a step begins without the figures of the last one.
    assert lines(tmp_path / "run") == [expected, {"step": 1, "mean": 0.5}]


# ---------------------------------------------------------------- a step

def test_the_metrics_of_rollouts():
    row = {"prompt": "?"}
    found = rollout_metrics([sampled(row, "a", 1.0, {"right": 1.0, "short": 0.0}, 2),
                             sampled(row, "b", 0.0, {"right": 0.0}, 6, "length", problem=TIMED_OUT),
                             sampled(row, "c", math.nan, {"right": math.nan}, 4)], 3, group_std, 1)
    assert found == {"reward": 0.5, "reward_std": pytest.approx(0.5 ** 0.5), "frac_reward_zero_std": 0.0,
                     "rewards/min": 0.0, "rewards/max": 1.0, "rewards/unscored": 1,
                     "rewards/right/mean": 0.5, "rewards/short/mean": 0.0, "rewards/timeouts": 1,
                     "completions/sampled_tokens": 12, "completions/mean_length": 4.0, "completions/min_length": 2,
                     "completions/max_length": 6, "completions/clipped_ratio": pytest.approx(1 / 3)}
    assert rollout_metrics([sampled(row, "c", math.nan, {"right": math.nan})], 1, group_std, 1)["reward"] == 0.0


def test_what_is_logged_may_be_infinite_or_overflow():
    """It is left out of the mean, and ends no run."""
    parts = [{"a": math.inf, "b": 1.5e308}, {"a": -math.inf, "b": 1.5e308}, {"a": 3.0, "b": 1e299}]
    found = rollout_metrics([sampled({"prompt": "?"}, "a", 1.0, part) for part in parts], 3, group_std, 1)
    assert found["rewards/a/mean"] == 3.0 and found["rewards/b/mean"] == 1e299


def episode(turns, finish_reason, calls=0, failures=0, seconds=0.0, problem=None):
    """Each turn has three tokens, and four stand between two of them."""
    spans = np.array([[2 + 7 * turn, 5 + 7 * turn] for turn in range(turns)], np.int32)
    r = Rollout(np.zeros(spans[-1, 1], np.int32), spans, np.zeros(3 * turns, np.float32), finish_reason,
                np.array([[0, 0, 2]], np.int32), {"prompt": "?"}, [])
    r.score = 1.0
    r.counts = {"calls": calls, "failures": failures, "seconds": seconds}
    r.counts |= {"problem": problem} if problem else {}
    return r


def test_the_metrics_of_episodes():
    rollouts = [episode(1, "stop", seconds=0.5), episode(3, "turns", calls=3, failures=1, seconds=2.0),
                episode(2, "error", calls=1, problem="lost"), episode(2, "length", seconds=0.5)]
    found, plain = rollout_metrics(rollouts, 4, group_std, 2), [sampled({"prompt": "?"}, "a", 1.0, {})]
    assert {name: found[name] for name in found.keys() - rollout_metrics(plain, 1, group_std, 1).keys()} == {
        "episodes/turns": 2.0, "episodes/inserted_tokens": 4.0, "episodes/ended/done": 0.25,
        "episodes/ended/length": 0.25, "episodes/ended/turns": 0.25, "episodes/ended/timeout": 0.0,
        "episodes/ended/error": 0.25, "episodes/limited": 2, "tools/call_frequency": 1.0, "tools/failure_frequency": 0.25,
        # Per engine.
        "timing_s/environment": 1.5}
    assert found["completions/mean_length"] == 6.0
    assert rollout_metrics([episode(1, "stop")], 1, group_std, 1)["tools/failure_frequency"] == 0.0


def end_step(log, rollouts, n=2, keep=False):
    """Ends a step of this log as Run does, whose other attributes these are; returns Run's state."""
    state = {"step": log.metrics["step"], "num_tokens": 100, "first_gap": None}
    numbers = SimpleNamespace(batch_decode=lambda ids: [str(token) for (token,) in ids])
    run = SimpleNamespace(log=log, state=state, run_keys={*state}, first_step=-1, world_size=1,
                          engine=SimpleNamespace(allocated=0),
                          settings=SimpleNamespace(num_generations=n, save_rollouts=keep), tokenizer=numbers,
                          out_dir=log.out_dir)
    Run.end_step(run, rollouts, group_std)
    return run.state


def test_a_step_leaves_its_figures_and_a_sample_of_each_of_eight_prompts(mesh, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(metrics, "evaluation_metrics", lambda *_: {"eval/mean@2": 0.25, "eval/sums/mean@2": 0.75})
    rows = [{"prompt": [{"role": "user", "content": f"{i}?"}], "answer": str(i)} for i in (*range(7), 6, 7)]
    (tmp_path / "run").mkdir()
    log = RunLog(str(tmp_path / "run"), __file__, {"max_steps": 3, "defaults": {"max_steps": 60}}, run_state())
    for step in range(2):
        log.start(step)
        with log.timed("gen"):
            pass
        log.metrics |= {"eval/mean@2": 0.5} if step == 0 else {}
        state = end_step(log, [
            sampled(row, [{"role": "assistant", "content": f"{step} {row['answer']} {g}"}], float(g),
                    {"score": float(g)}, problem=TIMED_OUT * (g == i == 0))
            for i, row in enumerate(rows) for g in range(2)])
        assert state == {"step": step + 1, "num_tokens": 100 + 18 * 5, "first_gap": None}
    log.start(2)
    log.evaluation([], 2)
    log.write()

    written = lines(tmp_path / "run")
    timing = {"timing_s/gen", "timing_s/step", "perf/throughput", "perf/max_memory_allocated_gb"}
    assert [line["step"] for line in written] == [0, 1, 2] and timing <= set(written[1])
    assert written[1]["perf/throughput"] == pytest.approx(90 / written[1]["timing_s/step"])
    assert {name: value for name, value in written[1].items() if name not in timing} == {
        "step": 1, "reward": 0.5, "rewards/min": 0.0, "rewards/max": 1.0, "rewards/unscored": 0,
        "rewards/score/mean": 0.5, "rewards/timeouts": 1,
        "completions/mean_length": 3.0, "completions/sampled_tokens": 54, "completions/min_length": 3, "completions/max_length": 3,
        "completions/clipped_ratio": 0.0, "reward_std": pytest.approx(0.5 ** 0.5), "frac_reward_zero_std": 0.0,
        "num_tokens": 190}
    assert 0.05 < written[1]["perf/max_memory_allocated_gb"] < 100
    assert written[2] == {"step": 2, "eval/mean@2": 0.25, "eval/sums/mean@2": 0.75}
    assert log.state["eval_scores"] == {"2": 0.25}
    assert log.state["evaluated"] == {"step": 2, "eval/mean@2": 0.25, "eval/sums/mean@2": 0.75}

    # The first completion of each of the first eight prompts, though two of them are the same.
    assert lines(tmp_path / "run", "samples.jsonl") == [
        {"step": step, "prompt": row["prompt"], "completion": f"{step} {row['answer']} 0", "reward": 0.0,
         "finish_reason": "stop", "truth": row["answer"], "tokens": [["0", "1", "2"]],
         "logprobs": [-1.0] * 3} for step in range(2) for row in rows[:8]]
    output = capsys.readouterr().out
    assert "'0?'" in output and "'0 3 0'" in output and "reward 0, truth '3'" in output
    assert "'0 4 0'" not in output and "'1 0 0'" not in output      # nor in a step without an evaluation
    assert "step   1  reward 0.500  length    3  " in output
    assert "eval/mean@2 0.250" in output

    board = EventAccumulator(str(tmp_path / "run")).Reload()
    assert set(board.Tags()["scalars"]) == {name for line in written for name in line}
    for line in written:
        for name, value in line.items():
            (event,) = [event for event in board.Scalars(name) if event.step == line["step"]]
            assert event.value == pytest.approx(value, rel=1e-6)
    assert json.loads((tmp_path / "run" / "config.json").read_text()) == {
        "script": "test_run_log.py", "max_steps": 3, "checksums": {}, "out_dir": str(tmp_path / "run"),
        "defaults": {"max_steps": 60}}
    assert (tmp_path / "run" / "test_run_log.py").exists()


def test_all_rollouts_of_a_step_are_kept(mesh, tmp_path):
    """A step that is made again replaces its file, and the files of later steps are gone."""
    import pyarrow.parquet
    (tmp_path / "run").mkdir()
    talk = [{"role": "assistant", "content": "half a letter: \ud800", "day": datetime.date(2026, 5, 1)}]
    rollouts = [sampled({"prompt": "?"}, "a", 1.0, {"right": 1.0, "short": 0.5}, 2), episode(2, "stop"),
                sampled({"prompt": "?"}, "c", math.nan, {})]
    rollouts[1].completion = talk
    for step in (7, 8, 9, 8):
        log = RunLog(str(tmp_path / "run"), __file__, {"max_steps": 20}, run_state(step))
        rollouts[0].score = float(step)
        end_step(log, rollouts, 1, keep=True)
    assert log.history[-1] == lines(tmp_path / "run")[-1] and log.history[-1]["timing_s/save_rollouts"] > 0
    folder = tmp_path / "run" / "rollouts"
    assert sorted(os.listdir(folder)) == ["step-000007.parquet", "step-000008.parquet"]
    (folder / ".part").write_text("what a kill has left")
    table = pyarrow.parquet.read_table(folder)
    assert table["step"].to_pylist() == [7] * 3 + [8] * 3
    first, second, third = table.to_pylist()[3:]
    assert first == {"step": 8, "ids": [1, 2, 0, 1], "spans": [[2, 4]], "sequence_starts": [[0, 0, 2]],
                     "logprobs": [-1.0, -1.0], "score": 8.0, "parts": '{"right": 1.0, "short": 0.5}', "completion": "a"}
    assert second["spans"] == [[2, 5], [9, 12]] and len(second["ids"]) == 12 and len(second["logprobs"]) == 6
    assert json.loads(second["completion"]) == [talk[0] | {"day": "2026-05-01"}]
    assert math.isnan(third["score"]) and third["parts"] == "{}"


def test_a_disk_that_is_full_ends_a_run_that_keeps_its_rollouts(mesh, tmp_path, capsys, monkeypatch):
    def full(path):
        raise OSError(28, "No space left on device")
    (tmp_path / "run").mkdir()
    log = RunLog(str(tmp_path / "run"), __file__, {"max_steps": 20}, run_state())
    monkeypatch.setattr("options.saved_rollouts.sync", full)
    with pytest.raises(SystemExit):
        end_step(log, [sampled({"prompt": "?"}, "a", 1.0, {})], 1, keep=True)
    assert capsys.readouterr().err.endswith("No space left on device\n")
    assert os.listdir(tmp_path / "run" / "rollouts") == [".part"]


def test_what_scrolls_fits_into_80_columns(mesh, tmp_path, capsys, monkeypatch):
    """Of a run with the default settings, also where a rule of health is broken: it is said once."""
    (tmp_path / "run").mkdir()
    settings = {"learning_rate": 1e-4, "max_steps": 30}
    log = RunLog(str(tmp_path / "run"), __file__, settings, run_state())
    row = {"prompt": "What is the larger root of the equation x^2-11x+27=9? Show your work, step by step.",
           "answer": "9"}
    monkeypatch.setattr(metrics, "evaluation_metrics", lambda *_: {
        "eval/mean@4": 0.25, "eval/pass@4": 0.75, "eval/maj@4": 0.375, "eval/hard/mean@4": 0.0,
        "eval/mean_length": 14.031, "eval/clipped_ratio": 0.0, "eval/right_ended": 1.0})
    for step in range(30):
        log.start(step)
        if step % 10 == 0:
            log.evaluation([], 4)
        log.metrics |= {"entropy": 0.22 if step < 5 else 0.001, "grad_norm": 0.29,
                        "sampling/sampling_logp_difference/mean": 9.8e-6}
        log.started -= 12.3
        end_step(log, [sampled(row, "x^2-11x+18=0\n(x-2)(x-9)=0\nThe larger one is 9.\nAnswer: 9", 0.1, {})], 1)
    lines_shown = capsys.readouterr().out.splitlines()
    assert max(map(len, lines_shown)) <= 80, max(lines_shown, key=len)
    assert "step  10  reward 0.100  length    3  entropy 0.001  grad 0.29  gap 1e-05  12.3 s" in lines_shown
    assert "step   0  eval/mean@4 0.250  eval/pass@4 0.750  eval/maj@4 0.375" in lines_shown
    assert sum("The entropy has collapsed" in line for line in lines_shown) == 1
    # At the next evaluation, not in between.
    place = next(i for i, line in enumerate(lines_shown) if "The entropy has collapsed" in line)
    assert lines_shown[place - 1].startswith("step  20  eval/")


def test_a_source_whose_scores_are_all_the_same_is_named_once(mesh, tmp_path, capsys):
    """After the first three steps, with an answer that nobody can give."""
    (tmp_path / "run").mkdir()
    log = RunLog(str(tmp_path / "run"), __file__, {"max_steps": 5}, run_state())
    for step in range(5):
        end_step(log, [sampled({"prompt": "?", "source": source, "answer": answer}, "Answer: 4", score, {})
                       for source, answer, score in [("sums", "4", 1.0), ("sums", "5", 0.0), *[("olympiads", "proof", 0.0)] * 2]])
        shown = " ".join(capsys.readouterr().out.split())
        assert ("All 6 scores of the source olympiads in the first 3 steps are 0" in shown) == (step == 2)
        assert "where 'proof' is right, ends with 'Answer: 4'." in shown or step != 2
        assert "the source sums" not in shown


def step_of(log, capsys, groups, n=2, **changed):
    """What a step says whose groups have these rows and scores."""
    log.settings = {"num_generations": n} | changed
    capsys.readouterr()
    end_step(log, [sampled(row, "x", score, {}) for row, *scores in groups for score in scores], n)
    return " ".join(capsys.readouterr().out.split())


def test_rollouts_that_are_no_groups_are_refused(mesh, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    log = RunLog(str(tmp_path / "run"), __file__, {"max_steps": 9}, run_state())
    with pytest.raises(ValueError, match="3 rollouts are not groups of num_generations=2: each prompt has that many"):
        step_of(log, capsys, [({"prompt": "0?", "answer": "0"}, 1.0, 0.0, 1.0)])


def test_a_step_without_any_score_says_so(mesh, tmp_path, capsys):
    """As in a script that has lost its call of the scorer."""
    (tmp_path / "run").mkdir()
    log = RunLog(str(tmp_path / "run"), __file__, {"max_steps": 9}, run_state())
    row = {"prompt": "?", "answer": "1"}
    for _ in range(3):
        output = step_of(log, capsys, [(row, math.nan, math.nan)])
        assert "nothing was scored. Does the script call scorer(...)" in output
        assert "Does the reward read" not in output
    assert "nothing was scored" not in step_of(log, capsys, [(row, math.nan, 0.0)])


@pytest.mark.parametrize("value", [[0.5, 1.0], torch.tensor([0.5, 1.0]), torch.tensor(0.5), np.float32(0.5), "0.5"])
def test_what_is_no_number_is_named(mesh, tmp_path, value):
    (tmp_path / "run").mkdir()
    log = RunLog(str(tmp_path / "run"), __file__, {"max_steps": 9}, run_state())
    log.metrics |= {"train/mine": 1, "lengths": value, "flag": True, "infinite": math.inf}
    with pytest.raises(TypeError, match=r"log.metrics\['lengths'\] is .* and not a number: .*"
                                        r"log.board.add_histogram\('lengths', values, step\)"):
        log.write()
    assert not lines(tmp_path / "run")
    log.metrics.pop("lengths")
    log.write()
    assert lines(tmp_path / "run")[0]["flag"] is True


def test_samples_and_problems_of_episodes(mesh, tmp_path, capsys):
    """A sample has all turns. What went wrong is said once for the step, and how long environments took."""
    row, said = {"prompt": [{"role": "user", "content": "Go."}]}, [
        {"role": "assistant", "content": "a"}, {"role": "user", "content": "on"},
        {"role": "assistant", "content": "b"}]
    rollouts = [episode(2, "stop", seconds=0.25), episode(1, "error", problem="first"),
                episode(1, "timeout", seconds=0.25, problem="second")]
    for number, r in enumerate(rollouts):
        r.row, r.completion = row | {"answer": str(number)}, said
    (tmp_path / "run").mkdir()
    log = RunLog(str(tmp_path / "run"), __file__, {"max_steps": 1}, run_state())
    log.metrics["eval/mean@1"] = 0.5
    end_step(log, rollouts, 1)
    samples = lines(tmp_path / "run", "samples.jsonl")
    assert [line["completion"] for line in samples] == [said] * 3
    # Of each turn what was sampled, and not what stands between turns.
    assert samples[0]["tokens"] == [["0"] * 3] * 2 and samples[0]["logprobs"] == [0.0] * 6
    (line,) = lines(tmp_path / "run")
    assert line["timing_s/environment"] == 0.5 and line["episodes/ended/timeout"] == pytest.approx(1 / 3)
    output = capsys.readouterr().out
    assert "step 0: 2 of 3 completions failed or took too long; the first: first\n" in output
    assert "'a on b'" in output


@pytest.mark.parametrize("bad", ["", "   ", "\0\0\0", "half a li", "[1]", '"step"', '{"reward": 1}',
                                 '{"step": "3"}', "[" * 100_000, "\udcff"])
def test_a_bad_line_is_dropped(tmp_path, bad):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(f'{{"step": 0}}\n{bad}\n{{"step": 1}}\n'.encode(errors="surrogateescape"))
    assert rewind(str(path), 2) == [{"step": 0}, {"step": 1}]
    assert path.read_text() == '{"step": 0}\n{"step": 1}\n'


def test_a_log_is_rewound_to_the_step_that_is_resumed(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 1, "a": 2}\n{"step": 2}\n{"step": 1, "cut o')
    rewind(str(path), 2)
    assert path.read_text() == '{"step": 0}\n{"step": 1, "a": 2}\n'
    assert rewind(str(tmp_path / "nothing.jsonl"), 2) == []
    assert {file.name for file in tmp_path.iterdir()} == {"metrics.jsonl", "nothing.jsonl"}


def test_a_resumed_run_knows_its_evaluations(mesh, tmp_path, monkeypatch):
    """That of the model that is resumed, whose line is written again, and the scores of all checkpoints."""
    os.makedirs(tmp_path / "run")
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 0, "eval/mean@4": 0.25}\n{"step": 2, "eval/mean@4": 0.5}\n')
    evaluated = {"step": 2, "eval/mean@4": 0.5, "eval/pass@4": 1.0}
    log = RunLog(str(tmp_path / "run"), __file__, {"max_steps": 3},
                 run_state(2, evaluated=evaluated, eval_scores={"0": 0.25, "2": 0.5}))
    log.start(2)
    log.write()
    log.start(3)
    monkeypatch.setattr(metrics, "evaluation_metrics", lambda *_: {"eval/mean@4": 0.75})
    log.evaluation([], 4)
    log.write()
    assert lines(tmp_path / "run") == [{"step": 0, "eval/mean@4": 0.25}, evaluated,
                                       {"step": 3, "eval/mean@4": 0.75}]
    assert log.state["eval_scores"] == {"0": 0.25, "2": 0.5, "3": 0.75}


def test_a_figure_that_best_by_names_chooses_the_checkpoint(mesh, tmp_path, capsys):
    """If no evaluation makes it, this is said after the first one, and the figures there are."""
    (tmp_path / "run").mkdir()
    log = RunLog(str(tmp_path / "run"), __file__, {"max_steps": 3, "best_by": "eval/hard/pass@2"}, run_state())
    hard, easy = ({"prompt": "?", "source": source} for source in ("hard", "easy"))
    rollouts = [sampled(row, "a", score, {}) for row, score in ((hard, 0.0), (hard, 0.5), (easy, 1.0), (easy, 1.0))]
    log.evaluation(rollouts, 2)
    run = SimpleNamespace(log=log, state=log.state, saved=0, out_dir=log.out_dir,
                          settings=SimpleNamespace(max_steps=3, best_by="eval/hard/pass@2"))
    Run.save(run)
    log.evaluation(rollouts[:1], 1, "eval/hard/greedy")
    assert log.state["eval_scores"] == {"0": 0.5}
    run.settings.best_by = "eval/hard/greedy/mean@1"            # of a second evaluation
    Run.save(run)
    run.settings.best_by = "eval/hard/pass@k"
    with pytest.raises(SystemExit):
        Run.save(run)
    assert ("best_by=eval/hard/pass@k: the evaluation has made eval/mean@2, eval/pass@2, eval/maj@2, eval/hard/mean@2, "
            "eval/hard/pass@2, ") in capsys.readouterr().err


@pytest.mark.parametrize("k, score, refused", [(2, 0.5, False), (4, 0.5, True), (2, math.nan, False), (0, 0, False)])
def test_a_later_evaluation_makes_the_figure_of_best_by_or_scores_nothing(mesh, tmp_path, k, score, refused):
    """A run may be resumed with other eval_samples. k: those of the step; 0 for none."""
    (tmp_path / "run").mkdir()
    log = RunLog(str(tmp_path / "run"), __file__, {"max_steps": 9, "best_by": "eval/mean@2"}, run_state(4))
    if k:
        log.evaluation([sampled({"prompt": "?"}, "a", score, {})] * k, k)
    run = SimpleNamespace(log=log, state=log.state, saved=4, out_dir=log.out_dir,
                          settings=SimpleNamespace(max_steps=9, best_by="eval/mean@2"))
    with pytest.raises(SystemExit) if refused else contextlib.nullcontext():
        Run.save(run)


def test_an_evaluation_in_which_much_failed_chooses_no_checkpoint(mesh, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    log = RunLog(str(tmp_path / "run"), __file__, {"max_steps": 3}, run_state())
    for step, failed in ((0, 1), (1, 2)):
        log.start(step)
        log.evaluation([sampled({"prompt": "?"}, "a", math.nan if i < failed else 0.5, {}, problem="late" * (i < failed))
                        for i in range(10)], 1)
        log.write()
    assert log.state["eval_scores"] == {"0": 0.5} and log.state["evaluated"]["eval/unscored"] == 2
    said = capsys.readouterr().out
    assert "step 0: 1 of 10 held-out completions were not scored; the first: late" in said and "2 of 10" in said


def test_what_json_has_not(mesh, tmp_path):
    """The messages of a parquet file may have dates, and no figure is NaN or infinite."""
    log = RunLog(str(tmp_path), __file__, {"max_steps": 1}, run_state())
    log.metrics |= {"a": math.nan, "b": 1.5, "c": -math.inf}
    log.write([{"step": 0, "prompt": [{"role": "user", "content": "?", "on": datetime.date(2026, 1, 2)}],
                "reward": math.nan, "logprobs": [[math.inf, 0.5], "NaN"]}])
    assert lines(tmp_path) == [{"step": 0, "a": None, "b": 1.5, "c": None}]
    (sample,) = lines(tmp_path, "samples.jsonl")
    assert sample["prompt"][0]["on"] == "2026-01-02"
    assert sample["reward"] is None and sample["logprobs"] == [[None, 0.5], "NaN"]


def test_a_run_keeps_what_was_changed(tmp_path, monkeypatch):
    """The difference to the commit; nothing where there is no git."""
    changes = lambda: kept_code.git(*kept_code.DIFF).decode()
    monkeypatch.setattr(kept_code, "ROOT", tmp_path)
    assert changes() == ""
    git = lambda *words: subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a", *words], cwd=tmp_path,
                                        check=True, capture_output=True)
    git("init")
    (tmp_path / "losses.py").write_text("a = 1\n")
    git("add", ".")
    git("commit", "-m", "first")
    assert changes() == ""
    (tmp_path / "losses.py").write_text("a = 2\n")
    assert "-a = 1\n+a = 2\n" in changes()
    # What a larger repository holds besides the project is not the project's.
    (tmp_path / "project").mkdir()
    monkeypatch.setattr(kept_code, "ROOT", tmp_path / "project")
    assert changes() == ""
    monkeypatch.setenv("PATH", "")
    assert changes() == ""


def test_a_run_looks_for_changed_code(tmp_path, monkeypatch):
    """It opens options/kept_code.py for a changed or a new file, and for one that a setting names."""
    monkeypatch.setattr(metrics, "ROOT", tmp_path)
    changed = lambda **settings: bool(metrics.has_changed_code(settings))
    assert not changed(reward="") and changed(reward="paid.py:right")       # where there is no repository
    git = lambda *words: subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a", *words], cwd=tmp_path,
                                        check=True, capture_output=True)
    git("init")
    git("config", "status.showUntrackedFiles", "no")
    (tmp_path / "losses.py").write_text("a = 1\n")
    assert changed()
    git("add", ".")
    assert changed()
    git("commit", "-m", "first")
    assert not changed()
    (tmp_path / "losses.py").write_text("a = 2\n")
    assert changed()
    monkeypatch.setenv("PATH", "")
    assert not changed() and changed(reward="paid.py:right")


@pytest.mark.parametrize("owner", ["ours", "another's"])
def test_what_was_changed_can_be_applied(tmp_path, monkeypatch, owner):
    """Whatever git is told otherwise, whoever owns the files, and whatever they hold."""
    monkeypatch.setattr(kept_code, "ROOT", tmp_path / "project")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "project").mkdir()

    def git(*words, folder="project", **more):
        return subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a", "-c", "safe.directory=*", *words],
                              cwd=tmp_path / folder, check=True, capture_output=True, **more)

    path = tmp_path / "project/losses.py"
    path.write_bytes(b"one\r\ntwo\nthree\n" * 9)
    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    git("clone", "project", "other", folder=".")
    path.write_bytes(path.read_bytes()[5:-6] + "caf\xe9 \xf6".encode("latin-1") + "ö\r\n".encode())
    for key, value in {"diff.external": "false", "color.ui": "always", "diff.noprefix": "true", "diff.context": "0",
                       "diff.mnemonicPrefix": "true", "diff.relative": "true"}.items():
        git("config", "--global", key, value)
    if owner == "another's":
        monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "true")
        assert subprocess.run(["git", "-C", tmp_path / "project", "diff"], capture_output=True).returncode
    git("apply", "-", folder="other", input=kept_code.git(*kept_code.DIFF))
    assert (tmp_path / "other/losses.py").read_bytes() == path.read_bytes()


ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def test_a_console_that_knows_only_ascii_keeps_what_was_changed(folder, reward_file, tmp_path):
    copy = shutil.copytree(ROOT, tmp_path / "bäume", ignore=shutil.ignore_patterns(".*", "out", "tests", "docs"))
    for words in (["init"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a", "commit", "-m", "first"]):
        subprocess.run(["git", *words], cwd=copy, check=True, capture_output=True)
    with open(copy / "losses.py", "ab") as file:
        file.write("# schöner\n".encode())
    (copy / "größer.py").write_text("a = 'ö'\n", "utf-8")
    launch("train_grpo.py", f"--model={folder}", reward_file, "--engine=hf", "--max_steps=1", "--prompts_per_step=2",
           "--eval_prompts=2", "--train_prompts=16", "--eval_samples=1", f"--out_dir={tmp_path}/run", cwd=copy, env=ASCII)
    assert "+# schöner\n" in (tmp_path / "run/changes.diff").read_text("utf-8")
    assert len([*(tmp_path / "run/user_code").rglob("größer.py")]) == 1


def test_a_run_keeps_new_code_of_the_users(tmp_path, monkeypatch):
    """What settings name, wherever it is, and new files of the project; together at most 1 MB."""
    project, elsewhere, run = tmp_path / "project", tmp_path / "elsewhere", tmp_path / "project/runs/a"
    for folder in (project / "mine", elsewhere, run):
        folder.mkdir(parents=True)
    monkeypatch.setattr(kept_code, "ROOT", project)
    settings = {"reward": f"{elsewhere}/paid.py:right,{elsewhere}/paid.py:brief,math_verify", "seed": 0,
                "environment": f"{elsewhere}/game.py:Game", "model": "tiny", "defaults": {"reward": ""}}
    files = {elsewhere / "paid.py": "right = 1", elsewhere / "game.py": "class Game: pass", elsewhere / "rest.py": "",
             project / "mine/bäume.py": "seed = 1", project / "rows.jsonl": "{}", project / "old.py": "a = 1"}
    for path, text in files.items():
        path.write_text(text)
    for words in (["init"], ["add", "old.py"]):
        subprocess.run(["git", *words], cwd=project, check=True, capture_output=True)
    found = lambda: {str(path.relative_to(run / "user_code")) for path in (run / "user_code").rglob("*") if path.is_file()}
    kept = [str(path)[1:] for path in (elsewhere / "paid.py", elsewhere / "game.py", project / "mine/bäume.py")]
    for _ in range(2):                                          # copies are not copied when a run goes on
        kept_code.keep_code(settings, run)
        assert found() == {*kept}
    assert (run / "user_code" / kept[1]).read_text() == "class Game: pass"
    shutil.rmtree(run / "user_code")
    (project / "data.py").write_text("#" * 999_990)
    kept_code.keep_code(settings, run)
    assert found() == {*kept}                                   # what has no room is left out, what has is not


@pytest.mark.parametrize("settings, says", [
    ({"loss_type": "gspo"}, "epsilon=0.2 and epsilon_high=0.2 are bounds for loss_type=clip; those of gspo are in "
                            "config/methods/gspo.py"),
    ({"loss_type": "gmpo", "epsilon_high": 0.28}, "epsilon=0.2 and epsilon_high=0.28 are bounds"), ({"loss_type": "clip"}, ""),
    ({"loss_type": "gspo", "epsilon": 3e-4, "epsilon_high": 4e-4}, ""), ({"loss_type": "cispo", "epsilon_high": 4.0}, "")])
def test_bounds_of_another_loss_are_named_at_the_start(settings, says):
    settings = SimpleNamespace(**{"epsilon": 0.2, "epsilon_high": 0.2, "prompts_per_step": 1, "num_generations": 1, "model": "m",
                                  "max_steps": 1, "token_budget": 9, "environment": "", "images": "", "tools": "", "agent": "", "call_workers": 0,
                                  "dtype": "float32", "optimizer": "adamw"} | settings)
    run = SimpleNamespace(settings=settings, out_dir="", world_size=1, engine=SimpleNamespace(name="hf"),
                          notes=[], resumed=None, state={"settings": vars(settings)})
    policy = torch.nn.Linear(1, 1)
    policy.device = "cpu"
    text = opening(run, policy)
    assert (says in text) if says else ("epsilon" not in text)
