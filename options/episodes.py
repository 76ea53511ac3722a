"""
Episodes: the policy speaks and an environment answers, turn after turn. An episode is one sequence of tokens;
the episode of an agent may consist of several.

An environment is a class of yours, --environment=my_game.py:Guess, in one of two forms. An instance plays one
episode at a time and is reset for the next one. Its methods may be `async def`.

    text    reset(**row)     gets the columns of the row; returns text for the prompt's last message, or None
            step(text)       gets what the policy said; returns (observation, reward, whether it is over)
            reset and step   may also return the values that Gymnasium, or the older gym, has for them
    tools   reset(**row)     does the same; this is TRL's form, and such a class runs in TRL as well
            other methods    are tools: type hints and docstring tell the policy how to call them
    either  get_reward()     if it exists, is called at the end of an episode; None gives no score
            close()          if it exists, or else release(), is called at the end of the run

Functions become tools as well, with or without a class: --tools=my_tools.py:search. Instead of an
environment an agent may play, --agent=my_agent.py:solve (agents.py). A single answer is an episode of one
turn without an environment; train_async.py plays its answers here. Other runs open this file only if they
have an environment, tools or an agent.

    Episode         is one episode. Its generator yields each request to the engine, and calls of your code.
    OpenEpisodes    plays many of them with one engine. Each goes on as soon as its answer or result is there.
    EpisodeSampler  samples a step's episodes in the place of rollout.Sampler. It knows what plays: the
                    environment with its instances and tools, or the agent.
"""
import inspect
import os
import math
from concurrent.futures import FIRST_COMPLETED, wait
from copy import deepcopy
from functools import cached_property, partial
from threading import Semaphore

import numpy as np
from transformers.utils import get_json_schema

from configurator import STARTED_IN, InputError, closing, specs
from options.conversation import Conversation
from options.chat_template import Template, result_of
from options.user_code import (Failed, ThreadPerCall, TimeUp, accepted, as_float, load_from, logging_into,
                               name_of, outcome, shown)
from rollout import Answer, Engine, Request, Rollout, Sampler

in_thread = ThreadPerCall().submit      # calls a function in a thread of its own, and returns a Future


# ------------------------------------------------------------------------------------------------------------
# one episode


class Episode:
    """One episode of an EpisodeSampler.

    row            the row of the data set; its prompt gets the text that reset returns
    conversation   the episode as tokens
    finish_reason  "" as long as the episode goes on; EpisodeSampler.play_jobs lists the other values
    instance       the instance of the environment that plays, or None
    session        the agents.AgentSession of the agent that plays, or None. It sets asking, the Question of
                   the agent that the engine is answering, or None. At the end it also sets conversation, in
                   which it joins the agent's sequences of tokens; the prompt in row, which is that of the
                   sequence with the most sampled tokens; and finish_reason.
    rewards, counts, extra    as in rollout.Rollout
    """
    finish_reason = ""
    instance = None
    session = None
    asking = None

    def __init__(self, sampler, row, first):                    # first: the Request for the first turn
        self.sampler = sampler
        self.row = row
        self.conversation = Conversation(first, sampler.template)
        self.rewards = {}
        self.counts = {"calls": 0, "failures": 0, "seconds": 0.0} if sampler.make else {}
        self.extra = {}

    @property
    def last_token(self):
        """The index of the last sampled token, to which the reward of its turn belongs."""
        return len(self.conversation.logprobs) - 1

    def play(self):
        """Play the episode and return its Rollout. This is a generator.

        It yields a Request when it needs a turn of the policy, and is sent the Answer. It yields a function
        when this has to be called, and is sent (its value, its error or None, the seconds that it took).
        """
        sampler = self.sampler
        try:
            try:
                yield from self._play()
            except (Failed, TimeUp, InputError) as error:
                self._fail(error)
            if not self.conversation.spans:
                # The episode could not begin. A rollout needs an answer, so it gets one, which is not scored.
                yield from self._play_turn()
            if self.finish_reason == "error":
                self.rewards = {self.last_token: math.nan}
            rollout = self._rollout()
            # rewards.Scorer has set score_ended if a reward needs the environment or the agent.
            if sampler.score_ended and self.finish_reason not in ("timeout", "error"):
                sampler.score_ended(rollout, self.session or self.instance)
            return rollout
        finally:
            if id(self.instance) in sampler.opened:              # it was made, and was not discarded
                sampler.idle.append(self.instance)

    def _play(self):
        """Play until the episode ends. Raises Failed, TimeUp or InputError."""
        sampler = self.sampler
        if sampler.session_class:                    # an agent plays until its end, and sets finish_reason
            self.session = sampler.session_class(self)
            yield from self.session.play()
        if "reset" in sampler.methods:
            yield from self._reset()
        while not self.finish_reason:
            yield from self._play_turn()
        if "get_reward" in sampler.methods:
            reward = yield from self.call(self.instance.get_reward)
            if reward is not None:
                self.rewards[self.last_token] += as_float(reward)
            # In the form of tools None says that the episode is not scored, as in TRL. In the form of text
            # the episode keeps what step gave.
            elif "step" not in sampler.methods:
                self.rewards[self.last_token] = math.nan

    def _reset(self):
        """Reset an instance of the environment, and add the text that it returns to the prompt."""
        sampler = self.sampler
        if sampler.idle:
            self.instance = sampler.idle.pop()
        else:
            self.instance = yield from self.call(sampler.make)
            sampler.opened[id(self.instance)] = self.instance
        reset = self.instance.reset
        # log_metric(name, value) puts a value into self.extra. log_extra does the same here, because it logs
        # the value of one episode.
        log_metric = logging_into([self.extra])["log_metric"]
        columns = accepted(reset, deepcopy(self.row), "reset",
                           {"log_extra": log_metric, "log_metric": log_metric})
        observation = yield from self.call(reset, **columns)
        if isinstance(observation, tuple) and len(observation) == 2:
            observation, _ = observation                        # Gymnasium's (observation, info)
        if observation is None:
            return
        if not isinstance(observation, str):
            raise InputError(f"reset returned {shown(observation)}, neither a string nor None")
        prompt = self.row["prompt"]
        # The text of an environment may spell special tokens. `defused` keeps them from acting in the prompt.
        messages = add_text(sampler.messages(prompt), sampler.template.defused(observation))
        ids = sampler.template.opening(messages)
        longest = sampler.settings.max_prompt_length
        if len(ids) > longest:
            raise Failed(f"reset returned so much that the prompt has {len(ids)} tokens, more than "
                         f"max_prompt_length={longest}")
        self.conversation = Conversation(self.conversation.first._replace(ids=ids), sampler.template)
        self.row = self.row | {"prompt": add_text(prompt, observation)}

    def _play_turn(self):
        """Sample a turn and get the reply to it. Set finish_reason if this ends the episode."""
        conversation = self.conversation
        turn = len(conversation.spans) + 1          # its number, from which its seed comes
        answer = yield conversation.request(turn)
        text, message, calls = self.sampler.read_turn(conversation, answer)
        conversation.add_turn(answer, message)
        self.rewards[self.last_token] = 0.0
        if self.finish_reason:                      # the episode could not begin, so nobody replies
            return
        finish_reason = ""
        reply = []
        if "step" in self.sampler.methods:
            returned = yield from self.call(self.instance.step, text)
            observation, reward, finish_reason = read_step(returned)
            self.rewards[self.last_token] = reward
            reply.append({"role": "user", "content": observation})
        elif calls:
            # The conversation has this same dict, and add_reply needs the calls in it.
            message["tool_calls"] = [call for call, _ in calls]
            for call, problem in calls:
                result = yield from self._result(call, problem)
                reply.append(result)
        else:
            finish_reason = "stop"
        if answer.finish_reason == "length":        # the policy was cut off, whatever the environment says
            finish_reason = "length"
        elif not finish_reason and len(conversation.spans) == self.sampler.settings.max_turns:
            finish_reason = "turns"
        elif not finish_reason and not conversation.add_reply(reply):
            finish_reason = "length"                # there was no room for the reply
        self.finish_reason = finish_reason

    def _result(self, call, problem):
        """Call a tool, unless there is a problem with the call, and return the message with its result."""
        name = call["function"]["name"]
        self.counts["calls"] += 1
        try:
            if not problem:
                tool = self.sampler.tool_functions[name]
                if isinstance(tool, str):
                    tool = getattr(self.instance, tool)
                # A tool may change its arguments in place.
                result = yield from self.call(tool, **deepcopy(call["function"]["arguments"]))
                content = yield from self.call(result_of, result)       # as text, which may run user code
        except Failed as error:
            # As in TRL, the policy reads the error's text, or if it has none the name of its class.
            name_of_class, _, text = shown(error.__cause__).partition(": ")
            problem = text or name_of_class
        if problem:
            self.counts["failures"] += 1
            content = {"error": problem}
        return {"role": "tool", "name": name, "tool_call_id": call["id"], "content": content}

    def call(self, function, /, *args, **kwargs):
        """Have a function called, and return its value. Raises Failed or TimeUp."""
        value, error, seconds = yield partial(function, *args, **kwargs)
        self.counts["seconds"] += seconds
        if error:
            raise error
        return value

    def _fail(self, error):
        """End the episode after an error. Raises InputError if the environment did what it must not."""
        turn = len(self.conversation.spans)
        when = f"in turn {turn}" if turn else "before its first turn"
        problem = f"{self.sampler.key}, {when}: {error}; the row is {self.row!r:.300}"
        if isinstance(error, InputError):
            raise InputError(problem) from error
        late = isinstance(error, TimeUp)
        self.counts["problem"] = problem
        self.sampler.failure = error
        self.finish_reason = "timeout" if late and turn else "error"
        # This instance may still be at work, or its reset has failed, so it plays no other episode.
        if late or not turn:
            self.sampler.discard(self.instance)

    def _rollout(self):
        """Return the episode as a Rollout."""
        conversation = self.conversation
        completion = conversation.messages
        if isinstance(self.row["prompt"], str):
            completion = completion[0]["content"]
        rollout = Rollout(np.array(conversation.ids, np.int32), np.array(conversation.spans, np.int32),
                          np.array(conversation.logprobs, np.float32), self.finish_reason,
                          np.array(conversation.sequence_starts, np.int32), self.row, completion,
                          rewards=self.rewards if self.sampler.reward_part else {}, counts=self.counts,
                          extra=self.extra, versions=tuple(conversation.versions.items()),
                          sequence_names=conversation.sequence_names)
        if conversation.kept:
            rollout.keep(conversation.kept)
        return rollout


def add_text(messages, text):
    """Return the messages with a text at the end of the last one, as TRL adds an observation."""
    last = messages[-1]
    return [*messages[:-1], last | {"content": last["content"] + text}]


def read_step(returned):
    """Return (observation, reward, finish_reason) for what an environment's step returned.

    finish_reason is "" if the episode goes on. Raises InputError for values that step must not return.
    """
    if isinstance(returned, tuple) and len(returned) in (3, 4, 5):
        # The fourth of Gymnasium's five values says whether the episode was truncated. The fourth of the
        # older gym's four is its info, a dict or None. If there are only three, False becomes the fourth.
        observation, reward, done, truncated, *_ = [*returned, False]
        if truncated is None or isinstance(truncated, dict):
            truncated = False
        if {type(done), type(truncated)} <= {bool, np.bool_}:
            finish_reason = ""
            if done:
                finish_reason = "stop"
            elif truncated:
                finish_reason = "turns"             # as if it had had max_turns
            if finish_reason or isinstance(observation, str):
                return observation, as_float(reward), finish_reason
    raise InputError(f"step returned {shown(returned)}, not (observation, reward, done), a string, a number, "
                     "and True or False, nor Gymnasium's five values or gym's four")


# ------------------------------------------------------------------------------------------------------------
# what plays


class EpisodeSampler(Sampler):
    """A Sampler of episodes, which an environment, functions as tools, an agent, or none of these plays.

    key             the setting that names what plays, with its value, for messages
    name            the name of the environment's class or of the agent's function
    make            what makes an instance: the environment's class, or `object` if there are only functions.
                    For an agent it is the agent's function. None says that single answers are sampled, so it
                    also tells whether episodes are played.
    session_class   agents.AgentSession if an agent plays, otherwise None
    methods         {name: method} of the first instance
    closer          the name of the method that closes an instance, or ""
    reward_part     the part of the score that the environment gives, called as its class, or "" for none
    tools           the JSON schemas of the tools; None without any, or if step answers the turns or an agent
                    plays
    tool_functions  {name of a tool: a function, or the name of a method}
    template        the Template for these tools, or None for single answers
    opened          {id: instance} of all instances that are not closed
    idle            the opened instances that play no episode now
    failure         the error of the last episode that failed

    Raises InputError if the settings name something that cannot be used.
    """
    session_class = None
    closer = ""
    template = None
    failure = None
    # rewards.Scorer sets this to a function score_ended(rollout, environment). It is called at the end of
    # each episode, while the instance is still as the episode left it. `environment` is the instance, or with
    # an agent the AgentSession, which has the agent's score.
    score_ended = None

    def __init__(self, settings, tokenizer, eos_ids):
        super().__init__(settings, tokenizer, eos_ids)
        self.key = f"tools={settings.tools}"
        self.name = (settings.agent or settings.environment).rpartition(":")[2]
        self.methods = {}
        self.tool_functions = {}
        self.opened = {}
        self.idle = []
        if settings.agent:
            from options.agents import AgentSession    # only runs with an agent need its packages
            self.key = f"agent={settings.agent}"
            self.make = load_from(settings.agent, "agent", "function")
            self.session_class = AgentSession
        elif settings.environment or settings.tools:
            self._make_first()
        if self.make:
            if not settings.chat or tokenizer.chat_template is None:
                raise InputError(f"{self.key} needs chat=True and a tokenizer with a chat template")
            self.template = Template(tokenizer, eos_ids, self.tools)

    def _make_first(self):
        """Make the first instance, and find out which methods and tools it has."""
        s = self.settings
        functions = [load_from(spec, "tools", "function") for spec in specs(s.tools)]
        self.make = object
        if s.environment:
            self.key = f"environment={s.environment}"
            self.make = load_from(s.environment, "environment", "Class")
        closing.callback(self.close)
        instance, error, _ = outcome(self.make, s.call_timeout)
        os.chdir(STARTED_IN)                        # the class may have left this folder; data.py needs it
        if error:
            raise InputError(f"{self.key}: {self.name}() {error}") from error
        self.opened[id(instance)] = instance
        self.idle.append(instance)
        for name, static in inspect.getmembers_static(instance):
            # A property is not read, because this may fail before the first reset.
            if not name.startswith("_") and not isinstance(static, (property, cached_property)):
                method = getattr(instance, name, None)
                if inspect.ismethod(method):
                    self.methods[name] = method
        if s.environment and "reset" not in self.methods:
            raise InputError(f"{self.key} has no method reset; it has {', '.join(self.methods) or 'none'}")
        closers = [name for name in ("close", "release")
                   if name in self.methods and not inspect.signature(self.methods[name]).parameters]
        if closers:
            self.closer = closers[0]
        if self.methods.keys() & {"step", "get_reward"}:
            self.reward_part = self.name
        if "step" not in self.methods:
            self._find_tools(functions, {"reset", "get_reward", *closers})
        elif functions:
            raise InputError(f"tools={s.tools}: {self.key} has a method step, which reads no calls")

    def _find_tools(self, functions, no_tools):
        """Set tools: the functions, and as in TRL all bound methods whose names are not among no_tools."""
        # tool_functions has only the name of a method, because each instance has a method of its own.
        names = [name for name in self.methods if name not in no_tools]
        tools = functions + [self.methods[name] for name in names]
        tool_names = [name_of(tool) for tool in tools]
        self.tool_functions = dict(zip(tool_names, functions + names))
        if len(self.tool_functions) < len(tools):
            raise InputError(f"{self.key}: two tools have the same name: {', '.join(tool_names)}")
        try:
            # Templates such as Llama's speak of tools if the list is there, even if it is empty.
            self.tools = [get_json_schema(tool) for tool in tools] or None
        except Exception as error:                  # its text names the tool
            raise InputError(f"{self.key}: a tool needs type hints and a docstring that explains its "
                             f"arguments: {shown(error)}") from error

    def discard(self, instance):
        """Close an instance in a thread, by close() or else by release(), so that it plays no other episode.

        Return a Future. Nothing happens if there is no such method, or if instance is None.
        """
        self.opened.pop(id(instance), None)
        # If instance is None, or closer is "", getattr returns `object`, and to call that does nothing.
        return in_thread(outcome, getattr(instance, self.closer, object))

    def close(self):
        """Close all instances, within ten seconds."""
        wait([self.discard(instance) for instance in [*self.opened.values()]], 10)

    def messages(self, prompt):
        """Return the messages before the first turn, for a prompt of the data set."""
        if isinstance(prompt, str) or prompt[-1]["role"] == "assistant":
            raise InputError(f"{self.key} needs prompts that are lists of messages, the last one not the "
                             f"assistant's, unlike {prompt!r:.200}")
        if self.settings.system_prompt:
            return [{"role": "system", "content": self.settings.system_prompt}, *prompt]
        return prompt

    def read_turn(self, conversation, answer):
        """Return (text, message, calls) of an Answer to a conversation.

        text is all of its text. message and calls are what Template.read finds in it; an answer that was cut
        off has no calls.
        """
        text = self.text_of(answer.ids)
        if not conversation.template or answer.finish_reason == "length":
            return text, {"role": "assistant", "content": text}, []
        sampled = answer.ids
        if sampled[-1] not in self.eos_ids:
            sampled = text                          # it ends before the stop string that has ended the turn
        message, calls = conversation.template.read(conversation.ids, sampled, text)
        return text, message, calls

    def trial(self, prompts):
        """Play two episodes of one made-up turn, so that what is broken shows before any training.

        prompts: one or two data.Prompts. Returns the two Rollouts. Raises InputError if the environment or
        the chat template cannot be used.
        """
        if not self.make:
            return super().trial(prompts)
        if not self.settings.agent:                 # an agent writes messages of its own
            self.template.check(self.messages(prompts[0].row["prompt"]))
        turn = self.tokenizer("Answer: 0", add_special_tokens=False).input_ids + self.eos_ids[:1]
        jobs = [(prompt.row, Request(None, prompt.ids, 0, max_tokens=len(turn)))
                for prompt in (prompts * 2)[:2]]                # a single prompt is played twice
        rollouts = OpenEpisodes(self, TrialEngine(turn)).play(jobs)
        for r in rollouts:
            problem = r.counts.get("problem")
            # There is no room for a second turn. An agent that has asked once may fail because of that.
            if problem and not r.counts.get("requests"):
                raise InputError(problem) from self.failure
        return rollouts

    def play(self, engine, jobs, prompts):
        if not self.make and not engine.versions:               # no other requests are in flight
            return super().play(engine, jobs, prompts)
        if self.make and any(prompt.begun for prompt in prompts):
            raise InputError(f"{self.key} plays, and no prompt may have the beginning of an answer")
        rollouts = self.play_jobs(engine, jobs)
        return rollouts if self.make else self.with_texts(rollouts, prompts)

    def play_jobs(self, engine, jobs):
        """Return a Rollout for each of these jobs. A job is a row and the Request for the first turn, as
        rollout.jobs_for makes them. Its max_tokens counts all tokens after the prompt.

        The finish_reason of a Rollout is one of these; a single answer has one of the first two:
            stop      the environment ended the episode, or the policy by an answer without a call
            length    a turn was cut off, or there was no room for a reply
            turns     the episode had max_turns, or the environment truncated it
            timeout   a call of the environment took longer than call_timeout
            error     the environment raised an error, or the episode could not begin; it gets no score

        Raises InputError if an environment returns what it must not.
        """
        return engine.serve(jobs, OpenEpisodes(self, engine).play)


class TrialEngine(Engine):
    """An engine that answers each Request with the same made-up turn, given as its tokens."""

    def __init__(self, turn):
        super().__init__()
        self.turn = turn

    def step(self):
        request = self.added.pop(0)
        return [Answer(request.name, self.turn, [0.0] * len(self.turn), "stop")]


# ------------------------------------------------------------------------------------------------------------
# many episodes


class OpenEpisodes:
    """The episodes that are being played with an engine. They may be added at any time, in groups.

    The engine may also sample for other OpenEpisodes.

    workers    a semaphore: how many more calls may run in threads
    waiting    pairs (number, job) of the episodes that have not begun
    playing    {number: (the Episode, the generator that its play() returned)}
    calls      {Future of a call in a thread: the number of the episode that waits for it}
    rollouts   {number: the Rollout of an episode that has ended}
    groups     {key: the numbers of the episodes that were added under this key}
    """

    def __init__(self, sampler, engine):
        self.sampler = sampler
        self.settings = sampler.settings
        self.engine = engine
        self.workers = Semaphore(self.settings.call_workers)
        self.waiting = []
        self.playing = {}
        self.calls = {}
        self.rollouts = {}
        self.groups = {}

    def add(self, key, jobs):
        """Add a group of episodes, one for each job.

        key: the key under which step returns the group's Rollouts when all of its episodes have ended.
        """
        self.groups[key] = [next(self.engine.numbers) for _ in jobs]
        self.waiting += zip(self.groups[key], jobs)

    def play(self, jobs):
        """Play these jobs, if no others are open. Return their Rollouts, or none if a signal has come."""
        self.add("all", jobs)
        with self.engine.progress():
            while "all" in self.groups:
                complete = self.step()
        return complete["all"]

    def step(self):
        """Take a step of the engine if an episode waits for one; return {key: Rollouts} of complete groups.

        After a signal all groups are returned, without any Rollouts, so that nobody goes on waiting for them.
        """
        engine = self.engine
        if engine.signalled:
            interrupted = {key: [] for key in self.groups}
            self.groups.clear()
            return interrupted
        # No more episodes are played at a time than there may be instances.
        while self.waiting and len(self.playing) < (self.settings.max_environments or math.inf):
            number, job = self.waiting.pop(0)
            episode = Episode(self.sampler, *job)
            self.playing[number] = episode, episode.play()
            self._go_on(number)
        # The client of an agent may have left, so that nobody waits any more for what the engine samples.
        engine.abort([number for number, (episode, _) in self.playing.items()
                      if episode.asking and episode.asking.future.cancelled()])
        if self._engine_is_needed() and not engine.signalled:
            self._step_engine()
        # While the engine is needed, only the calls that have ended are looked at. Otherwise the first call
        # to end is waited for.
        patience = 0 if self._engine_is_needed() else None
        for call in wait(self.calls, patience, FIRST_COMPLETED).done:
            self._go_on(self.calls.pop(call), call.result())
        complete = {}
        for key, numbers in [*self.groups.items()]:
            if all(number in self.rollouts for number in numbers):
                complete[key] = [self.rollouts.pop(number) for number in numbers]
                del self.groups[key]
        return complete

    def abort(self):
        """Give up all episodes that have not ended, and the groups that are not complete."""
        for number, (episode, play) in self.playing.items():
            # An instance that is still at work plays no other episode.
            if number in self.calls.values():
                self.sampler.discard(episode.instance)
            play.close()
        # engine.versions has an entry for each request that is not answered yet.
        unanswered = self.playing.keys() & self.engine.versions.keys()
        for collection in (self.waiting, self.playing, self.calls, self.rollouts, self.groups):
            collection.clear()
        self.engine.abort(unanswered)
        # The next steps of the engine answer them: vLLM with nothing, and HFEngine, which cannot abort,
        # in full.
        while unanswered & self.engine.versions.keys() and not self.engine.signalled:
            self._step_engine()

    def _engine_is_needed(self):
        """Return whether an episode waits for the engine. Those in calls wait for a call instead."""
        return len(self.playing) > len(self.calls)

    def _step_engine(self):
        """Take a step of the engine, and go on with the episodes that it answers, whoever plays them."""
        for answer in self.engine.step():
            open_episodes = self.engine.asked_by.pop(answer.name)
            if answer.name in open_episodes.playing:            # otherwise the episode was given up
                open_episodes._go_on(answer.name, answer)

    def _go_on(self, number, value=None):
        """Send an episode a value, and play it until it ends or waits for the engine or a thread."""
        _, play = self.playing[number]
        while not self.engine.signalled:
            try:
                work = play.send(value)                         # a Request, or a function to call
            except StopIteration as end:
                self.rollouts[number] = end.value
                del self.playing[number]
                return
            if isinstance(work, Request):
                self.engine.asked_by[number] = self
                self.engine.add(work._replace(name=number))
                return
            if self.settings.call_workers:
                self.calls[in_thread(self._call, work)] = number
                return
            value = outcome(work, self.settings.call_timeout)

    def _call(self, function):
        """Return user_code.outcome of a function, or TimeUp after call_timeout seconds.

        This method runs in a thread that waits for a worker, and then for the result until the time is up.
        The function runs in another thread. Nothing can end a thread, so a call that takes too long goes on
        there, and its result is dropped.
        """
        seconds = self.settings.call_timeout
        with self.workers:
            try:
                return in_thread(outcome, function, seconds).result(seconds or None)
            except TimeoutError:
                return None, TimeUp(), seconds
