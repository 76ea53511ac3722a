"""
Episodes: the policy speaks and an environment answers, turn after turn. One episode is one row of tokens.

An environment is a class of yours, --environment=my_game.py:Guess, made anew for each episode, in one of two
forms. Its methods may be `async def`.

    text    reset(**row)     the columns of the row -> text to add to the last message of the prompt, or None
            step(text)       what the policy said -> (observation, reward, whether the episode is over)
    tools   reset(**row)     the same; this is TRL's form, and such a class runs in TRL as well
            other methods    tools: type hints and docstring tell the policy how to call them
            get_reward()     at the end, if there is such a method

Each episode continues as soon as it can: its next turn joins those that the engine is working on. Without an
environment an answer is an episode of one turn; train_async.py plays these here as well.
"""
import functools
import inspect
import itertools
import json
import math
import re
import zlib
from copy import deepcopy

import numpy as np
import torch
import torch.distributed as dist
from transformers.utils import get_json_schema

from runtime.chat_template import Template, tool_call
from runtime.user_code import Failed, Threads, TimeUp, accepted, escaped, load_from, outcome, shown
from rollout import Answer, Request, Rollout

# A call of a tool in the form of Qwen's and many other models. One without its closing tag is found as well.
CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


class Player:
    """Plays episodes, with the environment that a run's settings name or without one.

    tools: JSON schemas of the environment's tools, or None. rewards_as: the environment's name if it gives
    rewards, otherwise "". Raises ValueError for an environment that cannot be used.
    """

    def __init__(self, settings, tokenizer, eos_ids):
        s, self.tokenizer, self.eos_ids = settings, tokenizer, eos_ids
        self.settings, self.tools, self.rewards_as = settings, None, ""
        self.make = load_from(s.environment, "environment", "Class") if s.environment else None
        if not self.make:
            return
        if not s.chat or tokenizer.chat_template is None:
            raise ValueError(f"environment={s.environment} answers by the chat template, but "
                             + ("the tokenizer has none" if s.chat else "chat is False"))
        self.name = s.environment.rpartition(":")[2]
        environment, error, _ = outcome(self.make, s.environment_timeout)
        if error:
            raise ValueError(f"environment={s.environment}: {self.name}() {self._told(error)}")
        # Those of the class, as in TRL: an attribute that can be called is no tool, and to read a property
        # may fail before the first reset.
        methods = {name: getattr(environment, name)
                   for name, _ in inspect.getmembers(type(environment), inspect.isfunction)
                   if not name.startswith("_")}
        if "reset" not in methods:
            raise ValueError(f"environment={s.environment} has no method reset; it has "
                             f"{', '.join(methods) or 'none'}")
        self.has_step = "step" in methods
        if not self.has_step:
            tools = [method for name, method in methods.items() if name not in ("reset", "get_reward")]
            if not tools:
                raise ValueError(f"environment={s.environment} has neither a method step nor tools")
            self.tools = [self._schema(tool) for tool in tools]
        self.rewards_as = self.name if self.has_step or "get_reward" in methods else ""
        self.template = Template(tokenizer, eos_ids, self.tools)

    def _schema(self, tool):
        try:
            return get_json_schema(tool)
        except Exception as error:
            raise ValueError(f"environment={self.settings.environment}: the tool {tool.__name__} needs type "
                             f"hints and a docstring that explains its arguments: {error}") from error

    def check_with(self, prompts):
        """Plays a first turn after each of these prompts, so that what is broken shows before any training.

        Raises ValueError if the environment or the chat template cannot be used.
        """
        if not self.make:
            return
        self.template.check(self._messages(prompts[0].row["prompt"]))
        if self.tools:
            before, said = self.template.example()
            if [call["function"]["name"] for call, _ in self._calls(before, said)] != self.template.names[:1]:
                raise ValueError(
                    "the tokenizer has no response_template that reads the calls of its chat template, and "
                    f"they are not <tool_call>JSON</tool_call>: {self.tokenizer.decode(said)!r:.300}")
        ids = self.tokenizer("Answer: 0", add_special_tokens=False).input_ids + self.eos_ids[:1]
        for prompt in prompts:
            counts = {"calls": 0, "failures": 0}
            sampling, value, error, turn = (self.settings.max_completion_length,), None, None, 0
            episode = self.episode(prompt, 0, sampling, counts)
            try:
                while turn < 2:
                    wish = episode.throw(error) if error else episode.send(value)
                    if isinstance(wish, Request):
                        value, error, turn = Answer(0, ids, [0.0] * len(ids), "stop"), None, turn + 1
                    else:
                        value, error, _ = outcome(wish, self.settings.environment_timeout)
            except RuntimeError as error:
                raise ValueError(error) from error
            except StopIteration:
                if "problem" in counts:
                    raise ValueError(counts["problem"]) from None

    # ------------------------------------------------------------ all episodes

    def play(self, engine, prompts, n, seeds, max_tokens, temperature, top_p=1.0, top_k=0):
        """Returns n adjacent Rollouts per data.Prompt; seeds has one per prompt, for seed, seed + 1, ...

        max_tokens: an episode with more tokens after its prompt is cut off.

        finish_reason is stop or length, and with an environment also turns (there were max_turns), timeout,
        or error (the environment raised, and the episode gets no score). Raises RuntimeError if a reset
        fails, if an environment returns what it must not, or if all episodes, on all ranks, end by errors.
        """
        def play(jobs):
            table, ended = Table(self, engine), {}
            table.add("all", jobs)
            while not ended:
                ended = table.step()
            return ended["all"]

        jobs = [(prompt, seed + j, (max_tokens, temperature, top_p, top_k))
                for prompt, seed in zip(prompts, seeds) for j in range(n)]
        rollouts = engine.serve(jobs, play)
        self.check_errors(rollouts)
        return rollouts

    def check_errors(self, rollouts):
        """Raises RuntimeError if all episodes, on all ranks, ended by errors. A collective."""
        problems = [r.counts["problem"] for r in rollouts if r.finish_reason == "error"]
        counts = torch.tensor([len(problems), len(rollouts)])
        if dist.is_initialized():
            dist.all_reduce(counts)
        failed, played = counts.tolist()
        # A rank that has played none leaves this to the others.
        if problems and failed == played:
            raise RuntimeError(f"all {played} episodes ended by errors; the first: {problems[0]}")

    # ------------------------------------------------------------ one episode

    def episode(self, prompt, seed, sampling, counts):
        """A generator of one episode, which returns its Rollout.

        It yields Requests, and gets their Answers, and functions that call the environment, and gets what
        they return; TimeUp and Failed are raised where it yields. counts: a dict, in which it counts.
        """
        s, row, ids, environment, ended = self.settings, prompt.row, list(prompt.ids), None, ""
        if self.make:
            try:
                environment = yield self.make
                columns = accepted(environment.reset, deepcopy(row), f"environment {self.name}: reset")
                row, ids = self._opening(prompt, (yield functools.partial(environment.reset, **columns)))
            except (Failed, TimeUp) as error:
                raise self._broken(f"reset {self._told(error)}", row) from error
        messages, spans, logprobs, versions, rewards = [], [], [], {}, {}
        max_tokens, *sampling = sampling
        limit = len(ids) + max_tokens
        while not ended:
            turn = len(spans) + 1
            turn_seed = seed if turn == 1 else zlib.crc32(f"{seed} {turn}".encode())
            answer = yield Request(None, ids, turn_seed, limit - len(ids), *sampling)
            spans.append((len(ids), len(ids) + len(answer.ids)))
            versions |= {len(logprobs) + start: version for start, version in answer.versions}
            before, ids, logprobs = ids, ids + answer.ids, logprobs + answer.logprobs
            text = self.tokenizer.decode(answer.ids, skip_special_tokens=True)
            said = {"role": "assistant", "content": text}
            messages.append(said)
            last = len(logprobs) - 1
            rewards[last] = 0.0
            if environment is None:
                ended = answer.finish_reason
                continue
            cut, done, reply = answer.finish_reason == "length", True, []
            try:
                if self.has_step:
                    returned = yield functools.partial(environment.step, text)
                    observation, rewards[last], done = self._checked(returned, turn, row)
                    reply = [{"role": "user", "content": observation}]
                elif not cut and (calls := self._calls(before, answer.ids)):
                    reply, done = (yield from self._results(environment, calls, counts)), False
                    said |= {"content": CALL.sub("", text).strip(), "tool_calls": [call for call, _ in calls]}
                ended = "length" if cut else "stop" if done else "turns" if turn == s.max_turns else ""
                inserted = [] if ended else self.template.between(said, reply)
                # If the reply and one token of an answer do not fit, the episode ends.
                if not ended and len(ids) + len(inserted) >= limit:
                    ended = "length"
                if not ended:
                    ids, messages = ids + inserted, messages + reply
                elif self.rewards_as and not self.has_step:
                    rewards[last] = self._number((yield environment.get_reward), turn, row)
            except (Failed, TimeUp) as error:
                ended = "timeout" if isinstance(error, TimeUp) else "error"
                counts["problem"] = str(self._broken(f"it {self._told(error)} in turn {turn}", row))
        rewards = {last: math.nan} if ended == "error" else rewards
        return Rollout(np.array(ids, np.int32), np.array(spans, np.int32), np.array(logprobs, np.float32),
                       ended, row, text if isinstance(row["prompt"], str) else messages, counts=counts,
                       rewards=rewards if self.rewards_as else {}, versions=tuple(versions.items()))

    def _messages(self, prompt, observation=""):
        # The messages before the first turn. An observation is added to the last one, as in TRL.
        if isinstance(prompt, str) or prompt[-1]["role"] == "assistant":
            raise ValueError(f"environment={self.settings.environment} needs prompts that are lists of "
                             f"messages, the last one not the assistant's, unlike {prompt!r:.200}")
        system = [{"role": "system", "content": text} for text in [self.settings.system_prompt] if text]
        return [*system, *prompt[:-1], prompt[-1] | {"content": prompt[-1]["content"] + observation}]

    def _opening(self, prompt, observation):
        # The row and the ids of the prompt, with what reset returned.
        if observation is None:
            return prompt.row, list(prompt.ids)
        if not isinstance(observation, str):
            raise self._broken(f"reset returned {shown(observation)}, neither a string nor None", prompt.row)
        ids = self.template.opening(self._messages(prompt.row["prompt"], self.template.defused(observation)))
        if len(ids) > self.settings.max_prompt_length:
            raise self._broken(f"with what reset returned the prompt has {len(ids)} tokens, more than "
                               f"max_prompt_length={self.settings.max_prompt_length}", prompt.row)
        *earlier, last = prompt.row["prompt"]
        return prompt.row | {"prompt": [*earlier, last | {"content": last["content"] + observation}]}, ids

    def _checked(self, returned, turn, row):
        # (observation, reward, done), as step has to return them.
        if (isinstance(returned, tuple) and len(returned) == 3 and isinstance(returned[2], (bool, np.bool_))
                and (returned[2] or isinstance(returned[0], str))):
            return returned[0], self._number(returned[1], turn, row), bool(returned[2])
        raise self._broken(f"step returned {shown(returned)} in turn {turn}, not (observation, "
                           "reward, done): a string, a number, and True or False", row)

    def _number(self, reward, turn, row):
        try:
            if abs(reward) <= 3.4e38:                           # float32's largest
                return float(reward)
        except (TypeError, ValueError, OverflowError):
            pass
        raise self._broken(f"the reward {shown(reward)} in turn {turn} is not a finite number", row)

    def _broken(self, problem, row):
        return RuntimeError(f"environment {self.name}: {problem}; the row is {row!r:.300}")

    def _told(self, error):
        return (f"took more than environment_timeout={self.settings.environment_timeout:g} seconds"
                if isinstance(error, TimeUp) else f"raised {escaped(shown(error.__cause__))}")

    # ------------------------------------------------------------ tools

    def _calls(self, before, sampled):
        # The calls in what was sampled, as transformers writes them, each with what is wrong with it, or "".
        try:
            if getattr(self.tokenizer, "response_template", None):
                parsed = self.tokenizer.parse_response(sampled, prefix=before, tools=self.tools)
                found = [call["function"] for call in parsed.get("tool_calls") or []]
            else:
                text = self.tokenizer.decode([one for one in sampled if one not in self.eos_ids])
                found = CALL.findall(text.rpartition("</think>")[2])    # thoughts call nothing
        # A parser may raise anything for text that is not as it expects.
        except Exception as error:
            return [(tool_call(0, "unknown", {}), f"this is no call of a tool: {error!r}")]
        calls = []
        for number, one in enumerate(found):
            name, arguments, problem = "unknown", {}, ""
            try:
                one = json.loads(one) if isinstance(one, str) else one
                name, arguments = one["name"], one.get("arguments") or {}
                arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
                if name not in self.template.names:
                    problem = f"there is no tool {name}; there are {', '.join(self.template.names)}"
                elif not isinstance(arguments, dict):
                    problem = "the arguments have to be an object"
            except Exception as error:
                problem = f"this is no call of a tool: {error!r}"
            calls.append((tool_call(number, str(name), arguments), problem))
        return calls

    def _results(self, environment, calls, counts):
        # Part of an episode: makes these calls and returns a message with the result of each.
        reply = []
        for call, problem in calls:
            counts["calls"] += 1
            name, arguments = call["function"].values()
            try:
                if not problem:
                    method = getattr(environment, name)
                    inspect.signature(method).bind(**arguments)
                    result = yield functools.partial(method, **arguments)
            except TypeError as error:
                problem = f"wrong arguments: {error}"
            except Failed as error:
                problem = shown(error.__cause__)
            if problem:
                result = {"error": problem}
            try:
                result = str(result)
            # It may be of any kind.
            except Exception as error:
                result = problem = shown(error)
            counts["failures"] += bool(problem)
            reply.append({"role": "tool", "name": name, "tool_call_id": call["id"], "content": result})
        return reply


class Table:
    """Where an engine plays episodes: add more at any time, and each step returns what is complete.

    player, engine: who plays, and on what.
    """

    def __init__(self, player, engine):
        self.player, self.engine, self.settings = player, engine, player.settings
        self.threads = Threads(self.settings.environment_workers, self.settings.environment_timeout)
        self.numbers = itertools.count()
        # {key: its Rollouts, None for those that have not ended}; {number: (episode, counts, key, place)}
        self.groups, self.playing = {}, {}
        self.asked = 0                          # Requests that wait for an Answer

    def add(self, key, jobs):
        """Begins an episode for each of the jobs: prompt, seed, and (max_tokens, temperature, top_p, top_k).

        key: under which step returns their Rollouts, when all have ended.
        """
        self.groups[key] = [None] * len(jobs)
        for place, (prompt, seed, sampling) in enumerate(jobs):
            counts, number = {}, next(self.numbers)
            if self.player.make:
                counts |= {"calls": 0, "failures": 0, "seconds": 0.0}
            self.playing[number] = self.player.episode(prompt, seed, sampling, counts), counts, key, place
            self._go_on(number)

    def _go_on(self, number, value=None, error=None):
        # Runs an episode until it ends, or waits for the engine or for a thread.
        episode, counts, key, place = self.playing[number]
        while True:
            try:
                wish = episode.throw(error) if error else episode.send(value)
            except StopIteration as end:
                self.groups[key][place] = end.value
                del self.playing[number]
                return
            if isinstance(wish, Request):
                self.engine.add(wish._replace(name=number))
                self.asked += 1
                return
            if self.settings.environment_workers:
                self.threads.start(number, wish)
                return
            value, error, seconds = outcome(wish, self.settings.environment_timeout)
            counts["seconds"] += seconds

    def step(self):
        """Takes a step of the engine, if an episode waits for it; returns {key: Rollouts} of what ended."""
        for answer in self.engine.step() if self.asked else ():
            self.asked -= 1
            self._go_on(answer.name, answer)
        for number, value, error, seconds in self.threads.finished(wait=self.playing and not self.asked):
            self.playing[number][1]["seconds"] += seconds
            self._go_on(number, value, error)
        complete = [key for key, group in self.groups.items() if None not in group]
        return {key: self.groups.pop(key) for key in complete}


# ------------------------------------------------------------------------------------------------------------
# calls of an environment


