"""
Trainers and engines on devices of their own: two roles under one torchrun, and the bridge between them.

The last rollout_ranks ranks are engines, the others trainers. All trainers form one process group, and so do
the ranks of each engine, so that no collective of FSDP2 or of vLLM reaches out of its role. This crosses:

    weights     from the trainers to every rank of every engine, where they wait in host memory until the
                engine wants them
    messages    from each engine to the trainers: what it has sampled, under a name. They wait at the engine

Only the first trainer and the engines are on the bridge. A wait for the other role ends after sync_timeout,
and where one rank fails, all others end with its message.
"""
import atexit
import contextlib
import datetime
import os
import pickle
import queue
import signal
import sys
import threading
import time
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist

import ranks
import rollout

BUCKET = 64 * 2 ** 20           # bytes: smaller tensors travel together
FOREVER = datetime.timedelta(days=10_000)


@dataclass
class Sampled:
    """Rollouts that belong together, scored: those of a step, of an evaluation, or ReMax's greedy ones."""
    rollouts: list
    timeouts: int            # of the reward
    position: int            # in the sequence of prompts, behind these
    figures: dict            # of their making, for the log: means over the engines

    def as_json(self):
        return self.__dict__ | {"rollouts": [rollout.as_json(r) for r in self.rollouts]}

    @classmethod
    def from_json(cls, entry):
        """Raises ValueError for what as_json does not write."""
        try:
            position = entry["position"]
            if not entry["rollouts"] or type(position) is not int or position < 0:
                raise ValueError(f"position={position!r:.100}")
            return cls([rollout.from_json(one) for one in entry["rollouts"]], int(entry["timeouts"]),
                       position, {key: float(value) for key, value in entry["figures"].items()})
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise ValueError(f"not what engines have sampled: {error!r:.300}") from error


class Bridge:
    """This process's role, and its end of the bridge.

    settings: what configure returned. To the trainers the bridge is their engine: it has its attributes name,
    weight_names and allocated, and close. trains: whether this rank is a trainer. engines: how many there are; engine: the
    number of this rank's, from 0.
    """
    allocated = 0

    def __init__(self, settings):
        self.seconds, self.waited, self.since = settings["sync_timeout"], 0.0, time.monotonic()
        self.ranks, self.share = settings["rollout_ranks"], settings["vllm_tensor_parallel_size"]
        self.engines = self.ranks // self.share
        each = f" on {self.share} ranks each" if self.share > 1 else ""
        kind = rollout.engine_class(settings["engine"])
        self.name, self.weight_names = f"{kind.name}, {self.engines} apart{each}", kind.weight_names

    def join(self):
        """Take this rank's role; returns the group that ranks.set_up joins. A collective of all ranks."""
        self.store, self.rank, world_size = next(dist.rendezvous("env://"))
        self.trainers = world_size - self.ranks
        self.trains = self.rank < self.trainers
        self.engine, place = divmod(self.rank - self.trainers, self.share)
        role, rank, size = (("trainer", self.rank, self.trainers) if self.trains
                            else (f"engine {self.engine}", place, self.share))
        self.me, self.leads = f"rank {self.rank} ({role})", rank == 0
        # From here on these are the role's; vLLM reads them.
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "ROLE_NAME": role.replace(" ", "")}
        in_background(self._await_failure)
        atexit.register(self._report_failure)
        if self.leads or not self.trains:
            self._build()
        return {"store": dist.PrefixStore(f"{role}/", self.store), "rank": rank, "world_size": size}

    def _build(self):
        def group(name, kind):
            # The first trainer has place 0, the ranks of engines have those from 1 on.
            place = 0 if self.trains else 1 + self.rank - self.trainers
            return kind(dist.PrefixStore(f"{name}/", self.store), place, 1 + self.ranks, FOREVER)

        cuda = torch.cuda.is_available()
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
        self.messages = group("messages", dist.ProcessGroupGloo)
        self.wire = group("weights", dist.ProcessGroupNCCL) if cuda else self.messages
        self.boxes = [{} for _ in range(self.engines)]         # {name: message} of each engine
        if not self.trains:
            self.told, self.staged, self.news = {}, {}, threading.Condition()
            self.outgoing = queue.SimpleQueue()
            in_background(self._listen)
            in_background(self._post)

    def busy(self):
        """The share of the time since the last call that this role has not waited for the other."""
        waited, since, self.waited, self.since = self.waited, self.since, 0.0, time.monotonic()
        return 1 - waited / (self.since - since)

    # ------------------------------------------------------------ the trainers' end

    def tell(self, words):
        """Tell all engines something: how the run begins, or None: that it is over."""
        if self.leads:
            data = torch.frombuffer(bytearray(pickle.dumps(words)), dtype=torch.uint8)
            for tensor in (torch.tensor([len(data)]), data):
                self._bounded(self.messages.broadcast(tensor, 0), "the engines to listen")

    def publish(self, version, named_tensors):
        """Send all engines the whole tensors of weights.full_weights. A collective of the trainers."""
        for bucket in buckets(named_tensors):
            self.tell((version, [(name, tensor.shape) for name, tensor in bucket], bucket[0][1].dtype))
            if self.leads:
                flat = torch.cat([tensor.reshape(-1) for _, tensor in bucket])
                self._bounded(self.wire.broadcast(flat.to(self.device), 0),
                              f"the engines to take the weights of step {version}")
        self.tell((version, None, None))                       # that was all of them

    def take(self, name):
        """Returns the Sampled of all engines under this name as one. A collective of the trainers."""
        began = time.monotonic()
        for e in range(self.engines if self.leads else 0):
            leader = self.trainers + e * self.share
            while name not in self.boxes[e]:
                size = torch.empty(1, dtype=torch.int64)
                self._receive(size, leader, name)
                data = torch.empty(size.item(), dtype=torch.uint8)
                self._receive(data, leader, name)
                self.boxes[e] |= [pickle.loads(data.numpy())]
        parts = ranks.from_master([box.pop(name) for box in self.boxes] if self.leads else None)
        self.waited += time.monotonic() - began
        return Sampled([r for part in parts for r in part.rollouts], sum(part.timeouts for part in parts),
                       parts[0].position, {key: sum(part.figures[key] for part in parts) / len(parts)
                                           for key in parts[0].figures})

    def _receive(self, tensor, leader, name):
        self._bounded(self.messages.recv([tensor], 1 + leader - self.trainers, 0),
                      f"rank {leader} (engine {(leader - self.trainers) // self.share}) to send {name}")

    def _bounded(self, work, what):
        try:
            work.wait(datetime.timedelta(seconds=self.seconds))
        except RuntimeError as error:
            late = "imed out" in str(error)
            raise self._in_vain(what, "" if late else f"the connection broke: {error}") from error

    def _in_vain(self, what, reason=""):
        return RuntimeError(f"{self.me} waited for {what}, but "
                            + (reason or f"sync_timeout={self.seconds:g} seconds have passed"))

    def close(self):
        """End the engines: the run is over."""
        # One that has gone already breaks the connection.
        with contextlib.suppress(RuntimeError):
            self.tell(None)

    # ------------------------------------------------------------ the engines' end

    def opening(self):
        """Returns the first words of the trainers. From here on signals are for them alone to act on."""
        for name in (signal.SIGTERM, signal.SIGINT):
            signal.signal(name, signal.SIG_IGN)
        ranks.watchdog.can_save = True
        self._await(lambda: self.told, "rank 0 (trainer) to begin")
        return self.told

    def arrived(self, version):
        """Whether the weights of this version are here."""
        return version in self.staged

    def weights(self, version):
        """Returns the named tensors of a version, as soon as they are here."""
        self._await(lambda: version in self.staged, f"rank 0 (trainer) to send the weights of step {version}")
        return self.staged.pop(version)

    def send(self, name, sampled):
        """Send the trainers what was Sampled under this name; they may take it much later."""
        sampled.figures |= {"timing_s/wait_for_weights": self.waited, "perf/engines_busy": self.busy()}
        self.outgoing.put(pickle.dumps((name, sampled)))

    def _await(self, condition, what):
        began = time.monotonic()
        with self.news:
            if not self.news.wait_for(condition, self.seconds):
                raise self._in_vain(what)
        self.waited += time.monotonic() - began

    def _listen(self):
        # Takes weights into host memory while the engine works, and ends this process with the run.
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        try:
            opening, tensors = self._hear(), []
            with self.news:
                self.told = opening
                self.news.notify()
            while (words := self._hear()) is not None:
                version, layout, dtype = words
                if layout is None:
                    with self.news:
                        self.staged[version], tensors = tensors, []
                        self.news.notify()
                    continue
                sizes = [shape.numel() for _, shape in layout]
                flat = torch.empty(sum(sizes), dtype=dtype, device=self.device)
                self.wire.broadcast(flat, 0).wait(FOREVER)
                tensors += [(name, piece.view(shape))
                            for (name, shape), piece in zip(layout, flat.cpu().split(sizes))]
        except RuntimeError as error:
            self._end(f"the connection to the trainers broke: {error}")
        os._exit(0)

    def _hear(self):
        size = torch.empty(1, dtype=torch.int64)
        self.messages.broadcast(size, 0).wait(FOREVER)
        data = torch.empty(size.item(), dtype=torch.uint8)
        self.messages.broadcast(data, 0).wait(FOREVER)
        return pickle.loads(data.numpy())

    def _post(self):
        while True:
            data = torch.frombuffer(bytearray(self.outgoing.get()), dtype=torch.uint8)
            # If the trainers are gone, _listen says so.
            with contextlib.suppress(RuntimeError):
                for tensor in (torch.tensor([len(data)]), data):
                    self.messages.send([tensor], 0, 0).wait(FOREVER)

    # ------------------------------------------------------------ failures

    def _report_failure(self):
        # At the end of the interpreter, which a run that comes to its own end leaves out.
        error = getattr(sys, "last_value", None) or sys.exc_info()[1]
        # What SystemExit has to say has been printed, and the ranks may all have said it.
        if error is not None and not isinstance(error, SystemExit):
            with contextlib.suppress(RuntimeError):
                self.store.set("failure", f"{self.rank} {self.me}: {error}")

    def _await_failure(self):
        # Asking waits for the answer, and nobody else could ask by the same connection meanwhile.
        store = self.store.clone()
        store.set_timeout(FOREVER)
        # Without a store, torchrun is gone, and the watchdog looks to that.
        with contextlib.suppress(RuntimeError):
            rank, message = store.get("failure").decode().split(" ", 1)
            if rank != str(self.rank):
                self._end(message)

    def _end(self, message):
        with contextlib.suppress(OSError, ValueError):
            print(f"{self.me} ends. {message}", file=sys.stderr, flush=True)
        os._exit(1)


def in_background(function):
    threading.Thread(target=function, daemon=True).start()


def loaded(entries, folder):
    """{name: Sampled} of the entries [name, as_json()] in a checkpoint's state. Raises ValueError."""
    try:
        return {name: Sampled.from_json(entry) for name, entry in entries}
    except (TypeError, ValueError) as error:
        raise ValueError(f"{folder}: ahead in its state.json is {error}") from error


def note(settings, engines, before):
    """Tells how the run is placed. before: the number of engines of the run that it goes on from."""
    s, lines = SimpleNamespace(**settings), []
    if s.max_staleness:
        lines.append(f"A step's completions are sampled with weights that are up to {s.max_staleness} steps "
                     "older. sampling/... compare these two policies;\nan evaluation compares engine and "
                     "trainer with the same weights.")
    if s.in_flight:
        lines.append("in_flight: weights enter when they come, so the run does not repeat bit for bit")
    if before != engines:
        lines.append(f"{before} engines sampled before, and {engines} do now: sums round differently, so the "
                     "steps are not bit for bit those of an unbroken run")
    return "\n".join(lines)


def staleness(rollouts, step):
    """By how many steps the policy of `step` is ahead of those that sampled the tokens: mean and largest."""
    ages, counts = [], []
    for r in rollouts:
        starts, versions = np.array(r.versions).T
        ages += (step - versions).tolist()
        counts += np.diff(starts, append=len(r.logprobs)).tolist()
    return {"async/staleness/mean": float(np.average(ages, weights=counts)), "async/staleness/max": max(ages)}


def buckets(named_tensors, size=BUCKET):
    """Yields lists of (name, tensor) of at least `size` bytes, and a last one with the rest."""
    bucket, held = [], 0
    for name, tensor in named_tensors:
        bucket.append((name, tensor))
        held += tensor.nbytes
        if held >= size:
            yield bucket
            bucket, held = [], 0
    if bucket:
        yield bucket
