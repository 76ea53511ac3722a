"""
Models on their way from a folder to a sharded Policy or Critic (models.py), and what is refused on that way.

    check_model      a folder that lacks or has damaged what a model needs
    check_trainable  the same, and by its config a model that cannot be trained
    load_policy      a Policy under FSDP2
    load_critic      a Critic under FSDP2, from any model
Before it is sharded, a network's logprobs of two short sequences are compared with those of transformers,
and a model that comes out differently is refused.
"""
import contextlib
import json
import math
import os
import sys
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
import transformers
from safetensors import safe_open
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
                          AttentionInterface, AutoConfig, AutoTokenizer)
from transformers.utils import logging

import ranks
from attention import packed_attention
from models import Critic, Policy, hidden_states, text_model
from packing import micro_batches

# Its bars for every load and save would break up the run's own progress bar.
logging.disable_progress_bar()
# Where vLLM 0.32 has no implementation of a model, it wraps transformers' own class in compilation. The
# trainer's model is of the same class, and then asks for this attribute. To be removed once that is mended.
transformers.PreTrainedModel.do_not_compile = True


def precision(dtype, logprob_gap, device):
    """(the dtype that layers compute in, the largest mean logprob gap to the engine), from the settings."""
    name = dtype if dtype != "auto" else "bfloat16" if device.type == "cuda" else "float32"
    return getattr(torch, name), logprob_gap or {"float32": 1e-3, "bfloat16": 0.05}[name]


# ---------------------------------------------------------------- what is refused

@contextlib.contextmanager
def reading(what):
    """Turn whatever a library raises over a damaged file into a ValueError: `what` cannot be read."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{what} cannot be read: {type(error).__name__}: {str(error)[:300]}") from error


def check_model(path, key="model", tokenizer=True, length=0):
    """Raise ValueError if `path` is not found, or is a folder that lacks or has damaged what a model needs.

    key: the setting that names it, for the message. tokenizer: whether the model needs one. length: tokens
    that it has to read in a row. Returns its config.
    """
    if not os.path.isdir(path):
        if path.startswith((".", "/", "~", "out/")):
            raise ValueError(f"{key}={path}: no such folder")
        try:
            # A hub id.
            config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        except OSError as error:
            raise ValueError(f"{key}={path}: no such folder, and it cannot be loaded from the hub: "
                             f"{str(error).splitlines()[0]}") from None
        check_length(key, path, config, length)
        return config
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
    for file in files:
        if file.endswith((".json", ".safetensors", ".bin")) and not os.path.isfile(os.path.join(path, file)):
            raise ValueError(f"{key}={path}: {file} is not a file")
    for index in (file for file in files if file.endswith((".safetensors.index.json", ".bin.index.json"))):
        with reading(f"{key}={path}: {index}"), open(os.path.join(path, index)) as file:
            shards = set(json.load(file)["weight_map"].values())
        if missing := sorted(shards - set(files)):
            raise ValueError(f"{key}={path}: {', '.join(missing)} is missing, which {index} names")
    for file in sorted(file for file in files if file.endswith(".safetensors")):
        # This reads the list of tensors and compares it with the size of the file.
        with reading(f"{key}={path}: {file}"), safe_open(os.path.join(path, file), "pt"):
            pass
    with reading(f"{key}={path}: config.json"):
        with open(os.path.join(path, "config.json")) as file:
            plain = json.load(file)
        if "auto_map" in plain and plain.get("model_type") not in transformers.CONFIG_MAPPING:
            raise ValueError("it needs code of its own (trust_remote_code), which is never run")
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    check_length(key, path, config, length)
    return config


def check_length(key, path, config, length):
    config = config.get_text_config()
    longest = getattr(config, "max_position_embeddings", None) or math.inf
    # Older configs call it rope_scaling.
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kind = rope.get("rope_type", rope.get("type"))
    original = (rope.get("original_max_position_embeddings")
                or getattr(config, "original_max_position_embeddings", None) or longest)
    if kind in ("linear", "yarn"):
        longest = max(longest, original * (rope.get("factor") or 1))
    if kind in ("dynamic", "longrope") and length > original:
        raise ValueError(f"{key}={path}: beyond {original} tokens its positions depend on the longest "
                         f"sequence of a batch (rope_type={kind}), which is not supported; a prompt and its "
                         f"completion (max_completion_length) may have {length}")
    if length > longest:
        raise ValueError(f"{key}={path} reads at most {longest:g} tokens (max_position_embeddings), but a "
                         f"prompt and its completion (max_completion_length) may have {length}")
    chunk = getattr(config, "attention_chunk_size", None) or math.inf
    if length > chunk:
        raise ValueError(f"{key}={path}: its attention stays inside chunks of {chunk} tokens, which is not "
                         f"supported; a prompt and its completion (max_completion_length) may have {length}")


def check_trainable(path, key="model", tokenizer=True, length=0):
    """check_model, and ValueError for a model that by its config cannot be trained. Returns its config."""
    config = check_model(path, key, tokenizer, length)
    if quantised := getattr(config, "quantization_config", None):
        method = quantised.get("quant_method", "unknown") if isinstance(quantised, dict) else "unknown"
        raise ValueError(f"{key}={path}: its weights are quantised ({method}); training needs plain ones")
    if getattr(config, "is_encoder_decoder", False) or not model_class(config):
        raise ValueError(f"{key}={path}: a {config.model_type} model is not a decoder that generates text")
    return config


def check_critic(path, policy_path, length=0):
    """Raise ValueError for a critic_model that is not there, or that cannot read the policy's tokens."""
    config = check_trainable(path, "critic_model", tokenizer=False, length=length)
    size, policy_size = (config.get_text_config().vocab_size for config in (
        config, AutoConfig.from_pretrained(policy_path)))
    if size != policy_size:
        raise ValueError(f"critic_model={path} has a vocabulary of {size} tokens, the model one of "
                         f"{policy_size}: the critic has to read the policy's tokens")


def load_tokenizer(path, key="model"):
    """The tokenizer of a folder or hub id. Raises ValueError if it is damaged, or is another model's."""
    with reading(f"{key}={path}: its tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    embedded = AutoConfig.from_pretrained(path).get_text_config().vocab_size
    # Gemma 3's text models share their tokenizer with larger ones, whose image token they do not embed.
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    beyond = {token for token, number in tokenizer.get_vocab().items()
              if number >= embedded and number not in special}
    if beyond:
        raise ValueError(f"{key}={path}: its tokenizer has {len(tokenizer)} tokens, but its embedding only "
                         f"{embedded}: not the tokenizer that it was trained with")
    return tokenizer


def check_loaded(what, info, may_lack=()):
    """Raise ValueError if weights lack a tensor, except those in may_lack, or have one of another shape."""
    if missing := sorted(set(info["missing_keys"]) - set(may_lack)):
        raise ValueError(f"{what}: no {', '.join(missing)} in its weights")
    for name, found, wanted in info["mismatched_keys"]:
        raise ValueError(f"{what}: {name} has the shape {list(found)} in its weights, but by its config "
                         f"{list(wanted)}")


# ---------------------------------------------------------------- loading and sharding

def model_class(config):
    """The class in transformers that generates text with such a config, or None.

    If there are several it is the one that sees images, so that every checkpoint keeps what reads them.
    """
    for mapping in (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING):
        if type(config) in mapping:
            return mapping[type(config)]


def load_policy(path, mesh, dtype, gradient_checkpointing=False, trained=True, float32_head=True):
    """A Policy from a folder or hub id: float32 master weights, FSDP2-sharded over mesh, computing in dtype.

    trained: False for a reference, which needs no gradient and no more precision than it computes with.
    Its weights are then in dtype, which in bfloat16 takes half the memory and gives the same logprobs.
    float32_head: see head_logits; the engine needs the same. Raises ValueError for a model that cannot be
    loaded, or whose logprobs here would not be those that transformers computes. A collective.
    """
    what = f"model={path}"
    config = AutoConfig.from_pretrained(path)
    policy = Policy(loaded(what, model_class(config), path, config), float32_head).requires_grad_(trained)
    return shard(policy, what, mesh, dtype, gradient_checkpointing)


def load_critic(path, mesh, dtype, gradient_checkpointing=False):
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
    hf = loaded(f"critic_model={path}", WithScore, path, config, may_lack=["score.weight", "score.bias"])
    return shard(Critic(hf), f"critic_model={path}", mesh, dtype, gradient_checkpointing)


def loaded(what, kind, path, config, may_lack=()):
    # A model of the class `kind` in float32. What it lacks and may lack is zero.
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()                       # what is missing is reported here, if at all
    try:
        with reading(f"{what}: its weights"):
            hf, info = kind.from_pretrained(
                path, config=config, dtype=torch.float32, attn_implementation="eager",
                output_loading_info=True, ignore_mismatched_sizes=True, trust_remote_code=False)
    finally:
        logging.set_verbosity(verbosity)
    check_loaded(what, info, may_lack)
    for name in info["missing_keys"]:
        nn.init.zeros_(hf.get_parameter(name))
    if hf.generation_config:
        # Without this, a generation config that names a temperature cannot be saved.
        hf.generation_config.do_sample = True
    return hf


def shard(network, what, mesh, dtype, gradient_checkpointing):
    """Put a Policy or Critic on its device and under FSDP2: each layer as a unit, the rest as the root.

    What reads images is frozen. No dropout acts, because the engine has none either. Raises ValueError if the
    network does not compute what transformers does.
    """
    hf = network.hf.to(mesh.device_type).eval()
    for name, parameter in hf.named_parameters():
        if not parameter.isfinite().all():
            raise ValueError(f"{what}: {name} has NaN or infinite numbers in its weights")
    for part in hf.modules():
        for name, number in vars(part).items():
            if "drop" in name and isinstance(number, float):
                setattr(part, name, 0.0)
    if gradient_checkpointing:
        hf.gradient_checkpointing_enable({"use_reentrant": False})
        # It works in training mode only.
        for part in hf.modules():
            part.training = getattr(part, "gradient_checkpointing", False)
    network.packed = can_be_packed(network, what)
    if not next(network.parameters()).requires_grad:
        for parameter in network.parameters():
            parameter.data = parameter.data.to(dtype)
    decoder, body = text_model(hf), hf.base_model
    head = hf.score if isinstance(network, Critic) else hf.get_output_embeddings()
    text = {*decoder.parameters(), *head.parameters()}
    for parameter in hf.parameters():
        if parameter not in text:
            parameter.requires_grad_(False)
    layers = next((part for part in decoder.children() if isinstance(part, nn.ModuleList)), [])
    images = [part for part in body.children() if body is not decoder and not text & {*part.parameters()}]
    mixed = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for part in [*layers, *images]:
        fully_shard(part, mesh=mesh, mp_policy=mixed)
    fully_shard(network, mesh=mesh, mp_policy=mixed)
    return network


@torch.no_grad()
def can_be_packed(network, what):
    """Whether a row may hold several sequences: compares three short ones in a row with transformers' own.

    The first two begin with the same tokens. Raises ValueError if the network differs from transformers even
    where each has a row of its own.
    """
    hf, config, device = network.hf, network.hf.config.get_text_config(), next(network.parameters()).device
    ids = np.random.default_rng(0).integers(config.vocab_size, size=32).astype(np.int32)
    three = [SimpleNamespace(ids=one, spans=np.array([[1, len(one)]]), logprobs=one[1:])
             for one in (ids[:14], np.concatenate([ids[:6], ids[14:22]]), ids[22:])]
    windows = set()

    def attention(*arguments, sliding_window=None, **named):
        # Short sequences do not reach a window; its size has to be handed over.
        windows.add(sliding_window)
        return packed_attention(*arguments, sliding_window=sliding_window, **named)

    def ours(packed):
        network.packed, found = packed, {}                              # which micro_batches reads
        for batch in micro_batches(network, three, range(3), 64):
            found |= batch.split(network(batch, 1.0)[0] if isinstance(network, Policy) else
                                 batch.joined(hidden_states(hf, batch)))
        return torch.cat([found[s] for s in range(3)])

    def theirs(ids):
        ids = torch.tensor(ids[None].tolist(), device=device)
        if isinstance(network, Policy):
            table = hf(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
            return table.gather(1, ids[0, 1:, None])[:, 0]
        return text_model(hf)(input_ids=ids, use_cache=False).last_hidden_state[0, :-1]

    try:
        expected = torch.cat([theirs(one.ids) for one in three])
        AttentionInterface.register("packed", attention)
        hf.set_attn_implementation("packed")
        # The same on every rank.
        gaps = ranks.largest([(ours(packed) - expected).abs().max() / expected.abs().max()
                              for packed in (True, False)])
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise ValueError(f"{what}: this kind of model does not run here: {type(error).__name__}: "
                         f"{str(error)[:300]}") from error
    finally:
        AttentionInterface.register("packed", packed_attention)
    can, can_alone = (gap < 1e-4 for gap in gaps)
    if not can and not can_alone:
        raise ValueError(f"{what}: computed here it differs from what transformers computes by {gaps[1]:.2g} "
                         "of the largest value, so another model would be trained")
    window = getattr(config, "sliding_window", None) or math.inf
    if window not in windows and window < (getattr(config, "max_position_embeddings", None) or math.inf):
        raise ValueError(f"{what}: it tells its attention nothing of its sliding_window={window}")
    if not can and ranks.sequence_group:
        P = ranks.sequence_group.size()
        raise ValueError(f"{what}: sequence_parallel_size={P} cannot be used: layers other than attention "
                         "read earlier tokens, and they would see only those of a part")
    if not can and dist.get_rank() == 0:
        print(f"{what}: in a packed row its sequences would see each other, so each gets a row of its own, "
              "padded to the longest, which takes longer", file=sys.stderr)
    return can
