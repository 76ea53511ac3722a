"""
LoRA (Hu et al. 2021, https://arxiv.org/abs/2106.09685): a frozen weight W acts as W + 32 / rank * B A.
Only A [rank, in] and B [out, rank] are trained, so gradients, moments and master weights take little memory.

    adapt              gives every linear layer of a policy's decoder an adapter and freezes everything else
    merge              computes W + scale * B A, with which both trainer and engine compute
    Adapters           yields a policy's merged weights, and saves its adapters in the form of PEFT and vLLM
    WithoutAdapters    is the policy without its adapters: a reference model that takes no memory

Trainer and engine compute with the same bits, because the trainer multiplies by the merged weight. It does
not add x A' B' to x W', as PEFT does.
"""
import json
import os
import sys
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

from configurator import InputError, reading
from model import even_offsets, product

ALPHA = 32          # scale = ALPHA / rank, as in https://thinkingmachines.ai/blog/lora/
# The files of an adapter's folder, as PEFT names them, and how it begins the names of tensors
CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."


def merge(weight, A, B, scale):
    """Return weight + scale * B A in the weight's dtype.

    A bfloat16 is the first half of a float32's bits. If the sum were rounded to the nearest bfloat16, it
    would be the base weight until B A reaches half a step, which is 1 / 500 of the weight, and most of a
    small adapter would be lost. So a number from 0 to 65535, which is always the same for the same place of
    the weight (even_offsets), is added to the second half, and then the second half is cut off. Of the sums
    that are a third of the way to the next bfloat16, a third then get there. If B is 0, the result is the
    base weight, because the second half of its bits is 0.
    """
    exact = torch.addmm(weight.float(), B, A, alpha=scale)
    if weight.dtype != torch.bfloat16:
        return exact.to(weight.dtype)
    bits = exact.view(torch.int32).add_(even_offsets(weight)).add_(2 ** 15)
    return bits.bitwise_right_shift_(16).to(torch.int16).view(torch.bfloat16)


class Merged(torch.autograd.Function):
    """Computes F.linear(x, merge(weight, A, B, scale), bias), with the gradients of a sum without rounding.

    The backward pass merges again instead of keeping the merged weight, and makes no gradient [out, in]. If d
    is the gradient of the output, dB = scale * d' (x A') and dA = scale * (d B)' x.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, A, B, scale):
        ctx.save_for_backward(x, weight, A, B)
        ctx.scale = scale
        return F.linear(x, merge(weight, A, B, scale), bias)

    @staticmethod
    def backward(ctx, d_output):
        x, weight, A, B = ctx.saved_tensors
        d_x = None
        if ctx.needs_input_grad[0]:
            d_x = d_output @ merge(weight, A, B, ctx.scale)
        x = x.flatten(0, -2)                                                            # [T, in]
        d = d_output.flatten(0, -2)                                                     # [T, out]
        d_A = product((d @ B.to(d.dtype)).mul_(ctx.scale).T, x)                         # [rank, in]
        d_B = product(d.T, (x @ A.T.to(x.dtype)).mul_(ctx.scale))                       # [out, rank]
        return d_x, None, None, d_A, d_B, None


class Adapted(nn.Linear):
    """A linear layer with the weights of a plain one, and an adapter of A [rank, in] and B [out, rank]."""
    on = True                                   # a switch for all layers, which WithoutAdapters turns off

    def __init__(self, plain, A, B):
        super().__init__(plain.in_features, plain.out_features, device="meta")
        self.weight = plain.weight
        self.bias = plain.bias
        self.lora_A = nn.Parameter(A)
        self.lora_B = nn.Parameter(B)
        self.scale = ALPHA / len(A)

    def forward(self, x):
        if not Adapted.on:
            return super().forward(x)
        return Merged.apply(x, self.weight, self.bias, self.lora_A, self.lora_B, self.scale)


class Adapters:
    """The adapters of a policy, which adapt puts at policy.adapters. layers: {name: Adapted}."""

    def __init__(self, policy, layers, rank):
        self.hf = policy.hf
        self.base = WithoutAdapters(policy)
        self.layers = layers
        self.rank = rank

    def merged(self):
        """Yield (name, whole merged tensor) of every weight with an adapter, for the engine. A collective."""
        for name, layer in self.layers.items():
            tensors = layer.weight, layer.lora_A, layer.lora_B
            weight, A, B = (tensor.detach().full_tensor() for tensor in tensors)
            yield f"{name}.weight", merge(weight, A, B, layer.scale)

    def save(self, folder, tensors):
        """Write {name: tensor} of each lora_A and lora_B to a folder, in the form that PEFT and vLLM read."""
        base = self.hf.name_or_path
        if os.path.isdir(base):
            base = os.path.abspath(base)
        config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "inference_mode": True,
                  "base_model_name_or_path": base, "r": self.rank, "lora_alpha": ALPHA,
                  "target_modules": [*self.layers]}
        os.makedirs(folder, exist_ok=True)
        Path(folder, CONFIG).write_text(json.dumps(config, indent=2))
        save_file({f"{PREFIX}{name}.weight": tensor.contiguous() for name, tensor in tensors.items()},
                  os.path.join(folder, WEIGHTS), {"format": "pt"})


class WithoutAdapters:
    """A policy without its adapters, for token_logprobs. It computes what the initial model does."""

    def __init__(self, policy):
        self.policy = policy

    def __getattr__(self, name):
        return getattr(self.policy, name)

    def __call__(self, *arguments):
        Adapted.on = False
        try:
            return self.policy(*arguments)
        finally:
            Adapted.on = True


def adapt(policy, layers, rank, seed, folder=None):
    """Give each plain linear layer inside `layers` of a Policy an adapter in float32; freeze everything else.

    The policy is loaded but not under FSDP2 yet. folder: that of an adapter whose training goes on, or None.
    A new adapter has a B of 0, and its A is drawn as in PEFT, uniformly up to 1 / sqrt(in), by seed and the
    layer's name, so that all ranks draw the same. Raises InputError if there is no such layer, or if the
    folder lacks the adapter of one.
    """
    policy.requires_grad_(False)
    saved = read_tensors(folder) if folder else {}
    inside = set()
    for layer in layers:
        inside.update(layer.modules())
    adapted = {}
    for name, part in [*policy.hf.named_modules()]:
        if part in inside and type(part) is nn.Linear:
            draw = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            bound = part.in_features ** -0.5
            A = torch.empty(rank, part.in_features).uniform_(-bound, bound, generator=draw)
            pair = saved.get(name, (A, torch.zeros(part.out_features, rank)))
            adapted[name] = Adapted(part, *pair)
            policy.hf.set_submodule(name, adapted[name])
    if not adapted:
        raise InputError(f"lora_rank={rank}: the layers of this model have no plain linear layers to adapt")
    lost = sorted(adapted.keys() - saved)
    if folder and lost:
        raise InputError(f"resume={folder}: it lacks {len(lost)} adapters, such as that of {lost[0]}. "
                         "They were frozen when it was saved: take an older checkpoint, which has them all")
    policy.adapters = Adapters(policy, adapted, rank)
    if dist.get_rank() == 0:
        kinds = ", ".join(sorted({name.rpartition(".")[2] for name in adapted}))
        print(f"lora_rank={rank}: adapters in {len(adapted)} layers ({kinds}); everything else is frozen",
              file=sys.stderr)


# ---------------------------------------------------------------- folders

def read_tensors(folder):
    """Return {name of a layer: [A, B]} of an adapter's folder. Raises InputError if it cannot be read."""
    pairs = {}
    with reading(f"{folder}/{WEIGHTS}"):
        tensors = load_file(os.path.join(folder, WEIGHTS))
        for key in tensors:
            if key.endswith(".lora_A.weight"):
                name = key.removeprefix(PREFIX).removesuffix(".lora_A.weight")
                pairs[name] = [tensors[key].float(), tensors[key.replace("lora_A", "lora_B")].float()]
    return pairs
