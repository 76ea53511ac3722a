"""What every forked process of runs.py needs, imported once by the process that they are forked from.

What all of them would compute again is computed here as well. A run with vLLM costs half as much by that.
"""
import gc
import logging
import os
import warnings
from importlib import import_module
from unittest import mock

gc.disable()                    # it would take a second, and find nothing
for name in ("pytest", "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp",
             "torch.nn.attention.varlen", "torch.utils.tensorboard", "transformers.models.qwen3.modeling_qwen3"):
    import_module(name)
# Its first call compiles hundreds of regular expressions.
import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("qwen3")

# vLLM reads the variable while it is imported. What is forked does not get it: a run without vLLM may compile.
with mock.patch.dict(os.environ, TORCHDYNAMO_DISABLE="1"), warnings.catch_warnings(action="ignore"):
    logging.getLogger("torch._library.triton").setLevel("ERROR")        # it warns of a missing Triton
    try:
        import_module("vllm.entrypoints.llm")
        from vllm.platforms import cpu, current_platform
    except ImportError:
        current_platform = None
    if current_platform and current_platform.is_cpu():
        import_module("vllm.model_executor.models.qwen3")
        import_module("vllm.v1.worker.cpu_worker")
        # Each engine would look through all modules for the kernels that this replaces. vLLM 0.25 has no such
        # kernels; the condition can go together with 0.25.
        if hasattr(cpu.CpuPlatform, "register_triton_kernel_overrides"):
            current_platform.register_triton_kernel_overrides()
            cpu.CpuPlatform.register_triton_kernel_overrides = lambda *_: None
        # Each engine fills its cache with zeros, which takes half a second for a gigabyte.
        cpu.GiB_bytes = 2 ** 26
gc.freeze()
gc.enable()
