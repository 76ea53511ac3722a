"""
A forecast of the memory that a run takes, from its settings and its models' configs.

A run on a CPU that is small for its host does not open this file (memory_note of runtime/run.py).

    forecast        the bytes of a rank, at its peaks while it samples and while it updates
    forecast_note   the forecast as a line of text for the console
"""
import functools
import os
from types import SimpleNamespace

import torch

from configurator import InputError, reading
from runtime.model_folder import located, model_class, read_config


@functools.cache
def sizes(path):
    """Return numbers of a model: V (vocabulary), H (hidden size), depth (layers), whole (parameters), largest
    (those of the largest matrix in a layer), through (how many numbers go into matrix products and come out
    of them, for each token and in all layers) and cached (how many numbers the KV cache has for each
    token)."""
    # On the meta device the model has only shapes.
    with reading(f"model={path}: its config"), torch.device("meta"):
        config = read_config(located(path))
        hf = model_class(config)(config)
    text = config.get_text_config()
    V, H = hf.get_input_embeddings().weight.shape
    # A token is sent to a few of the experts, which stand in one tensor, [experts, out, in].
    experts = getattr(text, "num_experts_per_tok", 1) or 1
    through = 0
    cached = 0
    largest = 0
    for name, part in hf.get_decoder().named_modules():
        if name.endswith((".k_proj", ".v_proj")):
            cached += part.out_features
        if isinstance(part, torch.nn.Embedding):
            continue
        for parameter in part.parameters(recurse=False):
            if parameter.ndim > 1:
                times = 1
                if parameter.ndim == 3:
                    times = experts
                through += times * sum(parameter.shape[-2:])
                largest = max(largest, parameter.numel())
    return SimpleNamespace(V=V, H=H, depth=text.num_hidden_layers, through=through, cached=cached,
                           largest=largest, whole=sum(p.numel() for p in hf.parameters()))


def forecast(s, ranks, memory, cuda):
    """Return the bytes that a rank takes while it samples and while it updates, at the peak of each.

    s: a script's settings. ranks: how many train. memory: that of a device, in bytes. cuda: whether it is a
    GPU. Only tensors are counted, for layers such as Llama's: CUDA, NCCL and vLLM's graphs take one to three
    GB more. Raises InputError if weights, gradients and Adam's moments alone exceed the memory.
    """
    b = 4                                                       # bytes of a number in a layer
    if s.dtype in ("bfloat16", "float16") or (s.dtype == "auto" and cuda):
        b = 2
    m = sizes(s.model)
    head = m.V * m.H
    offloaded = s.offload_base and cuda
    weights, gradients, adam = sharded(s, b, s.shard_ranks or ranks, offloaded)
    state = weights + gradients + adam
    if state > memory:
        raise InputError(f"model={s.model}: weights, gradients and Adam's moments alone take "
                         f"{state / 1e9:.1f} GB on each of {ranks} ranks, a device has {memory / 1e9:.1f} GB")

    # An update. Until the backward pass autograd keeps about 1.2 times what goes through the matrix products
    # of layers such as Llama's. With checkpointing it keeps only the input of each layer, and computes the
    # layers again, one at a time.
    T = s.token_budget / s.sequence_parallel_size
    activations = 1.2 * b * m.through
    recomputed = 0
    if s.gradient_checkpointing:
        recomputed = activations / m.depth
        activations = b * m.H * m.depth
    # Two chunks of logits (model.LOGITS), or two gradients of the head.
    logits = 8 * min(2 ** 28 if cuda else 2 ** 24, m.V * T)
    if not s.lora_rank:
        logits = max(logits, 8 * head)
    gathered = b * (2 * m.whole / m.depth + head)               # FSDP2 has two layers and the head whole
    # A weight sync, before the engine samples, takes two copies of the largest parameter.
    copies = 2 * b * head
    if s.lora_rank:                                             # a merged weight takes two in float32
        gathered += 8 * m.largest
        copies = (b + 8) * m.largest
    if offloaded:                                               # and the embedding, if that is not the head
        gathered += b * head
    update = state + T * activations + max(logits, T * recomputed) + gathered
    resting = weights + adam
    if s.offload_optimizer and cuda:                            # the moments come for the optimizer's step
        update = max(update - adam, state)
        resting = weights
    if getattr(s, "rollout_ranks", 0):                          # the engines have devices of their own
        return resting, update

    # Sampling.
    engine = b * m.whole / s.vllm_tensor_parallel_size
    if s.engine != "hf" and cuda:           # vLLM takes its share of the device, and sleeps in an update
        return resting + max(engine + copies, s.vllm_gpu_memory_utilization * memory), update
    rows = min(256, s.prompts_per_step * s.num_generations / ranks)
    cache = rows * b * m.cached * (s.max_prompt_length + s.max_completion_length)
    if s.engine != "hf":
        cache = 2 ** 30
    return resting + engine + max(cache, copies), update + engine


def sharded(s, b, shards, offloaded=False):
    """Return the bytes of weights, gradients and Adam's moments that each of `shards` ranks has, without the
    policy's if they are offloaded."""
    m = sizes(s.model)
    # Whatever is trained has all three in float32.
    trained = m.whole
    weights = 4 * m.whole
    if s.lora_rank:
        trained = s.lora_rank * m.through
        weights = b * m.whole + 4 * trained * (2 if s.lora_from else 1)
    if offloaded:
        trained = 0
        weights = 0
    with_moments = 0 if s.optimizer == "sgd" else trained
    most_gradients = trained                                    # those of one network at a time
    if hasattr(s, "critic_model"):
        critic = sizes(s.critic_model or s.model).whole
        weights += 4 * critic
        most_gradients = max(most_gradients, critic)
        with_moments += critic
    # A script of your own may have dropped kl_coef. Adapters bring a reference with them.
    if getattr(s, "kl_coef", 0) > 0 and (s.reference_model or not s.lora_rank):
        weights += b * sizes(s.reference_model or s.model).whole
    return weights / shards, 4 * most_gradients / shards, 8 * with_moments / shards


def beside_gpus(s, ranks, local_ranks):
    """Return the bytes of host memory that a machine with GPUs needs, of which local_ranks are trained on."""
    m = sizes(s.model)
    b = 4 if s.dtype == "float32" else 2
    weights, gradients, adam = sharded(s, b, s.shard_ranks or ranks)
    resting = 0
    if s.offload_base:
        resting = weights + gradients + adam
    elif s.offload_optimizer:
        resting = adam
    # Rank 0 reads the model. Later each engine sleeps there.
    reading = (b if s.lora_rank else 4) * m.whole
    engines = b * m.whole * local_ranks / s.vllm_tensor_parallel_size
    return resting * local_ranks + max(reading, engines)


def forecast_note(s, ranks):
    """Return the forecast of this rank's GPU and of the host's memory, or without a GPU of its part of the
    host's memory, as lines of text."""
    cuda = torch.cuda.is_available()
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    memory = host / local_ranks
    if cuda:
        memory = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    sampling, update = forecast(s, ranks, memory, cuda)
    note = (f"forecast of memory per rank: sampling {sampling / 1e9:.2f}, update {update / 1e9:.2f} of "
            f"{memory / 1e9:.2f} GB")
    in_host = 0
    if cuda:
        in_host = beside_gpus(s, ranks, local_ranks)
        note += f"\nhost memory: {in_host / 1e9:.2f} of {host / 1e9:.2f} GB"
    if max(sampling, update) > memory or in_host > host:
        note += "\nIt does not fit: docs/placement.md says which settings take less"
    return note
