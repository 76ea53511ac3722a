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
import inspect
import os
import math
from concurrent.futures import FIRST_COMPLETED, Future, wait
from copy import deepcopy
from functools import cached_property, partial
from threading import Semaphore, Thread

import numpy as np
from transformers.utils import get_json_schema

from conversation import Conversation
from runtime.chat_template import Template, result_of
from runtime.user_code import (STARTED_IN, Failed, TimeUp, accepted, as_float, closing, load_from,
                               logging_into, name_of, outcome, shown, specs)
from rollout import Answer, Engine, Request, Rollout, text_of


def rollout_of(conversation, finish_reason, row, **fields):
    """Return a conversation as a Rollout. fields: further fields of the Rollout."""
    completion = conversation.messages
    if isinstance(row["prompt"], str):
        completion = completion[0]["content"]
    return Rollout(np.array(conversation.ids, np.int32), np.array(conversation.spans, np.int32),
                   np.array(conversation.logprobs, np.float32), finish_reason, row, completion,
                   versions=tuple(conversation.versions.items()), **fields)


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

    row: the row of the data set. first: the Request for the first turn. abandoned: whether nobody waits any
    more for the answer that the engine samples; that of an agent may become true.
    """
    abandoned = False

    def __init__(self, player, row, first):
        self.player, self.settings, self.row = player, player.settings, row
        self.talk = Conversation(first, player.template)
        self.instance, self.ended = None, ""                    # of the environment; the finish_reason
        self.rewards, self.extra = {}, {}                       # as in Rollout
        self.counts = {"calls": 0, "failures": 0, "seconds": 0.0} if player.make else {}

    # The number of the last sampled token, to which the reward of its turn belongs.
    last = property(lambda self: len(self.talk.logprobs) - 1)

    def play(self):
        """A generator that plays the episode and returns its Rollout.

        It yields Requests, for which it is sent their Answers, and functions that call the environment, for
        which it is sent what user_code.outcome returns.
        """
        player = self.player
        try:
            try:
                yield from self._begin()
                while not self.ended:
                    yield from self._turn()
                if "get_reward" in player.methods:
                    reward = yield from self._call(self.instance.get_reward)
                    if reward is not None:
                        self.rewards[self.last] += as_float(reward)
                    elif "step" not in player.methods:
                        self.rewards[self.last] = math.nan      # not scored, as in TRL
            except (Failed, TimeUp, ValueError) as error:
                turn, late = len(self.talk.spans), isinstance(error, TimeUp)
                when = f"in turn {turn}" if turn else "before its first turn"
                told = f"{player.key}, {when}: {error}; the row is {self.row!r:.300}"
                if isinstance(error, ValueError):               # the environment did what it must not
                    raise ValueError(told) from error
                self.ended, self.counts["problem"] = "timeout" if late and turn else "error", told
                # An environment that may still be at work, or whose reset failed, plays no other episode.
                if self.instance is not None and (late or not turn):
                    player.close(self.instance)
            if not self.talk.spans:                             # it could not begin: one answer, not scored
                yield from self._turn()
            if self.ended == "error":
                self.rewards = {self.last: math.nan}
            rollout = rollout_of(self.talk, self.ended, self.row, counts=self.counts, extra=self.extra,
                                        rewards=self.rewards if player.rewards_as else {})
            if player.judge and self.ended not in ("timeout", "error"):
                player.judge(rollout, self.instance)
            return rollout
        finally:
            if id(self.instance) in player.opened:
                player.idle.append(self.instance)

    def _call(self, function, /, *args, **kwargs):
        # Returns what a function of the environment returns. Raises Failed or TimeUp.
        value, error, seconds = yield partial(function, *args, **kwargs)
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
        self.talk = Conversation(self.talk.first._replace(ids=ids), template)
        self.row = self.row | {"prompt": [*earlier, last | {"content": last["content"] + observation}]}

    def _turn(self):
        # A turn of the policy and what the environment replies, unless the episode has ended before it.
        player, talk = self.player, self.talk
        answer = yield talk.request(len(talk.spans) + 1)
        text, said, calls = self._read(talk, answer)
        cut = answer.finish_reason == "length"
        talk.add_turn(answer, said)
        self.rewards[self.last] = 0.0
        if self.ended:
            return
        reply, ended = [], "stop"
        if "step" in player.methods:
            returned = yield from self._call(self.instance.step, text)
            observation, self.rewards[self.last], ended = read_step(returned)
            reply = [{"role": "user", "content": observation}]
        elif calls:
            said["tool_calls"], ended = [call for call, _ in calls], ""
            for call, problem in calls:
                reply.append((yield from self._result(call, problem)))
        if not (ended or cut) and len(talk.spans) == self.settings.max_turns:
            ended = "turns"
        if cut or not (ended or talk.add_reply(reply)):
            ended = "length"
        self.ended = ended

    def _read(self, talk, answer):
        # Returns the text of an answer, the answer as a message, and its calls, of which one that was cut off
        # has none.
        text = text_of(self.player.tokenizer, answer.ids, answer.finish_reason)
        if not talk.template or answer.finish_reason == "length":
            return text, {"role": "assistant", "content": text}, []
        return text, *talk.template.read(talk.ids, answer.ids, text)

    def _result(self, call, problem):
        # Makes a call of a tool if there is no problem with it, and returns its message.
        name, arguments = call["function"].values()
        self.counts["calls"] += 1
        try:
            if not problem:
                tool = self.player.called[name]
                method = getattr(self.instance, tool) if isinstance(tool, str) else tool
                # A tool may change what it gets in place.
                result = yield from self._call(method, **deepcopy(arguments))
                content = yield from self._call(result_of, result)
        except Failed as error:
            # Without the name of its class, as in TRL.
            problem = shown(error.__cause__).partition(": ")[2] or shown(error.__cause__)
        self.counts["failures"] += bool(problem)
        return {"role": "tool", "name": name, "tool_call_id": call["id"],
                "content": {"error": problem} if problem else content}


# ------------------------------------------------------------------------------------------------------------
# all episodes


class Player:
    """Plays episodes with what a run's settings name: a class, functions, an agent, or nothing.

    make: the class or the agent's function, or None. name: that of the class or the agent. key: the setting
    that names it. methods: the public methods of an instance. tools: JSON schemas of the tools, or None.
    called: {tool: a function, or the name of a method}. closers: the methods that can close an instance, of
    which the first is called. rewards_as: the name of the class if it gives rewards, otherwise "". opened:
    {id: instance}; idle: the instances that play no episode now. judge: None, or a function judge(rollout,
    environment) of a rewards.Scorer, which scores an episode while its environment is still as the episode
    left it. Raises ValueError for what cannot be used.
    """

    def __init__(self, settings, tokenizer, eos_ids):
        s, self.settings, self.tokenizer, self.eos_ids = settings, settings, tokenizer, eos_ids
        self.make = load_from(s.agent, "agent", "function") if s.agent else None
        self.tools = self.judge = None
        self.rewards_as, self.methods, self.closers, self.opened, self.idle = "", {}, [], {}, []
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
        # Properties are not read, because this may fail before the first reset.
        methods = {name: getattr(instance, name, None) for name, static in inspect.getmembers_static(instance)
                   if not (name.startswith("_") or isinstance(static, (property, cached_property)))}
        self.methods = {name: method for name, method in methods.items() if inspect.ismethod(method)}
        if s.environment and "reset" not in self.methods:
            raise ValueError(f"{self.key} has no method reset; it has {', '.join(self.methods) or 'none'}")
        self.closers = [name for name in ("close", "release") if name in self.methods
                        and not inspect.signature(self.methods[name]).parameters]
        self.rewards_as = self.name if {"step", "get_reward"} & self.methods.keys() else ""
        if "step" in self.methods:
            if functions:
                raise ValueError(f"tools={s.tools}: {self.key} has a method step, which reads no calls")
            return
        # As in TRL tools are bound methods, of the class or of the instance.
        names = [name for name in self.methods if name not in ("reset", "get_reward", *self.closers)]
        tools = functions + [self.methods[name] for name in names]
        self.called = dict(zip(map(name_of, tools), functions + names))
        if len(self.called) < len(tools):
            raise ValueError(f"{self.key}: two tools have the same name: {', '.join(map(name_of, tools))}")
        self.tools, error, _ = outcome(lambda: [get_json_schema(tool) for tool in tools])
        if error:                                               # it names the tool
            raise ValueError(f"{self.key}: a tool needs type hints and a docstring that explains its "
                             f"arguments: {error}")

    def close(self, *instances):
        """Close these instances by close() or else by release(), or within ten seconds all of them."""
        calls = []
        for one in instances or [*self.opened.values()]:
            del self.opened[id(one)]
            calls += [in_thread(partial(outcome, getattr(one, name))) for name in self.closers[:1]]
        wait(calls, 0 if instances else 10)

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
        # The second of two single answers is empty.
        end, asked = self.eos_ids[:1], []
        said = [self.tokenizer(text, add_special_tokens=False).input_ids + end
                for text in ("Answer: 0", "Answer: 0" if self.make else "")]
        answer = lambda name: Answer(name, said[name], [0.0] * len(said[name]), "stop")
        engine = Engine()
        engine.add, engine.step = asked.append, lambda: [answer(asked.pop(0).name)]
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
        return engine.serve(jobs_for(prompts, n, seeds, *sampling), Table(self, engine).play)


def jobs_for(prompts, n, seeds, *sampling):
    """Return n adjacent jobs of a Table per data.Prompt. seeds, sampling: as for Player.play."""
    return [(prompt.row, Request(None, prompt.ids, seed + j, *sampling))
            for prompt, seed in zip(prompts, seeds) for j in range(n)]


class Table:
    """The episodes that are played at a time: add more whenever you like, and step returns what is complete.

    player: plays them. engine: samples the policy's turns, also for other tables.
    """

    def __init__(self, player, engine):
        self.player, self.engine, self.settings = player, engine, player.settings
        self.free = Semaphore(self.settings.call_workers)       # workers that have nothing to do
        self.calls = {}                         # {Future of a call in a thread: the number of its episode}
        self.groups = {}                        # {key: the numbers of its episodes}
        # Pairs (number, job); {number: (Episode, its play())}; {number: Rollout}
        self.waiting, self.playing, self.ended = [], {}, {}

    def add(self, key, jobs):
        """Add an episode for each of the jobs: the row of the data set, and the Request for the first turn.

        key: the one under which step returns their Rollouts when all of them have ended.
        """
        self.groups[key] = [next(self.engine.numbers) for _ in jobs]
        self.waiting += zip(self.groups[key], jobs)

    def play(self, jobs):
        """Return the Rollouts of these jobs, when no others are at the table; none if a signal has come."""
        self.add("all", jobs)
        while "all" in self.groups:
            complete = self.step()
        return complete["all"]

    def step(self):
        """Take a step of the engine if an episode waits for one; return {key: its complete Rollouts}.

        After a signal it returns all keys, without any Rollouts, so that nobody goes on waiting for them.
        """
        if self.engine.signalled:
            interrupted, self.groups = self.groups, {}
            return {key: [] for key in interrupted}
        # No more episodes are played at a time than there may be environments.
        while self.waiting and len(self.playing) < (self.settings.max_environments or math.inf):
            number, job = self.waiting.pop(0)
            episode = self.player.episode(self.player, *job)
            self.playing[number] = episode, episode.play()
            self._go_on(number)
        # An episode that waits for no call waits for the engine.
        asked = len(self.playing) > len(self.calls) and not self.engine.signalled
        self.engine.abort([number for number, (episode, _) in self.playing.items() if episode.abandoned])
        if asked:
            self._advance()
        patience = 0 if len(self.playing) > len(self.calls) else None
        for call in wait(self.calls, patience, FIRST_COMPLETED).done:
            self._go_on(self.calls.pop(call), call.result())
        complete = [key for key, numbers in self.groups.items() if all(n in self.ended for n in numbers)]
        return {key: [self.ended.pop(number) for number in self.groups.pop(key)] for key in complete}

    def abort(self):
        """Give up all episodes that have not ended, and the groups that are not complete."""
        for number, (episode, play) in self.playing.items():
            # An environment that is still at work plays no other episode.
            if number in self.calls.values() and id(episode.instance) in self.player.opened:
                self.player.close(episode.instance)
            play.close()
        unanswered = self.playing.keys() & self.engine.versions.keys()
        self.waiting, self.playing, self.calls, self.groups, self.ended = [], {}, {}, {}, {}
        self.engine.abort(unanswered)
        while unanswered & self.engine.versions.keys() and not self.engine.signalled:
            self._advance()

    def _advance(self):
        # Takes a step of the engine, and goes on with the episodes that it has answered, of whichever table.
        for answer in self.engine.step():
            table = self.engine.tables.pop(answer.name)
            if answer.name in table.playing:                    # it was not aborted
                table._go_on(answer.name, answer)

    def _go_on(self, number, value=None):
        # Runs an episode until it ends, or waits for the engine or for a thread.
        try:
            while not self.engine.signalled:
                _, play = self.playing[number]
                wish = play.send(value)
                if isinstance(wish, Request):
                    self.engine.tables[number] = self
                    return self.engine.add(wish._replace(name=number))
                if self.settings.call_workers:
                    self.calls[in_thread(partial(self._call, wish))] = number
                    return
                value = outcome(wish, self.settings.call_timeout)
        except StopIteration as end:
            self.ended[number] = end.value
            del self.playing[number]

    def _call(self, wish):
        # In a thread of its own, because the end of a run does not wait for such threads, and from there in
        # another one: Python cannot end a call that takes too long, so it goes on, and its result is dropped.
        seconds = self.settings.call_timeout
        with self.free:
            try:
                return in_thread(partial(outcome, wish, seconds)).result(seconds or None)
            except TimeoutError:
                return None, TimeUp(), seconds


def in_thread(function):
    """Return a Future of what the function returns. The end of the process does not wait for its thread."""
    future = Future()
    Thread(target=lambda: future.set_result(function()), daemon=True).start()
    return future
