"""
Trainers and engines on separate devices: two roles under one torchrun, and the bridge between them.

The last rollout_ranks ranks are engines, the others are trainers. All trainers form one process group, and
the ranks of each engine form another, so the collectives of FSDP2 and of vLLM stay inside their role. The
first trainer and all ranks of the engines are on the bridge, which carries

    weights     from the first trainer to every rank of every engine; they wait in its host memory
    rollouts    from the first rank of each engine to the first trainer, which passes them on to the others

The first trainer and the engines wait for each other for at most half of `timeout`. If a rank ends, its
connections break, and the ranks at their other ends say so and end as well.
"""
import atexit
import datetime
import os
import pickle
import queue
import signal
import sys
import threading
import time
import zlib

import numpy as np
import torch
import torch.distributed as dist

import rollout
from runtime import distributed

BUCKET = 64 * 2 ** 20           # bytes: smaller tensors travel together
FOREVER = datetime.timedelta(days=10_000)
# Rollouts that were sampled ahead are of no use to a run that resumes with another value of one of these.
SAMPLED_WITH = ("max_staleness", "temperature", "max_completion_length", "max_turns", "reward_weights")


class Bridge:
    """The role of this rank, and its end of the bridge.

    settings: what configure returned. trains: whether this rank is a trainer. engines: how many engines there
    are. engine: the number of this rank's engine, from 0. newest: for an engine, the last version of the
    weights that has arrived. For runtime.run the bridge is the trainers' engine: it has the attributes name,
    naming and allocated, load_weights and close.
    """
    allocated = 0

    def __init__(self, settings):
        self.timeout, self.waited = settings.timeout, 0.0
        # Afterwards the watchdog would end a rank, and it knows less.
        self.patience = datetime.timedelta(seconds=self.timeout / 2) if self.timeout else FOREVER
        self.rollout_ranks, self.ranks_per_engine = settings.rollout_ranks, settings.vllm_tensor_parallel_size
        self.engines = self.rollout_ranks // self.ranks_per_engine
        kind = rollout.engine_class(settings.engine)
        self.name, self.naming = f"{kind.name}, {self.engines} apart", kind.naming

    def join(self):
        """Take the role of this rank; return the group that set_up joins. A collective of all ranks."""
        distributed.watchdog.limit(self.timeout)                # some ranks may never join
        store, number, world_size = next(dist.rendezvous("env://"))
        self.trainers = world_size - self.rollout_ranks
        self.trains, self.speaks = number < self.trainers, number == 0
        self.engine, rank = divmod(number - self.trainers, self.ranks_per_engine)
        role, size = f"engine {self.engine}", self.ranks_per_engine
        if self.trains:
            role, rank, size = "trainer", number, self.trainers
        # What each engine sent and nobody took yet: {("step" or "eval", number): (rollouts, figures)}.
        self.boxes = [{} for _ in range(self.engines)] if self.speaks else []
        self.me = f"rank {number} ({role})"
        # From here on these describe the role. vLLM reads them.
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), ROLE_NAME=role.replace(" ", ""))
        if gpus := torch.cuda.device_count():
            os.environ["LOCAL_RANK"] = str(int(os.environ["LOCAL_RANK"]) % gpus)    # roles may share a GPU
        # The interpreter's own end would wait for threads of PyTorch, which wait for other ranks. A process
        # that comes here without an error was refused.
        sys.excepthook = self._failed
        atexit.register(distributed.end, 2)
        if self.speaks or not self.trains:
            # The first trainer has place 0, and the ranks of engines have the places from 1 on.
            place = max(0, number - self.trainers + 1), 1 + self.rollout_ranks
            # NCCL cannot connect two processes on one GPU.
            cuda = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
            self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
            self.gloo = self.wire = dist.ProcessGroupGloo(dist.PrefixStore("gloo/", store), *place, FOREVER)
            if cuda:                                            # for weights
                self.wire = dist.ProcessGroupNCCL(dist.PrefixStore("nccl/", store), *place, FOREVER)
        if not self.trains:
            # heard: first how the run begins, then (version, tensors) of each weight sync.
            self.heard, self.outgoing, self.newest = queue.SimpleQueue(), queue.SimpleQueue(), -1
            for work in (self._listen, self._post):
                threading.Thread(target=work, daemon=True).start()
        distributed.watchdog.limit(0)
        return {"store": dist.PrefixStore(f"{role}/", store), "rank": rank, "world_size": size}

    # ------------------------------------------------------------ the trainers' end

    def tell(self, words):
        """Send all engines an object: how the run begins, or which weights follow."""
        if self.speaks:
            for tensor in packed(words):
                self._wait(self.patience, "the engines to listen", self.gloo.broadcast, tensor, 0)

    def load_weights(self, named_tensors, version):
        """Send all engines the tensors that Network.full_weights yields. A collective of the trainers."""
        for bucket in buckets(named_tensors):
            self.tell((version, [(name, tensor.shape) for name, tensor in bucket], bucket[0][1].dtype))
            if self.speaks:
                flat = torch.cat([tensor.reshape(-1) for _, tensor in bucket])
                self._wait(self.patience, f"the engines to take the weights of step {version}",
                           self.wire.broadcast, flat.to(self.device), 0)
        self.tell((version, None, None))                       # these weights are complete

    def take(self, kind, number):
        """Return the rollouts that all engines sent under this kind and number, and means of their figures.

        A collective of the trainers.
        """
        key = kind, number
        for e, box in enumerate(self.boxes):
            place = 1 + e * self.ranks_per_engine
            what = f"rank {self.trainers - 1 + place} (engine {e}) to send {kind} {number}"
            while key not in box:
                box |= [unpacked(lambda tensor: self._wait(
                    self.patience, what, self.gloo.recv, [tensor], place, 0))]
        parts = distributed.from_master([box.pop(key) for box in self.boxes])
        return [r for rollouts, _ in parts for r in rollouts], {
            name: sum(figures[name] for _, figures in parts) / len(parts) for name in parts[0][1]}

    def signalled(self):
        """Return whether an engine has got a signal to stop."""
        return any(("signal", 0) in box for box in self.boxes)

    def close(self):
        """End the engines, because the run is over."""
        self.tell(None)

    # ------------------------------------------------------------ the engines' end

    def begin(self):
        """Return how the trainers say that the run begins. From now on they decide what a signal does."""
        for name in (signal.SIGTERM, signal.SIGINT):
            signal.signal(name, lambda *_: self.send("signal", 0, [], {}))
        return self._next("rank 0 (trainer) to begin")

    def send(self, kind, number, rollouts, figures):
        """Send rollouts and metrics of their sampling to the trainers, who may take them much later."""
        if kind == "step":
            figures["timing_s/wait_for_weights"], self.waited = self.waited, 0.0
        self.outgoing.put(packed(((kind, number), (rollouts, figures))))

    def weights(self, version):
        """Return the named tensors of a version as soon as they are here. Older versions are dropped."""
        found = -1
        while found < version:
            found, tensors = self._next(f"rank 0 (trainer) to send the weights of step {version}")
        return tensors

    def _next(self, what):
        began = time.monotonic()
        try:
            return self.heard.get(timeout=self.patience.total_seconds())
        except queue.Empty:
            self._lost(what, f"half of timeout={self.timeout:g} seconds has passed")
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
            self._wait(FOREVER, "rank 0 (trainer)", self.wire.broadcast, flat, 0)
            tensors += [(name, piece.view(shape))
                        for (name, shape), piece in zip(layout, flat.cpu().split(sizes))]
        distributed.end(0)

    def _hear(self):
        return unpacked(lambda tensor: self._wait(
            FOREVER, "rank 0 (trainer)", self.gloo.broadcast, tensor, 0))

    def _post(self):
        while True:
            for tensor in self.outgoing.get():
                self._wait(FOREVER, "rank 0 (trainer)", self.gloo.send, [tensor], 0, 0)

    # ------------------------------------------------------------ failures

    def _wait(self, patience, what, begin, *arguments):
        try:
            begin(*arguments).wait(patience)
        except RuntimeError as error:
            self._lost(what, str(error))

    def _lost(self, what, problem):
        # Another rank stands still, or has ended, which mostly has an earlier cause.
        message = f"{self.me} waited in vain for {what}: {problem}"
        distributed.end(1, message)

    def _failed(self, *error):
        distributed.failed(*error)
        atexit.register(distributed.end, 1)                     # the last one is called first


def sample_for_trainers(bridge, s, table, scorer, train_set, eval_set, version, position, kept):
    """Do an engine's work until the run is over: sample, score, send, and take the next weights.

    s: a script's settings. table: an episodes.Table with the engine. version: that of the weights which the
    engine has, and the step to begin with, whose prompts are drawn from position on. kept: steps that the
    trainers have rollouts for.
    """
    B = s.prompts_per_step // bridge.engines                    # prompts per step and engine
    own = range(bridge.engine * B, (bridge.engine + 1) * B)     # the places of this engine's prompts
    own_eval = range(bridge.engine, len(eval_set), bridge.engines)
    eval_steps = {*range(0, s.max_steps, s.eval_interval or s.max_steps), s.max_steps}  # that begin with one
    begun, number, engine = {}, version, table.engine

    def begin(kind, number, prompts, places, n, name):
        # n adjacent completions per prompt. Their seeds do not depend on the number of engines.
        sampling = s.max_completion_length, s.temperature, 1.0, 0
        seeds = {i: zlib.crc32(f"{s.seed} {name} {i}".encode()) for i in places}
        table.add((kind, number), [(prompts[i], seeds[i] + j, sampling) for i in places for j in range(n)])
        begun[kind, number] = time.perf_counter(), prompts, [i for i in places for _ in range(n)]

    def advance():
        # Takes one step of the engine, then scores and sends what is complete.
        for (kind, number), rollouts in table.step().items():
            ended, (began, prompts, places) = time.perf_counter(), begun.pop((kind, number))
            scorer(rollouts)
            times = {"timing_s/gen": ended - began, "timing_s/reward": time.perf_counter() - ended}
            for r, i in zip(rollouts, places):
                # The trainers have the rows. A prompt differs from its row's if `reset` has added to it.
                r.row = i, {} if r.row is prompts[i].row else {"prompt": r.row["prompt"]}
            bridge.send(kind, number, rollouts, times)

    if s.lora_rank and version:                                 # the engine was loaded with the base model
        engine.switch(version)
    while True:
        if version in eval_steps:
            begin("eval", version, eval_set, own_eval, s.eval_samples, "eval")
            while ("eval", version) in begun:
                advance()
        if version == s.max_steps:
            threading.Event().wait()                            # until _listen ends this process
        while not (s.in_flight and bridge.newest > version):
            # The schedule says which steps these weights may sample for. train_async.save relies on it.
            while number <= version + s.max_staleness and number < s.max_steps:
                picked, position = train_set.draw(position, s.prompts_per_step, s.seed)
                if number not in kept:
                    begin("step", number, picked, own, s.num_generations, number)
                number += 1
            if not begun:
                break
            advance()
        version += 1
        while s.in_flight and version not in eval_steps and bridge.newest > version:
            version += 1                                        # an engine that is late takes the newest
        engine.switch(version)                                  # waits for these weights


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


def kept_ahead(run, settings):
    """Return {step: (rollouts, figures)} of a resumed run for its next steps, if settings are the same."""
    kept, before = run.state["ahead"], run.state["settings"]
    if not kept or any(before.get(key) != vars(settings).get(key) for key in SAMPLED_WITH):
        return {}
    rollouts = rollout.from_arrays(run.arrays)
    N = len(rollouts) // len(kept)
    return {int(step): (rollouts[i * N:(i + 1) * N], kept[step]) for i, step in enumerate(kept)}


def staleness(rollouts, step):
    """Return by how many steps the policy of `step` is ahead of those that sampled its tokens: mean, max."""
    ages = []                                                   # of each sampled token
    for r in rollouts:
        starts, versions = np.array(r.versions).T
        ages += np.repeat(step - versions, np.diff(starts, append=len(r.logprobs))).tolist()
    return sum(ages) / len(ages), max(ages)


def buckets(named_tensors, size=BUCKET):
    """Yield lists of (name, tensor) with at least `size` bytes each, and a last one with the rest."""
    bucket = []
    for pair in named_tensors:
        bucket.append(pair)
        if sum(tensor.nbytes for _, tensor in bucket) >= size:
            yield bucket
            bucket = []
    if bucket:
        yield bucket
