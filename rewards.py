"""Rewards: one score for each completion, from a verifier of final answers or from a function of yours.

    load_reward   finds the task's own reward, math_verify, or a function of yours ("file.py:function")
    score         calls a reward on completions and checks what it returns
    Scorer        scores rollouts by the rewards and the reward model that a run's settings name
    evaluation    returns mean@k, pass@k and maj@k of scored rollouts
"""
import bisect
import contextlib
import copy
import functools
import importlib
import inspect
import json
import math
import re
import time
from collections import Counter, defaultdict
from fractions import Fraction
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from tasks.check_answer import check_answer, extract_answer, plain, value
from runtime.user_code import (STARTED_IN, Failed, Threads, TimeUp, UserProcess, accepted, load_from,
                               logging_into, name_of, outcome, shown, source_of, specs)

# ------------------------------------------------------------------------------------------------------------
# rewards. A reward is a function of prompts=, completions= and the rows' columns. It returns one value for
# each completion: a number; None if the completion is not to be scored; a dict of named parts, where the
# score is the part "score", or the sum of the parts if none has that name; or a list of pairs (character,
# score), where the token that holds the character gets the score (a process reward). As in TRL, a completion
# is a string if its prompt is a string, and if the prompt is a list of messages it is the list of the
# messages that follow.


def content(completion):
    """Return the text of a completion: the string, or the content of the last message."""
    return completion if isinstance(completion, str) else completion[-1].get("content") or ""


# This finds a number such as 7, -3/4 or 0.5 at the end of a text, behind "Answer:" or in a box.
NUMBER = re.compile(r"(?:answer:|\\boxed\{)[\s*$]*(?:[a-z]\s*=\s*)?"
                    r"([-+]?\d{1,300}(?:\.\d{1,300}|/[1-9]\d{0,300})?)[\s*$}.]*\Z", re.IGNORECASE)


def number_of(completion):
    """Return the number with which a completion ends as its answer, as a Fraction, or None."""
    found = NUMBER.search(content(completion))
    return Fraction(found[1]) if found else None


def accuracy(prompts, completions, answer, **columns):
    """Return 1.0 for each completion that ends with the row's number as its answer, otherwise 0.0."""
    return [float(number_of(completion) == Fraction(truth)) for completion, truth in zip(completions, answer)]


def exact_accuracy(prompts, completions, answer, **columns):
    """Return 1.0 for each completion whose final answer has the value of the row's `answer`, otherwise 0.0.

    tasks/check_answer.py reads LaTeX, units, intervals and more.
    """
    return [float(check_answer(content(completion), truth)) for completion, truth in zip(completions, answer)]


def math_verify(prompts, completions, answer, **columns):
    """Do what exact_accuracy does, and ask the package math-verify where exact values do not decide."""
    return [float(check_answer(content(completion), truth, algebra=True))
            for completion, truth in zip(completions, answer)]


# The rewards of tasks that do not take exact_accuracy.
OWN = {"algebra": accuracy, "arithmetic": accuracy}


class Reward(NamedTuple):
    """A reward function, and how it is called."""
    name: str                   # under which it is logged
    function: object            # its spec, or a function of the task's
    source: str = ""            # its file or module
    form: str = "TRL"           # or verl, or verl batch
    each: bool = False          # a call scores one completion, not all of them
    at_once: bool = False       # it is async: its calls run at the same time
    environments: bool = False  # it reads the environments of the episodes, as in TRL


def load_reward(spec, task):
    """Return the Reward that `spec` names, or the task's own for "".

    spec: "file.py:function", "file.py" for its compute_score, "package.module:function", or "math_verify". A
    function has verl's form if it takes `solution_str` and none of prompts, completions and completion_ids,
    verl's form for a batch if it takes `solution_strs`, and otherwise TRL's. Raises ValueError if there is no
    such function, if its file raises, or if the package of math_verify is missing.
    """
    if not spec:
        return Reward("accuracy", OWN.get(task.partition(":")[0], exact_accuracy))
    if spec == "math_verify":
        try:
            importlib.import_module(spec)
        except ImportError as error:
            raise ValueError("reward=math_verify needs the package math-verify: pip install "
                             f"'math-verify[antlr4_13_2]' ({error})") from error
        # A comparison that hangs costs no other completion its score.
        return Reward(spec, "rewards:math_verify", each=True)
    spec += ":compute_score" if spec.endswith(".py") else ""
    function = load_from(spec, "reward", "function", " or math_verify")
    parameters = inspect.signature(function).parameters.keys()
    trl = {"prompts", "completions", "completion_ids"} & parameters
    verl = {"solution_str": "verl", "solution_strs": "verl batch"}.items()
    form = next((form for key, form in verl if key in parameters and not trl), "TRL")
    at_once = any(map(inspect.iscoroutinefunction, (function, getattr(function, "__call__", None))))
    return Reward(name_of(function), spec, source_of(spec), form, form == "verl" or at_once, at_once,
                  "environments" in parameters)


def judge(reward, columns, alone=False, stop=True, workers=0, timeout=0.0):
    """Yield (parts, steps, logged) for each completion of these columns, or the Failed or TimeUp of its call.

    alone: whether each completion is scored by a call of its own. stop: whether to end with the first error.
    workers: how many calls of an async function run at the same time; 0 means 64. Each of these has `timeout`
    seconds; nothing can stop another function. For the rest see `score`.
    """
    completions, at_once = columns["completions"], reward.at_once and not alone
    function = reward.function
    if not callable(function):
        function = load_from(function, "reward", "function")
    logged, threads, ended = [{} for _ in completions], Threads(workers or 64, timeout), {}
    groups = [[i] for i in range(len(completions))] if alone or at_once else [[*range(len(completions))]]

    def call(group):
        given = {key: [values[i] if key == "environments" else copy.deepcopy(values[i]) for i in group]
                 for key, values in columns.items()}
        logs = logging_into([logged[i] for i in group])
        if reward.form == "TRL":
            given |= logs | {"trainer_state": given["trainer_state"][-1]}
        elif reward.form == "verl":
            given = {key: values[0] for key, values in verl_arguments(given).items()}
        else:
            given = {f"{key}s": values for key, values in verl_arguments(given).items()}
        return functools.partial(function, **accepted(function, given, f"reward {reward.name}", logs))

    for group in groups if at_once else ():
        threads.start(group[0], call(group))
    for group in groups:
        while at_once and group[0] not in ended:
            ended |= {i: result for i, *result in threads.finished(wait=True)}
        returned, error, _ = ended[group[0]] if at_once else outcome(call(group), timeout)
        if not error:
            returned = [returned] if reward.form == "verl" else returned
            values = checked(reward, returned, [completions[i] for i in group])
            yield from [(*pair, logged[i]) for pair, i in zip(values, group)]
        elif len(group) == 1:
            yield error
            if stop:
                return
        else:
            # Calls for each completion tell which one is to blame; if none is, it is all of them together.
            results = [*judge(reward, columns, True, stop, timeout=timeout)]
            if not any(isinstance(one, Failed) for one in results):
                results[0] = error
            yield from results


def verl_arguments(columns):
    # Returns verl's arguments, each as a list with a value per completion.
    column = lambda key: columns.get(key, [None] * len(columns["completions"]))
    arguments = {"data_source": columns.get("data_source", column("source")),
                 "solution_str": [*map(content, columns["completions"])],
                 "extra_info": [info or {} for info in column("extra_info")]}
    # Where a model scores verl's row, it has no truth: {"style": "model"}.
    models = [model if isinstance(model, dict) else {} for model in column("reward_model")]
    truths = zip([model.get("ground_truth") for model in models], column("ground_truth"), column("answer"))
    if {"reward_model", "ground_truth", "answer"} & columns.keys():
        arguments["ground_truth"] = [next((one for one in some if one is not None), None) for some in truths]
    return arguments


TIMED_OUT = "the reward took too long"


def score(reward, columns, process=None, timeout=0.0, budget=math.inf, workers=0, unscored=False):
    """Return (parts, steps, logged, problem) for each completion.

    parts is {name: value}, with NaN for a part that is None. A reward without named parts has one part, with
    the reward's name, or none if it returned None. steps: pairs (character, score). logged: {name: value},
    what the reward logged. problem: why the reward failed, or "".

    columns: {name: one value per completion}, of which the reward gets copies. process: the UserProcess in
    which a call has `timeout` seconds; 0 sets no limit. If a call for all completions takes longer or ends
    the process, each completion is scored by a call of its own. If that one takes longer as well, the
    completion gets 0.0, and so do all that have no score `timeout` seconds after the end of `budget`. With
    unscored=True these completions get no parts, nor do those for which the reward raises.

    Raises RuntimeError if the reward raises and unscored is False (the message shows the completion), or if
    it returns anything but one finite number, None, dict of these or list of pairs for each completion.
    Raises ValueError if a column is missing.
    """
    completions, end = columns["completions"], time.monotonic() + budget
    alone, results = reward.each and not reward.at_once, []
    while (done := len(results)) < len(completions):
        rest, left = {key: values[done:] for key, values in columns.items()}, end - time.monotonic()
        # Calls that run at once have limits of their own, and the process one for all of them.
        limit = timeout if timeout and (alone or not reward.at_once) else math.inf
        try:
            if left <= 0:
                raise TimeUp
            arguments = reward, rest, alone, not unscored, workers, timeout
            results.extend(process.results(limit, end + timeout, judge, *arguments) if process
                           else judge(*arguments))              # it keeps what came before an error
        except (TimeUp, Failed) as error:                       # the process has ended
            results += [error] if alone else []
            alone = True
        blamed = [pair for pair in zip(results, completions) if isinstance(pair[0], Failed)]
        if blamed and not unscored:
            (error, completion), *_ = blamed
            where = "" if isinstance(completion, str) else ", in a list of messages"
            raise RuntimeError(f"reward {reward.name} {error}; the completion is "
                               f"{content(completion)[:500]!r}{where}") from error
    if limit == math.inf and process and any(isinstance(one, TimeUp) for one in results):
        process.end()                                           # because these calls may still be running
    names = dict.fromkeys(name for one in results if isinstance(one, tuple) for name in one[0])
    failed = {} if unscored else dict.fromkeys(names or [reward.name], 0.0)
    return [(*one, "") if isinstance(one, tuple) else (failed, [], {}, TIMED_OUT if isinstance(one, TimeUp)
                                                       else f"the reward {one}") for one in results]


def total(parts, weights):
    """Return the weighted part "score" or, if there is none, the weighted sum of the parts, without NaN.

    A part that `weights` does not name has the weight 1. The result is NaN if all parts are.
    """
    counted = {"score": parts["score"]} if "score" in parts else parts
    return known(weights.get(name, 1.0) * value for name, value in counted.items())


def known(values):
    # Returns the sum of those that are not NaN, or NaN if there is none.
    some = [value for value in values if not math.isnan(value)]
    return sum(some) if some else math.nan


def checked(reward, returned, completions):
    # Returns (parts, steps) for each value that a reward returned, in a list, an array or a tensor.
    returned = returned.tolist() if hasattr(returned, "tolist") else returned
    if not isinstance(returned, (list, tuple)) or len(returned) != len(completions):
        what = f"{len(returned)} values" if isinstance(returned, (list, tuple)) else type(returned).__name__
        raise RuntimeError(f"reward {reward.name} returned {what}, not a list of {len(completions)}, one for "
                           "each completion")
    return [parts_of(reward.name, *pair) for pair in zip(returned, completions)]


def parts_of(name, value, completion):
    # Returns (parts, steps) of the value that the reward of this name returned for a completion.
    def wrong(value, problem):
        return RuntimeError(f"reward {name} returned {shown(value)}: {problem}; the completion is "
                            f"{content(completion)[:500]!r}")

    def real(value):
        # float raises for 10**400, for example.
        with contextlib.suppress(Exception):
            if hasattr(value, "__float__") and abs(float(value)) <= 3.4e38:     # float32's largest
                return float(value)
        raise wrong(value, "not a finite number in float32")

    steps = []
    if isinstance(value, (list, tuple)):
        length = len(content(completion))
        if not all(isinstance(pair, (list, tuple)) and len(pair) == 2 and pair[0] in range(length)
                   for pair in value):
            raise wrong(value, f"not pairs (character, score) with characters from 0 to {length - 1}")
        steps = [(int(character), real(one)) for character, one in value]
        value = sum(one for _, one in steps)
    if not isinstance(value, dict):
        value = {} if value is None else {name: value}
    # Besides the score, verl's functions may return entries that are not numbers.
    elif "score" in value:
        value = {key: part for key, part in value.items() if key == "score" or hasattr(part, "__float__")}
    parts = {str(key): math.nan if part is None else real(part) for key, part in value.items()}
    real(sum(part for part in parts.values() if not math.isnan(part)))
    return parts, steps


# ------------------------------------------------------------------------------------------------------------
# the scores of rollouts. A rollout has a row, a completion in the form that a reward gets, a score, which is
# NaN if it was not scored, and parts, which are the values that make up the score, by name.


class Scorer:
    """Scores rollouts by the rewards and the reward model that a run's settings name.

    scorer(rollouts) sets score, parts, rewards, extra and problem of each rollout. The score is the sum of
    what the environment gave, what the rewards returned, and the reward model's score. Each part is first
    multiplied by its weight in reward_weights. If the environment gives rewards, the task's own reward is not
    used. A reward that returned None counts as 0. If the reward model cannot score a completion, the
    completion has no score, unless the model's weight is 0. What belongs to no turn or step is given to the
    last token in `rewards`. weights: {name: weight} of reward_weights. budget: the seconds that the
    calls of a reward have in all, save for the last one.

    settings: what configure returned. device, dtype: where and in which precision the reward model computes.
    player: the episodes.Player that plays what is scored; at the end of each episode it calls the rewards
    that take `environments`. tokenizer: the one that decodes completions. Raises ValueError if a reward or
    the reward model cannot be loaded.
    """

    def __init__(self, settings, device, dtype, player, tokenizer=None):
        s, self.settings, self.environment, self.tokenizer = settings, settings, player.rewards_as, tokenizer
        self.player, self.weights = player, part_weights(s.reward_weights)
        self.budget = 9 * s.call_timeout or math.inf            # with the last call, ten times call_timeout
        self.unscored, self.model = s.reward_errors == "unscored", None
        # {file or module: the UserProcess that calls its functions}
        self.processes = {}
        own = s.reward != "none" and (s.reward or not self.environment)
        self.rewards = [self._load(spec) for spec in specs(s.reward)] if own else []
        names = [reward.name for reward in self.rewards]
        if twice := [name for name, count in Counter(names).items() if count > 1]:
            raise ValueError(f"reward={s.reward}: two of them are called {twice[0]}")
        self.judging = [reward for reward in self.rewards if reward.environments]
        if self.judging and not player.make:
            raise ValueError(f"reward {self.judging[0].name} takes environments, but none is given")
        if self.judging:
            player.judge = self._judge
        if s.reward_model:
            # Only those who use a reward model wait for this import.
            from runtime.reward_model import RewardModel
            self.model = RewardModel(s.reward_model, device, dtype, s.token_budget)
        # The answers are numbers, and no code of the user's runs that might hang or raise.
        self.plain = self.rewards == [Reward("accuracy", accuracy)] and not (
            self.model or self.weights or player.make)
        if not (names or self.model or self.environment):
            raise ValueError("reward=none needs a reward_model, or an environment that gives rewards")

    def _load(self, spec):
        # A function of the user's may do anything, so it gets a process of its own. It is called here if it
        # has no time limit, where a debugger finds it, and if it reads environments or stands in their file.
        s, place = self.settings, source_of(spec)
        if s.reward and not spec:
            raise ValueError(f"reward={s.reward}: nothing stands on one side of a comma")
        if spec and s.call_timeout and not (place and place == source_of(s.environment)):
            load = map, load_reward, [spec], [s.task]
            process = self.processes.setdefault(place, UserProcess(STARTED_IN, *load))
            [reward] = process.results(math.inf, math.inf, *load)
            if not reward.environments:
                return reward
            process.end()
        return load_reward(spec, s.task)

    def _columns(self, rollouts):
        # Returns what a reward may be given for these rollouts, as in TRL: {name: a value for each}.
        rows, state = [r.row for r in rollouts], {"max_steps": getattr(self.settings, "max_steps", 0)}
        shared = [key for key in rows[0] if key != "prompt" and all(key in row for row in rows)]
        return {key: [row[key] for row in rows] for key in shared} | {
            "prompts": [row["prompt"] for row in rows], "completions": [r.completion for r in rollouts],
            "completion_ids": [r.ids[r.spans[0, 0]:].tolist() for r in rollouts],
            # The version of the weights is the number of steps that they were trained for.
            "trainer_state": [SimpleNamespace(global_step=r.versions[-1][1], **state) for r in rollouts]}

    def _judge(self, rollout, environment):
        # Scores an episode before its environment is reset for the next one.
        columns = self._columns([rollout]) | {"environments": [environment]}
        for reward in self.judging:
            self._add(rollout, *score(reward, columns, unscored=self.unscored)[0])

    def _add(self, rollout, named, steps, logged, problem):
        # Adds to a rollout what a reward returned for it; `_score` gives the tokens their share.
        if steps and self.player.make:
            raise RuntimeError(f"reward {min(named)} scores characters of a completion, but an episode has "
                               "several messages")
        if len(self.rewards) > 1 and (clash := {*rollout.parts, "score"} & named.keys()):
            raise RuntimeError(f"reward={self.settings.reward}: a part of one of them may not be called "
                               f"{min(clash)}: this names the whole score or another's part")
        rollout.parts, rollout.problem = rollout.parts | named, rollout.problem or problem
        rollout.extra |= logged

    def check_with(self, prompts):
        """Try a first turn and two made-up completions, so that what is broken shows before training.

        prompts: one or two data.Prompts. Raises ValueError if the environment, the chat template, a reward or
        the reward model cannot be used.
        """
        self.player.check_with(prompts)

        def made_up(row, text):
            message = [{"role": "assistant", "content": text}]
            encoded = self.tokenizer(text).input_ids if self.tokenizer else []
            return SimpleNamespace(row=row, completion=text if isinstance(row["prompt"], str) else message,
                                   finish_reason="stop", rewards={}, logprobs=[0.0], sampled_ids=[], extra={},
                                   parts={}, problem="", ids=np.array(encoded), spans=np.array([[0, 0]]),
                                   versions=((0, 0),))

        trial = [*map(made_up, [prompt.row for prompt in prompts * 2], ("Answer: 0", ""))]
        try:
            self._score(trial)
        except RuntimeError as error:
            raise ValueError(error) from error
        problems = [rollout.problem for rollout in trial]
        # A judge may fail now and then, so one failure of two is accepted where failures are.
        if all(problems) if self.unscored else any(problems):
            raise ValueError(f"{max(problems)} for a made-up completion: reward={self.settings.reward}, "
                             f"call_timeout={self.settings.call_timeout:g}")
        names = {*trial[0].parts, *trial[1].parts, *(reward.name for reward in self.rewards)}
        # The parts of a reward that reads environments are not known yet.
        if (strange := self.weights.keys() - names) and not self.judging:
            raise ValueError(f"reward_weights: no part {', '.join(strange)}; the parts are "
                             f"{', '.join(sorted(names))}")

    def __call__(self, rollouts):
        if self.plain:
            for r in rollouts:
                number = number_of(r.completion)
                r.score, r.answered = float(number == Fraction(r.row["answer"])), number is not None
                r.parts, r.rewards = {"accuracy": r.score}, {len(r.logprobs) - 1: r.score}
        elif rollouts:
            self._score(rollouts)

    def _score(self, rollouts):
        # Scores by any rewards, with or without an environment and a reward model.
        s, columns = self.settings, self._columns(rollouts)
        results = [score(reward, columns, self.processes.get(reward.source), s.call_timeout, self.budget,
                         s.call_workers, self.unscored) for reward in self.rewards if not reward.environments]
        by_model = self.model and self.model.score(columns["prompts"], columns["completions"])
        weight = lambda name: self.weights.get(name, 1.0)
        for i, r in enumerate(rollouts):
            # What the environment gave at each turn, or a reward at each step. If get_reward returned None,
            # a NaN says that the environment gave nothing.
            given = r.rewards if self.environment else {}
            earned, own = sum(given.values()), defaultdict(float)
            if not math.isnan(earned):
                own |= {token: weight(self.environment) * one for token, one in given.items()}
            # What the rewards said that have read the environment is there already.
            r.parts, r.problem = (r.parts, r.problem) if self.judging else ({}, "")
            for named, steps, *more in [result[i] for result in results]:
                self._add(r, named, steps, *more)
                for token, one in self._at_tokens(r, steps):
                    own[token] += weight(min(named)) * one
            score_of_all = total(r.parts, self.weights)
            if self.environment:
                r.parts = r.parts | {self.environment: earned}
                score_of_all = known([score_of_all, weight(self.environment) * earned])
            if self.model:
                r.parts = r.parts | {"reward_model": by_model[i]}
                scaled = weight("reward_model") * by_model[i] if weight("reward_model") else 0.0
                score_of_all = scaled + known([score_of_all, 0.0])
            unscored = r.finish_reason == "error" or self.unscored and r.problem
            r.score, last = math.nan if unscored else score_of_all, len(r.logprobs) - 1
            if r.row.get("answer") is not None:
                r.answered = extract_answer(content(r.completion)) is not None
            rest = r.score - sum(own.values())
            if not own or not abs(rest) < 1e-9:                 # more than rounding leaves
                own[last] += rest
            r.rewards = dict(own)

    def _at_tokens(self, rollout, steps):
        # Yields (sampled token, its reward) for pairs (character of the completion, reward).
        ids, text = rollout.sampled_ids, content(rollout.completion)
        for character, reward in steps:
            begins = lambda t: self.tokenizer.decode(ids[:t + 1]).startswith(
                text[:character + 1])
            yield bisect.bisect_left(range(len(ids)), True, key=begins), reward


def part_weights(text):
    """Return {name: weight} for the text "name:weight,name:weight". Raises ValueError for any other text."""
    pairs = [pair.rpartition(":") for pair in text.split(",") if pair]
    with contextlib.suppress(ValueError):
        weights = {name: float(number) for name, _, number in pairs}
        if "" not in weights and all(abs(weight) <= 1e9 for weight in weights.values()):
            return weights
    raise ValueError(f"reward_weights={text}: write name:weight,name:weight, as in right:1,brief:0.5")


def part_means(rollouts, prefix, of="parts"):
    """Return {prefix/name/mean: mean} of the numbers of each name; the mean of none is 0.

    of: "parts" for the parts of the score, or "extra" for what was logged. NaN, infinity and numbers whose
    sum might overflow are left out.
    """
    values = defaultdict(list)
    for name, value in (pair for rollout in rollouts for pair in getattr(rollout, of).items()):
        if not isinstance(value, str):
            values[name] += [value] if abs(value) < 1e300 else []
    return {f"{prefix}/{name}/mean": math.fsum(some) / max(len(some), 1) for name, some in values.items()}


def evaluation(rollouts, k, name="eval"):
    """Return mean@k, pass@k and maj@k of scored rollouts, where each prompt has k adjacent ones.

    mean@k  the mean score
    pass@k  the mean over prompts of the best of k scores; for scores of 0 and 1 this is how often any of the
            k answers is right
    maj@k   the mean over prompts of the score of the commonest answer, or of the first one in a tie. 1/2 and
            0.5 are the same answer, a completion without an answer has no vote, and where there are no votes
            the first completion counts
    The figures over all prompts are called {name}/..., those over the prompts of a source
    {name}/{source}/.... Completions without a score are ignored. The mean of each part is
    {name}/rewards/{part}/mean. mean_length is the number of sampled tokens, clipped_ratio the share of
    completions that were cut off, right_ended the share of those with a score above 0 that ended by
    themselves, and unscored counts those whose reward or episode failed.
    """
    values, lengths = defaultdict(list), [len(rollout.logprobs) for rollout in rollouts]
    answered = [rollout.answered for rollout in rollouts if rollout.answered is not None]
    cut_off = [rollout.finish_reason == "length" for rollout in rollouts]
    ended = [rollout.finish_reason == "stop" for rollout in rollouts if rollout.score > 0]
    for i in range(0, len(rollouts), k):
        scored = [rollout for rollout in rollouts[i:i + k] if not math.isnan(rollout.score)]
        if not scored:
            continue
        scores = [rollout.score for rollout in scored]
        answers = [extract_answer(content(rollout.completion)) for rollout in scored]
        # An answer votes by its exact value, or by its text if it has none.
        texts = [None if answer is None else plain(answer) for answer in answers]
        answers = [text if text is None or (tree := value(text)) is None else tree for text in texts]
        votes = Counter(answer for answer in answers if answer is not None)
        winner = answers.index(votes.most_common(1)[0][0]) if votes else 0
        source = rollouts[i].row.get("source")
        for prefix in [name] + ([f"{name}/{source}"] if source else []):
            values[f"{prefix}/mean@{k}"].append(sum(scores) / len(scores))
            values[f"{prefix}/pass@{k}"].append(max(scores))
            values[f"{prefix}/maj@{k}"].append(scores[winner])
    means = {key: sum(each) / len(each) for key, each in values.items()}
    return means | {f"{name}/unscored": len(failures(rollouts)),
                    f"{name}/mean_length": sum(lengths) / len(lengths),
                    f"{name}/clipped_ratio": sum(cut_off) / len(cut_off),
                    f"{name}/right_ended": sum(ended) / max(len(ended), 1),
                    **({f"{name}/rewards/no_answer": answered.count(False) / len(answered)}
                       if answered else {}), **part_means(rollouts, f"{name}/rewards")}


def failures(rollouts):
    """Return why completions have no score, or the score 0 because a call took too long: a text for each."""
    return [r.counts.get("problem") or r.problem or "the reward gave no score" for r in rollouts
            if r.problem or math.isnan(r.score)]


def evaluate(prompts, k, sample, scorer, log, name="eval", **sampling):
    """Sample k completions per prompt, with the same seeds every time, score them, and log an evaluation.

    sample: a rollout.Sampler; sampling: keywords for it. Return the rollouts of this rank, which samples for
    its share of the prompts. A collective.
    """
    import torch.distributed as dist                # a reward's process needs this file, and no PyTorch
    from runtime.distributed import gathered
    own = range(dist.get_rank(), len(prompts), dist.get_world_size())
    with log.timed("eval"):
        rollouts = sample([prompts[i] for i in own], k, [f"{name} {i}" for i in own], **sampling)
        scorer(rollouts)
        everyones = gathered(rollouts)
        log.evaluation(evaluation(everyones, k, name), failures(everyones), len(everyones))
    return rollouts


def rollout_metrics(rollouts, n, engines):
    """Return the figures of sampled and scored rollouts for a log; means ignore NaN.

    n: the number of adjacent rollouts per prompt. engines: how many engines sampled them. The time that
    environments took is given per engine.
    """
    import torch                                    # as in evaluate
    from losses import group_std
    lengths = [len(r.logprobs) for r in rollouts]
    scores = np.array([r.score for r in rollouts])
    stds = group_std(torch.from_numpy(scores), n)                                       # [N / n]
    scored = scores[~np.isnan(scores)].tolist()
    answered = [r.answered for r in rollouts if r.answered is not None]
    figures = {"reward": float(np.nanmean(scores)) if scored else 0.0,
               "reward_std": stds.mean().item(), "frac_reward_zero_std": (stds == 0).double().mean().item(),
               "rewards/min": min(scored, default=0.0), "rewards/max": max(scored, default=0.0),
               "rewards/unscored": len(scores) - len(scored), **part_means(rollouts, "rewards"),
               **part_means(rollouts, "logged", "extra"),
               **({"rewards/no_answer": answered.count(False) / len(answered)} if answered else {}),
               "rewards/timeouts": sum(r.problem == TIMED_OUT for r in rollouts),
               "completions/mean_length": sum(lengths) / len(lengths),
               "completions/min_length": min(lengths), "completions/max_length": max(lengths),
               "completions/clipped_ratio": sum(r.finish_reason == "length" for r in rollouts) / len(lengths)}
    return figures | episode_metrics(rollouts, engines) if any(r.counts for r in rollouts) else figures


def episode_metrics(rollouts, engines):
    # Returns the figures of episodes with an environment.
    turns, calls = sum(len(r.spans) for r in rollouts), sum(r.counts["calls"] for r in rollouts)
    inserted = sum(len(r.ids) - len(r.prompt_ids) - len(r.logprobs) for r in rollouts)
    ended = Counter(r.finish_reason for r in rollouts)
    return {"episodes/turns": turns / len(rollouts), "episodes/inserted_tokens": inserted / len(rollouts),
            **{f"episodes/ended/{'done' if reason == 'stop' else reason}": ended[reason] / len(rollouts)
               for reason in ("stop", "length", "turns", "timeout", "error")},
            "episodes/limited": sum(ended[reason] for reason in ("length", "turns", "timeout")),
            "tools/call_frequency": calls / len(rollouts),
            "tools/failure_frequency": sum(r.counts["failures"] for r in rollouts) / max(calls, 1),
            "timing_s/environment": sum(r.counts["seconds"] for r in rollouts) / engines}


def sample_lines(rollouts, n, tokenizer):
    """Return a step's lines of samples.jsonl: the first of n rollouts of each of the first eight prompts."""
    return [{"prompt": r.row["prompt"],
             "completion": r.completion if r.counts else content(r.completion), "reward": r.score,
             "finish_reason": r.finish_reason, "truth": r.row.get("answer"),
             "tokens": [tokenizer.batch_decode(r.ids[start:end, None]) for start, end in r.spans],
             "logprobs": (r.logprobs.astype(float).round(3) + 0.0).tolist(),
             **({"extra": r.extra} if r.extra else {})} for r in rollouts[:8 * n:n]]


def conversation(completion):
    """Return a completion as one text, in which brackets surround what the policy did not say."""
    if isinstance(completion, str):
        return completion
    texts = []
    for message in completion:
        calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls", [])]
        text = " ".join(str(part) for part in [message["content"], *calls] if part)
        texts.append(text if message["role"] == "assistant" else f"[{text}]")
    return " ".join(texts)
