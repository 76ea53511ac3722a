"""Rewards: one score for each completion.

    accuracy, exact_accuracy, math_verify   the rewards of the shipped tasks
    load_scorer                             makes the Scorer that a run's settings ask for
    Scorer                                  scores rollouts; its docstring says how parts add up

options/user_rewards.py calls rewards of yours (--reward), options/episode_rewards.py scores episodes, and
options/reward_model.py judges by a model. Runs without these settings do not open these files.
"""
import inspect
import math
import re
from collections import defaultdict
from fractions import Fraction
from functools import partial
from typing import NamedTuple

from configurator import InputError, specs

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


def content(completion):
    """Return the text of a completion: the string, or the content of the last message."""
    return completion if isinstance(completion, str) else completion[-1].get("content") or ""


def number_of(completion):
    """Return the number with which a completion ends as its answer, as a Fraction, or None."""
    match = NUMBER.search(content(completion))
    return match and Fraction(match[1])


def accuracy(prompts, completions, answer, **columns):
    """Return 1.0 for each completion that ends with the row's number as its answer, otherwise 0.0."""
    return [float(number_of(completion) == Fraction(str(truth)))
            for completion, truth in zip(completions, answer)]


def check_answer(text, truth, algebra=False):
    """Return whether the final answer in a text is the truth, as in tasks/check_answer.py."""
    from tasks import check_answer as verifier
    return verifier.check_answer(text, truth, algebra)


def exact_accuracy(prompts, completions, answer, **columns):
    """Return 1.0 for each completion whose final answer has the value of the row's `answer`, otherwise 0.0.

    tasks/check_answer.py reads LaTeX, units, intervals and more.
    """
    return [float(check_answer(content(completion), truth)) for completion, truth in zip(completions, answer)]


def math_verify(prompts, completions, answer, **columns):
    """Do what exact_accuracy does, and ask the package math-verify where exact values do not decide."""
    return [float(check_answer(content(completion), truth, algebra=True))
            for completion, truth in zip(completions, answer)]


# Tasks whose own reward is not exact_accuracy. A text names one that is loaded and called like one of yours.
TASK_REWARDS = {"algebra": accuracy, "arithmetic": accuracy, "reasoning_gym": "tasks.reasoning_gym:gym_score"}


# ------------------------------------------------------------------------------------------------------------
# what a reward gets and returns. `columns` is {name: a list with a value for each completion}.


class Result(NamedTuple):
    """What a reward gave a completion."""
    parts: dict                 # {name: value}; NaN stands for a part that is None
    steps: list = ()            # pairs (index of a sampled token, value), whose sum is the only part
    logged: dict = {}           # {name: value}, what the reward logged
    problem: str = ""           # why the reward failed, or ""
    unscored: bool = False      # whether the completion has no score, unless the weight of the parts is 0


def columns_of(rollouts):
    """Return the columns that a reward may take. Of the data set's columns these are the ones that all rows
    have."""
    rows = [r.row for r in rollouts]
    columns = {}
    for key in rows[0]:
        if key != "prompt" and all(key in row for row in rows):
            columns[key] = [row[key] for row in rows]
    return columns | {"prompts": [row["prompt"] for row in rows],
                      "completions": [r.completion for r in rollouts]}


# ------------------------------------------------------------------------------------------------------------
# the scores of rollouts


def load_scorer(settings, sample, device, dtype):
    """Return the Scorer of a run.

    settings: what configure returned. sample: the sampler of what is scored. device, dtype: where and in
    which precision a reward model computes. Raises InputError if a reward or that model cannot be loaded.
    """
    kind = Scorer
    if settings.environment or settings.tools or settings.agent:
        from options.episode_rewards import EpisodeScorer as kind
    scorer = kind(settings, sample, device, dtype)
    if not scorer.sources:
        raise InputError("reward=none needs a reward_model, or an environment that gives rewards")
    return scorer


def counted(parts):
    # Returns those of a reward's parts that make up the score.
    return {"score": parts["score"]} if "score" in parts else parts


class Scorer:
    """Scores rollouts by what a run's settings name: rewards and a reward model.

    scorer(rollouts) sets the score of each rollout, which is the weighted sum of its parts:

        score = sum of weights[name] * parts[name]

    Its `sources` give parts: functions of (rollouts, columns) that return pairs (name, a Result per rollout).
        a reward         a part with its name, or the parts of the dict that it returned, of which only
                         "score" counts if there is one; a part that is None adds nothing
        a reward model   the part reward_model

    The weights are those of reward_weights, or 1. If the settings name no reward, it is the task's own. A
    rollout has no score (NaN) if no source gave anything, if the reward model could not score it, or if a
    reward failed. With reward_errors=zero a reward that failed gives its parts the value 0 instead. A reward
    or a model whose weight is 0 may fail.

    A rollout also gets `rewards`, {index of a sampled token: the part of the score that this token earned}.
    The scores of steps belong to tokens of their own, and the remainder goes to the last token. It also gets
    problem (why a reward failed), extra (what rewards logged) and answer: its final answer, as a text that is
    the same for answers that agree, or "" if it has none.
    """

    def __init__(self, settings, sample, device, dtype, needs_reward=True):
        self.settings = settings
        self.sample = sample
        self.weights = part_weights(settings.reward_weights)    # {name of a part: weight}
        self.task_reward = TASK_REWARDS.get(settings.task.partition(":")[0], exact_accuracy)
        self.user_rewards = None                # a user_rewards.UserRewards, if there are rewards of yours
        self.sources = []
        reward_specs = specs(settings.reward)
        by_task = needs_reward and not reward_specs
        if by_task and isinstance(self.task_reward, str):
            reward_specs = [self.task_reward]
        elif by_task:
            self.sources.append(partial(score_by_task, self.task_reward))
        # Whether the score compares numbers
        self.by_number = by_task and self.task_reward is accuracy
        if reward_specs not in ([], ["none"]):
            from options.user_rewards import UserRewards
            self.user_rewards = UserRewards(settings, sample, reward_specs)
            self.sources.append(self.user_rewards)
        if settings.reward_model:
            from options.reward_model import RewardModel
            self.sources.append(RewardModel(settings.reward_model, device, dtype, settings.token_budget))

    def check_rewards(self, prompts):
        """Score made-up completions, so that what is broken shows before training. Return a text for the
        console, which is empty for single answers.

        prompts: one or two data.Prompts. Raises InputError if a reward or the reward model cannot be used.
        """
        self._check(self.sample.trial(prompts))
        return ""

    def _check(self, trial):
        named_results = self._score(trial)
        if all(r.problem for r in trial):
            raise InputError(f"{trial[0].problem} for a made-up completion: reward={self.settings.reward}, "
                             f"call_timeout={self.settings.call_timeout:g}")
        names = set()
        for name, results in named_results:
            counted_names = set().union(*[counted(result.parts) for result in results])
            # A reward that gave neither completion a score has shown no parts. It may have one of its name.
            names |= counted_names or {name}
        self._check_weights(names)

    def _check_weights(self, names):
        strange = self.weights.keys() - names
        if strange:
            raise InputError(f"reward_weights: no part {', '.join(strange)} counts; those that do are "
                             f"{', '.join(sorted(names))}")

    def __call__(self, rollouts):
        if rollouts:                                            # columns need at least one
            self._score(rollouts)

    def _score(self, rollouts):
        # Scores rollouts. Returns what the sources gave.
        columns = columns_of(rollouts)
        named_results = []
        for source in self.sources:
            named_results += source(rollouts, columns)
        for i, r in enumerate(rollouts):
            token_rewards = defaultdict(float)                  # as in r.rewards
            summands = []
            for name, results in named_results:
                self._add(r, results[i], summands, token_rewards)
            r.rewards = dict(token_rewards)
            # An episode that failed has no score. The last token gets what no other token has earned.
            r.score = math.nan if not summands or r.finish_reason == "error" else sum(summands)
            r.answer = self._answer_of(r)
        return named_results

    def _add(self, r, result, summands, token_rewards):
        # Adds what a source gave to a rollout's parts, and to the summands of its score and of its tokens'.
        twice = r.parts.keys() & result.parts
        if twice:
            raise InputError(f"reward={self.settings.reward}: two parts of the score are called "
                             f"{', '.join(twice)}")
        r.parts = r.parts | result.parts
        r.extra = r.extra | result.logged
        weight = 0.0
        for name, value in counted(result.parts).items():
            weight = self.weights[name]
            if not math.isnan(value):
                summands.append(weight * value)
            if weight:
                r.problem = r.problem or result.problem
                if result.unscored:
                    summands.append(math.nan)
        for token, value in result.steps:
            token_rewards[token] += weight * value              # the weight of the only part

    def _answer_of(self, r):
        # The answer is what the task's own reward compares, unless others give the score.
        if self.by_number:
            number = number_of(r.completion)
            return "" if number is None else str(number)
        if self.user_rewards and self.user_rewards.own_rows:
            from options.user_rewards import answer_of
            return answer_of(r.completion)
        from tasks.check_answer import final_answer
        return final_answer(content(r.completion))


def score_by_task(reward, rollouts, columns):
    """Return the source of a task's own reward, a function of this file, which is called in this process."""
    if "answer" in inspect.signature(reward).parameters and "answer" not in columns:
        raise InputError(f"reward {reward.__name__} needs a column answer; the columns are "
                         f"{', '.join(columns)}: --answer_column=... names the one that holds it")
    values = reward(**columns)
    # Logs of all tasks have one name for it.
    return [("accuracy", [Result({"accuracy": value}) for value in values])]


def part_weights(text):
    """Return {name: weight} for the text "name:weight,name:weight"; the weight of all other names is 1.

    Raises InputError for any other text.
    """
    weights = defaultdict(lambda: 1.0)
    try:
        for pair in specs(text):
            name, weight = pair.rsplit(":", 1)
            weights[name] = float(weight)
            if not (name and abs(weights[name]) <= 3.4e38):     # float32's largest; NaN is refused as well
                raise InputError("no name, or no finite number in float32")
    except ValueError as error:
        raise InputError(
            f"reward_weights={text}: write name:weight,name:weight, as in right:1,brief:0.5") from error
    return weights
