"""
Policy and critic: Hugging Face models under FSDP2 that read packed rows (packing.py), and logprobs without
logits.

T tokens in a micro-batch, C sampled tokens among them, H hidden size, V vocabulary.
"""
import contextlib
import math
import os

import torch
import torch.nn.functional as F
from torch import nn
from safetensors import safe_open
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer
from transformers.utils import logging

import ranks
from packing import micro_batches

# Its bars for every load and save would break up the run's own progress bar.
logging.disable_progress_bar()
# The most logits held at once; two copies take 128 MB and 1 GB in float32.
LOGITS = {"cpu": 2 ** 24, "cuda": 2 ** 27}


# ---------------------------------------------------------------- logprobs without logits

def product(a, b):
    """a @ b in float32, not rounded to the dtype of the factors; on a GPU without float32 copies of them."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def head_logits(hidden, weight, bias, float32_head=True):
    """Logits of a linear head, float32 [C, V]; hidden [C, H], weight [V, H], bias [V] or None.

    float32_head=False rounds them to the weight's dtype first, as models in bfloat16 do: to three digits,
    which is a sixteenth at a logit of 20. MiniMax-M1 (https://arxiv.org/abs/2506.13585) found most of the gap
    between engine and trainer there; in the default run it is a quarter to two fifths of the gap
    (docs/speed.md). On a CPU each call makes a float32 copy of a bfloat16 weight.
    """
    if not float32_head or weight.dtype == torch.float32:
        return F.linear(hidden, weight, bias).float()
    logits = product(hidden, weight.T)
    return logits if bias is None else logits.add_(bias.float())


class LogprobsFromHidden(torch.autograd.Function):
    """Logprob of each target and entropy of its distribution; logits exist for one chunk of tokens at a time.

    forward: hidden [C, H], weight [V, H], bias [V] or None, targets [C] -> float32 logp [C], entropy [C].
    The backward pass computes each chunk's logits again instead of keeping C x V of them. Both passes work in
    place, which at V = 151,936 on two cores takes half the time of plain expressions. With p = softmax(z)
    and z = logits / temperature: d(logp)/dz = onehot(target) - p, d(entropy)/dz = -p * (log p + entropy).
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, temperature, float32_head=True):
        logp = hidden.new_empty(len(targets), dtype=torch.float32)
        entropy, lse = torch.empty_like(logp), torch.empty_like(logp)
        for part in chunks(targets, weight):
            logits = head_logits(hidden[part], weight, bias, float32_head).div_(temperature)    # [chunk, V]
            p = logits.softmax(-1)
            # From log p = z - lse at the likeliest token: a third less time than logits.logsumexp(-1).
            lse[part] = logits.amax(-1) - p.amax(-1).log()
            log_p = logits.sub_(lse[part, None])
            logp[part] = log_p.gather(1, targets[part, None])[:, 0]
            entropy[part] = -torch.linalg.vecdot(p, log_p)
            del logits, p, log_p                                # before those of the next chunk are made
        ctx.save_for_backward(hidden, weight, bias, targets, lse, entropy)
        ctx.temperature, ctx.float32_head = temperature, float32_head
        # An entropy that is only logged then costs nothing in the backward pass.
        ctx.set_materialize_grads(False)
        return logp, entropy

    @staticmethod
    def backward(ctx, d_logp, d_entropy):
        hidden, weight, bias, targets, lse, entropy = ctx.saved_tensors
        d_logp = torch.zeros_like(lse) if d_logp is None else d_logp / ctx.temperature
        d_hidden = torch.empty_like(hidden)
        d_weight = torch.zeros_like(weight, dtype=torch.float32)
        d_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        for part in chunks(targets, weight):
            log_p = head_logits(hidden[part], weight, bias, ctx.float32_head).div_(ctx.temperature)
            log_p -= lse[part, None]
            # All of it in place, so that the chunk exists once.
            if d_entropy is None:
                d_logits = log_p.exp_().mul_(-d_logp[part, None])
            else:
                p = log_p.exp()
                d_logits = log_p.add_(entropy[part, None]).mul_(-d_entropy[part, None] / ctx.temperature)
                d_logits.sub_(d_logp[part, None]).mul_(p)
            d_logits.scatter_add_(1, targets[part, None], d_logp[part, None])
            if bias is not None:
                d_bias += d_logits.sum(0)
            d_logits = d_logits.to(weight.dtype)
            d_hidden[part] = d_logits @ weight
            if weight.dtype == torch.float32:
                d_weight.addmm_(d_logits.T, hidden[part])       # no second V x H
            else:
                d_weight += product(d_logits.T, hidden[part])
            del log_p, d_logits
        return (d_hidden, d_weight.to(weight.dtype), None if bias is None else d_bias.to(bias.dtype),
                None, None, None)


def chunks(targets, weight):
    """Slices of tokens whose logits are at most LOGITS numbers."""
    size = max(1, LOGITS[weight.device.type] // len(weight))
    return [slice(i, i + size) for i in range(0, len(targets), size)]


def hidden_states(hf, batch):
    """Last hidden state of a MicroBatch at the places where its sampled tokens are predicted, [C, H]."""
    ranks.watchdog.moved()
    hidden = hf.base_model(input_ids=batch.input_ids, position_ids=batch.position_ids, bounds=batch.bounds,
                           offsets=batch.offsets, use_cache=False).last_hidden_state[0]     # [T, H]
    return hidden.index_select(0, batch.index)


class Policy(nn.Module):
    """A causal language model whose forward returns logprobs and entropies of sampled tokens.

    The head is applied here, in the forward of FSDP's root, because only there is its weight whole.
    """

    def __init__(self, hf, float32_head=True):
        super().__init__()
        self.hf, self.float32_head = hf, float32_head

    def forward(self, batch, temperature):
        """MicroBatch -> logp [C] and entropy [C] of softmax(logits / temperature), in nats, with gradient."""
        head = self.hf.get_output_embeddings()
        return LogprobsFromHidden.apply(hidden_states(self.hf, batch), head.weight, head.bias, batch.targets,
                                        temperature, self.float32_head)


class Critic(nn.Module):
    """A transformer with a scalar head whose forward returns the value of the state before each token."""

    def __init__(self, hf):
        super().__init__()
        self.hf = hf

    def forward(self, batch):
        """MicroBatch -> values [C]. Entry c is read one token before c, so it does not see c.

        The head computes in float32 even where the layers do not: bfloat16 has only three digits for a value.
        """
        head = self.hf.score
        return hidden_states(self.hf, batch).float() @ head.weight[0].float() + head.bias.float()


# ---------------------------------------------------------------- loading and sharding

def precision(dtype, logprob_gap, device):
    """(the dtype that layers compute in, the largest mean logprob gap to the engine), from the settings."""
    name = dtype if dtype != "auto" else "bfloat16" if device.type == "cuda" else "float32"
    return getattr(torch, name), logprob_gap or {"float32": 1e-3, "bfloat16": 0.05}[name]


@contextlib.contextmanager
def reading(what):
    """Make a ValueError that says `what` cannot be read of whatever a library raises over a damaged file."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{what} cannot be read: {type(error).__name__}: {str(error)[:300]}") from error


def check_loaded(what, loading, may_lack=()):
    """Raise ValueError if weights lack a tensor, except those in may_lack, or have one of another shape."""
    if missing := sorted(set(loading["missing_keys"]) - set(may_lack)):
        raise ValueError(f"{what}: no {', '.join(missing)} in its weights")
    for name, found, wanted in loading["mismatched_keys"]:
        raise ValueError(f"{what}: {name} has the shape {list(found)} in its weights, but by its config "
                         f"{list(wanted)}")


def check_model(path, key="model", tokenizer=True, length=0):
    """Raise ValueError if `path` is not found, or is a folder that lacks or has damaged what a model needs.

    key: the setting that names it, for the message. tokenizer: whether the model needs one. length: tokens
    that it has to read in a row.
    """
    if not os.path.isdir(path):
        if path.startswith((".", "/", "~", "out/")):
            raise ValueError(f"{key}={path}: no such folder")
        try:
            # A hub id.
            check_length(key, path, AutoConfig.from_pretrained(path, trust_remote_code=False), length)
            return
        except OSError as error:
            raise ValueError(f"{key}={path}: no such folder, and it cannot be loaded from the hub: "
                             f"{str(error).splitlines()[0]}") from None
    files = os.listdir(path)
    for what, found in {
            "config.json": "config.json" in files,
            "weights (*.safetensors or *.bin)": any(f.endswith((".safetensors", ".bin")) for f in files),
            "tokenizer": not tokenizer or any(f.startswith(("tokenizer", "vocab", "spiece"))
                                              for f in files)}.items():
        if not found:
            raise ValueError(f"{key}={path}: no {what} in this folder")
    if "adapter_config.json" in files:
        raise ValueError(f"{key}={path}: the folder holds an adapter (adapter_config.json), which is not "
                         "supported: merge it into the model, or remove it")
    for file in sorted(file for file in files if file.endswith(".safetensors")):
        if not os.path.isfile(os.path.join(path, file)):
            raise ValueError(f"{key}={path}: {file} is not a file")
        # This reads the list of tensors and compares it with the size of the file.
        with reading(f"{key}={path}: {file}"), safe_open(os.path.join(path, file), "pt"):
            pass
    with reading(f"{key}={path}: config.json"):
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    check_length(key, path, config, length)


def check_length(key, path, config, length):
    config = config.get_text_config()
    longest = getattr(config, "max_position_embeddings", None) or math.inf
    # Older configs call it rope_scaling.
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if rope.get("rope_type", rope.get("type")) in ("linear", "dynamic", "yarn"):
        original = rope.get("original_max_position_embeddings") or longest
        longest = max(longest, original * (rope.get("factor") or 1))
    if length > longest:
        raise ValueError(f"{key}={path} reads at most {longest:g} tokens (max_position_embeddings), but a "
                         f"prompt and its completion (max_completion_length) may have {length}")


def load_tokenizer(path, key="model"):
    """The tokenizer of a folder or hub id. Raises ValueError if it is damaged."""
    with reading(f"{key}={path}: its tokenizer"):
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)


def check_critic(path, policy_path, length=0):
    """Raise ValueError for a critic_model that is not there, or that cannot read the policy's tokens."""
    check_model(path, "critic_model", tokenizer=False, length=length)
    size, policy_size = (AutoConfig.from_pretrained(p).vocab_size for p in (path, policy_path))
    if size != policy_size:
        raise ValueError(f"critic_model={path} has a vocabulary of {size} tokens, the model one of "
                         f"{policy_size}: the critic has to read the policy's tokens")


def load_policy(path, mesh, dtype, gradient_checkpointing=False, trained=True, float32_head=True):
    """A Policy from a folder or hub id: float32 master weights, FSDP2-sharded over mesh, computing in dtype.

    trained: False for a reference, which needs no gradient and no more precision than it computes with.
    Its weights are then in dtype, which in bfloat16 takes half the memory and gives the same logprobs.
    float32_head: see head_logits; the engine needs the same. Raises ValueError for models whose logits are
    more than hidden @ head (softcapped or scaled heads), because they would come out wrong. A collective.
    """
    config = AutoConfig.from_pretrained(path)
    for key in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
        if getattr(config, key, None) not in (None, 1.0):
            raise ValueError(f"model={path}: {key}={getattr(config, key)} changes the logits after the head; "
                             "only plain linear heads are supported")
    with reading(f"model={path}: its weights"):
        hf, loading = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32 if trained else dtype, attn_implementation="packed",
            output_loading_info=True, ignore_mismatched_sizes=True, trust_remote_code=False)
    check_loaded(f"model={path}", loading)
    if hf.generation_config:
        # Without this, a generation config that names a temperature cannot be saved.
        hf.generation_config.do_sample = True
    return shard(Policy(hf, float32_head).requires_grad_(trained), mesh, dtype, gradient_checkpointing)


def load_critic(path, mesh, dtype, gradient_checkpointing=False):
    """A Critic from a folder or hub id, loaded like a policy. A head that the folder lacks starts at zero."""
    config = AutoConfig.from_pretrained(path, num_labels=1)
    config.classifier_dropout = 0.0
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()                       # a missing head is expected and needs no report
    with reading(f"critic_model={path}: its weights"):
        hf, loading = AutoModelForTokenClassification.from_pretrained(
            path, config=config, dtype=torch.float32, attn_implementation="packed", output_loading_info=True,
            ignore_mismatched_sizes=True, trust_remote_code=False)
    logging.set_verbosity(verbosity)
    head = [name for name in loading["missing_keys"] if name.startswith("score.")]
    check_loaded(f"critic_model={path}", loading, may_lack=head)
    for name in head:
        nn.init.zeros_(hf.get_parameter(name))
    return shard(Critic(hf), mesh, dtype, gradient_checkpointing)


def shard(module, mesh, dtype, gradient_checkpointing):
    """Put a Policy or Critic on its device and under FSDP2: each layer as a unit, the rest as the root."""
    hf = module.hf.to(mesh.device_type)
    if gradient_checkpointing:
        hf.gradient_checkpointing_enable({"use_reentrant": False})
    # Gradient checkpointing works in training mode only. Dropout would act there, and trainer and engine
    # differ.
    hf.train()
    if dropout := [name for name, part in hf.named_modules() if isinstance(part, nn.Dropout) and part.p > 0]:
        raise ValueError(f"model={hf.name_or_path}: {dropout[0]} has dropout; the engine samples without it. "
                         "Set it to 0 in the config")
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in hf.base_model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(module, mesh=mesh, mp_policy=precision)
    return module


def offload(optimizer, device):
    """Keep an optimizer's moments in host memory except while it steps.

    Adam's are 8 bytes per parameter, spread over the ranks. The GPU then has that memory for activations and
    the engine; the moments cross the bus twice per update.
    """
    def move(target):
        for state in optimizer.state.values():
            state |= {name: value.to(target) for name, value in state.items() if name != "step"}
    optimizer.register_step_pre_hook(lambda *_: move(device))
    optimizer.register_step_post_hook(lambda *_: move("cpu"))
    optimizer.register_load_state_dict_post_hook(lambda *_: move("cpu"))    # a resumed run's


# ---------------------------------------------------------------- whole rollouts, without gradient

def token_logprobs(policy, rollouts, chosen, token_budget, temperature):
    """A policy's logprobs of the sampled tokens of rollouts[s] for s in chosen: {s: [len]}. A collective."""
    return per_token(policy, lambda batch: policy(batch, temperature)[0], rollouts, chosen, token_budget)


def token_values(critic, rollouts, chosen, token_budget):
    """A critic's values of the states before the sampled tokens, as token_logprobs does. A collective."""
    return per_token(critic, critic, rollouts, chosen, token_budget)


@torch.no_grad()
def per_token(network, forward, rollouts, chosen, token_budget):
    found = {}
    for batch in micro_batches(rollouts, chosen, token_budget, next(network.parameters()).device):
        found |= batch.split(forward(batch))
    # Without a backward FSDP2 leaves the root's parameters gathered.
    network.reshard()
    return found
