"""
What a model folder holds: what it says about its model, which models are refused, and the weights.

    check_model      the folder that a name stands for, if it holds a model that can generate
    check_trainable  the same, if by its config the model can also be trained
    load_tokenizer   its tokenizer
    end_tokens       the tokens that end a completion
    end_note         a sentence, if the chat template writes none of them
    read_model       its weights, whole
    write_model      a folder for from_pretrained and vLLM
    forecast         how much memory a run will take, and a refusal of what no device can hold
"""
import contextlib
import datetime
import functools
import json
import math
import os
from pathlib import Path
from types import SimpleNamespace

import torch
from transformers import (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoConfig,
                          AutoTokenizer, GenerationConfig)
from transformers.utils import cached_file, logging

# transformers' bars for every load and save would break up the run's own progress bar, and what it warns of,
# missing weights, is an error here.
logging.disable_progress_bar()
logging.set_verbosity_error()

# Files of what turns pictures into numbers, which others need who show the model some
PROCESSOR = "processor_config.json preprocessor_config.json video_preprocessor_config.json".split()
FILE_SIZE = "5GB"               # of a file of weights, unless a single tensor has more
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# The models that come with the repository, by the names that --model takes.
SHIPPED = {"tiny": f"{ROOT}/tiny/algebra", "tiny_compose": f"{ROOT}/tiny/compose",
           "tiny_episodes": f"{ROOT}/tiny/episodes"}


@contextlib.contextmanager
def reading(what):
    """Turn whatever a library raises over a damaged file into a ValueError: `what` cannot be read."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{what} cannot be read: {type(error).__name__}: "
                         + str(error).partition("\n")[0][:300]) from error


def located(path):
    """Return the folder or file that the name of a model stands for, or the name itself, which may be a hub
    id."""
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
    in_folder, what = os.path.isdir(path), f"{key}={path}"
    if in_folder and not os.path.exists(f"{path}/config.json") and [*Path(path).glob("*.gguf")]:
        raise ValueError(f"{what}: it holds GGUF files, which are for inference; training needs the folder "
                         "with config.json and safetensors that they were made of")
    # transformers would make an empty tokenizer.
    if tokenizer and not has_tokenizer(path):
        raise ValueError(f"{what}: no tokenizer in this folder")
    if os.path.exists(f"{path}/adapter_config.json"):
        raise ValueError(f"{what}: the folder holds an adapter (adapter_config.json) and not a model; "
                         "docs/lora.md says how PEFT writes one")
    with reading(f"{what}: {'' if in_folder else 'no such folder, and on the hub '}config.json"):
        limit = longest_row(read_config(path).get_text_config())
    if length > limit:
        raise ValueError(f"{what}: a prompt and its completion (max_completion_length) may have {length} "
                         f"tokens, but by its config (max_position_embeddings) the model takes {limit}")
    return path


def has_tokenizer(path):
    # A hub id is assumed to have one.
    return not os.path.isdir(path) or any(
        file.startswith(("tokenizer", "vocab", "spiece")) for file in os.listdir(path))


def longest_row(config):
    """Return how many tokens a model with this config reads in a row."""
    rope = getattr(config, "rope_parameters", None) or {}
    limits = [getattr(config, key, None) for key in (
        "max_position_embeddings", "attention_chunk_size")]     # attention in chunks is not supported
    if rope.get("rope_type") in ("dynamic", "longrope"):        # beyond these positions depend on the batch
        limits += [one.get("original_max_position_embeddings") for one in (rope, vars(config))]
    return min(filter(None, limits), default=math.inf)


def check_trainable(path, key="model", tokenizer=True, length=0):
    """Return what check_model returns. Also raises ValueError for a model that by its config cannot be
    trained."""
    path = check_model(path, key, tokenizer, length)
    config = read_config(path)
    if quantised := getattr(config, "quantization_config", None):
        raise ValueError(f"{key}={path}: its weights are quantised ({quantised.get('quant_method')}); "
                         "training needs plain ones")
    if getattr(config, "is_encoder_decoder", False) or not model_class(config):
        raise ValueError(f"{key}={path}: a {config.model_type} model is not a decoder that generates text")
    return path


def check_reader(key, path, policy_path, tokenizer, length=0):
    """check_trainable for a critic_model or reference_model. Also raises ValueError if it reads other tokens.

    path: "" stands for the policy's. tokenizer: the policy's. If the model has a tokenizer of its own, tokens
    that both have must have the same ids.
    """
    if not path:
        return policy_path
    path = check_trainable(path, key, tokenizer=False, length=length)
    size, policy_size = (read_config(one).get_text_config().vocab_size for one in (path, policy_path))
    own = load_tokenizer(path, key).get_vocab() if has_tokenizer(path) else {}
    others = [token for token, number in tokenizer.get_vocab().items() if own.get(token, number) != number]
    # Larger models of some families have more rows in their embedding, which no token needs.
    if size < policy_size or others:
        raise ValueError(f"{key}={path}: it has to read the policy's tokens, but has a vocabulary of {size} "
                         f"for one of {policy_size}, and other ids for {others[:3] or 'none'}")
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

    The first of the three that names any counts. Raises ValueError if none does, or for a damaged generation
    config.
    """
    named = [getattr(read_config(model), "eos_token_id", None), tokenizer.eos_token_id]
    path, in_folder = f"{model}/generation_config.json", os.path.isdir(model)
    if not in_folder or os.path.exists(path):
        with reading(path) if in_folder else contextlib.suppress(OSError):      # a hub's model may have none
            named.insert(0, GenerationConfig.from_pretrained(model).eos_token_id)
    ids = next((ids for ids in named if ids is not None), [])
    ids, vocabulary = ids if isinstance(ids, list) else [ids], read_config(model).get_text_config().vocab_size
    if not ids or not all(number in range(vocabulary) for number in ids):
        raise ValueError(f"model={model}: eos_token_id={ids}, of its generation config, config or tokenizer, "
                         "names no token that ends a completion")
    return ids


def end_note(tokenizer, eos_ids):
    """Return a sentence if the chat template ends a turn with none of the tokens that end a completion."""
    turn = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "forty-two"}]
    # Templates raise all kinds of errors. One that fails for the run's prompts stops it elsewhere.
    with contextlib.suppress(Exception):
        written = tokenizer.apply_chat_template(turn, tokenize=False).rpartition("forty-two")[2]
        if not {*eos_ids} & {*tokenizer(written, add_special_tokens=False).input_ids}:
            names = ", ".join(map(str, tokenizer.convert_ids_to_tokens(eos_ids)))
            return (f"A completion ends with {names} (eos_token_id), but the chat template ends a turn with "
                    f"{written!r}; a model that writes the latter is cut off at max_completion_length")


def load_tokenizer(path, key="model", settings=None, clock=None):
    """Return the tokenizer of a folder or hub id, with the chat template of `settings`, if these are given.

    clock: the date and time, in ISO format, that the chat template prints where it asks for the present ones;
    if None, those of this call. The clock stands still, because the beginning of an episode that goes on at
    midnight would no longer be its prompt. Raises ValueError if the tokenizer or the template cannot be read.
    """
    with reading(f"{key}={path}: its tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    # No prompt may spell a token that the model does not embed: data.py.
    tokenizer.embedded = read_config(path).get_text_config().vocab_size
    tokenizer.clean_up_tokenization_spaces = False              # rewards read what was written
    if settings:
        if path := settings.chat_template:
            with reading(f"chat_template={path}"):
                tokenizer.chat_template = Path(path).expanduser().read_text("utf-8")
        with reading(f"chat_template_kwargs={settings.chat_template_kwargs}"):
            more = dict(json.loads(settings.chat_template_kwargs or "{}"))
        for name in more:
            if name not in str(tokenizer.chat_template):
                raise ValueError(f"chat_template_kwargs: the chat template reads no {name}")
        now = datetime.datetime.fromisoformat(clock) if clock else datetime.datetime.now()
        tokenizer.apply_chat_template = functools.partial(
            tokenizer.apply_chat_template, strftime_now=now.strftime, **more)
    return tokenizer


# ---------------------------------------------------------------- weights

def read_model(what, kind, path, config, has_head=True, may_lack=()):
    """Return the model of the class `kind` in a folder or hub id, whole, in float32 on the CPU.

    has_head: False leaves out the head of a causal language model, which the folder may then lack. may_lack:
    names of parameters that stay as the class makes them if the folder has none. Raises ValueError, with a
    message that begins with `what`, if the weights cannot be read or do not fit the config.
    """
    with reading(f"{what}: its weights"):
        hf, info = kind.from_pretrained(
            path, config=config, dtype=torch.float32, attn_implementation="eager", output_loading_info=True,
            ignore_mismatched_sizes=True, trust_remote_code=False)
    if not has_head:
        head = hf.get_output_embeddings()
        for name in [name for name, part in hf.named_modules() if part is head]:
            hf.set_submodule(name, torch.nn.Identity())
            may_lack = [key for key in info["missing_keys"] if key.startswith(f"{name}.")]
    check_loaded(what, info, may_lack)
    hf.processor = {}                                           # {file: its content}, for write_model
    for name in PROCESSOR:
        with contextlib.suppress(OSError):
            hf.processor[name] = Path(cached_file(path, name)).read_bytes()
    # In eval mode no dropout acts. The engine has none either.
    return hf.eval()


def check_loaded(what, info, may_lack=()):
    """Raise ValueError if weights lack a tensor that is not in may_lack, or one has another shape."""
    if missing := sorted(set(info["missing_keys"]) - set(may_lack)):
        raise ValueError(f"{what}: no {', '.join(missing)} in its weights")
    for name, found, wanted in info["mismatched_keys"]:
        raise ValueError(f"{what}: {name} has the shape {list(found)} in its weights, but by its config "
                         f"{list(wanted)}")


def write_model(hf, tensors, folder):
    """Write a Hugging Face model to a folder. tensors: {name: whole tensor on the CPU} of its parameters."""
    parameters = {name for name, _ in hf.named_parameters(remove_duplicate=False)}
    buffers = {name: x for name, x in hf.state_dict().items() if name not in parameters}
    # A GenerationConfig's own save_pretrained refuses what some published models have: a temperature alone.
    generation, hf.generation_config = hf.generation_config, GenerationConfig()
    hf.save_pretrained(folder, state_dict=tensors | buffers, max_shard_size=FILE_SIZE)
    hf.generation_config = generation
    generation.to_json_file(f"{folder}/generation_config.json")
    for name, content in hf.processor.items():
        Path(folder, name).write_bytes(content)


def share(folder):
    """Give the safetensors files in a model's folder the mode of its other files, which the umask has left.
    safetensors lets only their owner read them."""
    ordinary = os.stat(f"{folder}/tokenizer_config.json")
    for path in Path(folder).rglob("*.safetensors"):
        path.chmod(ordinary.st_mode)


# ---------------------------------------------------------------- memory

@functools.cache
def sizes(path):
    # Counts what a model has. On the meta device it has only shapes.
    with reading(f"model={path}: its config"), torch.device("meta"):
        config = read_config(located(path))
        hf = model_class(config)(config)
    text, decoder, (V, H) = config.get_text_config(), hf.get_decoder(), hf.get_input_embeddings().weight.shape
    matrices = [p.shape for part in decoder.modules() if not isinstance(part, torch.nn.Embedding)
                for p in part.parameters(recurse=False) if p.ndim > 1]
    # A token is sent to a few of the experts, which stand in one tensor, [experts, out, in].
    sent = {3: getattr(text, "num_experts_per_tok", 1) or 1}
    return SimpleNamespace(
        V=V, H=H, depth=text.num_hidden_layers, whole=sum(p.numel() for p in hf.parameters()),
        # How many numbers go into matrix products and come out of them, for each token and in all layers
        through=sum(sent.get(len(shape), 1) * sum(shape[-2:]) for shape in matrices),
        cached=sum(part.out_features for name, part in decoder.named_modules()
                   if name.endswith((".k_proj", ".v_proj"))))


def forecast(s, ranks, memory, cuda):
    """Return the bytes that a rank takes while it samples and while it updates, at the peak of each.

    s: a script's settings. ranks: how many train. memory: that of a device, in bytes. cuda: whether it is a
    GPU. Only tensors are counted, for layers such as Llama's: CUDA, NCCL and vLLM's graphs take one to three
    GB more. Raises ValueError if weights, gradients and Adam's moments alone exceed the memory.
    """
    # Bytes of a number in a layer.
    b = 2 if s.dtype in ("bfloat16", "float16") or s.dtype == "auto" and cuda else 4
    m, shards = sizes(s.model), s.shard_ranks or ranks
    trained = [s.lora_rank * m.through or m.whole]
    weights = b * m.whole + 4 * trained[0] if s.lora_rank else 4 * m.whole
    if hasattr(s, "critic_model"):
        trained.append(sizes(s.critic_model or s.model).whole)
        weights += 4 * trained[1]
    if getattr(s, "kl_coef", 0) > 0:                            # a script of your own may have dropped it
        weights += b * sizes(s.reference_model or s.model).whole
    weights, gradients, adam = weights / shards, 4 * max(trained) / shards, 8 * sum(trained) / shards
    state, head = weights + gradients + adam, m.V * m.H
    if state > memory:
        raise ValueError(f"model={s.model}: weights, gradients and Adam's moments alone take "
                         f"{state / 1e9:.1f} GB on each of {ranks} ranks, a device has {memory / 1e9:.1f} GB")
    T = s.token_budget / s.sequence_parallel_size
    # Autograd keeps about 1.2 times what goes through the matrix products of layers such as Llama's.
    kept, inputs = 1.2 * b * m.through, b * m.H * m.depth
    recomputed, until_backward = (kept / m.depth, inputs) if s.gradient_checkpointing else (0, kept)
    # Two chunks of logits (logprobs.LOGITS), or two gradients of the head; and two layers and the head, whole.
    logits = max(8 * min(2 ** 28 if cuda else 2 ** 24, m.V * T), 0 if s.lora_rank else 8 * head)
    update = state + T * until_backward + max(logits, T * recomputed) + b * (2 * m.whole / m.depth + head)
    resting = weights + adam
    if s.offload_optimizer and cuda:                            # the moments come for the optimizer's step
        update, resting = max(update - adam, state), weights
    if getattr(s, "rollout_ranks", 0):                          # the engines have devices of their own
        return resting, update
    # A weight sync, which comes before sampling, takes two copies of the largest parameter.
    vllm, engine, copies = s.engine != "hf", b * m.whole / s.vllm_tensor_parallel_size, 2 * b * head
    if vllm and cuda:                                           # it takes its share, and sleeps in an update
        return resting + max(engine + copies, s.vllm_gpu_memory_utilization * memory), update
    rows = min(256, s.prompts_per_step * s.num_generations / ranks)
    cache = 2 ** 30 if vllm else rows * b * m.cached * (s.max_prompt_length + s.max_completion_length)
    return resting + engine + max(cache, copies), update + engine


def forecast_note(s, ranks):
    """Return the forecast of this rank's GPU, or of its part of the host's memory, as a line of text."""
    cuda, host = torch.cuda.is_available(), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    memory = (torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory if cuda else
              host / int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    peaks = forecast(s, ranks, memory, cuda)
    advice = "\nIt does not fit: docs/speed.md says which settings take less" if max(peaks) > memory else ""
    return "forecast of memory per rank: sampling {:.2f}, update {:.2f} of {:.2f} GB{}".format(
        *(size / 1e9 for size in (*peaks, memory)), advice)
