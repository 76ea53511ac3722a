"""
What only some versions of vLLM, PyTorch and transformers need, so that all load and compute the same.

Each part says which version needs it and when it can be removed.
"""
import torch
import transformers

# If vLLM 0.32 does not know a model, it takes transformers' class and wraps it for compilation. The trainer's
# model is of the same class, and the wrapper asks it for this attribute. To be removed once vLLM mends that.
transformers.PreTrainedModel.do_not_compile = True

# In bfloat16 on an H100, cuDNN's attention of PyTorch 2.11 fails for some masks ("Expected
# mha_graph.execute(...) to be true"), and plans anew for each shape. PyTorch's other kernels take its place.
# To be removed once it computes what tests/test_cuda.py asks of it.
torch.backends.cuda.enable_cudnn_sdp(False)


def compute_logits_in_float32(llm, head_logits):
    """Let a vllm.LLM of version 0.25 compute its logits in float32, by head_logits(hidden, weight, bias).

    To be removed together with 0.25: later versions have the setting head_dtype.
    """
    import vllm
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    def apply(head, hidden, bias=None):
        return head_logits(hidden, head.weight, bias)

    def patch(model):
        # The embedding may be the head as well. It calls `apply` only to compute logits.
        for layer in model.modules():
            method = getattr(layer, "quant_method", None)
            if isinstance(method, UnquantizedEmbeddingMethod):
                method.apply = apply

    if vllm.__version__.startswith("0.25."):
        llm.apply_model(patch)


def share_the_machine():
    """Let vLLM 0.32's CPU build share this process with a trainer, and the machine with other runs."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    # It would bind all memory of this process, the trainer's as well, to one NUMA node.
    # VLLM_CPU_OMP_THREADS_BIND=nobind prevents it only for threads. To be removed once it does so for memory.
    torch.ops._C.init_cpu_memory_env = nothing
    # Ranks that share an engine exchange tensors by gloo. The memory that they would share has the same name
    # in every run, so two runs would write into each other's. To be removed once the name is unique.
    CpuCommunicator._all_group_ranks_share_shm_group_name = nothing


def nothing(argument):
    # Stands in for functions of vLLM. None also says that ranks share no name.
    return None


def drop_kernels(model):
    """Let vLLM 0.32's CPU build pack the experts of a mixture of experts again when it reloads weights.

    It packs them only if there is no kernel yet, so new experts would not be used. To be removed once it
    packs them whenever they are loaded.
    """
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if hasattr(method, "moe_kernel"):
            method.moe_kernel = None
