"""Rewards: one score for each completion, from a verifier of final answers or from a function of yours.

    load_reward   finds the task's own reward, math_verify, or a function of yours ("file.py:function")
    score         calls a reward on completions and checks what it returns
    Scorer        scores rollouts by the rewards and the reward model that a run's settings name
"""
import bisect
import contextlib
import copy
import inspect
import math
import re
import sys
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from types import SimpleNamespace

from tasks.check_answer import check_answer, extract_answer
from runtime.user_code import (STARTED_IN, Failed, TimeUp, UserProcess, accepted, as_float, load_from,
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
    return [float(number_of(completion) == Fraction(str(truth)))
            for completion, truth in zip(completions, answer)]


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
GYM = "tasks.reasoning_gym:gym_score"               # of the tasks that begin with reasoning_gym:


TRL = {"prompts", "completions", "completion_ids"}      # one of them is in each function of TRL's form


@dataclass
class Reward:
    """A reward function, and how it is called."""
    name: str                   # under which it is logged
    function: object            # its spec, or a function of the task's
    form: str = "TRL"           # or verl, for one completion, or verl batch
    at_once: bool = False       # it is async: each completion has a call, and many run at the same time
    environments: bool = False  # it reads the environments of the episodes, as in TRL
    alone: bool = False         # a call for several completions has failed, so each has a call of its own


def load_reward(spec, task):
    """Return the Reward that `spec` names, or the task's own for "".

    spec: "file.py:function", "file.py" for its compute_score, "package.module:function", or "math_verify". A
    function has verl's form if it takes `solution_str`, or for a batch `solution_strs`, and none of prompts,
    completions and completion_ids. Raises ValueError if there is no such function, if its file raises, or if
    the package of math_verify is missing.
    """
    if not spec:
        return Reward("accuracy", OWN.get(task.partition(":")[0], exact_accuracy))
    if spec == "math_verify":
        load_from("math_verify:parse", "reward", "function")    # the package is installed
        spec = "rewards:math_verify"
    spec += ":compute_score" if spec.endswith(".py") else ""
    function = load_from(spec, "reward", "function", " or math_verify")
    parameters = inspect.signature(function).parameters.keys()
    forms = {"solution_str": "verl", "solution_strs": "verl batch"}
    verl_forms = [] if TRL & parameters else [forms[key] for key in forms if key in parameters]
    form = verl_forms[0] if verl_forms else "TRL"
    at_once = any(map(inspect.iscoroutinefunction, (function, getattr(function, "__call__", None))))
    return Reward(name_of(function), spec, form, at_once, "environments" in parameters)


def verl_arguments(row):
    # Returns verl's arguments for a row with its completion. The last truth counts; if a model scores verl's
    # row, reward_model holds none.
    model = row["reward_model"] if isinstance(row.get("reward_model"), dict) else {}
    truths = row.get("answer"), row.get("ground_truth"), model.get("ground_truth")
    return {"data_source": row.get("data_source") or row.get("source"),
            "solution_str": content(row["completions"]), "extra_info": row.get("extra_info") or {},
            **{"ground_truth": truth for truth in truths if truth is not None}}


def only(columns, i):
    # Returns the columns of one completion.
    return {key: values[i:i + 1] for key, values in columns.items()}


def judge(reward, columns, timeout, end, workers):
    """Return (parts, steps, logged) for each completion, as in `score`, or its error: Failed or TimeUp.

    If one call for several completions fails, there is one error for all of them. The completions of an async
    reward have calls of their own, of which `workers` run at the same time (0: 64), and each has `timeout`
    seconds (0: no limit). TimeUp stands for what has not begun at the time `end`.
    """
    function, completions = reward.function, columns["completions"]
    if time.monotonic() >= end:
        return [TimeUp()] * len(completions)
    if reward.at_once and len(completions) > 1:
        alone = lambda i: judge(reward, only(columns, i), timeout, end, workers)
        with ThreadPoolExecutor(workers or 64) as pool:
            return [one for found in pool.map(alone, range(len(completions))) for one in found]
    if not callable(function):
        function = load_from(function, "reward", "function")
    logged = [{} for _ in completions]                          # {name: value}
    logs = logging_into(logged)
    # A reward that changes what it gets must not change the rows of the run.
    given = {key: values if key == "environments" else copy.deepcopy(values)
             for key, values in columns.items()}
    if reward.form == "verl":
        given, by_name = verl_arguments({key: values[0] for key, values in given.items()}), logs
    elif reward.form == "verl batch":
        rows = [verl_arguments({key: values[i] for key, values in given.items()}) for i in range(len(logged))]
        given, by_name = {f"{key}s": [row.get(key) for row in rows] for key in rows[0]}, logs
    else:
        given, by_name = given | logs | {"trainer_state": given["trainer_state"][-1]}, {}
    given = accepted(function, given, f"reward {reward.name}", by_name)
    limit = timeout and min(timeout, end - time.monotonic())
    returned, error, _ = outcome(lambda: function(**given), limit)
    if error:
        return [error]
    returned = [returned] if reward.form == "verl" else returned
    returned = returned.tolist() if hasattr(returned, "tolist") else returned       # an array or a tensor
    if not isinstance(returned, (list, tuple)) or len(returned) != len(completions):
        raise ValueError(f"reward {reward.name} returned {shown(returned)}, not a list of {len(completions)} "
                         "values, one for each completion")
    return [(*parts_of(reward.name, value, content(completion)), log)
            for value, completion, log in zip(returned, completions, logged)]


def score(reward, columns, process=None, timeout=0.0, end=math.inf, workers=0, errors="stop"):
    """Return (parts, steps, logged, problem) for each completion.

    parts is {name: value}, with NaN for a part that is None. A reward without named parts has one part, with
    the reward's name, or none if it returned None. steps: pairs (character, score). logged: {name: value},
    what the reward logged. problem: why the reward failed, or "".

    columns: {name: one value per completion}, of which the reward gets copies. process: the UserProcess in
    which a call has `timeout` seconds; 0 sets no limit. If a call for several completions fails, these and
    all later ones are scored by calls of their own. A completion gets NaN for each part if its own call takes
    too long, or has not begun at the time `end` of time.monotonic, and with errors="unscored" also if the
    reward raises; with errors="zero" it gets 0.0 instead. workers: as in judge.

    Raises ValueError if a column is missing, if the reward raises and errors is "stop" (the message shows the
    completion), or if it returns anything but one finite number, None, dict of these or list of pairs for
    each completion.
    """
    completions = columns["completions"]

    def call(some):
        arguments = judge, reward, some, timeout, end, workers
        if not process:
            return judge(*arguments[1:])
        try:
            # The calls of an async reward have limits of their own.
            return process.call(None if reward.at_once else timeout or None, *arguments)
        except (TimeUp, Failed) as error:
            return [error]

    results = [] if reward.alone or reward.form == "verl" and not reward.at_once else call(columns)
    if len(results) < len(completions):
        reward.alone = not reward.at_once
        for error in results:
            print(f"reward {reward.name} {error} for {len(completions)} completions: "
                  f"{'from now on ' * reward.alone}each is scored by a call of its own", file=sys.stderr)
        results = [one for i in range(len(completions)) for one in call(only(columns, i))]
    if process and any(isinstance(one, TimeUp) for one in results):
        process.end()                                           # because calls of an async reward may go on
    for one, completion in zip(results, completions):
        if isinstance(one, Failed) and errors == "stop":
            raise ValueError(f"reward {reward.name} {one}; the completion is "
                             f"{content(completion)[:500]!r}") from one
    # A completion without a score gets all parts that others have.
    names = [name for one in results if isinstance(one, tuple) for name in one[0]] or [reward.name]
    without = dict.fromkeys(names, 0.0 if errors == "zero" else math.nan)
    return [(*one, "") if isinstance(one, tuple) else (without, [], {}, f"the reward {one}")
            for one in results]


def counted(parts):
    # Returns those of a reward's parts that make up the score.
    return {"score": parts["score"]} if "score" in parts else parts


def parts_of(name, returned, text):
    # Returns (parts, steps) of the value that the reward of this name returned for a completion.
    value, steps = returned, []
    try:
        if isinstance(value, (list, tuple)):
            steps = [(range(len(text)).index(character), as_float(one)) for character, one in value]
            value = sum(one for _, one in steps)
        if not isinstance(value, dict):
            value = {} if value is None else {name: value}
        # Besides the score, verl's functions may return entries that are not numbers.
        elif "score" in value:
            value = {key: one for key, one in value.items() if key == "score" or hasattr(one, "__float__")}
        return {str(key): math.nan if one is None else as_float(one) for key, one in value.items()}, steps
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"reward {name} returned {shown(returned)}: not a finite number in float32, nor None, nor a dict "
            f"of these, nor pairs (character, score) with characters from 0 to {len(text) - 1}; the "
            f"completion is {text[:500]!r}") from error


# ------------------------------------------------------------------------------------------------------------
# the scores of rollouts. A rollout has a row, a completion in the form that a reward gets, a score, which is
# NaN if it was not scored, and parts, which are the values that make up the score, by name.


class Scorer:
    """Scores rollouts by the rewards and the reward model that a run's settings name.

    scorer(rollouts) sets score, parts, rewards, extra and problem where there are none. The score sums up
    what the environment gave, what the rewards returned, and the reward model's score. Each part is first
    multiplied by its weight in reward_weights. If the environment gives rewards, the task's own reward is not
    used. A reward that returned None counts as 0. A completion has no score if the reward model cannot score
    it, or if a reward failed for it and reward_errors is not "zero", unless the weight is 0. What belongs to
    no turn or step is given to the last token in `rewards`. weights: {name: weight} of reward_weights.
    budget: the seconds after which the rewards of a batch begin no more calls.

    settings: what configure returned. device, dtype: where and in which precision the reward model computes.
    player: the episodes.Player that plays what is scored; at the end of each episode it calls the rewards
    that take `environments`. tokenizer: the one that decodes completions. Raises ValueError if a reward or
    the reward model cannot be loaded.
    """

    def __init__(self, settings, device, dtype, player, tokenizer=None):
        s, self.settings, self.player, self.tokenizer = settings, settings, player, tokenizer
        self.environment, self.weights, self.model = player.rewards_as, part_weights(s.reward_weights), None
        self.budget = 9 * s.call_timeout or math.inf            # with the last call, ten times call_timeout
        # {file or module: the UserProcess that calls its functions}
        self.processes = {}
        # The task's own reward; that of reasoning_gym's tasks is a function like a user's.
        own = [] if self.environment or s.agent else [GYM if s.task.startswith("reasoning_gym:") else ""]
        # Pairs (Reward, the UserProcess that calls it or None).
        rewards = [self._load(spec) for spec in specs(s.reward) or own] if s.reward != "none" else []
        if s.agent:                                             # its score, as if a reward had returned it
            rewards.append((Reward(player.name, lambda environments: [
                episode.score for episode in environments], environments=True), None))
        self.judging = [reward for reward, _ in rewards if reward.environments and player.make]
        self.rewards = [(reward, process) for reward, process in rewards if reward not in self.judging]
        if self.judging:
            player.score_ended = self._judge
        if s.reward_model:
            # Only those who use a reward model wait for this import.
            from runtime.reward_model import RewardModel
            self.model = RewardModel(s.reward_model, device, dtype, s.token_budget)
        # The answers are numbers, and no code of the user's runs that might hang or raise.
        self.plain = rewards == [(Reward("accuracy", accuracy), None)] and not (
            self.model or self.weights or player.make)
        if not (rewards or self.model or self.environment):
            raise ValueError("reward=none needs a reward_model, or an environment that gives rewards")

    def _load(self, spec):
        # A function of the user's may do anything, so it gets a process of its own. It is called here if it
        # has no time limit, where a debugger finds it, and if it reads environments or stands in their file.
        s, place = self.settings, source_of(spec) or spec
        if spec and s.call_timeout and place != source_of(s.environment):
            load = load_reward, spec, s.task
            process = self.processes.setdefault(place, UserProcess(STARTED_IN, *load))
            reward = process.call(None, *load)
            if not (reward.environments and self.player.make):
                return reward, process
            process.end()
        return load_reward(spec, s.task), None

    def _columns(self, rollouts):
        # Returns what a reward may be given for these rollouts, as in TRL: {name: a value for each}.
        rows, state = [r.row for r in rollouts], {"max_steps": getattr(self.settings, "max_steps", 0)}
        shared = [key for key in rows[0] if key != "prompt" and all(key in row for row in rows)]
        return {key: [row[key] for row in rows] for key in shared} | {
            "prompts": [row["prompt"] for row in rows], "completions": [r.completion for r in rollouts],
            "completion_ids": [r.ids[r.spans[0, 0]:].tolist() for r in rollouts],
            # The version of the weights is the number of steps that they were trained for.
            "trainer_state": [SimpleNamespace(global_step=r.versions[-1][1], **state) for r in rollouts]}

    def _in_form(self, form, columns):
        # verl's form gets an episode as verl decodes it: all that follows the prompt, as one text.
        if form == "TRL" or not self.player.make:
            return columns
        return columns | {"completions": self.player.tokenizer.batch_decode(
            columns["completion_ids"], skip_special_tokens=True)}

    def _judge(self, rollout, environment):
        # Scores an episode before its environment is reset for the next one.
        columns = self._columns([rollout]) | {"environments": [environment]}
        for reward in self.judging:
            self._add(rollout, *score(reward, columns, errors=self.settings.reward_errors)[0])

    def _add(self, r, named, steps=(), logged={}, problem=""):
        # Adds to a rollout what a reward, the environment or the reward model gave.
        if steps and self.player.make:
            raise ValueError(f"reward {min(named)} scores characters of a completion, but an episode has "
                             "several messages")
        if twice := r.parts.keys() & named:
            raise ValueError(f"reward={self.settings.reward}: two parts of the score are called {min(twice)}")
        values = [r.score, *(self.weights[name] * value for name, value in counted(named).items())]
        values = [value for value in values if not math.isnan(value)]
        r.score = sum(values) if values else math.nan
        r.parts, r.extra = r.parts | named, r.extra | logged
        if any(self.weights[name] for name in counted(named)):
            r.problem = r.problem or problem

    def check_with(self, prompts):
        """Score what Player.trial_episodes plays, so that what is broken shows before training.

        prompts: one or two data.Prompts. Raises ValueError if the environment, the chat template, a reward or
        the reward model cannot be used.
        """
        for _ in range(1 if self.settings.reward_errors == "stop" else 3):  # a judge may fail now and then
            trial = self.player.trial_episodes(prompts)
            results = self._score(trial)
            if not all(r.problem for r in trial):
                break
        else:
            raise ValueError(f"{trial[0].problem} for a made-up completion: reward={self.settings.reward}, "
                             f"call_timeout={self.settings.call_timeout:g}")
        # Where there is a part "score", the weights of the reward's other parts would have no effect. One that
        # returned None twice may still have a part of its name.
        names = {self.environment} if self.environment else set()
        for i, result in enumerate(results):
            names |= {name for parts, *_ in result for name in counted(parts)} or {self.rewards[i][0].name}
        # A call that failed for made-up completions may do for others.
        for reward, _ in self.rewards:
            reward.alone = False
        # An agent that fails in the trial is not judged, so its parts are not known yet.
        if (strange := self.weights.keys() - names) and not self.judging:
            raise ValueError(f"reward_weights: no part {', '.join(strange)} counts; those that do are "
                             f"{', '.join(sorted(names))}")

    def __call__(self, rollouts):
        if self.plain:
            for r in rollouts:
                answer = number_of(r.completion)
                r.score, r.answered = float(answer == Fraction(r.row["answer"])), answer is not None
                r.parts, r.rewards = {"accuracy": r.score}, {len(r.logprobs) - 1: r.score}
        elif rollouts:
            self._score(rollouts)

    def _score(self, rollouts):
        # Scores by any rewards, with or without an environment and a reward model. Returns what each gave.
        s, columns, end = self.settings, self._columns(rollouts), time.monotonic() + self.budget
        found = [score(reward, self._in_form(reward.form, columns), process, s.call_timeout, end,
                       s.call_workers, s.reward_errors) for reward, process in self.rewards]
        if self.model:
            by_model = self.model.score(columns["prompts"], columns["completions"])
            found.append([({"reward_model": value}, ()) for value in by_model])
        for r, *said in zip(rollouts, *found):
            own = defaultdict(float)                            # {sampled token: what it earned for a step}
            for named, steps, *more in said:
                self._add(r, named, steps, *more)
                for character, one in steps:
                    own[self._token(r, character)] += self.weights[min(named)] * one
            if self.environment:
                # NaN if get_reward returned None: the environment gave nothing.
                self._add(r, {self.environment: sum(r.rewards.values())})
                if not math.isnan(r.parts[self.environment]):
                    own |= {token: self.weights[self.environment] * one for token, one in r.rewards.items()}
            lost = math.isnan(r.parts.get("reward_model", 0.0)) and self.weights["reward_model"]
            if lost or r.finish_reason == "error" or r.problem and s.reward_errors != "zero":
                r.score = math.nan
            if r.row.get("answer") is not None:
                r.answered = extract_answer(content(r.completion)) is not None
            rest = r.score - sum(own.values())
            if not own or not abs(rest) < 1e-9:                 # more than rounding leaves
                own[len(r.logprobs) - 1] += rest
            r.rewards = dict(own)
        return found

    def _token(self, rollout, character):
        # Returns the number of the sampled token that holds this character of the completion.
        ids, text = rollout.sampled_ids, content(rollout.completion)
        begun = lambda t: self.tokenizer.decode(ids[:t + 1]).startswith(text[:character + 1])
        return bisect.bisect_left(range(len(ids)), True, key=begun)


def part_weights(text):
    """Return {name: weight} for the text "name:weight,name:weight"; the weight of others is 1. Raises ValueError
    for any other text."""
    pairs = [pair.rpartition(":") for pair in text.split(",") if pair]
    with contextlib.suppress(ValueError):
        if all(name and math.isfinite(float(weight)) for name, _, weight in pairs):
            return defaultdict(lambda: 1.0, {name: float(weight) for name, _, weight in pairs})
    raise ValueError(f"reward_weights={text}: write name:weight,name:weight, as in right:1,brief:0.5")
