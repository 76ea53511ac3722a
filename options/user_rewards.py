"""Rewards of yours, --reward=my_rewards.py:brief. Runs with the task's own reward do not open this file.

    UserRewards          the source of a run's scores that calls them, each in a process with a limit of time
    load_reward          finds math_verify, or a function of yours ("file.py:function")
    score_completions    calls a reward on completions, in the process that runs your code
    apply_reward_errors  decides what happens when a reward raises or takes too long

rewards.py says what a reward gets and returns.
"""
import bisect
import copy
import inspect
import math
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

from configurator import InputError
from options.user_code import (Failed, TimeUp, UserProcess, accepted, as_float, load_from, logging_into,
                               name_of, outcome, shown, source_of)
from rewards import Result, content, number_of

# An answer stands in a box, with brackets two levels deep, or behind one of these signs in its line.
SIGNED = re.compile(r"(?i)\\boxed\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}|"
                    r"(?:####|<answer>|answer:)(?![^\n]*\\boxed\{)([^\n<]*)")


class UserRewards:
    """Calls the rewards that `reward_specs` name. It is a source of rewards.Scorer.

    Rewards that read the environments of episodes are in at_end instead, because options/episode_rewards.py
    calls them at the end of each episode. budget: the seconds in which all calls of a batch have to begin.
    """

    def __init__(self, settings, sample, reward_specs):
        self.settings = settings
        self.tokenizer = sample.tokenizer
        # Rows and rewards of yours have their own idea of an answer. The verifier of the shipped tasks is not
        # opened for the votes of a majority.
        self.own_rows = settings.task == "file" and "math_verify" not in reward_specs
        # Whether episodes are scored, and not single answers.
        self.episodes = bool(settings.environment or settings.tools or settings.agent)
        # The last call may take call_timeout as well, which makes ten times call_timeout.
        self.budget = 9 * settings.call_timeout or math.inf
        self.processes = {}                     # {file or module: the UserProcess that calls its functions}
        self.rewards = []                       # pairs (Reward, the UserProcess that calls it, or None)
        self.at_end = []                        # Rewards that read the environment at the end of an episode
        self.tried = False
        for spec in reward_specs:
            reward, process = self._load(spec)
            if reward.environments and self.episodes:
                self.at_end.append(reward)
            else:
                self.rewards.append((reward, process))

    def _load(self, spec):
        # Returns a Reward and the UserProcess that calls it, or None if it is called in this process.
        source = source_of(spec) or spec
        # A function of the user's may do anything, and so may reasoning_gym's verifiers. They get a process
        # of their own. Without a time limit they are called in this process, where a debugger finds them; so
        # is a reward that reads environments, or stands in the file of their class.
        if self.settings.call_timeout and source != source_of(self.settings.environment):
            # The process begins with this call each time that it is started, so that the time in which the
            # file is loaded does not count. Here the call is repeated for its result.
            process = self.processes.setdefault(source, UserProcess(load_reward, spec))
            reward = process.call(0, load_reward, spec)
            if not (reward.environments and self.episodes):
                return reward, process
            process.end()
        return load_reward(spec), None

    def __call__(self, rollouts, columns):
        s = self.settings
        columns = more_columns(columns, rollouts, s)
        end = time.monotonic() + self.budget
        named_results = []
        for reward, process in self.rewards:
            its_columns = columns
            if reward.form != "TRL":
                from options.verl_rewards import verl_columns
                its_columns = verl_columns(columns, s.answer_column, self.episodes and self.tokenizer)
            results = score_completions(reward, its_columns, process, s.call_timeout, end, s.call_workers,
                                        s.reward_errors)
            named_results.append((reward.name, self.with_tokens(results, rollouts)))
        if not self.tried:
            # The first completions are made up. A call that has failed for these may succeed for others.
            self.tried = True
            for reward, _ in self.rewards:
                reward.batch_failed = False
        return named_results

    def with_tokens(self, results, rollouts):
        """Return the results of a reward with steps that name tokens, and not characters."""
        for i, (result, r) in enumerate(zip(results, rollouts)):
            if result.steps and self.episodes:
                raise InputError(f"reward {', '.join(result.parts)} scores characters of a completion, but "
                                 "an episode has several messages")
            steps = [(token_at(character, r, self.tokenizer), value) for character, value in result.steps]
            results[i] = result._replace(steps=steps)
        return results


def more_columns(columns, rollouts, settings):
    """Return the columns of rewards.columns_of with two more that TRL's rewards may take."""
    max_steps = getattr(settings, "max_steps", 0)
    # The version of the weights is the number of steps that they were trained for.
    states = [SimpleNamespace(global_step=max(r.sampled_by), max_steps=max_steps) for r in rollouts]
    # The prompt ends at spans[0, 0], where the first sampled tokens begin.
    ids = [r.ids[r.spans[0, 0]:].tolist() for r in rollouts]
    return columns | {"completion_ids": ids, "trainer_state": states}


def answer_of(completion):
    """Return a completion's answer for the votes of a majority, or "" if it has none.

    It is what stands in the last box or behind the last of the other signs, or all of a short line. Numbers
    have one spelling: 0.5 is 1/2. Capitals do not count.
    """
    text = content(completion).strip()
    answers = ["".join(groups) for groups in SIGNED.findall(text)]
    if not answers and len(text) <= 100 and "\n" not in text:
        answers = [text]
    answer = "".join(answers[-1:]).strip(" *$.`")
    number = number_of(f"Answer: {answer}")
    return answer.lower() if number is None else str(number)


def token_at(character, rollout, tokenizer):
    # Returns the index of the sampled token that holds this character of the completion, or 0 if a token
    # before the first sampled one holds it.
    ids = rollout.ids[rollout.spans[0, 0] - rollout.begun:]
    text = content(rollout.completion)

    def reaches(t):
        # Whether the first t + 1 tokens spell the text as far as this character. The first such t is wanted.
        return tokenizer.decode(ids[:t + 1]).startswith(text[:character + 1])

    return max(0, bisect.bisect_left(range(len(ids)), True, key=reaches) - rollout.begun)


# ------------------------------------------------------------------------------------------------------------
# loading and calling a reward. `columns` is {name: a list with a value for each completion}.


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


def load_reward(spec):
    """Return the Reward that `spec` names.

    spec: "file.py:function", "file.py" for its compute_score, "package.module:function", or "math_verify". A
    function has verl's form if it takes `solution_str`, or for a batch `solution_strs`, and none of prompts,
    completions and completion_ids. Raises InputError if there is no such function, if its file raises, or if
    the package of math_verify is missing.
    """
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


def arguments_of(reward, function, columns, logs):
    # Returns the arguments for a call of the reward's function. logs: {name: function}, by which the function
    # may log. `accepted` leaves out what the function does not take. A function of verl's form gets one of
    # these only if it has a parameter of this name, because its **kwargs are for columns.
    # A reward that changes what it gets must not change the rows of the run, nor what other rewards get.
    copied = dict(columns)
    for key in columns.keys() - {"environments"}:
        copied[key] = copy.deepcopy(columns[key])
    name = f"reward {reward.name}"
    if reward.form == "TRL":
        copied["trainer_state"] = copied["trainer_state"][-1]   # one for all completions, as in TRL
        return accepted(function, copied | logs, name)
    # Only rewards of verl's form need this file.
    from options.verl_rewards import verl_arguments
    return accepted(function, verl_arguments(copied, reward.form == "verl batch"), name, logs)


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
    return read_results(reward.name, returned, completions, logged)


def attempt(call, columns, i):
    """Return the Result that a call has for completion i alone, or its error, Failed or TimeUp."""
    try:
        [result] = call({key: values[i:i + 1] for key, values in columns.items()})
        return result
    except (Failed, TimeUp) as error:
        return error


def read_results(name, returned, completions, logged):
    """Return a Result for each value of the list that the reward of this name returned.

    logged: for each completion, what the reward logged. Raises InputError for what a reward must not return.
    """
    if hasattr(returned, "tolist"):                             # an array or a tensor
        returned = returned.tolist()
    if not isinstance(returned, (list, tuple)) or len(returned) != len(completions):
        raise InputError(f"reward {name} returned {shown(returned)}, not a list of {len(completions)} "
                         "values, one for each completion")
    results = []
    for i, value in enumerate(returned):
        text = content(completions[i])
        try:
            parts, steps = read_value(name, value, text)
        except (TypeError, ValueError) as error:
            raise InputError(
                f"reward {name} returned {shown(value)}: not a finite number in float32, nor None, nor a "
                f"dict of these, nor pairs (character, score) with characters from 0 to {len(text) - 1}; the "
                f"completion is {text[:500]!r}") from error
        results.append(Result(parts, steps, logged[i]))
    return results


def read_value(name, value, text):
    # Returns the parts and steps of the value that the reward of this name returned for this completion.
    steps = []
    if value is None:
        return {}, steps
    parts = {name: value}
    if isinstance(value, dict):
        parts = value
    elif isinstance(value, (list, tuple)):
        for character, step in value:
            if character not in range(len(text)):
                raise InputError(f"the completion has no character {character}")
            steps.append((int(character), as_float(step)))
        parts = {name: sum(step for _, step in steps)}
    numbers = {}
    for key, part in parts.items():
        only_logged = "score" in parts and key != "score"
        # verl's functions may return entries next to the score that are no numbers. These are left out.
        if not only_logged or hasattr(part, "__float__"):
            numbers[str(key)] = math.nan if part is None else as_float(part)
    return numbers, steps


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
    # The results are, for each completion, its Result or the error of its call, Failed or TimeUp.
    results = []
    if count > 1 and (reward.is_async or reward.form != "verl" and not reward.batch_failed):
        try:
            results = call(columns)
        except (Failed, TimeUp) as error:
            reward.batch_failed = True
            print(f"reward {reward.name} {error} for {count} completions: each is now scored by a call of "
                  "its own", file=sys.stderr)
    results = results or [attempt(call, columns, i) for i in range(count)]
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
    unscored = reward_errors != "zero"
    parts = dict.fromkeys(names or [reward.name], math.nan if unscored else 0.0)
    for i, result in enumerate(results):
        if not isinstance(result, Result):
            results[i] = Result(parts, problem=f"the reward {result}", unscored=unscored)
    return results
