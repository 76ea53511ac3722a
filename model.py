"""
The policy: how it is loaded and sharded by FSDP2, and what it computes for micro-batches.

    open_folders     reads what a run needs from its models' folders before it loads weights
    load_policy      a Policy under FSDP2, whose forward returns logprobs and entropies
    load_reference   the frozen Policy with which a KL compares the trained one
    deal_to_ranks    says which rollouts this rank computes
    micro_batches    packs rollouts into micro-batches (packing.py), the same number on every rank
    token_logprobs   computes a policy's logprobs of the sampled tokens of rollouts, without gradient
    head_logits      computes the logits of a model's output head, for both the trainer and the engine

When a model is loaded, its logprobs of short sequences are compared with those of transformers, and a model
whose logprobs differ is refused. T is the number of tokens in a micro-batch, C the number of sampled tokens
among them, H the hidden size, V the size of the vocabulary. PPO's critic is in options/critic.py.

Products of bfloat16 factors are not rounded to bfloat16, which has three digits: a logit of 20 would be off
by up to a sixteenth. MiniMax-M1 (https://arxiv.org/abs/2506.13585) found that this rounding causes most of
the gap between engine and trainer. In the default run it caused a quarter to two fifths
(docs/measured/speed.md).
"""
import contextlib
import copy
import functools
import math
import sys
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AutoConfig

from configurator import InputError
from attention import Pick, packed_attention
from packing import deal, micro_batch, pack
from runtime import distributed
from runtime.model_folder import (check_trainable, end_note, end_tokens, load_tokenizer, model_class,
                                  read_config, read_model, reading, write_model)


# ---------------------------------------------------------------- logprobs from hidden states

# In the place of a logit. Its probability is 0, and 0 * LOW is 0, whereas 0 * -infinity would be NaN.
LOW = -1e9
# The most logits that are held at once. Two copies of them in float32 take 128 MB on a CPU and 2 GB on a GPU.
LOGITS = {"cpu": 2 ** 24, "cuda": 2 ** 28}


def product(a, b):
    """Return a @ b in float32, not rounded to the factors' dtype. A GPU makes no float32 copies of the
    factors."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def add_product(total, a, b):
    # Adds product(a, b) to a float32 tensor in place. To add a second V x H takes as long as the product.
    if a.is_cuda and a.dtype != torch.float32:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(a.float(), b.float())


def head_logits(hidden, weight, bias, scale=1.0, softcap=0.0, temperature=1.0):
    """Return a linear head's logits / temperature, float32 [C, V]; hidden [C, H], weight [V, H], bias [V] or
    None.

    scale: a factor of the logits (Granite, Cohere). softcap: if it is not 0, the scaled logits become
    softcap * tanh(logits / softcap), as in Gemma 2 (https://arxiv.org/abs/2408.00118). On a CPU each call
    makes a float32 copy of a bfloat16 weight.
    """
    if weight.dtype == torch.float32:
        logits = F.linear(hidden, weight, bias)
    else:
        logits = product(hidden, weight.T)
        if bias is not None:
            logits += bias.float()
    # A GPU takes as long for each of these as for the product itself, so none is done for nothing.
    if scale != 1:
        logits *= scale
    if softcap:
        logits.div_(softcap).tanh_().mul_(softcap)
    if temperature != 1:
        logits /= temperature
    return logits


def keep_only(logits, kept):
    # Replaces all logits [C, V], in place, except those of the tokens `kept` [C, M], which may have repeats.
    kept = kept.long()
    values = logits.gather(1, kept)
    logits.fill_(LOW).scatter_(1, kept, values)


class LogprobsFromHidden(torch.autograd.Function):
    """Computes the logprob of each target and the entropy of its distribution, one chunk of tokens at a time.

    forward: hidden [C, H], weight [V, H], bias [V] or None, targets [C] -> float32 logp [C], entropy [C].
    kept [C, M], ids of tokens, restricts each distribution to these; None does not.
    The backward pass computes each chunk's logits again instead of keeping C x V of them. Both passes work in
    place, which at V = 151,936 on two cores takes half the time of plain expressions. With p = softmax(z)
    and z = logits / temperature: d(logp)/dz = onehot(target) - p, d(entropy)/dz = -p * (log p + entropy).
    scale, softcap: see head_logits. d(logits)/d(product) = scale * (1 - (logits / softcap)^2).
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, temperature, scale=1.0, softcap=0.0, kept=None):
        ctx.head = scale, softcap, temperature
        # Slices of tokens, each with at most LOGITS logits.
        size = max(1, LOGITS[weight.device.type] // len(weight))
        ctx.chunks = [slice(first, first + size) for first in range(0, len(targets), size)]
        logp, entropy, lse = (hidden.new_empty(len(targets), dtype=torch.float32) for _ in range(3))
        for part in ctx.chunks:
            logits = head_logits(hidden[part], weight, bias, *ctx.head)                         # [chunk, V]
            if kept is not None:
                keep_only(logits, kept[part])
            p = logits.softmax(-1)
            # log p = z - lse at the likeliest token. This takes a third less time than logits.logsumexp(-1).
            lse[part] = logits.amax(-1) - p.amax(-1).log()
            log_p = logits.sub_(lse[part, None])
            logp[part] = log_p.gather(1, targets[part, None])[:, 0]
            entropy[part] = -p.mul_(log_p).sum(-1)
            del logits, p, log_p                                # before the next chunk makes its own
        ctx.save_for_backward(hidden, weight, bias, targets, lse, entropy, kept)
        # Without materialized gradients, an entropy that is only logged costs nothing in the backward pass.
        ctx.set_materialize_grads(False)
        return logp, entropy

    @staticmethod
    def backward(ctx, d_logp, d_entropy):
        hidden, weight, bias, targets, lse, entropy, kept = ctx.saved_tensors
        scale, softcap, temperature = ctx.head
        divisor = temperature / scale
        if d_logp is None:
            d_logp = torch.zeros_like(lse)
        d_logp = d_logp / divisor
        d_hidden = torch.empty_like(hidden)
        d_weight = d_bias = None
        if ctx.needs_input_grad[1]:                             # with adapters the head is frozen
            d_weight = torch.zeros_like(weight, dtype=torch.float32)
        if bias is not None:
            d_bias = torch.zeros_like(bias, dtype=torch.float32)
        for part in ctx.chunks:
            logits = head_logits(hidden[part], weight, bias, *ctx.head)
            if softcap:
                slope = 1 - (logits * (temperature / softcap)).square_()                        # [chunk, V]
            if kept is not None:
                keep_only(logits, kept[part])
            log_p = logits.sub_(lse[part, None])
            # All of this is in place, so that only one copy of the chunk exists.
            if d_entropy is None:
                d_logits = log_p.exp_().mul_(-d_logp[part, None])
            else:
                p = log_p.exp()
                d_logits = log_p.add_(entropy[part, None]).mul_(-d_entropy[part, None] / divisor)
                d_logits.sub_(d_logp[part, None]).mul_(p)
                del p
            d_logits.scatter_add_(1, targets[part, None], d_logp[part, None])
            if softcap:
                d_logits *= slope
                del slope
            if bias is not None:
                d_bias += d_logits.sum(0)
            d_logits = d_logits.to(weight.dtype)
            d_hidden[part] = d_logits @ weight
            if d_weight is not None:
                add_product(d_weight, d_logits.T, hidden[part])
            del logits, log_p, d_logits
        # PyTorch casts each gradient to the dtype of its input.
        return d_hidden, d_weight, d_bias, None, None, None, None, None


# ---------------------------------------------------------------- the policy

class Network(nn.Module):
    """The part that a policy and a critic have in common. hf: a Hugging Face model.

    A subclass has the attribute head, the linear layer that follows the decoder, and two methods that
    check_same compares: by_transformers and by_training. A network keeps its decoder and its head, so a
    policy looks for them only once. in_float32 is the context in which it is compared.
    """
    in_float32 = contextlib.nullcontext

    def __init__(self, hf):
        super().__init__()
        self.hf = hf
        self.packed = True                      # whether a line may hold several sequences: see check_same
        self.sequence_group = None              # the ranks that share each line with this one, or None
        self.adapters = None                    # a policy's lora.Adapters, which lora.adapt sets
        self.reader = None                      # an images.Reader if prompts may show images
        self.device = None                      # the kind of device that it computes on; shard sets it

    @functools.cached_property
    def decoder(self):
        """The part that turns tokens into hidden states, without a head or layers that read images."""
        part = self.hf.get_decoder()
        while part.get_decoder() is not part:
            part = part.get_decoder()
        return part

    @property
    def layers(self):
        """The decoder's layers, which FSDP2 shards one by one."""
        lists = [part for part in self.decoder.children() if isinstance(part, nn.ModuleList)]
        return lists[0] if lists else []

    def hidden_states(self, batch):
        """Return the last hidden states where the sampled tokens of a MicroBatch are predicted, [C, H].

        If the line is cut over ranks, these are the places in this rank's part.
        """
        inputs = {"input_ids": batch.input_ids}
        if self.reader:
            inputs = self.reader.inputs(self, batch)
        hidden = self.decoder(
            **inputs, position_ids=batch.position_ids, segments=batch.segments,
            cut=batch.cut, use_cache=False).last_hidden_state                       # [1, T, H]
        return Pick.apply(hidden.flatten(0, 1), batch.index)

    def text_parameters(self):
        """Return the set of parameters that training may change: those of decoder and head, or all."""
        if self.reader and self.reader.trained:
            return {*self.hf.parameters()}
        return {*self.decoder.parameters(), *self.head.parameters()}

    def saved_parameters(self):
        """Return {name: parameter} of what a checkpoint holds: the model, or all adapters."""
        return {name: parameter for name, parameter in self.hf.named_parameters()
                if not self.adapters or name.endswith((".lora_A", ".lora_B"))}

    @torch.no_grad()
    def begin_training(self, spread):
        """Make the network ready for an optimizer, once the script has frozen what it does not train.

        Raises InputError if a checkpoint would not hold all that is trained. spread: whether to move the
        master weights (spread_masters), except frozen ones. A collective.
        """
        saved = {*self.saved_parameters().values()}
        trained = {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}
        lost = [name for name, parameter in trained.items() if parameter not in saved]
        if lost:
            raise InputError(f"{', '.join(lost[:3])}: trained, but no checkpoint would hold it. Freeze it by "
                             "requires_grad_(False), or train it in a network of its own, as train_ppo.py "
                             "does with the critic")
        if self.adapters or not spread:
            return
        from options.spread_masters import spread_masters
        for parameter in trained.values():
            whole = parameter.full_tensor()
            spread_masters([whole])
            parameter.copy_(distribute_tensor(
                whole, parameter.device_mesh, parameter.placements, src_data_rank=None))

    def save(self, folder):
        """Write the model, or its adapters, to a folder. Rank 0 writes, and holds the whole model in host
        memory. On the device it takes about two copies of the largest parameter. A collective."""
        # After a forward without a backward, FSDP2 leaves the root's parameters gathered.
        self.reshard()
        tensors = {}
        for name, parameter in self.saved_parameters().items():
            whole = parameter.detach().full_tensor()
            if dist.get_rank() == 0:
                tensors[name] = whole.cpu()
        if dist.get_rank() > 0:
            return
        if self.adapters:
            self.adapters.save(folder, tensors)
        else:
            write_model(self.hf, tensors, folder)


class Policy(Network):
    """A causal language model whose forward returns logprobs and entropies of sampled tokens.

    The head is applied here, in the forward of FSDP's root, because its weight is whole only there.
    """

    def __init__(self, hf):
        super().__init__(hf)
        config = hf.config.get_text_config()
        # The names of the scale and the softcap (see head_logits) depend on the family of the model.
        self.scale = getattr(config, "logit_scale", None) or 1.0
        self.scale *= getattr(config, "lm_head_multiplier", None) or 1.0
        self.scale /= getattr(config, "logits_scaling", None) or 1.0
        self.softcap = getattr(config, "final_logit_softcapping", None) or 0.0

    @functools.cached_property
    def head(self):
        return self.hf.get_output_embeddings()

    def forward(self, batch, temperature):
        """MicroBatch -> logp [C] and entropy [C] of softmax(logits / temperature), in nats, with gradient.

        If top_k restricts sampling, the softmax is over the tokens that were left (options/kept_sets.py).
        """
        logp, entropy = LogprobsFromHidden.apply(
            self.hidden_states(batch), self.head.weight, self.head.bias, batch.targets, temperature,
            self.scale, self.softcap, batch.kept)
        if batch.cut:
            return batch.cut.join(logp), batch.cut.join(entropy)
        return logp, entropy

    def by_transformers(self, ids):
        """Return the logprobs of all tokens of a sequence but the first, by transformers, [L - 1]."""
        logits = self.hf(input_ids=ids[None], use_cache=False).logits[0, :-1]
        return logits.float().log_softmax(-1).gather(1, ids[1:, None])[:, 0]

    def by_training(self, batch):
        """Return such logprobs of the sampled tokens of a MicroBatch, as training computes them, [C]."""
        logp, _ = self(batch, 1.0)
        return logp


# ---------------------------------------------------------------- rollouts through a network

def micro_batches(network, rollouts, chosen, token_budget):
    """Yield MicroBatches of rollouts[s] for s in chosen, for a Policy or Critic; as many on every rank.

    The network is sharded, so its forward and backward are collectives. A rank that has fewer MicroBatches
    than another therefore also gets idle ones. These predict nothing, so their per-token tensors are empty.
    If lines are cut over P ranks, each of these ranks gets its part of all P ranks' MicroBatches, one after
    the other. This function is a collective as well.
    """
    group = network.sequence_group
    P = group.size() if group else 1
    batches = pack(rollouts, chosen, token_budget, network.packed, multiple=P)
    if any(hasattr(rollouts[s], "kept_ids") for s in chosen):
        from options import kept_sets
        for batch in batches:
            batch.kept = kept_sets.table(batch, rollouts)
    # Every rank needs at least one, so that it has a gradient, even if that is 0.
    count = max(1, *distributed.gathered([len(batches)]))
    while len(batches) < count:
        batches.append(micro_batch([], P))
    if network.reader:
        for batch in batches:
            network.reader.attach(batch, rollouts, network.hf.base_model)
    if group:
        from options.sequence_parallel import cut_over
        batches = sum([cut_over(group, batch) for batch in batches], [])
    # A batch leaves the list before it is used, so that what attention made for it is freed after its turn.
    for _ in distributed.progress(range(len(batches)), "micro-batches"):
        distributed.watchdog.moved()
        yield batches.pop(0).to(network.device)


def deal_to_ranks(rollouts, updates, skipped=()):
    """Return this rank's part of each update, as lists of s. updates: lists of s, the same on every rank.

    skipped: a set of s that are in no part. packing.deal gives each rank about the same number of tokens.
    """
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    shares = []
    for update in updates:
        share = [s for s in update if s not in skipped]
        if world_size > 1:
            share = deal(rollouts, share, world_size)[rank]
        shares.append(share)
    return shares


@torch.no_grad()
def token_logprobs(policy, rollouts, chosen, token_budget, temperature):
    """Return a policy's logprobs of the sampled tokens of rollouts[s] for s in chosen: {s: [len]}.
    A collective."""
    logps = {}
    for batch in micro_batches(policy, rollouts, chosen, token_budget):
        logp, _ = policy(batch, temperature)
        batch.put(logp, logps)
    # Without a backward FSDP2 leaves the root's parameters gathered.
    policy.reshard()
    return logps


def gathered_logprobs(policy, rollouts, token_budget, temperature):
    """Return a policy's logprobs of the sampled tokens of all rollouts, {s: [len]}, on the CPU of every rank.
    A collective."""
    (share,) = deal_to_ranks(rollouts, [range(len(rollouts))])
    logps = token_logprobs(policy, rollouts, share, token_budget, temperature)
    pairs = distributed.gathered([(s, logp.cpu().numpy()) for s, logp in logps.items()])
    return {s: torch.from_numpy(logp) for s, logp in pairs}


# ---------------------------------------------------------------- loading and sharding

def open_folders(settings, longest, resumed=None, clock=None):
    """Read what a run needs from its models' folders before it loads weights.

    settings: a script's. longest: the number of tokens in its longest sequence. resumed: the checkpoint that
    the run resumes, or None. clock: when the run began, for chat templates that print the date. The result
    has the attributes
        policy       the folder or hub id that the policy is loaded from
        reference    the same, if the script has the setting reference_model
        critic       the same, if the script has the setting critic_model
        tokenizer    the policy's tokenizer
        reader       its images.Reader if prompts may show images, or None
        eos_ids      the tokens that end a completion
        suits        the settings that suit the policy, by its config: {name: value}
        note         see end_note; empty if prompts are no messages
    Raises InputError for a model that cannot be trained, or that does not read the policy's tokens.
    """
    policy = check_trainable(settings.model, length=longest)
    tokenizer = load_tokenizer(policy, settings=settings, clock=clock)
    folders = SimpleNamespace(policy=policy, tokenizer=tokenizer, reader=None)
    if settings.images:
        from options.images import load_reader
        folders.reader = load_reader(settings, policy, tokenizer)
    for kind in ("reference", "critic"):
        key = f"{kind}_model"
        if hasattr(settings, key):
            setattr(folders, kind, policy)
        if getattr(settings, key, ""):
            from options.token_reader import check_reader
            setattr(folders, kind, check_reader(key, getattr(settings, key), policy, tokenizer, longest))
    folders.eos_ids = distributed.from_master(end_tokens(policy, tokenizer))    # a hub may fail a rank
    folders.suits = getattr(read_config(policy), "suits", {})
    folders.note = settings.chat and end_note(tokenizer, folders.eos_ids)
    # A checkpoint of a LoRA run holds only adapters, which load_policy adds to the initial model.
    if resumed and not settings.lora_rank:
        folders.policy = resumed
    return folders


CLOSE = 1e-4                # a smaller difference, relative to the largest value, is rounding


def load_policy(path, mesh, dtype, gradient_checkpointing=False, torch_compile=False, sequence_group=None,
                adapter=None, trained=True, reader=None):
    """Return a Policy from a folder or hub id: float32 master weights, sharded by FSDP2, computing in dtype.

    sequence_group: the ranks that share each line with this one, or None. adapter: None, or the arguments of
    lora.adapt after the policy; then everything except the adapters is frozen, in dtype. trained: False for a
    reference model. It needs no gradient, so its weights are in dtype as well, which in bfloat16 takes half
    the memory and gives the same logprobs. Rank 0 reads the whole model into host memory, in float32, or with
    adapters in dtype. Raises InputError for a model that cannot be loaded, or whose logprobs would not be
    those that transformers computes. A collective.
    """
    label = f"model={path}"
    kind = Policy
    read_dtype = torch.float32
    if adapter:
        from options.lora import AdaptedPolicy
        kind = AdaptedPolicy
        read_dtype = dtype

    def read():
        with reading(f"{label}: its config"):
            config = AutoConfig.from_pretrained(path)
        return kind(read_model(label, model_class(config), path, config, dtype=read_dtype))

    policy = on_all_ranks(label, read, sequence_group, reader).requires_grad_(trained)
    if not trained:
        for parameter in policy.parameters():
            parameter.data = parameter.data.to(dtype)
    return shard(policy, mesh, dtype, gradient_checkpointing, torch_compile, adapter)


def load_reference(path, policy, mesh, dtype):
    """Return the frozen model with which a KL compares a policy, from a folder or hub id, in dtype.

    If `path` is the base of the policy's adapters, this is the policy as the run began, which takes hardly
    any memory.
    """
    if policy.adapters and policy.hf.name_or_path == path:
        return policy.adapters.initial
    return load_policy(path, mesh, dtype, sequence_group=policy.sequence_group, trained=False,
                       reader=policy.reader)


def on_all_ranks(label, read, sequence_group, reader=None):
    """Return the Policy or Critic that read() returns on rank 0, on every rank, after it was compared there.

    On the other ranks its parameters are on the meta device, without numbers. An InputError of rank 0 is
    raised on every rank. label: the beginning of its message, such as "model=tiny". sequence_group: the ranks
    that share each of its lines, or None. A collective.
    """
    result = None                           # a copy of the network without numbers, or the InputError
    if dist.get_rank() == 0:
        try:
            network = read()
            check = reader.check_same if reader else check_same
            with network.in_float32():
                network.packed = check(label, network, sequence_group.size() if sequence_group else 1)
            # As deepcopy takes it: {id of an object: the copy of it}
            replaced = {id(x): nn.Parameter(x.detach().to("meta"), x.requires_grad)
                        for x in network.parameters()}
            result = copy.deepcopy(network, replaced)
        except InputError as error:
            result = error
    result = distributed.from_master(result)
    if isinstance(result, InputError):
        raise result
    if dist.get_rank() > 0:
        network = result
    network.sequence_group = sequence_group
    network.reader = reader
    return network


def shard(network, mesh, dtype, gradient_checkpointing, torch_compile, adapter=None):
    """Put a Policy or Critic from on_all_ranks under FSDP2: each layer as a unit, the rest as the root.

    Each rank gets its rows of rank 0's parameters, one tensor after the other. mesh: its last dimension
    shards. If there are two, all ranks along the first have the same rows. Parameters that read images are
    frozen. torch_compile: compile each layer, except for its attention.
    """
    network.device = mesh.device_type
    decoder = network.decoder
    text = network.text_parameters()
    for parameter in {*network.hf.parameters()} - text:
        parameter.requires_grad_(False)
    layers = network.layers
    decoded = {*decoder.parameters(), *network.head.parameters()}
    images = [part for part in network.hf.base_model.children()
              if part is not decoder and decoded.isdisjoint(part.parameters())]
    if torch_compile:
        # Attention reads Python objects that change with each micro-batch.
        AttentionInterface.register("packed", torch.compiler.disable(packed_attention))
    elif mesh.device_type == "cuda":
        from options.fused_norms import fuse_norms
        fuse_norms(network)
    for layer in layers:
        if torch_compile:
            layer.forward = torch.compile(layer.forward, dynamic=True)
        if gradient_checkpointing:
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    sharding = {"mp_policy": MixedPrecisionPolicy(dtype, torch.float32)}
    if adapter:
        from options.lora import adapt
        sharding = adapt(network, *adapter)
    tensors = {}                                                # rank 0 has them, whole
    if dist.get_rank() == 0:
        tensors = network.state_dict()
    for part in [*layers, *images, network]:
        fully_shard(part, mesh=mesh, **sharding)
    home = "cpu" if "offload_policy" in sharding else network.device    # where the parameters wait

    def off_meta(x):
        return torch.empty_like(x, device=home) if x.is_meta else x

    network._apply(off_meta)                                    # for the other ranks
    set_model_state_dict(network, tensors, options=StateDictOptions(
        full_state_dict=True, broadcast_from_rank0=True))
    return network


def make_optimizer(network, learning_rate, settings):
    """Return the optimizer of a network's parameters: AdamW, or SGD for a Policy with optimizer=sgd.

    settings: a script's, of which this also reads weight_decay, adam_beta1, adam_beta2 and offload_optimizer.
    Adam's moments are 8 bytes per parameter, spread over the ranks. SGD without momentum has none.
    """
    # fused=True of SGD fails on sharded parameters.
    if settings.optimizer == "sgd" and isinstance(network, Policy):
        return torch.optim.SGD(network.parameters(), learning_rate, weight_decay=settings.weight_decay)
    optimizer = torch.optim.AdamW(
        network.parameters(), learning_rate, (settings.adam_beta1, settings.adam_beta2),
        weight_decay=settings.weight_decay, fused=True)
    if settings.offload_optimizer:
        from options.offload import keep_on_host
        keep_on_host(optimizer)
    return optimizer


def schedule(peak, step, steps, kind, warmup=0):
    """Return the learning rate at `step` of `steps`. It rises in `warmup` steps to its peak, from
    peak / warmup on, and then stays there ("constant") or falls to 0 at `steps` ("linear", "cosine"). At a
    negative step, as in the warm-up of PPO's critic, it is 0."""
    if step < 0:
        return 0.0
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    decays = {"constant": 1, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}
    return peak * decays[kind]


def set_rates(optimizer, name, step, steps, kind, warmup):
    """Give each group of an optimizer's parameters its learning rate, by schedule; return the rates.

    The peak is the rate that the group was made with. The rate of the first group is called `name`, the rates
    of the others are called name/1, name/2 and so on.
    """
    rates = {}
    for number, group in enumerate(optimizer.param_groups):
        peak = group.setdefault("initial_lr", group["lr"])      # as PyTorch's schedulers call it
        group["lr"] = schedule(peak, step, steps, kind, warmup)
        rates[f"{name}/{number}" if number else name] = group["lr"]
    return rates


@torch.no_grad()
def check_same(label, network, P):
    """Compare a network with transformers; return whether a line of tokens may hold several sequences.

    network: whole, on the CPU, and computing in float32. Three short sequences, of which two begin with the
    same tokens, are computed in one packed line and, if that differs, each in a line of its own. Raises
    InputError if that differs as well, if the network does not run, or if P ranks cannot share its lines.
    """
    config = network.hf.config.get_text_config()
    ids = np.random.default_rng(0).integers(config.vocab_size, size=32).astype(np.int32)
    sequences = [ids[:14], np.concatenate([ids[:6], ids[14:22]]), ids[22:]]
    try:
        expected = torch.cat([network.by_transformers(torch.tensor(ids).long()) for ids in sequences])
        network.decoder.set_attn_implementation("packed")
        for packed in (True, False):
            gap = (by_training(network, sequences, packed) - expected).abs().max() / expected.abs().max()
            if gap < CLOSE:                                             # False if it is NaN
                break
    except Exception as error:
        problem = f"{label}: this kind of model does not run here"
        if isinstance(error, InputError):
            raise InputError(f"{problem}: {error}") from error
        error.add_note(problem)                 # the traceback stays: it may lead to an edit of attention.py
        raise
    if not gap < CLOSE:
        raise InputError(f"{label}: computed here it differs from what transformers computes by {gap:.2g} "
                         "of the largest value, so another model would be trained")
    if P > 1:
        from options.sequence_parallel import check_ranks
        check_ranks(label, config, packed, P)
    if not packed:
        print(f"{label}: in a packed line its sequences would see each other, so each sequence gets a line "
              "of its own, padded to the longest, which takes longer", file=sys.stderr)
    return packed


def by_training(network, sequences, packed):
    """Return what a network's by_transformers returns for the sequences, joined, but computed as in training.
    packed: see packing.pack."""
    rollouts = [SimpleNamespace(ids=ids, places=np.arange(1, len(ids)), sequence_starts=np.array([[0, 0, 1]]))
                for ids in sequences]
    values = {}
    for batch in pack(rollouts, range(len(rollouts)), 64, packed):
        batch.put(network.by_training(batch), values)
    return torch.cat([values[s] for s in range(len(rollouts))])
