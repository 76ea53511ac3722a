"""train_sft.py: what it learns and from which tokens, its gradient, its checkpoints, and what it refuses."""
import json
import os
import re
import shutil
import signal
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from tokenizers.normalizers import NFC
from transformers import AutoModelForCausalLM

import config.shared
import data
from bench import worked
from options.episodes import EpisodeSampler
from tasks.examples import draw, load_examples
from runs import begin, forked, lines, refused, train, with_defaults, without_times
from runtime.model_folder import load_tokenizer
from tasks.reasoning_gym import full_marks
from tiny import pretrain

SMALL = {"prompts_per_step": 4, "train_prompts": 64, "eval_prompts": 8, "eval_samples": 2, "max_steps": 2,
         "save_interval": 1, "warmup_steps": 0, "learning_rate": 1e-3, "engine": "hf"}
# The template of the tiny models. Like Qwen3's, the other one drops the thoughts of turns that others follow, and the
# last line end is not a part of the turn.
DROPS = ("{% for m in messages %}<|{{ m.role }}|>{% if loop.last or m.role != 'assistant' %}{{ m.content }}{% else %}"
         "{{ m.content.split('</think>')[-1].lstrip() }}{% endif %}<|end|>\n{% endfor %}"
         "{% if add_generation_prompt %}<|assistant|>{% endif %}")


def said(role, content):
    return {"role": role, "content": content}


TALK = [said("system", "Add."), said("user", "2+2"), said("assistant", "<think>two</think> 4"), said("user", "1+1"),
        said("assistant", "<think>one</think> 2"), said("user", "?"), said("assistant", "nothing")]
# Each row has an answer, because data.py refuses a file in which only some have one.
ROWS = [{"messages": TALK, "answer": "no"},
        # The assistant's turn in the prompt is not learned.
        {"prompt": TALK[1:4], "completion": [said("assistant", "two"), said("user", "sure?"), said("assistant", "yes")],
         "answer": "no"},
        {"prompt": [said("user", "5+5")], "completion": "ten", "answer": "no"},
        {"prompt": [said("user", "6+6")], "answer": 12},
        {"prompt": [said("user", "9+9")], "solution": "18", "answer": "no"},
        {"conversations": [{"from": "human", "value": "5+5"}, {"from": "gpt", "value": "eleven"}], "answer": "no"},
        {"prompt": "7+7=", "solution": "14", "answer": "no"},
        # As when it is sampled, the completion continues the assistant's message.
        {"prompt": [said("user", "8+8"), said("assistant", "six")], "completion": "teen", "answer": "no"},
        {"prompt": [said("user", "long")], "completion": "x" * 128, "answer": "no"}]


def text_before(messages, drops):
    """What the model reads before the assistant's turn that follows these messages."""
    text = ""
    for message in messages:
        content = message["content"]
        if drops and message["role"] == "assistant":
            content = content.split("</think>")[-1].strip()
        text += f"<|{message['role']}|>{content}<|end|>" + "\n" * drops
    return text + "<|assistant|>"


def turns(drops):
    """What is learned of ROWS: pairs of texts, what the model reads and what the assistant then says."""
    second = [*TALK[1:4], *ROWS[1]["completion"]]
    pairs = [(TALK[:2], TALK[2]), (TALK[:4], TALK[4]), (TALK[:6], TALK[6]), (second[:3], second[3]),
             (second[:5], second[5]), (ROWS[2]["prompt"], said("", "ten")), (ROWS[3]["prompt"], said("", "12")),
             (ROWS[4]["prompt"], said("", "18")),
             (ROWS[2]["prompt"], said("", "eleven"))]
    texts = [(text_before(messages, drops), turn["content"] + "<|end|>") for messages, turn in pairs]
    return [*texts, ("7+7=", "14<|end|>"), ("<|user|>8+8<|end|>" + "\n" * drops + "<|assistant|>six", "teen<|end|>")]


def slow_gradient(folder, drops):
    """The loss and its gradient in float64, a row at a time, by transformers alone."""
    tokenizer = pretrain.make_tokenizer()
    model = AutoModelForCausalLM.from_pretrained(folder).double()
    total = 0.0
    count = 0
    for before, turn in turns(drops):
        before, turn = (tokenizer(text, add_special_tokens=False).input_ids for text in (before, turn))
        logits = model(torch.tensor([before + turn])).logits[0].log_softmax(-1)
        for place, token in enumerate(turn, len(before)):
            total = total - logits[place - 1, token]
            count += 1
    loss = total / count
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


def sft(folder, out_dir, *arguments, **how):
    return train("train_sft.py", out_dir, [f"--model={folder}", *arguments], SMALL, **how)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    path = tmp_path_factory.mktemp("rows")
    (path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (path / "drops.jinja").write_text(DROPS)
    return path


@pytest.mark.parametrize("drops, ranks, more", [
    (False, 1, []), (True, 1, ["--token_budget=128"]), (True, 2, ["--token_budget=128"]),
    (False, 2, ["--sequence_parallel_size=2"])])
def test_loss_and_gradient_are_those_of_a_loop_over_turns(folder, rows, tmp_path, drops, ranks, more):
    template = [f"--chat_template={rows}/drops.jinja"] if drops else []
    metrics, output = sft(folder, tmp_path / "run", *template, *more, "--task=file", f"--train_file={rows}/rows.jsonl",
                          f"--eval_file={rows}/rows.jsonl", "--eval_prompts=0", "--train_prompts=0", "--reward=none",
                          "--prompts_per_step=8", "--max_steps=1", "--grad_clip=0", ranks=ranks)
    loss, gradient = slow_gradient(folder, drops)
    # The held-out rows are the same.
    assert metrics[0]["token_loss"] == pytest.approx(loss, rel=1e-5)
    assert metrics[0]["eval/token_loss"] == pytest.approx(loss, rel=1e-5)
    assert "learns 8 of 9 rows" in output and "engine none" in output
    # After one step Adam's first moment is a tenth of the gradient.
    files = sorted((tmp_path / "run/checkpoint-1/trainer").glob("optimizer-*"))
    parts = [load_file(file) for file in files]
    assert len(files) == ranks
    for name, expected in gradient.items():
        found = torch.cat([part[f"hf.{name}.exp_avg"] for part in parts if f"hf.{name}.exp_avg" in part]) * 10
        assert (found - expected).norm() <= 1e-5 * expected.norm(), name


def test_a_run_that_is_killed_or_stopped_goes_on_with_the_same_figures(folder, tmp_path):
    command = ["train_sft.py", f"--model={folder}", *with_defaults(["--max_steps=24", "--eval_interval=10"], SMALL)]
    forked(tmp_path / "log", *command, f"--out_dir={tmp_path}/whole")
    again = [*command, f"--out_dir={tmp_path}/run", "--resume=auto"]
    # The first kill may fall into a save. After the other signal the run saves, and says so.
    for number, steps in ((signal.SIGKILL, 4), (signal.SIGTERM, 14)):
        [process] = begin(tmp_path / "log", *again)
        while len(lines(tmp_path / "run")) < steps and process.is_alive():
            process.join(0.01)
        os.kill(process.pid, number)
        process.join()
        # It does not wait for the next evaluation.
        assert len(lines(tmp_path / "run")) < 20
    assert "stopped by a signal after" in (tmp_path / "log").read_text()
    forked(tmp_path / "log", *again)
    whole = without_times(lines(tmp_path / "whole"))
    assert without_times(lines(tmp_path / "run")) == whole and [line["step"] for line in whole] == [*range(25)]
    assert whole[-1]["eval/token_loss"] < whole[0]["eval/token_loss"] - 0.1


def test_the_checkpoint_with_the_lowest_loss_stays(folder, tmp_path):
    """Where nothing is sampled. At this rate the model soon gets worse."""
    metrics, _ = sft(folder, tmp_path / "run", "--reward=none", "--keep_checkpoints=1", "--save_interval=1",
                     "--eval_interval=1", "--max_steps=6", "--learning_rate=1", "--warmup_steps=0",
                     "--lr_decay=constant")
    losses = [line["eval/token_loss"] for line in metrics]
    best = min(range(1, 7), key=losses.__getitem__)
    assert best < 6 and {path.name for path in (tmp_path / "run").glob("checkpoint-*")} == {
        f"checkpoint-{best}", "checkpoint-6"}


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    """A run of the default task, with the shipped model."""
    out_dir = tmp_path_factory.mktemp("sft") / "run"
    return out_dir, *sft("tiny", out_dir, "--max_steps=20", "--prompts_per_step=32", "--train_prompts=512",
                         "--learning_rate=1e-4", "--save_interval=0")


def test_the_tiny_model_learns_to_show_its_work_and_grpo_goes_on(warm, tmp_path):
    out_dir, metrics, output = warm
    assert metrics[0]["eval/mean@2"] < 0.5 < 0.7 < metrics[-1]["eval/mean@2"]
    assert metrics[-1]["eval/mean_length"] > metrics[0]["eval/mean_length"] + 5
    assert "step   0  loss 0." in output and output.endswith("report.html: curves, samples and health\n")
    after, _ = train("train_grpo.py", tmp_path / "grpo", [f"--model={out_dir}/checkpoint-20"],
                     SMALL | {"num_generations": 2, "max_steps": 1})
    for key in ("eval/mean@2", "eval/mean_length", "eval/fractions/mean@2"):
        assert after[0][key] == metrics[-1][key]


def test_adapters_are_trained_sampled_and_resumed(folder, tmp_path):
    # What is sampled is not trained, so top_p needs no top_k.
    settings = ["--lora_rank=2", "--learning_rate=1e-2", "--eval_interval=1", "--top_p=0.9"]
    whole, _ = sft(folder, tmp_path / "run", *settings)
    assert whole[2]["eval/token_loss"] < whole[0]["eval/token_loss"]
    assert whole[2]["eval/mean_length"] != whole[0]["eval/mean_length"]
    shutil.rmtree(tmp_path / "run/checkpoint-2")
    resumed, _ = sft(folder, tmp_path / "run", *settings, "--resume=auto")
    assert without_times(resumed) == without_times(whole)


GOOD = {"prompt": [said("user", "1+1")], "completion": "2"}
THOUGHTFUL = {"messages": [said("user", "1+1"), said("assistant", "<think>one</think>2")]}
PLAIN = DROPS.replace("loop.last or m.role != 'assistant'", "true")
CALLS = {"messages": [said("user", "1+1"), {"role": "assistant", "tool_calls": [{"function": {"name": "add"}}]},
                      said("tool", "2"), said("assistant", "two")]}
THINKS = {"messages": [said("user", "1+1"), said("assistant", "two") | {"thinking": "why"}]}
CASES = {
    # A mere answer takes the place of no completion.
    **{f"a completion {what}": (
        {"prompt": "1+1=", "completion": completion, "answer": "2", "solution": "2"}, "", "rows.jsonl:2: there is nothing to learn")
       for what, completion in {"of null": None, "without text": " ", "without messages": [],
                                "of the user": [said("user", "2?")], "as text": json.dumps([said("user", "2?")])}.items()},
    "messages that are not JSON": ({"prompt": str(TALK[1:3])}, "", "rows.jsonl:2: Expecting property name"),
    "older calls are left out": ({"messages": [said("user", "1+1"), {"role": "assistant", "content": None, "function_call": {
        "name": "add", "arguments": "{}"}}]}, PLAIN, "rows.jsonl:2: the chat template does not say .* it should write .*'add'"),
    "reasoning is left out": ({"messages": [said("user", "1+1"), said("assistant", "two") | {"reasoning": "why"}]}, PLAIN,
                              "rows.jsonl:2: the chat template does not say .* it should write .*'why'"),
    "no answer": ({"prompt": "1+1="}, "", "rows.jsonl:2: there is nothing to learn: no messages end"),
    "a question last": ({"messages": [said("user", "1+1")]}, "", "rows.jsonl:2: there is nothing to learn"),
    # As in HuggingFaceH4/ultrachat_200k, whose prompt is the first message.
    "another prompt": ({"prompt": "2+2", "messages": TALK[1:]}, "", "rows.jsonl:2: the prompt '2\\+2' is not what"),
    "a shorter prompt": ({"prompt": TALK[1:2], "messages": TALK[1:]}, "", "rows.jsonl:2: the prompt .* is not what"),
    "a bad completion": ({"prompt": "1+1=", "completion": [{"role": "assistant"}]}, "",
                         "rows.jsonl:2: a message needs a role"),
    # As the templates of DeepSeek-R1's distilled models.
    "a thought is dropped": (THOUGHTFUL, DROPS.replace("loop.last or ", ""),
                             "rows.jsonl:2: the chat template does not say which tokens are the assistant's"),
    # Others write neither a call nor a thought that is a field of its own, or know it by another name.
    "a call is left out": (CALLS, PLAIN, "rows.jsonl:2: the chat template leaves out .*'add'"),
    "a last call is left out": ({"messages": CALLS["messages"][:2]}, PLAIN,
                                "rows.jsonl:2: the chat template does not say .* it should write .*'add'"),
    "a thought is left out": (THINKS, PLAIN, "rows.jsonl:2: the chat template does not say .* it should write .*'why'"),
    "a thought by another name": (THINKS, PLAIN + "{% if enable_thinking %}{{ messages[0].reasoning_content }}{% endif %}",
                                  "rows.jsonl:2: the chat template does not say"),
    "no end": (GOOD, DROPS.replace("<|end|>", ""), "rows.jsonl:1: the chat template does not say"),
    "another beginning": (GOOD, "{{ messages | length }}" + DROPS, "rows.jsonl:1: the chat template does not say")}


def load(folder, path, rows, template="", **more):
    """What load_examples makes of a file of these rows."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = SimpleNamespace(**{key: value for key, value in vars(config.shared).items() if key[0] != "_"})
    for key, value in {"task": "file", "train_file": str(path), "eval_file": str(path), "seed": 0,
                       "max_prompt_length": 64, "max_completion_length": 64, **more}.items():
        setattr(settings, key, value)
    tokenizer = load_tokenizer(folder, settings=settings)
    tokenizer.chat_template = template or tokenizer.chat_template
    return load_examples(EpisodeSampler(settings, tokenizer, [tokenizer.eos_token_id]), "train")


@pytest.mark.parametrize("case", CASES)
def test_rows_and_templates_that_cannot_be_learned_are_refused(folder, tmp_path, case):
    row, template, message = CASES[case]
    with pytest.raises(ValueError, match=message):
        load(folder, tmp_path / "rows.jsonl", [GOOD | {"answer": "2"} if "answer" in row else GOOD, row], template)


def test_a_text_that_the_tokenizer_normalises_is_learned(folder, tmp_path, monkeypatch):
    tokenizer = pretrain.make_tokenizer()
    tokenizer.backend_tokenizer.normalizer = NFC()
    monkeypatch.setitem(globals(), "load_tokenizer", lambda *_, **__: tokenizer)
    _, _, [[r]] = load(folder, tmp_path / "rows.jsonl", [GOOD | {"completion": "cafe\u0301"}], "")
    assert tokenizer.decode(r.sampled_ids) == "caf\xe9<|end|>"


@pytest.mark.parametrize("row, settings, expected", [
    *(({"messages": [*TALK[:4], TALK[4] | {mark: value}, *TALK[5:]]}, {}, ["<think>two</think> 4", "nothing"])
      for mark, value in (("weight", 0), ("weight", 0.0), ("train", False), ("loss", 0), ("trainable", False),
                          ("training", False), ("loss_mask", 0))),
    ({"messages": [*TALK[:4], TALK[4] | {"weight": 1, "train": True}, TALK[3], TALK[4] | {"loss": None}]}, {},
     ["<think>two</think> 4", *["<think>one</think> 2"] * 2]),
    ({"messages": [TALK[1], TALK[2] | {"weight": 0}]}, {}, None),
    ({"messages": [TALK[1], TALK[2] | {"weight": 0}]}, {"chat": False}, None),
    # Texts of messages, in each column
    *(({column: json.dumps(TALK[1:5])}, {}, ["<think>two</think> 4", "<think>one</think> 2"])
      for column in ("messages", "conversations")),
    ({"prompt": json.dumps([TALK[1]]), "completion": json.dumps([said("assistant", "4")])}, {}, ["4"]),
    # Columns that settings name
    ({"conversation": TALK[1:3], "answer": "4"}, {"prompt_column": "conversation"}, ["<think>two</think> 4"]),
    ({"conversation": json.dumps(TALK[1:3]), "messages": TALK[3:5]}, {"prompt_column": "conversation"}, ["<think>two</think> 4"]),
    ({"question": "2+2", "chosen": [said("assistant", "4")], "answer": "5"},
     {"prompt_column": "question", "answer_column": "chosen"}, ["4"]),
    ({"prompt": TALK[1:2], "chosen": TALK[1:3]}, {"answer_column": "chosen"}, ["<think>two</think> 4"]),
    ({"prompt": [TALK[1], said("assistant", "fo")], "completion": "ur"}, {"prompt_column": "prompt"}, ["ur"]),
    ({"prompt": [TALK[1], said("assistant", "fo")], "solution": "ur"}, {"prompt_column": "prompt"}, ["ur"])])
def test_what_is_learned_of_a_row(folder, tmp_path, row, settings, expected):
    if expected is None:
        with pytest.raises(ValueError, match="each of 1 train rows"):
            load(folder, tmp_path / "rows.jsonl", [row], **settings)
        return
    _, _, [turns] = load(folder, tmp_path / "rows.jsonl", [row], max_prompt_length=99, **settings)
    tokenizer = pretrain.make_tokenizer()
    assert [tokenizer.decode(r.sampled_ids) for r in turns] == [f"{text}<|end|>" for text in expected]
    assert tokenizer.decode(turns[0].ids).count("2+2") == 1


@pytest.mark.parametrize("settings", [{}, {"answer_column": "text"}, {"chat": False}])
def test_a_text_alone_is_learned_once(folder, tmp_path, settings):
    _, _, [[r]] = load(folder, tmp_path / "rows.jsonl", [{"text": "2+2 is 4."}], prompt_column="text", **settings)
    tokenizer = pretrain.make_tokenizer()
    assert tokenizer.decode(r.ids) == "2+2 is 4.<|end|>" and len(r.sampled_ids) == len(r.ids) - 1
    _, _, [[r]] = load(folder, tmp_path / "more.jsonl", [{"text": "2+2?", "answer": "4"}], prompt_column="text")
    assert tokenizer.decode(r.sampled_ids) == "4<|end|>"
    with pytest.raises(ValueError, match="there is nothing to learn"):
        load(folder, tmp_path / "others.jsonl", [{"question": "2+2?"}], prompt_column="question")


def test_older_calls_and_thoughts_by_another_name(folder, tmp_path):
    call = {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": '{"a": 1}'}}
    talk = [said("user", "1+1"), call, {"role": "function", "name": "add", "content": "2"},
            said("assistant", "two") | {"reasoning": "why"}]
    template = DROPS.replace("{% if loop.last", "{{ m.reasoning_content }}{% if m.tool_calls %}{{ m.tool_calls[0].function }}{% endif %}{% if loop.last")
    _, _, [turns] = load(folder, tmp_path / "rows.jsonl", [{"messages": talk}], template)
    tokenizer = pretrain.make_tokenizer()
    called, answered = [tokenizer.decode(r.sampled_ids) for r in turns]
    assert "'name': 'add', 'arguments': {'a': 1}" in called and answered == "whytwo<|end|>"
    assert "<|tool|>2" in tokenizer.decode(turns[1].ids)


def test_tools_of_a_row_are_read(folder, tmp_path):
    tools = [{"name": "add", "parameters": {}}]
    _, _, [turns] = load(folder, tmp_path / "rows.jsonl", [CALLS | {"tools": json.dumps(tools)}], max_prompt_length=999)
    tokenizer = pretrain.make_tokenizer()
    for r in turns:
        assert tokenizer.decode(r.ids).startswith("<|system|>Tools: add")
    assert len(turns) == 2


def test_rows_that_are_too_long_are_left_out(folder, tmp_path):
    long = GOOD | {"completion": "x" * 128}
    prompts, _, examples = load(folder, tmp_path / "rows.jsonl", [long, GOOD, long], "")
    assert len(prompts.rows) == 3 and [len(turns) for turns in examples] == [0, 1, 0]
    with pytest.raises(ValueError, match="each of 1 train rows has more tokens"):
        load(folder, tmp_path / "others.jsonl", [long], "")


def test_the_position_counts_rows_of_the_data():
    """So a longer max_completion_length changes none of the places at which rows are drawn."""
    fitting = [[f"{number} {turn}" for turn in range(number % 3)] for number in range(10)]
    whole = [["x"] for _ in fitting]
    position = 0
    drawn = []
    for _ in range(10):
        examples, position = draw(fitting, position, 3, seed=7)
        drawn += examples
    places = [data.epoch_order(10, place // 10, 7)[place % 10] for place in range(position)]
    assert drawn == sum([fitting[number] for number in places], []) and len(drawn) == 45
    # 6 of 10 rows have an example, so 30 of them end in the fifth epoch.
    assert 40 < position <= 50 and draw(whole, position, 3, 7) == (["x"] * 3, position + 3)


def test_rows_without_answers_are_evaluated_by_their_loss(folder, tmp_path):
    rows = [{"messages": [said("user", f"{i}+1"), said("assistant", "x" * (1 + 40 * (i % 2)))], "id": i} for i in range(40)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = ["--task=file", f"--train_file={path}", "--train_prompts=0", "--max_steps=4", "--eval_interval=1",
            "--max_prompt_length=16"]
    metrics, output = sft(folder, tmp_path / "run", *file, "--max_completion_length=32")
    assert "The rows have no answers to score by, so the evaluation is their held-out loss alone" in output
    assert "does not read the columns id; rewards" in output and "engine none" in output
    assert all("eval/token_loss" in line and "eval/mean@2" not in line for line in metrics)
    states = [json.loads((tmp_path / f"run/checkpoint-{step}/trainer/state.json").read_text()) for step in (3, 4)]
    assert all(state["position"] > 4 * state["step"] for state in states)       # the long rows are passed over
    # A resumed run goes on at this place, and takes the long rows as well. A checkpoint without a place is read, too.
    shutil.rmtree(tmp_path / "run/checkpoint-4")
    for position, expected in ((states[0]["position"], states[0]["position"] + 4), (0, 16)):
        state = tmp_path / "run/checkpoint-3/trainer/state.json"
        state.write_text(json.dumps(states[0] | {"position": position}))
        sft(folder, tmp_path / f"more{position}", *file, "--max_completion_length=64",
            f"--resume={tmp_path}/run/checkpoint-3")
        state = json.loads((tmp_path / f"more{position}/checkpoint-4/trainer/state.json").read_text())
        assert state["position"] == expected


def test_a_run_with_a_bad_row_ends_with_one_line(folder, tmp_path):
    rows = tmp_path / "rows.jsonl"
    file = [f"--model={folder}", "--task=file", f"--train_file={rows}", f"--eval_file={rows}"]
    rows.write_text("\n".join(map(json.dumps, [GOOD, {"prompt": "1+1="}])))
    refused([*file, "--reward=none"], "rows.jsonl:2: there is nothing to learn", tmp_path, script="train_sft.py")


@pytest.mark.parametrize("task", worked.TASKS)
def test_worked_answers_for_a_real_model_are_right(task):
    rows = worked.worked(task, "train", 90, 0)
    columns = {key: [row[key] for row in rows] for key in ("question", "answer", "metadata")}
    assert all(full_marks(prompts=[], completions=[row["completion"] for row in rows], **columns))
    assert not {row["question"] for row in rows} & {row["question"] for row in worked.worked(task, "eval", 0, 0)}
    for row in rows:
        text = row["completion"]
        for left, right in re.findall(r"(\d[\d +*/-]*) = (-?\d+(?: [+*] \d+)*)", text):
            assert eval(left) == eval(right), text
        if task == "chain_sum":
            # The last step has the answer, or else its digits stand in the two steps of a column.
            results = [int(result) for result in re.findall(r"= (-?\d+)(?=[,.])", text)]
            assert abs(int(row["answer"])) in (results[-1], 10 * results[-1] + results[0] % 10), text
        else:
            assert all(str(row["metadata"]["year"]).endswith(end) for end in re.findall(r"ends in (\d+)", text)), text


def test_worked_answers_come_in_three_styles():
    sums = sum("+" in row["metadata"]["expression"] for row in worked.worked("chain_sum", "train", 90, 0))
    assert sums < 45
    row = {"metadata": {"expression": "17 - 72"}}
    assert [worked.solve_sum(row, style) for style in (worked.parts, worked.tens, worked.column)] == [
        "17 < 72: 72 - 10 = 62, 62 - 7 = 55", "17 < 72: 70 - 10 = 60, 2 - 7 = -5, 60 - 5 = 55",
        "17 < 72: 12 - 7 = 5, 6 - 1 = 5"]
    assert [worked.style_of_sum(worked.solve_sum(row, style)) for style in worked.TASKS["chain_sum"][2]] == [
        "parts", "tens", "column"]
    row = {"metadata": {"year": 2033}}
    assert [worked.solve_year(row, style) for style in (worked.ends, worked.fours, worked.halves)] == [
        "3 is odd, so leap years end in 2 or 6, and 2033 ends in 3", "2033 ends in 33, and 33 = 4 * 8 + 1",
        "33 is odd"]
