"""A long table holds what the answer checker must say, and rewards come in every form, good and bad."""
import contextlib
import copy
import functools
import json
import math
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

import data
from runs import load_rows
import rewards
from options.episode_rewards import EpisodeScorer
from options.episodes import EpisodeSampler
from losses import group_std
from rollout import Rollout
from options import reward_model, user_code, user_rewards
from runtime.metrics import evaluation_metrics, part_means, rollout_metrics
from options.files import file_rows
from options.user_code import UserProcess, load_from
from tasks.check_answer import final_answer
from test_data import MESSAGES, VERL, write
from tiny import pretrain


# ------------------------------------------------------------------------------------------------ rewards


def messages(*texts):
    """Returns completions of prompts that are messages: for each text the assistant's message with it."""
    return [[{"role": "assistant", "content": text}] for text in texts]


NAN = float("nan")
TIMED_OUT = "the reward took too long (call_timeout)"
ROWS = [{"prompt": f"What is {i}?", "answer": str(i), "level": i} for i in range(4)]
TEXTS = [f"Answer: {i}" for i in range(4)]


def in_process(spec):
    """Returns the Reward of a spec, and a process that calls it."""
    process = UserProcess(user_rewards.load_reward, spec)
    return process.call(0, *process.first), process


def reward_file(tmp_path, source):
    path = tmp_path / "my_reward.py"
    path.write_text(source)
    # Python takes a file of the same size and second for the one that it has compiled.
    shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)
    return in_process(f"{path}:reward")


def found(reward, rows, completions, *arguments, **more):
    """What score_completions returns. reward: a function, or a Reward and the process that calls it or None."""
    reward, process = reward if isinstance(reward, tuple) else (user_rewards.Reward(reward.__name__, reward), None)
    rollouts = [rollout(row, completion) for row, completion in zip(rows, completions)]
    columns = user_rewards.more_columns(rewards.columns_of(rollouts), rollouts, SimpleNamespace(max_steps=9))
    return user_rewards.score_completions(reward, columns, process, *arguments, **more)


def total(parts):
    """The score of a rollout with these parts, without weights."""
    scored = SimpleNamespace(parts={}, extra={}, problem="")
    summands = []
    rewards.Scorer._add(SimpleNamespace(weights=rewards.part_weights("")), scored, rewards.Result(parts), summands, {})
    return sum(summands) if summands else NAN


def score(*arguments, **more):
    """What score_completions returns, in columns: totals without weights, parts, who timed out, steps."""
    parts, steps, _, problems, _ = zip(*found(*arguments, **more))
    names = dict.fromkeys(name for own in parts for name in own)
    return ([total(own) for own in parts],
            {name: [own.get(name, math.nan) for own in parts] for name in names},
            [problem == TIMED_OUT for problem in problems], steps)


@pytest.mark.parametrize("task, name", [
    ("algebra", "accuracy"), ("arithmetic", "accuracy"), ("gsm8k", "exact_accuracy"),
    ("file", "exact_accuracy")])
def test_each_task_has_a_reward(task, name):
    settings = SimpleNamespace(**SETTINGS | {"task": task})
    scorer = rewards.load_scorer(settings, EpisodeSampler(settings, TOKENIZER, [0]), "cpu", torch.float32)
    [source] = scorer.sources
    # Logs of both have one name for them.
    assert source.args == (getattr(rewards, name),)
    rollouts = [rollout(ROWS[0], "Answer: 0")]
    scorer(rollouts)
    assert rollouts[0].parts == {"accuracy": 1.0}


def test_exact_accuracy():
    texts = ["Answer: 0", "Answer: 2", "2", r"\boxed{3.0}"]
    assert score((user_rewards.Reward("accuracy", rewards.exact_accuracy), None), ROWS, texts, 5)[:3] == (
        [1.0, 0.0, 1.0, 1.0], {"accuracy": [1.0, 0.0, 1.0, 1.0]}, [False] * 4)


@pytest.mark.parametrize("text, truth, right", [
    ("Answer: 7", "7", True), ("Answer: 8", "7", False), ("x=2\n3*2=6\nAnswer: 6", "6", True),
    ("Answer: -3/4", "-3/4", True), ("Answer: 3/4", "-3/4", False), ("Answer: -6/8", "-3/4", True),
    ("Answer: -3", "-3/4", False), ("Answer: 4/2", "2", True), ("Answer: 07", "7", True),
    ("Answer: 0.5", "1/2", True), ("Answer: 2.0", "2", True), ("Answer: +7", "7", True),
    ("Answer: x = 7", "7", True), ("answer: x=-7", "-7", True), ("Answer: xy=7", "7", False),
    (r"\boxed{7}", "7", True), (r"So it is $\boxed{-3/4}$.", "-3/4", True), (r"\boxed{8}", "7", False),
    (r"Answer: \boxed{7}", "7", True), ("**Answer:** 7\n", "7", True), ("Answer: $7$.", "7", True),
    # There is none, or something follows it.
    ("", "7", False), ("7", "7", False), ("x=7", "7", False), ("Answer:", "7", False),
    ("Answer: x", "7", False), ("Answer: 7 or 8", "7", False), ("Answer: 7\nAnswer:", "7", False),
    ("Answer: 7\nNo, wait", "7", False), (r"\boxed{7} it is", "7", False), ("Answer: 7/", "7", False),
    ("Answer: 7/0", "7", False), ("Answer: 7/2", "7", False), ("Answer: 7.5", "7", False),
    ("Answer: 1,007", "7", False), ("Answer: 3-7", "7", False), ("Answer: --7", "7", False),
    # The last one counts, and only as a whole.
    ("Answer: 8\nAnswer: 7", "7", True), ("Answer: 7\nAnswer: 8", "7", False), ("Answer: 77", "7", False),
    ("Answer: 7", "77", False), ("Answer: " + "7" * 5000, "7", False)])
def test_accuracy(text, truth, right):
    assert rewards.accuracy(None, [text], [truth]) == [float(right)]
    assert rewards.accuracy(None, [text, text], ["1000", truth]) == [0.0, float(right)]


def test_a_number_is_looked_for_quickly():
    start = time.process_time()
    for part in ("Answer:", "Answer: ", "Answer: 7", "Answer: 7.", r"\boxed{", "$", " ", "7", "}", "7/"):
        for text in (part * 20_000, "Answer: " + part * 20_000 + "x", "Answer: 7" + part * 20_000 + "x"):
            rewards.accuracy(None, [text], ["8"])
    assert time.process_time() - start < 2


def test_accuracy_agrees_with_the_exact_one_on_what_small_models_say():
    """Solutions in steps and quick answers, right and wrong, of which some are cut off in the middle."""
    rng, pairs = random.Random(0), []
    rows = [row for difficulty in (1, 2, 5) for row in load_rows("algebra", "train", 400, 0, difficulty)]
    rows += [row | {"solution": f"Answer: {row['answer']}"}
             for row in load_rows("arithmetic", "train", 400)]
    answers = {}
    for row in rows:
        answers.setdefault(row["source"], []).append(row["answer"])
    while len(pairs) < 2000:
        row = rng.choice(rows)
        text = rng.choice([row["solution"], rng.choice(rows)["solution"],
                           f"Answer: {rng.choice(answers[row['source']])}"])
        # A token is a byte.
        text = text[:max(0, len(text) - rng.randint(1, 8))] if rng.random() < 0.3 else text
        pairs.append((text, row["answer"]))
    texts, truths = zip(*pairs)
    scores = rewards.accuracy(None, texts, truths)
    assert scores == rewards.exact_accuracy(None, texts, truths) and 300 < sum(scores) < 1500


@pytest.mark.parametrize("spec, message", [
    ("my_reward.py", "has no function compute_score at its top level$"),
    ("no_such:reward", "no_such raised ModuleNotFoundError: No module named 'no_such'"),
    ("json:dumped", "json has no function dumped at its top level"),
    ("my_reward.py:", "reward must be file.py:function"), ("accuracy", "reward must be file.py:function"),
    ("missing.py:reward", "no such file: .*missing.py"),
    ("my_reward.py:rewards", "has no function rewards at its top level$"),
    ("my_reward.py:qqq", "has no function qqq at its top level$"),
    ("my_reward.py:CONSTANT", "has no function CONSTANT at its top level"),
    ("broken.py:reward", "broken.py raised ZeroDivisionError: division by zero"),
    ("syntax.py:reward", "syntax.py raised SyntaxError"),
])
def test_load_reward_errors(tmp_path, monkeypatch, spec, message):
    monkeypatch.setattr("options.user_code.STARTED_IN", str(tmp_path))
    write(tmp_path / "my_reward.py", "CONSTANT = 1", "def helper(): pass", "def reward(completions): pass")
    write(tmp_path / "broken.py", "1 / 0")
    write(tmp_path / "syntax.py", "def reward(:")
    with pytest.raises(ValueError, match=message):
        user_rewards.load_reward(spec)


def test_a_reward_gets_columns_that_all_rows_have(tmp_path):
    seen = []

    def reward(prompts, completions, **columns):
        seen.append((prompts, completions, columns))
        return [1.0, 2.0]
    rows = [{"prompt": "a", "answer": "1", "extra": 1}, {"prompt": "b", "answer": "2"}]
    assert score(reward, rows, ["x", "y"], 5)[0] == [1.0, 2.0]
    (prompts, completions, columns), = seen
    assert (prompts, completions) == (["a", "b"], ["x", "y"])
    # What TRL hands over as well: the tokens of each completion, where the run is, and two functions.
    assert columns.pop("completion_ids") == [[6], [6]] and columns.pop("answer") == ["1", "2"]
    assert columns.keys() == {"trainer_state", "log_extra", "log_metric"}
    assert vars(columns["trainer_state"]) == {"global_step": 3, "max_steps": 9}
    seen.clear()
    turns = [{"role": "assistant", "content": "x"}, {"role": "tool", "content": "1"},
             {"role": "assistant", "content": "z"}]
    score(reward, [{"prompt": MESSAGES}, {"prompt": "b"}], [turns, "y"], 5)
    assert seen[0][:2] == ([MESSAGES, "b"], [turns, "y"]) and "answer" not in seen[0][2]


@pytest.mark.parametrize("completion, text", [
    ("Answer: 2", "Answer: 2"), ("", ""), (messages("Answer: 2")[0], "Answer: 2"),
    ([*messages("Answer: 1")[0], {"role": "tool", "content": "no"}, *messages("Answer: 2")[0]], "Answer: 2"),
    ([{"role": "assistant", "content": None, "tool_calls": []}], ""),
    ([{"role": "assistant", "tool_calls": []}], ""),
])
def test_content(completion, text):
    assert rewards.content(completion) == text
    for reward in (rewards.accuracy, rewards.exact_accuracy):
        assert reward([None], [completion], ["2"]) == [float("2" in text)]


def test_a_reward_gets_only_the_columns_it_takes(tmp_path):
    reward = reward_file(tmp_path, "def reward(level, missing=7): return [x + missing for x in level]")
    assert score(reward, ROWS, TEXTS, 5)[0] == [7.0, 8.0, 9.0, 10.0]
    reward = reward_file(tmp_path, "def reward(completions, missing): return [0.0] * len(completions)")
    with pytest.raises(ValueError, match="needs a column missing; the columns are answer, level, prompts"):
        score(reward, ROWS, TEXTS, 5)


def test_a_reward_file_may_define_dataclasses(tmp_path):
    source = ("from __future__ import annotations\nfrom dataclasses import dataclass\n"
              "@dataclass\nclass Note:\n    value: float\n"
              "def reward(completions, **columns): return [Note(2.0).value for _ in completions]")
    assert score(reward_file(tmp_path, source), ROWS, TEXTS, 5)[0] == [2.0] * 4


class Array(list):
    """Gives its numbers by tolist(), like a tensor."""
    tolist = list.copy


@pytest.mark.parametrize("returned, totals, parts", [
    ([1, 0.5, True, False], [1, 0.5, 1, 0], {}),
    ((1, 2, 3, 4), [1, 2, 3, 4], {}),
    (Array([1, 2, 3, 4]), [1, 2, 3, 4], {}),
    ([None, 1, None, Fraction(1, 2)], [NAN, 1, NAN, 0.5], {}),
    ([{"a": 1, "b": 2}, {"a": 3}, None, 5], [3, 3, NAN, 5],
     {"a": [1, 3, NAN, NAN], "b": [2, NAN, NAN, NAN], "plain": [NAN, NAN, NAN, 5]}),
    ([{"score": 1, "acc": False, "pred": "72"}] * 4, [1] * 4, {"score": [1] * 4, "acc": [0] * 4}),
    ([{"a": None, "b": 1}, {}, {"score": None, "a": 1}, {"a": 2}], [1, NAN, NAN, 2],
     {"b": [1, NAN, NAN, NAN], "a": [NAN, NAN, 1, 2], "score": [NAN] * 4}),
])
def test_what_a_reward_may_return(returned, totals, parts):
    def plain(completions):
        return returned
    # A reward without parts is its own only part.
    parts = parts or {"plain": totals}
    parts = {name: pytest.approx(values, nan_ok=True) for name, values in parts.items()}
    assert score(plain, ROWS, TEXTS, 5)[:3] == (
        pytest.approx(totals, nan_ok=True), parts, [False] * 4)


@pytest.mark.parametrize("returned, message", [
    ([1.0] * 3, r"reward my_reward returned \[1.0, 1.0, 1.0\], not a list of 4 values, one for each completion"),
    ([1.0] * 5, "not a list of 4"), (None, "reward my_reward returned None, not a list of 4"),
    (1.0, "reward my_reward returned 1.0, not a list of 4"), ({"a": 1}, "not a list of 4"),
    ("1234", "reward my_reward returned '1234', not a list of 4"),
    ([1.0, 1.0, 1.0, "1"], "reward my_reward returned '1': not a finite number"),
    ([1.0, 1.0, 1.0, [1]], r"reward my_reward returned \[1\]: not .* nor pairs \(character, score\) with "
     "characters from 0 to 8; "),
    ([[(9, 1.0)], 1.0, 1.0, 1.0], r"\[\(9, 1.0\)\]: not .* from 0 to 8; the completion is 'Answer: 0'"),
    ([[(-1, 1.0)], 1.0, 1.0, 1.0], "nor pairs"), ([[(0.5, 1.0)], 1.0, 1.0, 1.0], "nor pairs"),
    ([[(0, NAN)], 1.0, 1.0, 1.0], r"returned \[\(0, nan\)\]: not a finite number"),
    ([[("0", 1)], 1, 1, 1], "nor pairs"),
    ([[(0, 3e38), (1, 3e38)], 1, 1, 1], r"returned .*: not a finite number"),
    ([1.0, math.inf, 1.0, 1.0], "reward my_reward returned inf: not a finite number"),
    ([1.0, 1.0, NAN, 1.0], "reward my_reward returned nan: not a finite number"),
    ([0, -1e39, 0, 0], r"returned -1e\+39: not a finite number in float32.*; the completion is 'Answer: 1'$"),
    ([{"a": NAN}] * 4, "reward my_reward returned {'a': nan}: not a finite number"),
    ([{"a": "72"}] * 4, "reward my_reward returned {'a': '72'}: not a finite number"),
    ([{"score": "72"}] * 4, "reward my_reward returned {'score': '72'}: not a finite number"),
])
def test_what_a_reward_may_not_return(returned, message):
    def my_reward(completions):
        return returned
    with pytest.raises(ValueError, match=message):
        score(my_reward, ROWS, TEXTS, 5)


VERL_REWARD = """
def reward(data_source, solution_str, ground_truth, extra_info=None):
    assert extra_info in ({}, {"index": 0})
    if solution_str == "hang":
        while True: pass
    if solution_str == "raise":
        raise KeyError("oops")
    right = solution_str == f"{data_source} {ground_truth}"
    return {"score": float(right), "acc": right, "pred": solution_str} if solution_str != "plain" else 0.25
"""


@pytest.mark.parametrize("row, right", [
    (VERL, "math 2"),
    ({"prompt": "1+1?", "answer": "2", "source": "mine"}, "mine 2"),
    ({"prompt": "1+1?", "answer": "2", "source": "mine", "data_source": None}, "mine 2"),  # others have one
    ({"prompt": "1+1?", "answer": "2"}, "None 2"),
    ({"prompt": "1+1?", "answer": "2", "reward_model": {"style": "model"}}, "None 2"),
    ({"prompt": "1+1?", "answer": "2", "reward_model": "rule"}, "None 2"),
    ({"prompt": "1+1?", "answer": "2", "ground_truth": 3, "data_source": "d"}, "d 3"),
])
def test_verl_reward(tmp_path, row, right):
    reward = reward_file(tmp_path, VERL_REWARD)
    start = time.perf_counter()
    completions = [right, "wrong", "hang", "plain"]
    completions = completions if isinstance(row["prompt"], str) else messages(*completions)
    totals, parts, timed_out, _ = score(reward, [row] * 4, completions, 0.3)
    assert totals == pytest.approx([1.0, 0.0, NAN, 0.25], nan_ok=True)
    assert timed_out == [False, False, True, False] and time.perf_counter() - start < 20
    assert parts == {"score": pytest.approx([1, 0, NAN, NAN], nan_ok=True),
                     "acc": pytest.approx([1, 0, NAN, NAN], nan_ok=True),
                     "reward": pytest.approx([NAN, NAN, NAN, 0.25], nan_ok=True)}
    with pytest.raises(ValueError, match="reward raised KeyError: 'oops'; the completion is 'raise'"):
        score(reward, [row] * 2, messages(right, "raise"), 5)


FORMS = """
def only(solution_str, ground_truth): return float(solution_str == ground_truth)
def info(solution_str, ground_truth, extra_info=None): return float(extra_info["index"] == 0)
def rest(solution_str, ground_truth, method="strict", score=0.5, **kwargs):
    return score * (sorted(kwargs) == ["data_source", "extra_info"])
def logs(solution_str, log_metric): log_metric("length", len(solution_str)); return 1.0
def batch(data_sources, solution_strs, ground_truths, extra_infos):
    assert len(data_sources) == len(extra_infos) == 2
    return [{"score": float(one == truth), "pred": one} for one, truth in zip(solution_strs, ground_truths)]
def trl(completions, solution_str, ground_truth): return [float(one == two) for one, two in zip(completions, ground_truth)]
def ids(completion_ids, **kwargs): return [kwargs["trainer_state"].global_step + one[0] for one in completion_ids]
class Made:
    __name__ = "made"
    def __call__(self, completion_ids, **kwargs): return [float(len(one)) for one in completion_ids]
compute_score, made = only, Made()
"""


@pytest.mark.parametrize("name, form, scores", [
    ("only", "verl", [1, 0]), ("info", "verl", [1, 1]), ("rest", "verl", [0.5, 0.5]), ("logs", "verl", [1, 1]),
    ("batch", "verl batch", [1, 0]), ("trl", "TRL", [1, 0]), ("ids", "TRL", [9, 9]), ("made", "TRL", [1, 1]),
    ("", "verl", [1, 0])])
def test_the_parameters_tell_the_form(tmp_path, name, form, scores):
    """A file alone stands for its compute_score, as in verl."""
    (tmp_path / "forms.py").write_text(FORMS)
    reward = in_process(f"{tmp_path}/forms.py" + (name and f":{name}"))
    assert reward[0].form == form
    row = {"prompt": "p", "ground_truth": "a", "extra_info": {"index": 0}, "score": 9, "solution_str": "x"}
    parts, _, logged, problems, _ = zip(*found(reward, [row, row], ["a", "b"], 5.0))
    assert [total(one) for one in parts] == scores and not any(problems)
    assert [*logged] == [{"length": 1.0}] * 2 if name == "logs" else [{}, {}]


def test_a_file_finds_its_neighbours_and_no_package_runs(tmp_path):
    """As rewards stand in other projects, whose packages import much more."""
    below = tmp_path / "project" / "score" / "deep"
    below.mkdir(parents=True)
    for folder in (below, below.parent, below.parent.parent):
        (folder / "__init__.py").write_text("raise ValueError('a whole trainer')")
    (below.parent / "values.py").write_text("from .deep.more import ONE")
    (below / "more.py").write_text("ONE = 1.0")
    (below / "mine.py").write_text("from ..values import ONE\nfrom . import more\nsame = more.ONE\n"
                                   "def reward(completions): return [ONE + same for c in completions]")
    (below / "deeper").mkdir()
    (below / "deeper" / "__init__.py").write_text(
        "from . import two\ndef reward(completions): return [two.TWO for c in completions]")
    (below / "deeper" / "two.py").write_text("TWO = 2.0")
    for name in ("mine.py", "deeper/__init__.py"):
        assert score(in_process(f"{below}/{name}:reward"), ROWS, TEXTS, 5)[0] == [2.0] * 4


def test_an_installed_function_is_a_reward():
    reward = in_process("rewards:exact_accuracy")
    assert score(reward, ROWS, ["Answer: 0", "Answer: 2", "2", r"\boxed{3.0}"], 5)[0] == [1.0, 0.0, 1.0, 1.0]


def test_verl_reward_without_a_truth(tmp_path):
    with pytest.raises(ValueError, match="needs a column ground_truth"):
        score(reward_file(tmp_path, VERL_REWARD), [{"prompt": "1+1?"}], ["2"], 5)


HANGING = """
import time
def reward(completions, **columns):
    rewards = []
    for completion in completions:
        try:
            while completion == "hang": time.sleep(0.01)
            if completion == "raise": raise ValueError("oops")
        except {swallows}:
            pass
        rewards.append(1.0)
    return rewards
"""


@pytest.mark.parametrize("swallows", ["ZeroDivisionError", "BaseException"])
def test_only_the_completion_that_hangs_is_lost(tmp_path, swallows, capsys):
    reward = reward_file(tmp_path, HANGING.format(swallows=swallows))
    start = time.perf_counter()
    totals, _, timed_out, _ = score(reward, ROWS, ["a", "hang", "b", "c"], 0.3)
    assert totals == pytest.approx([1.0, NAN, 1.0, 1.0], nan_ok=True) and timed_out == [False, True, False, False]
    # The limit ran out for all of them together, which is said, and then for the one that hangs.
    assert capsys.readouterr().err == ("reward reward took too long (call_timeout) for 4 completions: each is now scored by a "
                                       "call of its own\n")
    assert 0.6 <= time.perf_counter() - start < 20
    assert score(reward, ROWS[:1], ["hang"], 0.1, reward_errors="zero")[:3:2] == ([0.0], [True])


def test_no_limit(tmp_path):
    reward = reward_file(tmp_path, "import time\ndef reward(completions): time.sleep(0.3); return [1.0] * 4")
    assert score(reward, ROWS, TEXTS, 0)[:3:2] == ([1.0] * 4, [False] * 4)


def test_a_reward_that_raises(tmp_path, capsys):
    reward = reward_file(tmp_path, HANGING.format(swallows="ZeroDivisionError"))
    with pytest.raises(ValueError, match="raised ValueError: oops; the completion is 'raise'") as info:
        score(reward, ROWS, ["a", "b", "raise", "c"], 5)
    assert 'raise ValueError("oops")' in info.value.__cause__.__notes__[0]       # the reward's own traceback
    # It raises after the one that hangs.
    with pytest.raises(ValueError, match="raised ValueError: oops; the completion is 'raise'"):
        score(reward, ROWS, ["a", "hang", "raise", "c"], 0.2)
    # It raises for all together and for none alone, so no completion is to blame.
    capsys.readouterr()
    for errors in ("stop", "unscored", "zero"):
        reward = reward_file(tmp_path, "def reward(completions): assert len(completions) == 1; return [1.0]")
        assert score(reward, ROWS, TEXTS, 5, reward_errors=errors)[:3:2] == ([1.0] * 4, [False] * 4)
        assert "reward reward raised AssertionError: " in (said := capsys.readouterr().err)
        assert said.endswith(" for 4 completions: each is now scored by a call of its own\n")
    reward = reward_file(tmp_path, "def reward(completions): raise KeyError(1)")
    with pytest.raises(ValueError, match="reward raised KeyError: 1; the completion is 'b'"):
        score(reward, [{"prompt": MESSAGES}], [messages("a")[0] + messages("b")[0]], 5)


# ------------------------------------------------------------------------------------------------ rollouts


SETTINGS = {"reward": "", "task": "algebra", "call_timeout": 5.0, "call_workers": 0,
            "reward_errors": "stop", "reward_weights": "", "reward_model": "", "stop": "",
            "answer_column": "", "environment": "", "images": "", "agent": "", "tools": "", "max_environments": 0, "token_budget": 100}
TOKENIZER = pretrain.make_tokenizer()


def rollout(row, completion, score=NAN, **parts):
    return Rollout(np.array([5, 6]), np.array([[1, 2]]), np.array([-1.0]), "stop", np.array([[0, 0, 1]]), row, completion,
                   parts, rewards={0: score}, versions=((0, 3),))


def prompts_of(rows):
    return data.encode_rows(TOKENIZER, list(enumerate(rows[:2])))


@pytest.fixture
def scorer(tmp_path, monkeypatch):
    """Makes a Scorer with the reward of a source and a stand-in for a reward model: it counts digits."""
    class Digits:
        __call__ = reward_model.RewardModel.__call__

        def __init__(self, *arguments):
            self.arguments, self.seen = arguments, []

        def score(self, prompts, completions):
            self.seen.append((prompts, completions))
            if self.arguments[0] == "broken":
                raise ValueError("no score at all")
            texts = map(rewards.content, completions)
            return [sum(c.isdigit() for c in text) if text else NAN for text in texts]

    def scorer(source="", **settings):
        (tmp_path / "my_reward.py").write_text(source)
        spec = {"reward": f"{tmp_path}/my_reward.py:reward"} if source else {}
        settings = SimpleNamespace(**SETTINGS | spec | settings)
        loaded = rewards.load_scorer(settings, EpisodeSampler(settings, TOKENIZER, [TOKENIZER.eos_token_id]),
                                     torch.device("cpu"), torch.float32)

        class Again(type(loaded)):
            def __call__(self, rollouts):
                """Scores rollouts as if they had no score."""
                for r in rollouts:
                    r.parts, r.problem = {}, ""
                super().__call__(rollouts)

        loaded.__class__ = Again
        return loaded
    monkeypatch.setattr(reward_model, "RewardModel", Digits)
    return scorer


def test_scorer_puts_scores_on_rollouts(scorer, tmp_path):
    row = {"prompt": MESSAGES, "answer": "2"}
    rollouts = [rollout(row, messages("Answer: 2")[0]), rollout(row, messages("Answer: 3")[0]),
                rollout(ROWS[3], "Answer: 3")]
    # The task's plain reward, the exact one, and one of a file.
    for scores in (scorer(), scorer(task="file"), scorer(
            "def accuracy(completions): return [float('2' in str(c) or '3' in c) for c in completions]",
            reward=f"{tmp_path}/my_reward.py:accuracy")):
        again = copy.deepcopy(rollouts)
        assert scores(again) is None
        assert [r.score for r in again] == [1.0, 0.0, 1.0] and not any(r.problem for r in again)
        assert [r.parts for r in again] == [{"accuracy": 1.0}, {"accuracy": 0.0}, {"accuracy": 1.0}]
        assert [r.rewards for r in again] == [{0: 1.0}, {0: 0.0}, {0: 1.0}]
        assert again[2].row == ROWS[3] and again[2].completion == "Answer: 3"
    for scores in (scorer(), scorer(reward_model="some/model"), scorer(task="file")):
        scores([])


def test_the_token_of_a_character_gets_its_score(scorer, folder, tmp_path):
    """By a tokenizer of bytes, of a text whose characters have up to four, compared with a count of them."""
    tokenizer, text = AutoTokenizer.from_pretrained(folder), "2+2=4 \u20ac\n\U0001f600 = 4\nAnswer: 4"
    ids = np.array(tokenizer(text).input_ids + [tokenizer.eos_token_id], np.int32)
    assert len(ids) == len(text.encode()) + 1
    pairs = [(text.index("\u20ac"), 0.5), (text.index("\U0001f600"), -1.0), (len(text) - 1, 2.0), (0, 0.25),
             (0, 0.5)]
    places = [len(text[:character + 1].encode()) - 1 for character, _ in pairs]
    source = (f"def reward(completions): return [{pairs}, [], 3.0, None, [[1, 1.0], [2, -1.0]]]"
              "[:len(completions)]")
    rollouts = [rollout(ROWS[0], text) for _ in range(5)]
    for r in rollouts:
        r.ids, r.spans, r.logprobs = ids, np.array([[0, len(ids)]]), [-1.0] * len(ids)
    scores = scorer(source)
    scores.user_rewards.tokenizer = tokenizer
    scores(rollouts)
    last = len(ids) - 1
    assert rollouts[0].rewards == {places[0]: 0.5, places[1]: -1.0, places[2]: 2.0, 0: 0.75}
    assert [r.score for r in rollouts[:3]] == [2.25, 0.0, 3.0] and math.isnan(rollouts[3].score)
    assert [r.rewards for r in rollouts[1:3]] == [{last: 0.0}, {last: 3.0}]
    assert list(rollouts[3].rewards) == [last] and math.isnan(rollouts[3].rewards[last])
    assert rollouts[4].rewards == {1: 1.0, 2: -1.0} and rollouts[4].score == 0
    # The completion may have begun before the first sampled token, which gets what is scored before it.
    begun = len(text[:text.index("=")].encode())
    for r in rollouts:
        r.begun, r.spans, r.logprobs = begun, np.array([[begun, len(ids)]]), [-1.0] * (len(ids) - begun)
    scores(rollouts)
    assert rollouts[0].rewards == {places[0] - begun: 0.5, places[1] - begun: -1.0, places[2] - begun: 2.0, 0: 0.75}
    for r in rollouts:
        r.begun, r.spans, r.logprobs = 0, np.array([[0, len(ids)]]), [-1.0] * len(ids)
    # With a reward model half of it is the steps', and the model's share is the last token's.
    scores = scorer(source, reward_model="some/model", reward_weights="reward:0.5")
    scores.user_rewards.tokenizer = tokenizer
    scores(rollouts)
    digits = sum(c.isdigit() for c in text)
    assert rollouts[0].rewards == {places[0]: 0.25, places[1]: -0.5, places[2]: 1.0, 0: 0.375, last: digits}
    assert rollouts[0].score == 2.25 / 2 + digits
    # The steps of two rewards add up, also at one token.
    (tmp_path / "more.py").write_text("def more(completions): return [[(0, 1.0), (2, 2.0)] for c in completions]")
    two = scorer(source, reward=f"{tmp_path}/my_reward.py:reward,{tmp_path}/more.py:more", reward_weights="more:2")
    two.user_rewards.tokenizer = tokenizer
    two(rollouts)
    assert rollouts[4].rewards == {1: 1.0, 2: 3.0, 0: 2.0} and rollouts[4].score == 6
    with pytest.raises(ValueError, match="scores characters of a completion, but an episode has several"):
        scores.user_rewards.episodes = True
        scores(rollouts)


def test_only_a_reward_of_the_users_is_called_in_a_process_of_its_own(scorer, monkeypatch):
    rollouts = [rollout(row, f"Answer: {i % 2}") for i, row in enumerate(ROWS)]
    source = "import os\ndef reward(completions): return [os.getpid()] * len(completions)"
    for own in (scorer(source), scorer(source, call_timeout=0.0)):
        own(rollouts)
        assert (rollouts[0].score == os.getpid()) == (own.settings.call_timeout == 0)
    monkeypatch.setattr(subprocess, "Popen", None)
    for other in (scorer(), scorer(task="file")):
        assert not other.user_rewards
    for task in ("algebra", "arithmetic"):                      # single answers with a number
        scorer(task=task)(rollouts)
        assert [r.score for r in rollouts] == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize("call_timeout", [0.0, 5.0])
def test_a_reward_that_changes_its_arguments_changes_nobody_elses(scorer, tmp_path, call_timeout):
    source = ("def first(completions, words, **_):\n    words[0].pop()\n    completions[0][-1]['content'] = 'x'\n"
              "    return [0.0] * len(completions)\n"
              "def second(completions, words, **_):\n"
              "    return [len(words[0]) + len(completions[0][-1]['content'])] * len(completions)\n")
    path = f"{tmp_path}/my_reward.py"
    completion = [{"role": "assistant", "content": "abcde"}]
    rollouts = [rollout(row | {"words": ["a", "b"]}, completion) for row in ROWS]
    scorer(source, reward=f"{path}:first, {path}:second", call_timeout=call_timeout)(rollouts)
    assert rollouts[0].parts["second"] == 7 and rollouts[0].row["words"] == ["a", "b"]
    assert completion[0]["content"] == "abcde"


def test_functions_of_a_file_share_a_process_that_runs_it_once(scorer, tmp_path):
    source = ("import os\nwith open(__file__ + '.log', 'a') as log: log.write('run\\n')\n"
              "def reward(completions, **_): return [float(os.getpid())] * len(completions)\n"
              "def compute_score(solution_str): return {'pid': float(os.getpid()), 'length': len(solution_str)}\n")
    path = f"{tmp_path}/my_reward.py"
    rollouts, own = [rollout(row, "abc") for row in ROWS], scorer(source, reward=f"{path}:reward, {path}")
    own(rollouts)
    assert len(own.user_rewards.processes) == 1 and rollouts[0].parts["reward"] == rollouts[0].parts["pid"] != os.getpid()
    assert rollouts[3].parts["length"] == 3 and (tmp_path / "my_reward.py.log").read_text() == "run\n"


def test_the_share_without_an_answer_is_logged(scorer):
    """By the task's own number, and by any reward; not where rows have no answer."""
    rows, texts = [{"prompt": "p", "answer": "1"}] * 3, ["Answer: 2", "I do not know", "Answer: 1"]
    for scores in (scorer(), scorer("def reward(completions): return [0.0] * len(completions)")):
        rollouts = [rollout(row, text) for row, text in zip(rows, texts)]
        scores(rollouts)
        assert [r.answer for r in rollouts] == ["2", "", "1"]
        metrics = rollout_metrics(rollouts, 3, group_std, 1)
        assert metrics["rewards/no_answer"] == evaluation_metrics(rollouts, 3)["eval/rewards/no_answer"] == 1 / 3
        assert (metrics["rewards/min"], metrics["rewards/max"]) == (0.0, max(r.score for r in rollouts))
    rollouts = [rollout({"prompt": "p"}, text) for text in texts]
    scores(rollouts)
    assert [r.answer for r in rollouts] == ["2", "", "1"]       # they vote nevertheless
    assert "eval/rewards/no_answer" not in evaluation_metrics(rollouts, 3)


def test_large_scores_keep_their_differences(scorer):
    """In float32 these two would be one."""
    source = "def reward(completions): return [1e7 + 0.25 * len(c) for c in completions]"
    rollouts = [rollout(ROWS[0], text) for text in ("a", "ab")]
    scorer(source)(rollouts)
    assert [r.score for r in rollouts] == [1e7 + 0.25, 1e7 + 0.5] == [r.rewards[0] for r in rollouts]


def test_scorer_keeps_parts_and_timeouts(scorer):
    source = ("def reward(data_source, solution_str, ground_truth):\n"
              "    while solution_str == 'hang': pass\n"
              "    return {'both': {'a': 1, 'b': 2}, 'one': {'a': 3}, 'none': None}[solution_str]\n")
    rollouts = [rollout(row, text) for row, text in zip(ROWS, ["both", "hang", "one", "none"])]
    scorer(source, call_timeout=0.3)(rollouts)
    assert [r.problem for r in rollouts] == ["", TIMED_OUT, "", ""]
    assert [r.score for r in rollouts] == pytest.approx([3.0, NAN, 3.0, NAN], nan_ok=True)
    assert [r.parts for r in rollouts] == [{"a": 1, "b": 2}, pytest.approx({"a": NAN, "b": NAN}, nan_ok=True),
                                           {"a": 3}, {}]
    figures = rollout_metrics(rollouts, 4, group_std, 1)
    assert figures["rewards/timeouts"] == 1 and figures["rewards/unscored"] == 2 and figures["reward"] == 3
    scorer(source, call_timeout=0.3, reward_errors="zero")(rollouts)
    assert [r.score for r in rollouts] == pytest.approx([3.0, 0.0, 3.0, NAN], nan_ok=True)
    assert [r.parts for r in rollouts] == [{"a": 1, "b": 2}, {"a": 0, "b": 0}, {"a": 3}, {}]
    assert rollout_metrics(rollouts, 4, group_std, 1)["rewards/timeouts"] == 1


@pytest.mark.parametrize("name, truth", [("", "verl's"), ("final", "mine"), ("ground_truth", "theirs"),
                                         ("reward_model.ground_truth", "verl's")])
@pytest.mark.parametrize("source", [
    "def reward(solution_str, ground_truth): return float(solution_str == ground_truth)",
    "def reward(solution_strs, ground_truths): return [float(a == b) for a, b in zip(solution_strs, ground_truths)]"])
def test_a_named_column_is_the_truth_of_verls_form(scorer, tmp_path, name, truth, source):
    columns = {"final": "mine", "ground_truth": "theirs", "reward_model": {"ground_truth": "verl's"}}
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "p"} | columns))
    [(_, row)] = file_rows(str(tmp_path / "rows.jsonl"), answer_column=name)
    rollouts = [rollout(row, text) for text in (truth, "other")]
    scorer(source, answer_column=name)(rollouts)
    assert [r.score for r in rollouts] == [1.0, 0.0]


def test_scorer_adds_a_reward_model(scorer):
    source = "def reward(completions): return [None if '?' in c else len(c) for c in completions]"
    both = scorer(source, reward_model="some/model", reward_weights="reward:10,reward_model:0.5")
    rollouts = [rollout(row, text) for row, text in zip(ROWS, ["12a", "1?2", "", "abc"])]
    both(rollouts)
    assert not any(r.problem for r in rollouts)
    assert both.sources[-1].arguments == ("some/model", torch.device("cpu"), torch.float32, 100)
    assert both.sources[-1].seen == [([row["prompt"] for row in ROWS], ["12a", "1?2", "", "abc"])]
    # What the reward leaves unscored adds nothing; what the model cannot score is not scored.
    assert [r.score for r in rollouts] == [31.0, 1.0, pytest.approx(NAN, nan_ok=True), 30.0]
    assert [r.parts for r in rollouts] == [
        pytest.approx({**({} if a is None else {"reward": a}), "reward_model": b}, nan_ok=True)
        for a, b in [(3, 2), (None, 2), (0, NAN), (3, 0)]]
    alone = scorer(reward="none", reward_model="some/model", reward_weights="reward_model:2")
    alone(rollouts)
    assert [r.score for r in rollouts] == [4.0, 4.0, pytest.approx(NAN, nan_ok=True), 0.0]
    assert rollouts[0].parts == {"reward_model": 2} and len(alone.sources) == 1
    with pytest.raises(ValueError, match="reward=none needs a reward_model"):
        scorer(reward="none")


def test_an_environment_that_gives_none_leaves_an_episode_unscored_however_many_turns_it_has(scorer):
    """NaN at the last token stands for get_reward's None; the turns before it gave nothing."""
    plays = SimpleNamespace(reward_part="Game", tokenizer=TOKENIZER)
    scores = EpisodeScorer(SimpleNamespace(**SETTINGS), plays, "cpu", torch.float32)
    rollouts = [rollout(ROWS[0], "a"), rollout(ROWS[1], "b")]
    for r, given in zip(rollouts, ({2: 0.0, 5: NAN}, {2: 0.0, 5: 1.0})):
        r.rewards, r.logprobs = given, [-1.0] * 6
    scores(rollouts)
    assert math.isnan(rollouts[0].score) and math.isnan(rollouts[0].rewards[5])
    assert rollouts[1].score == 1.0 and rollouts[1].rewards == {2: 0.0, 5: 1.0}


def test_check_rewards_finds_what_is_broken_beforehand(scorer, tmp_path):
    for source, message in [
            ("def reward(completions): raise KeyError('oops')", "raised KeyError: 'oops'"),
            ("def reward(completions): return [1.0]", r"returned \[1.0\], not a list of 2"),
            ("def reward(completions, colour): return [1.0]", "needs a column colour"),
            ("def reward(completions):\n while True: pass",
             r"the reward took too long \(call_timeout\) for a made-up completion: reward=.*, call_timeout=0.2")]:
        with pytest.raises(ValueError, match=message):
            scorer(source, call_timeout=0.2).check_rewards(prompts_of(ROWS))
    twice = f"{tmp_path}/my_reward.py:reward, rewards:exact_accuracy,{tmp_path}/my_reward.py:reward"
    with pytest.raises(ValueError, match="reward=.*: two parts of the score are called reward"):
        scorer("def reward(completions): return [1.0] * 2", reward=twice).check_rewards(prompts_of(ROWS))
    scorer().check_rewards(prompts_of(ROWS[:1]))
    with pytest.raises(ValueError, match="no score at all"):
        scorer(reward_model="broken").check_rewards(prompts_of(ROWS))


def test_check_rewards_makes_completions_in_the_form_of_the_prompts(scorer):
    source = "seen = []\ndef reward(prompts, completions): seen.append((prompts, completions)); return [0, 0]"
    scorer = functools.partial(scorer, call_timeout=0.0)        # it is called here
    for rows, prompts, form in [(ROWS, ["What is 0?", "What is 1?"], list),
                                (ROWS[:1], ["What is 0?"] * 2, list),
                                ([{"prompt": MESSAGES}], [MESSAGES] * 2, lambda texts: messages(*texts))]:
        tried = scorer(source, reward_model="some/model")
        tried.check_rewards(prompts_of(rows))
        seen = load_from(tried.user_rewards.rewards[0][0].spec, "reward", "function").__globals__["seen"]
        assert seen == [(prompts, form(["Answer: 0", ""]))]
        seen.clear()                                            # a file runs once
        assert tried.sources[-1].seen == [(prompts, form(["Answer: 0", ""]))]


# --------------------------------------------------------------------------------------------- evaluation


# Of the rollouts below, where all have one token and end by themselves.
ENDED = {"eval/unscored": 0, "eval/mean_length": 1.0, "eval/clipped_ratio": 0.0, "eval/right_ended": 1.0}


def rollouts_of(*results):
    """Makes rollouts of (source, score, answer), where the last turn has the answer."""
    turn = messages("Answer: 9")[0]
    rollouts = []
    for source, score, answer in results:
        text = "I do not know" if answer is None else f"Answer: {answer}"
        rollouts.append(rollout({"prompt": MESSAGES, "source": source}, turn + messages(text)[0], score))
        rollouts[-1].answer = final_answer(text)                # as a Scorer sets it
    return rollouts


def test_evaluation_by_hand():
    results = [
        # The majority says 2, which is right, then 7, which is wrong.
        ("a", 0, "3"), ("a", 1, "2"), ("a", 1, "2"), ("a", 0, None),
        ("a", 0, "7"), ("a", 1, "5"), ("a", 0, "7"), ("a", 0, "1"),
        # Without answers there are no votes; in a tie the first answer wins.
        ("b", 0, None), ("b", 0, None), ("b", 0, None), ("b", 0, None),
        ("b", 1, "1"), ("b", 0, "2"), ("b", 0, "3"), ("b", 0, "4")]
    rollouts = rollouts_of(*results)
    # Of four right ones, one is cut off and one ran out of turns.
    rollouts[1].finish_reason = rollouts[0].finish_reason = rollouts[3].finish_reason = "length"
    rollouts[2].finish_reason, rollouts[0].logprobs = "turns", [-1.0] * 33
    assert evaluation_metrics(rollouts, 4) == {
        "eval/unscored": 0, "eval/mean_length": 3.0, "eval/clipped_ratio": 3 / 16, "eval/right_ended": 2 / 4,
        "eval/mean@4": 4 / 16, "eval/pass@4": 3 / 4, "eval/maj@4": 2 / 4,
        "eval/a/mean@4": 3 / 8, "eval/a/pass@4": 2 / 2, "eval/a/maj@4": 1 / 2,
        "eval/b/mean@4": 1 / 8, "eval/b/pass@4": 1 / 2, "eval/b/maj@4": 1 / 2}
    unscored = rollouts_of(("a", NAN, "1"), ("a", 1, "2"), ("b", NAN, None), ("b", NAN, "3"))
    assert evaluation_metrics(unscored, 2) == {
        **ENDED, "eval/unscored": 3, "eval/mean@2": 1, "eval/pass@2": 1, "eval/maj@2": 1,
        "eval/a/mean@2": 1, "eval/a/pass@2": 1, "eval/a/maj@2": 1}
    # 1/2 and 0.5 are one answer.
    assert evaluation_metrics(rollouts_of(("", 0, "3"), ("", 0, "3"), ("", 1, "1/2"), ("", 1, "0.5"),
                                          ("", 1, r"\frac12")), 5)["eval/maj@5"] == 1
    # What the verifier calls equal votes together, such as B and its text. 20+20 is not 40.
    assert evaluation_metrics(rollouts_of(("", 0, "A"), ("", 0, "A) 11"), ("", 1, "B"), ("", 1, "B) 12"), ("", 1, "(B)")),
                      5)["eval/maj@5"] == 1
    assert evaluation_metrics(rollouts_of(("", 0, "20+20"), ("", 1, "40"), ("", 1, "40.0")), 3)["eval/maj@3"] == 1
    no_source = [rollout({"prompt": "p"}, "Answer: x", 0.5), rollout({"prompt": "p"}, "Answer: y", 0.25)]
    assert evaluation_metrics(no_source, 2) == {
        **ENDED, "eval/mean@2": 0.375, "eval/pass@2": 0.5, "eval/maj@2": 0.5}
    assert evaluation_metrics(rollouts_of((0, 1, "3"), (0, 0, "2")), 2)["eval/0/mean@2"] == 0.5
    wrong = [rollout({"prompt": "p"}, "", 0.0)]
    assert evaluation_metrics(wrong, 1, "eval/hard")["eval/hard/right_ended"] == 0.0


def test_evaluation_has_the_mean_of_each_part():
    row = {"prompt": "p"}
    rollouts = [rollout(row, "Answer: x", 0.5, right=1.0, brief=NAN, none=NAN),
                rollout(row, "Answer: x", 0.5, right=0.0, brief=-0.5, none=NAN),
                rollout(row, "Answer: x", NAN, right=NAN, late=0.25), rollout(row, "", 0.5, right=0.0)]
    parts = {"right": 1 / 3, "brief": -0.5, "none": 0.0, "late": 0.25}
    assert part_means([r.parts for r in rollouts], "rewards") == {f"rewards/{name}/mean": parts[name] for name in parts}
    assert evaluation_metrics(rollouts, 2) == {
        **ENDED, "eval/unscored": 1, "eval/mean@2": 0.5, "eval/pass@2": 0.5, "eval/maj@2": 0.5,
        **{f"eval/rewards/{name}/mean": parts[name] for name in parts}}


# ---------------------------------------------------------------- rewards that misbehave

SUMS = [{"prompt": "2+2", "answer": "4", "extra_info": {"index": 1}} for _ in range(4)]


WILD = """
import multiprocessing, os, re, signal, subprocess, sys, time
def wait(): time.sleep(60)
def reward(prompts, completions, **_):
    for completion in completions:
        DOES
    return [1.0] * len(completions)
"""


@pytest.mark.parametrize("does, scores", [
    # What it does to signals; and no thread runs while re works in C.
    ("signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65)); completion == 'x' and wait()", [1, NAN, 1]),
    ("re.match('(a+)+$', 'a' * 60 + 'b' if completion == 'x' else '')", [1, NAN, 1]),
    # As verl's prime verifier: a process that is ended in time.
    ("p = multiprocessing.Process(target=wait); p.start(); p.join(0.05); p.terminate(); p.join()", [1, 1, 1]),
    ("multiprocessing.Pool(2).map(len, completions)", [1, 1, 1]),
    ("os.chdir('/'); os.environ.clear(); sys.path.clear(); sys.stdout.close()", [1, 1, 1]),
    ("completion == 'x' and os._exit(7)", "reward reward ended its process with status 7; the "
                                          "completion is 'x'")])
def test_what_a_reward_does_stays_in_its_process(tmp_path, does, scores):
    reward, here = reward_file(tmp_path, WILD.replace("DOES", does)), os.getcwd()
    started = time.monotonic()
    if isinstance(scores, str):
        with pytest.raises(ValueError, match=scores):
            score(reward, SUMS[:3], ["a", "x", "b"], 2.0)
    else:
        totals, _, timed_out, _ = score(reward, SUMS[:3], ["a", "x", "b"], 1.0)
        assert totals == pytest.approx(scores, nan_ok=True) and timed_out == [*map(math.isnan, scores)]
    assert os.getcwd() == here and time.monotonic() - started < 20
    # It goes on with the next call, and what it started ends with it.
    assert score(reward, SUMS[:1], ["a"], 5.0)[0] == [1.0]


def wait_for_the_end(pid):
    """Of a process that init has inherited, and reaps or leaves as a zombie."""
    status, deadline = Path(f"/proc/{pid}/status"), time.monotonic() + 20
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        while "zombie" not in status.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_what_a_reward_has_started_ends_with_it(tmp_path):
    starts = f"open('{tmp_path}/pid', 'w').write(str(subprocess.Popen(['sleep', '60']).pid)); wait()"
    reward = reward_file(tmp_path, WILD.replace("DOES", starts))
    assert score(reward, SUMS[:1], ["a"], 0.5)[2] == [True]
    wait_for_the_end((tmp_path / "pid").read_text())


def test_a_step_has_a_budget(tmp_path):
    reward = reward_file(tmp_path, WILD.replace("DOES", "wait()"))
    started = time.monotonic()
    scores, _, timed_out, _ = score(reward, SUMS * 50, ["a"] * 200, 0.2, end=started + 1)
    assert all(map(math.isnan, scores)) and timed_out == [True] * 200 and time.monotonic() - started < 10


def test_what_a_reward_never_saw_has_no_score_and_a_failed_batch_is_not_tried_again(scorer, tmp_path, capsys):
    """The reward always returns 1 and needs 0.03 s for each of 64 completions, and the limit is 0.1 s."""
    source = (f"import time\ndef reward(completions):\n    open('{tmp_path}/calls', 'a').write(f'{{len(completions)}} ')\n"
              "    time.sleep(0.03 * len(completions))\n    return [1.0] * len(completions)")
    scores, rollouts = scorer(source, call_timeout=0.1), [rollout(row, "a") for row in ROWS * 16]
    scores.check_rewards(prompts_of(ROWS))
    (tmp_path / "calls").unlink()
    for step in range(2):
        scores(rollouts)
        rewarded = [r.score for r in rollouts if not math.isnan(r.score)]
        assert rewarded == [1.0] * len(rewarded) and 5 <= len(rewarded) < 60
        figures = rollout_metrics(rollouts, 4, group_std, 1)
        assert figures["reward"] == 1 and figures["reward_std"] == 0
        assert figures["rewards/timeouts"] == figures["rewards/unscored"] == 64 - len(rewarded)
    calls = (tmp_path / "calls").read_text().split()
    assert calls[0] == "64" and {*calls[1:]} == {"1"} and capsys.readouterr().err.count("each is now scored") == 1


def test_columns_may_have_the_names_of_our_own_parameters(tmp_path):
    names = ("function", "seconds", "reward", "columns", "timeout", "argument")
    reward = reward_file(tmp_path, f"def reward(completions, {', '.join(names)}): return seconds")
    assert score(reward, [dict.fromkeys(names, 2.0) | {"prompt": "a"}], ["b"], 5.0)[0] == [2.0]


def test_a_reward_file_imports_ours_without_torch(tmp_path):
    source = ("import sys\nfrom rewards import check_answer, content\n"
              "def reward(completions): return [float('torch' in sys.modules)] * len(completions)")
    assert score(reward_file(tmp_path, source), ROWS, TEXTS, 5.0)[0] == [0.0] * 4


def test_sys_exit_in_a_reward_is_an_error(tmp_path):
    def leaves(prompts, completions, **_):
        sys.exit(0)

    with pytest.raises(ValueError, match="leaves raised SystemExit"):
        score(leaves, SUMS, ["a"] * 4, 1.0)
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(ValueError, match="raised SystemExit"):
        user_rewards.load_reward(f"{tmp_path}/leaves.py:score")


def test_what_a_file_has_started_ends_with_the_run(tmp_path, monkeypatch):
    """Also if the run ends by os._exit, before which it closes what is in `closing`."""
    monkeypatch.setattr(user_code, "closing", contextlib.ExitStack())
    starts = f"import subprocess\nopen('{tmp_path}/pid', 'w').write(str(subprocess.Popen(['sleep', '60']).pid))\n"
    score(reward_file(tmp_path, starts + "def reward(completions): return [1.0]"), SUMS[:1], ["a"], 5.0)
    user_code.closing.close()
    wait_for_the_end((tmp_path / "pid").read_text())


def test_what_is_logged_and_not_finite_stays_out_of_the_means(scorer):
    source = ("def reward(completions, log_extra, log_metric):\n"
              "    log_extra('x', [float('inf'), float('-inf'), 1.5, 1e308])\n    log_metric('y', float('nan'))\n"
              "    return [0.0] * 4")
    rollouts = [rollout(row, "a") for row in ROWS]
    scorer(source)(rollouts)
    assert [r.extra for r in rollouts] == [{"x": x, "y": "nan"} for x in ("inf", "-inf", 1.5, "1e+308")]
    metrics = rollout_metrics(rollouts, 4, group_std, 1)
    assert metrics["logged/x/mean"] == 1.5 and "logged/y/mean" not in metrics


class Odd:
    def __float__(self):
        raise ValueError("odd")


@pytest.mark.parametrize("error, message", [
    (GeneratorExit(), "reward raises raised GeneratorExit"), (BaseException("x"), "raised BaseException: x;"),
    (ValueError("a\nb"), r"raised ValueError: a\\nb;")])
def test_whatever_a_reward_raises_is_its_own(error, message):
    def raises(prompts, completions, **_):
        raise error

    with pytest.raises(ValueError, match=message):
        score(raises, SUMS, ["a"] * 4, 1.0)


@pytest.mark.parametrize("value", [10 ** 400, -10 ** 400, float, Odd(), {"score": 10 ** 400}])
def test_what_is_no_number_is_named(value):
    def odd(prompts, completions, **_):
        return [value] * len(completions)

    with pytest.raises(ValueError, match="reward odd returned .*: not a finite number"):
        score(odd, SUMS, ["a"] * 4, 1.0)


def test_a_reward_gets_copies():
    def pops(prompts, completions, extra_info, **_):
        extra_info[0].pop("index")
        completions[0][0]["content"] = "changed"
        return [0.0] * len(completions)

    completions = [[{"role": "assistant", "content": "4"}] for _ in SUMS]
    for _ in range(2):
        score(pops, SUMS, completions, 1.0)
    assert SUMS[0]["extra_info"] == {"index": 1} and completions[0][0]["content"] == "4"


# ---------------------------------------------------------------- judges: rewards that are called for each

JUDGE = """
import asyncio, time
running, most = 0, 0
ASYNC def ask(text):
    global running, most
    running, most = running + 1, max(most, running + 1)
    AWAIT SLEEP(60 if text == "slow" else 0.1)
    running -= 1
    if text == "broken":
        raise ConnectionError("no answer")
    return {"most": float(most), "right": float(text == "good")}
ASYNC def trl(prompts, completions, level, **columns):
    assert len(prompts) == len(completions) == len(level) == 1
    return [AWAIT ask(completion) for completion in completions]
ASYNC def verl(data_source, solution_str, ground_truth, extra_info=None):
    return AWAIT ask(solution_str)
class Judge:
    ASYNC def __call__(self, completions): return [AWAIT ask(completion) for completion in completions]
    ASYNC def method(self, completions): return [AWAIT ask(completion) for completion in completions]
judge, method = Judge(), Judge().method
"""
LATER = JUDGE.replace("ASYNC", "async").replace("AWAIT SLEEP", "await asyncio.sleep").replace("AWAIT", "await")
PLAIN = JUDGE.replace("ASYNC ", "").replace("AWAIT SLEEP", "time.sleep").replace("AWAIT ", "")


def judged(tmp_path, source, name, here=False):
    (tmp_path / "judge.py").write_text(source)
    spec = f"{tmp_path}/judge.py:{name}"
    return (user_rewards.load_reward(spec), None) if here else in_process(spec)


@pytest.mark.parametrize("here", [True, False])
@pytest.mark.parametrize("source, name, workers, most", [
    (LATER, "trl", 0, 20), (LATER, "trl", 3, 3), (LATER, "trl", 1, 1),
    (LATER, "verl", 0, 20), (LATER, "verl", 5, 5),
    (LATER, "judge", 4, 4), (LATER, "method", 4, 4), (PLAIN, "verl", 5, 1)])
def test_calls_at_once(tmp_path, source, name, workers, most, here):
    reward, pairs = judged(tmp_path, source, name, here), 10 if most > 1 else 2
    started = time.monotonic()
    totals, parts, late, _ = score(reward, ROWS * (pairs // 2), ["good", "bad"] * pairs, 5.0, workers=workers)
    took = time.monotonic() - started
    assert parts["right"] == [1.0, 0.0] * pairs and max(parts["most"]) == most and not any(late)
    assert 0.1 * 2 * pairs / most <= took < 0.1 * 2 * pairs / most + 2


def test_a_call_that_waits_for_its_turn_has_its_time_still_to_come(tmp_path):
    reward = judged(tmp_path, LATER, "trl")
    results = found(reward, ROWS * 2, ["good"] * 8, 0.5, workers=1)  # 0.8 s in all
    assert [(own["right"], problem) for own, *_, problem, _ in results] == [(1.0, "")] * 8


def test_a_call_that_was_cut_off_ends_with_its_process(tmp_path):
    source = ("import asyncio, os\nasync def verl(data_source, solution_str, ground_truth):\n"
              "    await asyncio.sleep(60 * (solution_str == 'slow'))\n    return float(os.getpid())")
    reward = judged(tmp_path, source, "verl")
    before, cut_off, after = (score(reward, ROWS, [first, "a", "a", "a"], 0.5)[0]
                              for first in ("a", "slow", "a"))
    assert cut_off == pytest.approx([NAN, *before[1:]], nan_ok=True) and len({*before, *after}) == 2


@pytest.mark.parametrize("source, name", [(LATER, "trl"), (LATER, "verl"), (PLAIN, "verl")])
def test_a_call_that_fails_is_unscored(tmp_path, source, name):
    reward, texts = judged(tmp_path, source, name), ["good", "broken", "slow", "bad"]
    started = time.monotonic()
    results = found(reward, ROWS, texts, 0.5, reward_errors="unscored")
    assert time.monotonic() - started < 2.5
    assert [problem for *_, problem, _ in results] == [
        "", "the reward raised ConnectionError: no answer", TIMED_OUT, ""]
    assert [own["right"] for own, *_ in results] == pytest.approx([1.0, NAN, NAN, 0.0], nan_ok=True)
    # By default it stops the run, and one that is late has no score. Both score 0 in every part if that is asked for.
    with pytest.raises(ValueError, match="raised ConnectionError: no answer; the completion is 'broken'"):
        found(reward, ROWS, texts, 0.5)
    results = found(reward, ROWS[:2], ["slow", "good"], 0.5)
    assert results[0] == (pytest.approx({"most": NAN, "right": NAN}, nan_ok=True), (), {}, TIMED_OUT, True)
    zeros = found(reward, ROWS, texts, 0.5, reward_errors="zero")
    assert [own["right"] for own, *_ in zeros] == [1.0, 0.0, 0.0, 0.0]
    assert zeros[1][3] == "the reward raised ConnectionError: no answer" and zeros[2][3] == TIMED_OUT
    assert results[1][0]["right"] == 1.0


def test_a_batch_that_fails_is_unscored_where_it_fails(tmp_path):
    reward = reward_file(tmp_path, HANGING.format(swallows="ZeroDivisionError"))
    results = found(reward, ROWS, ["a", "raise", "hang", "b"], 0.3, reward_errors="unscored")
    assert [own["reward"] for own, *_ in results] == pytest.approx([1.0, NAN, NAN, 1.0], nan_ok=True)
    assert [bool(problem) for *_, problem, _ in results] == [False, True, True, False]


def test_a_call_at_once_that_ends_the_process_is_found_by_calls_of_its_own(tmp_path):
    source = ("import asyncio, os\nasync def trl(completions):\n"
              "    return os._exit(3) if completions == ['x'] else [1.0]")
    reward, problem = judged(tmp_path, source, "trl"), "ended its process with status 3"
    results = found(reward, ROWS, ["a", "x", "b", "c"], 5.0, reward_errors="unscored")
    assert [own["trl"] for own, *_ in results] == pytest.approx([1.0, NAN, 1.0, 1.0], nan_ok=True)
    assert [problem for *_, problem, _ in results] == ["", f"the reward {problem}", "", ""]
    with pytest.raises(ValueError, match=f"reward trl {problem}; the completion is 'x'"):
        found(reward, ROWS, ["a", "x", "b", "c"], 5.0)


def test_calls_at_once_have_a_budget_and_may_block(tmp_path):
    """What was scored before the budget was spent counts."""
    reward, started = judged(tmp_path, LATER, "trl"), time.monotonic()
    results = found(reward, ROWS * 5, ["good"] * 20, 1.0, end=started + 0.7, workers=1)
    assert 2 <= sum(own["right"] == 1.0 for own, *_ in results) <= 10 and time.monotonic() - started < 4
    blocks = ("import time\nasync def trl(completions, **_):\n"
              "    while completions == ['x']: time.sleep(1)\n    return [1.0]")
    reward, started = judged(tmp_path, blocks, "trl"), time.monotonic()
    assert score(reward, ROWS, ["a", "x", "b", "c"], 0.5)[2][1]
    # It costs the calls that run with it their time, and no later one.
    assert score(reward, ROWS, ["a", "b", "c", "d"], 5.0)[0] == [1.0] * 4 and time.monotonic() - started < 10


def test_parts_are_weighted_and_failed_calls_unscored_on_rollouts(scorer, tmp_path):
    (tmp_path / "judge.py").write_text(LATER)
    settings = {"reward": f"{tmp_path}/judge.py:trl", "reward_errors": "unscored",
                "reward_weights": "right:3,most:0"}
    rollouts = [rollout(row, text) for row, text in zip(ROWS, ["good", "broken", "bad", "good"])]
    for more in ({}, {"reward_model": "some/model"}):
        scores = scorer(**settings, **more)
        scores.check_rewards(prompts_of(ROWS))
        scores(rollouts)
        # Where the call failed, the model's score alone would be compared with sums.
        assert [r.score for r in rollouts] == [3.0, pytest.approx(NAN, nan_ok=True), 0.0, 3.0]
        assert [bool(r.problem) for r in rollouts] == [False, True, False, False]
    assert rollout_metrics(rollouts, 4, group_std, 1) | {
        "rewards/unscored": 1, "rewards/right/mean": 2 / 3, "rewards/timeouts": 0} == rollout_metrics(
        rollouts, 4, group_std, 1)
    # A reward that does not count costs no completion its score.
    scores = scorer(**settings | {"reward": f"{settings['reward']},rewards:exact_accuracy",
                                  "reward_weights": "right:0,most:0"})
    scores(rollouts)
    assert [r.score for r in rollouts] == [0.0] * 4 and not any(r.problem for r in rollouts)
    assert math.isnan(rollouts[1].parts["right"])
    # One of the two made-up completions may fail.
    (tmp_path / "judge.py").write_text(LATER.replace('== "broken"', '== ""'))
    scorer(**settings).check_rewards(prompts_of(ROWS))
    (tmp_path / "judge.py").write_text(LATER)
    with pytest.raises(ValueError, match="reward_weights: no part rigth counts; those that do are most, right$"):
        scorer(**settings | {"reward_weights": "rigth:2"}).check_rewards(prompts_of(ROWS))
    (tmp_path / "judge.py").write_text("async def trl(completions): raise OSError('down')")
    with pytest.raises(ValueError, match="the reward raised OSError: down for a made-up completion: reward="):
        scorer(**settings | {"reward_weights": ""}).check_rewards(prompts_of(ROWS))


@pytest.mark.parametrize("text", ["right", "right:", "right:x", ":1", "right:nan", "right:inf", "a:1,b"])
def test_weights_that_are_none(text):
    with pytest.raises(ValueError, match="reward_weights=.*: write name:weight,name:weight"):
        rewards.part_weights(text)
    assert rewards.part_weights("a:1,b:-0.5,c:d:2") == {"a": 1.0, "b": -0.5, "c:d": 2.0}


def test_a_weight_without_effect_is_refused(scorer, tmp_path):
    """In a dict with a score only the score counts, and a reward with named parts has none of its own name."""
    parts = "def reward(completions): return [{'score': 1.0, 'format': 0.5}] * len(completions)"
    for name in ("format", "reward"):
        with pytest.raises(ValueError, match=f"reward_weights: no part {name} counts; those that do are score$"):
            scorer(parts, reward_weights=f"{name}:10").check_rewards(prompts_of(ROWS))
    (tmp_path / "more.py").write_text("def more(completions): return [None] * len(completions)")
    both = scorer(parts, reward=f"{tmp_path}/my_reward.py:reward,{tmp_path}/more.py:more",
                  reward_model="some/model", reward_weights="score:2,more:3,reward_model:4")
    both.check_rewards(prompts_of(ROWS))


LOOPS = """
import asyncio, sys, threading
from options.user_code import outcome
sys.setswitchinterval(1e-6)
loops, barrier = set(), threading.Barrier(64)
async def running():
    return asyncio.get_running_loop()
def ask():
    barrier.wait()
    loops.add(outcome(running)[0])
threads = [threading.Thread(target=ask) for _ in range(64)]
[thread.start() for thread in threads], [thread.join() for thread in threads]
assert len(loops) == 1, loops
"""


def test_async_functions_that_begin_together_share_a_loop():
    """What a module holds, such as a semaphore or a connection, belongs to one loop."""
    for _ in range(3):
        subprocess.run([sys.executable, "-c", LOOPS], check=True, cwd=Path(rewards.__file__).parent)


WAITING = """
import asyncio, threading, time
from options.user_code import run_async
barrier = threading.Barrier(64)
async def gather():
    return await asyncio.gather(*[asyncio.to_thread(barrier.wait, 20) for _ in range(64)])
assert len(run_async(gather(), 30)) == 64
async def failing():
    await asyncio.to_thread(int, "x")
try:
    run_async(failing(), 30)
except ValueError as error:
    assert "'x'" in str(error)
async def hanging():
    asyncio.create_task(asyncio.to_thread(time.sleep, 60))
    await asyncio.sleep(0.1)
run_async(hanging(), 30)
async def late():
    try:
        await asyncio.wait_for(asyncio.to_thread(time.sleep, 0.3), 0.1)
    except TimeoutError:
        await asyncio.sleep(0.5)
run_async(late(), 30)
"""


def test_as_many_threads_wait_as_async_functions_ask_for():
    """asyncio's own pool has six on two processors, and a hanging one of them would keep the process from ending."""
    process = subprocess.run([sys.executable, "-c", WAITING], cwd=Path(rewards.__file__).parent, timeout=30,
                             stderr=subprocess.PIPE, text=True)
    # A call that nobody waits for any more ends without a word.
    assert process.returncode == 0 and "Exception in thread" not in process.stderr, process.stderr


@pytest.mark.parametrize("text, answer", [
    ("so **Answer:** 12.", "12"), ("Answer: $1.50", "3/2"), ("#### 0.5", "1/2"), ("<answer>1/2</answer>", "1/2"),
    (r"the \boxed{\frac{1}{\sqrt{2}}} apples", r"\frac{1}{\sqrt{2}}"), (r"Answer: \boxed{X}", "x"), ("Yes", "yes"),
    ("", ""), ("one line\nand another", ""), ("Answer: 1\nAnswer: 2", "2")])
def test_votes_of_rewards_of_yours_need_no_verifier(text, answer):
    assert user_rewards.answer_of(text) == answer
