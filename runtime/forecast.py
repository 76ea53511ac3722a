"""
How much memory a run will take on each device, by role and phase, from its settings and the model's config.

A run prints the forecast, and is refused before it loads a model that no device can hold: on PyTorch's meta
device a model has only shapes.

The forecast counts tensors. CUDA, NCCL and vLLM's graphs take one to three GB more of a GPU, and on a CPU the
process itself takes more. Layers are assumed to keep for the backward pass what those of Llama and Qwen keep.
"""
import functools
import importlib.util
import math
import os
from types import SimpleNamespace

import numpy as np
import torch

from runtime.check_model import located, model_class, read_config, reading

# The most logits that are held at once: those of losses.LOGITS, which a test compares.
LOGITS = {"cpu": 2 ** 24, "cuda": 2 ** 27}
PHASES = ("sampling", "update", "sync")
ADVICE = ("It does not fit. An update takes less memory with gradient_checkpointing, offload_optimizer, a "
          "lower token_budget or a higher sequence_parallel_size. Sampling takes less with a lower "
          "vllm_gpu_memory_utilization or a higher vllm_tensor_parallel_size. Both take less with more ranks "
          "or with lora_rank.")


@functools.cache
def shape(path):
    """Return the sizes of the model with this config: its widths, and how many parameters its parts have."""
    with reading(f"model={path}: its config"), torch.device("meta"):
        config = read_config(located(path))
        hf = model_class(config)(config)
    decoder, head, first = hf.get_decoder(), hf.get_output_embeddings(), hf.get_input_embeddings()
    text = config.get_text_config()
    text = [*getattr(text, "per_layer_config", [text])][0]      # in Gemma 4 each layer has its own
    named = lambda key, default: np.max(getattr(text, key, None) or default).item()
    count = lambda *parts: sum(p.numel() for p in {p for part in parts for p in part.parameters()})
    layers = next((part for part in decoder.modules() if isinstance(part, torch.nn.ModuleList)), [decoder])
    H, heads, trained = text.hidden_size, named("num_attention_heads", 1), count(decoder, head)
    d, inner = named("head_dim", H // heads), named("intermediate_size", 4 * H)
    return SimpleNamespace(
        V=text.vocab_size, H=H, heads=heads, Q=d * heads, K=d * named("num_key_value_heads", heads),
        # The width of the MLP that a token passes through; with experts, of those that it is sent to.
        I=named("num_experts_per_tok", 1) * named("moe_intermediate_size", inner),
        head_norms=text.model_type.startswith("qwen3"), depth=len(layers), head=head.weight.numel(),
        own_head=0 if first.weight is head.weight else head.weight.numel(), whole=count(hf), trained=trained,
        layer=max(map(count, layers)), root=trained - sum(map(count, layers)),
        # What adapters of rank 1 would have.
        ends=sum(sum(part.weight.shape) for layer in layers for part in layer.modules()
                 if type(part) is torch.nn.Linear))


def kept_by_layer(m, b, full=True):
    """Return the bytes per token that a layer keeps for the backward pass.

    m: the model's shape. b: bytes of a number in the dtype that layers compute in. full: whether norms are
    trained, as they are without adapters. A norm keeps its input in float32 and, if it is trained, the
    normalised input as well. Matrix products keep their input, attention its queries, keys, values and
    output, and the MLP gate, up, silu(gate) and their product.
    """
    normed = 2 * m.H + (m.Q + m.K if m.head_norms else 0)
    return (4 + (b if full else 0)) * normed + b * (2 * m.H + 3 * m.Q + 2 * m.K + 4 * m.I) + 4 * m.heads


def update_peak(m, s, b, T, shards, cuda):
    """Return the bytes that an update holds besides weights, gradients and Adam's moments, at the highest of
    three
    moments: where logits are computed, where a layer's backward pass runs, and where the gradients of FSDP's
    root (the embedding, the head and the last norm) are added up. T: tokens of a micro-batch on a rank."""
    full = not s.lora_rank
    layer = kept_by_layer(m, b, full)
    kept, recomputed = (b * m.H, layer) if s.gradient_checkpointing else (layer, 0)
    # The forward pass holds three chunks of logits. The backward pass holds one, in bfloat16 copies of it as
    # well, one more for an entropy bonus, and the gradient of the head: in float32, and in bfloat16 twice.
    chunk = 4 * min(LOGITS["cuda" if cuda else "cpu"], m.V * T)
    chunks = (2 if s.entropy_coef else 1) + (0 if b == 4 else 0.5 if cuda else 1.5)
    logits = max(3 * chunk, chunks * chunk + (16 / b * m.head if full else 0))
    # While a layer's backward pass runs, the weights of two layers are gathered: its own and those that come
    # next. The gradients of the layer that is done are being sent to their ranks in float32. The MLP has six
    # tensors instead of the four that it kept.
    sent = 4 * m.layer + b * m.own_head if full else 4 * s.lora_rank * m.ends / m.depth
    backward = 2 * b * m.layer + sent + T * (recomputed + 2 * b * m.I + 8 * m.H)
    # The root's gradients exist as they are computed, twice for a tied weight, and as they are added up.
    root = m.root * max(b + 4, 4 + 4 / shards, 0 if m.own_head else 3 * b) if full else 0
    return max(b * m.root + T * m.depth * kept + max(logits, backward), root)


def forecast(s, ranks, memory, cuda):
    """{role: [bytes per rank while it samples, while it updates, while weights are synced]}, at their peaks.

    s: a script's settings. ranks: how many train. memory: that of a device, in bytes. cuda: whether it is a
    GPU. Raises ValueError if weights, gradients and Adam's moments alone exceed the memory.
    """
    # A script of your own may have dropped these settings.
    s = SimpleNamespace(**{"kl_coef": 0, "entropy_coef": 0, "reference_model": "", "updates_per_step": 1,
                           "num_epochs": 1} | vars(s))
    b = 2 if s.dtype == "bfloat16" or s.dtype == "auto" and cuda else 4
    m, shards = shape(s.model), s.shard_ranks or ranks
    trained = [s.lora_rank * m.ends or m.trained]
    held = {"policy": b * m.whole + 4 * trained[0] if s.lora_rank else 4 * m.whole}
    if hasattr(s, "critic_model"):
        critic = shape(s.critic_model or s.model)
        trained.append(critic.trained - critic.own_head)        # its head makes one number per token
        held["critic"] = 4 * trained[1]
    if s.kl_coef > 0:
        held["reference"] = b * shape(s.reference_model or s.model).whole
    gradients, adam = 4 * max(trained) / shards, 8 * sum(trained) / shards
    alone = sum(held.values()) / shards + gradients + adam
    if alone > memory:
        raise ValueError(f"model={s.model}: weights, gradients and Adam's moments alone take "
                         f"{alone / 1e9:.1f} GB on each of {ranks} ranks, a device has {memory / 1e9:.1f} GB")
    parts = {role: [size / shards] * 3 for role, size in held.items()}
    rows = s.prompts_per_step * s.num_generations / ranks
    longest = s.max_prompt_length + s.max_completion_length
    # A micro-batch is no larger than a rank's share of an update.
    share = math.ceil(rows * s.num_epochs / s.updates_per_step) * longest
    peak = update_peak(m, s, b, min(s.token_budget, share) / s.sequence_parallel_size, shards, cuda)
    if s.offload_optimizer and cuda:
        peak = max(peak, adam)                                  # they come when the rest is no longer needed
    else:
        parts["Adam's moments"] = [adam] * 3
    parts |= {"gradients": [0, gradients, 0], "activations": [0, peak, 0]}
    if getattr(s, "rollout_ranks", 0):                          # the engines have devices of their own
        return parts
    vllm = s.engine != "hf" and (cuda or importlib.util.find_spec("vllm"))
    split = s.vllm_tensor_parallel_size if vllm else 1
    engine, row = b * m.whole / split, 2 * b * m.K * m.depth * longest
    parts |= {"engine": [engine] * 3, "KV cache": [min(256, rows) * row, 0, 0],
              "whole tensors": [0, 0, 2 * b * m.head]}
    if vllm and cuda:
        # It takes its share of the GPU, but has to hold 16 rows of the ranks that share an engine. It sleeps
        # during an update.
        cache = max(min(16 / split, rows) * row, s.vllm_gpu_memory_utilization * memory - engine)
        parts |= {"engine": [engine, 0, engine], "KV cache": [cache, 0, 0]}
    elif vllm:
        parts["KV cache"] = [float(os.environ.get("VLLM_CPU_KVCACHE_SPACE", 1)) * 2 ** 30] * 3
    return parts


def says(s, ranks, memory, cuda):
    """Return the forecast as text: a line of phases, and advice if it does not fit."""
    peaks = [*map(sum, zip(*forecast(s, ranks, memory, cuda).values()))]
    phases = ", ".join(f"{phase} {peak / 1e9:.2f}" for phase, peak in zip(PHASES, peaks))
    line = f"forecast of memory per rank: {phases} of {memory / 1e9:.2f} GB"
    return f"{line}\n{ADVICE}" if max(peaks) > memory else line


def device_memory():
    """Return the bytes of this process's GPU, or of its part of the host's memory; and whether it is a
    GPU."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory, True
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return host / int(os.environ.get("LOCAL_WORLD_SIZE", 1)), False
