"""
How much memory a run will take on each device, by role and phase, from its settings and the model's config.

    python -m runtime.forecast config/gsm8k.py --model=Qwen/Qwen3-32B --ranks=8 --memory=80
    python -m runtime.forecast --script=train_ppo.py --model=folder/config.json

It takes the settings of the script. ranks: how many devices train. memory: of one GPU, in GB; without it the
answer is for this machine. No weights are loaded: on PyTorch's meta device a model has shapes alone.

The figures count tensors. CUDA, NCCL and vLLM's graphs take one to three GB of a GPU more, and on a CPU it is
the process. Layers are taken to keep what those of Llama and Qwen keep for the backward pass.
"""
import ast
import functools
import importlib.util
import os
import sys
from types import SimpleNamespace

import numpy as np
import torch
from transformers import AutoConfig

from config import shared
from configurator import check, configure, input_errors, read_value
from runtime.check_model import HERE, ROOT, SHIPPED, model_class, reading
from runtime.logprobs import LOGITS

PHASES = ("sampling", "update", "sync")


@functools.cache
def shape(path):
    """What counts of the model with this config: its widths, and how many parameters its parts have."""
    with reading(f"model={path}: its config"), torch.device("meta"):
        here = os.path.join(HERE, SHIPPED.get(path, path))
        config = AutoConfig.from_pretrained(here if os.path.exists(here) else path)
        hf = model_class(config)(config)
    text, decoder, head = config.get_text_config(), hf.get_decoder(), hf.get_output_embeddings()
    text = [*getattr(text, "per_layer_config", [text])][0]      # of Gemma 4 each layer has its own
    named = lambda key, default: np.max(getattr(text, key, None) or default).item()
    count = lambda *parts: sum(p.numel() for p in {p for part in parts for p in part.parameters()})
    layers = next((part for part in decoder.modules() if isinstance(part, torch.nn.ModuleList)), [decoder])
    H, heads = text.hidden_size, named("num_attention_heads", 1)
    d, inner = named("head_dim", H // heads), named("intermediate_size", 4 * H)
    return SimpleNamespace(
        V=text.vocab_size, H=H, heads=heads, Q=d * heads, K=d * named("num_key_value_heads", heads),
        # The MLP that a token passes through; of experts, those that it is sent to.
        I=named("num_experts_per_tok", 1) * named("moe_intermediate_size", inner),
        head_norms=text.model_type.startswith("qwen3"), depth=len(layers), head=head.weight.numel(),
        own_head=head.weight.numel() * (hf.get_input_embeddings().weight is not head.weight),
        whole=count(hf), trained=count(decoder, head), layer=max(map(count, layers)),
        root=count(decoder, head) - sum(map(count, layers)),
        ends=sum(sum(part.weight.shape) for layer in layers for part in layer.modules()
                 if type(part) is torch.nn.Linear))


def kept_by_layer(m, b, full=True):
    """Bytes per token that a layer keeps for the backward pass. b: of a number; full: its norms are trained.

    Norms keep their input in float32 and, if they are trained, what they make of it; products keep their
    input, attention its queries, keys, values and output, the MLP gate, up, silu(gate) and their product.
    """
    normed = 2 * m.H + (m.Q + m.K) * m.head_norms
    return (4 + b * full) * normed + b * (2 * m.H + 3 * m.Q + 2 * m.K + 4 * m.I) + 4 * m.heads


def moments(m, s, b, shards, cuda):
    """What an update takes besides weights, gradients and Adam's moments, each time it may take most."""
    T, full, again = s.token_budget / s.sequence_parallel_size, not s.lora_rank, s.gradient_checkpointing
    layer = kept_by_layer(m, b, full)
    kept = {"gathered weights": b * m.root, "activations": T * m.depth * (b * m.H if again else layer)}
    # Logits: three chunks in the forward pass. In the backward pass one, in bfloat16 copies of it as well,
    # and the gradient of the head in float32, in bfloat16 twice.
    chunk = 4 * m.V * min(max(1, LOGITS["cuda" if cuda else "cpu"] // m.V), T)
    back = (1 + (s.entropy_coef > 0) + (b < 4) * (0.5 if cuda else 1.5)) * chunk + 16 / b * m.head * full
    # A layer on its way back: it and the next are gathered, and the gradients of the one before are on their
    # way to their ranks in float32. Of its MLP six tensors stand where four were kept.
    one = (2 * b * m.layer + 4 * (m.layer if full else s.lora_rank * m.ends / m.depth) + b * m.own_head * full
           + T * (again * layer + 2 * b * m.I + 8 * m.H))
    # At the end the root's gradients: made, that of a tied weight twice, and added up over the ranks.
    root = m.root * max(b + 4, 4 + 4 / shards, 0 if m.own_head else 3 * b) * full
    return [kept | {"logits": max(3 * chunk, back)}, kept | {"layer's backward pass": one},
            {"root's gradients": root}]


def forecast(s, ranks, memory, cuda):
    """{role: [bytes of a rank while it samples, while it updates, while weights are synced]}, at their peaks.

    s: a script's settings. ranks: those that train. memory: of a device, in bytes. cuda: whether it is a GPU.
    Raises ValueError if weights, gradients and Adam's moments alone exceed it.
    """
    s = SimpleNamespace(**{"lora_rank": 0, "shard_ranks": 0, "rollout_ranks": 0} | vars(s))
    b = 2 if s.dtype == "bfloat16" or s.dtype == "auto" and cuda else 4
    m, shards = shape(s.model), s.shard_ranks or ranks
    trained = [s.lora_rank * m.ends or m.trained]
    held = {"policy": b * m.whole + 4 * trained[0] if s.lora_rank else 4 * m.whole}
    if hasattr(s, "critic_model"):
        critic = shape(s.critic_model or s.model)
        trained.append(critic.trained - critic.own_head)        # one number stands in place of its head
        held["critic"] = 4 * trained[1]
    if s.kl_coef > 0:
        held["reference"] = b * shape(s.reference_model or s.model).whole
    gradients, adam = 4 * max(trained) / shards, 8 * sum(trained) / shards
    alone = sum(held.values()) / shards + gradients + adam
    if alone > memory:
        raise ValueError(f"model={s.model}: weights, gradients and Adam's moments alone take "
                         f"{alone / 1e9:.1f} GB on each of {ranks} ranks, a device has {memory / 1e9:.1f} GB")
    parts, update = {role: [n / shards] * 3 for role, n in held.items()}, moments(m, s, b, shards, cuda)
    if s.offload_optimizer and cuda:
        update.append({"Adam's moments": adam})                 # they come when all else is over
    else:
        parts["Adam's moments"] = [adam] * 3
    most = max(update, key=lambda roles: sum(roles.values()))
    parts |= {role: [0, n, 0] for role, n in ({"gradients": gradients} | most).items()}
    if s.rollout_ranks:                                         # the engines have devices of their own
        return parts
    vllm = s.engine == "vllm" or s.engine == "auto" and (cuda or bool(importlib.util.find_spec("vllm")))
    split, rows = s.vllm_tensor_parallel_size if vllm else 1, s.prompts_per_step * s.num_generations / ranks
    engine, row = b * m.whole / split, 2 * b * m.K * m.depth * (s.max_prompt_length + s.max_completion_length)
    # On a GPU vLLM takes what it may, but has to hold 16 rows of the ranks that share it.
    cache = (min(256, rows) * row if not vllm else
             max(min(16 / split, rows) * row, s.vllm_gpu_memory_utilization * memory - engine) if cuda else
             float(os.environ.get("VLLM_CPU_KVCACHE_SPACE", 1)) * 2 ** 30)
    return parts | {"engine": [engine, engine * (not (vllm and cuda)), engine],
                    "KV cache": [cache, *[cache * (vllm and not cuda)] * 2],
                    "whole tensors": [0, 0, 2 * b * m.head]}


def says(s, ranks, memory, cuda, table=True):
    """The forecast: lines of roles, one of phases, and one that says what to set where it does not fit."""
    parts, gb = forecast(s, ranks, memory, cuda), lambda n: f"{n / 1e9:.2f}" if n else "-"
    cells = {f"GB on each of {ranks} ranks": PHASES} | {role: map(gb, parts[role]) for role in parts}
    phases = ", ".join(f"{phase} {gb(sum(sizes))}" for phase, sizes in zip(PHASES, zip(*parts.values())))
    lines = [f"{role:24}{a:>10}{b:>10}{c:>10}" for role, (a, b, c) in cells.items()] * table
    lines.append(f"forecast of memory per rank: {phases} of {gb(memory)} GB")
    peak = lambda s: max(map(sum, zip(*forecast(s, ranks, memory, cuda).values())))
    found, longest = {}, s.max_prompt_length + s.max_completion_length
    while (now := peak(s)) > memory:
        choices = {"gradient_checkpointing": True, "offload_optimizer": True,
                   "token_budget": max(longest, s.token_budget // 2),
                   "vllm_gpu_memory_utilization": s.vllm_gpu_memory_utilization / 2}
        choices |= {f"{key}_parallel_size": 2 * vars(s)[f"{key}_parallel_size"] for key in (
            "sequence", "vllm_tensor") if ranks % (2 * vars(s)[f"{key}_parallel_size"]) == 0}
        tried = {key: SimpleNamespace(**vars(s) | {key: choices[key]}) for key in choices}
        best = min(tried, key=lambda key: peak(tried[key]))
        if peak(tried[best]) > 0.99 * now:
            break
        s, found[best] = tried[best], choices[best]
    parts = {"engine": [0], "KV cache": [0]} | forecast(s, ranks, memory, cuda)
    least = (parts["engine"][0] + parts["KV cache"][0]) / memory        # or vLLM would not start
    if cuda and s.engine != "hf" and least > s.vllm_gpu_memory_utilization + 1e-6:
        found["vllm_gpu_memory_utilization"] = round(least + 0.005, 2)
    settings = " ".join(f"--{key}={value}" for key, value in found.items()) or "other settings"
    if found or now > memory:
        lines.append(f"it does not fit; with {settings} it takes {gb(now)} GB" + (
            ": take more ranks" if now > memory else ", and the first of these helps most"))
    return "\n".join(lines)


def device_memory():
    """Bytes of this process's GPU, or its part of the host's memory; and whether it is a GPU."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory, True
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return host / int(os.environ.get("LOCAL_WORLD_SIZE", 1)), False


def main():
    own, rest = {"script": "train_grpo.py", "ranks": "1", "memory": "0"}, []
    for argument in sys.argv[1:]:
        key, _, text = argument.removeprefix("--").partition("=")
        own, rest = (own | {key: text}, rest) if key in own else (own, [*rest, argument])
    ranks, memory = read_value(own["ranks"], int) or 0, read_value(own["memory"], float)
    check(ranks > 0, f"ranks={own['ranks']}: must be a whole number above 0")
    check(memory is not None and memory >= 0, f"memory={own['memory']}: must be a number of GB")
    path = os.path.join(ROOT, own["script"])
    with input_errors(), reading(f"script={own['script']}"), open(path) as file:
        statements = ast.parse(file.read()).body
    # The script's defaults, without running it.
    settings = configure(vars(shared) | {"__file__": path, "__doc__": __doc__} | {
        node.targets[0].id: node.value.value for node in statements
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)}, rest)
    for key, value in vars(settings).items():
        names = {"dtype": ("auto", "float32", "bfloat16"), "engine": ("auto", "vllm", "hf")}
        counts = key.endswith(("_size", "_budget"))
        check(value in names.get(key, (value,)) and (not counts or value > 0),
              f"{key}={value}: no script takes it")
    with input_errors():
        print(says(settings, ranks, *((memory * 1e9, True) if memory else device_memory())))


if __name__ == "__main__":
    main()
