"""Rewards: one score for each completion, from a verifier of final answers or from a function of yours.

    load_reward          finds the task's own reward, math_verify, or a function of yours ("file.py:function")
    score_completions    calls a reward on completions, in the process that runs your code
    apply_reward_errors  decides what happens when a reward raises or takes too long
    Scorer               scores rollouts by what a run's settings name; its docstring says how parts add up
"""
import bisect
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
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

from configurator import STARTED_IN, InputError, source_of, specs
from tasks.check_answer import check_answer, content, extract_answer
from options.user_code import (Failed, TimeUp, UserProcess, accepted, as_float, load_from, logging_into,
                               name_of, outcome, shown)

# ------------------------------------------------------------------------------------------------------------
# rewards. A reward is a function of prompts=, completions= and the columns of the rows, all of them lists. As
# in TRL, a completion is a string if its prompt is a string; if the prompt is a list of messages, the
# completion is the list of the messages that follow. The reward returns a list with a value per completion:
#     a number    its score
#     None        if the completion is not to be scored
#     a dict      of named parts: the score is the part "score", or the sum if no part has that name
#     a list      of pairs (character, score), for a process reward: the token that holds this character of
#                 the completion gets the score, and the score of the completion is their sum


# This finds a number such as 7, -3/4 or 0.5 at the end of a text, behind "Answer:" or in a box. Spaces, the *
# of bold text and the $ of LaTeX may stand around it, a letter and = before it, and a brace or a full stop
# after it. More than 300 digits are not read, because Fraction would refuse 4,301 of them.
NUMBER = re.compile(r"(?:answer:|\\boxed\{)[\s*$]*(?:[a-z]\s*=\s*)?"
                    r"([-+]?\d{1,300}(?:\.\d{1,300}|/[1-9]\d{0,300})?)[\s*$}.]*\Z", re.IGNORECASE)


def number_of(completion):
    """Return the number with which a completion ends as its answer, as a Fraction, or None."""
    match = NUMBER.search(content(completion))
    return match and Fraction(match[1])


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


# Tasks whose own reward is not exact_accuracy.
TASK_REWARDS = {"algebra": accuracy, "arithmetic": accuracy}
# Tasks whose own reward is loaded like one of yours, because only the runs that use it should import it.
TASK_REWARD_SPECS = {"reasoning_gym": "tasks.reasoning_gym:gym_score"}


@dataclass
class Reward:
    """A reward function, and how it is called."""
    name: str                   # the name under which it is logged
    function: object = None     # the function; None if the process that calls it has to load it from spec
    spec: str = ""              # file.py:function
    form: str = "TRL"           # the arguments that it takes: TRL, verl (for one completion), or verl batch
    is_async: bool = False      # each completion has a call of its own, and many calls run at the same time
    environments: bool = False  # it reads the environments of the episodes, as in TRL
    batch_failed: bool = False  # a call for several completions has failed, so each now has a call of its own


class Result(NamedTuple):
    """What a reward gave a completion."""
    parts: dict                 # {name: value}; NaN stands for a part that is None
    steps: list = ()            # pairs (character, value) of a process reward, whose only part is their sum
    logged: dict = {}           # {name: value}, what the reward logged
    problem: str = ""           # why the reward failed, or ""


def load_reward(spec, task):
    """Return the Reward that `spec` names, or the task's own for "".

    spec: "file.py:function", "file.py" for its compute_score, "package.module:function", or "math_verify". A
    function has verl's form if it takes `solution_str`, or for a batch `solution_strs`, and none of prompts,
    completions and completion_ids. Raises InputError if there is no such function, if its file raises, or if
    the package of math_verify is missing.
    """
    if not spec:
        return Reward("accuracy", TASK_REWARDS.get(task.partition(":")[0], exact_accuracy))
    if spec == "math_verify":
        # It raises if the package is not installed. Its other arguments are words for its messages.
        load_from("math_verify:parse", "reward", "function")
        spec = "rewards:math_verify"
    if spec.endswith(".py"):
        spec += ":compute_score"
    function = load_from(spec, "reward", "function", " or math_verify")
    parameters = inspect.signature(function).parameters.keys()
    form = "TRL"
    if not parameters & {"prompts", "completions", "completion_ids"}:
        if "solution_str" in parameters:
            form = "verl"
        elif "solution_strs" in parameters:
            form = "verl batch"
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(function.__call__)
    # A Reward goes from one process to another, and a function of a file cannot. So call_reward loads it
    # again, where it calls it.
    return Reward(name_of(function), None, spec, form, is_async, "environments" in parameters)


# ------------------------------------------------------------------------------------------------------------
# calling a reward. `columns` is {name: a list with a value for each completion}.


def columns_of(rollouts, settings):
    """Return the columns that a reward may take, as in TRL. Of the data set's columns these are the ones that
    all rows have."""
    rows = [r.row for r in rollouts]
    columns = {}
    for key in rows[0]:
        if key != "prompt" and all(key in row for row in rows):
            columns[key] = [row[key] for row in rows]
    max_steps = getattr(settings, "max_steps", 0)
    # The version of the weights is the number of steps that they were trained for.
    states = [SimpleNamespace(global_step=max(r.sampled_by), max_steps=max_steps) for r in rollouts]
    # The prompt ends at spans[0, 0], where the first sampled tokens begin.
    return columns | {
        "prompts": [row["prompt"] for row in rows],
        "completions": [r.completion for r in rollouts],
        "completion_ids": [r.ids[r.spans[0, 0]:].tolist() for r in rollouts], "trainer_state": states}


def verl_arguments(columns, i):
    # Returns the arguments that verl's form has for completion i.
    row = {key: values[i] for key, values in columns.items()}
    arguments = {"data_source": row.get("data_source") or row.get("source"),
                 "solution_str": content(row["completions"]), "extra_info": row.get("extra_info") or {}}
    truths = [row.get("ground_truth"), row.get("answer")]
    if isinstance(row.get("reward_model"), dict):               # verl's rows have the truth in it
        truths.insert(0, row["reward_model"].get("ground_truth"))
    for truth in truths:
        if truth is not None:
            return arguments | {"ground_truth": truth}
    return arguments


def arguments_of(reward, function, columns, logs):
    # Returns the arguments for a call of the reward's function. logs: {name: function}, by which the function
    # may log. `accepted` leaves out what the function does not take. A function of verl's form gets one of
    # these only if it has a parameter of this name, because its **kwargs are for columns.
    # A reward that changes what it gets must not change the rows of the run, nor what other rewards get.
    copied = {key: copy.deepcopy(values) for key, values in columns.items() if key != "environments"}
    if "environments" in columns:
        copied["environments"] = columns["environments"]
    name = f"reward {reward.name}"
    if reward.form == "TRL":
        copied["trainer_state"] = copied["trainer_state"][-1]   # one for all completions, as in TRL
        return accepted(function, copied | logs, name)
    rows = [verl_arguments(copied, i) for i in range(len(columns["completions"]))]
    if reward.form == "verl":
        return accepted(function, rows[0], name, logs)
    batch = {f"{key}s": [row.get(key) for row in rows] for key in rows[0]}
    return accepted(function, batch, name, logs)


def call_reward(reward, columns, timeout, end, workers):
    """Call a reward once and return a Result for each completion in the columns.

    An async reward is called once for each completion instead, in threads. The list then has Failed or TimeUp
    in place of the Result of a call that fails.

    timeout   the seconds after which an async function is cancelled; 0 sets no limit
    end       the time of time.monotonic from which on no call may begin
    workers   how many calls of an async reward run at the same time; 0 stands for 64

    Raises Failed if the function raises, TimeUp if it takes too long or if `end` has come, and InputError if
    a column is missing or if the function returns what it must not.
    """
    completions = columns["completions"]
    if reward.is_async and len(completions) > 1:
        # Each thread calls this function again, for a single completion.
        call = partial(call_reward, reward, timeout=timeout, end=end, workers=workers)
        with ThreadPoolExecutor(workers or 64) as pool:
            return [*pool.map(partial(attempt, call, columns), range(len(completions)))]
    if time.monotonic() >= end:
        raise TimeUp
    function = reward.function or load_from(reward.spec, "reward", "function")
    logged = [{} for _ in completions]
    arguments = arguments_of(reward, function, columns, logging_into(logged))
    returned, error, _ = outcome(partial(function, **arguments), timeout)       # the third is its time
    if error:
        raise error
    if reward.form == "verl":
        returned = [returned]
    if hasattr(returned, "tolist"):                             # an array or a tensor
        returned = returned.tolist()
    if not isinstance(returned, (list, tuple)) or len(returned) != len(completions):
        raise InputError(f"reward {reward.name} returned {shown(returned)}, not a list of {len(completions)} "
                         "values, one for each completion")
    return [result_of(reward.name, value, content(completion), log)
            for value, completion, log in zip(returned, completions, logged)]


def attempt(call, columns, i):
    """Return the Result that a call has for completion i alone, or its error, Failed or TimeUp."""
    try:
        [result] = call({key: values[i:i + 1] for key, values in columns.items()})
        return result
    except (Failed, TimeUp) as error:
        return error


def result_of(name, returned, text, logged):
    # Returns the Result of the value that the reward of this name returned for the completion `text`.
    steps = []
    try:
        parts = returned
        if isinstance(returned, (list, tuple)):
            for character, value in returned:
                if character not in range(len(text)):
                    raise InputError(f"the completion has no character {character}")
                steps.append((int(character), as_float(value)))
            parts = {name: sum(value for _, value in steps)}
        elif returned is None:
            parts = {}
        elif not isinstance(returned, dict):
            parts = {name: returned}
        numbers = {}
        for key, value in parts.items():
            only_logged = "score" in parts and key != "score"
            # verl's functions may return entries next to the score that are no numbers. These are left out.
            if not only_logged or hasattr(value, "__float__"):
                numbers[str(key)] = math.nan if value is None else as_float(value)
        return Result(numbers, steps, logged)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"reward {name} returned {shown(returned)}: not a finite number in float32, nor None, nor a dict "
            f"of these, nor pairs (character, score) with characters from 0 to {len(text) - 1}; the "
            f"completion is {text[:500]!r}") from error


def counted(parts):
    # Returns those of a reward's parts that make up the score.
    return {"score": parts["score"]} if "score" in parts else parts


# ------------------------------------------------------------------------------------------------------------
# a reward's results for several completions, and what happens if it fails


def score_completions(reward, columns, process=None, timeout=0.0, end=math.inf, workers=0,
                      reward_errors="stop"):
    """Return the Result of each completion.

    process: the UserProcess in which a call has `timeout` seconds; 0 sets no limit. If a call for several
    completions fails, these and all later ones are scored by calls of their own. No call begins after the
    time `end` of time.monotonic. workers: as in call_reward. Raises InputError where call_reward and
    apply_reward_errors do.
    """
    call = partial(call_reward, reward, timeout=timeout, end=end, workers=workers)
    if process:
        # The calls of an async reward have limits of their own, so all of them together have none.
        limit = 0 if reward.is_async else timeout
        call = partial(process.call, limit, call)
    count = len(columns["completions"])
    one_by_one = reward.form == "verl" or reward.batch_failed
    together = count > 1 and (reward.is_async or not one_by_one)
    # The results are, for each completion, its Result or the error of its call, Failed or TimeUp.
    if together:
        try:
            results = call(columns)
        except (Failed, TimeUp) as error:
            together = False
            reward.batch_failed = True
            print(f"reward {reward.name} {error} for {count} completions: each is now scored by a call of "
                  "its own", file=sys.stderr)
    if not together:
        results = [attempt(call, columns, i) for i in range(count)]
    if process and any(isinstance(result, TimeUp) for result in results):
        process.end()       # calls of an async reward may go on in it; the next call starts a new process
    return apply_reward_errors(reward, columns["completions"], results, reward_errors)


def apply_reward_errors(reward, completions, results, reward_errors):
    """Return the results with a Result in place of each error, as the setting reward_errors decides.

    stop        a reward that raised stops the run by an InputError, which shows the completion; a call that
                ran out of time only leaves its completion unscored
    unscored    a completion whose call failed gets the parts that others have, each NaN, and no score
    zero        it gets these parts with the value 0
    """
    names = {}                                  # a dict as a set that keeps its order
    for result, completion in zip(results, completions):
        if isinstance(result, Result):
            names |= result.parts
        elif isinstance(result, Failed) and reward_errors == "stop":
            raise InputError(f"reward {reward.name} {result}; the completion is "
                             f"{content(completion)[:500]!r}") from result
    value = 0.0 if reward_errors == "zero" else math.nan
    parts = dict.fromkeys(names or [reward.name], value)
    scored = []
    for result in results:
        if not isinstance(result, Result):
            result = Result(parts, problem=f"the reward {result}")
        scored.append(result)
    return scored


# ------------------------------------------------------------------------------------------------------------
# the scores of rollouts


def token_at(character, rollout, tokenizer):
    # Returns the index of the sampled token that holds this character of the completion, or 0 if a token
    # before the first sampled one holds it.
    ids = rollout.ids[rollout.spans[0, 0] - rollout.begun:]
    text = content(rollout.completion)

    def reaches(t):
        # Whether the first t + 1 tokens spell the text as far as this character. The first such t is wanted.
        return tokenizer.decode(ids[:t + 1]).startswith(text[:character + 1])

    return max(0, bisect.bisect_left(range(len(ids)), True, key=reaches) - rollout.begun)


class Scorer:
    """Scores rollouts by what a run's settings name: rewards, an environment and a reward model.

    scorer(rollouts) sets the score of each rollout, which is the weighted sum of its parts:

        score = sum of weights[name] * parts[name]

    Three sources give parts:
        a reward         a part with its name, or the parts of the dict that it returned, of which only
                         "score" counts if there is one; a part that is None adds nothing
        an environment   a part with the name of its class: the sum of what it gave to an episode's turns
        a reward model   the part reward_model

    The weights are those of reward_weights, or 1. If the settings name neither a reward nor an environment
    that gives rewards, the reward is the task's own. A rollout has no score (NaN) if no source gave anything,
    if its episode failed, if the reward model could not score it, or if a reward failed. With
    reward_errors=zero a reward that failed gives its parts the value 0 instead. A reward or a model whose
    weight is 0 may fail.

    A rollout also gets `rewards`, {index of a sampled token: the part of the score that this token earned}.
    The scores of steps and turns belong to tokens of their own, and the remainder goes to the last token.
    It also gets problem (why a reward failed), extra (what rewards logged) and answered (whether its text has
    a final answer).

    settings: what configure returned. device, dtype: where and in which precision the reward model computes.
    player: the episodes.Player that plays what is scored. Raises InputError if a reward or the reward model
    cannot be loaded.
    """

    def __init__(self, settings, device, dtype, player):
        s = settings
        self.settings = settings
        self.player = player
        self.environment = player.reward_part   # the environment's class if it gives rewards, otherwise ""
        self.weights = part_weights(s.reward_weights)           # {name of a part: weight}
        # The seconds in which all calls of a batch have to begin. The last one may take call_timeout as well,
        # which makes ten times call_timeout. evaluate_model.py sets no limit.
        self.budget = 9 * s.call_timeout or math.inf
        self.processes = {}                     # {file or module: the UserProcess that calls its functions}
        self.rewards = []                       # pairs (Reward, the UserProcess that calls it, or None)
        self.episode_rewards = []               # Rewards that read the environment at the end of an episode
        self.model = None                       # a RewardModel
        reward_specs = specs(s.reward)
        if reward_specs == ["none"]:
            reward_specs = []
        elif not reward_specs and not (self.environment or s.agent):
            # "" stands for a task's own reward in this file: see load_reward.
            reward_specs = [TASK_REWARD_SPECS.get(s.task.partition(":")[0], "")]
        for spec in reward_specs:
            reward, process = self._load(spec)
            if reward.environments and player.make:             # make: None unless episodes are played
                self.episode_rewards.append(reward)
            else:
                self.rewards.append((reward, process))
        if s.agent:
            self.episode_rewards.append(Reward(player.name, agent_scores, environments=True))
        if self.episode_rewards:
            # The Player calls it at the end of each episode, before the environment is reset for another one.
            player.score_ended = self._score_ended
        if s.reward_model:
            # Only the runs that use a reward model import this.
            from options.reward_model import RewardModel
            self.model = RewardModel(s.reward_model, device, dtype, s.token_budget)
        only_reward = [(Reward("accuracy", accuracy), None)]    # the own reward of algebra and arithmetic
        # Such a run only compares numbers, and runs no code of the user's that might hang or raise.
        self.only_accuracy = self.rewards == only_reward and not (self.model or self.weights or player.make)
        if not (self.rewards or self.episode_rewards or self.model or self.environment):
            raise InputError("reward=none needs a reward_model, or an environment that gives rewards")

    def _load(self, spec):
        # Returns a Reward and the UserProcess that calls it, or None if it is called in this process.
        s = self.settings
        source = source_of(spec) or spec
        # A function of the user's may do anything, and so may reasoning_gym's verifiers. They get a process
        # of their own. Without a time limit they are called in this process, where a debugger finds them; so
        # is a reward that reads environments, or stands in the file of their class.
        if spec and s.call_timeout and source != source_of(s.environment):
            # The process begins with this call each time that it is started, so that the time in which the
            # file is loaded does not count. Here the call is repeated for its result.
            load = load_reward, spec, s.task
            process = self.processes.setdefault(source, UserProcess(STARTED_IN, *load))
            reward = process.call(0, *load)
            if not (reward.environments and self.player.make):
                return reward, process
            process.end()
        return load_reward(spec, s.task), None

    def check_rewards(self, prompts):
        """Score what Player.trial_episodes plays, so that what is broken shows before training. Return the
        first prompt as an episode shows it to the model, for the console, or "" if it is as in the data.

        prompts: one or two data.Prompts. Raises InputError if the environment, the chat template, a reward or
        the reward model cannot be used.
        """
        s = self.settings
        trial = self.player.trial(prompts)
        sources = self._score(trial)
        if all(r.problem for r in trial):
            raise InputError(f"{trial[0].problem} for a made-up completion: reward={s.reward}, "
                             f"call_timeout={s.call_timeout:g}")
        names = {self.environment} - {""}
        for name, results in sources:
            counted_names = set()
            for result in results:
                counted_names.update(counted(result.parts))
            # A reward that gave neither completion a score has shown no parts. It may have one of its name.
            names |= counted_names or {name}
        # A call that has failed for made-up completions may succeed for others.
        for reward, _ in self.rewards:
            reward.batch_failed = False
        # An agent that fails in the trial is not scored, so its parts are not known yet.
        strange = self.weights.keys() - names
        if strange and not self.episode_rewards:
            raise InputError(f"reward_weights: no part {', '.join(strange)} counts; those that do are "
                             f"{', '.join(sorted(names))}")
        ids = trial[0].prompt_ids.tolist()
        if ids == prompts[0].ids:
            return ""
        text = self.player.tokenizer.decode(ids)[-1000:]
        return "\n    ".join(["In an episode the model reads it as", *text.split("\n")])

    def __call__(self, rollouts):
        if rollouts and not self.only_accuracy:                 # _score needs at least one rollout
            self._score(rollouts)
            return
        for r in rollouts:
            answer = number_of(r.completion)
            r.answered = answer is not None
            r.score = float(answer == Fraction(r.row["answer"]))
            r.parts = {"accuracy": r.score}

    def _score(self, rollouts):
        # Scores by any rewards, environment and reward model. Returns (name, a Result per rollout) of each
        # reward and of the reward model.
        s = self.settings
        columns = columns_of(rollouts, s)
        end = time.monotonic() + self.budget
        sources = []
        for reward, process in self.rewards:
            its_columns = columns
            # verl's form gets an episode as verl decodes it: all that follows the prompt, as one text.
            if reward.form != "TRL" and self.player.make:
                texts = self.player.tokenizer.batch_decode(
                    columns["completion_ids"], skip_special_tokens=True)
                its_columns = columns | {"completions": texts}
            if reward.form != "TRL" and s.answer_column in columns:
                # What the run names as its answer comes before the columns that verl's form looks into.
                truths = columns[s.answer_column]
                its_columns = its_columns | {"ground_truth": truths, "reward_model": truths}
            results = score_completions(reward, its_columns, process, s.call_timeout, end, s.call_workers,
                                        s.reward_errors)
            sources.append((reward.name, results))
        if self.model:
            model_scores = self.model.score(columns["prompts"], columns["completions"])
            sources.append(("reward_model", [Result({"reward_model": value}) for value in model_scores]))
        for i, r in enumerate(rollouts):
            token_rewards = defaultdict(float)                  # as in r.rewards
            summands = []
            for result in r.results:
                summands += self._add(r, result)
            r.results = []
            for name, results in sources:
                summands += self._add(r, results[i])
                for character, value in results[i].steps:
                    token = token_at(character, r, self.player.tokenizer)
                    token_rewards[token] += self.weights[name] * value
            if self.environment:
                # The episode has set r.rewards to what its environment gave. NaN says that it is not scored.
                total = sum(r.rewards.values())
                summands += self._add(r, Result({self.environment: total}))
                if not math.isnan(total):
                    # Nothing is overwritten, because _add refuses the steps of an episode.
                    for token, value in r.rewards.items():
                        token_rewards[token] = self.weights[self.environment] * value
            no_model_score = math.isnan(r.parts.get("reward_model", 0.0)) and self.weights["reward_model"]
            reward_failed = r.problem and s.reward_errors != "zero"
            score = sum(summands)
            if not summands or no_model_score or reward_failed or r.finish_reason == "error":
                score = math.nan
            if r.row.get("answer") is not None:
                r.answered = extract_answer(content(r.completion)) is not None
            r.rewards = dict(token_rewards)
            r.score = score                                     # the last token gets the remainder
        return sources

    def _score_ended(self, rollout, environment):
        # Scores an episode before its environment is reset for the next one.
        columns = columns_of([rollout], self.settings) | {"environments": [environment]}
        for reward in self.episode_rewards:
            rollout.results += score_completions(reward, columns, reward_errors=self.settings.reward_errors)

    def _add(self, r, result):
        # Adds what a source gave to a rollout's parts, and returns what this adds to its score, as a list.
        parts, steps, logged, problem = result
        if steps and self.player.make:
            raise InputError(f"reward {', '.join(parts)} scores characters of a completion, but an episode "
                             "has several messages")
        twice = r.parts.keys() & parts
        if twice:
            raise InputError(f"reward={self.settings.reward}: two parts of the score are called "
                             f"{', '.join(twice)}")
        r.parts = r.parts | parts
        r.extra = r.extra | logged
        summands = []
        for name, value in counted(parts).items():
            if not math.isnan(value):
                summands.append(self.weights[name] * value)
            if self.weights[name]:
                r.problem = r.problem or problem
        return summands


def agent_scores(environments):
    """Return the score that each agent returned for its episode: the reward of a run with an agent.

    environments: the agents.AgentSessions, which stand where a reward finds environments otherwise.
    """
    return [session.score for session in environments]


def part_weights(text):
    """Return {name: weight} for the text "name:weight,name:weight"; the weight of all other names is 1.

    Raises InputError for any other text.
    """
    weights = defaultdict(lambda: 1.0)
    try:
        for pair in specs(text):
            name, weight = pair.rsplit(":", 1)
            if not name:
                raise InputError("a weight without a name")
            weights[name] = as_float(float(weight))             # as_float refuses NaN and infinity
    except ValueError as error:
        raise InputError(
            f"reward_weights={text}: write name:weight,name:weight, as in right:1,brief:0.5") from error
    return weights
