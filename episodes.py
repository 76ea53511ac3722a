"""
Episodes: the policy speaks and an environment answers, turn after turn. One episode is one row of tokens.

An environment is a class of yours, --environment=my_game.py:Guess, in one of two forms. An instance plays one
episode at a time and is reset for the next one. Its methods may be `async def`.

    text    reset(**row)     gets the columns of the row; returns text for the prompt's last message, or None
            step(text)       gets what the policy said; returns (observation, reward, whether it is over)
            both             may also return what Gymnasium's do
    tools   reset(**row)     does the same; this is TRL's form, and such a class runs in TRL as well
            other methods    are tools: type hints and docstring tell the policy how to call them
    both    get_reward()     if it exists, is called at the end of an episode; None gives no score
            close()          if it exists, or else release(), is called at the end of the run

Functions become tools as well, with or without a class: --tools=my_tools.py:search.

Each episode continues as soon as it can: its next turn joins those that the engine is working on. Without an
environment an answer is an episode of one turn, which train_async.py plays here as well. The tokens of an
episode are a Conversation, which knows no environment.
"""
import contextlib
import inspect
import itertools
import json
import os
import math
import zlib
from collections import deque
from concurrent.futures import FIRST_COMPLETED, wait
from copy import deepcopy
from functools import cached_property, partial, reduce
from threading import Semaphore
from types import SimpleNamespace

import numpy as np
from transformers.utils import get_json_schema

from runtime.chat_template import Template, tool_call
from runtime.user_code import (STARTED_IN, Failed, TimeUp, accepted, as_float, close, closer, closing,
                               in_thread, in_time, load_from, logging_into, name_of, outcome, shown, specs)
from rollout import Answer, Request, Rollout, text_of

# How Qwen and many other models write thoughts and calls: a response template for tokenizers that have none.
# It is read from the beginning of the prefix. What is not closed reaches to the end.
COMMON = {"start_anchor_pattern": r"\A", "fields": {
    "reasoning_content": {"open": "<think>", "close": "</think>", "repeats": True, "join": "\n"},
    "tool_calls": {"open": "<tool_call>", "close": "</tool_call>", "repeats": True,
                   "transform": {"function": "{content}"}},
    "content": {"repeats": True, "join": "\n"}}}


# ------------------------------------------------------------------------------------------------------------
# a conversation as tokens


class Conversation:
    """A row of tokens in the making: a prompt, turns as they were sampled, and what stands between them.

    first: the Request for the first turn; its max_tokens counts all that follows the prompt. ids: the row so
    far. left: how many tokens may still follow. template: a chat_template.Template, which only `extend`
    needs. spans, logprobs and versions are as in rollout.Rollout, versions as a dict.
    """

    def __init__(self, first, template=None):
        self.first, self.ids, self.left, self.template = first, list(first.ids), first.max_tokens, template
        self.spans, self.logprobs, self.versions = [], [], {}

    def request(self):
        """Return the Request for the next turn, which has a seed of its own and may take all that is left."""
        turn, seed = len(self.spans) + 1, self.first.seed
        seed = seed if turn == 1 else zlib.crc32(f"{seed} {turn}".encode())
        return self.first._replace(ids=self.ids, seed=seed, max_tokens=self.left)

    def answer(self, answer):
        """Append the turn that an engine sampled. Nothing changes in place: copies of a row share it."""
        self.spans = [*self.spans, (len(self.ids), len(self.ids) + len(answer.ids))]
        self.versions = self.versions | {len(self.logprobs) + t: version for t, version in answer.versions}
        self.ids, self.left = self.ids + answer.ids, self.left - len(answer.ids)
        self.logprobs = self.logprobs + answer.logprobs

    def extend(self, turn, messages):
        """Append what the chat template writes of these messages after a turn, to where the next one begins.

        turn: as in Template.between. Return whether there was room for that and for one token more; if not,
        nothing is appended.
        """
        inserted = self.template.between(turn, messages)
        if fits := len(inserted) < self.left:
            self.ids, self.left = self.ids + inserted, self.left - len(inserted)
        return fits

    def rollout(self, finish_reason, row, completion, **fields):
        """Return the Rollout of what was said so far."""
        return Rollout(np.array(self.ids, np.int32), np.array(self.spans, np.int32),
                       np.array(self.logprobs, np.float32), finish_reason, row, completion,
                       versions=tuple(self.versions.items()), **fields)


def read_turn(tokenizer, tools, before, sampled, text):
    """Return a turn as a message, and its calls: each as transformers writes it, with its problem, or "".

    tools: their JSON schemas, or None. before: the ids before the turn. sampled, text: ids and text of the
    turn.
    """
    said, found = {"role": "assistant", "content": text}, []
    try:
        if getattr(tokenizer, "response_template", None):
            parsed = tokenizer.parse_response(sampled, prefix=before, tools=tools)
        elif tools:
            begun = tokenizer.decode(before[-8:]).rstrip().endswith("<think>")
            parsed = tokenizer.parse_response(text, COMMON, prefix="<think>" if begun else "")
        else:
            return said, []
        found = [call["function"] for call in parsed.pop("tool_calls", None) or []]
        said |= parsed | {"content": parsed.get("content") or ""}
    # A parser may raise anything for text that is not as it expects.
    except Exception as error:
        return said, [(tool_call(0, "unknown", {}), f"this is no call of a tool: {error!r}")]
    names = [tool["function"]["name"] for tool in tools or ()]
    return said, [read_call(names, number, one) for number, one in enumerate(found)]


def read_call(tools, number, found):
    # Returns a call as transformers writes it, and its problem, or "". tools: names. number: its place in the
    # turn.
    name, arguments, problem = "unknown", {}, ""
    try:
        found = json.loads(found) if isinstance(found, str) else found
        name, given = str(found["name"]), found.get("arguments") or {}
        given = json.loads(given) if isinstance(given, str) else given
        # What is nested so deeply that others could not copy or send it is refused.
        deepcopy(reduce(lambda inside, _: [inside], range(200), given))
        arguments, problem = (given, "") if isinstance(given, dict) else ({}, "the arguments are no object")
        if name not in tools:
            problem = f"there is no tool {name}; there are {', '.join(tools)}"
    except Exception as error:
        problem = f"this is no call of a tool: {error!r}"
    return tool_call(number, name, arguments), problem


def result_of(value):
    # Returns what a tool returned as the content of a message: a list or an object in values that JSON has,
    # for rewards, and anything else as text.
    if isinstance(value, (list, dict)):
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            return deepcopy(json.loads(json.dumps(value, default=str)))
    return str(value)


def read_step(returned):
    """Return (observation, reward, how the episode ends or "") for what an environment's step returned.

    Raises ValueError for what it must not return.
    """
    if isinstance(returned, tuple) and len(returned) in (3, 5):
        # Gymnasium's five values say whether the episode was truncated.
        observation, reward, done, truncated, *_ = (*returned, False)
        if all(isinstance(one, (bool, np.bool_)) for one in (done, truncated)) and (
                done or truncated or isinstance(observation, str)):
            return observation, as_float(reward), "stop" if done else "turns" if truncated else ""
    raise ValueError(f"step returned {shown(returned)}, not (observation, reward, done), a string, a number, "
                     "and True or False, nor Gymnasium's five values")


# ------------------------------------------------------------------------------------------------------------
# one episode


class Episode:
    """An episode of a Player, or without an environment a single answer.

    row: the row of the data set. first: the Request for the first turn.
    """

    def __init__(self, player, row, first):
        self.player, self.settings, self.row = player, player.settings, row
        self.talk = Conversation(first, player.template)
        # spent: whether the instance of the environment can play no other episode
        self.instance, self.spent, self.ended = None, False, ""
        self.messages, self.rewards, self.extra = [], {}, {}    # rewards: as in Rollout
        self.counts = {"calls": 0, "failures": 0, "seconds": 0.0} if player.make else {}

    def play(self):
        """A generator that plays the episode and returns its Rollout.

        It yields Requests, for which it is sent their Answers, and with call_workers also functions that call
        the environment, for which it is sent what user_code.outcome returns.
        """
        try:
            for part in (self._begin, self._turns, self._last_reward):
                try:
                    yield from part()
                except (Failed, TimeUp, ValueError) as error:
                    turn, late = len(self.talk.spans), isinstance(error, TimeUp)
                    when = f"in turn {turn}" if turn else "before its first turn"
                    told = f"{self.player.key}, {when}: {error}; the row is {self.row!r:.300}"
                    if isinstance(error, ValueError):           # the environment did what it must not
                        raise ValueError(told) from error
                    self.ended = "timeout" if late and turn else "error"
                    self.spent = self.spent or late or not turn
                    self.counts["problem"] = told
            if self.ended == "error":
                self.rewards = {self.last: math.nan}
            rollout = self.talk.rollout(
                self.ended, self.row, self.text if isinstance(self.row["prompt"], str) else self.messages,
                counts=self.counts, extra=self.extra, rewards=self.rewards if self.player.rewards_as else {})
            if self.player.judge and self._at_rest():
                self.player.judge(rollout, self.instance)
            return rollout
        finally:
            if self.instance is not None:
                self._leave()

    def _leave(self):
        # Leaves the instance to other episodes, or closes it if it can play no more of them.
        if self.spent:
            close([self.player.opened.pop(id(self.instance))], 0)
        else:
            self.player.idle.append(self.instance)

    def _at_rest(self):
        # Whether the environment can be asked. After a call that took too long, it may still be at work in a
        # thread, which nothing can end.
        return self.ended != "error" and not (self.spent and self.settings.call_workers)

    def _call(self, function, /, *args, **kwargs):
        # Returns what a function of the environment returns. Raises Failed or TimeUp.
        call = partial(function, *args, **kwargs)
        value, error, seconds = ((yield call) if self.settings.call_workers
                                 else outcome(call, self.settings.call_timeout))
        self.counts["seconds"] += seconds
        if error:
            raise error
        return value

    def _begin(self):
        # Resets an instance, and adds what reset returns to the prompt.
        if "reset" not in self.player.methods:
            return
        player, (*earlier, last) = self.player, self.row["prompt"]
        instance = self.instance = player.idle.pop() if player.idle else (yield from self._call(player.make))
        player.opened[id(instance)] = instance
        log = logging_into([self.extra])["log_metric"]          # of one episode, so both take one value
        columns = accepted(instance.reset, deepcopy(self.row), "reset", {"log_extra": log, "log_metric": log})
        observation = yield from self._call(instance.reset, **columns)
        if isinstance(observation, tuple) and len(observation) == 2:        # Gymnasium's (observation, info)
            observation, _ = observation
        if observation is None:
            return
        if not isinstance(observation, str):
            raise ValueError(f"reset returned {shown(observation)}, neither a string nor None")
        template = player.template
        ids = template.opening(player.messages(self.row["prompt"], template.defused(observation)))
        if (most := self.settings.max_prompt_length) < len(ids):
            raise Failed(f"reset returned so much that the prompt has {len(ids)} tokens, more than "
                         f"max_prompt_length={most}")
        self.talk.ids = ids
        self.row = self.row | {"prompt": [*earlier, last | {"content": last["content"] + observation}]}

    def _turns(self):
        # The turns of the policy, and what the environment replies. An episode that cannot begin is one
        # answer to its prompt, without a score.
        talk, player = self.talk, self.player
        while not (self.ended and talk.spans):
            before = talk.ids
            answer = yield talk.request()
            talk.answer(answer)
            self.last = len(talk.logprobs) - 1                  # the turn's reward belongs to its last token
            self.rewards[self.last] = 0.0
            self.text = text_of(player.tokenizer, answer.ids, answer.finish_reason)
            said, calls = {"role": "assistant", "content": self.text}, []
            cut = answer.finish_reason == "length"              # a call in it is not made
            if player.make and not cut:
                said, calls = read_turn(player.tokenizer, player.tools, before, answer.ids, self.text)
            self.messages.append(said)
            if not self.ended:
                yield from self._reply(said, calls, cut)

    def _reply(self, said, calls, cut):
        # What the environment replies to a turn. cut: whether the turn was cut off.
        turn, reply, ended = len(self.talk.spans), [], "stop"
        if "step" in self.player.methods:
            returned = yield from self._call(self.instance.step, self.text)
            observation, self.rewards[self.last], ended = read_step(returned)
            reply = [{"role": "user", "content": observation}]
        elif calls:
            said["tool_calls"], ended = [call for call, _ in calls], ""
            for call, problem in calls:
                reply.append((yield from self._result(call, problem)))
        if not (ended or cut) and turn == self.settings.max_turns:
            ended = "turns"
        if cut or not (ended or self.talk.extend(said, reply)):
            ended = "length"
        self.messages += [] if ended else reply
        self.ended = ended

    def _result(self, call, problem):
        # Makes a call of a tool if there is no problem with it, and returns its message.
        name, arguments = call["function"].values()
        self.counts["calls"] += 1
        try:
            if not problem:
                tool = self.player.called[name]
                method = getattr(self.instance, tool) if isinstance(tool, str) else tool
                result = yield from self._call(method, **arguments)
                content = yield from self._call(result_of, result)
        except Failed as error:
            # Without the name of its class, as in TRL.
            problem = shown(error.__cause__).partition(": ")[2] or shown(error.__cause__)
        self.counts["failures"] += bool(problem)
        return {"role": "tool", "name": name, "tool_call_id": call["id"],
                "content": {"error": problem} if problem else content}

    def _last_reward(self):
        # Adds what the environment gives for the whole episode.
        if "get_reward" in self.player.methods and self._at_rest():
            reward = yield from self._call(self.instance.get_reward)
            if reward is not None:
                self.rewards[self.last] += as_float(reward)
            elif "step" not in self.player.methods:
                self.rewards[self.last] = math.nan              # not scored, as in TRL


# ------------------------------------------------------------------------------------------------------------
# all episodes


class Player:
    """Plays episodes with what a run's settings name: a class, functions, an agent, or nothing.

    make: the class or the agent's function, or None. name: that of the class or the agent. key: the setting
    that names it. methods: the public methods of an instance. tools: JSON schemas of the tools, or None.
    called: {tool: a function, or the name of a method}. rewards_as: the name of the class if it gives
    rewards, otherwise "". opened: {id: instance}; idle: the instances that play no episode now. judge: None,
    or a function judge(rollout, environment) of a rewards.Scorer, which scores an episode while its
    environment is still as the episode left it. Raises ValueError for what cannot be used.
    """

    def __init__(self, settings, tokenizer, eos_ids):
        s, self.settings, self.tokenizer, self.eos_ids = settings, settings, tokenizer, eos_ids
        self.make = load_from(s.agent, "agent", "function") if s.agent else None
        self.tools = self.judge = None
        self.rewards_as, self.methods, self.opened, self.idle = "", {}, {}, []
        kind = "agent" if s.agent else "environment" if s.environment else "tools"
        self.key, self.name = f"{kind}={getattr(s, kind)}", (s.agent or s.environment).rpartition(":")[2]
        # endpoint.py is opened for an agent alone.
        self.episode = load_from("endpoint:AgentEpisode", "agent", "Class") if s.agent else Episode
        if s.environment or s.tools:
            self._inspect()
        if self.make and (not s.chat or tokenizer.chat_template is None):
            raise ValueError(f"{self.key} needs chat=True and a tokenizer with a chat template")
        self.template = Template(tokenizer, eos_ids, self.tools) if self.make else None

    def _inspect(self):
        # Makes the first instance and finds out what it has.
        s = self.settings
        functions = [load_from(spec, "tools", "function") for spec in specs(s.tools)]
        # With functions alone an instance is an empty object.
        self.make = load_from(s.environment, "environment", "Class") if s.environment else object
        closing.callback(self.close)
        instance, error, _ = outcome(self.make, s.call_timeout)
        os.chdir(STARTED_IN)                                    # the class may have left it; data.py needs it
        if error:
            raise ValueError(f"{self.key}: {self.name}() {error}")
        self.opened[id(instance)] = instance
        self.idle.append(instance)
        # As in TRL tools are bound methods, of the class or of the instance. Properties are not read, because
        # this may fail before the first reset.
        methods = {name: getattr(instance, name, None) for name, static in inspect.getmembers_static(instance)
                   if not (name.startswith("_") or isinstance(static, (property, cached_property)))}
        self.methods = {name: method for name, method in methods.items() if inspect.ismethod(method)}
        if s.environment and "reset" not in self.methods:
            raise ValueError(f"{self.key} has no method reset; it has {', '.join(self.methods) or 'none'}")
        self.rewards_as = self.name if {"step", "get_reward"} & self.methods.keys() else ""
        if "step" in self.methods:
            if functions:
                raise ValueError(f"tools={s.tools}: {self.key} has a method step, which reads no calls")
            return
        closes = {name for name in ("close", "release") if closer(instance, name)}
        names = [name for name in self.methods if name not in {"reset", "get_reward", *closes}]
        tools = functions + [self.methods[name] for name in names]
        self.called = dict(zip(map(name_of, tools), functions + names))
        if len(self.called) < len(tools):
            raise ValueError(f"{self.key}: two tools have the same name: {', '.join(map(name_of, tools))}")
        try:
            self.tools = [get_json_schema(tool) for tool in tools]
        except Exception as error:                              # it names the tool
            raise ValueError(f"{self.key}: a tool needs type hints and a docstring that explains its "
                             f"arguments: {error}") from error

    def close(self):
        """Close all instances. It is called when the process ends."""
        close([*self.opened.values()], seconds=10)
        self.opened, self.idle = {}, []

    def messages(self, prompt, observation=""):
        """Return the messages before the first turn; an observation is added to the last one, as in TRL."""
        if isinstance(prompt, str) or prompt[-1]["role"] == "assistant":
            raise ValueError(f"{self.key} needs prompts that are lists of messages, the last one not the "
                             f"assistant's, unlike {prompt!r:.200}")
        system = [{"role": "system", "content": text} for text in [self.settings.system_prompt] if text]
        return [*system, *prompt[:-1], prompt[-1] | {"content": prompt[-1]["content"] + observation}]

    def check_with(self, prompts):
        """Play two episodes of one made-up turn, so that what is broken shows before any training.

        prompts: one or two data.Prompts. Returns the two Rollouts. Raises ValueError if the environment or
        the chat template cannot be used.
        """
        if self.make and not self.settings.agent:               # which writes its own messages
            self.template.check(self.messages(prompts[0].row["prompt"]))
        if self.tools:
            before, said = self.template.example()
            text = text_of(self.tokenizer, said, "stop")
            _, calls = read_turn(self.tokenizer, self.tools, before, said, text)
            if [call["function"]["name"] for call, _ in calls] != self.template.names[:1]:
                raise ValueError(
                    f"no call is found in {self.tokenizer.decode(said)!r:.300}, which the chat template "
                    "writes: it needs the form <tool_call>JSON</tool_call>, or a response_template")
        # The second of two single answers is empty.
        end, asked = self.eos_ids[:1], []
        said = [self.tokenizer(text, add_special_tokens=False).input_ids + end
                for text in ("Answer: 0", "Answer: 0" if self.make else "")]
        answer = lambda name: Answer(name, said[name], [0.0] * len(said[name]), "stop")
        engine = SimpleNamespace(add=asked.append, signalled=False, step=lambda: [answer(asked.pop(0).name)])
        # There is no room for a second turn.
        rollouts = Table(self, engine).play([(prompt.row, Request(None, prompt.ids, 0, len(ids)))
                                             for prompt, ids in zip(prompts * 2, said)])
        for r in rollouts:
            # An agent that has asked may fail for want of a second turn.
            if (problem := r.counts.get("problem")) and not r.counts.get("requests"):
                raise ValueError(problem)
        return rollouts

    def play(self, engine, prompts, n, seeds, *sampling):
        """Return n adjacent Rollouts per data.Prompt.

        seeds: one per prompt, for seed, seed + 1, ... sampling: max_tokens, temperature, top_p and top_k of a
        Request; an episode with more tokens after its prompt is cut off.

        finish_reason is stop or length, and with an environment also turns (the episode had max_turns),
        timeout, or error (the environment raised, or the episode could not begin; it gets no score). Raises
        ValueError if an environment returns what it must not.
        """
        jobs = [(prompt.row, Request(None, prompt.ids, seed + j, *sampling))
                for prompt, seed in zip(prompts, seeds) for j in range(n)]
        return engine.serve(jobs, Table(self, engine).play)


class Table:
    """The episodes that are played at a time: add more whenever you like, and step returns what is complete.

    player: plays them. engine: samples the policy's turns.
    """

    def __init__(self, player, engine):
        self.player, self.engine, self.settings = player, engine, player.settings
        self.free = Semaphore(self.settings.call_workers)       # workers that have nothing to do
        self.calls = {}                         # {Future of a call in a thread: the number of its episode}
        self.numbers = itertools.count()        # of the episodes, in the order in which they were added
        self.groups = {}                        # {key: the numbers of its episodes}
        # Pairs (number, job); {number: Episode.play()}; {number: Rollout}
        self.waiting, self.playing, self.ended = deque(), {}, {}

    def add(self, key, jobs):
        """Add an episode for each of the jobs: the row of the data set, and the Request for the first turn.

        key: the one under which step returns their Rollouts when all of them have ended.
        """
        self.groups[key] = [next(self.numbers) for _ in jobs]
        self.waiting += zip(self.groups[key], jobs)

    def play(self, jobs):
        """Return the Rollouts of these jobs, when no others are at the table."""
        self.add("all", jobs)
        while not (complete := self.step()):
            if self.engine.signalled:
                return []
        return complete["all"]

    def step(self):
        """Take a step of the engine if an episode waits for one; return {key: its complete Rollouts}."""
        # No more episodes are played at a time than there may be environments.
        while self.waiting and len(self.playing) < (self.settings.max_environments or math.inf):
            number, job = self.waiting.popleft()
            self.playing[number] = self.player.episode(self.player, *job).play()
            self._go_on(number)
        # An episode that waits for no call waits for the engine.
        asked = len(self.playing) > len(self.calls) and not self.engine.signalled
        for answer in self.engine.step() if asked else ():
            self._go_on(answer.name, answer)
        patience = 0 if len(self.playing) > len(self.calls) else None
        for call in wait(self.calls, patience, FIRST_COMPLETED).done:
            self._go_on(self.calls.pop(call), call.result())
        complete = [key for key, numbers in self.groups.items() if all(n in self.ended for n in numbers)]
        return {key: [self.ended.pop(number) for number in self.groups.pop(key)] for key in complete}

    def _go_on(self, number, value=None):
        # Runs an episode until it ends, or waits for the engine or for a thread.
        if self.engine.signalled:
            return
        try:
            wish = self.playing[number].send(value)
        except StopIteration as end:
            self.ended[number] = end.value
            del self.playing[number]
            return
        if isinstance(wish, Request):
            self.engine.add(wish._replace(name=number))
        else:
            self.calls[in_thread(partial(self._call, wish))] = number

    def _call(self, wish):
        # In a thread of its own, because the end of a run does not wait for such threads.
        with self.free:
            return in_time(wish, self.settings.call_timeout)
