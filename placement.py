"""
Trainers and engines on separate devices: two roles under one torchrun, and the bridge between them.

The last rollout_ranks ranks are engines, the others are trainers. All trainers form one process group, and
the ranks of each engine form another, so the collectives of FSDP2 and of vLLM stay inside their role. The
first trainer and all ranks of the engines are on the bridge, which carries

    weights     from the first trainer to every rank of every engine; they wait in its host memory
    rollouts    from the first rank of each engine to the first trainer, which passes them on to the others

The first trainer and the engines wait for each other for at most sync_timeout. If one rank fails, all others
end with its message.
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
import traceback
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

import rollout
from configurator import tell_launcher
from runtime import distributed

BUCKET = 64 * 2 ** 20           # bytes: smaller tensors travel together
FOREVER = datetime.timedelta(days=10_000)
SOON = 3                        # seconds that a failed rank gets to say why, before others say it is gone
# Rollouts that were sampled ahead are of no use to a run that resumes with another value of one of these.
SAMPLED_WITH = ("max_staleness", "temperature", "max_completion_length", "max_turns", "max_turn_length",
                "reward_weights")


@dataclass
class Sampled:
    """The scored rollouts of a step or of an evaluation: those of one engine, or of all engines."""
    rollouts: list
    position: int            # where the next step begins in the sequence of prompts
    figures: dict            # metrics of the sampling, for the log

    def as_json(self):
        return vars(self) | {"rollouts": [rollout.as_json(r) for r in self.rollouts]}

    @classmethod
    def from_json(cls, entry):
        """Returns the Sampled of a dict that as_json made."""
        return cls(**entry | {"rollouts": [*map(rollout.from_json, entry["rollouts"])]})


class Bridge:
    """The role of this rank, and its end of the bridge.

    settings: what configure returned. trains: whether this rank is a trainer. engines: how many engines there
    are. engine: the number of this rank's engine, from 0. newest: for an engine, the last version of the
    weights that has arrived. For runtime.run the bridge is the trainers' engine: it has the
    attributes name, naming and allocated, and close.
    """
    allocated = 0

    def __init__(self, settings):
        self.seconds, self.waited, self.since = settings.sync_timeout, 0.0, time.monotonic()
        self.rollout_ranks = settings.rollout_ranks
        self.ranks_per_engine = settings.vllm_tensor_parallel_size
        self.engines = self.rollout_ranks // self.ranks_per_engine
        kind = rollout.engine_class(settings.engine)
        if kind is rollout.HFEngine and self.ranks_per_engine > 1:
            raise ValueError(f"vllm_tensor_parallel_size={self.ranks_per_engine}: engine=hf has one rank")
        self.name, self.naming = f"{kind.name}, {self.engines} apart", kind.naming

    def join(self):
        """Take the role of this rank; return the group that set_up joins. A collective of all ranks."""
        # Some ranks may never join.
        distributed.watchdog.limit(self.seconds)
        self.store, self.number, world_size = next(dist.rendezvous("env://"))
        self.trainers = world_size - self.rollout_ranks
        self.trains = self.number < self.trainers
        self.engine, place = divmod(self.number - self.trainers, self.ranks_per_engine)
        role, rank, size = (("trainer", self.number, self.trainers) if self.trains
                            else (f"engine {self.engine}", place, self.ranks_per_engine))
        self.me, self.speaks = f"rank {self.number} ({role})", self.number == 0
        # From here on these describe the role. vLLM reads them.
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "ROLE_NAME": role.replace(" ", "")}
        if gpus := torch.cuda.device_count():
            os.environ["LOCAL_RANK"] = str(int(os.environ["LOCAL_RANK"]) % gpus)    # roles may share a GPU
        self._in_background(self._await_failure)
        sys.excepthook = self._fail
        if self.speaks or not self.trains:
            self._build()
        distributed.watchdog.limit(0)
        return {"store": dist.PrefixStore(f"{role}/", self.store), "rank": rank, "world_size": size}

    def _build(self):
        def group(name, kind):
            # The first trainer has place 0, and the ranks of engines have the places from 1 on.
            place = 0 if self.trains else 1 + self.number - self.trainers
            return kind(dist.PrefixStore(f"{name}/", self.store), place, 1 + self.rollout_ranks, FOREVER)

        # NCCL cannot connect two processes on one GPU.
        cuda = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
        self.gloo = group("gloo", dist.ProcessGroupGloo)
        self.wire = group("nccl", dist.ProcessGroupNCCL) if cuda else self.gloo         # for weights
        if self.trains:
            # What each engine sent and nobody took yet: {("step" or "eval", number): Sampled}.
            self.boxes = [{} for _ in range(self.engines)]
        else:
            # heard: first how the run begins, then (version, tensors) of each weight sync.
            self.heard, self.outgoing, self.newest = queue.SimpleQueue(), queue.SimpleQueue(), -1
            self._in_background(self._listen)
            self._in_background(self._post)

    def busy(self):
        """Returns the share of the time since the last call in which this role did not wait for the other."""
        waited, since, self.waited, self.since = self.waited, self.since, 0.0, time.monotonic()
        return 1 - waited / (self.since - since)

    # ------------------------------------------------------------ the trainers' end

    def tell(self, words):
        """Send all engines an object: how the run begins, which weights follow, or None, which ends them."""
        if self.speaks:
            for tensor in packed(words):
                self._bounded("the engines to listen", self.gloo.broadcast, tensor, 0)

    def publish(self, version, named_tensors):
        """Send all engines the tensors that weights.full_weights yields. A collective of the trainers."""
        for bucket in buckets(named_tensors):
            self.tell((version, [(name, tensor.shape) for name, tensor in bucket], bucket[0][1].dtype))
            if self.speaks:
                flat = torch.cat([tensor.reshape(-1) for _, tensor in bucket])
                self._bounded(f"the engines to take the weights of step {version}", self.wire.broadcast,
                              flat.to(self.device), 0)
        self.tell((version, None, None))                       # these weights are complete

    def take(self, kind, number):
        """Returns what all engines sent under this kind and number, as one Sampled. A collective."""
        began = time.monotonic()
        parts = distributed.from_master(
            [self._receive(e, (kind, number)) for e in range(self.engines)] if self.speaks else None)
        self.waited += time.monotonic() - began
        return Sampled([r for part in parts for r in part.rollouts], max(part.position for part in parts),
                       {name: sum(part.figures[name] for part in parts) / len(parts)
                        for name in parts[0].figures})

    def _receive(self, e, key):
        # What arrives earlier waits in the box.
        place, box, (kind, number) = 1 + e * self.ranks_per_engine, self.boxes[e], key
        task = "be ready" if kind == "ready" else f"send its rollouts of {kind} {number}"
        what = f"rank {self.trainers - 1 + place} (engine {e}) to {task}"
        while key not in box:
            box |= [unpacked(lambda tensor: self._bounded(what, self.gloo.recv, [tensor], place, 0))]
        return box.pop(key)

    def _bounded(self, what, begin, *arguments):
        try:
            # If the connection is broken already, this fails before the wait.
            begin(*arguments).wait(datetime.timedelta(seconds=self.seconds))
        except RuntimeError as error:
            # The first is what gloo says, the second what NCCL says.
            if "imed out" in str(error) or "before timing out" in str(error):
                raise self._in_vain(what) from error
            time.sleep(SOON)
            raise self._in_vain(what, f"the connection broke: {error}") from error

    def _in_vain(self, what, reason=""):
        return RuntimeError(f"{self.me} waited for {what}, but "
                            + (reason or f"sync_timeout={self.seconds:g} seconds have passed"))

    def signalled(self):
        """Whether an engine has got a signal to stop."""
        # If the store is gone, so is torchrun, which a trainer notices by itself.
        with contextlib.suppress(RuntimeError):
            return self.speaks and self.store.check(["signal"])
        return False

    def close(self):
        """End the engines, because the run is over."""
        # If one of them is gone already, the connection is broken.
        with contextlib.suppress(RuntimeError):
            self.tell(None)

    # ------------------------------------------------------------ the engines' end

    def begin(self):
        """Returns how the trainers say that the run begins. From now on they decide what a signal does."""
        for name in (signal.SIGTERM, signal.SIGINT):
            signal.signal(name, self._signal)
        opening = self._next("rank 0 (trainer) to begin")
        # sys.exit does not call sys.excepthook.
        atexit.register(self._tell_failure, f"{self.me} stops, and its message says why")
        return opening

    def _signal(self, *_):
        # If the store is gone, so is torchrun, which the trainers notice by themselves.
        with contextlib.suppress(RuntimeError):
            self.store.set("signal", "")

    def send(self, kind, number, sampled):
        """Send rollouts to the trainers, who may take them much later."""
        if kind == "step":
            sampled.figures |= {"timing_s/wait_for_weights": self.waited, "perf/engines_busy": self.busy()}
        self.outgoing.put(packed(((kind, number), sampled)))

    def weights(self, version):
        """Returns the named tensors of a version as soon as they are here. Older versions are dropped."""
        found = -1
        while found < version:
            found, tensors = self._next(f"rank 0 (trainer) to send the weights of step {version}")
        return tensors

    def wait_for_the_end(self):
        """Wait until the trainers end this process. It may take them long to save the last model."""
        threading.Event().wait()

    def _next(self, what):
        began = time.monotonic()
        try:
            return self.heard.get(timeout=self.seconds)
        except queue.Empty:
            raise self._in_vain(what) from None
        finally:
            self.waited += time.monotonic() - began

    def _listen(self):
        # Takes weights into host memory while the engine works, and ends this process with the run.
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.heard.put(self._hear())
        tensors = []
        while (words := self._hear()) is not None:
            version, layout, dtype = words
            if layout is None:
                self.heard.put((version, tensors))
                self.newest, tensors = version, []
                continue
            sizes = [shape.numel() for _, shape in layout]
            flat = torch.empty(sum(sizes), dtype=dtype, device=self.device)
            self.wire.broadcast(flat, 0).wait(FOREVER)
            tensors += [(name, piece.view(shape))
                        for (name, shape), piece in zip(layout, flat.cpu().split(sizes))]
        distributed.end(0)

    def _hear(self):
        return unpacked(lambda tensor: self.gloo.broadcast(tensor, 0).wait(FOREVER))

    def _post(self):
        while True:
            for tensor in self.outgoing.get():
                self.gloo.send([tensor], 0, 0).wait(FOREVER)

    # ------------------------------------------------------------ failures

    def _in_background(self, function):
        def work():
            try:
                function()
            except Exception as error:
                # The trainer may have failed, and gets the time to say why.
                time.sleep(SOON)
                self._end(f"rank 0 (trainer) is gone: {error}")

        threading.Thread(target=work, daemon=True).start()

    def _fail(self, kind, error, trace):
        # Python itself would wait for PyTorch's threads, which may wait for a rank that hangs. PyTorch
        # replaces sys.stderr while it calls this.
        with contextlib.suppress(OSError, ValueError):
            traceback.print_exception(kind, error, trace, file=sys.__stderr__)
        self._tell_failure(f"{'' if str(error).startswith(self.me) else self.me + ' failed: '}{error}")
        distributed.end(1)

    def _tell_failure(self, message):
        tell_launcher(message)
        with contextlib.suppress(RuntimeError):
            self.store.set("failure", f"{self.number} {message}")
        # This process may be the one that keeps the store, which the others still have to read.
        time.sleep(1)

    def _await_failure(self):
        # It needs its own connection, because a connection to the store can do nothing else while it waits.
        store = self.store.clone()
        store.set_timeout(FOREVER)
        # If the store is gone, so is torchrun, which others notice.
        with contextlib.suppress(RuntimeError):
            number, message = store.get("failure").decode().split(" ", 1)
            if number != str(self.number):
                self._end(message)

    def _end(self, message):
        tell_launcher(message, later=1)
        with contextlib.suppress(OSError, ValueError):
            print(f"{self.me} ends: {message}", file=sys.stderr)
        distributed.end(1)


def packed(words):
    # Returns an object as two tensors: its size in bytes, and the bytes.
    data = torch.frombuffer(bytearray(pickle.dumps(words)), dtype=torch.uint8)
    return torch.tensor([len(data)]), data


def unpacked(fill):
    # Returns the object of two such tensors, which fill(tensor) receives.
    size = torch.empty(1, dtype=torch.int64)
    fill(size)
    data = torch.empty(size.item(), dtype=torch.uint8)
    fill(data)
    return pickle.loads(data.numpy())


def kept_ahead(state, settings):
    """Returns {step: Sampled}: what a run's state holds for the next steps, if these settings allow it."""
    fits = all(state["settings"].get(key) == getattr(settings, key) for key in SAMPLED_WITH)
    return {step: Sampled.from_json(entry) for step, entry in state["ahead"]} if fits else {}


def staleness(rollouts, step):
    """Returns by how many steps the policy of `step` is ahead of those that sampled its tokens: mean, max."""
    ages, counts = [], []
    for r in rollouts:
        starts, versions = np.array(r.versions).T
        ages += (step - versions).tolist()
        counts += np.diff(starts, append=len(r.logprobs)).tolist()
    return float(np.average(ages, weights=counts)), max(ages)


def buckets(named_tensors, size=BUCKET):
    """Yields lists of (name, tensor) with at least `size` bytes each, and a last one with the rest."""
    bucket = []
    for pair in named_tensors:
        bucket.append(pair)
        if sum(tensor.nbytes for _, tensor in bucket) >= size:
            yield bucket
            bucket = []
    if bucket:
        yield bucket
