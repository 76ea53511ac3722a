"""
Images in prompts. Runs without the setting `images` do not open this file.

    take_images     the images of a file's row, as texts: paths and data URIs
    place_images    a prompt in which MARK stands for each image
    load_reader     makes the Reader of a run, or refuses its settings
    Reader          reads prompts with images, and gives a network what it needs to see them
    seeing          makes a class of engines that read images

In the ids of a prompt the tokens of an image are numbers below 0, which only the same image has. So
packing.py shares no prefix of two images, and a placeholder that the policy samples is an ordinary token.
Pixels never travel between ranks: each reads the images of the rollouts that it computes, row["images"].
"""
import base64
import contextlib
import copy
import functools
import hashlib
import inspect
import io
import os
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps
from transformers import AutoProcessor

from configurator import InputError, is_of_library, reading
from data import Prompt, naming, whole_text
from model import CLOSE, check_same
from packing import pack
from rollout import Rollout
from runtime.model_folder import read_config

# ---------------------------------------------------------------- rows

MARK = "<image>"                # stands for an image in the text of a message, as in verl's rows


def take_images(row, prompt_columns, folder):
    """Take the images out of a file's row; return them as paths and data URIs.

    They are in columns whose values are images as the hub has them, or else in `images` or `image`, or in
    blocks of messages, where MARK takes their place. folder: that of the file. Raises InputError for what is
    no image.
    """
    held = [column for column, value in row.items() if any(map(is_image, as_list(value)))]
    usual = [column for column in ("images", "image") if row.get(column)]
    images = sum([as_list(row[column]) for column in held or usual], [])
    for column in {*held, *usual}:
        del row[column]
    shown = []
    for column in prompt_columns:
        if isinstance(row.get(column), list):
            row[column] = [marked(message, shown) for message in row[column]]
    if images and shown:
        raise InputError("two images for a place: in a column, and in the blocks of its messages")
    return [as_text(image, folder) for image in images or shown if image is not None]


def as_list(value):
    return value if isinstance(value, list) else [value]


def is_image(value):
    # Returns whether a value is an image as the hub has it.
    return isinstance(value, bytes) or isinstance(value, dict) and value.keys() == {"bytes", "path"}


def marked(message, images):
    # Returns a message with MARK for each block of an image, and adds these images to the list.
    if not isinstance(message, dict) or not isinstance(message.get("content"), list):
        return message
    blocks = []
    for block in message["content"]:
        if isinstance(block, dict) and block.get("type") in ("image", "image_url"):
            image = block.get("image") or block.get("image_url")
            if isinstance(image, dict) and "url" in image:
                image = image["url"]
            if image:
                images.append(image)
            block = {"type": "text", "text": MARK}
        blocks.append(block)
    return message | {"content": blocks}


def as_text(image, folder):
    # Returns an image as a path or a data URI, and reads its header.
    if isinstance(image, dict):
        image = image.get("bytes") or image.get("path")
    if isinstance(image, bytes):
        image = data_uri(image)
    if not isinstance(image, str):
        raise InputError(f"an image is a path, a data URI or bytes, not {image!r:.100}")
    if not image.startswith("data:"):
        image = os.path.abspath(os.path.join(folder, os.path.expanduser(image)))
        if folder.startswith("hf://") or not os.path.isfile(image):
            raise InputError(f"no such image: {image} (none is fetched from the network)")
    opened(image).close()
    return image


def data_uri(content):
    """Return the bytes of an image file as a text."""
    return "data:image;base64," + base64.b64encode(content).decode()


def opened(image):
    # Returns an image of which only the header has been read.
    if image.startswith("data:"):
        image = io.BytesIO(base64.b64decode(image.partition(",")[2]))
    return Image.open(image)


@functools.lru_cache(maxsize=8)
def picture_of(image):
    # Returns a whole image, turned as its camera says, as datasets reads it. A group asks for it many times.
    return ImageOps.exif_transpose(opened(image)).convert("RGB")


def place_images(prompt, images):
    """Return a prompt with a MARK for each image, at the beginning of the user's first message if it has
    none. Raises InputError if it has another number of MARKs."""
    count = whole_text(prompt).count(MARK)
    if images and isinstance(prompt, str):
        raise InputError("a prompt with images has to be a list of messages (--prompt_column makes one)")
    if images and count == 0:
        places = [i for i, message in enumerate(prompt) if message["role"] == "user"]
        if not places:
            raise InputError(f"no message of the user can show its images: {prompt!r:.200}")
        first = prompt[places[0]]
        prompt[places[0]] = first | {"content": MARK * len(images) + first["content"]}
    elif count != len(images):
        raise InputError(f"{len(images)} images for {count} places: a block of type image, or {MARK} in the "
                         "text, stands for each")
    return prompt


# ---------------------------------------------------------------- prompts

class Shown(NamedTuple):
    """What an engine reads in the place of a prompt's ids."""
    length: int             # how many ids these are
    ids: list               # the same with one placeholder for each image
    images: list            # the images, as texts
    place: int              # the placeholder


def load_reader(settings, path, tokenizer):
    """Return the Reader of a run. Raises InputError for settings and models that do not go with images."""
    trained = settings.images == "trained"
    refused = {"a critic": hasattr(settings, "critic_model"), "chat=false": not settings.chat,
               "an agent": settings.agent,
               "sequence_parallel_size": getattr(settings, "sequence_parallel_size", 1) > 1,
               "lora_rank": trained and getattr(settings, "lora_rank", 0)}
    for name, is_set in refused.items():
        if is_set:
            raise InputError(f"images={settings.images}: not together with {name}")
    return Reader(path, tokenizer, trained)


def with_images(tokenizer, name, row, text, short):
    """Return the data.Prompt of a row with images. text: its prompt; short: this as ids, with a placeholder
    for each image."""
    with naming(name):
        if not hasattr(tokenizer, "reader"):
            raise InputError("it shows images, for which --images=frozen or --images=trained is needed")
        ids = tokenizer.reader.expanded(text, short, row["images"])
    return Prompt(row, ids, shown=Shown(len(ids), short, row["images"], tokenizer.reader.place))


class Reader:
    """Reads the images of prompts. It wraps the tokenizer's chat template, which then gets blocks, and its
    decode, which then takes ids below 0.

    trained     whether the layers that see images are trained
    place       the token that stands for each part of an image
    written     what a chat template writes for an image; in most families the text of `place`
    read        {images: what the processor made of them}; emptied where it would have more than CACHE bytes
    examples    for the check at load, and the first also for micro-batches without images
    """
    CACHE = 2 ** 30

    def __init__(self, path, tokenizer, trained):
        with reading(f"model={path}: its processor"):
            self.processor = AutoProcessor.from_pretrained(path, trust_remote_code=False)
        if not hasattr(self.processor, "image_processor"):
            raise InputError(f"images: model={path} reads none")
        self.trained = trained
        self.place = getattr(read_config(path), "image_token_id", None)
        self.written = getattr(self.processor, "image_token", None)
        if None in (self.place, self.written):
            raise InputError(f"images: model={path} has no token that stands for an image")
        self.read = {}
        self.size = 0                           # of `read`, in bytes
        self.examples = []
        for size in ((96, 64), (48, 80)):
            file = io.BytesIO()
            Image.linear_gradient("L").rotate(30).resize(size).save(file, "PNG")
            self.examples.append([data_uri(file.getvalue())])
        tokenizer.reader = self
        tokenizer.apply_chat_template = functools.partial(self.rendered, tokenizer.apply_chat_template)
        tokenizer.decode = functools.partial(self.decoded, tokenizer.decode)
        self.tokenizer = tokenizer

    def rendered(self, render, messages, **arguments):
        # Calls a chat template. Some read only blocks, and others would leave out a string.
        in_blocks = []
        for message in messages:
            first, *texts = message["content"].split(MARK)
            blocks = [{"type": "text", "text": first}]
            for text in texts:
                blocks += [{"type": "image"}, {"type": "text", "text": text}]
            in_blocks.append(message | {"content": blocks})
        return render(in_blocks, **arguments)

    def decoded(self, decode, token_ids, **arguments):
        return decode(np.where(np.less(token_ids, 0), self.place, token_ids), **arguments)

    def processed(self, text, images):
        # Returns the ids of a text with images, and keeps what the layers read that see these.
        pictures = [picture_of(image) for image in images]
        inputs = dict(self.processor(text=[text], images=[pictures], add_special_tokens=False,
                                     return_tensors="pt"))
        ids = inputs.pop("input_ids")[0].numpy()
        for name in ("attention_mask", "mm_token_type_ids", "token_type_ids"):
            inputs.pop(name, None)
        if tuple(images) not in self.read:
            self.size += sum(x.nbytes for x in inputs.values())
        if self.size > self.CACHE:
            self.read = {}
            self.size = 0
        self.read[tuple(images)] = inputs
        return ids

    def expanded(self, text, short, images):
        """Return the ids of a prompt, in which those of its images are below 0. The arguments are those of
        with_images. Raises InputError if the template does not write a placeholder for each image."""
        count = short.count(self.tokenizer.convert_tokens_to_ids(self.written))
        if count != len(images):
            raise InputError(f"the chat template writes {count} placeholders for {len(images)} images")
        ids = self.processed(text, images)
        places = np.flatnonzero(ids == self.place)
        digest = hashlib.shake_128("".join(images).encode()).digest(4 * len(places))
        ids[places] = -1 - (np.frombuffer(digest, "<u4") >> 1).astype(np.int64)
        return ids.tolist()

    def pixels(self, images):
        """Return what the layers read that see these images, as tensors by name."""
        if tuple(images) not in self.read:
            self.processed(self.written * len(images), images)
        return self.read[tuple(images)]

    # ------------------------------------------------------------ the check at load

    def check_same(self, label, network, P):
        """Do what model.check_same does, and compare two prompts with images of different sizes as well."""
        rollouts = []
        values = {}
        with running(label):
            for images in self.examples:
                short, tail = self.tokenizer([self.written, "It shows"], add_special_tokens=False).input_ids
                rollouts.append(Rollout.single(self.expanded(self.written, short, images), tail,
                                               [0.0] * len(tail), "stop"))
                rollouts[-1].row = {"images": images}
            expected = torch.cat([self.by_transformers(twin_of(network), r) for r in rollouts])
        network.hf.set_attn_implementation("sdpa")              # the layers that see images see all of one
        packed = check_same(label, network, P)
        twin = twin_of(network)
        twin.reader = self
        for part in twin.hf.base_model.children():              # as FSDP does, in which LLaVA does not run
            part.__class__ = type(f"FSDP{type(part).__name__}", (type(part),), {})
        with running(label):
            for batch in pack(rollouts, [0, 1], sum(len(r.ids) for r in rollouts), packed):
                self.attach(batch, rollouts, twin.hf.base_model)
                batch.put(twin.by_training(batch), values)
        gap = (torch.cat([values[0], values[1]]) - expected).abs().max() / expected.abs().max()
        if not gap < CLOSE:
            raise InputError(f"{label}: with an image it differs from what transformers computes by "
                             f"{gap:.2g} of the largest value, so another model would be trained")
        return packed

    def by_transformers(self, network, rollout):
        """Return the logprobs of a rollout's sampled tokens by transformers' own attention, [len]."""
        arguments = dict(self.pixels(rollout.row["images"]))
        ids = torch.from_numpy(rollout.ids).long()[None]
        for name in ("mm_token_type_ids", "token_type_ids"):    # with them Gemma's images attend both ways
            if name in inspect.signature(network.hf.forward).parameters:
                arguments[name] = (ids < 0).int()
        ids = ids.masked_fill(ids < 0, self.place)
        logits = network.hf(input_ids=ids, use_cache=False, **arguments).logits[0, rollout.places - 1]
        return logits.float().log_softmax(-1).gather(1, ids[0, rollout.places, None])[:, 0]

    # ------------------------------------------------------------ micro-batches

    def attach(self, batch, rollouts, base):
        """Tell a MicroBatch what it shows: `shown` becomes the pixels of each distinct prompt's images, and
        for each token of an image in its lines the number of the feature that takes its place, [n].

        Under FSDP all ranks have to call the layers that see images equally often, so without images it has
        the pixels of an example. base: the model that sees images.
        """
        first = {}                              # {ids of a prompt's images: number of their first feature}
        pixels = []
        numbers = [np.arange(0)]
        count = 0
        for sequence, _, shared in batch.members:
            places = np.flatnonzero(sequence.ids < 0)
            key = sequence.ids[places].tobytes()
            if len(places) and key not in first:
                first[key] = count
                count += len(places)
                pixels.append(self.pixels(rollouts[sequence.s].row["images"]))
            numbers.append(first.get(key, 0) + np.flatnonzero(places >= shared))
        if hasattr(base, "get_rope_index"):
            batch.position_ids = self.positions(batch, rollouts, base)
        pixels = pixels or [self.pixels(self.examples[0])]
        dim = int(pixels[0]["pixel_values"].ndim == 5)          # Idefics3's have a dimension for the batch
        joined = {name: torch.cat([x[name] for x in pixels], dim) for name in pixels[0]}
        batch.shown = joined, torch.from_numpy(np.concatenate(numbers))

    def positions(self, batch, rollouts, base):
        # [3, lines, T]: in such families a part of an image has a time, a height and a width.
        lines, width = batch.input_ids.shape
        parts = []
        for sequence, size, shared in batch.members:
            ids = torch.from_numpy(sequence.ids).long()[None]
            seen = ids < 0
            planes = torch.arange(size).expand(3, 1, -1)
            if seen.any():
                grid = self.pixels(rollouts[sequence.s].row["images"])["image_grid_thw"]
                planes, _ = base.get_rope_index(ids.masked_fill(seen, self.place),
                                                mm_token_type_ids=seen.int(), image_grid_thw=grid)
            parts.append(planes[:, 0, shared:size])
            if lines > 1:
                parts.append(torch.arange(width - size).expand(3, -1))
        padding = lines * width - sum(part.shape[1] for part in parts)
        parts.append(torch.arange(padding).expand(3, -1))
        return torch.cat(parts, 1).unflatten(1, (lines, width))

    def inputs(self, network, batch):
        """Return what the decoder reads in the place of input_ids, with gradient: embeddings of tokens, and
        features of images."""
        pixels, numbers = batch.shown
        seen = batch.input_ids < 0
        embeds = network.hf.get_input_embeddings()(batch.input_ids.clamp(min=0))            # [lines, T, H]
        pixels = {name: x.to(embeds.device) for name, x in pixels.items()}
        with torch.set_grad_enabled(self.trained and torch.is_grad_enabled()):
            output = network.hf.base_model.get_image_features(**pixels, return_dict=True)
        layers = [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]
        layers = [flat(x).to(embeds.dtype) for x in layers]
        if len(numbers) == 0:                   # not left out: FSDP reduces only what has a gradient
            return {"inputs_embeds": embeds + 0 * sum(x.sum() for x in layers)}
        features, *deep = [x[numbers.to(x.device)] for x in layers]                         # [n, H]
        inputs = {"inputs_embeds": embeds.masked_scatter(seen[..., None], features)}
        if deep:                                # Qwen3-VL adds to later layers
            inputs |= {"visual_pos_masks": seen, "deepstack_visual_embeds": deep}
        return inputs


@contextlib.contextmanager
def running(label):
    # Turns an error of a library into an InputError; a tensor of a wrong shape is a RuntimeError.
    try:
        yield
    except Exception as error:
        if isinstance(error, InputError) or not (is_of_library(error) or isinstance(error, RuntimeError)):
            raise
        raise InputError(f"{label}: this kind of model does not run here with images: "
                         f"{type(error).__name__}: {str(error):.300}") from error


def twin_of(network):
    # Returns a copy with the same parameters. The hooks that LLaVA leaves in it cannot travel to other ranks.
    return copy.deepcopy(network, {id(x): x for x in network.parameters()})


def flat(x):
    # Returns features of images, which are a tensor or one for each image, as [n, H].
    return x.flatten(0, -2) if isinstance(x, torch.Tensor) else torch.cat([*x]).flatten(0, -2)


# ---------------------------------------------------------------- engines

def seeing(kind):
    """Return a class of engines that reads images. Raises InputError for any kind but VLLMEngine."""
    if kind.name != "vllm":
        raise InputError(f"images need engine=vllm: engine={kind.name} reads none")

    class SeeingEngine(kind):
        # The hash that vLLM takes by default needs another package.
        own_arguments = {"skip_tokenizer_init": False, "language_model_only": False,
                         "limit_mm_per_prompt": {"video": 0}, "mm_hasher_algorithm": "sha256"}

        def prompt_of(self, request):
            shown = request.shown
            if not shown:
                return super().prompt_of(request)
            # By these names vLLM knows a picture again without a look at its pixels.
            names = [hashlib.sha256(image.encode()).hexdigest() for image in shown.images]
            return {"prompt_token_ids": shown.ids + request.ids[shown.length:],
                    "multi_modal_data": {"image": [picture_of(image) for image in shown.images]},
                    "multi_modal_uuids": {"image": names}}

        def added_as(self, request, state):
            # vLLM has put as many placeholders into the prompt as it will have features.
            super().added_as(request, state)
            expected = request.ids
            if request.shown:
                expected = np.where(np.less(request.ids, 0), request.shown.place, request.ids).tolist()
            if list(state.prompt_token_ids) != expected:
                raise RuntimeError("vLLM and the trainer read other tokens of a prompt with images: "
                                   f"{len(state.prompt_token_ids)} and {len(expected)}")

        def _load(self, named_tensors):
            checksums = super()._load(named_tensors)
            # vLLM empties only one of the two places in which it keeps track of features.
            self.llm.llm_engine.reset_encoder_cache()
            return checksums

    return SeeingEngine
