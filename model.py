"""
Policy and critic: how they are loaded and sharded by FSDP2, and what they compute for packed rows.

    open_folders     reads what a run needs from its models' folders before it loads weights
    load_policy      a Policy under FSDP2, whose forward returns logprobs and entropies
    load_reference   the frozen Policy that a KL compares it with
    load_critic      a Critic under FSDP2, from any model, whose forward returns values
    deal_to_ranks    which rollouts this rank computes
    micro_batches    rollouts as packed rows (packing.py), the same number on every rank
    token_logprobs   a policy's logprobs of the sampled tokens of rollouts, without gradient
When a model is loaded, its logprobs of short sequences are compared with those of transformers, and a model
whose logprobs differ is refused.
T tokens in a micro-batch, C sampled tokens among them, H hidden size, V vocabulary.
"""
import copy
import functools
import sys
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AutoConfig, PreTrainedModel

from attention import Pick, cut_over, join, packed_attention
from losses import schedule
from packing import deal, micro_batch, pack
from weights import full_weights
from runtime import distributed
from runtime.check_model import (check_reader, check_trainable, end_note, end_tokens, load_tokenizer,
                                 model_class, read_config, reading)
from runtime.logprobs import LogprobsFromHidden
from runtime.model_files import read_model, write_model


# ---------------------------------------------------------------- policy and critic

class Network(nn.Module):
    """What a policy and a critic have in common. hf: a Hugging Face model; decoder: see text_model."""

    def __init__(self, hf):
        super().__init__()
        self.hf = hf
        self.decoder = (text_model(hf),)        # in a tuple, or PyTorch would list its weights twice
        self.packed = True                      # whether a row may hold several sequences: see check_same
        self.sequence_group = None              # the ranks that share each row with this one, or None
        self.adapters = None                    # a policy's lora.Adapters, which lora.adapt sets
        self.loss_scale = None                  # a number in float16, which runtime/run.py sets

    def set_loss_scale(self, scale):
        """From now on, compute gradients `scale` times as large, and divide them by it once they are float32.

        In float16 the layers' gradients would otherwise be 0 below 6e-8. The scale acts before the gradient
        of the logits is rounded to the layers' dtype. What FSDP hands to its hook is float32 and summed over
        the ranks, of one micro-batch.
        """
        if self.loss_scale is None:
            self.register_forward_hook(scale_gradient)
        self.loss_scale = scale
        for part in self.modules():
            if isinstance(part, FSDPModule):
                part.set_all_reduce_hook(lambda gradient: gradient.div_(scale))

    def hidden_states(self, batch):
        """Return the last hidden states where the sampled tokens of a MicroBatch are predicted, [C, H].

        If the row is cut over ranks, these are the places in this rank's part.
        """
        hidden = self.decoder[0](
            input_ids=batch.input_ids, position_ids=batch.position_ids, segments=batch.segments,
            cut=batch.cut, use_cache=False).last_hidden_state                       # [1, T, H]
        return Pick.apply(hidden.flatten(0, 1), batch.index)

    def save(self, folder):
        """Write the model, or its adapters, to a folder. Rank 0 writes, and holds the whole model in host
        memory. A collective."""
        tensors = {}
        for name, tensor in full_weights(self):
            if dist.get_rank() == 0:
                tensors[name] = tensor.cpu()
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

    @functools.cached_property
    def scale_and_softcap(self):
        """The scale and the softcap of the logits (see head_logits). Their names depend on the family."""
        named = lambda key: getattr(self.hf.config.get_text_config(), key, None)
        scale = (named("logit_scale") or 1.0) * (named("lm_head_multiplier") or 1.0)
        return scale / (named("logits_scaling") or 1.0), named("final_logit_softcapping") or 0.0

    def forward(self, batch, temperature):
        """MicroBatch -> logp [C] and entropy [C] of softmax(logits / temperature), in nats, with gradient."""
        head = self.hf.get_output_embeddings()
        found = LogprobsFromHidden.apply(self.hidden_states(batch), head.weight, head.bias, batch.targets,
                                         temperature, *self.scale_and_softcap)
        return found if batch.cut is None else tuple(join(x, batch.cut) for x in found)


class Critic(Network):
    """A transformer with a scalar head whose forward returns the value of the state before each token."""

    def forward(self, batch):
        """MicroBatch -> values [C]. Entry c is read one token before c, so it does not see c.

        The head always computes in float32, because bfloat16 has only three digits for a value.
        """
        head = self.hf.score
        values = self.hidden_states(batch).float() @ head.weight[0].float() + head.bias.float()
        return values if batch.cut is None else join(values, batch.cut)


def scale_gradient(network, inputs, outputs):
    # A hook of a network's forward, in float16: the gradient of each output is loss_scale times as large.
    for output in outputs if isinstance(outputs, tuple) else [outputs]:
        if output.requires_grad:
            # For an entropy that is only logged the gradient is None.
            output.register_hook(lambda grad: None if grad is None else grad * network.loss_scale)


def text_model(hf):
    """Return the part of a Hugging Face model that turns tokens into hidden states: no head, nothing for
    images."""
    part = hf.get_decoder()
    return part if part is hf or part.get_decoder() is part else text_model(part)


# ---------------------------------------------------------------- rollouts through a network

def micro_batches(network, rollouts, chosen, token_budget):
    """Yield MicroBatches of rollouts[s] for s in chosen, for a Policy or Critic; as many on every rank.

    The network is sharded, so its forward and backward are collectives. A rank that has fewer MicroBatches
    than another therefore also gets idle ones. These predict nothing, so their per-token tensors are empty.
    If rows are cut over P ranks, each of these ranks gets its part of all P ranks' MicroBatches, one after
    the other. This function is a collective as well.
    """
    device = next(network.parameters()).device
    group = network.sequence_group
    P = group.size() if group else 1
    batches = pack(rollouts, chosen, token_budget, network.packed, multiple=P)
    # Every rank needs at least one, so that it has a gradient, even if that is 0.
    turns = max(1, *distributed.gathered([len(batches)]))
    batches += [micro_batch(rollouts, [], P) for _ in range(len(batches), turns)]
    if group:
        batches = [part for batch in batches for part in cut_over(group, batch)]
    # Nothing holds one whose turn is over, so that what attention made for it is freed.
    while batches:
        distributed.watchdog.moved()
        yield batches.pop(0).to(device)


def deal_to_ranks(rollouts, updates):
    """Return this rank's part of each update, as lists of s. updates: lists of s, the same on every rank.
    packing.deal gives each rank about the same number of tokens."""
    world_size = dist.get_world_size()
    return updates if world_size == 1 else [deal(rollouts, chosen, world_size)[dist.get_rank()]
                                            for chosen in updates]


def token_logprobs(policy, rollouts, chosen, token_budget, temperature):
    """Return a policy's logprobs of the sampled tokens of rollouts[s] for s in chosen: {s: [len]}.
    A collective."""
    return per_token(policy, lambda batch: policy(batch, temperature)[0], rollouts, chosen, token_budget)


def gathered_logprobs(policy, rollouts, token_budget, temperature):
    """Return a policy's logprobs of the sampled tokens of all rollouts, {s: [len]}, on the CPU of every rank.
    A collective."""
    (share,) = deal_to_ranks(rollouts, [range(len(rollouts))])
    logps = token_logprobs(policy, rollouts, share, token_budget, temperature)
    found = distributed.gathered([(s, logp.cpu().numpy()) for s, logp in logps.items()])
    return {s: torch.from_numpy(logp) for s, logp in found}


def token_values(critic, rollouts, chosen, token_budget):
    """Return a critic's values of the states before the sampled tokens: {s: [len]}. A collective."""
    return per_token(critic, critic, rollouts, chosen, token_budget)


@torch.no_grad()
def per_token(network, forward, rollouts, chosen, token_budget):
    found = {}
    for batch in micro_batches(network, rollouts, chosen, token_budget):
        found |= batch.split(forward(batch))
    # Without a backward FSDP2 leaves the root's parameters gathered.
    network.reshard()
    return found


# ---------------------------------------------------------------- loading and sharding

def open_folders(s, longest, clock=None):
    """Read what a run needs from its models' folders before it loads weights.

    s: a script's settings. longest: the number of tokens in its longest row. clock: see load_tokenizer. The
    result has the attributes policy, reference and critic (folders or hub ids, the last two only if the
    script has such a setting), tokenizer, and eos_ids: the tokens that end a completion; suits: the settings
    that its config names as those that suit it; and note: see end_note. Raises ValueError for a model that
    cannot be trained, or that does not read the policy's tokens.
    """
    policy = check_trainable(s.model, length=longest)
    tokenizer = load_tokenizer(policy, settings=s, clock=clock)
    other = {key.removesuffix("_model"): check_reader(key, getattr(s, key), policy, tokenizer, longest)
             for key in ("reference_model", "critic_model") if hasattr(s, key)}
    eos_ids = distributed.from_master(end_tokens(policy, tokenizer))        # a hub may fail a rank
    suits = getattr(read_config(policy), "suits", {})
    return SimpleNamespace(policy=policy, tokenizer=tokenizer, eos_ids=eos_ids, suits=suits,
                           note=s.chat and end_note(tokenizer, eos_ids), **other)


CLOSE = 1e-4                # less difference from transformers, relative to the largest value, is rounding


def load_policy(path, mesh, dtype, gradient_checkpointing=False, torch_compile=False, sequence_group=None,
                adapter=None, trained=True):
    """Return a Policy from a folder or hub id: float32 master weights, sharded by FSDP2, computing in dtype.

    sequence_group: the ranks that share each row with this one, or None. adapter: None, or the arguments of
    lora.adapt after the layers; then everything except the adapters is frozen, in dtype. trained: False for a
    reference model. It needs no gradient, so its weights are in dtype as well, which in bfloat16 takes half
    the memory and gives the same logprobs. Rank 0 reads the whole model into host memory, in float32. Raises
    ValueError for a model that cannot be loaded, or whose logprobs would not be those that transformers
    computes. A collective.
    """
    what, config = f"model={path}", AutoConfig.from_pretrained(path)
    read = lambda: Policy(read_model(what, model_class(config), path, config))
    policy = on_all_ranks(what, read, sequence_group).requires_grad_(trained)
    if adapter or not trained:
        for parameter in policy.parameters():
            parameter.data = parameter.data.to(dtype)
    return shard(policy, mesh, dtype, gradient_checkpointing, torch_compile, adapter)


def load_reference(path, policy, mesh, dtype):
    """Return the frozen model that a KL compares a policy with, from a folder or hub id, in dtype.

    If `path` is the base of the policy's adapters, this is the policy without them, which takes no memory.
    """
    if policy.adapters and policy.hf.name_or_path == path:
        return policy.adapters.base
    return load_policy(path, mesh, dtype, sequence_group=policy.sequence_group, trained=False)


class ValueHead(PreTrainedModel):
    """The head of a critic, to be read from a folder. If the folder has none, it is 0."""

    def __init__(self, config):
        super().__init__(config)
        self.score = nn.Linear(config.get_text_config().hidden_size, 1)
        self.post_init()

    def _init_weights(self, module):
        for parameter in module.parameters(recurse=False):
            nn.init.zeros_(parameter)


def load_critic(path, mesh, dtype, gradient_checkpointing=False, torch_compile=False, sequence_group=None):
    """Return a Critic from a folder or hub id. A head that the folder lacks starts at 0.

    transformers' class for token classification reads its checkpoints as well, if the family has one.
    """
    what = f"critic_model={path}"

    def read():
        with reading(f"{what}: its config"):                    # a run without a critic saves none
            config = AutoConfig.from_pretrained(path, num_labels=1)
        hf = read_model(what, model_class(config), path, config, has_head=False)
        hf.score = read_model(what, ValueHead, path, config, may_lack=["score.weight", "score.bias"]).score
        return Critic(hf)

    critic = on_all_ranks(what, read, sequence_group)
    return shard(critic, mesh, dtype, gradient_checkpointing, torch_compile)


def on_all_ranks(what, read, sequence_group):
    """Return the Policy or Critic that read() returns on rank 0, on every rank, after it was compared there.

    On the other ranks its parameters are on the meta device, without numbers. A ValueError of rank 0 is
    raised on every rank. sequence_group: the ranks that share each of its rows, or None. A collective.
    """
    network, bare, problem = None, None, ""
    if dist.get_rank() == 0:
        try:
            network = read()
            network.packed = check_same(what, network, sequence_group.size() if sequence_group else 1)
            bare = copy.deepcopy(network, {id(x): nn.Parameter(x.detach().to("meta"), x.requires_grad)
                                           for x in network.parameters()})
        except ValueError as error:
            problem = str(error)
    bare, problem = distributed.from_master((bare, problem))
    if problem:
        raise ValueError(problem)
    network = network or bare
    network.sequence_group = sequence_group
    return network


def shard(network, mesh, dtype, gradient_checkpointing, torch_compile, adapter=None):
    """Put a Policy or Critic from on_all_ranks under FSDP2: each layer as a unit, the rest as the root.

    Each rank gets its rows of rank 0's parameters, one tensor after the other. mesh: its last dimension
    shards. If there are two, all ranks along the first have the same rows. Parameters that read images are
    frozen. torch_compile: compile each layer, except for its attention.
    """
    hf, (decoder,) = network.hf, network.decoder
    head = hf.score if isinstance(network, Critic) else hf.get_output_embeddings()
    text = {*decoder.parameters(), *head.parameters()}
    for parameter in {*hf.parameters()} - text:
        parameter.requires_grad_(False)
    layers = next((part for part in decoder.children() if isinstance(part, nn.ModuleList)), [])
    images = [part for part in hf.base_model.children()
              if part is not decoder and not text & {*part.parameters()}]
    if torch_compile:
        # Attention reads Python objects that change with each micro-batch.
        AttentionInterface.register("packed", torch.compiler.disable(packed_attention))
    elif mesh.device_type == "cuda":
        fuse_norms(network)
    for layer in layers:
        if torch_compile:
            layer.forward = torch.compile(layer.forward, dynamic=True)
        if gradient_checkpointing:
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    if adapter:
        from lora import adapt
        adapt(network, layers, *adapter)
    elif dtype == torch.bfloat16 and dist.get_rank() == 0:
        from lora import spread_masters
        spread_masters([one for one in network.parameters() if one.requires_grad])
    whole = network.state_dict() if dist.get_rank() == 0 else {}
    # With adapters the base is in dtype already, and the adapters compute in float32 (lora.merge).
    precision = MixedPrecisionPolicy(None if adapter else dtype, torch.float32)
    for part in [*layers, *images, network]:
        fully_shard(part, mesh=mesh, mp_policy=precision)
    # On all ranks but the first its parameters are still on the meta device.
    network._apply(lambda x: torch.empty_like(x, device=mesh.device_type) if x.is_meta else x)
    set_model_state_dict(network, whole, options=StateDictOptions(
        full_state_dict=True, broadcast_from_rank0=True))
    return network


def fuse_norms(network):
    """Let RMS norms whose formula is that of PyTorch's kernel use it.

    transformers computes a norm in steps, and each keeps a float32 copy for the backward pass. On an H100 an
    update of Qwen3-0.6B's shape took 22% less time with the kernel, and 35 GB in place of 44.
    """
    for part in network.modules():
        if type(part).__name__.endswith("RMSNorm") and hasattr(part, "variance_epsilon"):
            trial = copy.deepcopy(part).to_empty(device="cpu").float()
            nn.init.uniform_(trial.weight)
            x = torch.rand_like(trial.weight)
            if torch.allclose(trial(x), rms_norm(trial, x)):    # in Gemma's the weight's factor is 1 + weight
                part.forward = functools.partial(rms_norm, part)


def rms_norm(part, hidden):
    return F.rms_norm(hidden, part.weight.shape, part.weight, part.variance_epsilon)


def make_optimizer(network, learning_rate, offload_optimizer):
    """AdamW for the parameters of a network.

    offload_optimizer: keep the moments in host memory except while the optimizer steps. Adam's moments are 8
    bytes per parameter, spread over the ranks. The GPU then has that memory for activations and the engine;
    the moments cross the bus twice per update.
    """
    optimizer = torch.optim.AdamW(network.parameters(), learning_rate, (0.9, 0.95), weight_decay=0.0,
                                  fused=True)
    device = next(network.parameters()).device

    def move(target):
        for state in optimizer.state.values():
            state |= {name: value.to(target) for name, value in state.items() if name != "step"}

    if offload_optimizer:
        optimizer.register_step_pre_hook(lambda *_: move(device))
        optimizer.register_step_post_hook(lambda *_: move("cpu"))
        optimizer.register_load_state_dict_post_hook(lambda *_: move("cpu"))    # of a resumed run
    return optimizer


def set_rates(optimizer, name, step, steps, kind, warmup):
    """Give each group of an optimizer's parameters its learning rate, by losses.schedule; return the rates.

    The peak is the rate that the group was made with. The rate of the first group is called `name`, those of
    the others name/1, name/2 and so on.
    """
    rates = {}
    for number, group in enumerate(optimizer.param_groups):
        peak = group.setdefault("initial_lr", group["lr"])      # as PyTorch's schedulers call it
        group["lr"] = schedule(peak, step, steps, kind, warmup)
        rates[f"{name}/{number}" if number else name] = group["lr"]
    return rates


@torch.no_grad()
def check_same(what, network, P):
    """Compare a network with transformers; return whether one of its rows may hold several sequences.

    network: whole, on the CPU, in float32. Three short sequences, of which two begin with the same tokens,
    are computed in one packed row and, if that differs, each in a row of its own. Raises ValueError if that
    differs as well, if the network does not run, or if P ranks cannot share its rows.
    """
    hf, config = network.hf, network.hf.config.get_text_config()
    ids = np.random.default_rng(0).integers(config.vocab_size, size=32).astype(np.int32)
    three = [SimpleNamespace(ids=one, spans=np.array([[1, len(one)]]), logprobs=one[1:])
             for one in (ids[:14], np.concatenate([ids[:6], ids[14:22]]), ids[22:])]

    def ours(packed):
        found = {}
        for batch in pack(three, range(3), 64, packed):
            found |= batch.split(network.hidden_states(batch) if isinstance(network, Critic) else
                                 network(batch, 1.0)[0])
        return torch.cat([found[s] for s in range(3)])

    try:
        expected = by_transformers(network, [one.ids for one in three])
        hf.set_attn_implementation("packed")
        for packed in (True, False):
            gap = (ours(packed) - expected).abs().max() / expected.abs().max()
            if gap < CLOSE:                                             # False if it is NaN
                break
    except Exception as error:
        raise ValueError(f"{what}: this kind of model does not run here: {type(error).__name__}: "
                         f"{str(error)[:300]}") from error
    if not gap < CLOSE:
        raise ValueError(f"{what}: computed here it differs from what transformers computes by {gap:.2g} "
                         "of the largest value, so another model would be trained")
    if not packed and P > 1:
        raise ValueError(f"{what}: sequence_parallel_size={P} cannot be used: layers other than attention "
                         "read earlier tokens, and on each rank they would see only its part of a row")
    heads = {getattr(layer, f"num_{kind}_heads", None) or P for kind in ("attention", "key_value")
             for layer in getattr(config, "per_layer_config", [config])}        # Gemma 4's layers differ
    if any(count % P for count in heads):
        raise ValueError(f"{what}: sequence_parallel_size={P} does not divide its heads of queries and of "
                         f"keys: {sorted(heads)}")
    if not packed:
        print(f"{what}: in a packed row its sequences would see each other, so each sequence gets a row of "
              "its own, padded to the longest, which takes longer", file=sys.stderr)
    return packed


def by_transformers(network, sequences):
    """Return what transformers computes of sequences of at most 14 tokens: a policy's logprobs, [C], or a
    critic's hidden states, [C, H], of all tokens except the first of each."""
    # No token sees what follows it, so a short sequence may be repeated up to the others' length.
    rows = torch.tensor(np.stack([np.resize(ids, 14) for ids in sequences])).long()
    if isinstance(network, Critic):                                     # whose new head returns 0
        found = network.decoder[0](input_ids=rows, use_cache=False).last_hidden_state
    else:
        table = network.hf(input_ids=rows, use_cache=False).logits[:, :-1].float().log_softmax(-1)
        found = table.gather(2, rows[:, 1:, None])[:, :, 0]
    return torch.cat([found[s, :len(ids) - 1] for s, ids in enumerate(sequences)])
