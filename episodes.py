"""
Episodes: the policy speaks and an environment answers, turn after turn. One episode is one row of tokens.

An environment is a class of yours, --environment=my_game.py:Guess, in one of two forms. An instance plays one
episode at a time and is reset for the next one. Its methods may be `async def`.

    text    reset(**row)     gets the columns of the row; returns text for the prompt's last message, or None
            step(text)       gets what the policy said; returns (observation, reward, whether it is over)
    tools   reset(**row)     does the same; this is TRL's form, and such a class runs in TRL as well
            other methods    are tools: type hints and docstring tell the policy how to call them
    both    get_reward()     if it exists, is called at the end of an episode; None gives no score
            close()          if it exists, or else release(), is called at the end of the run

Functions become tools as well, with or without a class: --tools=my_tools.py:search.

Each episode continues as soon as it can: its next turn joins those that the engine is working on. Without an
environment an answer is an episode of one turn, which train_async.py plays here as well.
"""
import contextlib
import inspect
import itertools
import json
import math
import re
import zlib
from collections import deque
from copy import deepcopy
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from transformers.utils import get_json_schema

from runtime import closing
from runtime.chat_template import Template, tool_call
from runtime.user_code import (Failed, Threads, TimeUp, accepted, close, closer, escaped, load_from,
                               logging_into, name_of, outcome, shown, specs)
from rollout import Answer, Request, Rollout

# A tool call in the form that Qwen and many other models use. It is found without its closing tag as well.
CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
THOUGHT = re.compile(r"<think>(.*?)(?:</think>|\Z)", re.DOTALL)
CLOSING = 10.0          # seconds that environments have to close at the end of a run


class Functions:
    """The environment of a run that has only functions as tools."""
    def reset(self):
        pass


class CannotBegin(Exception):
    """Says why an episode cannot begin, although its environment works."""


class Player:
    """Plays episodes with the environment and the tools that a run's settings name, or without any.

    tools: JSON schemas of the tools, or None. rewards_as: the environment's name if it gives rewards,
    otherwise "". judge: None, or a function judge(rollout, environment) of a rewards.Scorer, which scores an
    episode while its environment is still as the episode left it. Raises ValueError for an environment or
    tools that cannot be used.
    """

    def __init__(self, settings, tokenizer, eos_ids):
        s, self.tokenizer, self.eos_ids = settings, tokenizer, eos_ids
        self.settings, self.tools, self.rewards_as, self.judge = settings, None, "", None
        # {id: instance} of all instances of the environment, and a list of those that play no episode now.
        self.opened, self.idle = {}, []
        functions = [load_from(spec, "tools", "function") for spec in specs(s.tools) if s.tools]
        self.functions = {name_of(function): function for function in functions}
        self.make = (load_from(s.environment, "environment", "Class") if s.environment
                     else Functions if functions else None)
        if not self.make:
            return
        self.key = f"environment={s.environment}" if s.environment else f"tools={s.tools}"
        self.name = s.environment.rpartition(":")[2]
        self.who = f"environment {self.name}" if self.name else "tools"
        if not s.chat or tokenizer.chat_template is None:
            raise ValueError(f"{self.key} needs chat=True and a tokenizer with a chat template")
        closing.callback(self.close)
        environment, error, _ = outcome(self.make, s.call_timeout)
        if error:
            raise ValueError(f"{self.key}: {self.name}() {self._told(error)}")
        self.opened[id(environment)] = environment
        self.idle.append(environment)
        # As in TRL only methods of the class are tools, not attributes that can be called. They are looked up
        # in the class because reading a property of the instance may fail before the first reset.
        methods = {name: getattr(environment, name)
                   for name, _ in inspect.getmembers(type(environment), inspect.isfunction)
                   if not name.startswith("_")}
        if "reset" not in methods:
            raise ValueError(f"{self.key} has no method reset; it has {', '.join(methods) or 'none'}")
        self.has_step, self.has_reward = "step" in methods, "get_reward" in methods
        closes = {name for name in ("close", "release") if closer(environment, name)}
        tools = functions + [methods[name] for name in methods
                             if name not in {"reset", "get_reward", *closes}]
        if not self.has_step:
            if not tools:
                raise ValueError(f"{self.key} has neither a method step nor tools")
            self.tools = [self._schema(tool) for tool in tools]
            if twice := {one for one in map(name_of, tools) if [*map(name_of, tools)].count(one) > 1}:
                raise ValueError(f"{self.key}: two tools are called {min(twice)}")
        elif functions:
            raise ValueError(f"tools={s.tools}: {self.key} has a method step, which reads no calls of tools")
        self.rewards_as = self.name if self.has_step or self.has_reward else ""
        self.template = Template(tokenizer, eos_ids, self.tools)

    def close(self):
        """Closes all instances of the environment. It is called when the process ends."""
        close([*self.opened.values()], CLOSING)
        self.opened, self.idle = {}, []

    def _schema(self, tool):
        try:
            return get_json_schema(tool)
        except Exception as error:
            raise ValueError(f"{self.key}: the tool {name_of(tool)} needs type hints and a docstring that "
                             f"explains its arguments: {error}") from error

    def check_with(self, prompts):
        """Plays a first turn after each of these prompts, so that what is broken shows before any training.

        Raises ValueError if the environment or the chat template cannot be used.
        """
        if not self.make:
            return
        self.template.check(self._messages(prompts[0].row["prompt"]))
        if self.tools:
            before, said = self.template.example()
            _, calls = self._read(before, said)
            if [call["function"]["name"] for call, _ in calls] != self.template.names[:1]:
                raise ValueError(
                    f"no call is found in {self.tokenizer.decode(said)!r:.300}, which the chat template "
                    "writes: it needs the form <tool_call>JSON</tool_call>, or --response_template=file.json")
        ids = self.tokenizer("Answer: 0", add_special_tokens=False).input_ids + self.eos_ids[:1]
        for prompt in prompts:
            episode = self.episode(prompt, 0, (self.settings.max_completion_length,))
            try:
                self.proceed(episode)
                self.proceed(episode, Answer(0, ids, [0.0] * len(ids), "stop"))
            except RuntimeError as error:
                raise ValueError(error) from error
            except StopIteration as end:
                if "problem" in end.value.counts:
                    raise ValueError(end.value.counts["problem"]) from None

    # ------------------------------------------------------------ all episodes

    def play(self, engine, prompts, n, seeds, max_tokens, temperature, top_p=1.0, top_k=0):
        """Returns n adjacent Rollouts per data.Prompt.

        seeds: one per prompt, for seed, seed + 1, ... max_tokens: an episode with more tokens after its
        prompt is cut off.

        finish_reason is stop or length, and with an environment also turns (the episode had max_turns),
        timeout, or error (the environment raised, or the episode could not begin; it gets no score). Raises
        RuntimeError if an environment returns what it must not, or if all episodes on all ranks end in
        errors.
        """
        jobs = [(prompt, seed + j, (max_tokens, temperature, top_p, top_k))
                for prompt, seed in zip(prompts, seeds) for j in range(n)]
        rollouts = engine.serve(jobs, Table(self, engine).play)
        self.check_errors(rollouts)
        return rollouts

    def check_errors(self, rollouts):
        """Raises RuntimeError if all episodes on all ranks ended in errors. All ranks have to call it."""
        problems = [r.counts["problem"] for r in rollouts if r.finish_reason == "error"]
        counts = torch.tensor([len(problems), len(rollouts)])
        if dist.is_initialized():
            dist.all_reduce(counts)
        failed, played = counts.tolist()
        # A rank that has played no episode leaves this to the others.
        if problems and failed == played:
            raise RuntimeError(f"all {played} episodes ended in errors; the first: {problems[0]}")

    # ------------------------------------------------------------ one episode

    def episode(self, prompt, seed, sampling):
        """A generator of one episode, which returns its Rollout.

        It yields Requests, for which it is sent their Answers, and functions that call the environment, for
        which it is sent what user_code.outcome returns.
        """
        row, ids, environment, problem, hung, extra = prompt.row, list(prompt.ids), None, "", False, {}
        counts = {"calls": 0, "failures": 0, "seconds": 0.0} if self.make else {}
        try:
            if self.make:
                try:
                    environment = self.idle.pop() if self.idle else (yield from self._call(counts, self.make))
                    self.opened[id(environment)] = environment
                    columns = accepted(environment.reset, deepcopy(row), f"{self.who}: reset",
                                       logging_into(extra))
                    returned = yield from self._call(counts, environment.reset, **columns)
                    row, ids = self._opening(prompt, returned)
                except CannotBegin as error:
                    problem = str(error)
                except (Failed, TimeUp) as error:
                    problem, hung = f"reset {self._told(error)}", True
            # An episode that cannot begin is one answer to its prompt, without a score.
            playing = None if problem else environment
            rollout = yield from self._turns(playing, row, ids, seed, sampling, counts)
            rollout.extra, hung = extra, hung or rollout.finish_reason == "timeout"
            if problem:
                rollout.finish_reason, counts["problem"] = "error", str(self._broken(problem, row))
            if rollout.finish_reason == "error":
                rollout.rewards = {len(rollout.logprobs) - 1: math.nan} if self.rewards_as else {}
            elif self.judge and environment is not None and not self._busy(rollout.finish_reason):
                self.judge(rollout, environment)
            return rollout
        finally:
            # One whose reset has failed, or that is still busy, plays no more episodes.
            if hung and environment is not None:
                close([self.opened.pop(id(environment))], 0)
            elif environment is not None:
                self.idle.append(environment)

    def proceed(self, episode, value=None):
        """Sends a value to an episode and calls its environment, until it yields a Request; returns this."""
        while not isinstance(wish := episode.send(value), Request):
            value = outcome(wish, self.settings.call_timeout)
        return wish

    def _call(self, counts, function, /, *args, **kwargs):
        # Part of an episode: what a function of the environment returns. Raises Failed or TimeUp.
        value, error, seconds = yield partial(function, *args, **kwargs)
        counts["seconds"] += seconds
        if error:
            raise error
        return value

    def _turns(self, environment, row, ids, seed, sampling, counts):
        # The turns of an episode, or without an environment a single answer, from where the policy begins.
        s, ended, (max_tokens, *sampling) = self.settings, "", sampling
        messages, spans, logprobs, versions, rewards = [], [], [], {}, {}
        limit = len(ids) + max_tokens
        while not ended:
            turn = len(spans) + 1
            turn_seed = seed if turn == 1 else zlib.crc32(f"{seed} {turn}".encode())
            most = min(limit - len(ids), s.max_turn_length or limit)
            answer = yield Request(None, ids, turn_seed, most, *sampling)
            spans.append((len(ids), len(ids) + len(answer.ids)))
            versions |= {len(logprobs) + start: version for start, version in answer.versions}
            before, ids, logprobs = ids, ids + answer.ids, logprobs + answer.logprobs
            text = self.tokenizer.decode(answer.ids, skip_special_tokens=True)
            last = len(logprobs) - 1
            rewards[last] = 0.0
            if environment is None:
                messages.append({"role": "assistant", "content": text})
                ended = answer.finish_reason
                break
            said, calls = self._read(before, answer.ids)
            messages.append(said)
            cut, done, heard = answer.finish_reason == "length", True, []
            try:
                if self.has_step:
                    returned = yield from self._call(counts, environment.step, text)
                    observation, rewards[last], done = self._checked(returned, turn, row)
                    heard = [({"role": "user"}, observation)]
                elif cut:
                    said["content"] = text                      # including a call, which is not made
                elif calls:
                    said["tool_calls"] = [call for call, _ in calls]
                    heard, done = (yield from self._results(environment, calls, counts)), False
                ended = "length" if cut else "stop" if done else "turns" if turn == s.max_turns else ""
                if not ended:
                    reply = [message | {"content": self._cut(read)} for message, read in heard]
                    inserted = self.template.between(said, reply)
                    # If the reply and one token of an answer do not fit, the episode ends.
                    ended = "length" if len(ids) + len(inserted) >= limit else ""
                if not ended:
                    # For rewards a list that a tool returned is still one.
                    ids = ids + inserted
                    messages += [read | message for read, (message, _) in zip(reply, heard)]
            except (Failed, TimeUp) as error:
                ended = self._ended_by(error, turn, row, counts)
        if environment is not None and self.has_reward and ended != "error" and not self._busy(ended):
            try:
                reward = yield from self._call(counts, environment.get_reward)
                if reward is not None:
                    rewards[last] += self._number(reward, turn, row)
                elif not self.has_step:
                    rewards[last] = math.nan                    # not scored, as in TRL
            except (Failed, TimeUp) as error:
                ended = self._ended_by(error, turn, row, counts)
        return Rollout(np.array(ids, np.int32), np.array(spans, np.int32), np.array(logprobs, np.float32),
                       ended, row, text if isinstance(row["prompt"], str) else messages, counts=counts,
                       rewards=rewards if self.rewards_as else {}, versions=tuple(versions.items()))

    def _busy(self, ended):
        # Whether the environment is still at work, in a thread that nothing can end.
        return ended == "timeout" and self.settings.call_workers > 0

    def _ended_by(self, error, turn, row, counts):
        # How an episode ended by a call that raised, or that took too long.
        counts["problem"] = str(self._broken(f"it {self._told(error)} in turn {turn}", row))
        return "timeout" if isinstance(error, TimeUp) else "error"

    def _messages(self, prompt, observation=""):
        # The messages before the first turn. An observation is added to the last one, as in TRL.
        if isinstance(prompt, str) or prompt[-1]["role"] == "assistant":
            raise ValueError(f"{self.key} needs prompts that are lists of messages, the last one not the "
                             f"assistant's, unlike {prompt!r:.200}")
        system = [{"role": "system", "content": text} for text in [self.settings.system_prompt] if text]
        return [*system, *prompt[:-1], prompt[-1] | {"content": prompt[-1]["content"] + observation}]

    def _opening(self, prompt, observation):
        # The row and the ids of a prompt, with what reset returned. Raises CannotBegin if they are of no use.
        *earlier, last = prompt.row["prompt"]
        if observation is None:
            if not any(message["content"] for message in (*earlier, last)):
                raise CannotBegin("reset gave no prompt, and the row has none")
            return prompt.row, list(prompt.ids)
        if not isinstance(observation, str):
            raise self._broken(f"reset returned {shown(observation)}, neither a string nor None", prompt.row)
        ids = self.template.opening(self._messages(prompt.row["prompt"], self.template.defused(observation)))
        if (most := self.settings.max_prompt_length) < len(ids):
            raise CannotBegin(f"with what reset returned the prompt has {len(ids)} tokens, more than "
                              f"max_prompt_length={most}")
        return prompt.row | {"prompt": [*earlier, last | {"content": last["content"] + observation}]}, ids

    def _checked(self, returned, turn, row):
        # (observation, reward, done), as step has to return them.
        if (isinstance(returned, tuple) and len(returned) == 3 and isinstance(returned[2], (bool, np.bool_))
                and (returned[2] or isinstance(returned[0], str))):
            return returned[0], self._number(returned[1], turn, row), bool(returned[2])
        raise self._broken(f"step returned {shown(returned)} in turn {turn}, not (observation, "
                           "reward, done): a string, a number, and True or False", row)

    def _number(self, reward, turn, row):
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            if abs(reward) <= 3.4e38:                           # float32's largest
                return float(reward)
        raise self._broken(f"the reward {shown(reward)} in turn {turn} is not a finite number", row)

    def _broken(self, problem, row):
        return RuntimeError(f"{self.who}: {problem}; the row is {row!r:.300}")

    def _told(self, error):
        return (f"took more than call_timeout={self.settings.call_timeout:g} seconds"
                if isinstance(error, TimeUp) else f"raised {escaped(shown(error.__cause__))}")

    # ------------------------------------------------------------ tools

    def _read(self, before, sampled):
        # A turn as a message, and its calls: each as transformers writes it, with what is wrong, or "".
        said = {"role": "assistant", "content": self.tokenizer.decode(sampled, skip_special_tokens=True)}
        found = []
        try:
            if getattr(self.tokenizer, "response_template", None):
                parsed = self.tokenizer.parse_response(sampled, prefix=before, tools=self.tools)
                found = [call["function"] for call in parsed.pop("tool_calls", None) or []]
                said |= parsed | {"content": parsed.get("content") or ""}
            elif self.tools:
                # The template may have begun a thought. Thoughts call nothing, also one that was cut off.
                thinks = self.tokenizer.decode(before[-8:]).rstrip().endswith("<think>")
                text = "<think>" * thinks + self.tokenizer.decode(
                    [one for one in sampled if one not in self.eos_ids])
                thoughts, spoken = THOUGHT.findall(text), THOUGHT.sub("", text).rpartition("</think>")[2]
                found, said["content"] = CALL.findall(spoken), CALL.sub("", spoken).strip()
                said |= {"reasoning_content": "\n".join(thoughts).strip()} if thoughts else {}
        # A parser may raise anything for text that is not as it expects.
        except Exception as error:
            return said, [(tool_call(0, "unknown", {}), f"this is no call of a tool: {error!r}")]
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
        return said, calls

    def _results(self, environment, calls, counts):
        # Part of an episode: makes these calls. Returns for each a message, and what the policy reads of it.
        # A list or an object is in the message as it is, for rewards.
        heard = []
        for call, problem in calls:
            counts["calls"] += 1
            name, arguments = call["function"].values()
            try:
                if not problem:
                    method = self.functions.get(name) or getattr(environment, name)
                    inspect.signature(method).bind(**arguments)
                    result = yield from self._call(counts, method, **arguments)
            except TypeError as error:
                problem = f"wrong arguments: {error}"
            except Failed as error:
                # Without the name of its class, as in TRL.
                problem = shown(error.__cause__).partition(": ")[2] or shown(error.__cause__)
            if problem:
                result = {"error": problem}
            message = {"role": "tool", "name": name, "tool_call_id": call["id"]}
            blocks = result if isinstance(result, list) else []
            try:
                plain = blocks and all(isinstance(one, dict) and one.get("type") == "text" for one in blocks)
                text = "".join(one["text"] for one in blocks) if plain else str(result)
            # It may be of any kind.
            except Exception as error:
                text = problem = shown(error)
            if isinstance(result, (list, dict)):
                with contextlib.suppress(ValueError, TypeError, RecursionError):
                    message["content"] = json.loads(json.dumps(result, default=str))
            counts["failures"] += bool(problem)
            heard.append((message, text))
        return heard

    def _cut(self, text):
        # What the policy reads of a text from outside: all, or the first max_reply_length tokens and a mark.
        most = self.settings.max_reply_length
        ids = self.tokenizer(text, add_special_tokens=False).input_ids if most else []
        if len(ids) <= most:
            return text
        return f"{self.tokenizer.decode(ids[:most])} [cut: {most} of {len(ids)} tokens]"


class Table:
    """The episodes that are played at a time: add more whenever you like, and step returns what is complete.

    player: plays them. engine: samples the policy's turns.
    """

    def __init__(self, player, engine):
        self.player, self.engine, self.settings = player, engine, player.settings
        self.threads = Threads(self.settings.call_workers, self.settings.call_timeout)
        self.numbers = itertools.count()
        # {key: Rollouts, with None for an episode that has not ended}; {number: (episode, key, place)}
        self.groups, self.playing, self.waiting = {}, {}, deque()
        # Only so many episodes are played at a time as there may be environments.
        self.most = (self.settings.max_environments if player.make else 0) or math.inf
        self.asked = 0                          # Requests that wait for an Answer

    def add(self, key, jobs):
        """Adds an episode for each of the jobs: prompt, seed, and (max_tokens, temperature, top_p, top_k).

        key: the one under which step returns their Rollouts when all of them have ended.
        """
        self.groups[key] = [None] * len(jobs)
        self.waiting += [(key, place, *job) for place, job in enumerate(jobs)]

    def play(self, jobs):
        """Returns the Rollouts of these jobs, when no others are at the table."""
        self.add("all", jobs)
        while not (ended := self.step()):
            pass
        return ended["all"]

    def _go_on(self, number, value=None):
        # Runs an episode until it ends, or waits for the engine or for a thread.
        episode, key, place = self.playing[number]
        try:
            wish = (episode.send(value) if self.settings.call_workers
                    else self.player.proceed(episode, value))
        except StopIteration as end:
            self.groups[key][place] = end.value
            del self.playing[number]
            return
        if isinstance(wish, Request):
            self.engine.add(wish._replace(name=number))
            self.asked += 1
        else:
            self.threads.start(number, wish)

    def step(self):
        """Takes a step of the engine if an episode waits for one; returns {key: its complete Rollouts}."""
        while self.waiting and len(self.playing) < self.most:
            key, place, *job = self.waiting.popleft()
            number = next(self.numbers)
            self.playing[number] = self.player.episode(*job), key, place
            self._go_on(number)
        for answer in self.engine.step() if self.asked else ():
            self.asked -= 1
            self._go_on(answer.name, answer)
        for number, *ended in self.threads.finished(wait=self.playing and not self.asked):
            self._go_on(number, ended)
        complete = [key for key, group in self.groups.items() if None not in group]
        return {key: self.groups.pop(key) for key in complete}
