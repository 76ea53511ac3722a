"""
Trainers and engines on separate devices: two roles under one torchrun, and the bridge between them.

The last rollout_ranks ranks are engines, the others are trainers. All trainers form one process group, and
the ranks of each engine form another, so the collectives of FSDP2 and of vLLM stay inside their role. The
first trainer and all ranks of the engines are on the bridge, which carries

    weights     from the first trainer to every rank of every engine; they wait in its host memory
    rollouts    from the first rank of each engine to the first trainer, which passes them on to the others

If a rank ends, its connections break, and the ranks at their other ends end as well. A rank that waits for
longer than `timeout` is ended by its watchdog (runtime/distributed.py).
"""
import atexit
import datetime
import itertools
import os
import pickle
import queue
import signal
import sys
import threading
import zlib

import numpy as np
import torch
import torch.distributed as dist

import rollout
from episodes import jobs_for
from runtime import distributed

TOGETHER = 8                    # tensors of weights that travel together, because each message takes time
FOREVER = datetime.timedelta(days=10_000)
# Rollouts that were sampled ahead are of no use to a run that resumes with another value of one of these.
SAMPLED_WITH = ("max_staleness", "temperature", "max_completion_length", "max_turns", "reward_weights")


class Bridge:
    """The role of this rank, and its end of the bridge.

    settings: what configure returned. trains: whether this rank is a trainer. engines: how many engines there
    are. engine: the number of this rank's engine, from 0. newest: for an engine, the last version of the
    weights that has arrived. sampled: {(kind, number): Rollouts of all engines}, which the trainers have not
    taken yet. For runtime.run the bridge is the trainers' engine: it has the attributes name, naming and
    allocated, load_weights and close.
    """
    allocated = 0

    def __init__(self, settings):
        self.settings, self.sampled, self.ranks_per_engine = settings, {}, settings.vllm_tensor_parallel_size
        self.engines = settings.rollout_ranks // self.ranks_per_engine
        self.boxes = [{} for _ in range(self.engines)]          # what each has sent and nobody has taken
        kind = rollout.engine_class(settings.engine)
        self.name, self.naming = f"{kind.name}, {self.engines} apart", kind.naming

    def join(self):
        """Take the role of this rank; return the group that set_up joins. A collective of all ranks."""
        distributed.watchdog.limit(self.settings.timeout)       # some ranks may never join
        store, number, world_size = next(dist.rendezvous("env://"))
        trainers = world_size - self.settings.rollout_ranks
        self.trains, self.speaks = number < trainers, number == 0
        self.engine, rank = divmod(number - trainers, self.ranks_per_engine)
        role, size = f"engine{self.engine}", self.ranks_per_engine
        if self.trains:
            role, rank, size = "trainer", number, trainers
        # From here on these describe the role. vLLM reads them.
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), ROLE_NAME=role)
        if gpus := torch.cuda.device_count():
            os.environ["LOCAL_RANK"] = str(int(os.environ["LOCAL_RANK"]) % gpus)    # roles may share a GPU
        # The interpreter's own end would wait for threads of PyTorch, which wait for other ranks. A process
        # that comes to it was refused.
        atexit.register(distributed.end, 2)
        if self.speaks or not self.trains:
            # The first trainer has place 0, and the ranks of engines have the places from 1 on.
            place = max(0, number - trainers + 1), 1 + self.settings.rollout_ranks
            self.device = torch.device("cpu")
            self.gloo = self.wire = dist.ProcessGroupGloo(dist.PrefixStore("gloo/", store), *place, FOREVER)
            # For weights; but NCCL cannot connect two processes on one GPU.
            if gpus >= int(os.environ.get("LOCAL_WORLD_SIZE", 1)):
                self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
                self.wire = dist.ProcessGroupNCCL(dist.PrefixStore("nccl/", store), *place, FOREVER)
        if not self.trains:
            # heard: first how the run begins, then (version, tensors) of each weight sync.
            self.heard, self.newest, self.sent = queue.SimpleQueue(), -1, []
            threading.Thread(target=self._listen, daemon=True).start()
        return {"store": dist.PrefixStore(f"{role}/", store), "rank": rank, "world_size": size}

    # ------------------------------------------------------------ the trainers' end

    def tell(self, words):
        """Send all engines an object: how the run begins, or which weights follow."""
        if self.speaks:
            for tensor in packed(words):
                self.gloo.broadcast(tensor, 0).wait(FOREVER)

    def load_weights(self, named_tensors, version):
        """Send all engines the tensors that weights.engine_weights yields. A collective of the trainers."""
        named_tensors = iter(named_tensors)
        while some := dict(itertools.islice(named_tensors, TOGETHER)):
            if self.speaks:
                flat = torch.cat([tensor.reshape(-1) for tensor in some.values()]).to(self.device)
                self.tell((version, {name: tensor.shape for name, tensor in some.items()}, flat.dtype))
                self.wire.broadcast(flat, 0).wait(FOREVER)
        self.tell((version, {}, None))                          # these weights are complete

    def take(self, kind, number, prompts=()):
        """Return the Rollouts that all engines sampled under this kind and number, with their rows.

        prompts: the data.Prompts that were sampled for, in this order. A collective of the trainers.
        """
        rollouts = distributed.from_master(self._complete((kind, number)) if self.speaks else None)
        self.sampled.pop((kind, number), None)
        for i, r in enumerate(rollouts):
            r.row = prompts[i * len(prompts) // len(rollouts)].row | r.row
        return rollouts

    def ahead(self, steps):
        """Return what is sampled for these steps, as soon as it is, for run.state and run.arrays."""
        found = [self._complete(("step", step)) for step in steps] if self.speaks else []
        return [*steps], rollout.as_arrays(sum(found, []))

    def _complete(self, key):
        # Waits until all engines have sent what they sampled under this key, and joins it.
        if key not in self.sampled:
            for e, box in enumerate(self.boxes):
                first = 1 + e * self.ranks_per_engine           # the place of its first rank
                while key not in box:
                    box |= [unpacked(lambda tensor: self.gloo.recv([tensor], first, 0))]
            self.sampled[key] = sum((box.pop(key) for box in self.boxes), [])
        return self.sampled[key]

    def close(self):
        """End the engines, because the run is over."""
        self.tell(None)

    # ------------------------------------------------------------ the engines' end

    def begin(self):
        """Return how the trainers say that the run begins. From now on they decide what a signal does."""
        for name in (signal.SIGTERM, signal.SIGINT):            # torchrun passes a signal on to all ranks
            signal.signal(name, signal.SIG_IGN)
        return self.heard.get()

    def send(self, kind, number, rollouts):
        """Send rollouts to the trainers, who may take them much later."""
        # A tensor stays here until it has gone. The trainers take everything in order, and no engine is more
        # than max_staleness steps, two evaluations and a beginning ahead of what they wait for.
        for tensor in packed(((kind, number), rollouts)):
            self.sent.append((self.gloo.send([tensor], 0, 0), tensor))
        while len(self.sent) > 2 * (self.settings.max_staleness + 4):
            self.sent.pop(0)[0].wait(FOREVER)

    def weights(self, version):
        """Return the named tensors of a version as soon as they are here. Older versions are dropped."""
        distributed.watchdog.moved(f"engine {self.engine}, before the weights of step {version}")
        found = -1
        while found < version:
            found, tensors = self.heard.get()
        return tensors

    def _listen(self):
        # Takes weights into host memory while the engine works, and ends this process with the run.
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        hear, tensors = lambda: unpacked(lambda tensor: self.gloo.broadcast(tensor, 0)), []
        try:
            self.heard.put(hear())
            while words := hear():
                version, shapes, dtype = words
                if not shapes:                                  # these weights are complete
                    self.heard.put((version, tensors))
                    self.newest, tensors = version, []
                    continue
                sizes = [shape.numel() for shape in shapes.values()]
                flat = torch.empty(sum(sizes), dtype=dtype, device=self.device)
                self.wire.broadcast(flat, 0).wait(FOREVER)
                tensors += [(name, piece.view(shapes[name]))
                            for name, piece in zip(shapes, flat.cpu().split(sizes))]
        except RuntimeError:                                    # the first trainer has ended
            sys.excepthook(*sys.exc_info())
            distributed.end(1)
        distributed.end(0)


def sample_for_trainers(bridge, s, table, scorer, train_set, eval_set, version, position, kept):
    """Do an engine's work until the run is over: sample, score, send, and take the next weights.

    s: a script's settings. table: an episodes.Table with the engine. version: that of the weights which the
    engine has, and the step to begin with, whose prompts are drawn from position on. kept: the keys of what
    the trainers have already.
    """
    eval_steps = {*range(0, s.max_steps, s.eval_interval or s.max_steps), s.max_steps}  # that begin with one
    number, jobs = version, {}                                  # {key: jobs of table}

    def begin(key, name, prompts, n):
        # n adjacent completions for each of this engine's prompts. Their seeds do not depend on the number of
        # engines.
        first, end = (e * len(prompts) // bridge.engines for e in (bridge.engine, bridge.engine + 1))
        seeds = [zlib.crc32(f"{s.seed} {name} {i}".encode()) for i in range(first, end)]
        jobs[key] = jobs_for(prompts[first:end], n, seeds, s.max_completion_length, s.temperature)
        table.add(key, jobs[key])

    def advance():
        # Takes one step of the engine, then scores and sends what is complete.
        distributed.watchdog.moved(f"engine {bridge.engine}, which samples for {[*table.groups]}")
        for key, rollouts in table.step().items():
            scorer(rollouts)
            # The trainers have the rows. They get only what an environment's reset has changed in them.
            for r, (row, _) in zip(rollouts, jobs.pop(key)):
                r.row = {name: value for name, value in r.row.items() if value is not row[name]}
            bridge.send(*key, rollouts)

    if s.lora_rank and version:                                 # the engine was loaded with the base model
        table.engine.switch(version)
    while True:
        if version in eval_steps:
            begin(("eval", version), "eval", eval_set, s.eval_samples)
            while ("eval", version) in table.groups:
                advance()
        if version == s.max_steps:
            distributed.watchdog.limit(0)
            threading.Event().wait()                            # until _listen ends this process
        while not (s.in_flight and bridge.newest > version):
            # The schedule says which steps these weights may sample for. train_async.save relies on it.
            while number <= version + s.max_staleness and number < s.max_steps:
                picked, position = train_set.draw(position, s.prompts_per_step, s.seed)
                if ("step", number) not in kept:
                    begin(("step", number), number, picked, s.num_generations)
                number += 1
            if not table.groups:
                break
            advance()
        version += 1
        while s.in_flight and version not in eval_steps and bridge.newest > version:
            version += 1                                        # an engine that is late takes the newest
        table.engine.switch(version)                            # waits for these weights


def packed(words):
    # Returns an object as two tensors: its size in bytes, and the bytes.
    data = torch.frombuffer(bytearray(pickle.dumps(words)), dtype=torch.uint8)
    return torch.tensor([len(data)]), data


def unpacked(receive):
    # Returns the object of two such tensors, which receive(tensor) begins to receive.
    size = torch.empty(1, dtype=torch.int64)
    receive(size).wait(FOREVER)
    data = torch.empty(size.item(), dtype=torch.uint8)
    receive(data).wait(FOREVER)
    return pickle.loads(data.numpy())


def kept_ahead(run, settings):
    """Return what a resumed run has for bridge.sampled, if it was sampled with the same settings."""
    kept, before = run.state["ahead"], run.state["settings"]
    if not kept or any(before.get(key) != vars(settings).get(key) for key in SAMPLED_WITH):
        return {}
    rollouts = rollout.from_arrays(run.arrays)
    N = len(rollouts) // len(kept)
    return {("step", step): rollouts[i * N:(i + 1) * N] for i, step in enumerate(kept)}


def staleness(rollouts, step):
    """Return by how many steps the policy of `step` is ahead of those that sampled its tokens, for a log."""
    ages = []                                                   # of each sampled token
    for r in rollouts:
        starts, versions = np.array(r.versions).T
        ages += np.repeat(step - versions, np.diff(starts, append=len(r.logprobs))).tolist()
    return {"async/staleness/mean": sum(ages) / len(ages), "async/staleness/max": max(ages)}
