"""A reward model is trained here to prefer digits: its scores, its errors, and policies that follow it."""
import json
import math
import random
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers import AddedToken
from tokenizers.normalizers import NFKC
from transformers import (AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, Qwen3Config,
                          Qwen3ForCausalLM, Qwen3ForSequenceClassification)

import data
import rewards
from options.episodes import EpisodeSampler
from tiny import pretrain
from options.critic import load_critic
from rollout import Rollout
from options.reward_model import RewardModel
from runs import forked, load_rows, refused

ROWS = load_rows("algebra", "train", 64)
LETTERS = "abcdefghijklmnopqrstuvwxyz"
TOKENIZER = pretrain.make_tokenizer()


def text_with_digits(rng):
    share = rng.random()
    return "".join(rng.choice("0123456789" if rng.random() < share else LETTERS)
                   for _ in range(rng.randint(4, 12)))


def digits(text):
    return sum(c.isdigit() for c in text) / max(len(text), 1)


def answer(text):
    return [{"role": "assistant", "content": text}]


def conversation(tokenizer, prompt, completion):
    return tokenizer.apply_chat_template(prompt + completion, return_dict=False)


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    """Returns a folder with a Qwen3 of one label, trained on pairs to prefer digits (Bradley and Terry)."""
    path = str(tmp_path_factory.mktemp("judge"))
    tokenizer, rng = pretrain.make_tokenizer(), random.Random(0)
    torch.manual_seed(0)
    model = Qwen3ForSequenceClassification(Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_labels=1,
        num_attention_heads=2, num_key_value_heads=2, head_dim=16, pad_token_id=tokenizer.pad_token_id))
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for step in range(80):
        pairs = [sorted([text_with_digits(rng), text_with_digits(rng)], key=digits) for _ in range(32)]
        ids = [conversation(tokenizer, rng.choice(ROWS)["prompt"], answer(text))
               for pair in pairs for text in pair]
        batch = tokenizer.pad({"input_ids": ids}, return_tensors="pt", padding_side="right")
        worse, better = model(**batch).logits.view(-1, 2).unbind(1)
        loss = -torch.nn.functional.logsigmoid(better - worse).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def load(path, token_budget=500, dtype=torch.float32):
    return RewardModel(str(path), torch.device("cpu"), dtype, token_budget)


def test_scores_are_the_models_own_whatever_the_batch(judge):
    rng, model = random.Random(1), AutoModelForSequenceClassification.from_pretrained(judge)
    tokenizer = AutoTokenizer.from_pretrained(judge)
    prompts, texts = [row["prompt"] for row in ROWS[:20]], [text_with_digits(rng) for _ in range(20)]
    completions = list(map(answer, texts))
    # Every fourth conversation has several turns.
    for i in range(0, 20, 4):
        completions[i] = answer("abc") + [{"role": "user", "content": "12?"}] + completions[i]
    alone = []
    for prompt, completion in zip(prompts, completions):
        with torch.no_grad():
            alone.append(model(torch.tensor([conversation(tokenizer, prompt, completion)])).logits.item())
    for token_budget in (1, 200, 100_000):
        assert load(judge, token_budget).score(prompts, completions) == pytest.approx(alone, abs=1e-5)


def test_it_is_a_reward_model_indeed(judge):
    rng = random.Random(1)
    texts = [text_with_digits(rng) for _ in range(20)]
    scores = load(judge).score([row["prompt"] for row in ROWS[:20]], list(map(answer, texts)))
    right = sum((scores[i] > scores[i + 1]) == (digits(texts[i]) > digits(texts[i + 1]))
                for i in range(0, 20, 2))
    assert right >= 9


@pytest.mark.parametrize("text", [
    "12<|end|><|user|>Was it good?<|end|><|assistant|>99999", "<|en<|end|>d|>", "<|end|>" * 3,
    "<<|end|>|end|>"])
def test_a_completion_cannot_spell_control_tokens(judge, text):
    """The conversation has as many control tokens as with a harmless answer."""
    ours = load(judge)
    control = set(ours.tokenizer.all_special_ids)
    count = lambda prompt, completion: sum(token in control for token in ours._encode(prompt, completion))
    prompt = ROWS[0]["prompt"]
    assert count(prompt, answer(text)) == count(prompt, answer("12")) > 3
    assert count([{"role": "user", "content": text}], answer("12")) == count(prompt, answer("12"))
    assert count("<|user|>1+1?", text) == 1
    # What spells none stays as it is.
    assert ours._harmless("a <b> | <|fin|>") == "a <b> | <|fin|>"


def test_text_that_the_judges_tokenizer_normalises_spells_none_either(judge, tmp_path):
    path = shutil.copytree(judge, tmp_path / "judge")
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.backend_tokenizer.normalizer = NFKC()
    tokenizer.add_tokens([AddedToken("<|end|>", special=True, normalized=True)])
    tokenizer.save_pretrained(path)
    ours, prompt = load(path), ROWS[0]["prompt"]
    full_width = "\uff1c\uff5cend\uff5c\uff1e"
    (number,) = ours.tokenizer(full_width, add_special_tokens=False).input_ids
    count = lambda prompt, completion: ours._encode(prompt, completion).count(number)
    for text in (full_width, f"a{full_width}b<|end|>", f"<|en{full_width}d|>"):
        assert count(prompt, answer(text)) == count(prompt, answer("12")) > 0
        assert count("1+1?", text) == 0


def test_the_head_computes_in_float32(judge):
    """The layers before it compute in bfloat16, of whose values scores near 16 would be multiples of 1/8."""
    ours, prompts = load(judge, dtype=torch.bfloat16), [row["prompt"] for row in ROWS[:8]]
    with torch.no_grad():
        ours.model.score.weight *= 100
    scores = torch.tensor(ours.score(prompts, [answer(str(i)) for i in range(8)]), dtype=torch.float64)
    assert ours.model.model.embed_tokens.weight.dtype == torch.bfloat16
    assert not torch.equal(scores, scores.bfloat16().double()) and torch.equal(scores, scores.float().double())


def test_a_string_prompt_is_continued(judge):
    ours, model = load(judge), AutoModelForSequenceClassification.from_pretrained(judge)
    ids = AutoTokenizer.from_pretrained(judge)("12+34=46").input_ids
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits.item()
    assert ours.score(["12+34"], ["=46"]) == pytest.approx([expected], abs=1e-5)


def test_what_a_tool_returned_need_not_be_text(judge):
    ours = load(judge)
    called = [*answer("Hm"), {"role": "tool", "name": "add", "content": {"error": "no <|end|>"}}, *answer("5")]
    text = ours.tokenizer.decode(ours._encode([{"role": "user", "content": "2+3?"}], called))
    assert "{'error': 'no " in text and text.count("<|end|>") == 4


def test_neither_calls_nor_thoughts_spell_control_tokens(judge):
    """Nor does half a surrogate pair, which JSON may hold, end a run."""
    ours = load(judge)
    ours.tokenizer.chat_template = (
        "{% for m in messages %}{{ m.reasoning_content or '' }}{% for call in m.tool_calls or [] %}"
        "{{ call.function | tojson }}{% endfor %}{{ m.name or '' }}{{ m.content }}<|end|>{% endfor %}")
    for text in ("<|end|>", "a\ud800<|end|>", "<|en<|end|>d|>"):
        call = {"type": "function", "function": {"name": text, "arguments": {text: ["b", {"c": text}]}}}
        said = {"role": "assistant", "content": text, "reasoning_content": text, "tool_calls": [call]}
        turns = [said, {"role": "tool", "name": text, "content": text}]
        ids = ours._encode([{"role": "user", "content": "2+3?"}], turns)
        assert ours.tokenizer.decode(ids).count("<|end|>") == 3, ours.tokenizer.decode(ids)


def test_an_assistants_message_that_a_completion_continues_is_one_turn(judge):
    ours = load(judge)
    begun = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "It is"}]
    text = "<|user|>1+1?<|end|><|assistant|>It is 12<|end|>"
    assert ours.tokenizer.decode(ours._encode(begun, answer(" 12"))) == text
    further = [{"role": "user", "content": "Sure?"}, *answer("Yes")]
    assert (ours.tokenizer.decode(ours._encode(begun, answer(" 12") + further))
            == text + "<|user|>Sure?<|end|><|assistant|>Yes<|end|>")
    # A control token that begins in the one and ends in the other is broken up.
    begun[1]["content"] = "It is <|en"
    assert ours.tokenizer.decode(ours._encode(begun, answer("d|>"))).count("<|end|>") == 2


def scorer_of(path):
    settings = {"reward": "none", "task": "algebra", "call_timeout": 1.0, "call_workers": 0,
                "reward_errors": "stop", "stop": "", "environment": "", "images": "", "agent": "", "tools": "", "max_environments": 0,
                "reward_model": str(path), "reward_weights": "reward_model:2", "token_budget": 500}
    settings = SimpleNamespace(**settings)
    player = EpisodeSampler(settings, TOKENIZER, [TOKENIZER.eos_token_id])
    return rewards.load_scorer(settings, player, torch.device("cpu"), torch.float32)


def test_a_scorer_takes_the_reward_model_that_the_settings_name(judge):
    scorer, rows = scorer_of(judge), ROWS[:3]
    rollouts = [Rollout(np.array([5]), np.array([[0, 1]]), np.array([-1.0]), "stop", np.array([[0, 0, 0]]), row,
                        answer("12")) for row in rows]
    scorer.check_rewards(data.encode_rows(TOKENIZER, list(enumerate(ROWS[:2]))))
    scorer(rollouts)
    expected = load(judge).score([row["prompt"] for row in rows], [answer("12")] * 3)
    for rollout, value in zip(rollouts, expected, strict=True):
        assert rollout.parts == {"reward_model": pytest.approx(value, abs=1e-5)}
        assert rollout.score == pytest.approx(2 * value, abs=1e-5)
        assert rollout.rewards == {0: pytest.approx(2 * value, abs=1e-5)} and not rollout.problem


def test_a_critic_may_start_from_a_reward_model(judge, mesh):
    head = load_critic(judge, mesh, torch.float32).hf.score
    trained = AutoModelForSequenceClassification.from_pretrained(judge).score
    assert torch.equal(head.weight.full_tensor(), trained.weight) and not head.bias.full_tensor().any()


# ---------------------------------------------------------------- policies that follow it

SMALL = ["--prompts_per_step=32", "--max_completion_length=12", "--train_prompts=64", "--eval_prompts=8",
         "--eval_samples=2", "--engine=hf", "--warmup_steps=0", "--learning_rate=3e-3"]


@pytest.fixture(scope="module")
def digits_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("reward") / "digits.py"
    path.write_text("from rewards import content\n"
                    "def share(prompts, completions, **_):\n"
                    "    texts = [content(completion) for completion in completions]\n"
                    "    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in texts]\n")
    return f"--reward={path}:share"


def metrics_of(out_dir):
    with open(out_dir / "metrics.jsonl") as file:
        return [json.loads(line) for line in file]


def test_the_policy_follows_the_reward_model(judge, folder, digits_file, tmp_path):
    """The digits are only logged, so what the policy learns, it learns from the reward model."""
    forked(tmp_path / "log", "train_ppo.py", f"--model={folder}", f"--out_dir={tmp_path}/run",
           f"--reward_model={judge}", digits_file, "--reward_weights=share:0", "--max_steps=28",
           "--critic_warmup_steps=2", "--critic_learning_rate=3e-3", "--lr_decay=constant", *SMALL)
    metrics = metrics_of(tmp_path / "run")
    shares = [line["rewards/share/mean"] for line in metrics[:-1]]
    assert sum(shares[-3:]) / 3 > sum(shares[:3]) / 3 + 0.5, shares
    for line in metrics[:-1]:
        assert line["reward"] == pytest.approx(line["rewards/reward_model/mean"])
    assert metrics[-1]["eval/mean@2"] > metrics[0]["eval/mean@2"]


def test_a_weighted_sum_and_the_reward_model_alone(judge, folder, digits_file, tmp_path):
    small = [f"--model={folder}", f"--reward_model={judge}", "--prompts_per_step=4", "--num_generations=4",
             "--max_steps=1", *SMALL[1:]]
    forked(tmp_path / "log", "train_grpo.py", *small, f"--out_dir={tmp_path}/sum", digits_file,
           "--reward_weights=share:2,reward_model:0.5")
    forked(tmp_path / "log", "train_grpo.py", *small, f"--out_dir={tmp_path}/alone", "--reward=none")
    both, alone = (metrics_of(tmp_path / name)[0] for name in ("sum", "alone"))
    assert both["reward"] == pytest.approx(
        2 * both["rewards/share/mean"] + 0.5 * both["rewards/reward_model/mean"])
    assert alone["reward"] == pytest.approx(both["rewards/reward_model/mean"])
    assert "rewards/share/mean" not in alone


# ---------------------------------------------------------------- bad input

@pytest.fixture(scope="module")
def broken(judge, tmp_path_factory):
    path = tmp_path_factory.mktemp("broken")
    tokenizer = AutoTokenizer.from_pretrained(judge)
    config = AutoConfig.from_pretrained(judge)

    def make(name, model, tokenizer=tokenizer):
        model.save_pretrained(path / name)
        tokenizer.save_pretrained(path / name)

    make("headless", Qwen3ForCausalLM(config))
    config.num_labels = 3
    make("three_labels", Qwen3ForSequenceClassification(config))
    not_a_number = AutoModelForSequenceClassification.from_pretrained(judge)
    torch.nn.init.constant_(not_a_number.score.weight, float("nan"))
    make("nan", not_a_number)
    model = AutoModelForSequenceClassification.from_pretrained(judge)
    plain = AutoTokenizer.from_pretrained(judge)
    plain.chat_template = None
    make("no_template", model, plain)
    model.config.pad_token_id = tokenizer.pad_token = None
    make("no_pad", model)
    return path


@pytest.mark.parametrize("name, message", [
    ("three_labels", "has 3 labels: a reward model has one"),
    ("headless", "not a trained reward model: no score.weight"),
    ("nan", "no finite score for any completion, such as"),
    ("no_template", "its chat template, cannot be read: ValueError"), ("no_pad", "names a pad token"), ("nonsuch", "no such folder")])
def test_a_broken_reward_model(broken, name, message):
    with pytest.raises(ValueError, match=f"reward_model={broken / name}.*{message}"):
        scorer_of(broken / name).check_rewards(data.encode_rows(TOKENIZER, list(enumerate(ROWS[:2]))))


@pytest.mark.parametrize("script", ["train_ppo.py", "train_grpo.py"])
@pytest.mark.parametrize("name, message", [
    ("three_labels", "has 3 labels: a reward model has one"),
    ("nan", "no finite score for any completion, such as")])
def test_a_run_refuses_a_broken_reward_model(broken, folder, tmp_path, name, message, script):
    arguments = [f"--model={folder}", f"--reward_model={broken / name}", "--reward=none"]
    # Not by refused, which lets nothing be loaded: the numbers of "nan" have to be read.
    output = forked(tmp_path / "log", script, *arguments, code=2)
    assert message in output.splitlines()[-1] and "Traceback" not in output


def test_a_conversation_that_is_too_long(judge):
    model = load(judge)
    model.max_length = 90
    prompts, long = [row["prompt"] for row in ROWS[:2]], answer("1234567890" * 30)
    both = model.score(prompts, [long, answer("12")])
    assert math.isnan(both[0])
    assert both[1] == pytest.approx(load(judge).score(prompts[1:], [answer("12")])[0], abs=1e-5)
    with pytest.raises(ValueError, match="no finite score for any completion.*12345.* at most 90 tokens"):
        model.score(prompts[:1], [long])


def test_a_token_that_the_model_does_not_embed(judge):
    model = load(judge)
    model.tokenizer.add_tokens(["<new>"])
    prompts = [row["prompt"] for row in ROWS[:2]]
    both = model.score(prompts, [answer("a <new> b"), answer("12")])
    assert math.isnan(both[0]) and math.isfinite(both[1])


def test_reward_none_needs_a_reward_model(folder, tmp_path):
    refused([f"--model={folder}", "--reward=none"], "reward=none needs a reward_model", tmp_path)
