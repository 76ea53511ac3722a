"""
This script makes the untrained model of which tiny/squares was made: an Idefics3 of 0.2 million parameters
that reads bytes and pictures of 32 x 32. Worked answers, most of them wrong, then teach it to answer:

    python -m tiny.make_squares --out=out/untrained
    torchrun train_sft.py config/tasks/squares.py --model=out/untrained --learning_rate=1e-3 --max_steps=150
"""
import torch
from transformers import (AutoModelForImageTextToText, GenerationConfig, Idefics3Config,
                          Idefics3ImageProcessorPil, Idefics3Processor)

from configurator import configure
from tiny.pretrain import make_tokenizer

# ------------------------------------------------------------------------------------------------------------
out = "out/untrained"           # the model's folder
seed = 0
# ------------------------------------------------------------------------------------------------------------

SUITS = {"max_prompt_length": 64, "max_completion_length": 4, "learning_rate": 5e-4}
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
        vision_config=layers | {"image_size": 32, "patch_size": 8}, text_config=text, pad_token_id=pad,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"), tie_word_embeddings=True, suits=SUITS)
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
    Idefics3Processor(seen, tokenizer, image_seq_len=4).save_pretrained(folder)
    print(f"{folder}: {model.num_parameters():,} parameters")


if __name__ == "__main__":
    configure(globals())
    make(out)
