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
import collections
import datetime
import os
import pickle
import queue
import signal
import sys
import threading
from functools import partial

import numpy as np
import torch
import torch.distributed as dist

import rollout
from options.saved_rollouts import as_arrays, from_arrays
from runtime import distributed
from weights import engine_weights

FOREVER = datetime.timedelta(days=10_000)
# Rollouts that were sampled ahead are of no use to a run that resumes with another value of one of these.
SAMPLED_WITH = ("max_staleness", "temperature", "top_p", "top_k", "min_p", "stop", "max_completion_length",
                "max_turns", "reward_weights")


class Bridge:
    """The role of this rank, and its end of the bridge.

    settings          what configure returned
    engines           how many engines there are
    ranks_per_engine  how many ranks each of them has
    kind              their class
    name              that of an engine: for runtime.run the bridge is the trainers' engine, which has this,
                      allocated, update_weights and close
    received          {(engine, key): the Rollouts of this engine}, which wait for those of other engines
    sampled           {key: the Rollouts of all engines}, which the trainers have not taken yet; a key is a
                      pair (kind, number). A script that resumes adds what kept_ahead returns.

    join() sets these:
    trains            whether this rank is a trainer
    speaks            whether it is the first trainer, which speaks for all of them
    engine            the number of this rank's engine, from 0
    gloo, wire        process groups of the ranks on the bridge; the wire carries weights, on `device`
    arrived           a queue with what the engine has been told and has not read: how the run begins, then
                      pairs (version, named tensors)
    newest            the last version of the weights that has arrived
    sent              pairs (transfer, tensor) of what the engine has sent last, two for each message
    """
    allocated = 0
    newest = -1

    def __init__(self, settings):
        self.settings = settings
        self.ranks_per_engine = settings.vllm_tensor_parallel_size
        self.engines = settings.rollout_ranks // self.ranks_per_engine
        self.kind = rollout.engine_class(settings.engine)
        self.name = f"{self.kind.name}, {self.engines} apart"
        self.received = {}
        self.sampled = {}

    def join(self):
        """Take the role of this rank; return the group that set_up joins. A collective of all ranks."""
        distributed.watchdog.limit(self.settings.timeout)       # some ranks may never join
        store, number, world_size = next(dist.rendezvous("env://"))
        trainers = world_size - self.settings.rollout_ranks
        self.trains = number < trainers
        self.speaks = number == 0
        if self.trains:
            role, rank, size = "trainer", number, trainers
        else:
            self.engine, rank = divmod(number - trainers, self.ranks_per_engine)
            role, size = f"engine{self.engine}", self.ranks_per_engine
        # From here on these describe the role. vLLM reads them.
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), ROLE_NAME=role)
        gpus = torch.cuda.device_count()
        if gpus:                                                # roles may share a GPU
            os.environ["LOCAL_RANK"] = str(int(os.environ["LOCAL_RANK"]) % gpus)
        # If a rank is refused, its process ends here. The interpreter's own end would wait for threads of
        # PyTorch, and these wait for other ranks.
        atexit.register(distributed.end, 2)
        if self.speaks or not self.trains:
            # On the bridge the first trainer has rank 0, and the ranks of engines follow.
            place = max(0, number - trainers + 1), 1 + self.settings.rollout_ranks
            self.gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo/", store), *place, FOREVER)
            self.wire = self.gloo
            self.device = torch.device("cpu")
            # NCCL is for weights, but it cannot connect two processes on one GPU.
            if gpus >= int(os.environ.get("LOCAL_WORLD_SIZE", 1)):
                self.wire = dist.ProcessGroupNCCL(dist.PrefixStore("nccl/", store), *place, FOREVER)
                self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        if not self.trains:
            self.arrived = queue.SimpleQueue()
            # A tensor has to stay until it has gone. The trainers take everything in order, and no engine is
            # more than max_staleness steps, two evaluations and a beginning ahead of what they wait for.
            self.sent = collections.deque(maxlen=2 * (self.settings.max_staleness + 4))
            threading.Thread(target=self._listen, daemon=True).start()
        return {"store": dist.PrefixStore(f"{role}/", store), "rank": rank, "world_size": size}

    # ------------------------------------------------------------ the trainers' end

    def tell(self, message):
        """Send all engines an object. The first one says how the run begins, and _listen reads the others."""
        if self.speaks:
            for tensor in as_tensors(message):
                self.gloo.broadcast(tensor, 0).wait(FOREVER)

    def update_weights(self, policy, version):
        """Send all engines the weights of a model.Policy. A collective of the trainers."""
        dtype = distributed.compute_dtype(self.settings.dtype)
        for name, value in engine_weights(policy, self.kind.naming, dtype):
            if not torch.is_tensor(value):                      # the checksums, which come last
                self.tell(("checksums", name, value))
            elif self.speaks:
                self.tell(("tensor", name, value.shape, value.dtype))
                self.wire.broadcast(value.to(self.device).contiguous(), 0).wait(FOREVER)
        self.tell(("complete", version))

    def close(self):
        """End the engines, because the run is over."""
        self.tell(("end",))

    def take(self, kind, number, prompts=()):
        """Return the Rollouts that all engines sampled under this kind and number, with their rows.

        prompts: the data.Prompts that were sampled for, in this order. A collective of the trainers.
        """
        key = kind, number
        rollouts = distributed.from_master(self._complete(key) if self.speaks else None)
        self.sampled.pop(key, None)
        for i, r in enumerate(rollouts):
            r.row = prompts[i * len(prompts) // len(rollouts)].row | r.row
        return rollouts

    def ahead(self, steps):
        """Return what is sampled for these steps, as soon as it is, for run.state and run.arrays."""
        rollouts = []
        if self.speaks:
            for step in steps:
                rollouts += self._complete(("step", step))
        return [*steps], as_arrays(rollouts)

    def _complete(self, key):
        """Return what all engines sampled under a key, as soon as they have sent it."""
        if key not in self.sampled:
            rollouts = []
            for engine in range(self.engines):
                first_rank = 1 + engine * self.ranks_per_engine         # on the bridge
                while (engine, key) not in self.received:
                    next_key, next_rollouts = receive(partial(self.gloo.recv, srcRank=first_rank, tag=0))
                    self.received[engine, next_key] = next_rollouts
                rollouts += self.received.pop((engine, key))
            self.sampled[key] = rollouts
        return self.sampled[key]

    # ------------------------------------------------------------ the engines' end

    def begin(self):
        """Return how the trainers say that the run begins. From now on they decide what a signal does."""
        for number in distributed.STOPPING:                     # torchrun passes a signal on to all ranks
            signal.signal(number, signal.SIG_IGN)
        return self.arrived.get()

    def send(self, kind, number, rollouts):
        """Send rollouts to the trainers, who may take them much later."""
        for tensor in as_tensors(((kind, number), rollouts)):
            self.sent.append((self.gloo.send([tensor], 0, 0), tensor))

    def weights(self, version):
        """Return the named tensors of a version as soon as they are here. Older versions are dropped."""
        distributed.watchdog.moved(f"engine {self.engine}, before the weights of step {version}")
        arrived = -1
        while arrived < version:
            arrived, named_tensors = self.arrived.get()
        return named_tensors

    def _listen(self):
        """Take weights into host memory while the engine works. At the end of the run, end this process."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        hear = partial(receive, self.gloo.broadcast)            # from rank 0, which is the first trainer
        named_tensors = []
        try:
            self.arrived.put(hear())
            kind, *details = hear()
            while kind != "end":
                if kind == "tensor":
                    name, shape, dtype = details
                    tensor = torch.empty(shape, dtype=dtype, device=self.device)
                    self.wire.broadcast(tensor, 0).wait(FOREVER)
                    named_tensors.append((name, tensor.cpu()))
                elif kind == "checksums":
                    named_tensors.append(details)
                else:                                           # the weights of this version are complete
                    [version] = details
                    self.arrived.put((version, named_tensors))
                    self.newest = version
                    named_tensors = []
                kind, *details = hear()
        except RuntimeError:                                    # the first trainer has ended
            sys.excepthook(*sys.exc_info())
            distributed.end(1)
        distributed.end(0)


def as_tensors(message):
    """Return an object as two tensors: the number of its bytes, and the bytes."""
    content = torch.frombuffer(bytearray(pickle.dumps(message)), dtype=torch.uint8)
    return torch.tensor([len(content)]), content


def receive(transfer):
    """Return an object that was sent by as_tensors; transfer([tensor]) begins to receive a tensor."""
    size = torch.empty(1, dtype=torch.int64)
    transfer([size]).wait(FOREVER)
    content = torch.empty(size.item(), dtype=torch.uint8)
    transfer([content]).wait(FOREVER)
    return pickle.loads(content.numpy())


def sample_for_trainers(bridge, s, open_episodes, scorer, train_set, eval_set, version, position, sampled):
    """Do an engine's work until the run is over: sample, score, send, and take the next weights.

    s: a script's settings. open_episodes: the episodes.OpenEpisodes of the engine. version: the version of
    the engine's weights, which is also the number of the step to begin with. position: where the drawing of
    this step's prompts begins. sampled: the keys of what the trainers have already, or do not need.
    """
    # The versions that begin with an evaluation, which is also sampled with them.
    eval_steps = {*range(0, s.max_steps, s.eval_interval or s.max_steps), s.max_steps}
    number = version                                            # of the next step to sample for
    jobs = {}                                                   # {key: the jobs that are being played}

    def begin(key, name, prompts, n, prefix=""):
        """Begin n adjacent completions for each of this engine's prompts. prefix: see rollout.sampling_of."""
        first = bridge.engine * len(prompts) // bridge.engines
        end = (bridge.engine + 1) * len(prompts) // bridge.engines
        # A seed depends on the place of its prompt, whatever the number of engines is.
        names = [f"{name} {i}" for i in range(first, end)]
        jobs[key] = rollout.jobs_for(s, prompts[first:end], n, names, prefix)
        open_episodes.add(key, jobs[key])

    def advance():
        """Take one step of the engine, then score and send what is complete."""
        distributed.watchdog.moved(f"engine {bridge.engine}, which samples for {[*open_episodes.groups]}")
        for key, rollouts in open_episodes.step().items():
            scorer(rollouts)
            # The trainers have the rows. They get only what an environment's reset has changed in them.
            for r, (row, _) in zip(rollouts, jobs.pop(key)):
                r.row = {name: value for name, value in r.row.items() if value is not row[name]}
            bridge.send(*key, rollouts)

    engine = open_episodes.engine
    if s.lora_rank:                                             # the engine was loaded with the base model
        engine.switch(version)
    while True:
        key = "eval", version
        if version in eval_steps and key not in sampled:
            begin(key, "eval", eval_set, s.eval_samples, "eval_")
            while key in open_episodes.groups:
                advance()
        if version == s.max_steps:
            distributed.watchdog.limit(0)
            threading.Event().wait()                            # until _listen ends this process
        while not (s.in_flight and bridge.newest > version):
            # The schedule says which steps these weights may sample for. train_async.save relies on it.
            while number <= version + s.max_staleness and number < s.max_steps:
                prompts, position = train_set.draw(position, s.prompts_per_step, s.seed)
                if ("step", number) not in sampled:
                    begin(("step", number), number, prompts, s.num_generations)
                number += 1
            if not open_episodes.groups:
                break
            advance()
        version += 1
        if s.in_flight:
            # An engine that is late takes the newest weights. It leaves out no evaluation, because the
            # trainers wait for that before they make newer ones.
            version = max(version, bridge.newest)
        engine.switch(version)                                  # waits for these weights


def kept_ahead(run, settings):
    """Return what a resumed run has for bridge.sampled, if it was sampled with the same settings.

    Raises ValueError if an older version of this code has saved it.
    """
    steps = run.state["ahead"]
    same = all(run.state["settings"].get(key) == getattr(settings, key) for key in SAMPLED_WITH)
    if not (steps and same):
        return {}
    rollouts = from_arrays(run.arrays)
    N = len(rollouts) // len(steps)
    return {("step", step): rollouts[i * N:(i + 1) * N] for i, step in enumerate(steps)}


def staleness(rollouts, step):
    """Return by how many steps the policy of `step` is ahead of those that sampled its tokens, for a log."""
    ages = []                                                   # one number for each sampled token
    for r in rollouts:
        starts, versions = np.array(r.versions).T
        lengths = np.diff(starts, append=len(r.logprobs))
        ages += np.repeat(step - versions, lengths).tolist()
    return {"async/staleness/mean": sum(ages) / len(ages), "async/staleness/max": max(ages)}
