"""
A model's folder: what it says about its model, which models are refused, and the weights in it.

    check_model      returns the folder that a name stands for, if it holds a model that can generate
    check_trainable  does the same, if by its config the model can also be trained
    end_tokens       returns the tokens that end a completion
    end_note         returns a sentence, if the chat template writes none of these tokens
    load_tokenizer   reads the tokenizer
    read_model       reads the model, whole
    write_model      writes a folder for from_pretrained and vLLM

memory.py forecasts how much memory a run takes.
"""
import contextlib
import datetime
import functools
import math
import os
from pathlib import Path

import torch
from transformers import (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoConfig,
                          AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast)
from transformers.utils import cached_file, logging

from configurator import InputError, reading

# transformers' bars for every load and save would break up the run's own progress bar. It also warns of
# missing weights, which are an error here.
logging.disable_progress_bar()
logging.set_verbosity_error()

ROOT = Path(__file__).resolve().parents[1]
# The models that come with the repository, by the names that --model takes.
SHIPPED = {"tiny": f"{ROOT}/tiny/algebra", "tiny_compose": f"{ROOT}/tiny/compose",
           "tiny_episodes": f"{ROOT}/tiny/episodes", "tiny_squares": f"{ROOT}/tiny/squares"}
# The files of a processor, which turns images into numbers. Training does not need them, but a folder keeps
# them for those who show the model images.
PROCESSOR = "processor_config.json preprocessor_config.json video_preprocessor_config.json".split()
FILE_SIZE = "5GB"               # of a file of weights, unless a single tensor has more
# Two tokenizers that cut this in the same way are taken to be the same. </s> is for those of Llama's kind, of
# which some put a space behind a special token.
SAMPLE = "It's 1234 x 5 = 6,170.\n\n  Cafe\u0301, naïve\tABC 中文 <b>don't</b>!</s>hello"


def located(path):
    """Return the folder or file that the name of a model stands for. A hub id stays as it is."""
    here = os.path.abspath(os.path.expanduser(SHIPPED.get(path, path)))
    return here if os.path.exists(here) else path


@functools.cache
def read_config(path):
    """Return the config in a model's folder or of a hub id. It is read once, for all checks; nothing changes
    it."""
    return AutoConfig.from_pretrained(path, trust_remote_code=False)


def check_model(path, key="model", tokenizer=True, length=0):
    """Return the folder (or hub id) of the model that `path` names, if it has all that a model needs.

    path: a folder, a hub id, or the name of a model that is shipped. key: the setting that names it, for the
    message. tokenizer: whether the model needs one. length: tokens that it has to read in a row. Raises
    ValueError if it is not found or cannot be used. Weights are checked when they are loaded.
    """
    path = located(path)
    config_name = "config.json" if os.path.isdir(path) else "no such folder, and on the hub config.json"
    # transformers would make an empty tokenizer.
    if tokenizer and not has_tokenizer(path):
        raise InputError(f"{key}={path}: no tokenizer in this folder")
    if os.path.exists(f"{path}/adapter_config.json"):
        raise InputError(f"{key}={path}: the folder holds an adapter (adapter_config.json) and not a model; "
                         "lora_from begins with it, and docs/lora.md says how to merge it")
    with reading(f"{key}={path}: {config_name}"):
        limit = longest_row(read_config(path).get_text_config())
    if length > limit:
        raise InputError(f"{key}={path}: a prompt and its completion (max_completion_length) may have "
                         f"{length} tokens, but by its config (max_position_embeddings) the model takes "
                         f"{limit}")
    return path


def has_tokenizer(path):
    # A hub id is assumed to have one.
    return not os.path.isdir(path) or any(
        file.startswith(("tokenizer", "vocab", "spiece")) for file in os.listdir(path))


def longest_row(config):
    """Return how many tokens a model with this config reads in a row."""
    rope = getattr(config, "rope_parameters", None) or {}
    keys = ["max_position_embeddings", "attention_chunk_size"]  # attention in chunks is not supported
    limits = []
    if rope.get("rope_type") in ("dynamic", "longrope"):        # positions after these depend on the batch
        keys.append("original_max_position_embeddings")
        limits.append(rope.get("original_max_position_embeddings"))
    limits += [getattr(config, key, None) for key in keys]
    return min(filter(None, limits), default=math.inf)


def check_trainable(path, key="model", tokenizer=True, length=0):
    """Return what check_model returns. Also raises InputError for a model that by its config cannot be
    trained."""
    path = check_model(path, key, tokenizer, length)
    config = read_config(path)
    quantization = getattr(config, "quantization_config", None)
    if quantization:
        raise InputError(f"{key}={path}: its weights are quantised ({quantization.get('quant_method')}); "
                         "training needs plain ones, and docs/measured/folders.md says how to write them")
    if getattr(config, "is_encoder_decoder", False) or not model_class(config):
        raise InputError(f"{key}={path}: a {config.model_type} model is not a decoder that generates text")
    return path


def model_class(config):
    """Return the class in transformers that generates text with such a config, or None.

    If there are several, it is the one that takes images, so that checkpoints keep the weights for them.
    """
    for mapping in (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING):
        if type(config) in mapping:
            return mapping[type(config)]


def end_tokens(model, tokenizer):
    """Return the ids of the tokens that end a completion: of the generation config, config or tokenizer.

    The first of the three that names any counts. Raises InputError if none does, or for a damaged generation
    config.
    """
    config = read_config(model)
    named_by = [getattr(config, "eos_token_id", None), tokenizer.eos_token_id]
    path = f"{model}/generation_config.json"
    # A hub id may have no such file.
    with reading(path) if os.path.exists(path) else contextlib.suppress(OSError):
        named_by.insert(0, GenerationConfig.from_pretrained(model).eos_token_id)
    ids = next((ids for ids in named_by if ids is not None), [])
    if not isinstance(ids, list):
        ids = [ids]
    if not ids or {*ids} - {*range(config.get_text_config().vocab_size)}:
        raise InputError(f"model={model}: eos_token_id={ids}, of its generation config, config or tokenizer, "
                         "names no token that ends a completion")
    return ids


def end_note(tokenizer, eos_ids):
    """Return a sentence if the chat template ends a turn with none of the tokens that end a completion."""
    turn = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "forty-two"}]
    # Templates raise all kinds of errors. If this one fails for the run's prompts, that stops the run later.
    with contextlib.suppress(Exception):
        _, _, ending = tokenizer.apply_chat_template(turn, tokenize=False).rpartition("forty-two")
        if not {*eos_ids} & {*tokenizer(ending, add_special_tokens=False).input_ids}:
            names = ", ".join(map(str, tokenizer.convert_ids_to_tokens(eos_ids)))
            return (f"A completion ends with {names} (eos_token_id), but the chat template ends a turn with "
                    f"{ending!r}. A model that ends its turns like that is cut off at max_completion_length")


def load_tokenizer(path, key="model", settings=None, clock=None):
    """Return the tokenizer of a folder or hub id, with the chat template of `settings`, if these are given.

    clock: the date and time, in ISO format, that the chat template prints where it asks for the present ones;
    if None, those of this call. The clock stands still, because the beginning of an episode that goes on at
    midnight would no longer be its prompt. The tokenizer gets an attribute `embedded`, which data.py reads:
    how many ids the model embeds; no prompt may have others. Raises InputError if the tokenizer or the
    template cannot be read.
    """
    with reading(f"{key}={path}: its tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        file = None
        with contextlib.suppress(OSError):                      # there may be no such file
            file = cached_file(path, "tokenizer.json")
        if file:
            # Some classes of transformers 5 cut a text in their own way, whatever this file says. For
            # deepseek-math-7b-rl all spaces would be lost. The model was trained as the file says.
            as_file_says = PreTrainedTokenizerFast.from_pretrained(path)
            if as_file_says.tokenize(SAMPLE) != tokenizer.tokenize(SAMPLE):
                tokenizer = as_file_says
    tokenizer.embedded = read_config(path).get_text_config().vocab_size
    # Rewards read what was written. As an attribute this would change the tokenizer of each checkpoint.
    written = functools.partial(functools.partial, clean_up_tokenization_spaces=False)
    tokenizer.decode = written(tokenizer.decode)
    tokenizer.batch_decode = written(tokenizer.batch_decode)
    if settings:
        now = datetime.datetime.fromisoformat(clock or datetime.datetime.now().isoformat())
        tokenizer.apply_chat_template = functools.partial(
            tokenizer.apply_chat_template, strftime_now=now.strftime)
    if settings and (settings.chat_template or settings.chat_template_kwargs):
        from options.own_template import apply_settings
        apply_settings(tokenizer, settings)
    return tokenizer


# ---------------------------------------------------------------- weights

def read_model(what, kind, path, config, has_head=True, may_lack=(), dtype=torch.float32):
    """Return the model of the class `kind` in a folder or hub id, whole, with parameters in dtype on the CPU.

    has_head: False leaves out the head of a causal language model, which the folder may then lack. may_lack:
    names of parameters that stay as the class makes them if the folder has none. The model gets an attribute
    `processor` for write_model: {name of a file: its content}. Raises InputError, with a message that begins
    with `what`, if the weights cannot be read or do not fit the config.
    """
    with reading(f"{what}: its weights"):
        hf, info = kind.from_pretrained(
            path, config=config, dtype=dtype, attn_implementation="eager", output_loading_info=True,
            ignore_mismatched_sizes=True, trust_remote_code=False)
    for parameter in hf.parameters():                           # some classes keep a few in float32
        parameter.data = parameter.data.to(dtype)
    if not has_head:
        head = hf.get_output_embeddings()
        for name in [name for name, part in hf.named_modules() if part is head]:
            hf.set_submodule(name, torch.nn.Identity())
            may_lack = [key for key in info["missing_keys"] if key.startswith(f"{name}.")]
    check_loaded(what, info, may_lack)
    hf.processor = {}
    for name in PROCESSOR:
        with contextlib.suppress(OSError):                      # most models have none
            hf.processor[name] = Path(cached_file(path, name)).read_bytes()
    # In eval mode no dropout acts. The engine has none either.
    return hf.eval()


def check_loaded(what, info, may_lack=()):
    """Raise InputError if weights lack a tensor that is not in may_lack, or one has another shape.

    info: what from_pretrained returns with output_loading_info.
    """
    missing = sorted({*info["missing_keys"]} - {*may_lack})
    if missing:
        raise InputError(f"{what}: no {', '.join(missing)} in its weights")
    for name, shape, config_shape in info["mismatched_keys"]:
        raise InputError(f"{what}: {name} has the shape {list(shape)} in its weights, but by its config "
                         f"{list(config_shape)}")


def write_model(hf, tensors, folder):
    """Write a Hugging Face model to a folder. tensors: {name: whole tensor on the CPU} of its parameters."""
    parameters = {name for name, _ in hf.named_parameters(remove_duplicate=False)}
    buffers = {name: x for name, x in hf.state_dict().items() if name not in parameters}
    # A GenerationConfig's own save_pretrained refuses what some published models have: a temperature alone.
    generation = hf.generation_config
    hf.generation_config = GenerationConfig()
    try:
        hf.save_pretrained(folder, state_dict=tensors | buffers, max_shard_size=FILE_SIZE)
    finally:
        hf.generation_config = generation
    generation.to_json_file(f"{folder}/generation_config.json")
    for name, content in hf.processor.items():
        Path(folder, name).write_bytes(content)
