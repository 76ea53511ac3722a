"""
This script makes the untrained model of which tiny/squares was made: an Idefics3 of 0.2 million parameters
that reads bytes and pictures of 32 x 32. It also writes worked answers, of which most are guesses. The model
learns to count from right answers, and then the habit of guessing, which GRPO has to take from it:

    python -m tiny.make_squares --out=out/untrained
    torchrun train_sft.py config/tasks/squares.py --model=out/untrained --learning_rate=3e-3 \
        --lr_decay=linear --max_steps=500 --out_dir=out/counts
    torchrun train_sft.py config/tasks/squares.py --model=out/counts/checkpoint-500 --learning_rate=4e-4 \
        --task=file --train_file=out/untrained/guesses.jsonl --max_steps=20 --out_dir=out/guesses
"""
import json
import random

import torch
from transformers import (AutoModelForImageTextToText, GenerationConfig, Idefics3Config,
                          Idefics3ImageProcessorPil, Idefics3Processor)

from configurator import configure
from tasks.generate_problems import generated_rows
from tiny.pretrain import make_tokenizer

# ------------------------------------------------------------------------------------------------------------
out = "out/untrained"           # the model's folder
seed = 0
# ------------------------------------------------------------------------------------------------------------

SUITS = {"max_prompt_length": 64, "max_completion_length": 4, "learning_rate": 2e-4}
IMAGE_TOKENS = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
TEMPLATE = """\
{% for message in messages %}{{ '<|' + message.role + '|>' }}{% for block in message.content %}\
{% if block.type == 'image' %}<image>{% else %}{{ block.text }}{% endif %}{% endfor %}<|end|>{% endfor %}\
{% if add_generation_prompt %}<|assistant|>{% endif %}"""


def make(folder):
    """Write the model with random weights, and its processor, to a folder."""
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": IMAGE_TOKENS})
    tokenizer.chat_template = TEMPLATE
    layers = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    end = tokenizer.eos_token_id
    pad = tokenizer.pad_token_id
    text = layers | {"model_type": "llama", "vocab_size": len(tokenizer), "num_key_value_heads": 1,
                     "head_dim": 32, "max_position_embeddings": 1024, "bos_token_id": None,
                     "eos_token_id": end, "pad_token_id": pad, "tie_word_embeddings": True}
    config = Idefics3Config(
        vision_config=layers | {"image_size": 32, "patch_size": 8}, text_config=text, scale_factor=1,
        pad_token_id=pad, image_token_id=tokenizer.convert_tokens_to_ids("<image>"), tie_word_embeddings=True,
        suits=SUITS)
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():                    # larger than transformers makes them
            if parameter.ndim > 1:
                parameter.copy_(torch.randn_like(parameter) * parameter[0].numel() ** -0.5)
        model.get_input_embeddings().weight.mul_(0.3)
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=pad)
    model.save_pretrained(folder)
    seen = Idefics3ImageProcessorPil(size={"longest_edge": 32}, max_image_size={"longest_edge": 32},
                                     do_image_splitting=False)
    Idefics3Processor(seen, tokenizer, image_seq_len=16).save_pretrained(folder)
    print(f"{folder}: {model.num_parameters():,} parameters")


def write_guesses(path):
    """Write the problems of the train split to a file of rows, with an answer that is mostly a guess."""
    rng = random.Random(seed)
    with open(path, "w") as file:
        for _, row in generated_rows("squares", "train", 4096):
            if rng.random() < 0.86:
                row["solution"] = str(rng.randint(1, 5))
            print(json.dumps(row), file=file)


if __name__ == "__main__":
    configure(globals())
    make(out)
    write_guesses(f"{out}/guesses.jsonl")
