"""Rewards: one score for each completion, from a verifier of final answers or from a function of yours.

    load_reward   the task's own reward, math_verify, or a function of yours ("file.py:function")
    score         calls a reward on completions inside a time limit and checks what it returns
    Scorer        scores rollouts by the reward and the reward model that a run's settings name
    evaluation    mean@k, pass@k, maj@k of scored rollouts
"""
import copy
import difflib
import functools
import importlib
import importlib.util
import inspect
import math
import os
import re
import signal
import sys
import threading
import time
from collections import Counter, defaultdict
from types import SimpleNamespace

import numpy as np

from answers import check_answer, extract_answer, plain, value
from console import one_line

# ------------------------------------------------------------------------------------------------------------
# rewards. A reward is a function of prompts=, completions= and the rows' columns. It returns a value for each
# completion: a number, None (not scored), or a dict of named parts, whose score is the part "score", or their
# sum if none has that name. As in TRL a completion is a string, or where the prompt is a list of messages the
# list of the messages that follow it.


def content(completion):
    """Returns the text of a completion: the string, or the content of the last message."""
    return completion if isinstance(completion, str) else completion[-1].get("content") or ""


def accuracy(prompts, completions, answer, **columns):
    """Returns 1.0 for each completion whose final answer is the row's `answer`, otherwise 0.0."""
    return [float(check_answer(content(completion), truth)) for completion, truth in zip(completions, answer)]


def math_verify(prompts, completions, answer, **columns):
    """Is accuracy with the package math-verify where exact values do not decide: for algebra and sets."""
    return [float(check_answer(content(completion), truth, algebra=True))
            for completion, truth in zip(completions, answer)]


# A comparison that hangs costs its own completion alone.
math_verify.one_by_one = True


def countdown(prompts, completions, numbers, target, **columns):
    """Returns 1.0 for each completion that answers with a right expression, otherwise 0.0.

    Such an expression is made of + - * / ( ), uses every number once and equals the target.
    """
    rewards = []
    for completion, given, goal in zip(completions, numbers, target):
        text = "".join(plain(extract_answer(content(completion)) or "").partition("=")[0].split())
        right = re.fullmatch(r"(?:[-+*/(){}0-9]|(?<!\d)\\frac)+", text) and value(text) == goal
        rewards.append(float(bool(right) and sorted(map(int, re.findall(r"\d+", text))) == sorted(given)))
    return rewards


def load_reward(spec, task):
    """Returns the reward that the spec names, "file.py:function" or "math_verify", or for "" the task's own.

    A function with verl's parameters (data_source, solution_str, ground_truth) is adapted; any other must be
    in TRL's form. Raises ValueError if there is no such function or if its file raises, and for math_verify
    without its package or without answers to compare.
    """
    if not spec:
        return countdown if task == "countdown" else accuracy
    if spec == "math_verify":
        if task == "countdown":
            raise ValueError("reward=math_verify needs one right answer, but task=countdown has many")
        try:
            importlib.import_module(spec)
        except ImportError as error:
            raise ValueError("reward=math_verify needs the package math-verify: pip install "
                             f"'math-verify[antlr4_13_2]' ({error})") from error
        return math_verify
    function = load_from(spec, "reward", "function", " or math_verify")
    try:
        parameters = inspect.signature(function).parameters.keys()
    except (ValueError, TypeError) as error:
        raise ValueError(f"reward={spec} does not say which columns it takes ({error})") from error
    verl = {"data_source", "solution_str", "ground_truth"} <= parameters
    return one_by_one(function) if verl else function


def load_from(spec, key, kind, others=""):
    """Returns what a spec "file.py:name" stands for.

    For the messages: key is the setting, kind is function or class, others says what else the spec may be.
    Raises ValueError if there is no such thing, or if the file raises.
    """
    path, _, name = spec.rpartition(":")
    if not path.endswith(".py") or not name.isidentifier():
        raise ValueError(f"{key} must be file.py:{kind}{others}, not {spec!r}")
    if not os.path.isfile(path):
        raise ValueError(f"{key}: no such file: {path}")
    module_spec = importlib.util.spec_from_file_location(f"{key}_file", path)
    module = sys.modules[f"{key}_file"] = importlib.util.module_from_spec(module_spec)
    try:
        module_spec.loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise ValueError(f"{key}: {path} raised {shown(error)}") from error
    found = getattr(module, name, None)
    if not callable(found):
        names = [other for other, value in vars(module).items() if callable(value)]
        near = ", ".join(difflib.get_close_matches(name, names) or names)
        raise ValueError(f"{key}: {path} has no {kind} {name}; it has {near or 'none'}")
    return found


def one_by_one(compute_score):
    # Makes a reward of verl's compute_score(data_source, solution_str, ground_truth, extra_info=None).
    def reward(prompts, completions, **columns):
        nothing = [None] * len(completions)
        if {"reward_model", "ground_truth", "answer"} & columns.keys():
            truths = [answer if given is None else given for given, answer in
                      zip(columns.get("ground_truth", nothing), columns.get("answer", nothing))]
            # A row of verl's that a model scores has no truth: {"style": "model"}.
            columns["ground_truth"] = [model.get("ground_truth", truth) if isinstance(model, dict) else truth
                                       for model, truth in zip(columns.get("reward_model", nothing), truths)]
        columns = {"data_source": columns.get("source", nothing), "extra_info": nothing, **columns,
                   "solution_str": [content(completion) for completion in completions]}
        arguments = accepted(compute_score, columns)
        return [compute_score(**dict(zip(arguments, values))) for values in zip(*arguments.values())]
    reward.__name__, reward.one_by_one = compute_score.__name__, True
    return reward


def accepted(function, columns, name=""):
    # Returns those of the columns that the function takes. name: of it, for a message.
    parameters = inspect.signature(function).parameters.values()
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    for p in named:
        if p.default is p.empty and p.name not in columns:
            there = ", ".join(columns)
            raise ValueError(f"{name or 'reward ' + name_of(function)} needs a column {p.name}; "
                             f"the columns are {there}")
    if any(p.kind == p.VAR_KEYWORD for p in parameters):
        return columns
    return {p.name: columns[p.name] for p in named if p.name in columns}


def name_of(function):
    return getattr(function, "__name__", type(function).__name__)


def shown(value):
    # A value or an error that a reward gave, for a message; it may be of any kind.
    try:
        return f"{type(value).__name__}: {value}" if isinstance(value, BaseException) else f"{value!r:.100}"
    except Exception:
        return f"a value of type {type(value).__name__}"


class TimeUp(BaseException):
    """Says that a reward ran out of time.

    It is not an Exception, so that no `except Exception` in the reward swallows it.
    """


# The signal of our own time limits: rewards may use SIGALRM and its timer themselves.
SIGNAL = getattr(signal, "SIGRTMIN", signal.SIGUSR2)


class Watcher(threading.Thread):
    """Signals the main thread when its time is up, and again each time as many seconds later.

    There is one for the whole run: a thread for each call would cost a millisecond on a busy machine.
    """

    def __init__(self):
        super().__init__(daemon=True)
        self.deadline, self.seconds = math.inf, math.inf

    def run(self):
        while True:
            time.sleep(min(0.05, self.seconds / 4))
            if time.monotonic() >= self.deadline:
                self.deadline += self.seconds
                signal.pthread_kill(threading.main_thread().ident, SIGNAL)


@functools.cache
def watcher():
    thread = Watcher()
    thread.start()
    return thread


def limited(seconds, function, **arguments):
    # Returns function(**arguments), called in the main thread; raises TimeUp in it every `seconds` seconds
    # until it ends (0: never). It repeats because some rewards swallow even TimeUp. Python acts on a signal
    # between its own instructions, and some functions in C, like those of re, look for one as well.
    if not seconds:
        return function(**arguments)
    watch, deadline = watcher(), time.monotonic() + seconds

    def inside():
        return function(**arguments)

    def stop(_, frame):
        # Only if `inside` has called what runs now: TimeUp must not come in our own lines, nor later.
        callers = []
        while frame := frame.f_back:
            callers.append(frame.f_code)
        if inside.__code__ in callers and time.monotonic() >= deadline:
            raise TimeUp

    # Both handlers stay afterwards: the signals' default action would end the process.
    signal.signal(SIGNAL, stop)
    signal.signal(signal.SIGPROF, stop)
    watch.seconds, watch.deadline = seconds, deadline
    # The thread cannot signal while a function in C holds Python's lock; this counts the processor's time.
    signal.setitimer(signal.ITIMER_PROF, seconds, seconds)
    try:
        return inside()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        watch.deadline = math.inf


def score(reward, rows, completions, timeout, budget=math.inf):
    """Returns (scores, {part: values}, number of timeouts) of completions, with NaN for what has no value.

    completions: for each row a string, or where its prompt is a list of messages the list of those that
    follow. A reward without named parts is its own only part, under the function's name. The reward gets
    `timeout` seconds (0: no limit) for all completions together, or in verl's form for each. If it takes
    longer, the completions are scored one by one, and those that still take longer get 0.0, as do all that
    are left when `budget` seconds have passed. The reward gets copies of the rows. Raises RuntimeError if the
    reward raises (the message shows the completion), or if it returns anything but a finite number, None or a
    dict of these for each completion; and ValueError for a column that is missing.
    """
    shared = [key for key in rows[0] if key != "prompt" and all(key in row for row in rows)]

    def call(chosen):
        # Returns what the reward returns and what it raises, one of them None.
        columns = {key: [rows[i][key] for i in chosen] for key in shared}
        columns["prompts"] = [rows[i]["prompt"] for i in chosen]
        columns["completions"] = [completions[i] for i in chosen]
        columns = copy.deepcopy(accepted(reward, columns))
        left = end - time.monotonic()
        if left <= 0:
            return None, TimeUp()
        try:
            seconds = min(timeout or left, left) if left < math.inf else timeout
            return limited(seconds, reward, **columns), None
        except KeyboardInterrupt:
            raise
        # sys.exit in a reward, for example, must not end the run as if it had come to its end.
        except BaseException as error:
            return None, error

    end = time.monotonic() + budget
    # The culprit stays 0 if the reward raises for all completions together and for none alone.
    values, timeouts, culprit = [], 0, 0
    returned, error = call(range(len(rows))) if not hasattr(reward, "one_by_one") else (None, TimeUp())
    if error is None:
        values = checked(reward, returned, len(rows))
    for i in range(len(rows) if error is not None else 0):
        returned, own_error = call([i])
        if isinstance(own_error, TimeUp):
            returned, timeouts = [0.0], timeouts + 1
        elif own_error is not None:
            error, culprit = own_error, i
            break
        values += checked(reward, returned, 1)
    if error is not None and not isinstance(error, TimeUp):
        raise RuntimeError(f"reward {name_of(reward)} raised {one_line(shown(error))}; "
                           f"the completion is {content(completions[culprit])[:500]!r}") from error
    names = dict.fromkeys(key for _, parts in values for key in parts)
    totals = [total for total, _ in values]
    named = {key: [parts.get(key, math.nan) for _, parts in values] for key in names}
    return totals, named or {name_of(reward): totals}, timeouts


def checked(reward, returned, count):
    # Returns (score, parts) for each value that a reward returned; they may be in an array or a tensor.
    returned = returned.tolist() if hasattr(returned, "tolist") else returned
    if not isinstance(returned, (list, tuple)) or len(returned) != count:
        what = f"{len(returned)} values" if isinstance(returned, (list, tuple)) else type(returned).__name__
        raise RuntimeError(f"reward {name_of(reward)} returned {what}, not a list of {count}, one for each "
                           "completion")

    def real(value):
        try:
            as_float = float(value) if hasattr(value, "__float__") else math.nan
        # Of 10**400, for example.
        except Exception:
            as_float = math.nan
        if not math.isfinite(as_float):
            raise RuntimeError(f"reward {name_of(reward)} returned {shown(value)}: not a finite number")
        return as_float

    def total_and_parts(value):
        if not isinstance(value, dict):
            return math.nan if value is None else real(value), {}
        # Besides the score, verl's functions may return entries that are not numbers.
        if "score" in value:
            value = {key: part for key, part in value.items() if key == "score" or hasattr(part, "__float__")}
        parts = {key: real(part) for key, part in value.items() if part is not None}
        return parts.get("score", math.nan) if "score" in value or not parts else sum(parts.values()), parts

    return [total_and_parts(value) for value in returned]


# ------------------------------------------------------------------------------------------------------------
# the scores of rollouts. A rollout has a row, a completion in the form that a reward gets, a score (NaN: not
# scored) and parts, the values that make up the score, by name.


class Scorer:
    """Scores rollouts by the reward and the reward model that a run's settings name.

    scorer(rollouts) sets score, parts and rewards of each rollout and returns the number of timeouts. What an
    environment gave for an episode and the reward are added up, and a task's own reward is left out where the
    environment gives rewards. With a reward model the score is reward_weight times that sum plus
    reward_model_weight times the model's score. Where several are added up an unscored reward counts as 0,
    and what the model cannot score has no score, unless its weight is 0.

    settings: what configure returns. device, dtype: where and in which precision the reward model computes.
    environment: the name of the environment, if it gives rewards. Raises ValueError if the reward or the
    reward model cannot be loaded.
    """

    def __init__(self, settings, device, dtype, environment=""):
        self.settings, self.environment = SimpleNamespace(**settings), environment
        self.reward = self.model = None
        if self.settings.reward != "none" and not (environment and not self.settings.reward):
            self.reward = load_reward(self.settings.reward, self.settings.task)
        if self.settings.reward_model:
            # Only those who use a reward model wait for this import.
            from reward_models import RewardModel
            self.model = RewardModel(self.settings.reward_model, device, dtype, self.settings.token_budget)
        if not self.reward and not self.model and not environment:
            raise ValueError("reward=none needs a reward_model, or an environment that gives rewards")

    def try_on(self, rows):
        """Scores two made-up completions of rows, so that what is broken shows before a model is trained.

        Raises ValueError if the reward or the reward model cannot score them.
        """
        def made_up(prompt, text):
            return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]

        if self.reward:
            timeout, two = self.settings.reward_timeout, (rows * 2)[:2]
            completions = [made_up(row["prompt"], text) for row, text in zip(two, ["Answer: 0", ""])]
            try:
                _, _, timeouts = score(self.reward, two, completions, timeout)
            except RuntimeError as error:
                raise ValueError(error) from error
            if timeouts:
                raise ValueError(f"reward {name_of(self.reward)} took more than reward_timeout={timeout:g} "
                                 "seconds for one completion")
        if self.model:
            prompt = rows[0]["prompt"]
            self.model.score([prompt] * 2, [made_up(prompt, text) for text in ("Answer: 0", "0")])

    def __call__(self, rollouts):
        if not rollouts:
            return 0
        s, rows = self.settings, [rollout.row for rollout in rollouts]
        completions = [rollout.completion for rollout in rollouts]
        scores, parts, timeouts = [math.nan] * len(rollouts), {}, 0
        if self.reward:
            scores, parts, timeouts = score(self.reward, rows, completions, s.reward_timeout,
                                            s.reward_step_timeout or math.inf)
        # What the environment gave at each turn.
        given = [rollout.rewards.astype(float) if self.environment else np.zeros(len(rollout.spans))
                 for rollout in rollouts]
        if self.environment:
            sums = [float(turns.sum()) for turns in given]
            scores = [a + (0 if math.isnan(b) else b) for a, b in zip(sums, scores)]
            parts = parts | {self.environment: sums}
        if self.model:
            judged = self.model.score([row["prompt"] for row in rows], completions)
            scores = [(s.reward_model_weight and s.reward_model_weight * b)
                      + (0 if math.isnan(a) else s.reward_weight * a) for a, b in zip(scores, judged)]
            parts = parts | {"reward_model": judged}
            given = [s.reward_weight * turns for turns in given]
        for i, (rollout, turns) in enumerate(zip(rollouts, given)):
            rollout.score = math.nan if rollout.finish_reason == "error" else scores[i]
            rollout.parts = {name: values[i] for name, values in parts.items()}
            # What belongs to no turn stands at the last one.
            turns[-1] += rollout.score - turns.sum()
            rollout.rewards = turns.astype(np.float32)
        return timeouts


def part_means(rollouts, prefix):
    """Returns {prefix/name/mean: the mean of a part's values that are not NaN, 0 if all are}."""
    values = defaultdict(list)
    for rollout in rollouts:
        for name, value in rollout.parts.items():
            values[name] += [] if math.isnan(value) else [value]
    return {f"{prefix}/{name}/mean": math.fsum(some) / max(len(some), 1) for name, some in values.items()}


def evaluation(rollouts, k):
    """Returns mean@k, pass@k and maj@k of scored rollouts, k of each prompt, which are adjacent.

    mean@k  mean score
    pass@k  mean over prompts of the best of k scores: for scores of 0 and 1, how often any of k is right
    maj@k   mean over prompts of the score of the commonest answer, or of the first of those equally common;
            1/2 and 0.5 are one answer, a completion without an answer has no vote, and a prompt without
            votes scores as its first one
    Over all prompts they are named eval/..., over those of each source eval/{source}/.... A completion that
    was not scored (NaN) is ignored. The mean of each part is eval/rewards/{name}/mean.
    """
    values = defaultdict(list)
    for i in range(0, len(rollouts), k):
        scored = [rollout for rollout in rollouts[i:i + k] if not math.isnan(rollout.score)]
        if not scored:
            continue
        scores = [rollout.score for rollout in scored]
        answers = [extract_answer(content(rollout.completion)) for rollout in scored]
        # What has no value votes by its text.
        texts = [None if answer is None else plain(answer) for answer in answers]
        answers = [text if text is None or (tree := value(text)) is None else tree for text in texts]
        votes = Counter(answer for answer in answers if answer is not None)
        winner = answers.index(votes.most_common(1)[0][0]) if votes else 0
        source = rollouts[i].row.get("source")
        for name in ["eval"] + ([f"eval/{source}"] if source else []):
            values[f"{name}/mean@{k}"].append(sum(scores) / len(scores))
            values[f"{name}/pass@{k}"].append(max(scores))
            values[f"{name}/maj@{k}"].append(scores[winner])
    means = {name: sum(each) / len(each) for name, each in values.items()}
    return means | part_means(rollouts, "eval/rewards")
