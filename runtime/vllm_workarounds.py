"""
What only some versions of vLLM, PyTorch and transformers need, so that all load and compute the same.

Each part says which version needs it and when it can be removed.
"""
import contextlib
import glob
import inspect
import os

import torch
import torch.distributed as dist
import transformers
from torch.nn.attention import varlen

# By default PyTorch 2.11's kernel takes fewer heads of keys and values than of queries. Later versions need
# enable_gqa for that. To be removed together with 2.11.
GROUPED = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters else {}
# If vLLM 0.32 does not know a model, it takes transformers' class and wraps it for compilation. The trainer's
# model is of the same class, and the wrapper asks it for this attribute. To be removed once vLLM mends that.
transformers.PreTrainedModel.do_not_compile = True


def compute_logits_in_float32(llm, head_logits):
    """Let a vllm.LLM of version 0.25 compute its logits in float32, by losses.head_logits.

    To be removed together with 0.25: later versions have the setting head_dtype.
    """
    import vllm
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    def patch(model):
        # The embedding may be the head as well. It calls `apply` only to compute logits.
        for layer in model.modules():
            if isinstance(method := getattr(layer, "quant_method", None), UnquantizedEmbeddingMethod):
                method.apply = lambda head, hidden, bias=None: head_logits(hidden, head.weight, bias)

    if vllm.__version__.startswith("0.25."):
        llm.apply_model(patch)


def leave_memory_unbound():
    """Keep vLLM 0.32's CPU build from binding all memory of this process to one NUMA node.

    That includes the trainer's. VLLM_CPU_OMP_THREADS_BIND=nobind prevents it only for threads. To be removed
    once it does so for memory as well.
    """
    torch.ops._C.init_cpu_memory_env = lambda nodes: None


def has_head(model):
    """Return whether a model of vLLM has an output head of its own.
    If not, it refuses the weights of lm_head."""
    return any(name.rpartition(".")[2] == "lm_head" for name, _ in model.named_modules())


def take_kernels(model):
    """Remove the kernels of the mixture-of-experts layers in a model of vLLM; returns {owner: kernel}.

    The CPU build of vLLM 0.32 packs experts only if there is no kernel yet, so new experts would not be used.
    To be removed once it packs them whenever they are loaded.
    """
    owners = [layer.quant_method for layer in model.modules()
              if getattr(getattr(layer, "quant_method", None), "moe_kernel", None) is not None]
    kernels = {owner: owner.moe_kernel for owner in owners}
    for owner in owners:
        owner.moe_kernel = None
    return kernels


@contextlib.contextmanager
def shared_memory_of_its_own():
    """In this block, the memory that the ranks of a new engine share gets a name that no other run uses.

    vLLM 0.32's CPU build uses the same name in every run, so two runs would write into each other's memory.
    The process that started this rank, the port of the store and the rank's role make the name unique. To be
    removed once vLLM does so. A collective.
    """
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed
    prefix = f"{os.environ['MASTER_PORT']}-{os.getppid()}-{os.environ.get('ROLE_NAME', '')}"
    make_name = _CPUSHMDistributed.make_group_name
    _CPUSHMDistributed.make_group_name = staticmethod(
        lambda communicator: f"{prefix}-" + make_name(communicator).replace("/", ""))
    yield
    # The ranks keep the memory even if its name is removed, and then a kill -9 leaves nothing behind.
    dist.barrier()
    for path in glob.glob(f"/dev/shm/{prefix}-*-cpushm*"):
        with contextlib.suppress(FileNotFoundError):           # another rank may be first
            os.unlink(path)
