"""
Policy and critic: loaded from a model folder, sharded by FSDP2, and what they compute of packed rows.

    open_folders     what a run reads of its models' folders before it loads weights
    load_policy      a Policy under FSDP2, whose forward returns logprobs and entropies
    load_critic      a Critic under FSDP2, from any model, whose forward returns values
    micro_batches    rollouts as packed rows (packing.py), the same number on every rank
    token_logprobs   a policy's logprobs of the sampled tokens of rollouts, without gradient
When a model is loaded, its logprobs of short sequences are compared with those of transformers, and one that
comes out differently is refused. runtime/load_sharded.py brings the weights to the ranks.
T tokens in a micro-batch, C sampled tokens among them, H hidden size, V vocabulary.
"""
import math
import sys
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from transformers import AttentionInterface, AutoConfig

from attention import cut_over, join, packed_attention, pick
from packing import deal, idle, pack
from runtime import distributed
from runtime.logprobs import LogprobsFromHidden
from runtime.check_model import check_reader, check_trainable, end_tokens, load_tokenizer, model_class
from runtime.load_sharded import load_rows, put_under_fsdp, spread_masters, whole_while_running


# ---------------------------------------------------------------- policy and critic

class Policy(nn.Module):
    """A causal language model whose forward returns logprobs and entropies of sampled tokens.

    The head is applied here, in the forward of FSDP's root, because only there is its weight whole.
    """
    packed, sequence_group = True, None     # whether a row may hold several sequences; ranks that share it

    def __init__(self, hf, float32_head=True):
        super().__init__()
        self.hf, self.head_form = hf, (float32_head, *scale_and_softcap(hf.config))
        self.decoder = (text_model(hf),)                # in a tuple, or PyTorch would list its weights twice

    def forward(self, batch, temperature):
        """MicroBatch -> logp [C] and entropy [C] of softmax(logits / temperature), in nats, with gradient."""
        head = self.hf.get_output_embeddings()
        logp, entropy = LogprobsFromHidden.apply(hidden_states(self, batch), head.weight, head.bias,
                                                 batch.targets, temperature, *self.head_form)
        return (logp, entropy) if batch.cut is None else (join(logp, batch.cut), join(entropy, batch.cut))


class Critic(nn.Module):
    """A transformer with a scalar head whose forward returns the value of the state before each token."""
    packed, sequence_group = True, None     # as in Policy

    def __init__(self, hf):
        super().__init__()
        self.hf, self.decoder = hf, (text_model(hf),)   # as in Policy

    def forward(self, batch):
        """MicroBatch -> values [C]. Entry c is read one token before c, so it does not see c.

        The head computes in float32 even where the layers do not: bfloat16 has only three digits for a value.
        """
        head = self.hf.score
        values = hidden_states(self, batch).float() @ head.weight[0].float() + head.bias.float()
        return values if batch.cut is None else join(values, batch.cut)


def hidden_states(network, batch):
    """Last hidden state of a MicroBatch at the places where its sampled tokens are predicted, [C, H].

    Of a row that is cut, those of this rank's part.
    """
    hidden = network.decoder[0](
        input_ids=batch.input_ids, position_ids=batch.position_ids, segments=batch.segments, cut=batch.cut,
        use_cache=False).last_hidden_state                                          # [1, T, H]
    return pick(hidden.flatten(0, 1), batch.index)


def text_model(hf):
    """The part of a Hugging Face model that makes hidden states of tokens: no head, nothing for images."""
    part = hf.get_decoder()
    return part if part is hf or part.get_decoder() is part else text_model(part)


def scale_and_softcap(config):
    """The scale and the softcap of a model's logits (see head_logits), by the names that families use."""
    named = lambda key: getattr(config.get_text_config(), key, None)
    scale = (named("logit_scale") or 1.0) * (named("lm_head_multiplier") or 1.0)
    return scale / (named("logits_scaling") or 1.0), named("final_logit_softcapping") or 0.0


# ---------------------------------------------------------------- rollouts through a network


def micro_batches(network, rollouts, chosen, token_budget):
    """Yield MicroBatches of rollouts[s] for s in chosen, for a Policy or Critic; as many on every rank.

    The network is sharded, so its forward and backward are collectives. A rank that has fewer MicroBatches
    than another therefore also gets idle ones that predict nothing: each of their per-token tensors is empty.
    Where rows are cut over P ranks, each rank gets its part of all P ranks' MicroBatches, in turn. This
    function is a collective as well.
    """
    device = next(network.parameters()).device
    group = network.sequence_group if network.packed else None
    P = group.size() if group else 1
    batches = pack(rollouts, chosen, token_budget, network.packed, multiple=P)
    # At least one, so that every rank has a gradient, even if it is 0.
    (turns,) = distributed.largest([max(1, len(batches))])
    while len(batches) < turns:
        batches.append(idle(P))
    if group:
        batches = [part for batch in batches for part in cut_over(group, batch)]
    # Moved one after the other, so that each takes its attention masks with it when it goes.
    for batch in batches:
        distributed.watchdog.moved()
        yield batch.to(device)


def token_logprobs(policy, rollouts, chosen, token_budget, temperature):
    """A policy's logprobs of the sampled tokens of rollouts[s] for s in chosen: {s: [len]}. A collective."""
    return per_token(policy, lambda batch: policy(batch, temperature)[0], rollouts, chosen, token_budget)


def kl_to_reference(reference, rollouts, token_budget, temperature, policy=None):
    """logp - ref_logp (k1) of all sampled tokens of all rollouts, {s: [len]}, on every rank. A collective.

    logp is that of the policy that sampled, as the engine has it, or of `policy`.
    """
    share = deal(rollouts, range(len(rollouts)), dist.get_world_size())[dist.get_rank()]
    theirs = token_logprobs(reference, rollouts, share, token_budget, temperature)
    ours = (token_logprobs(policy, rollouts, share, token_budget, temperature) if policy else
            {s: torch.from_numpy(rollouts[s].logprobs) for s in share})
    device = next(reference.parameters()).device
    gathered = distributed.gathered([(s, (ours[s].to(device) - theirs[s]).cpu().numpy()) for s in share])
    return {s: torch.from_numpy(kl).to(device) for s, kl in gathered}


def token_values(critic, rollouts, chosen, token_budget):
    """A critic's values of the states before the sampled tokens, as token_logprobs does. A collective."""
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

def open_folders(s, longest):
    """What a run reads of its models' folders before it loads weights, as attributes of what is returned.

    s: a script's settings. longest: the tokens of its longest row. policy, reference, critic: folders or hub
    ids, the last two for a script that has the setting; tokenizer; eos_ids: the tokens that end a completion.
    Raises ValueError for a model that cannot be trained, or that does not read the policy's tokens.
    """
    policy = check_trainable(s.model, length=longest)
    tokenizer = load_tokenizer(policy, settings=s)
    other = {key.removesuffix("_model"): check_reader(key, getattr(s, key), policy, tokenizer, longest)
             for key in ("reference_model", "critic_model") if hasattr(s, key)}
    return SimpleNamespace(policy=policy, tokenizer=tokenizer, eos_ids=end_tokens(policy, tokenizer), **other)


CLOSE = 1e-4                # what differs less from transformers, relative to the largest value, is rounding


def load_policy(path, mesh, dtype, gradient_checkpointing=False, float32_head=True, sequence_group=None,
                adapter=None, trained=True):
    """A Policy from a folder or hub id: float32 master weights, FSDP2-sharded over mesh, computing in dtype.

    float32_head: see head_logits; the engine needs the same. sequence_group: the ranks that share each row
    with this one, or None. adapter: None, or the arguments of lora.adapt that follow the layers; all else is
    then frozen, in dtype. trained: False for a reference, which needs no gradient and no more precision than
    it computes with. Its weights are then in dtype, which in bfloat16 takes half the memory and gives the
    same logprobs. A rank never holds more than its rows of the weights, what belongs to no layer, and one
    layer. Raises ValueError for a model that cannot be loaded, or whose logprobs here would not be those that
    transformers computes. A collective.
    """
    what, config = f"model={path}", AutoConfig.from_pretrained(path)
    kept = torch.float32 if trained and not adapter else dtype
    policy = Policy(load_rows(what, model_class(config), path, config, mesh, kept), float32_head)
    return shard(policy.requires_grad_(trained), what, mesh, dtype, gradient_checkpointing, sequence_group,
                 adapter)


def load_critic(path, mesh, dtype, gradient_checkpointing=False, sequence_group=None):
    """A Critic from a folder or hub id, loaded like a policy. A head that the folder lacks starts at zero."""
    config = AutoConfig.from_pretrained(path, num_labels=1, tie_word_embeddings=False)
    kind = model_class(config)

    # transformers has such a class for some families only.
    class WithScore(kind):
        def __init__(self, config):
            super().__init__(config)
            head = self.get_output_embeddings()
            delattr(self, next(name for name, part in self.named_modules() if part is head))
            self.score = nn.Linear(head.in_features, 1)

    # A checkpoint's config names its class; that for token classification, if there is one, can read it. By
    # the name of a class that sees images transformers also knows how its weights are named, so that stays.
    WithScore.__name__ = kind.__name__.replace("ForCausalLM", "ForTokenClassification")
    # transformers fills in the buffers of its own classes alone.
    WithScore.__module__ = kind.__module__
    what = f"critic_model={path}"
    hf = load_rows(what, WithScore, path, config, mesh, torch.float32, ["score.weight", "score.bias"])
    return shard(Critic(hf), what, mesh, dtype, gradient_checkpointing, sequence_group)


def shard(network, what, mesh, dtype, gradient_checkpointing, sequence_group, adapter=None):
    """Put a Policy or Critic, loaded as DTensors, under FSDP2: each layer as a unit, the rest as the root.

    What reads images is frozen. No dropout acts, because the engine has none either. Raises ValueError if the
    network does not compute what transformers does.
    """
    hf, (decoder,) = network.hf.eval(), network.decoder
    if hf.generation_config:
        # Without this, a generation config that names a temperature cannot be saved.
        hf.generation_config.do_sample = True
    for part in hf.modules():
        for name, number in vars(part).items():
            if "drop" in name and isinstance(number, float):
                setattr(part, name, 0.0)
    if gradient_checkpointing:
        hf.gradient_checkpointing_enable({"use_reentrant": False})
        # It works in training mode only.
        for part in hf.modules():
            part.training = getattr(part, "gradient_checkpointing", False)
    head = hf.score if isinstance(network, Critic) else hf.get_output_embeddings()
    text = {*decoder.parameters(), *head.parameters()}
    for parameter in {*hf.parameters()} - text:
        parameter.requires_grad_(False)
    layers = next((part for part in decoder.children() if isinstance(part, nn.ModuleList)), [])
    images = [part for part in hf.base_model.children()
              if part is not decoder and not text & {*part.parameters()}]
    units = [*layers, *images]
    network.sequence_group = sequence_group
    packed, apart, windows = compared(what, network, units)
    check_same(what, hf.config.get_text_config(), apart, windows)
    network.packed = packed < CLOSE
    if not network.packed and sequence_group:
        P = sequence_group.size()
        raise ValueError(f"{what}: sequence_parallel_size={P} cannot be used: layers other than attention "
                         "read earlier tokens, and they would see only those of a part")
    if not network.packed and dist.get_rank() == 0:
        print(f"{what}: in a packed row its sequences would see each other, so each gets a row of its own, "
              "padded to the longest, which takes longer", file=sys.stderr)
    hf.set_attn_implementation("packed")
    if adapter:
        from lora import adapt
        adapt(network, layers, *adapter)
    elif dtype == torch.bfloat16:
        spread_masters([one for one in network.parameters() if one.requires_grad])
    # With adapters the base is in dtype already, and they compute in float32 (lora.merge).
    put_under_fsdp(network, units, mesh, None if adapter else dtype)
    return network


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


@torch.no_grad()
def compared(what, network, units):
    """How much a network differs from transformers: in a packed row, in rows apart, and the windows it named.

    The differences are those of three short sequences, of which two begin with the same tokens, as a share of
    the largest value, in float32. The second is None where the first is below CLOSE. Raises ValueError if the
    network does not run. A collective.
    """
    hf, device = network.hf, next(network.parameters()).device
    ids = np.random.default_rng(0).integers(hf.config.get_text_config().vocab_size, size=32).astype(np.int32)
    three = [SimpleNamespace(ids=one, spans=np.array([[1, len(one)]]), logprobs=one[1:])
             for one in (ids[:14], np.concatenate([ids[:6], ids[14:22]]), ids[22:])]
    # No token sees what follows it, so the third can go on.
    rows = torch.tensor(np.stack([np.resize(one.ids, 14) for one in three]), device=device).long()
    windows = set()

    def attention(*arguments, sliding_window=None, **named):
        # Short sequences do not reach a window; its size has to be handed over.
        windows.add(sliding_window)
        return packed_attention(*arguments, sliding_window=sliding_window, **named)

    def theirs():
        if isinstance(network, Critic):
            found = network.decoder[0](input_ids=rows, use_cache=False).last_hidden_state
        else:
            table = hf(input_ids=rows, use_cache=False).logits[:, :-1].float().log_softmax(-1)
            found = table.gather(2, rows[:, 1:, None])[:, :, 0]
        return torch.cat([found[s, :len(one.logprobs)] for s, one in enumerate(three)])

    def difference(packed):
        network.packed, found = packed, {}                              # which micro_batches reads
        for batch in micro_batches(network, three, range(3), 64):
            if isinstance(network, Policy):
                found |= batch.split(network(batch, 1.0)[0])
            else:
                hidden = hidden_states(network, batch)
                found |= batch.split(hidden if batch.cut is None else join(hidden, batch.cut))
        gap = (torch.cat([found[s] for s in range(3)]) - expected).abs().max() / expected.abs().max()
        return distributed.largest([gap])[0]                            # the same on every rank

    try:
        with whole_while_running(network, units):
            expected = theirs()
            AttentionInterface.register("compared", attention)
            hf.set_attn_implementation("compared")
            packed = difference(True)
            apart = None if packed < CLOSE else difference(False)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise ValueError(f"{what}: this kind of model does not run here: {type(error).__name__}: "
                         f"{str(error)[:300]}") from error
    return packed, apart, windows


def check_same(what, config, apart, windows):
    """Raise ValueError if, by what `compared` returned, a network computes other things than transformers."""
    if apart is not None and not apart < CLOSE:
        raise ValueError(f"{what}: computed here it differs from what transformers computes by {apart:.2g} "
                         "of the largest value, so another model would be trained")
    window = getattr(config, "sliding_window", None) or math.inf
    if window not in windows and window < (getattr(config, "max_position_embeddings", None) or math.inf):
        raise ValueError(f"{what}: it tells its attention nothing of its sliding_window={window}")
