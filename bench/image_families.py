"""
Which families of models that read images can be trained on images, tried with small random ones.

    python -m bench.image_families                           # all families: 20 minutes on two busy cores
    python -m bench.image_families --only=qwen3_vl,gemma3

Each family's model is made from its config, with its processor. The script computes logprobs and gradients of
rollouts about pictures as training does, packed, and by transformers, one sequence after the other, with what
the processor makes of the prompt. Then train_grpo.py trains the model for two steps of tasks/squares, with
--images=trained and with --images=frozen, and the mean gap between the logprobs of engine and trainer at the
second step is read. It prints a row of the table in docs/measured/images.md for each.
"""
import json
import os
import shutil
import subprocess
import sys

from runtime import distributed         # before torch: it sets environment variables that torch reads
import numpy as np
import torch
import transformers
from transformers.utils import is_torchvision_available

from bench.models import DELTA, REWARD, SMALL, known
from configurator import InputError, check, configure
from data import encode_rows
from model import load_policy, micro_batches
from options.images import data_uri, load_reader, picture_of
from rollout import Rollout
from runtime.model_folder import load_tokenizer, model_class
from tiny.make_squares import TEMPLATE
from tiny.pretrain import make_tokenizer
# ------------------------------------------------------------------------------------------------------------
only = ""                       # names of families, separated by commas; empty: all
out_dir = "out/image_families"  # of the models and their runs
runs = True                     # whether to train as well
# ------------------------------------------------------------------------------------------------------------

TOKENS = {"image_token": "<image>", "context_image_token": "<image>", "video_token": "<video>",
          "vision_start_token": "<start>", "vision_end_token": "<end>", "start_image_token": "<start>",
          "end_image_token": "<end>", "image_start_token": "<start>", "image_end_token": "<end>",
          "boi_token": "<boi>", "eoi_token": "<end>"}
TEXT = SMALL | dict(max_position_embeddings=1024, vocab_size=280, bos_token_id=None, tie_word_embeddings=True)
VISION = dict(hidden_size=64, embed_dim=64, intermediate_size=128, num_hidden_layers=2, depth=2,
              num_attention_heads=2, num_heads=2, out_hidden_size=64, image_size=32, patch_size=8,
              num_position_embeddings=64, num_patches=64, vision_use_head=False, projection_dim=64)
LLAMA = dict(model_type="llama")
CONVOLUTION = {"layer_types": ["conv", "full_attention"], "+conv_dim": 64, "+block_dim": 64}
CLIP = dict(model_type="clip_vision_model")
MROPE = dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[4, 6, 6]))
INTERLEAVED = dict(rope_parameters=MROPE["rope_parameters"] | dict(mrope_interleaved=True))
PARTIAL = dict(head_dim=128, rope_parameters=INTERLEAVED["rope_parameters"] | {"partial_rotary_factor": 0.25})
TILES = dict(num_global_layers=1, intermediate_layers_indices=[0], vision_output_dim=128, image_size=64)
LAST = dict(vision_feature_layer=-1)
SQUARE = dict(size=dict(height=32, width=32))
CROPPED = dict(size=dict(shortest_edge=32), crop_size=dict(height=32, width=32))
GRID = dict(patch_size=8, size=dict(shortest_edge=256, longest_edge=4096))
WHOLE = dict(size=dict(longest_edge=32), max_image_size=dict(longest_edge=32), do_image_splitting=False)
PINPOINTS = dict(image_grid_pinpoints=[[32, 64], [64, 32], [64, 64]])
CLASS_TOKEN = dict(patch_size=8, vision_feature_select_strategy="default", num_additional_image_tokens=1)
# By model_type: changes of the text part, of the part that sees, and of the config itself; the image
# processor's class and arguments; and arguments of the processor.
FAMILIES = {
    "idefics3": (LLAMA, {}, {}, "Idefics3", WHOLE, dict(image_seq_len=4)),
    "smolvlm": (LLAMA, {}, {}, "SmolVLM", WHOLE, dict(image_seq_len=4)),
    "qwen2_vl": (MROPE, {}, {}, "Qwen2VL", GRID, {}),
    "qwen2_5_vl": (MROPE, dict(window_size=32, fullatt_block_indexes=[1]), {}, "Qwen2VL", GRID, {}),
    "qwen3_vl": (INTERLEAVED, dict(deepstack_visual_indexes=[0]), {}, "Qwen2VL", GRID, {}),
    "qwen3_5": (DELTA | PARTIAL, {}, {}, "Qwen2VL", GRID, {}),
    "internvl": ({}, {}, {}, "GotOcr2", SQUARE, dict(image_seq_length=4)),
    "llava": (LLAMA, CLIP, LAST, "CLIP", CROPPED, CLASS_TOKEN),
    "llava_next": (LLAMA, CLIP, LAST | PINPOINTS, "LlavaNext", CROPPED | PINPOINTS, CLASS_TOKEN),
    "lfm2_vl": (CONVOLUTION, {}, dict(projector_hidden_size=64), "Lfm2Vl",
                dict(encoder_patch_size=8, min_image_tokens=4, max_image_tokens=16, tile_size=64), {}),
    "gemma3": ({}, {}, dict(mm_tokens_per_image=4), "Gemma3", SQUARE, dict(image_seq_length=4)),
    "paligemma": (dict(model_type="gemma"), {}, dict(projection_dim=64), "Siglip", SQUARE, {}),
    "mllama": (dict(cross_attention_layers=[1]), TILES, {}, "Mllama", dict(size=dict(height=64, width=64)), {})}
VIDEOS = {"smolvlm": "SmolVLM", "qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2VL", "qwen3_vl": "Qwen3VL",
          "qwen3_5": "Qwen3VL", "internvl": "InternVL"}
# What a chat template writes for an image, where it is not the token alone.
PLACES = dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5"), "<start><image><end>") | {"gemma3": "<boi>"}


def make(family, folder):
    """Write a model of this family, with random weights, and its processor to a folder."""
    text, vision, whole, image_processor, arguments, more = FAMILIES[family]
    made = make_tokenizer()
    begin = "<|system|>" if family in ("paligemma", "mllama") else None     # their processors need a token for it
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made.backend_tokenizer, bos_token=begin, eos_token=made.eos_token,
        pad_token=made.pad_token, extra_special_tokens=TOKENS)
    tokenizer.chat_template = TEMPLATE.replace("<image>", PLACES.get(family, "<image>"))
    ends = dict(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    ids = {f"{name}_id": tokenizer.convert_tokens_to_ids(token) for name, token in TOKENS.items()}
    ids |= {f"{name}_index": ids[f"{name}_id"] for name in ("image_token", "boi_token", "eoi_token")}
    kind = transformers.CONFIG_MAPPING[family]
    default = kind()
    parts = {}
    for key, values in (("text_config", TEXT | ends | text), ("vision_config", VISION | vision)):
        part = getattr(default, key)
        if "model_type" in values:
            part = transformers.CONFIG_MAPPING[values["model_type"]]()
        parts[key] = type(part)(**known(part, values))
    config = kind(**parts, **known(default, ends | ids | {"tie_word_embeddings": True} | whole))
    torch.manual_seed(0)
    hf = model_class(config)(config)
    with torch.no_grad():
        for parameter in hf.parameters():                       # larger, so that what is seen makes a difference
            if parameter.ndim > 1:
                parameter.copy_(torch.randn_like(parameter) * parameter[0].numel() ** -0.5)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
        hf.get_input_embeddings().weight.mul_(2)
    hf.generation_config = transformers.GenerationConfig(**ends)
    hf.save_pretrained(folder)
    backend = "" if is_torchvision_available() else "Pil"
    more = more | {"image_processor": getattr(transformers, f"{image_processor}ImageProcessor{backend}")(**arguments)}
    if family == "paligemma":
        more["image_processor"].image_seq_length = 16
    if family in VIDEOS:
        more["video_processor"] = getattr(transformers, f"{VIDEOS[family]}VideoProcessor")()
        if "Qwen" in VIDEOS[family]:
            more["video_processor"].patch_size = 8
    name = "Qwen3VL" if family == "qwen3_5" else type(hf).__name__.removesuffix("ForConditionalGeneration")
    getattr(transformers, f"{name}Processor")(tokenizer=tokenizer, **more).save_pretrained(folder)


def rows_of(random):
    """Prompts about one picture, about another, about two pictures, and about none."""
    rows = []
    for sizes in ([(32, 32)], [(32, 48)], [(40, 64), (32, 32)], []):
        pictures = []
        for height, width in sizes:
            pixels = random.integers(256, size=(height, width, 3), dtype=np.uint8)
            pictures.append(data_uri(b"P6 %d %d 255\n" % (width, height) + pixels.tobytes()))
        content = "<image>" * len(pictures) + "How many squares are red?"
        rows.append({"prompt": [{"role": "user", "content": content}], "images": pictures})
    return rows


class Settings:
    chat = True
    agent = ""
    images = "trained"


def gaps(folder, mesh):
    """Return the largest gaps between what training computes and what transformers computes: of logprobs, in
    nats, and of gradients of the sum of their squares, relative to the largest."""
    random = np.random.default_rng(0)
    tokenizer = load_tokenizer(folder)
    reader = load_reader(Settings, folder, tokenizer)
    policy = load_policy(folder, mesh, torch.float32, reader=reader)
    hf = model_class(policy.hf.config).from_pretrained(folder, dtype=torch.float32).eval()
    rollouts = []
    expected = []
    for prompt in encode_rows(tokenizer, [(f"row {i}", row) for i, row in enumerate(rows_of(random))]):
        text = tokenizer.apply_chat_template(prompt.row["prompt"], tokenize=False, add_generation_prompt=True)
        images = [picture_of(image) for image in prompt.row["images"]]
        inputs = reader.processor(text=[text], images=[images] if images else None, add_special_tokens=False,
                                  return_tensors="pt")
        for _ in range(4):
            tokens = torch.from_numpy(random.integers(97, 120, size=random.integers(2, 9)))
            rollouts.append(Rollout.single(prompt.ids, tokens.tolist(), [0.0] * len(tokens), "stop"))
            rollouts[-1].row = prompt.row
            sampled = dict(input_ids=tokens, attention_mask=torch.ones_like(tokens),
                           token_type_ids=torch.zeros_like(tokens), mm_token_type_ids=torch.zeros_like(tokens))
            longer = {name: torch.cat([inputs[name], sampled[name][None]], 1) for name in {*inputs} & {*sampled}}
            logits = hf(**inputs | longer, use_cache=False).logits[0, -len(tokens) - 1:-1]
            expected.append(logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0])
    sum((logp ** 2).sum() for logp in expected).backward()
    logps = {}
    for batch in micro_batches(policy, rollouts, range(len(rollouts)), 10_000):
        logp, _ = policy(batch, 1.0)
        batch.put(logp.detach(), logps)
        (logp ** 2).sum().backward()
    wanted = {name: p.grad for name, p in hf.named_parameters() if p.grad is not None}
    ours = dict(policy.hf.named_parameters())
    wrong = max((grad - ours[name].grad.full_tensor()).abs().max() for name, grad in wanted.items())
    largest = max(grad.abs().max() for grad in wanted.values())
    gap = max((logps[s] - logp).abs().max() for s, logp in enumerate(expected))
    return f"{gap:.0e} | {wrong / largest:.0e}"


def run(family, folder, images, dtype="auto"):
    """Train for two steps; return the gap of engine and trainer, or the message of the refusal."""
    out = os.path.join(out_dir, f"{family}-{images}")
    shutil.rmtree(out, ignore_errors=True)
    result = subprocess.run(
        [sys.executable, "train_grpo.py", "config/tasks/squares.py", f"--model={folder}",
         f"--images={images}", f"--out_dir={out}", f"--dtype={dtype}", f"--reward={out_dir}/reward.py:even", "--learning_rate=1e-3",
         "--max_prompt_length=250", "--max_completion_length=16", "--max_steps=2", "--prompts_per_step=4",
         "--train_prompts=64", "--eval_prompts=4", "--eval_interval=0", "--warmup_steps=0"],
        capture_output=True, text=True)
    said = result.stdout + result.stderr
    with open(f"{out}.log", "w") as file:
        file.write(said)
    if "requires BF16" in said and dtype == "auto":
        return run(family, folder, images, "bfloat16")
    if result.returncode == 2:
        return said.strip().splitlines()[-1].replace(folder, family)
    if result.returncode:
        return f"fails: {out}.log"
    with open(os.path.join(out, "metrics.jsonl")) as file:
        lines = [json.loads(line) for line in file]
    assert lines[0]["grad_norm"] > 0
    return f"{lines[1]['sampling/sampling_logp_difference/mean']:.0e}{', in bfloat16' * (dtype != 'auto')}"


if __name__ == "__main__":
    configure(globals())
    out_dir = os.path.abspath(out_dir)
    os.makedirs(out_dir, exist_ok=True)
    with open(os.path.join(out_dir, "reward.py"), "w") as file:
        file.write(REWARD)
    *_, mesh, _ = distributed.set_up(600)
    for family in only.split(",") if only else FAMILIES:
        check(family in FAMILIES, f"only={family}: choose from {', '.join(FAMILIES)}")
        folder = os.path.join(out_dir, family)
        make(family, folder)
        try:
            cells = [gaps(folder, mesh)]
        except InputError as error:
            cells = [str(error).replace(folder, family)]
        if runs:
            cells += [run(family, folder, images) for images in ("trained", "frozen")]
        print(f"| `{family}` |", " | ".join(cells), "|", flush=True)
