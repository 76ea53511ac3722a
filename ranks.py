"""The processes of a run: one a device, all running the same script, and what they tell each other.

All but `orphaned` and `leave` are collectives: every rank has to call them, in the same order.
"""
import ctypes
import os
import sys

import torch
import torch.distributed as dist

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3     # of glibc's malloc.h


def set_up():
    """Join the process group that torchrun's environment describes, or be alone without torchrun.

    Returns rank, world_size, device, and the mesh over all ranks that FSDP2 shards over.
    """
    cuda = torch.cuda.is_available()
    libc = ctypes.CDLL(None)
    if not cuda and hasattr(libc, "mallopt"):
        # glibc gives freed memory back to the system and gets it again page by page, each a fault, for every
        # activation of every layer. Kept instead, the update of 64 short sequences takes a fifth less time on
        # two cores, logprobs over a vocabulary of 151,936 half, and the process a few percent more memory.
        if not libc.mallopt(M_MMAP_THRESHOLD, 2 ** 31 - 1):
            libc.mallopt(M_MMAP_THRESHOLD, 2 ** 25)             # the most that glibc before 2.35 takes
        libc.mallopt(M_TRIM_THRESHOLD, 2 ** 31 - 1)
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", **alone)
    world_size = dist.get_world_size()
    return dist.get_rank(), world_size, device, dist.init_device_mesh(device.type, (world_size,))


PARENT = os.getppid()


def orphaned():
    """Whether torchrun has died without its workers, as by kill -9: they would go on alone."""
    return "RANK" in os.environ and os.getppid() != PARENT


def leave():
    """Leave the process group and end the process, without the interpreter's own shutdown.

    In that, one of some sixty runs of two ranks aborted after all was saved ("terminate called without an
    active exception"): most likely a thread of PyTorch's that was still waiting for Python's lock.
    """
    if dist.is_initialized():                                   # closing vLLM has ended the group already
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def total(values):
    """A list of numbers, each summed over all ranks, in float64."""
    return reduced(values, dist.ReduceOp.SUM)


def largest(values):
    """A list of numbers, each the largest of all ranks."""
    return reduced(values, dist.ReduceOp.MAX)


def reduced(values, op):
    tensor = torch.as_tensor(values, dtype=torch.float64).cpu()     # over gloo: numbers wait for no GPU
    dist.all_reduce(tensor, op)
    return tensor.tolist()


def mean(values):
    """Mean over all ranks of the values that are not NaN, in float64; 0 if all are."""
    values = torch.as_tensor(values, dtype=torch.float64)
    summed, count = total([values.nansum(), (~values.isnan()).sum()])
    return summed / max(count, 1)


def gathered(items):
    """The lists of all ranks as one, in the order of the ranks."""
    if dist.get_world_size() == 1:  # gloo's thread would start OpenMP threads of its own to pass a large list
        return list(items)          # on, and on two cores all that comes after would take half as long again
    lists = [None] * dist.get_world_size()
    dist.all_gather_object(lists, items)
    return sum(lists, [])


def from_master(value):
    """Rank 0's value, on every rank."""
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]
