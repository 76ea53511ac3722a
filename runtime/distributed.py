"""The processes of a run, one per device, which all run the same script, and how they communicate.

set_up, gathered and from_master are collectives: every rank has to call them, in the same order. The watchdog
ends a rank that would wait in one of them for ever.
"""
import atexit
import contextlib
import ctypes
import datetime
import dis
import faulthandler
import gc
import inspect
import io
import os
import platform
import signal
import sys
import threading
import time

# OpenMP's threads wait for one another by spinning. If another process wants a core as well, they use up the
# time that the last of them needs, and a step takes twenty times as long. So let them soon go to sleep
# (bench/busy.py). PyTorch reads this when it is loaded.
if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
    os.environ["GOMP_SPINCOUNT"] = "4000"
# If torchrun is killed, Linux sends its workers SIGTERM: a run saves and stops.
if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)                  # PR_SET_PDEATHSIG

# At these a run saves and stops. SIGHUP comes when a terminal is closed; schedulers may warn by the last two.
STOPPING = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2


class Ending:
    """Ends the process of a run that is over: after all other exit handlers, without Python's own shutdown.

    During that shutdown about one in sixty runs of two ranks aborted after everything was saved ("terminate
    called without an active exception"), most likely because a thread of PyTorch was still waiting for
    Python's lock. script: the outermost frame of the script; None while its run is not over. left: whether
    `leave` has ended it.
    """
    script = None
    left = False

    def begin(self):
        """Note that the run is over. The script may go on."""
        atexit.unregister(end)                                  # it is for a run that is not over
        self.script = inspect.stack(0)[-1].frame

    def finish(self):
        # The last instruction of a script that comes to its end is a RETURN. If sys.exit or an error has
        # ended it, only the interpreter knows the exit code, and so it ends the process.
        script = self.script
        if self.left or script and dis.opname[script.f_code.co_code[script.f_lasti]].startswith("RETURN"):
            gc.unfreeze()                                       # get_objects leaves out what is frozen
            for item in gc.get_objects():
                with contextlib.suppress(Exception):
                    if issubclass(type(item), io.IOBase):       # isinstance would ask the object itself
                        item.flush()
            if dist.is_initialized():
                dist.destroy_process_group()
            end(0)


ending = Ending()
atexit.register(ending.finish)          # before imports register others: the first one runs last

import torch
import torch.distributed as dist
from tqdm import tqdm

from configurator import closing, fail, make_lenient, tell_launcher

# What is imported by now will never be garbage. Otherwise Python would look through all of it again and again
# while it imports transformers, which would take a tenth to a quarter of the time of all imports.
gc.freeze()
# In bfloat16 on an H100, cuDNN's attention of PyTorch 2.11 fails for some masks ("Expected
# mha_graph.execute(...) to be true"), and plans anew for each shape. PyTorch's other kernels take its place.
# To be removed once it computes what tests/test_cuda.py asks of it.
torch.backends.cuda.enable_cudnn_sdp(False)


def set_up(timeout=0.0, sequence_parallel_size=1, shard_ranks=0, role=None):
    """Join the process group that torchrun's environment describes; without torchrun, make a group of one.

    timeout: the seconds after which the watchdog will end a rank that stands still; 0 if it never will.
    sequence_parallel_size: how many neighbouring ranks share each line of tokens. shard_ranks: how many
    ranks share each copy of the weights; 0 stands for all. role: where torchrun's ranks have roles
    (placement.py), a function that returns store, rank and world_size of the group to join instead.
    Returns rank, world_size, device, the mesh of all ranks, whose last dimension FSDP2 shards over, and the
    group of the ranks that share lines with this one, or None.
    """
    make_lenient()
    sys.excepthook = failed
    threading.Thread(target=watchdog.watch, daemon=True).start()
    gc.freeze()                                                 # the rest of what was imported
    if role:
        group = role()
    elif "RANK" in os.environ:
        group = {}
    else:
        group = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    else:
        device = torch.device("cpu")
        backend = "gloo"
        if platform.libc_ver()[0] == "glibc":
            keep_freed_memory()
    # PyTorch's own limit on each collective comes after the watchdog's, which says more.
    seconds = 1e6
    if timeout > 0:
        seconds = min(max(1800, 2 * timeout), seconds)
    limit = datetime.timedelta(seconds=seconds)
    try:
        dist.init_process_group(backend, timeout=limit, **group)
    except dist.DistError:                                      # another rank is missing, for example
        raise
    except (ValueError, RuntimeError) as error:                 # RANK alone, or a network that is not there
        fail(str(error))
    world_size = dist.get_world_size()
    # If a size does not divide the ranks, it is ignored here. For ranks that train, check_run refuses it
    # next; ranks that are only engines do not need it.
    if 0 < shard_ranks < world_size and world_size % shard_ranks == 0:
        mesh = dist.init_device_mesh(device.type, (world_size // shard_ranks, shard_ranks),
                                     mesh_dim_names=("copies", "shards"))
    else:
        mesh = dist.init_device_mesh(device.type, (world_size,))
    sequence_group = None
    if sequence_parallel_size > 1 and world_size % sequence_parallel_size == 0:
        sequence_group, _ = dist.new_subgroups(sequence_parallel_size, timeout=limit)
    return dist.get_rank(), world_size, device, mesh, sequence_group


def compute_dtype(dtype):
    """Return the dtype that layers compute in. dtype: the setting."""
    if dtype != "auto":
        return getattr(torch, dtype)
    return torch.bfloat16 if torch.cuda.is_available() else torch.float32


def keep_freed_memory():
    """Make glibc keep the memory that PyTorch frees, so that the next tensors can use it.

    Otherwise glibc returns it to the system and gets it back page by page, with a page fault for each, for
    every activation of every layer. With the memory kept, the update of 64 short sequences takes a fifth less
    time on two cores, logprobs over a vocabulary of 151,936 take half the time, and the process takes a few
    percent more memory.
    """
    M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3                 # from glibc's malloc.h
    mallopt = ctypes.CDLL(None).mallopt
    if not mallopt(M_MMAP_THRESHOLD, 2 ** 31 - 1):
        mallopt(M_MMAP_THRESHOLD, 2 ** 25)                      # the most that glibc before 2.35 accepts
    mallopt(M_TRIM_THRESHOLD, 2 ** 31 - 1)


# ---------------------------------------------------------------- collectives

def gathered(items):
    """Return the lists of all ranks joined into one, in the order of the ranks."""
    # On one rank the list is not sent, because to send a large one gloo's thread would start OpenMP threads
    # of its own, and on two cores everything after that would take one and a half times as long.
    lists = [items] * dist.get_world_size()
    if len(lists) > 1:
        dist.all_gather_object(lists, items)
    return sum(lists, [])


def from_master(value):
    """Return rank 0's value, on every rank."""
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def progress(items=None, name=None, unit="it"):
    """Return a tqdm over items, or without items one that counts units. On a terminal rank 0 shows it, on a
    line of stderr that vanishes at the end. Work of less than a second shows nothing."""
    hidden = dist.is_initialized() and dist.get_rank() > 0
    return tqdm(items, name, unit=unit, leave=False, delay=1, miniters=0, smoothing=0, disable=hidden or None)


# ---------------------------------------------------------------- how a process ends

def leave():
    """End the process, whose work is done, with the exit code 0: see Ending."""
    ending.begin()
    ending.left = True
    sys.exit()


def end(code):
    """End the process at once, from any thread. Each line that it has printed was written at once."""
    closing.close()
    os._exit(code)


def failed(kind, error, trace):
    """The sys.excepthook of a run, which also tells torchrun about the error."""
    # A lost connection mostly means that another process has failed first. Or the run is over, and as soon as
    # an engine's thread hears that, it ends this process (placement.py).
    later = 0
    if kind.__module__ == "torch.distributed" or "gloo/" in str(error):
        later = 60
        time.sleep(0.5)
    if "Sharding propagation failed" in str(error):
        error.add_note("PyTorch has no such operation for parameters that FSDP2 has sharded (DTensor): "
                       "docs/recipes.md says which optimizers work")
    tell_launcher(f"{kind.__name__}: {error}", later)
    sys.__excepthook__(kind, error, trace)
    # This comes now, because no thread can be started while the interpreter ends.
    closing.close()
    # The interpreter's own end may wait for other ranks. PyTorch prints what this hook has said after it.
    if not ending.script:
        atexit.register(end, 1)


class Watchdog:
    """Ends this process if it stands still, because it would wait for a lost rank for ever.

    It is a thread of its own, because a collective that waits for a lost rank never returns to Python.
    where: what the main thread does. idle: for how many seconds it has not called `moved`. timeout: how many
    seconds are too many; 0 sets no limit.
    """
    where = "the start"
    idle = 0
    timeout = 0.0

    def limit(self, timeout):
        """From now on, end the process after `timeout` seconds without a call of `moved`; 0 sets no limit."""
        self.timeout = timeout
        self.idle = 0

    def moved(self, where=None):
        """Tell the watchdog that the main thread makes progress, and where it is."""
        self.where = where or self.where
        self.idle = 0

    def watch(self):
        """Wait until the main thread has stood still for `timeout` seconds, and end the process."""
        while not 0 < self.timeout <= self.idle:
            # The seconds are counted here, because a clock runs on while a job is suspended.
            time.sleep(1)
            self.idle += 1
        message = (f"rank {os.environ.get('RANK', 0)} has stood still for timeout={self.timeout:g} seconds, "
                   f"in {self.where}: it waits for another rank, for its engine or for a reward. The run "
                   "stops; resume it from its newest checkpoint")
        tell_launcher(message)
        print(message, file=sys.stderr, flush=True)
        faulthandler.dump_traceback()                           # the line at which each thread is
        os._exit(1)


watchdog = Watchdog()
tqdm.monitor_interval = 0       # no thread that looks after bars: with miniters=0 each of them is up to date
