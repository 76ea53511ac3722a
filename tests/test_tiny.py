"""tiny/: the tokenizer, the two styles of answer, the shipped models, and a model made anew."""
import itertools
import os
import random
import re
from collections import Counter

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import get_json_schema

import data
import rewards
import hf_engine
from environments.calculator import Calculator
from environments.guess_number import Guess
from runs import forked, load_rows, refused, requests
from runtime.model_folder import SHIPPED
from tasks import generate_problems, more_problems
from tiny import pretrain


@pytest.mark.parametrize("text", [
    "", "Solve 2(x+3)=10", "  two  spaces .\n\ttab\r\n", "é ß 漢字 👩‍👩‍👧 \u0000 \u200f",
    "".join(map(chr, range(0x250)))])
def test_round_trip(text):
    tokenizer = pretrain.make_tokenizer()
    ids = tokenizer(text).input_ids
    assert len(ids) == len(text.encode()) and tokenizer.decode(ids) == text


def test_every_byte_has_its_own_token():
    """Bytes that are no UTF-8 cannot be typed, but can be sampled; decoding them must not fail."""
    tokenizer = pretrain.make_tokenizer()
    assert len(tokenizer) == 256 + len(pretrain.SPECIAL)
    assert len({tokenizer.convert_ids_to_tokens(i) for i in range(len(tokenizer))}) == len(tokenizer)
    assert isinstance(tokenizer.decode(range(256)), str)


def test_chat_template():
    tokenizer = pretrain.make_tokenizer()
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"},
                {"role": "assistant", "content": "A"}]
    render = lambda messages, **kwargs: tokenizer.apply_chat_template(messages, tokenize=False, **kwargs)
    assert render(messages) == "<|system|>S<|end|><|user|>Q<|end|><|assistant|>A<|end|>"
    assert render(messages[1:2], add_generation_prompt=True) == "<|user|>Q<|end|><|assistant|>"
    ids = tokenizer.apply_chat_template(messages[1:2], add_generation_prompt=True, return_dict=False)
    assert len(ids) == len("Q") + 3 and ids[2] == tokenizer.eos_token_id != tokenizer.pad_token_id
    ended = tokenizer("7").input_ids + [tokenizer.eos_token_id]
    assert tokenizer.decode(ended, skip_special_tokens=True) == "7"


@pytest.mark.parametrize("name", ["tiny", "tiny_compose", "tiny_episodes"])
def test_a_shipped_model_loads(name):
    base = SHIPPED[name]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(base), AutoTokenizer.from_pretrained(base)
    assert model.dtype == torch.bfloat16 and model.config.tie_word_embeddings
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.config.vocab_size == len(tokenizer)
    assert tokenizer.chat_template == pretrain.CHAT_TEMPLATE
    assert tokenizer.get_vocab() == pretrain.make_tokenizer().get_vocab()
    assert os.path.getsize(os.path.join(base, "model.safetensors")) <= 2e6


def test_the_shipped_base_is_as_documented():
    """On held-out problems it is mostly quick and mostly wrong, but right where it shows its work."""
    base = SHIPPED["tiny"]
    tokenizer = AutoTokenizer.from_pretrained(base)
    rows = load_rows("algebra", "eval", 128)
    engine = hf_engine.HFEngine(base, torch.float32, 128, [tokenizer.eos_token_id], 0.4)
    prompts = [prompt.ids for prompt in data.encode_rows(tokenizer, list(enumerate(rows)))]
    samples = engine.generate(requests(prompts, 4, [8 * i for i in range(128)], 64, 1.0))
    texts = [tokenizer.decode(r.sampled_ids, skip_special_tokens=True) for r in samples]
    truths = [row["answer"] for row in rows for _ in range(4)]
    scores = rewards.accuracy(None, texts, truths)
    assert scores == rewards.exact_accuracy(None, texts, truths)
    worked = [score for score, text in zip(scores, texts) if "\n" in text]
    assert 0.2 < sum(scores) / len(scores) < 0.4
    assert 0.15 < len(worked) / len(texts) < 0.4 and sum(worked) / len(worked) > 0.85


def test_the_base_of_compose_knows_the_steps_and_no_plan():
    """Nearly each operation that it carries out is right, but seldom is it the one that the prompt wants."""
    base = SHIPPED["tiny_compose"]
    tokenizer = AutoTokenizer.from_pretrained(base)
    rows = load_rows("compose", "eval", 240)
    engine = hf_engine.HFEngine(base, torch.float32, 128, [tokenizer.eos_token_id], 0.4)
    prompts = [prompt.ids for prompt in data.encode_rows(tokenizer, list(enumerate(rows)))]
    samples = engine.generate(requests(prompts, 4, [8 * i for i in range(240)], 56, 1.0))
    texts = [tokenizer.decode(r.sampled_ids, skip_special_tokens=True) for r in samples]
    scores = rewards.exact_accuracy(None, texts, [row["answer"] for row in rows for _ in range(4)])
    assert 0.06 < sum(scores) / len(scores) < 0.13
    steps = right = 0
    for i, text in enumerate(texts):
        state = rows[i // 4]["prompt"][-1]["content"][:4]
        for line in text.split("\n")[:-1]:
            steps += 1
            name = line[:1]
            right += name in more_problems.OPERATIONS and more_problems.operate(name, state) == line[1:]
            state = line[1:] if len(line) == 5 else state
    assert right / steps > 0.9


def test_a_model_of_your_own(tmp_path):
    run = [tmp_path / "log", "-m", "tiny.pretrain", "--steps=3", "--batch_size=4",
           "--train_prompts=64", "--harder_prompts=64", "--layers=1", "--hidden_size=32",
           "--intermediate_size=32", f"--out={tmp_path}/mine"]
    forked(*run)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "mine")
    assert model.config.num_hidden_layers == 1 and model.dtype == torch.bfloat16
    assert "mine exists: remove it" in forked(*run, code=2)


@pytest.mark.parametrize("argument, message", [
    ("steps=0", "steps=0: must be above 0"),
    ("base=x", "base=x: choose algebra, episodes, compose"), ("out=tiny", "tiny exists: remove it")])
def test_settings_that_do_not_fit_are_refused(tmp_path, argument, message):
    refused([f"--{argument}"] + [f"--out={tmp_path}/mine"] * ("out" not in argument), message, tmp_path,
            script="tiny/pretrain.py")


def test_styles(monkeypatch):
    for name in ("steps", "train_prompts", "harder_prompts"):
        monkeypatch.setattr(pretrain, name, 400)
    rows = load_rows("algebra", "train", 400)
    harder = load_rows("algebra", "train", 400, difficulty=2)
    by_text = {row["prompt"][0]["content"]: row for row in rows + harder}
    early, late = [], []
    for number, (tools, messages) in enumerate(pretrain.problems(random.Random(0))):
        question, answer = (message["content"] for message in messages)
        (early if number < 340 * pretrain.batch_size else late).append((by_text[question], answer))
    assert len(early) + len(late) == 400 * pretrain.batch_size
    assert all(text == row["solution"] for row, text in early)
    quick = [(row, text) for row, text in late if text != row["solution"]]
    assert all(text.startswith("Answer: ") and "\n" not in text for _, text in quick)
    assert len(quick) / len(late) == pytest.approx(0.8, abs=0.05)
    right = sum(text == f"Answer: {row['answer']}" for row, text in quick) / len(quick)
    # The others may be right by chance.
    assert 0.1 - 0.03 <= right < 0.1 + 0.2


def test_of_a_conversation_only_what_the_assistant_says_is_learned():
    tokenizer, prompts, calls = pretrain.make_tokenizer(), set(), 0
    for episode in itertools.islice(pretrain.episodes(random.Random(0)), 256):
        row = pretrain.encoded(tokenizer, *episode)
        ids, labels = row["input_ids"], row["labels"]
        text = tokenizer.decode(ids)
        said = re.findall(r"<\|assistant\|>(.*?<\|end\|>)", text)
        assert all(label in (one, -100) for one, label in zip(ids, labels))
        assert tokenizer.decode([label for label in labels if label != -100]) == "".join(said)
        prompts.add(re.search(r"<\|user\|>(.*?)<\|end\|>", text)[1])
        calls += "<tool_call>" in text
    assert len(prompts) > 20 and calls and not any(map(generate_problems.held_out, prompts))


def test_transcripts_say_what_the_environments_say():
    rng, tokenizer, ended = random.Random(0), pretrain.make_tokenizer(), Counter()
    for _ in range(300):
        _, (prompt, *turns) = pretrain.game(rng)
        guesses, heard = [turn["content"] for turn in turns[::2]], [turn["content"] for turn in turns[1::2]]
        # The number is not in the transcript: it is any that agrees with all that was heard.
        agree = 0
        for number in range(1, 65):
            environment = Guess()
            environment.reset(number)
            results = [environment.step(guess) for guess in guesses]
            over = [done for _, _, done in results]
            if [said for said, *_ in results][:-1] == heard and not any(over[:-1]):
                agree += over[-1] or len(guesses) == 6
                ended[over[-1]] += 1
        assert agree and prompt["role"] == "user" and len(turns) % 2 == 1
    assert ended[True] > 50 and ended[False] > 50
    ask = lambda tools: tokenizer.apply_chat_template([{"role": "user", "content": "?"}], tools=tools)
    assert ask(pretrain.TOOLS) == ask([get_json_schema(Calculator().calculate)])
    _, (question, call, reply, _) = next(found for found in (pretrain.arithmetic(rng) for _ in range(100))
                                         if len(found[1]) == 4)
    arguments = call["tool_calls"][0]["function"]["arguments"]
    assert reply["content"] == Calculator().calculate(**arguments)


def test_no_held_out_problem_is_read():
    texts = lambda *args: {row["prompt"][0]["content"] for row in load_rows("algebra", *args)}
    for difficulty, count in ((1, pretrain.train_prompts), (2, pretrain.harder_prompts)):
        read, held_out = texts("train", count, pretrain.seed, difficulty), texts("eval", 512, 0, difficulty)
        assert len(read) == count and not read & held_out
