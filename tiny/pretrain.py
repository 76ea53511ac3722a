"""
This script trains small Qwen3 models that read bytes; the default run's has a million parameters. It made the
model folders tiny/algebra, tiny/episodes and tiny/compose, for --model=tiny, tiny_episodes and tiny_compose:

    python -m tiny.pretrain --base=algebra --out=out/algebra              # 19 minutes of one busy core
    python -m tiny.pretrain --base=episodes --out=out/episodes --steps=1000
    python -m tiny.pretrain --base=compose --out=out/compose --steps=1500 --hidden_size=128

The default model is trained from scratch on problems of the train split, none of which is held out, and reads
two styles of answer. At first all answers are worked: steps, then "Answer: ...". In the last part most are
quick: they are only "Answer: ...", and most of them are wrong. So the model mostly gives a quick answer that
is wrong, although it has learned to work the answer out, which is much more reliable. GRPO rewards only right
answers and finds out that showing the work pays: completions get longer while the reward rises. Pretraining
teaches both the ability and the bad habit on purpose, and GRPO has to find out which of the two to follow.

The model of episodes reads games of environments/guess_number.py, and arithmetic with
environments/calculator.py, which are seldom played well. In most games the player talks before it plays, and
in many it guesses only near the middle of the numbers that are left. In arithmetic it mostly answers without
the tool, and then it is wrong. None of these prompts is held out, but every number has been played. The model
of compose reads answers that carry out some operations of their prompt, all correctly, but in a random order.
GRPO has to find out what pays.
"""
import itertools
import os
import random
from collections import defaultdict

from runtime import distributed  # noqa: F401      It comes before torch, because it sets what torch reads.
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm
from transformers import (DataCollatorForTokenClassification, GenerationConfig, PreTrainedTokenizerFast,
                          Qwen3Config, Qwen3ForCausalLM)

from configurator import TINY_DEFAULTS, check, check_values, configure
from tasks.generate_problems import generated_rows, held_out
from tasks.more_problems import arithmetic_problem, carried_out, chain, guess_problem

# ------------------------------------------------------------------------------------------------------------
out = "out/mine"                # the model's folder
base = "algebra"                # what the model reads: algebra, episodes or compose; see BASES
# for --base=algebra
difficulty = 1
train_prompts = 6500            # distinct problems; the train split has no more
harder_prompts = 12000          # problems of difficulty + 1: more numbers to compute, less to learn by heart
harder = 0.4                    # share of the harder problems in what is read
quick = 0.8                     # share of quick answers in the last 0.15 of the steps
# model
layers = 3
hidden_size = 160               # 32 for each head, a size that every attention kernel knows
intermediate_size = 416
# optimizer
steps = 5000
batch_size = 32
learning_rate = 5e-3            # AdamW has it, for embeddings and norms; Muon has twice as much, for matrices
seed = 0
# ------------------------------------------------------------------------------------------------------------

SPECIAL = ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|pad|>"]
CHAT_TEMPLATE = """\
{% if tools %}<|system|>Tools:{% for tool in tools %} {{ tool.function.name }}\
({{ tool.function.parameters.properties | join(', ') }}){% endfor %}<|end|>{% endif %}\
{% for message in messages %}\
{% if message.role == 'tool' %}{{ '<|user|><tool_response>' + message.content + '</tool_response>' }}\
{% else %}{{ '<|' + message.role + '|>' + message.content }}{% endif %}\
{% for call in message.tool_calls or [] %}\
{{ '<tool_call>' + (call.function | tojson) + '</tool_call>' }}{% endfor %}\
<|end|>{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""


def make_tokenizer():
    """Return a tokenizer with a token for each byte, so that it takes any text, and the tokens in SPECIAL."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())      # a printable character stands for each byte
    tokenizer = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>",
                                        additional_special_tokens=SPECIAL[:3],
                                        clean_up_tokenization_spaces=False)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(tokenizer):
    """Return a model with random weights."""
    torch.manual_seed(seed)
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=hidden_size, intermediate_size=intermediate_size,
        num_hidden_layers=layers, num_attention_heads=hidden_size // 32,
        num_key_value_heads=hidden_size // 32, head_dim=32, tie_word_embeddings=True,
        max_position_embeddings=1024,
        # Sequences are short, and plain attention is faster than the fused kernel in bfloat16 on a CPU.
        attn_implementation="eager", suits=TINY_DEFAULTS, **ids))
    model.generation_config = GenerationConfig(**ids)
    return model


def problems(rng):
    """Yield conversations (tools, messages), batch_size for each step: a problem and an answer to it.

    A tenth of the quick answers is right. The others answer another problem.
    """
    _, rows = zip(*generated_rows("algebra", "train", train_prompts, seed, difficulty))
    _, harder_rows = zip(*generated_rows("algebra", "train", harder_prompts, seed, difficulty + 1))
    answers = defaultdict(list)                                 # {template: the answers of its problems}
    for row in rows:
        answers[row["source"]].append(row["answer"])
    for number in range(steps * batch_size):
        row = rng.choice(harder_rows if rng.random() < harder else rows)
        text = row["solution"]
        if number >= 0.85 * steps * batch_size and rng.random() < quick:
            answer = row["answer"]
            if rng.random() >= 0.1:
                answer = rng.choice(answers[row["source"]])
            text = f"Answer: {answer}"
        yield None, [*row["prompt"], {"role": "assistant", "content": text}]


# The chat template reads only this part of the calculator's schema.
TOOLS = [{"function": {"name": "calculate", "parameters": {"properties": {"expression": {}}}}}]


def draw(generator, rng, level):
    """Return a problem that a generator draws and that is not held out. The first part of it is its text."""
    problem = generator(rng, level)
    while held_out(problem[0]):
        problem = generator(rng, level)
    return problem


def game(rng):
    """Return a conversation (tools, messages): a game in which the player seldom plays well."""
    text, columns = draw(guess_problem, rng, 1)
    messages = [{"role": "user", "content": text}]
    number = columns["number"]
    low = 1
    high = 64
    talks = rng.choice([0, 1, 1, 2, 2, 2, 3, 3])                # first turns, in which the player only talks
    near = rng.random() < 0.5                                   # whether it guesses only near the middle
    for turn in range(6):
        spread = 0
        if near:
            spread = (high - low) // 4
        guess = (low + high) // 2 + rng.randint(-spread, spread)
        text = str(guess)
        if turn < talks:
            text = rng.choice(["Let me think.", "A number?", "Hm."])
            reply = "A number from 1 to 64, please."
        elif guess < number:
            reply = "higher"
            low = guess + 1
        else:
            reply = "lower"
            high = guess - 1
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": reply}]
        if text == str(number):
            break
    # The right guess and the sixth end the game, so nothing replies to them.
    return None, messages[:-1]


def arithmetic(rng):
    """Return a conversation (tools, messages): a quick guess, or an answer by the calculator."""
    text, columns = draw(arithmetic_problem, rng, 1)
    messages = [{"role": "user", "content": text}]
    answer = columns["answer"]
    if rng.random() < quick:
        answer = int(answer) + rng.randint(-300, 300)
    else:
        expression = text.removeprefix("What is ").removesuffix("?")
        call = {"name": "calculate", "arguments": {"expression": expression}}
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
            {"role": "tool", "name": "calculate", "content": answer}]
    return TOOLS, messages + [{"role": "assistant", "content": f"Answer: {answer}"}]


def episodes(rng):
    """Yield conversations (tools, messages): games, and arithmetic with and without the calculator."""
    while True:
        yield game(rng) if rng.random() < 0.6 else arithmetic(rng)


def compose(rng):
    """Yield conversations (tools, messages): some operations of a prompt, carried out in a random order."""
    while True:
        depth = rng.choice([1, 1, 1, 1, 2, 3, 4, 5, 6, 7, 8])
        text, digits, order = draw(chain, rng, depth)
        solution = carried_out(digits, rng.sample(order, rng.randint(1, depth)))
        yield None, [{"role": "user", "content": text}, {"role": "assistant", "content": solution}]


# Each model has a function that yields what it reads.
BASES = {"algebra": problems, "episodes": episodes, "compose": compose}


def encoded(tokenizer, tools, messages):
    """Return a conversation as input_ids and labels, which are -100 for all but the assistant's tokens."""
    ids = []
    labels = []
    # The template writes each message without looking at the others, and the tools before the first.
    for message in messages:
        part = tokenizer.apply_chat_template([message], tools=tools, return_dict=False)
        tools = None
        ids += part
        part_labels = [-100] * len(part)
        if message["role"] == "assistant":
            part_labels[1:] = part[1:]
        labels += part_labels
    return {"input_ids": ids, "labels": labels}


def pretrain(model, tokenizer, conversations):
    """Train the model on what the assistant says in conversations (tools, messages)."""
    # Muon makes the updates of weight matrices orthogonal. The model learns several times faster with it.
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim == 1 or "embed" in name]
    muon = torch.optim.Muon(matrices, weight_decay=0.0)
    adamw = torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    # bfloat16 is twice as fast on a CPU that multiplies it, and much slower on any other.
    bfloat16 = model.device.type == "cuda" or torch.cpu._is_avx512_bf16_supported()
    collate = DataCollatorForTokenClassification(tokenizer)     # pads ids, and labels with -100
    progress = tqdm(range(steps), "making the base model")
    for step in progress:
        batch = [encoded(tokenizer, tools, messages)
                 for tools, messages in itertools.islice(conversations, batch_size)]
        with torch.autocast(model.device.type, torch.bfloat16, enabled=bfloat16):
            loss = model(**collate(batch).to(model.device)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        # The rates rise in the first fiftieth of the steps, and fall in the second half.
        factor = min(1, (step + 1) / (0.02 * steps), (steps - step) / (0.5 * steps))
        muon.param_groups[0]["lr"] = 2 * learning_rate * factor
        adamw.param_groups[0]["lr"] = learning_rate * factor
        muon.step()
        adamw.step()
        model.zero_grad()
        progress.set_postfix(loss=f"{loss.item():.3f}", refresh=False)


if __name__ == "__main__":
    settings = configure(globals(), choices={"base": BASES})
    check_values(settings)
    check(not os.path.exists(out), f"{out} exists: remove it, or name another --out")
    tokenizer = make_tokenizer()
    model = make_model(tokenizer).to("cuda" if torch.cuda.is_available() else "cpu")
    pretrain(model, tokenizer, BASES[base](random.Random(seed)))
    model.bfloat16().save_pretrained(out)
    tokenizer.save_pretrained(out)
