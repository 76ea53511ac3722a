"""
Schedules of train_async.py by seed: a whole run in one process, in which a seed decides who goes on next.

    python tests/schedules.py                           # 10,000 schedules, in minutes
    python tests/schedules.py --first=123 --count=1     # one of them, with what happened in it
    python tests/schedules.py --faults                  # after how many schedules is each fault of FAULTS found?

train_async.py, options/placement.py, options/episodes.py, rollout.Engine, the serving of VLLMEngine, and runtime/run.py are
the real ones. These are stand-ins: torch.distributed, threads, queues, signals, the clock and the disk; the
model, whose weights are one number; what an engine's step samples; rewards, environments and agents.

Every rank, every thread that listens and every call of an environment is an Actor. Only one of them runs at a
time, until it waits for something or pauses, and then the seed chooses among those that can go on. The seed
also decides how many trainers and engines there are, their settings, who is slow, and what happens to them:
signals, kills, a reward, an update or a disk that fails. A schedule starts a run up to three times, and each
start resumes from what the one before has saved. The last one is left in peace.

The weights of a step are a hash of the weights before it and of the rollouts that trained them, and a token is
a hash of the weights, of its seed and of its place. So an update or a token that is not what it should be is
seen at once. What holds in every schedule:

    rollouts    A step is trained once, on the rollouts of its own prompts, in order. Each token is the one that
                the weights of its version sample, and that version is the one that max_staleness prescribes.
                In flight it is at most max_staleness steps old.
    weights     An engine loads every tensor once, all of the same update, and of the version that it names.
                The ranks of an engine take the same steps with the same weights.
    evaluation  All held-out rollouts are sampled with the weights of their step.
    messages    The memory of a message stays until it has been taken, and nothing is left over at the end.
    ends        Somebody can go on until all have ended. A run that nothing disturbs ends with code 0 and its
                last checkpoint, and so does one with a signal, after the step in which the signal comes.
    resume      A run goes on with the newest checkpoint. What was sampled ahead is neither lost nor sampled
                again, unless a setting has changed, and all steps are trained in the end.
"""
import argparse
import builtins
import contextlib
import functools
import json
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
import types
import weakref
import zlib
from collections import deque
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from runtime import distributed         # before torch: it sets environment variables that torch reads
import numpy as np
import torch

import configurator
import data
import rollout
import vllm_engine
from runs import announced
from runtime import checkpoint, metrics
from options.user_code import Failed, TimeUp
from weights import checksum

MANY = 100_000                  # a schedule with that many switches goes round in circles
END = 1                         # the token that ends an answer
REPLY = 9                       # the tokens of an environment


class Fault(Exception):
    """Something that must not happen in any schedule has happened."""


class Gone(BaseException):
    """Unwinds an actor whose process has ended."""


def require(ok, text, *values):
    if not ok:
        raise Fault(" ".join(map(str, [text, *values])))


def hashed(*values):
    return zlib.crc32(repr(values).encode())


# ------------------------------------------------------------------------------------------------------------
# who goes on: actors, processes, and the world in which they are


def locked():
    lock = threading.Lock()
    lock.acquire()
    return lock


class Actor:
    """A thread of one of the run's processes. ready() says whether it can go on; where: what it waits for."""

    def __init__(self, process, name, function):
        self.process = process
        self.name = name
        self.function = function
        self.ready = bool
        self.where = "its start"
        self.speed = process.speed
        self.patient = False                # whether it lets all others go first
        self.turn = locked()

    def __repr__(self):
        return f"{self.process.name} {self.name}"


class Process:
    """A rank. code: how it has ended, or None while it lives."""

    def __init__(self, world, number, environ):
        self.world = world
        self.name = f"rank{number}"
        self.environ = environ
        self.speed = world.random.choice([1.0, 1.0, 1.0, 0.2, 0.02])
        self.code = None
        self.handlers = {}
        self.signals = []                   # those that its main thread has not handled
        self.ready = False                  # whether it has begun so far that it knows what a signal means
        self.trains = False
        self.signalled = False
        self.step = 0                       # that a trainer makes
        self.calls = 0                      # of the reward
        self.group = None                   # the collectives of its role

    def end(self, code):
        if self.code is None:
            self.code = code
            self.world.note(f"{self.name} ends with code {code}")

    def signal(self, number):
        """What the operating system does with a signal."""
        handler = self.handlers.get(number)
        if number == signal.SIGKILL or handler is None:
            self.end(-number)
        elif handler != signal.SIG_IGN:
            self.signals.append(number)     # its main thread calls the handler as soon as it goes on


class World:
    """One start of a run: its processes, and who of them goes on."""

    def __init__(self, plan, history, rng):
        self.plan = plan
        self.history = history
        self.random = rng
        self.actors = []
        self.processes = []
        self.current = None
        self.fault = ""
        self.switches = 0
        self.digest = 0                     # of all choices
        self.over = locked()
        self.groups = {}
        self.strict = rng.random() < 0.5    # whether a sender waits until its message has been taken
        self.fine = rng.random() < 0.15     # whether actors may be switched at any line of options/placement.py
        self.endings = []                   # texts: what has ended this start, apart from its last step
        self.last_step = None               # with which a run that was asked to stop may end at most
        self.events = [dict(event) for event in plan.events]

    def note(self, text):
        self.history.notes.append(text)

    # ------------------------------------------------------------ threads that take turns

    def spawn(self, process, name, function):
        actor = Actor(process, name, function)
        actor.ready = lambda: True
        self.actors.append(actor)
        threading.Thread(target=self._live, args=(actor,), daemon=True).start()
        return actor

    def run(self):
        """Let the actors take turns until all have ended."""
        self.current = self._choose()
        self.current.turn.release()
        self.over.acquire()

    def _live(self, actor):
        actor.turn.acquire()
        process = actor.process
        try:
            if process.code is None:
                if self.fine:
                    sys.settrace(self._trace)
                actor.function()
        except Gone:
            pass
        except Fault as fault:
            self.fail(f"{actor}: {fault}")
        except SystemExit as end:
            process.end(end.code)
        except Exception as error:
            self._failed(process, error)
        finally:
            sys.settrace(None)
        self.actors.remove(actor)
        if self.actors:
            self.current = self._choose()
            self.current.turn.release()
        else:
            self.over.release()

    def _failed(self, process, error):
        """End a process whose main thread has raised an error, as Python does."""
        try:
            distributed.failed(type(error), error, error.__traceback__)
            self.note(f"{process.name}: {error!r}")
            process.end(1)
        except Gone:
            pass

    def _trace(self, frame, event, argument):
        if os.path.basename(frame.f_code.co_filename) == "placement.py":
            return self._trace_line

    def _trace_line(self, frame, event, argument):
        if event == "line" and self.random.random() < 0.1:
            self.wait(lambda: True, f"line {frame.f_lineno}")
        return self._trace_line

    def wait(self, ready, where):
        """Let others go on, until this actor can and is chosen."""
        actor = self.current
        actor.ready = ready
        actor.where = where
        process = actor.process
        if process.code is None:
            self.switches += 1
            if self.switches > MANY:
                self.fail("the run goes round in circles")
            self._happen()
            chosen = self._choose()
            if chosen is not actor:
                self.current = chosen
                chosen.turn.release()
                actor.turn.acquire()
        if process.code is not None:
            raise Gone
        while process.signals and actor.name == "main":
            number = process.signals.pop(0)
            self.note(f"{process.name} handles signal {number} in step {process.step}")
            process.handlers[number](number, None)
            self.last_step = self.last_step or process.step + 1

    def sleep(self, seconds):
        """Wait longer than any message takes: until nobody else can go on."""
        self.current.patient = True
        self.wait(lambda: True, "a sleep")
        self.current.patient = False

    def pause(self, where):
        if self.random.random() < 0.3:
            self.wait(lambda: True, where)

    def _choose(self):
        ready = []
        total = 0.0
        for actor in self.actors:
            if actor.process.code is not None:
                return actor                                    # it unwinds
            if actor.ready() and not actor.patient:
                total += actor.speed
                ready.append(actor)
        if not ready:
            ready = [actor for actor in self.actors if actor.patient]
            total = len(ready)
        if not ready:
            self.fail("nobody can go on: " + "; ".join(
                f"{actor} waits in {actor.where}" for actor in self.actors))
            return self.actors[0]
        if self.random.random() < 0.005:
            self.random.choice(self.actors).speed = self.random.choice([1.0, 0.2, 0.02])
        place = self.random.random() * total
        for actor in ready:
            place -= actor.speed
            if place <= 0:
                break
        self.digest = zlib.crc32(b"%d" % self.actors.index(actor), self.digest)
        return actor

    def fail(self, text):
        self.fault = self.fault or text
        for process in self.processes:
            process.end(-9)

    # ------------------------------------------------------------ what happens to the run

    def _happen(self):
        for event in [*self.events]:
            if self.history.made >= event["step"]:
                event["delay"] -= 1
                if event["delay"] < 0:
                    self.events.remove(event)
                    self._signal(event)

    def _signal(self, event):
        """Send the signal of an event to the ranks that it is for."""
        ranks = [self.processes[number] for number in event["ranks"]]
        alive = [process for process in ranks if process.code is None]
        self.note(f"signal {event['signal']} to {[process.name for process in alive]}, after {self.switches}")
        for process in alive:
            number = event["signal"]
            again = number == signal.SIGINT and process.signalled
            if number == signal.SIGKILL or not process.ready or (again and process.trains):
                self.endings.append("died")
            elif process.trains:
                self.endings.append("stopped")
            process.signalled = True
            process.signal(number)

    def breaks(self, kind, number):
        """Whether this kind of thing fails now, the number-th time. On one rank only."""
        if self.plan.failure == (kind, number):
            self.endings.append("failed")
            self.plan.failure = None
            self.note(f"{kind} {number} fails")
            return True
        return False


# ------------------------------------------------------------------------------------------------------------
# stand-ins for torch.distributed, threads, queues and signals


class Work:
    """A transfer. wait() returns when ready() holds, after it has called finish()."""

    def __init__(self, world, ready, finish, where):
        self.world = world
        self.ready = ready
        self.finish = finish
        self.where = where

    def wait(self, timeout=None):
        self.world.wait(self.ready, self.where)
        self.finish()


def lost(process):
    raise RuntimeError(f"[gloo/transport/tcp/pair.cc] Connection closed by peer: {process.name}")


class Group:
    """A process group. `members` are its processes by rank, as soon as they have entered it."""

    def __init__(self, world, name, size):
        self.world = world
        self.name = name
        self.size = size
        self.members = {}
        self.counts = [0] * size            # of each rank: the collectives that it has entered
        self.meetings = {}                  # {number of a collective: (its kind, {rank: value})}
        self.stream = []                    # what the first rank has broadcast over a wire
        self.heard = [0] * size             # of each rank: how much of it
        self.mail = [deque() for _ in range(size)]

    def enter(self, rank):
        self.members[rank] = self.world.current.process
        self.world.wait(lambda: len(self.members) == self.size or self.broken(), f"the start of {self.name}")
        if len(self.members) < self.size:
            lost(self.broken()[0])

    def broken(self):
        return [process for process in self.world.processes if process.code is not None]

    # ------------------------------------------------------------ collectives of Python objects

    def meet(self, rank, kind, value, root=None, silent=False):
        """Enter a collective with a value; return the values of all, or that of the root. silent: whether
        nobody notices that a rank has ended, as with the shared memory of a vLLM engine."""
        number = self.counts[rank]
        self.counts[rank] += 1
        first_kind, values = self.meetings.setdefault(number, (kind, {}))
        require(kind == first_kind, f"{self.name}: a rank is in {kind}, another in {first_kind}, as their", number)
        values[rank] = value
        waits = root is None or (rank == root and self.world.strict and not silent)
        needed = range(self.size) if waits else [root]
        missing = functools.partial(self._missing, needed, values)

        def ready():
            missing_ranks = missing()
            ended = not silent and any(self.members[r].code is not None for r in missing_ranks)
            return not missing_ranks or ended

        self.world.wait(ready, f"{kind} of {self.name}")
        for r in missing():
            lost(self.members[r])
        return [values[r] for r in sorted(values)] if root is None else values[root]

    def _missing(self, needed, values):
        return [r for r in needed if r not in values]


class Wire:
    """ProcessGroupGloo: tensors from rank to rank, in order."""

    def __init__(self, world, name, rank, size):
        self.world = world
        self.rank = rank
        self.group = world.groups.setdefault(name, Group(world, name, size))
        self.group.enter(rank)

    def broadcast(self, tensors, root=0):
        group = self.group
        if self.rank == 0:
            require(torch.is_tensor(tensors), "what is broadcast is no tensor")
            group.stream.append(tensors.clone())
            number = len(group.stream)
            others = range(1, group.size)

            def dead():
                return [r for r in others if group.heard[r] < number and group.members[r].code is not None]

            def ready():
                heard = all(group.heard[r] >= number for r in others)
                return not self.world.strict or heard or dead()

            return Work(self.world, ready, lambda: [lost(group.members[r]) for r in dead()], "a broadcast")
        number = group.heard[self.rank]
        [target] = tensors if isinstance(tensors, list) else [tensors]
        first = group.members[0]

        def take():
            if len(group.stream) == number:
                lost(first)
            require(group.heard[self.rank] == number, "two broadcasts are heard at the same time")
            group.heard[self.rank] += 1
            fill(target, group.stream[number])

        return Work(self.world, lambda: len(group.stream) > number or first.code is not None, take,
                    "what is broadcast")

    def send(self, tensors, to, tag):
        [tensor] = tensors
        # A message lies in the sender's memory until it has been taken, unless the operating system copies it.
        kept = None if self.world.strict else tensor.clone()
        entry = {"tensor": weakref.ref(tensor), "copy": kept, "taken": False}
        self.group.mail[self.rank].append(entry)
        receiver = self.group.members[to]
        if receiver.code is not None:
            lost(receiver)

        def ready():
            return entry["taken"] or kept is not None or receiver.code is not None

        def finish():
            if not (entry["taken"] or kept is not None):
                lost(receiver)

        return Work(self.world, ready, finish, "a send")

    def recv(self, tensors, srcRank, tag):
        [target] = tensors
        mail = self.group.mail[srcRank]
        sender = self.group.members[srcRank]

        def take():
            if not mail or (self.world.strict and sender.code is not None):
                lost(sender)
            entry = mail.popleft()
            tensor = entry["tensor"]() if entry["copy"] is None else entry["copy"]
            require(tensor is not None, "the memory of a message was freed before it was taken")
            entry["taken"] = True
            fill(target, tensor)

        return Work(self.world, lambda: mail or sender.code is not None, take, f"a message of {sender.name}")


def fill(target, tensor):
    require((target.shape, target.dtype) == (tensor.shape, tensor.dtype), "a message has another size")
    target.copy_(tensor)


class Queue:
    def __init__(self, world):
        self.world = world
        self.items = deque()

    def put(self, item):
        self.items.append(item)

    def get(self):
        self.world.wait(lambda: self.items, "a queue")
        return self.items.popleft()


class Future:
    """What a call in a thread returns. A call that is waited for with a timeout may be too late."""

    def __init__(self, world):
        self.world = world
        self.values = []

    def result(self, timeout=None):
        late = timeout and self.world.random.random() < 0.03
        self.world.wait(lambda: self.values or late, "a call")
        if not self.values:
            raise TimeoutError
        return self.values[0]


class Semaphore:
    def __init__(self, world, count):
        self.world = world
        self.count = count

    def __enter__(self):
        self.world.wait(lambda: self.count > 0, "a worker")
        self.count -= 1

    def __exit__(self, *_):
        self.count += 1


# ------------------------------------------------------------------------------------------------------------
# stand-ins for the model, engines, rewards and what plays


def sampled_token(value, seed, place, temperature):
    """The token that weights of this value sample; one in seven is END."""
    return 1 + hashed(value, seed, place, temperature) % 7


class Policy:
    """A model whose weights are the number `value`, which float32 holds exactly."""
    adapters = None

    def __init__(self, value):
        self.value = value

    def parameters(self):
        return []

    def begin_training(self, _):
        pass


class SimulatedEngine(vllm_engine.VLLMEngine):
    """A VLLMEngine whose steps sample by a hash."""

    def __init__(self, world, process, settings, value):
        rollout.Engine.__init__(self)
        self.world = world
        self.process = process
        self.aborted = []
        self.in_flight = settings.in_flight
        self.group = process.tensor_parallel
        self.max_length = settings.max_prompt_length + settings.max_completion_length
        self.value = value
        self.open = {}                      # {name: (Request, sampled tokens, logprobs)}
        self.steps = 0
        self.whole = world.plan.whole       # whether a step samples whole answers, as that of HFEngine does
        self.seats = world.plan.seats       # for how many requests a step samples at most

    def sampled_counts(self):
        return {name: len(tokens) for name, (_, tokens, _) in self.open.items() if tokens}

    def _step(self, requests, aborted):
        """Sample a token for each open request, or a whole answer. If ranks share the engine, a collective."""
        distributed.watchdog.moved()
        for request in requests:
            self.open[request.name] = request, [], []
        for name in aborted:
            self.open.pop(name)
        answers = [self._answer(name, [], [], "abort") for name in aborted]
        if self.group.world_size > 1:
            self.process.group.meet(self.process.rank, "all_reduce", 0)
        for name, (request, tokens, logprobs) in [*self.open.items()][:self.seats]:
            finish_reason = ""
            while not finish_reason:
                tokens.append(sampled_token(self.value, request.seed, len(tokens), request.temperature))
                logprobs.append(float(self.value))
                if tokens[-1] == END:
                    finish_reason = "stop"
                elif len(tokens) == request.max_tokens:
                    finish_reason = "length"
                if not self.whole:
                    break
            if finish_reason:
                del self.open[name]
                answers.append(self._answer(name, tokens, logprobs, finish_reason))
        self._same_on_all_ranks([(name, tuple(tokens)) for name, (_, tokens, _) in self.open.items()])
        return answers

    def _same_on_all_ranks(self, state):
        steps = self.world.groups.setdefault(("steps", self.group.name), [])
        state = self.version, self.value, state
        if len(steps) == self.steps:
            steps.append(state)
        require(steps[self.steps] == state, "the ranks of an engine differ in step", self.steps)
        self.steps += 1

    def _load(self, named_tensors):
        named_tensors = [*named_tensors]
        names = [name for name, _ in named_tensors]
        expected = [f"weight{i}" for i in range(self.world.plan.tensors)]
        require(names == expected, f"version {self.version} comes with {len(names)} tensors of", len(expected))
        values = {int(x) for _, tensor in named_tensors for x in tensor.tolist()}
        require(values == {self.world.history.values.get(self.version)},
                f"version {self.version} was announced, and other weights were loaded:", values)
        [self.value] = values
        self.world.note(f"{self.process.name} loads version {self.version}")
        return {name: checksum(tensor) for name, tensor in named_tensors}

    def _sleep(self):
        pass


class Tokenizer:
    pad_token_id = -1

    def decode(self, ids):
        return " ".join(map(str, ids))


class Template:
    """Replies have a length that depends on what was said."""
    tools = None

    def defused(self, text):
        return text

    eos_ids = ()

    def opening(self, messages):
        content = messages[-1]["content"]
        return prompt_ids(int(content.split()[0])) + [REPLY] * content.count("!")

    def between(self, message, replies, ended):
        return [REPLY] * (1 + hashed(message["content"]) % 3)

    def read(self, ids, sampled, text):
        return {"role": "assistant", "content": text}, []


def prompt_ids(number):
    return [100 + number] + [2] * (number % 4)


class Game:
    """An environment that now and then fails, takes too long or is over, depending on what was said."""

    def reset(self, number, **row):
        if hashed(number) % 17 == 0:
            raise OSError("no room")
        return " !" if number % 2 else None

    def step(self, text):
        kind = hashed(text) % 23
        if kind == 0:
            raise KeyError("an error")
        if kind == 1:
            raise TimeUp
        return "heard", 0.5, kind < 9


class Session:
    """An agent that asks up to three times, and sometimes leaves before it is answered."""

    def __init__(self, world, episode):
        self.world = world
        self.episode = episode

    def play(self):
        episode = self.episode
        seed = episode.conversation.first.seed
        episode.extra["turns"] = []
        for turn in range(1, 2 + hashed(seed) % 3):
            future = Client(hashed(seed, turn) % 8)
            episode.asking = SimpleNamespace(future=future)
            answer = yield episode.conversation.request(turn)
            episode.asking = None
            if future.cancelled():
                continue
            require(answer.ids, "an agent waits and gets no answer")
            episode.extra["turns"].append(turn)
            text, message, _ = episode.sampler.read_turn(episode.conversation, answer)
            episode.conversation.add_turn(answer, message)
            if not episode.conversation.add_reply([{"role": "user", "content": text}]):
                break
        if not episode.conversation.spans:
            episode.extra["turns"] = [1]
            raise Failed("never waited for an answer")
        episode.finish_reason = "stop"


class Client:
    """The Future of an agent's question. The agent leaves after `patience` looks at it; 4 and more are never."""

    def __init__(self, patience):
        self.patience = patience if patience < 4 else 10 ** 6

    def cancelled(self):
        self.patience -= 1
        return self.patience < 0


class Prompts(data.Prompts):
    """Some of the rows are too long. number: what the prompt's first token says."""

    def __init__(self, settings, size):
        rows = [{"prompt": [{"role": "user", "content": f"{n}"}], "number": n} for n in range(size)]
        super().__init__(None, rows, settings)

    def encoded(self, numbers):
        return [data.Prompt(self.rows[n], prompt_ids(n), n) for n in numbers]


class History:
    """What the run has come to, over all of its starts, and what it has to be.

    values     {version: the weights}
    versions   {step: the lowest and the highest version that may sample for it}
    disk       {step: a checkpoint}
    made       how many steps this start has made
    starts     how often the run was started
    notes      what happened, as lines
    """

    def __init__(self):
        self.values = {0: 1234567}
        self.versions = {}
        self.disk = {}
        self.made = 0
        self.starts = 0
        self.notes = []

    def begin(self, s):
        """Find out which versions have to sample for which steps of a start with these settings."""
        self.made = 0
        self.starts += 1
        first = max(self.disk, default=0)
        kept = {}
        if first:
            saved = self.disk[first]
            before = saved["settings"]
            if not before["in_flight"] and all(before[key] == getattr(s, key) for key in (
                    "max_staleness", "temperature", "max_completion_length", "max_turns")):
                end = min(first + before["max_staleness"], before["max_steps"])
                kept = {t: saved["versions"][t] for t in range(first, end)}
        self.values = {v: value for v, value in self.values.items() if v <= first}
        self.versions = {}
        for t in range(first, s.max_steps):
            lowest = max(first, t - s.max_staleness)
            self.versions[t] = kept.get(t, (lowest, t if s.in_flight else lowest))
        return first


def check_rollouts(history, s, rollouts, prompts, n, name, versions):
    """Require that these are n rollouts for each of the prompts, in order, sampled by one of the versions."""
    require(len(rollouts) == len(prompts) * n, f"{name}: {len(rollouts)} rollouts of", len(prompts) * n)
    for i, r in enumerate(rollouts):
        prompt = prompts[i // n]
        require(r.ids[0] == 100 + prompt.number, f"{name}: rollout {i} answers prompt {r.ids[0] - 100}, not",
                prompt.number)
        require(r.row["number"] == prompt.number and not np.isnan(r.score), f"{name}: rollout {i} has no row")
        starts, by = zip(*r.versions)
        lengths = np.diff(starts, append=len(r.logprobs))
        version_of = np.repeat(by, lengths).tolist()
        require(set(version_of) <= {*range(versions[0], versions[1] + 1)},
                f"{name}: rollout {i} was sampled with versions {version_of}, not", versions)
        c = 0
        seed = zlib.crc32(f"{s.seed} {name} {i // n}".encode()) + i % n
        turns = r.extra.get("turns", range(1, 1 + len(r.spans)))
        require(len(turns) == len(r.spans), f"{name}: rollout {i} has other turns")
        for (start, end), turn in zip(r.spans, turns):
            turn_seed = seed if turn == 1 else zlib.crc32(f"{seed} {turn}".encode())
            for place, token in enumerate(r.ids[start:end].tolist()):
                value = history.values[version_of[c]]
                require(token == sampled_token(value, turn_seed, place, s.temperature) and
                        r.logprobs[c] == value, f"{name}: rollout {i}, token {c} is by other weights")
                c += 1
        require(c == len(r.logprobs), f"{name}: rollout {i} has other tokens")
        if not r.counts:                                        # a single answer
            whole = r.ids[-1] == END or len(r.ids) == r.spans[0, 0] + s.max_completion_length
            require(whole, f"{name}: rollout {i} has no end")


# ------------------------------------------------------------------------------------------------------------
# the modules that a process of the run finds


class Modules:
    """The real modules with stand-ins in them, and the script, for all processes of a World.

    fault: one of FAULTS, which is put into the text of a file.
    """

    def __init__(self, fault=None):
        self.world = None
        self.fault = fault
        self.placement = self.copy_of("options.placement")
        self.episodes = self.copy_of("options.episodes")
        self.run = self.copy_of("runtime.run")
        self.script = compile(self.text("train_async.py"), "train_async.py", "exec")
        self.keys = None
        self._fill()

    def text(self, path):
        text = (ROOT / path).read_text()
        if self.fault and self.fault[1] == path:
            _, _, old, new = self.fault
            assert text.count(old) == 1, f"{path} has {text.count(old)} times {old!r}"
            text = text.replace(old, new)
        return text

    def copy_of(self, name):
        path = name.replace(".", "/") + ".py"
        module = types.ModuleType(name)
        module.__file__ = path
        exec(compile(self.text(path), path, "exec"), vars(module))
        return module

    @property
    def process(self):
        return self.world.current.process

    def _fill(self):
        """Put stand-ins in the place of what this file does not simulate."""
        self.torch_distributed = dist = SimpleNamespace(
            rendezvous=lambda _: iter([("", int(self.process.environ["RANK"]), len(self.world.processes))]),
            PrefixStore=lambda name, store: name, HashStore=None,
            ProcessGroupGloo=lambda name, rank, size, _: Wire(self.world, name, rank, size),
            get_rank=lambda: self.process.rank, get_world_size=lambda: self.process.group.size,
            all_gather_object=self._gather, broadcast_object_list=self._broadcast,
            destroy_process_group=lambda: None)
        no_signal = SimpleNamespace(
            SIGHUP=signal.SIGHUP, SIGINT=signal.SIGINT, SIG_IGN=signal.SIG_IGN, getsignal=lambda number: None,
            signal=lambda number, handler: self.process.handlers.update({number: handler}))

        def tensors(policy):
            for i in range(self.world.plan.tensors):
                if i % 8 == 0:
                    distributed.gathered([0])
                yield f"weight{i}", torch.full((1 + i % 2,), float(policy.value))

        vars(self.placement).update(
            engine_weights=lambda policy, *_: announced(tensors(policy)), dist=dist, signal=no_signal, os=Environ(self), atexit=SimpleNamespace(register=lambda *_: None),
            queue=SimpleNamespace(SimpleQueue=lambda: Queue(self.world)),
            sys=SimpleNamespace(excepthook=lambda *_: None, exc_info=sys.exc_info),
            threading=SimpleNamespace(Thread=self._thread, Event=self._event))
        vars(self.episodes).update(
            Semaphore=lambda count: Semaphore(self.world, count), wait=self._wait, in_thread=self._in_thread)
        vars(self.run).update(
            dist=dist, signal=no_signal, os=Environ(self), Path=lambda *parts: SimpleNamespace(
                read_bytes=lambda: self._saved(parts[0])["state"]),
            load_file=lambda path: dict(self._saved(path)["arrays"]), locate=self._locate, fail=self._fail,
            time=SimpleNamespace(monotonic=lambda: self.world.switches / 20, perf_counter=lambda: 0.0),
            check_run=lambda *_, **__: None, opening=lambda *_: "",
            resource=SimpleNamespace(RUSAGE_SELF=0, getrusage=lambda _: SimpleNamespace(ru_maxrss=0)))
        self.run.checkpoint = SimpleNamespace(json_text=checkpoint.json_text, save_checkpoint=self._save,
                                              load_optimizers=lambda folder, networks: self._saved(folder))
        self.run.metrics = SimpleNamespace(RunLog=Log, rollout_metrics=lambda *_: {}, sample_lines=lambda *_: [])

    @contextlib.contextmanager
    def in_place(self):
        """Put stand-ins into the modules that others of the same tests use, as long as this lasts."""
        watchdog = SimpleNamespace(moved=lambda where=None: self.world.pause(where), limit=lambda _: None)
        changes = [(distributed, "dist", self.torch_distributed), (vllm_engine, "dist", self.torch_distributed),
                   (metrics, "dist", self.torch_distributed), (distributed, "end", self._end),
                   (distributed, "leave", lambda: self._end(0)),
                   (distributed, "ending", SimpleNamespace(begin=lambda: self._end(0), script=None)),
                   (distributed, "watchdog", watchdog), (distributed, "set_up", self._set_up),
                   (distributed, "time", SimpleNamespace(sleep=lambda seconds: self.world.sleep(seconds))),
                   (distributed, "sys", SimpleNamespace(__excepthook__=lambda *_: None)),
                   (distributed, "atexit", SimpleNamespace(register=lambda *_: None)),
                   (distributed, "tell_launcher", lambda *_: None),
                   (distributed, "closing", SimpleNamespace(close=lambda: None))]
        for module, path in ((distributed, "runtime/distributed.py"), (vllm_engine, "vllm_engine.py")):
            if self.fault and self.fault[1] == path:
                changes += changed_code(module, self.copy_of(module.__name__))
        before = [(module, name, getattr(module, name)) for module, name, _ in changes]
        processors = os.sched_getaffinity(0)
        try:
            # Only one thread runs at a time, and on one processor it takes half the time to wake the next one.
            os.sched_setaffinity(0, {sorted(processors)[os.getpid() % len(processors)]})
            for module, name, value in changes:
                setattr(module, name, value)
            yield self
        finally:
            os.sched_setaffinity(0, processors)
            for module, name, value in before:
                setattr(module, name, value)

    # ------------------------------------------------------------ torch.distributed, and ends

    def _gather(self, results, value, group=None):
        group = group or self.process.group
        results[:] = group.meet(self.process.rank, "all_gather", value)

    def _broadcast(self, values):
        values[:] = [self.process.group.meet(self.process.rank, "broadcast", values[0], root=0)]

    def _set_up(self, timeout, sequence_parallel_size, shard_ranks, join):
        process, world = self.process, self.world
        joined = join()
        process.rank, size, name = joined["rank"], joined["world_size"], joined["store"]
        process.group = world.groups.setdefault(name, Group(world, name, size))
        process.group.enter(process.rank)
        collectives = world.groups.setdefault("tensor parallel " + name, Group(world, name, size))
        collectives.enter(process.rank)
        process.tensor_parallel = SimpleNamespace(
            name=name, rank_in_group=process.rank, world_size=size, cpu_group=collectives,
            broadcast_object=lambda value=None: collectives.meet(
                process.rank, "broadcast_object", value, root=0, silent=True))
        return process.rank, size, torch.device("cpu"), None, None

    def _end(self, code):
        self.process.end(code)
        raise Gone

    def _fail(self, message):
        raise SystemExit(2)

    # ------------------------------------------------------------ threads

    def _thread(self, target, daemon):
        return SimpleNamespace(start=lambda: self.world.spawn(self.process, "listener", target))

    def _event(self):
        return SimpleNamespace(wait=lambda: self.world.wait(lambda: False, "the end of the run"))

    def _in_thread(self, function, *arguments):
        future = Future(self.world)
        self.world.spawn(self.process, "call", lambda: future.values.append(function(*arguments)))
        return future

    def _wait(self, calls, patience, _):
        futures = [*calls]
        if patience is None and futures:
            self.world.wait(lambda: any(future.values for future in futures), "the calls of environments")
        return SimpleNamespace(done=[future for future in futures if future.values])

    # ------------------------------------------------------------ the disk

    def _locate(self, settings, script):
        newest = max(self.world.history.disk, default=0)
        place = "/run", f"/run/checkpoint-{newest}" if newest else None, "2020-01-01"
        return distributed.from_master(place)

    def _saved(self, path):
        return self.world.history.disk[int(path.split("/")[2].partition("-")[2])]

    def _save(self, folder, networks, tokenizer, state, keep, arrays):
        world = self.world
        distributed.gathered([0])
        world.pause("a save")
        if world.breaks("disk", state["step"]):
            raise OSError("no space left on device")
        if self.process.rank == 0:
            [policy, _] = networks[""]
            world.note(f"checkpoint-{state['step']}")
            world.history.disk[state["step"]] = {
                "state": json.dumps(state).encode(), "value": policy.value,
                "arrays": {name: np.array(array) for name, array in arrays.items()},
                "settings": dict(vars(world.plan.settings)), "versions": dict(world.history.versions)}
        distributed.gathered([0])

    # ------------------------------------------------------------ the script

    def main(self):
        """Run the script as a process of the run."""
        process = self.process
        stand_ins = self._stand_ins(process)

        def import_module(name, *rest):
            return stand_ins[name] if name in stand_ins else builtins.__import__(name, *rest)

        process.globals = {"__builtins__": vars(builtins) | {"__import__": import_module},
                           "__name__": "__main__", "__file__": str(ROOT / "train_async.py")}
        exec(self.script, process.globals)

    def _stand_ins(self, process):
        """{name: the module that the script imports by it}"""
        world = self.world
        history = world.history
        settings = world.plan.settings

        def configure(namespace, choices, rules):
            if self.keys is None:
                self.keys = [*vars(configurator.configure(namespace, [], choices))]
            values = {key: namespace[key] for key in self.keys} | vars(settings)
            namespace.update(values)
            return SimpleNamespace(**values)

        def value_of(folder):
            return self._saved(folder)["value"] if folder else history.values[0]

        class Run(self.run.Run):
            def check_data(self, *_):
                self.tokenizer = None
                self.notes = []
                world.pause("the loading of models")

            def begin(self, *arguments):
                log = super().begin(*arguments)
                process.ready = True
                return log

            def compare_logprobs(self, rollouts, logps, same_weights=True):
                step = self.state["step"]
                if rollouts is process.rollouts:
                    fresh = {v for r in rollouts for v in r.sampled_by} == {step}
                    require(fresh or not same_weights, "older rollouts are compared in step", step)
                else:
                    check_rollouts(history, settings, rollouts, world.plan.eval_set, settings.eval_samples,
                                   "eval", (step, step))
                return {}

        def open_folders(s, longest, resumed, clock):
            start = "" if s.lora_rank else resumed or ""
            return SimpleNamespace(tokenizer=Tokenizer(), eos_ids=[END], policy=start, reference="", reader=None)

        def load_policy(start, *rest, reader):
            *_, adapter = rest
            policy = Policy(value_of(adapter[2] if adapter else start))
            process.policy = policy
            return policy

        def trained_on(rollouts, updates, skipped):
            """Check a step's rollouts as they are dealt to the ranks."""
            step = process.run.state["step"]
            require(step == process.step, f"a trainer makes step {step}, not", process.step)
            require(process.policy.value == history.values[step], "other weights are trained in step", step)
            check_rollouts(history, settings, rollouts, world.plan.prompts_of(step),
                           settings.num_generations, step, history.versions[step])
            process.rollouts = rollouts
            return [[] for _ in updates]

        def update():
            step = process.step
            if process.rank == world.plan.failing_rank and world.breaks("update", step):
                raise ArithmeticError("the update fails")
            rows = [(r.ids.tolist(), r.score) for r in process.rollouts]
            process.policy.value = hashed(process.policy.value, rows) % 2 ** 23
            value = history.values.setdefault(step + 1, process.policy.value)
            require(value == process.policy.value, "the trainers differ after step", step)
            process.step = step + 1
            history.made = max(history.made, step + 1)
            world.pause("the update")

        def load_engine(s, start, *_, apart):
            process.ready = True
            world.pause("the loading of an engine")
            return SimulatedEngine(world, process, s, value_of(start))

        class Scorer:
            def __init__(self, *_):
                pass

            def check_rewards(self, prompts):
                pass

            def __call__(self, rollouts):
                world.pause("a reward")
                process.calls += 1
                if process.name == world.plan.failing_engine and world.breaks("reward", process.calls):
                    raise ArithmeticError("the reward fails")
                for r in rollouts:
                    require(np.isnan(r.score), "a rollout is scored twice")
                    r.score = hashed(r.ids.tolist()) % 3 / 2
                    r.parts = {"score": r.score}

        def begun(*arguments, **named):
            process.trains = True
            process.run = Run(*arguments, **named)
            process.step = process.run.first_step
            return process.run

        no_gradient = SimpleNamespace(full_tensor=lambda: SimpleNamespace(item=lambda: 1.0))
        optimizer = SimpleNamespace(step=update, zero_grad=lambda: None)
        process.rollouts = None
        return {
            "os": Environ(self),
            "torch": SimpleNamespace(
                tensor=lambda values, dtype=None: values, float64=None, from_numpy=lambda array: array,
                nn=SimpleNamespace(utils=SimpleNamespace(clip_grad_norm_=lambda *_: no_gradient))),
            "configurator": SimpleNamespace(configure=configure, input_errors=configurator.input_errors),
            "data": SimpleNamespace(load_prompts=lambda *_: (world.plan.train_set, world.plan.eval_set, "")),
            "rewards": SimpleNamespace(load_scorer=Scorer),
            "rollout": SimpleNamespace(load_engine=load_engine, sampling_of=rollout.sampling_of),
            "options.episodes": SimpleNamespace(OpenEpisodes=self.episodes.OpenEpisodes, EpisodeSampler=self._sampler),
            "options.placement": self.placement,
            "runtime.run": SimpleNamespace(Run=begun, check_run=self.run.check_run),
            "losses": SimpleNamespace(
                CHOICES={}, RULES=(), ADVANTAGES={"reinforce++": lambda scores, *_, **__: scores}, group_std=None,
                sequence_weights=lambda *_: None),
            "model": SimpleNamespace(
                deal_to_ranks=trained_on, load_policy=load_policy, make_optimizer=lambda *_: optimizer,
                micro_batches=lambda *_: [], set_rates=lambda *_: {}, token_logprobs=lambda *_: {},
                gathered_logprobs=None, load_reference=None,
                open_folders=open_folders)}

    def _sampler(self, settings, tokenizer, eos_ids):
        """An EpisodeSampler for the plan's kind of episodes."""
        world = self.world
        sampler = self.episodes.EpisodeSampler.__new__(self.episodes.EpisodeSampler)
        vars(sampler).update(
            settings=settings, tokenizer=tokenizer, eos_ids=eos_ids, key="a game", name="", make=None,
            session_class=None, methods={}, closer="", reward_part="", tools=None, tool_functions={},
            template=None, opened={}, idle=[], score_ended=None, stop=None)
        if world.plan.kind == "game":
            sampler.make = Game
            sampler.methods = {"reset": None, "step": None}
            sampler.template = Template()
        if world.plan.kind == "agent":
            sampler.make = bool
            sampler.session_class = functools.partial(Session, world)
            sampler.template = Template()
        sampler.close = lambda: None
        return sampler


def changed_code(module, copy):
    """Return (function, "__code__", other code) for each function that is another one in a module's copy."""
    pairs = [(vars(module).get(name), value) for name, value in vars(copy).items()]
    for before, after in [*pairs]:
        if isinstance(after, type):
            pairs += [(vars(before).get(name), value) for name, value in vars(after).items()]
    return [(before, "__code__", after.__code__) for before, after in pairs
            if isinstance(after, types.FunctionType) and after.__module__ == copy.__name__
            and before.__code__ != after.__code__]


class Environ:
    """The module os, of the process that goes on."""

    def __init__(self, modules):
        self.modules = modules
        self.path = SimpleNamespace(
            basename=os.path.basename, realpath=str, isdir=lambda path: True,
            exists=lambda path: bool(modules._saved(path)["arrays"]))

    @property
    def environ(self):
        return self.modules.process.environ

    def _exit(self, code):
        self.modules._end(code)


class Log(metrics.RunLog):
    """A RunLog that writes no files."""

    def __init__(self, out_dir, script, settings, state):
        self.master = False
        self.settings = settings
        self.state = state
        self.history = []
        self.reported = set()
        self.start(state["step"])

    def evaluation(self, rollouts, k, name="eval"):
        self.state["evaluated"] |= {"eval/mean": sum(r.score for r in rollouts) / len(rollouts)}

    def show(self, *_):
        pass


# ------------------------------------------------------------------------------------------------------------
# schedules


class Plan:
    """What one start of a run is like, and what happens to it.

    fixed: what `drawn` returned. before: the Plan of the start before, or None. last: whether it is left in peace.
    """

    def __init__(self, rng, fixed, before, last):
        s = dict(fixed["settings"])
        choice = rng.choice
        changing = rng.random() < 0.3 and not fixed["repeats"]
        if before and not changing:
            s = dict(vars(before.settings))
            self.trainers = before.trainers
        else:
            self.trainers = choice([1, 1, 1, 2, 3])
            s |= {"in_flight": rng.random() < 0.35, "max_staleness": choice([0, 1, 1, 2, 3]),
                  "temperature": choice([1.0, 1.0, 0.7]), "eval_interval": choice([0, 1, 2, 3]),
                  "save_interval": choice([0, 1, 2]), "call_workers": choice([0, 0, 2]),
                  "max_environments": choice([0, 0, 1, 3]), "max_completion_length": choice([2, 5, 8])}
            if fixed["repeats"]:
                s |= {"in_flight": False, "call_workers": 0}
            s["vllm_tensor_parallel_size"] = choice([1, 1, 1, 2])
            engines = choice([e for e in (1, 1, 2, 3) if s["prompts_per_step"] % e == 0])
            s["rollout_ranks"] = engines * s["vllm_tensor_parallel_size"]
            s["max_steps"] = before.settings.max_steps if before else choice([1, 2, 3, 4, 5, 7])
        if before and rng.random() < 0.3:
            s["max_steps"] += choice([1, 2])
        self.settings = SimpleNamespace(**s)
        self.kind = fixed["kind"]
        self.tensors = choice([1, 2, 3, 4, 5])
        self.whole = rng.random() < 0.25
        self.seats = choice([None, None, 2])
        self.train_set = Prompts(self.settings, fixed["rows"])
        self.eval_set = Prompts(self.settings, 50).encoded(range(40, 40 + fixed["held_out"]))
        self.eval_set = [prompt for prompt in self.eval_set if len(prompt.ids) <= s["max_prompt_length"]]
        self.ranks = self.trainers + s["rollout_ranks"]
        self.events = []
        self.failure = None
        self.failing_rank = rng.randrange(self.trainers)
        self.failing_engine = f"rank{self.trainers}"
        if not last:
            self._disturb(rng)

    def _disturb(self, rng):
        everybody = [*range(self.ranks)]
        for _ in range(rng.choice([0, 1, 1, 1, 2])):
            kind = rng.choice(["stop", "stop", "stop one", "interrupt", "kill", "reward", "update", "disk"])
            step = rng.randrange(self.settings.max_steps + 1)
            if kind in ("reward", "update", "disk"):
                self.failure = kind, step + (kind != "update")
                continue
            number = {"kill": signal.SIGKILL, "interrupt": signal.SIGINT}.get(kind, signal.SIGTERM)
            ranks = everybody if kind in ("stop", "interrupt") else [rng.choice(everybody)]
            delay = int(2 ** rng.uniform(0, 9))
            for again in range(rng.choice([1, 2]) if kind == "interrupt" else 1):
                self.events.append({"signal": number, "ranks": ranks, "step": step,
                                    "delay": delay + again * rng.randrange(60)})

    def prompts_of(self, step):
        """The prompts of a step: those that fit, in the order of the epochs."""
        count = self.settings.prompts_per_step
        size = len(self.train_set.rows)
        fitting = []
        place = 0
        while len(fitting) < (step + 1) * count:
            number = data.epoch_order(size, place // size, self.settings.seed)[place % size]
            if len(prompt_ids(number)) <= self.settings.max_prompt_length:
                fitting.append(SimpleNamespace(number=number))
            place += 1
        return fitting[step * count:]


def drawn(rng, repeats):
    """What all starts of a schedule have in common. repeats: as for schedule."""
    settings = {
        "engine": "vllm", "advantage": "reinforce++", "seed": rng.randrange(3), "lora_rank": rng.choice([0, 0, 4]),
        "prompts_per_step": rng.choice([1, 2, 3, 4, 6]), "num_generations": rng.choice([1, 2, 3]),
        "max_prompt_length": rng.choice([3, 4, 6]), "eval_samples": rng.choice([1, 2]), "max_turns": 3,
        "num_mini_batches": 1, "old_logprobs": "trainer", "out_dir": "/run", "resume": "auto", "call_timeout": 5.0,
        "save_rollouts": False, "best_by": "", "eval_temperature": -1.0, "eval_top_p": -1.0, "eval_top_k": -1,
        "eval_min_p": -1.0}
    kind = rng.choice(["answers", "answers", "game", "agent"][:3 if repeats else 4])
    return {"settings": settings, "kind": kind, "repeats": repeats,
            "rows": rng.choice([5, 9, 20]), "held_out": rng.choice([2, 3, 5])}


def start(modules, plan, history, rng):
    """Start the run once and let it end. Raises Fault."""
    s = plan.settings
    first = history.begin(s)
    world = World(plan, history, rng)
    modules.world = world
    history.notes.append(f"--- {plan.trainers} trainers, {plan.kind}, from step {first}, strict={world.strict}, "
                         f"fine={world.fine}, whole={plan.whole}, tensors={plan.tensors}, {plan.failure}, "
                         f"{plan.events}\n    {vars(s)}")
    for number in range(plan.ranks):
        environ = {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(plan.ranks),
                   "LOCAL_WORLD_SIZE": "1000"}                  # more than there are GPUs
        world.processes.append(Process(world, number, environ))
    for process in world.processes:
        world.spawn(process, "main", modules.main)
    world.run()
    require(not world.fault, world.fault)
    codes = [process.code for process in world.processes]
    steps = world.processes[0].step
    if not {*world.endings} - {"stopped"}:
        require(codes == [0] * len(codes), "nothing failed, but the exit codes are", codes)
        require(max(history.disk, default=0) == steps, f"{steps} steps were made and not saved:", [*history.disk])
        stopped = world.endings and steps < s.max_steps
        require(stopped or steps == s.max_steps, f"the run ends after {steps} steps of", s.max_steps)
        require(not stopped or steps <= world.last_step, f"a signal stops the run only after {steps} steps, not",
                world.last_step)
    if not world.endings:
        # Of an engine that several ranks share, only the first one sends rollouts.
        mail = world.groups["gloo/"].mail[1::s.vllm_tensor_parallel_size]
        require(not any(mail), "messages are left over, of each engine:", [*map(len, mail)])
        bridge = world.processes[0].globals["bridge"]
        require(not bridge.received, "rollouts are left over:", [*bridge.received])
        late = {("step", step) for step in range(s.max_steps, s.max_steps + s.max_staleness)}
        require(bridge.sampled.keys() <= late, "rollouts are left over:", [*bridge.sampled])
    return world.digest


def schedule(modules, seed, repeats=False, peace=False):
    """Play a schedule; return a number that stands for all choices in it, and its History. Raises Fault.

    repeats: of a run that repeats bit for bit, and whose settings do not change. peace: start it only once, and
    disturb it by nothing.
    """
    rng = random.Random(seed)
    fixed = drawn(rng, repeats)
    history = History()
    digest = 0
    plan = None
    starts = rng.choice([1, 2, 2, 3])
    if peace:
        starts = 1
    for number in range(starts):
        plan = Plan(rng, fixed, plan, last=number == starts - 1)
        try:
            digest = hashed(digest, start(modules, plan, history, rng))
        except Fault as fault:
            fault.add_note("\n".join(history.notes[-60:]))
            raise
    return digest, history


def first_failure(modules, seeds):
    """The first of the seeds whose schedule fails, and why; or None."""
    for seed in seeds:
        try:
            schedule(modules, seed)
        except Fault as fault:
            return seed, str(fault)
    return None


# Faults to put into the code by hand: (what is wrong, the file, the text that is replaced, what replaces it).
FAULTS = (
    ("a message for a later step is dropped", "options/placement.py",
     "self.received[engine, next_key] = next_rollouts", "self.received[engine, key] = next_rollouts"),
    ("max_staleness is over by one", "options/placement.py",
     "number <= version + s.max_staleness and", "number <= version + s.max_staleness + 1 and"),
    ("max_staleness is under by one", "options/placement.py",
     "number <= version + s.max_staleness and", "number < version + s.max_staleness + (not s.max_staleness) and"),
    ("a queue is popped twice", "options/placement.py",
     "            arrived, named_tensors = self.arrived.get()",
     "            self.arrived.get()\n            arrived, named_tensors = self.arrived.get()"),
    ("weights are announced before they are sent", "options/placement.py",
     "        for name, value in engine_weights(",
     "        self.tell((\"complete\", version))\n        for name, value in engine_weights("),
    ("weights are announced before the last of them is heard", "options/placement.py",
     "                if kind == \"tensor\":\n                    name, shape, dtype = details\n",
     "                if kind == \"tensor\":\n                    name, shape, dtype = details\n"
     "                    self.newest += not named_tensors\n"
     "                    self.arrived.put((self.newest, named_tensors))\n"),
    ("weights get the number of the step before", "train_async.py",
     "update_weights(policy, step + 1)", "update_weights(policy, step)"),
    ("the last weights of a sync are not sent", "options/placement.py",
     "            elif self.speaks:\n", "            elif self.speaks and name != \"weight2\":\n"),
    ("an engine does not ignore SIGTERM", "options/placement.py",
     "for number in distributed.STOPPING:", "for number in (signal.SIGINT,):"),
    ("the second engine does not hear the end", "options/placement.py",
     "while kind != \"end\":", "while kind != \"end\" or self.engine == 1:"),
    ("the trainers do not end the engines", "options/placement.py",
     "        self.tell((\"end\",))", "        pass"),
    ("an engine resumes with the next step", "train_async.py",
     "clock, run.first_step, run.state", "clock, run.first_step + (run.first_step > 0), run.state"),
    ("an engine resumes with the first prompts", "train_async.py",
     "run.first_step, run.state[\"position\"]", "run.first_step, 0"),
    ("the trainers' prompts do not count those that are too long", "train_async.py",
     "prompts, run.state[\"position\"] = train_set.draw(run.state[\"position\"], prompts_per_step, seed)",
     "prompts, _ = train_set.draw(step * prompts_per_step, prompts_per_step, seed)"),
    ("engines sample again what a checkpoint holds", "options/placement.py",
     "if (\"step\", number) not in sampled:", "if True:"),
    ("a checkpoint holds one step too few", "train_async.py",
     "next_step + max_staleness, max_steps", "next_step + max_staleness - 1, max_steps"),
    ("a checkpoint waits for what cannot come", "train_async.py",
     "next_step + max_staleness, max_steps", "next_step + max_staleness + 2, max_steps"),
    ("what was sampled with other settings is kept", "options/placement.py",
     "if not (steps and same):", "if not steps:"),
    ("what was sampled ahead is not taken", "train_async.py",
     "    bridge.sampled |= kept_ahead(run, settings)\n", ""),
    ("steps that were sampled ahead change places", "options/placement.py",
     "for i, step in enumerate(steps)}", "for i, step in enumerate(reversed(steps))}"),
    ("an engine in flight does not wait for the next weights", "options/placement.py",
     "version = max(version, bridge.newest)", "version = bridge.newest"),
    ("seeds depend on the number of engines", "options/placement.py",
     "for i in range(first, end)]", "for i in range(end - first)]"),
    ("rollouts of the last engine come first", "options/placement.py",
     "rollouts += self.received.pop((engine, key))", "rollouts = self.received.pop((engine, key)) + rollouts"),
    ("a message does not wait in memory", "options/placement.py",
     "self.sent.append((self.gloo.send([tensor], 0, 0), tensor))", "self.gloo.send([tensor], 0, 0)"),
    ("rollouts are taken for good", "options/placement.py",
     "        self.sampled.pop(key, None)\n", ""),
    ("an engine tells nobody that it is ready", "train_async.py",
     "    bridge.send(\"ready\", 0, [])\n", ""),
    ("an adapter's engine begins with the initial model", "options/placement.py",
     "    if s.lora_rank:     ", "    if s.lora_rank < 0: "),
    ("a signal stops only the rank that gets it", "runtime/run.py",
     "if any(distributed.gathered([self.signalled_at is not None])):", "if self.signalled_at is not None:"),
    ("a lost connection is an error also at the end", "runtime/distributed.py",
     "        time.sleep(0.5)\n", ""),
    ("an agent that waits is not answered", "options/episodes.py",
     "if episode.asking and episode.asking.future.cancelled()])", "if episode.asking])"),
    ("ranks of an engine get its weights at different steps", "vllm_engine.py",
     "if version != self.version:", "if version > self.version + 1:"),
)


def found_after(fault, limit=2000):
    """How many schedules it takes to find a fault, and what is then wrong; None if that many do not find it."""
    with Modules(fault).in_place() as modules:
        failure = first_failure(modules, range(limit))
    return failure and (failure[0] + 1, failure[1])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=10_000, help="how many schedules")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="that play them")
    parser.add_argument("--faults", action="store_true", help="how soon are faults found that were put in?")
    arguments = parser.parse_args()
    seeds = range(arguments.first, arguments.first + arguments.count)
    begun = time.monotonic()
    if arguments.count == 1:
        with Modules().in_place() as modules:
            try:
                digest, history = schedule(modules, seeds[0])
                print(*history.notes, f"seed {seeds[0]} holds; its choices are {digest}", sep="\n")
            except Fault as fault:
                print(*fault.__notes__, f"seed {seeds[0]}: {fault}", sep="\n")
        return
    if arguments.faults:
        with multiprocessing.Pool(arguments.processes) as pool:
            for fault, result in zip(FAULTS, pool.imap(found_after, FAULTS)):
                number, text = result or ("never", "")
                print(f"{fault[0]:60} {number:>6}  {text:.120}", flush=True)
        return
    shares = [seeds[n::arguments.processes] for n in range(arguments.processes)]
    with multiprocessing.Pool(arguments.processes) as pool:
        failures = [failure for share in pool.imap_unordered(failures_of, shares) for failure in share]
    for seed, text in sorted(failures):
        print(f"seed {seed}: {text}")
    print(f"{len(failures)} of {len(seeds)} schedules failed, after {time.monotonic() - begun:.0f} s")
    sys.exit(bool(failures))


def failures_of(seeds):
    failures = []
    with Modules().in_place() as modules:
        for seed in seeds:
            try:
                schedule(modules, seed)
            except Fault as fault:
                failures.append((seed, str(fault)))
    return failures


if __name__ == "__main__":
    main()
