"""
What vLLM 0.25 and 0.32 need before they compute and load what the trainer does.

Each function says which version needs it and when it can be removed.
"""
import contextlib
import glob
import os

import torch
import torch.distributed as dist


def compute_logits_in_float32(head_logits, model):
    """Let a model of vLLM 0.25 compute its logits by runtime.logprobs.head_logits, in float32.

    To be removed together with 0.25: later versions take head_dtype.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
    # The embedding may be the head as well; apply is only for logits.
    for layer in model.modules():
        if isinstance(method := getattr(layer, "quant_method", None), UnquantizedEmbeddingMethod):
            method.apply = lambda head, hidden, bias=None: head_logits(hidden, head.weight, bias)


def leave_memory_unbound():
    """Keep vLLM 0.32's CPU build from binding all memory of this process, the trainer's too, to a NUMA node.

    VLLM_CPU_OMP_THREADS_BIND=nobind does this for threads only. To be removed once it does it for memory.
    """
    torch.ops._C.init_cpu_memory_env = lambda nodes: None


def has_head(model):
    """Whether a model of vLLM has an output head of its own; it refuses lm_head weights where it has none."""
    return any(name.rpartition(".")[2] == "lm_head" for name, _ in model.named_modules())


def take_kernels(model):
    """Take the kernels away from the mixtures of experts in a model of vLLM; returns {owner: kernel}.

    The CPU build of vLLM 0.32 packs experts only where there is no kernel yet, and so computes wrongly with
    new ones. To be removed once it packs them whenever they are loaded.
    """
    owners = [layer.quant_method for layer in model.modules()
              if getattr(getattr(layer, "quant_method", None), "moe_kernel", None) is not None]
    kernels = {owner: owner.moe_kernel for owner in owners}
    for owner in owners:
        owner.moe_kernel = None
    return kernels


@contextlib.contextmanager
def shared_memory_of_its_own():
    """Give the memory that the ranks of an engine made in this block share a name that no other run uses.

    vLLM 0.32's CPU build gives it the same name in every run, so two runs would write into each other's. With
    the port of torchrun's store and the role of this rank the name belongs to this engine. To be removed once
    vLLM makes it unique. A collective.
    """
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed
    prefix = f"{os.environ['MASTER_PORT']}-{os.environ.get('ROLE_NAME', '')}"
    make_name = _CPUSHMDistributed.make_group_name
    _CPUSHMDistributed.make_group_name = staticmethod(
        lambda communicator: f"{prefix}-" + make_name(communicator).replace("/", ""))

    def unlink():
        # The processes that have it mapped keep it; a kill -9 leaves nothing behind.
        dist.barrier()
        for path in glob.glob(f"/dev/shm/{prefix}-*-cpushm*"):
            with contextlib.suppress(FileNotFoundError):       # another rank may be first
                os.unlink(path)
        dist.barrier()

    unlink()
    yield
    unlink()
