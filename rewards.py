"""Rewards: one score for each completion, from a verifier of final answers or from a function of yours.

    load_reward   returns the task's own reward, math_verify, or a function of yours ("file.py:function")
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

import numpy as np
import torch
import torch.distributed as dist

from tasks.check_answer import check_answer, extract_answer, plain, value
from losses import group_std
from runtime import STARTED_IN
from runtime.distributed import gathered
from runtime.user_code import (Failed, TimeUp, UserProcess, accepted, at_once, listed, load_from,
                               logging_into, name_of, outcome, shown, source_file, specs)

# ------------------------------------------------------------------------------------------------------------
# rewards. A reward is a function of prompts=, completions= and the rows' columns. It returns one value for
# each completion: a number; None if the completion is not to be scored; a dict of named parts, where the
# score is the part "score", or the sum of the parts if none has that name; or a list of pairs (character,
# score), where the token that holds the character gets the score (a process reward). As in TRL, a completion
# is a string if its prompt is a string, and if the prompt is a list of messages it is the list of the
# messages that follow.


def content(completion):
    """Returns the text of a completion: the string, or the content of the last message."""
    return completion if isinstance(completion, str) else completion[-1].get("content") or ""


# This finds a number such as 7, -3/4 or 0.5 at the end of a text, behind "Answer:" or in a box.
NUMBER = re.compile(r"(?:answer:|\\boxed\{)[\s*$]*(?:[a-z]\s*=\s*)?"
                    r"([-+]?\d{1,300}(?:\.\d{1,300}|/[1-9]\d{0,300})?)[\s*$}.]*\Z", re.IGNORECASE)


def accuracy(prompts, completions, answer, **columns):
    """Returns 1.0 for each completion that ends with the row's number as its answer, otherwise 0.0."""
    found = [NUMBER.search(content(completion)) for completion in completions]
    return [float(bool(n) and Fraction(n[1]) == Fraction(truth)) for n, truth in zip(found, answer)]


def exact_accuracy(prompts, completions, answer, **columns):
    """Returns 1.0 for each completion whose final answer has the value of the row's `answer`, otherwise 0.0.

    tasks/check_answer.py reads LaTeX, units, intervals and more.
    """
    return [float(check_answer(content(completion), truth)) for completion, truth in zip(completions, answer)]


exact_accuracy.__name__ = "accuracy"            # the name under which it is logged


def math_verify(prompts, completions, answer, **columns):
    """Does what exact_accuracy does, and asks the package math-verify where exact values do not decide."""
    return [float(check_answer(content(completion), truth, algebra=True))
            for completion, truth in zip(completions, answer)]


# Each call gets one completion, so a comparison that hangs costs no other completion its score.
math_verify.at_once = 0


def load_reward(spec, task, workers=0):
    """Returns the reward that `spec` names, "file.py:function" or "math_verify", or the task's own for "".

    A function with verl's parameters (data_source, solution_str, ground_truth) is adapted; any other must be
    in TRL's form. workers: how many calls of an async function, or of one in verl's form, run at once; 0
    means 64 for the former and 1 for the latter. A reward that is called for each completion has an attribute
    `at_once`, the number of calls that run at once, or 0 if each call is made alone. Raises ValueError if
    there is no such function, if its file raises, if workers is more than 1 for a function that is called for
    all completions together, or if the package of math_verify is missing.
    """
    if not spec:
        return {"algebra": accuracy, "arithmetic": accuracy}.get(task, exact_accuracy)
    if spec == "math_verify":
        try:
            importlib.import_module(spec)
        except ImportError as error:
            raise ValueError("reward=math_verify needs the package math-verify: pip install "
                             f"'math-verify[antlr4_13_2]' ({error})") from error
        return math_verify
    function = load_from(spec, "reward", "function", " or math_verify")
    verl = {"data_source", "solution_str", "ground_truth"} <= inspect.signature(function).parameters.keys()
    reward = verl_reward(function) if verl else function
    later = any(map(inspect.iscoroutinefunction, (function, getattr(function, "__call__", None))))
    if workers > 1 and not (later or verl):
        raise ValueError(f"reward_workers={workers}: {name_of(function)} scores all completions in one call; "
                         "only a function that is async or in verl's form is called for each")
    if later or workers > 1:
        reward = functools.update_wrapper(functools.partial(reward), reward)
        reward.at_once = workers or 64
    return reward


def verl_reward(compute_score):
    # Makes a reward of verl's compute_score(data_source, solution_str, ground_truth, extra_info=None). It is
    # called for one completion at a time.
    def reward(prompts, completions, **columns):
        row = {key: values[0] for key, values in columns.items()}
        row = {"data_source": row.get("source"), "extra_info": None, **row,
               "solution_str": content(completions[0])}
        if {"reward_model", "ground_truth", "answer"} & row.keys():
            # Where a model scores verl's row, it has no truth: {"style": "model"}.
            model = row["reward_model"] if isinstance(row.get("reward_model"), dict) else {}
            truths = [model.get("ground_truth"), row.get("ground_truth"), row.get("answer")]
            row["ground_truth"] = next((truth for truth in truths if truth is not None), None)
        returned = compute_score(**accepted(compute_score, row))
        return listed(returned) if inspect.isawaitable(returned) else [returned]
    reward.__name__, reward.at_once = name_of(compute_score), 0
    return reward


def judge(reward, columns, timeout=0.0, seconds=math.inf):
    # Returns (parts, steps, what it logged) for each completion of these columns. Where calls run at once,
    # each has `timeout` seconds and all together have `seconds`, and the error of a call that fails stands in
    # place of its result.
    completions = columns["completions"]
    logged = [{} for _ in completions]

    def call(places):
        arguments = {key: [values[place] for place in places] for key, values in columns.items()}
        logs = logging_into([logged[place] for place in places], reward)
        return functools.partial(reward, **accepted(reward, arguments | logs))

    if getattr(reward, "at_once", 0):
        values = at_once([call([i]) for i in range(len(completions))], reward.at_once, timeout, seconds)
        return [value if isinstance(value, (TimeUp, Failed)) else
                (*checked(reward, value, [completion])[0], log)
                for value, completion, log in zip(values, completions, logged)]
    returned, error, _ = outcome(call(range(len(completions))))
    if error:
        raise error
    return [(*pair, log) for pair, log in zip(checked(reward, returned, completions), logged)]


def judge_there(spec, task, workers=0):
    # Runs in a UserProcess. Returns the function that it calls, and what score wants to know of the reward.
    reward = load_reward(spec, task, workers)
    return functools.partial(judge, reward), {
        "__name__": name_of(reward), "at_once": getattr(reward, "at_once", None),
        "takes_environments": takes_environments(reward)}


def takes_environments(reward):
    # As in TRL, a reward may read the environments of the episodes, which are in the run's own process.
    return "environments" in inspect.signature(reward).parameters


TIMED_OUT = "the reward took too long"


def score(reward, rows, completions, timeout=0.0, budget=math.inf, unscored=False, environments=None):
    """Returns (parts, steps, logged, problem) for each completion.

    parts is {name: value}, with NaN for a part that is None. A reward without named parts has one part, with
    the function's name, or none if it returned None. steps: pairs (character, score). logged: {name: value},
    what the reward logged. problem: why the reward failed, or "".

    completions: one for each row, in the form that a reward gets. environments: what the episodes ended with,
    for a reward that reads them. The reward gets copies of the rows. In a UserProcess a call has `timeout`
    seconds; 0 sets no limit. If a call for all completions takes longer, each completion is scored by a call
    of its own. If that one takes longer as well, the completion gets 0.0, and so do all that are left after
    `budget` seconds. With unscored=True these completions get no parts, nor do those for which the reward
    raises.

    Raises RuntimeError if the reward raises and unscored is False (the message shows the completion), or if
    it returns anything but one finite number, None, dict of these or list of pairs for each
    completion. Raises ValueError if a column is missing.
    """
    shared = [key for key in rows[0] if key != "prompt" and all(key in row for row in rows)]
    end, several = time.monotonic() + budget, getattr(reward, "at_once", None)

    def call(chosen):
        columns = {key: [rows[i][key] for i in chosen] for key in shared}
        columns["prompts"] = [rows[i]["prompt"] for i in chosen]
        columns["completions"] = [completions[i] for i in chosen]
        if not hasattr(reward, "within"):
            more = {"environments": [environments[i] for i in chosen]} if environments else {}
            return judge(reward, copy.deepcopy(columns) | more)
        in_turn = math.ceil(len(chosen) / several) if several else 1
        seconds = min(in_turn * timeout or math.inf, end - time.monotonic())
        if seconds <= 0:
            raise TimeoutError
        # Calls that run at once have limits of their own, so this one only ends a process that hangs.
        limit = seconds + timeout * bool(several)
        found = reward.within(limit if limit < math.inf else None, columns, timeout, seconds)
        if any(isinstance(one, TimeoutError) for one in found):
            reward.end()                                        # because the call may still be running
        return found

    found, problem = [], None
    try:
        found = [] if several == 0 else call(range(len(rows)))
    except TimeoutError:
        pass
    except (Failed, ChildProcessError) as error:
        problem = error
    for i in range(len(found), len(rows)):
        try:
            found += call([i])
        except (TimeoutError, Failed, ChildProcessError) as error:
            found.append(error)
            if not (unscored or isinstance(error, TimeoutError)):
                break
    failures = [(i, one) for i, one in enumerate(found) if isinstance(one, (Failed, ChildProcessError))]
    # The reward may have raised for all completions together and for none of them alone.
    failures += [(0, problem)] if problem else []
    if failures and not unscored:
        i, error = failures[0]
        raise RuntimeError(f"reward {name_of(reward)} {error}; the completion is "
                           f"{content(completions[i])[:500]!r}"
                           + ", in a list of messages" * (not isinstance(completions[i], str))) from error
    names = dict.fromkeys(name for one in found if isinstance(one, tuple) for name in one[0])
    failed = {} if unscored else dict.fromkeys(names or [name_of(reward)], 0.0)
    return [(*one, "") if isinstance(one, tuple) else
            (failed, [], {}, TIMED_OUT) if isinstance(one, TimeoutError) else
            (failed, [], {}, f"the reward {one}") for one in found]


def total(parts, weights):
    """Returns the weighted part "score" or, if there is none, the weighted sum of the parts, without NaN.

    A part that `weights` does not name has the weight 1. The result is NaN if all parts are.
    """
    counted = {"score": parts["score"]} if "score" in parts else parts
    values = [weights.get(name, 1.0) * value for name, value in counted.items() if not math.isnan(value)]
    return sum(values) if values else math.nan


def checked(reward, returned, completions):
    # Returns (parts, steps) for each value that a reward returned, in a list, an array or a tensor.
    returned = returned.tolist() if hasattr(returned, "tolist") else returned
    if not isinstance(returned, (list, tuple)) or len(returned) != len(completions):
        what = f"{len(returned)} values" if isinstance(returned, (list, tuple)) else type(returned).__name__
        raise RuntimeError(f"reward {name_of(reward)} returned {what}, not a list of {len(completions)}, one "
                           "for each completion")
    return [parts_of(name_of(reward), *pair) for pair in zip(returned, completions)]


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
    last token in `rewards`. weights: {name: weight} of reward_weights.

    settings: what configure returned. device, dtype: where and in which precision the reward model computes.
    player: the episodes.Player that plays what is scored; at the end of each episode it calls the rewards
    that take `environments`. tokenizer: the one that decodes completions. Raises ValueError if a reward or
    the reward model cannot be loaded.
    """

    def __init__(self, settings, device, dtype, player, tokenizer=None):
        self.settings, self.environment, self.tokenizer = settings, player.rewards_as, tokenizer
        self.player, self.weights = player, part_weights(settings.reward_weights)
        self.unscored = settings.reward_errors == "unscored"
        self.rewards, self.judging, self.model = [], [], None   # judging: rewards that take environments
        if settings.reward != "none" and (settings.reward or not self.environment):
            for spec in specs(settings.reward):
                if not spec and settings.reward:
                    raise ValueError(f"reward={settings.reward}: nothing stands on one side of a comma")
                self._load(spec)
        names = [name_of(reward) for reward in self.rewards + self.judging]
        if twice := [name for name, count in Counter(names).items() if count > 1]:
            raise ValueError(f"reward={settings.reward}: two of them are called {twice[0]}")
        if self.judging:
            if not player.make:
                raise ValueError(f"reward {name_of(self.judging[0])} takes environments, but none is given")
            player.judge = self._judge
        if settings.reward_model:
            # Only those who use a reward model wait for this import.
            from runtime.reward_model import RewardModel
            self.model = RewardModel(settings.reward_model, device, dtype, settings.token_budget)
        if not (names or self.model or self.environment):
            raise ValueError("reward=none needs a reward_model, or an environment that gives rewards")

    def _load(self, spec):
        # A function of the user's may do anything, so it gets a process of its own. It is called here if it
        # has no time limit, where a debugger finds it, and if it reads environments or stands in their file.
        s, named = self.settings, (spec, self.settings.task, self.settings.reward_workers)
        file, place = spec.rpartition(":")[0], s.environment.rpartition(":")[0]
        if spec and s.reward_timeout and not (place and source_file(file) == source_file(place)):
            process = UserProcess(STARTED_IN, judge_there, *named)
            if not process.takes_environments:
                self.rewards.append(process)
                return
            process.end()
        reward = load_reward(*named)
        (self.judging if takes_environments(reward) else self.rewards).append(reward)

    def _judge(self, rollout, environment):
        # Scores an episode before its environment is reset for the next one.
        rollout.judged = [score(reward, [rollout.row], [rollout.completion], unscored=self.unscored,
                                environments=[environment])[0] for reward in self.judging]

    def check_with(self, prompts):
        """Tries a first turn and two made-up completions, so that what is broken shows before training.

        prompts: one or two data.Prompts. Raises ValueError if the environment, the chat template, a reward or
        the reward model cannot be used.
        """
        self.player.check_with(prompts)

        def made_up(row, text):
            message = [{"role": "assistant", "content": text}]
            return SimpleNamespace(row=row, completion=text if isinstance(row["prompt"], str) else message,
                                   finish_reason="stop", rewards={}, logprobs=[0.0], sampled_ids=[], extra={})

        trial = [*map(made_up, [prompt.row for prompt in prompts * 2], ("Answer: 0", ""))]
        try:
            self._score(trial)
        except RuntimeError as error:
            raise ValueError(error) from error
        problems = [rollout.problem for rollout in trial]
        # A judge may fail now and then, so one failure of two is accepted where failures are.
        if all(problems) if self.unscored else any(problems):
            raise ValueError(f"{max(problems)} for a made-up completion: reward={self.settings.reward}, "
                             f"reward_timeout={self.settings.reward_timeout:g}")
        names = {*trial[0].parts, *trial[1].parts, *map(name_of, self.rewards + self.judging)}
        # The parts of a reward that reads environments are not known yet.
        if (strange := self.weights.keys() - names) and not self.judging:
            raise ValueError(f"reward_weights: no part {', '.join(strange)}; the parts are "
                             f"{', '.join(sorted(names))}")

    def __call__(self, rollouts):
        if self.rewards == [accuracy] and not (self.model or self.weights or self.player.make):
            # The answers are numbers, and no code of the user's runs that might hang or raise.
            scores = accuracy(None, [r.completion for r in rollouts], [r.row["answer"] for r in rollouts])
            for r, right in zip(rollouts, scores):
                r.score, r.parts, r.rewards = right, {"accuracy": right}, {len(r.logprobs) - 1: right}
        elif rollouts:
            self._score(rollouts)

    def _score(self, rollouts):
        # Scores by any rewards, with or without an environment and a reward model.
        s, rows = self.settings, [rollout.row for rollout in rollouts]
        completions = [rollout.completion for rollout in rollouts]
        columns = [score(reward, rows, completions, s.reward_timeout, s.reward_step_timeout or math.inf,
                         self.unscored) for reward in self.rewards]
        if self.model:
            by_model = self.model.score([row["prompt"] for row in rows], completions)
        weight = lambda name: self.weights.get(name, 1.0)
        for i, rollout in enumerate(rollouts):
            results = vars(rollout).pop("judged", []) + [column[i] for column in columns]
            # What the environment gave at each turn, or a reward at each step. If get_reward returned None,
            # a NaN says that the environment gave nothing.
            given = rollout.rewards if self.environment else {}
            own = defaultdict(float, {token: weight(self.environment) * one for token, one in given.items()
                                      if not math.isnan(sum(given.values()))})
            parts, rollout.problem = {}, ""
            for named, steps, logged, problem in results:
                if steps and self.player.make:
                    raise RuntimeError(f"reward {min(named)} scores characters of a completion, but an "
                                       "episode has several messages")
                if len(results) > 1 and (clash := {*parts, "score"} & named.keys()):
                    raise RuntimeError(f"reward={s.reward}: a part of one of them may not be called "
                                       f"{min(clash)}: this names the whole score or another's part")
                parts, rollout.problem = parts | named, rollout.problem or problem
                rollout.extra |= logged
                for token, one in self._at_tokens(rollout, steps):
                    own[token] += weight(min(named)) * one
            value = total(parts, self.weights)
            if self.environment:
                parts |= {self.environment: sum(given.values())}
                if own:
                    value = sum(own.values()) + (0 if math.isnan(value) else value)
            if self.model:
                parts, factor = parts | {"reward_model": by_model[i]}, weight("reward_model")
                value = (factor and factor * by_model[i]) + (0 if math.isnan(value) else value)
            unscored = rollout.finish_reason == "error" or self.unscored and rollout.problem
            rollout.score, rollout.parts = math.nan if unscored else value, parts
            rest, last = rollout.score - sum(own.values()), len(rollout.logprobs) - 1
            if not own or not abs(rest) < 1e-9:                 # more than rounding leaves
                own[last] += rest
            rollout.rewards = dict(own)

    def _at_tokens(self, rollout, steps):
        # Yields (sampled token, its reward) for pairs (character of the completion, reward).
        ids, text = rollout.sampled_ids, content(rollout.completion)
        for character, reward in steps:
            begins = lambda t: self.tokenizer.decode(ids[:t + 1]).startswith(
                text[:character + 1])
            yield bisect.bisect_left(range(len(ids)), True, key=begins), reward


def part_weights(text):
    """Returns {name: weight} for the text "name:weight,name:weight". Raises ValueError for any other text."""
    pairs = [pair.rpartition(":") for pair in text.split(",") if pair]
    try:
        weights = {name: float(number) for name, _, number in pairs}
    except ValueError:
        weights = {"": 0.0}
    if "" in weights or not all(abs(weight) <= 1e9 for weight in weights.values()):
        raise ValueError(f"reward_weights={text}: write name:weight,name:weight, as in right:1,brief:0.5")
    return weights


def part_means(rollouts, prefix, of="parts"):
    """Returns {prefix/name/mean: mean} of the numbers of each name, without NaN; the mean of none is 0.

    of: "parts" for the parts of the score, or "extra" for what was logged.
    """
    values = defaultdict(list)
    for name, value in (pair for rollout in rollouts for pair in getattr(rollout, of).items()):
        if not isinstance(value, str):
            values[name] += [] if math.isnan(value) else [value]
    return {f"{prefix}/{name}/mean": math.fsum(some) / max(len(some), 1) for name, some in values.items()}


def evaluation(rollouts, k, name="eval"):
    """Returns mean@k, pass@k and maj@k of scored rollouts, where each prompt has k adjacent ones.

    mean@k  the mean score
    pass@k  the mean over prompts of the best of k scores; for scores of 0 and 1 this is how often any of the
            k answers is right
    maj@k   the mean over prompts of the score of the commonest answer, or of the first one in a tie. 1/2 and
            0.5 are the same answer, a completion without an answer has no vote, and where there are no votes
            the first completion counts
    The figures over all prompts are called {name}/..., those over the prompts of a source
    {name}/{source}/.... Completions without a score are ignored. The mean of each part is
    {name}/rewards/{part}/mean. mean_length is the number of sampled tokens, clipped_ratio the share of
    completions that were cut off, and right_ended the share of those with a score above 0 that ended by
    themselves.
    """
    values, lengths = defaultdict(list), [len(rollout.logprobs) for rollout in rollouts]
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
    return means | {f"{name}/mean_length": sum(lengths) / len(lengths),
                    f"{name}/clipped_ratio": sum(cut_off) / len(cut_off),
                    f"{name}/right_ended": sum(ended) / max(len(ended), 1),
                    **part_means(rollouts, f"{name}/rewards")}


def evaluate(prompts, k, sample, scorer, log, name="eval", **sampling):
    """Sample k completions per prompt, with the same seeds every time, score them, and log what evaluation returns.

    sample: a rollout.Sampler; sampling: keywords for it. Return the rollouts of this rank, which samples for its
    share of the prompts. A collective.
    """
    own = range(dist.get_rank(), len(prompts), dist.get_world_size())
    with log.timed("eval"):
        rollouts = sample([prompts[i] for i in own], k, [f"{name} {i}" for i in own], **sampling)
        scorer(rollouts)
        log.evaluation(evaluation(gathered(rollouts), k, name))
    return rollouts


def rollout_metrics(rollouts, n, engines):
    """Return the figures of sampled and scored rollouts for a log; means ignore NaN.

    n: the number of adjacent rollouts per prompt. engines: how many engines sampled them. The time that
    environments took is given per engine.
    """
    lengths = [len(r.logprobs) for r in rollouts]
    scores = np.array([r.score for r in rollouts])
    stds = group_std(torch.from_numpy(scores), n)                                       # [N / n]
    figures = {"reward": 0.0 if np.isnan(scores).all() else float(np.nanmean(scores)),
               "reward_std": stds.mean().item(), "frac_reward_zero_std": (stds == 0).double().mean().item(),
               "rewards/unscored": int(np.isnan(scores).sum()), **part_means(rollouts, "rewards"),
               **part_means(rollouts, "logged", "extra"),
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
    """Returns a step's lines of samples.jsonl: the first of n rollouts of each of the first eight prompts."""
    return [{"prompt": r.row["prompt"],
             "completion": r.completion if r.counts else content(r.completion), "reward": r.score,
             "finish_reason": r.finish_reason, "truth": r.row.get("answer"),
             "tokens": [tokenizer.batch_decode(r.ids[start:end, None]) for start, end in r.spans],
             "logprobs": (r.logprobs.astype(float).round(3) + 0.0).tolist(),
             **({"extra": r.extra} if r.extra else {})} for r in rollouts[:8 * n:n]]


def conversation(completion):
    """Returns a completion as one text, in which brackets surround what the policy did not say."""
    if isinstance(completion, str):
        return completion
    texts = []
    for message in completion:
        calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls", [])]
        text = " ".join(str(part) for part in [message["content"], *calls] if part)
        texts.append(text if message["role"] == "assistant" else f"[{text}]")
    return " ".join(texts)
