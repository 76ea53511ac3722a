"""
LoRA (Hu et al. 2021, https://arxiv.org/abs/2106.09685): a frozen weight W acts as W + 32 / rank * B A.
Only A [rank, in] and B [out, rank] are trained, so gradients, moments and master weights take little memory.

    beginning          says with which adapters a run begins, and refuses those that cannot be trained here
    adapt              gives linear layers of a policy's decoder adapters and freezes everything else
    merge              computes W + scale * B A, with which both trainer and engine compute
    Adapters           yields a policy's merged weights, and saves its adapters in the form of PEFT and vLLM
    InitialPolicy      is the policy as the run began: a reference model that takes hardly any memory
    read_adapter       reads the folder of an adapter

Trainer and engine compute with the same bits, because the trainer multiplies by the merged weight. It does
not add x A' B' to x W', as PEFT does.
"""
import contextlib
import functools
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
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from configurator import InputError, reading
from model import Policy, product
from options.spread_masters import even_offsets
from runtime.checkpoint import absolute
from runtime.model_folder import check_trainable, located, model_class, read_config

ALPHA = 32          # scale = ALPHA / rank, as in https://thinkingmachines.ai/blog/lora/
# The files of an adapter's folder, as PEFT names them, and how it begins the names of tensors
CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
INITIAL = "initial"             # the subfolder of a checkpoint with the adapter that its run began with
# Keys of PEFT's configs that may have any value: which layers there are is read from the tensors. Each other
# key has to be empty or as in PLAIN, because it would change what PEFT computes.
ANY = """auto_mapping base_model_name_or_path eva_config exclude_modules inference_mode layers_pattern
    layers_to_transform lora_alpha lora_dropout peft_version r revision target_modules task_type
    use_rslora""".split()
PLAIN = {"peft_type": ["LORA"], "bias": ["none"], "megatron_core": ["megatron.core"],
         "qalora_group_size": [16], "init_lora_weights": [True, "gaussian", "eva", "orthogonal"]}


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
    """A linear layer with the weights of a plain one, and an adapter: lora_A [rank, in], lora_B [out, rank].

    initial: the same two as the run began, if it began with an adapter. Otherwise it is empty.
    """
    on = True                                   # a switch for all layers, which InitialPolicy turns off

    def __init__(self, plain, pair, scale, initial):
        super().__init__(plain.in_features, plain.out_features, device="meta")
        self.weight = plain.weight
        self.bias = plain.bias
        self.lora_A = nn.Parameter(pair["lora_A"])
        self.lora_B = nn.Parameter(pair["lora_B"])
        self.initial = nn.ParameterDict(initial).requires_grad_(False)
        self.scale = scale

    def forward(self, x):
        pair = self.lora_A, self.lora_B
        if not Adapted.on:
            pair = tuple(self.initial.values())
        if not pair:
            return super().forward(x)
        return Merged.apply(x, self.weight, self.bias, *pair, self.scale)


class AdaptedPolicy(Policy):
    """A Policy that is read in 16 bits if it computes so, because adapters leave its base as it is.

    In 16 bits its logprobs differ from those of transformers by up to 3e-3 of the largest, because of
    rounding. So it is compared in float32.
    """

    @contextlib.contextmanager
    def in_float32(self):
        """Let a Policy on the CPU compute in float32. Each layer is in float32 only while it computes."""
        dtype = next(self.parameters()).dtype
        in_layers = set().union(*(layer.parameters() for layer in self.layers))
        outside = nn.ParameterList({*self.parameters()} - in_layers)
        handles = []
        for layer in self.layers:
            handles.append(layer.register_forward_pre_hook(functools.partial(cast, torch.float32)))
            handles.append(layer.register_forward_hook(functools.partial(cast, dtype)))
        cast(torch.float32, outside)
        yield
        cast(dtype, outside)
        for handle in handles:
            handle.remove()


def cast(dtype, part, *_):
    # PyTorch calls hooks with a module, its arguments and its result.
    for parameter in part.parameters():
        parameter.data = parameter.data.to(dtype)


class Adapters:
    """The adapters of a policy, which adapt puts at policy.adapters. layers: {name: Adapted}. config: what
    PEFT's config says of them."""

    def __init__(self, policy, layers, config):
        self.hf = policy.hf
        self.initial = InitialPolicy(policy)
        self.layers = layers
        self.config = config

    def merged(self):
        """Yield (name, whole merged tensor) of every weight with an adapter, for the engine. A collective."""
        for name, layer in self.layers.items():
            tensors = layer.weight, layer.lora_A, layer.lora_B
            # With offload_base they come from host memory.
            weight, A, B = (x.detach().to(self.initial.device).full_tensor() for x in tensors)
            yield f"{name}.weight", merge(weight, A, B, layer.scale)

    def save(self, folder, tensors):
        """Write {name: tensor} of each lora_A and lora_B to a folder, in the form that PEFT and vLLM read;
        those that the run began with go to a folder in it."""
        inside = f".{INITIAL}."
        initial = {name.replace(inside, "."): x for name, x in tensors.items() if inside in name}
        if initial:
            self.save(os.path.join(folder, INITIAL), initial)
        base = self.hf.name_or_path
        if os.path.isdir(base):
            base = os.path.abspath(base)
        config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "inference_mode": True,
                  "base_model_name_or_path": base, "target_modules": [*self.layers], **self.config}
        os.makedirs(folder, exist_ok=True)
        Path(folder, CONFIG).write_text(json.dumps(config, indent=2))
        present = {f"{PREFIX}{name}.weight": x.contiguous() for name, x in tensors.items()
                   if inside not in name}
        save_file(present, os.path.join(folder, WEIGHTS), {"format": "pt"})


class InitialPolicy:
    """A policy as its run began, for token_logprobs: without adapters, or with those of lora_from."""

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


def beginning(s, resumed):
    """Return the arguments of adapt after the policy, by a script's settings and the checkpoint that the run
    resumes. Raises InputError, before a model is loaded, if it cannot begin with the adapter in lora_from."""
    initial = None
    if s.lora_from:
        initial = os.path.join(resumed, INITIAL) if resumed else absolute(s.lora_from)
        check_beginning(s, initial)
    return s.lora_rank, s.seed, resumed or initial, initial, s.offload_base


def check_beginning(s, folder):
    # See beginning. On the meta device a model has only names and shapes.
    base = check_trainable(s.model)
    with torch.device("meta"):
        config = read_config(base)
        policy = Policy(model_class(config)(config))
    adapter, _ = read_adapter(folder, plain_layers(policy))
    if adapter["r"] != s.lora_rank:
        raise InputError(f"lora_rank={s.lora_rank}, but the adapter in {folder} has the rank {adapter['r']}")
    if located(getattr(s, "reference_model", "") or folder) == base:
        raise InputError(f"reference_model={s.reference_model}: with lora_from the reference is the model "
                         "with that adapter. For a KL to the base, name a copy of its folder")
    trained_on = adapter.get("base_model_name_or_path") or base
    if located(trained_on) != base and dist.get_rank() == 0:
        print(f"lora_from={s.lora_from}: by its config the adapter belongs to {trained_on}, and here it "
              f"changes {base}", file=sys.stderr)


def plain_layers(policy):
    """Return {name: layer} of the plain linear layers inside the layers of a Policy's decoder."""
    inside = set().union(*(layer.modules() for layer in policy.layers))
    return {name: part for name, part in policy.hf.named_modules()
            if part in inside and type(part) is nn.Linear}


def adapt(policy, rank, seed, folder=None, initial=None, offload=False):
    """Give plain linear layers of a Policy adapters in float32, and freeze everything else; return how FSDP2
    has to shard it, as arguments.

    The policy is loaded but not under FSDP2 yet. folder: that of an adapter whose training goes on, or None.
    initial: that of the adapter that the run began with, or None. Without a folder every layer gets one, with
    a B of 0, and an A that is drawn as in PEFT, uniformly up to 1 / sqrt(in), by seed and the layer's name,
    so that all ranks draw the same. offload: whether all parameters wait in host memory, to which FSDP2 also
    takes the gradients, so that the optimizer steps there. Raises InputError if there is no such layer, and
    like read_adapter.
    """
    policy.requires_grad_(False)
    plain = plain_layers(policy)
    if not plain:
        raise InputError(f"lora_rank={rank}: the layers of this model have no plain linear layers to adapt")
    config = {"r": rank, "lora_alpha": ALPHA}
    pairs = {}                                  # {name of a layer: {"lora_A": A, "lora_B": B}}
    initial_pairs = {}
    if folder:
        config, pairs = read_adapter(folder, plain)
    else:
        for name, layer in plain.items():
            draw = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            bound = layer.in_features ** -0.5
            A = torch.empty(rank, layer.in_features).uniform_(-bound, bound, generator=draw)
            pairs[name] = {"lora_A": A, "lora_B": torch.zeros(layer.out_features, rank)}
    if initial:
        _, initial_pairs = read_adapter(initial, plain)
    adapted = {}
    for name, pair in pairs.items():
        adapted[name] = Adapted(plain[name], pair, scale_of(config), initial_pairs.get(name, {}))
        policy.hf.set_submodule(name, adapted[name])
    kept = {key: config[key] for key in ("r", "lora_alpha", "use_rslora") if key in config}
    policy.adapters = Adapters(policy, adapted, kept)
    if dist.get_rank() == 0:
        kinds = ", ".join(sorted({name.rpartition(".")[2] for name in adapted}))
        print(f"lora_rank={rank}: adapters in {len(adapted)} layers ({kinds}); everything else is frozen",
              file=sys.stderr)
    # The base is in its dtype already, and the adapters compute in float32 (merge).
    sharding = {"mp_policy": MixedPrecisionPolicy(None, torch.float32)}
    if offload:
        on_gpu = policy.device == "cuda"
        sharding["offload_policy"] = CPUOffloadPolicy(pin_memory=on_gpu)
        if not on_gpu and dist.get_rank() == 0:
            print("offload_base=True saves nothing on a CPU", file=sys.stderr)
    return sharding


# ---------------------------------------------------------------- folders

def scale_of(config):
    """Return the factor of B A, by a config of PEFT's (rsLoRA: Kalajdzievski 2023, 2312.03732)."""
    power = 0.5 if config.get("use_rslora") else 1
    return config["lora_alpha"] / config["r"] ** power


def read_adapter(folder, plain):
    """Return the config of an adapter's folder, and {name of a layer: {"lora_A": A, "lora_B": B}}.

    plain: {name: linear layer} of the model, on the meta device or not. Raises InputError if the folder
    cannot be read, or holds anything but adapters for some of these layers.
    """
    with reading(f"{folder}/{CONFIG}"):
        config = json.loads(Path(folder, CONFIG).read_text("utf-8"))
    with reading(f"{folder}/{WEIGHTS}"):
        tensors = load_file(os.path.join(folder, WEIGHTS))
    if not isinstance(config, dict):
        raise InputError(f"{folder}/{CONFIG}: not an object")
    for key, value in config.items():
        if value and key not in ANY and value not in PLAIN.get(key, ()):
            raise InputError(f"{folder}: its adapter has {key}={value!r:.80}, which cannot be trained here")
    if not (tensors and config.get("r") and "lora_alpha" in config):
        raise InputError(f"{folder}: an adapter has r, lora_alpha and tensors, and this lacks one of them")
    rank = config["r"]
    pairs = {}
    for key in tensors:
        name, _, part = key.removeprefix(PREFIX).removesuffix(".weight").rpartition(".")
        if name not in plain or part not in ("lora_A", "lora_B"):
            raise InputError(f"{folder}: it has {key}, and only plain linear layers of the decoder's layers "
                             "can have adapters here")
        pairs.setdefault(name, {})[part] = tensors[key].float()
    for name, pair in pairs.items():
        layer = plain[name]
        shapes = {"lora_A": (rank, layer.in_features), "lora_B": (layer.out_features, rank)}
        if {part: tuple(tensor.shape) for part, tensor in pair.items()} != shapes:
            raise InputError(f"{folder}: the adapter of {name} has other shapes than {shapes}")
    named = plain.keys() & {*(config.get("target_modules") or ())}
    lost = sorted(named - pairs.keys())
    if lost:
        raise InputError(f"{folder}: it lacks {len(lost)} adapters, such as that of {lost[0]}. They were "
                         "frozen when it was saved: take an older checkpoint, which has them all")
    return config, pairs
