"""Rows from everywhere, their prompts as tokens, and which of them a step uses; every error is provoked."""
import copy
import csv
import datetime
import gc
import gzip
import hashlib
import http.server
import importlib
import io
import json
import pickle
import re
import sys
import threading
import urllib.error
import urllib.parse
import urllib.request
import zlib
from types import SimpleNamespace

import pytest
import torch
from tokenizers import normalizers
from tokenizers.processors import TemplateProcessing

import data
from runs import ROOT, launch, load_rows
from options import files
from options.foreign_rows import as_message
from options.gsm8k import gsm8k_rows
import rewards
from runtime import checkpoint, run
from options import user_rewards
from tasks import more_problems
from tiny import pretrain


# ------------------------------------------------------------------------------------------ generated rows


def text_of(row):
    return row["prompt"][0]["content"]


@pytest.mark.parametrize("task", ["algebra", "compose", *{"countdown"} & more_problems.GENERATORS.keys()])
def test_generation(task):
    def texts(*args, **kwargs):
        return [text_of(row) for row in load_rows(task, *args, **kwargs)]
    assert texts("train", 200, seed=1) == texts("train", 200, seed=1)
    assert texts("train", 200, seed=1) != texts("train", 200, seed=2)
    assert load_rows(task, "train", 50, 7) == load_rows(task, "train", 200, 7)[:50]
    assert texts("eval", 0) == texts("eval", 128)
    # At difficulty 1 countdown has fewer problems than that.
    assert len(texts("train", 0)) == {"countdown": 2534}.get(task, 4096)
    train = {text for seed in range(4) for text in texts("train", 1000, seed=seed)}
    held_out = {text for seed in range(4) for text in texts("eval", 300, seed=seed)}
    assert len(train) > 1500 and len(held_out) > 300 and not train & held_out


def rows_of(split, count=0, train_file="", eval_file=""):
    """The rows of task file, with the default settings."""
    settings = SETTINGS | {"task": "file", "train_prompts": count, "eval_prompts": count,
                           "train_file": str(train_file), "eval_file": str(eval_file)}
    return [row for _, row in data.named_rows(SimpleNamespace(**settings), split)]


@pytest.mark.parametrize("args, message", [
    (("algebra", "eval", 10 ** 6), r"task algebra at difficulty 1 has only 9\d\d distinct eval problems, "
                                   "not 1000000: lower eval_prompts"),
    (("algebr", "train", 10),
     "gsm8k, reasoning_gym:... or file, not 'algebr'"),
])
def test_load_rows_errors(args, message):
    with pytest.raises(ValueError, match=message):
        load_rows(*args)


@pytest.mark.parametrize("difficulty, allowed", [("", True), ("1", True), ("100", True), ("0", False), ("101", False),
                                                 ("-1", False), ("01", False), ("x", False)])
def test_a_difficulty_is_a_whole_number_from_1_to_100(difficulty, allowed):
    settings = SimpleNamespace(**SETTINGS | {"task": f"algebra:{difficulty}", "train_prompts": 1})
    if allowed:
        assert len(data.named_rows(settings, "train")) == 1
    else:
        with pytest.raises(ValueError, match=f"task=algebra:{difficulty}: a difficulty is a whole number from 1 to 100"):
            data.named_rows(settings, "train")


@pytest.mark.parametrize("split, eval_file", [("train", ""), ("train", "eval.jsonl"), ("eval", "")])
def test_task_file_needs_a_file(split, eval_file):
    with pytest.raises(ValueError, match="^train_file or eval_file: no such file of .jsonl, .ndjson, .json, "):
        rows_of(split, eval_file=eval_file)


# --------------------------------------------------------------------------------------- gsm8k and files


def write(path, *rows):
    files.file_rows.cache_clear()
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


GSM8K = [{"question": "She sold 48, then half. How many?", "answer": "48/2 = 24\n48+24 = 72\n#### 72"},
         {"question": "How much?", "answer": "A lot.\n#### 1,234"}]


def test_gsm8k(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".cache/gsm8k").mkdir(parents=True, exist_ok=True)
    write(tmp_path / ".cache/gsm8k/train.jsonl", *GSM8K)
    load = lambda split, count=0: [row for _, row in data.named_rows(SimpleNamespace(**SETTINGS | {
        "task": "gsm8k", f"{split}_prompts": count}), split)]
    first, second = load("train")
    asked = GSM8K[0]["question"] + ' Let\'s think step by step and output the final answer after "####".'
    assert first == {"prompt": [{"role": "user", "content": asked}], "answer": "72", "source": "gsm8k",
                     "solution": GSM8K[0]["answer"]}
    assert second["answer"] == "1234" and load("train", 1) in ([first], [second])
    completion = [{"role": "assistant", "content": "#### 72"}]
    reward = user_rewards.Reward("accuracy", rewards.exact_accuracy)
    columns = {key: [row[key] for row in (first, second)] for key in first}
    columns |= {"prompts": columns.pop("prompt"), "completions": [completion] * 2, "trainer_state": [None] * 2}
    found = user_rewards.score_completions(reward, columns)
    assert [parts for parts, *_ in found] == [{"accuracy": 1.0}, {"accuracy": 0.0}]
    path = write(tmp_path / ".cache/gsm8k/train.jsonl", GSM8K[0], {"error": "not found"})
    with pytest.raises(ValueError, match=f"^{re.escape(path)}:2: no answer in answer; the columns are question"):
        load("train")


def test_gsm8k_is_fetched_once_or_says_what_to_do(tmp_path, monkeypatch):
    def offline(request):
        raise urllib.error.URLError("no network")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(torch.hub, "urlopen", offline)
    with pytest.raises(ValueError, match=r"gsm8k: https.*/test\.jsonl cannot be fetched to .*no network"):
        gsm8k_rows("eval")
    remote = tmp_path / "remote.jsonl"
    write(remote, *GSM8K)
    monkeypatch.setattr(torch.hub, "urlopen", lambda request: urllib.request.urlopen(remote.as_uri()))
    # What is not the published file, such as one that was cut off, is not kept.
    with pytest.raises(ValueError, match="invalid hash value"):
        gsm8k_rows("eval")
    fetch = torch.hub.download_url_to_file
    monkeypatch.setattr(torch.hub, "download_url_to_file",
                        lambda url, path, sha256, **more: fetch(url, path, hashlib.sha256(remote.read_bytes()).hexdigest(), **more))
    rows = [*gsm8k_rows("eval")]
    monkeypatch.setattr(torch.hub, "urlopen", offline)
    assert [*gsm8k_rows("eval")] == rows and len(rows) == 2
    assert [path.name for path in (tmp_path / ".cache/gsm8k").iterdir()] == ["test.jsonl"]


MESSAGES = [{"role": "system", "content": ""}, {"role": "user", "content": "1+1?"}]
VERL = {"data_source": "math", "prompt": MESSAGES, "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"index": 0}}


@pytest.mark.parametrize("row, answer, source", [
    ({"prompt": "1+1?", "answer": "2"}, "2", None),
    ({"prompt": MESSAGES, "answer": 2}, 2, None),
    ({"prompt": MESSAGES, "answer": [0.5, 7.0]}, [0.5, 7.0], None),
    ({"prompt": "1+1?", "answer": ["2", "two"]}, ["2", "two"], None),
    ({"prompt": "1+1?", "reward_model": {"ground_truth": [2.0, 4.0]}}, [2.0, 4.0], None),
    ({"prompt": "1+1?", "solution": r"\boxed{2}"}, r"\boxed{2}", None),
    ({"prompt": "1+1?", "ground_truth": "2", "solution": "1+1=2"}, "2", None),
    ({"prompt": "1+1?", "answer": "2", "ground_truth": "3", "solution": "4"}, "2", None),
    ({"prompt": "1+1?", "ground_truth": "3", "reward_model": {"ground_truth": "5"}}, "3", None),
    ({"prompt": "1+1?", "answer": None, "ground_truth": "3", "source": "mine"}, "3", "mine"),
    ({"prompt": "1+1?", "solution": "4", "reward_model": {"ground_truth": "5"}}, "5", None),
    ({"prompt": "1+1? \U0001f600", "solution": "4", "reference": "5"}, "4", None),
    ({"prompt": "1+1?", "reference": "5"}, "5", None),
    ({"prompt": "1+1?", "reward_model": "a model", "level": 3}, None, None),
    (VERL, "2", "math"),
])
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_file_rows(tmp_path, kind, row, answer, source):
    path = str(tmp_path / f"rows.{kind}")
    if kind == "jsonl":
        write(tmp_path / "rows.jsonl", row, "", row)
    else:
        pyarrow = pytest.importorskip("pyarrow")
        import pyarrow.parquet
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row, row]), path)
    rows = rows_of("train", 0, train_file=path, eval_file="any")
    assert len(rows) == 2 and rows[0] == rows[1]
    assert rows_of("train", 1, train_file=path, eval_file="any") == rows[:1]
    assert rows_of("eval", 0, train_file="any", eval_file=path) == rows
    assert rows[0].get("answer") == answer and rows[0].get("source") == source
    assert {key: value for key, value in rows[0].items() if key in row and key != "answer"} == \
           {key: value for key, value in row.items() if key != "answer"}


GOOD = {"prompt": "1+1?", "answer": "2"}
NOW = datetime.datetime(2026, 1, 2)
NEEDS = "a message needs a role, one of system, developer, user, assistant, tool"
CONTENT = "and a content, a string or a list of text blocks"


@pytest.mark.parametrize("row, message", [
    ("{not json", "Expecting property name"),
    ("[1, 2]", "not an object"),
    ('"text"', "not an object"),
    ({"question": "1+1?", "answer": "2"},
     "no column prompt; the columns are question, answer: --prompt_column=..."),
    ({}, "no column prompt; the columns are none"),
    ({"prompt": None}, "no column prompt"),
    ({"prompt": ""}, "empty prompt"),
    ({"prompt": " \n"}, "empty prompt"),
    ({"prompt": []}, "empty prompt"),
    ({"prompt": [{"role": "user", "content": " "}]}, "empty prompt"),
    ({"prompt": [{"content": "1+1?"}]}, NEEDS),
    ({"prompt": [{"role": "user"}]}, NEEDS),
    ({"prompt": [{"role": "user", "content": 5}]}, NEEDS),
    ({"prompt": ["1+1?"]}, f"{NEEDS}, {CONTENT}: 1+1?"),
    ({"prompt": [{"role": "critic", "content": "1+1?"}]}, f"{NEEDS}, {CONTENT}: {{'role': 'critic'"),
    ({"conversations": [{"from": "narrator", "value": "1+1?"}]}, f"{NEEDS}, {CONTENT}: {{'from': 'nar"),
    ({"prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "1+1?"}]}]},
     f"{NEEDS}, {CONTENT}: {{'role': 'user', 'content': [{{'type': 'image'"),
    ({"prompt": [{"role": "user", "content": ["1+1?"]}]}, f"{NEEDS}, {CONTENT}"),
    ({"prompt": [{"role": "user", "content": []}]}, f"{NEEDS}, {CONTENT}"),
    ({"prompt": [{"role": "user", "content": [{"type": "text", "text": " "}]}]}, "empty prompt"),
    ({"conversations": [{"from": "human", "value": "1?"}, {"from": "function_call", "value": "add(1)"}]},
     "a call must be a JSON object, not "),
    ({"prompt": [{"role": "user", "content": "1+1?"}], "system": {"text": "Add."}}, NEEDS),
    ({"prompt": "What is in <image>?", "images": ["a.png"]}, "images holds something, but a run reads text alone"),
    ({"prompt": "What is in it?", "image": {"path": "a.png"}}, "image holds something"),
    *(({"prompt": "What is in it?", "answer": "2", column: value}, f"{column} holds something, but a run reads text alone")
      for column in ("image_1", "picture", "speech") for media in ({"bytes": "x", "path": None}, {"bytes": None, "path": "a.wav"})
      for value in (media, [media], [media, media])),
    ({"prompt": "What is in it?", "videos": "a.mp4"}, "videos holds something"),
    *(({"prompt": "1+1?", "tools": tools}, "tools must be a list of functions with names, not ")
      for tools in ([5], [{"type": "web_search"}], [{"function": "add"}], [[]], "[null]", ["5"], "add", ["add"], 5,
                    [{"function": 5}], {"type": "function"})),
    ({"prompt": "1+1?", "chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs holds something"),
    ({"prompt": 5}, f"{NEEDS}, {CONTENT}: 5"),
    ({"prompt": {"role": "user"}}, f"{NEEDS}, {CONTENT}: {{'role'"),
    ({"prompt": "1+1?"}, "no answer in answer or ground_truth or"),
    (r'{"prompt": "1+1? \ud83d"}', "'utf-8' codec can't encode character '\\ud83d'"),
    (r'{"prompt": [{"role": "user", "content": "\udc00 1+1?"}], "answer": "2"}', "'utf-8' codec can't encode"),
    ({"prompt": "1+1?", "answer": ""}, "answer must be text or a finite number, not ''"),
    ({"prompt": "1+1?", "answer": " "}, "answer must be text or a finite number, not ' '"),
    ('{"prompt": "1+1?", "answer": NaN}', "answer must be text or a finite number, not nan"),
    ('{"prompt": "1+1?", "solution": 1e999}', "solution must be text or a finite number, not inf"),
    ({"prompt": "1+1?", "ground_truth": {"a": 2}}, "ground_truth must be text or a finite number, not {'a'"),
    ({"prompt": "1+1?", "answer": []}, "answer must be text or a finite number, not []"),
    ({"prompt": "1+1?", "answer": ["2", " "]}, "answer must be text or a finite number, not ['2', ' ']"),
    ({"prompt": "1+1?", "answer": [["2"]]}, "answer must be text or a finite number, not [['2']]"),
    ({"prompt": "1+1?", "answer": [False, True]}, "answer must be text or a finite number, not [False, True]; a list may "
                                                  "hold several right ones, but neither true nor false"),
    ({"prompt": "1+1?", "solution": ["yes", True]}, "solution must be text or a finite number, not ['yes', True]; a list"),
    ({"prompt": "1+1?", "answer": None, "solution": ""}, "solution must be text or a finite number, not ''"),
])
def test_file_errors_name_the_line(tmp_path, row, message):
    path = write(tmp_path / "rows.jsonl", GOOD, "", row, GOOD)
    with pytest.raises(ValueError, match=f"^{re.escape(path)}:3: {re.escape(message)}"):
        # The whole file is checked, though only the first row is asked for.
        rows_of("train", 1, train_file=path)


@pytest.mark.parametrize("name, content, message", [
    ("rows.jsonl", None, "no such file"), ("rows.parquet", None, "no such file"),
    ("rows.txt", b"prompt,answer\n", "no such file of .jsonl, .ndjson, .json, .csv, .tsv, .parquet or .arrow"),
    ("dataset_info.json", b'{"features": {}}', "no such file of .jsonl"), ("state.json", b"{}", "no such file of .jsonl"),
    ("rows.csv", b"prompt,answer\n", "no rows"), ("rows.csv", b"", "no rows"),
    ("rows.csv", b"prompt,answer\na,1\nb,2,3\n", "line 3 has more or fewer cells than the first line"),
    ("rows.tsv", b"prompt\tanswer\na\n", "line 2 has more or fewer cells than the first line"),
    ("rows.csv", b'prompt,answer\n"a,1\n', "Error('unexpected end of data')"),
    ("rows.csv", b"prompt,answer\n\xff,1\n", "'utf-8' codec can't decode"),
    ("rows.jsonl.gz", b"not gzip", "BadGzipFile"), ("rows.arrow", b"not arrow", "Expected to read"),
    ("rows.jsonl", b"", "no rows"), ("rows.jsonl", b"\n \n", "no rows"),
    ("rows.jsonl", b'{"prompt": "\xff"}', "1: 'utf-8' codec can't decode"),
    ("rows.json", b'[{"prompt": "a"}', "Expecting ',' delimiter"),
    ("rows.parquet", b"not parquet", "Parquet magic bytes not found"),
])
def test_file_errors(tmp_path, name, content, message):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))}: ?{re.escape(message)}"):
        rows_of("train", 0, train_file=str(path))


def test_the_first_row_without_an_answer_is_named(tmp_path):
    path = write(tmp_path / "rows.jsonl", GOOD, {"prompt": "1+1?"}, {"prompt": "1+2?"}, GOOD)
    with pytest.raises(ValueError, match=f"^{path}:2: no answer in "):
        files.file_rows(path)


def test_parquet_errors_name_the_row(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet
    path = str(tmp_path / "rows.parquet")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([GOOD, {"prompt": "1+1?", "answer": None}]), path)
    with pytest.raises(ValueError, match=f"^{re.escape(path)}: row 2: no answer"):
        rows_of("train", 0, train_file=path)


@pytest.mark.parametrize("row, message", [
    ({"prompt": "1+1?", "answer": b"2"}, "answer must be text or a finite number"),
    ({"prompt": "1+1?", "answer": "2", "at": NOW, "raw": b"2"}, None)])
def test_parquet_has_values_that_json_lacks(tmp_path, row, message):
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet
    path = str(tmp_path / "rows.parquet")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), path)
    if not message:
        assert rows_of("train", 0, train_file=path, eval_file="any") == [row]
        return
    with pytest.raises(ValueError, match=f"^{re.escape(path)}: row 1: .*{message}"):
        rows_of("train", 0, train_file=path, eval_file="any")


def read(path, **settings):
    """The prompts and answers of a file, with these settings."""
    files.file_rows.cache_clear()
    found = files.file_rows(str(path), **settings)
    return [(row["prompt"], row.get("answer")) for _, row in found]


def test_columns_that_settings_name(tmp_path):
    path = write(tmp_path / "gsm8k.jsonl", *GSM8K)
    first, second = read(path, prompt_column="question", answer_column="answer")
    assert first == ([{"role": "user", "content": GSM8K[0]["question"]}], GSM8K[0]["answer"])
    # The check of answers reads the number after ####.
    columns = {"prompts": [first[0]] * 2, "completions": ["The answer is 72", "70"],
               "answer": [first[1]] * 2, "trainer_state": [None] * 2}
    found = user_rewards.score_completions(user_rewards.Reward("accuracy", rewards.exact_accuracy), columns)
    assert [parts for parts, *_ in found] == [{"accuracy": 1.0}, {"accuracy": 0.0}]
    assert read(path, prompt_column="question", chat=False)[1][0] == GSM8K[1]["question"]
    path = write(tmp_path / "more.jsonl", {"prompt": "1+1?", "answer": "two", "value": 2.5})
    assert read(path, answer_column="value") == [("1+1?", 2.5)]
    assert read(path, prompt_column="prompt") == [([{"role": "user", "content": "1+1?"}], "two")]
    for settings, message in (
            ({"prompt_column": "nothing"}, "no column nothing; the columns are prompt, answer"),
            ({"answer_column": "result"}, "no answer in result; the columns are prompt, answer")):
        with pytest.raises(ValueError, match=f"^{re.escape(path)}:1: {message}"):
            read(path, **settings)


@pytest.mark.parametrize("prompt_format, prompts", [
    (r"{instruction}\n{input}", ["Add.\n1+1", "Name one.", "Name two."]),
    (r"{instruction}\n\nInput: {input}\n\n{n}", ["Add.\n\nInput: 1+1\n\n0", "Name one.\n\nInput: \n\n1", "Name two.\n\nInput: "]),
    (r"{input}\n\n{instruction}\n\n{input} \nEnd\n", ["1+1\n\nAdd.\n\n1+1 \nEnd\n", "Name one.\nEnd\n", "Name two.\nEnd\n"]),
    # Braces around anything else stay, as do those in a value.
    (r"\boxed{} {a} \frac{1}{2} {{n}} {in put}{options}",
     [r"\boxed{} {a} \frac{1}{2} {0} y", r"\boxed{} {a} \frac{1}{2} {1} " + "a\n{n}", r"\boxed{} {a} \frac{1}{2} {} "])])
def test_a_prompt_of_several_columns(tmp_path, prompt_format, prompts):
    path = write(tmp_path / "rows.jsonl", {"instruction": "Add.", "input": "1+1", "n": 0, "in put": "y"},
                 {"instruction": "Name one.", "input": "", "n": 1, "options": ["a", "{n}"]},
                 {"instruction": "Name two.", "input": None, "options": []})
    assert [prompt for prompt, _ in read(path, prompt_format=prompt_format, chat=False)] == prompts
    assert [prompt for prompt, _ in read(path, prompt_format=prompt_format)] == [
        [{"role": "user", "content": prompt}] for prompt in prompts]


def test_a_format_of_prompts_and_a_system_message(tmp_path):
    path = write(tmp_path / "rows.jsonl", {"system": "Add.", "prompt": "1+1", "context": ["x"], "answer": "2"})
    told = {"role": "system", "content": "Add."}
    assert read(path, prompt_format="{prompt}?") == [([told, ASKED], "2")]
    assert read(path, prompt_format="{system} {prompt}?") == [([{"role": "user", "content": "Add. 1+1?"}], "2")]
    # It takes the place of a column.
    assert read(path, prompt_format="{prompt}?", prompt_column="answer") == [([told, ASKED], "2")]
    with pytest.raises(ValueError, match=f"^{path}:1: empty prompt"):
        read(write(tmp_path / "rows.jsonl", {"input": "", "answer": "2"}), prompt_format="{input}")


# A resumed run may not change these, and the last two only where no position counts the rows that were drawn.
STAYS = """model critic_model reference_model task train_prompts train_file eval_file reward reward_model environment tools
    agent max_prompt_length chat prompt_format system_prompt chat_template chat_template_kwargs seed lora_rank lora_from
    images best_by prompts_per_step num_generations""".split()


@pytest.mark.parametrize("key", STAYS)
def test_a_resumed_run_needs_the_same(tmp_path, capsys, key):
    (tmp_path / "trainer").mkdir()
    state = {"step": 1, "settings": {"learning_rate": 1, key: "{a}"}, "evaluated": {}}
    (tmp_path / "trainer/state.json").write_text(json.dumps(state))

    def resume(value):
        settings = SimpleNamespace(**{"learning_rate": 2, "max_steps": 2, key: value})
        return run.read_state(str(tmp_path), state, settings, "x.py")

    assert resume("{a}")[0] == state
    with pytest.raises(SystemExit):
        resume("{b}")
    assert f"{key}={{b}}, but {tmp_path} comes from a run with {key}={{a}}" in capsys.readouterr().err


@pytest.mark.parametrize("settings, unread", [
    ({}, "system, context, id"), ({"prompt_column": "prompt"}, "context, id"),
    ({"prompt_format": "{context} {prompt}"}, "id"), ({"answer_column": "id", "prompt_format": "{context}{prompt}"}, ""),
    ({"task": "algebra", "train_file": "", "eval_file": ""}, "")])
def test_columns_that_no_model_reads_are_listed(load_prompts, tmp_path, settings, unread):
    path = write(tmp_path / "rows.jsonl", {"prompt": "1+1", "system": "Add.", "context": "x", "answer": "2", "id": 7,
                                           "images": [], "data_source": "sums", "tools": [], "reward_model": {"ground_truth": "2"}})
    files.file_rows.cache_clear()
    note = load_prompts(**{"task": "file", "train_file": path, "eval_file": path} | settings)[2]
    if unread:
        assert f"\nThe model does not read the columns {unread}; rewards may (--prompt_format" in note
    else:
        assert "does not read" not in note


ASKED = {"role": "user", "content": "1+1?"}
SAID = {"from": "human", "value": "1+1?"}


@pytest.mark.parametrize("row, prompt, answer", [
    ({"messages": [ASKED, {"role": "assistant", "content": "2"}]}, [ASKED], None),
    ({"messages": [ASKED, {"role": "assistant", "content": "2"}, ASKED], "answer": 2},
     [ASKED, {"role": "assistant", "content": "2"}, ASKED], 2),
    ({"conversations": [SAID, {"from": "gpt", "value": "2"}, SAID, {"from": "gpt", "value": "3"}]},
     [ASKED, {"role": "assistant", "content": "2"}, ASKED], None),
    ({"conversations": [{"from": "system", "value": "Add."}, SAID]},
     [{"role": "system", "content": "Add."}, ASKED], None),
    ({"prompt": [{"from": "user", "value": "1+1?"}], "ground_truth": "2"}, [ASKED], "2"),
    # A content in parts, where Arrow gives each part the fields of all
    ({"prompt": [{"role": "system", "content": [{"type": "text", "text": "Add.", "image": None}]},
                 {"role": "user", "content": [{"type": "text", "text": "1+"}, {"type": "text", "text": "1?"}]}]},
     [{"role": "system", "content": "Add."}, ASKED], None),
    ({"messages": [ASKED, {"role": "assistant", "content": [{"type": "text", "text": "2"}]}], "answer": "2"},
     [ASKED], "2"),
    # The assistant's beginning of an answer, which the policy continues
    ({"prompt": [ASKED, {"role": "assistant", "content": "It is "}]},
     [ASKED, {"role": "assistant", "content": "It is "}], None)])
def test_conversations(tmp_path, row, prompt, answer):
    # An array, with a byte order mark as well, and lines in a file that is called .json; a line is an object
    as_lines = json.dumps(row) + "\n" + json.dumps(row)
    for content in ("\ufeff" + json.dumps([row, row]), json.dumps([row, row], indent=1), as_lines):
        (tmp_path / "rows.json").write_text(content)
        assert read(tmp_path / "rows.json") == [(prompt, answer)] * 2
    assert read(write(tmp_path / "rows.jsonl", row, row)) == [(prompt, answer)] * 2
    (tmp_path / "rows.json").write_text(json.dumps([row, 5]))
    with pytest.raises(ValueError, match="rows.json: row 2: not an object"):
        read(tmp_path / "rows.json")


@pytest.mark.parametrize("name", ["gpt", "GPT", "chatgpt", "bing", "bard", "bot", "model", "Assistant", "assistant"])
def test_an_answer_does_not_stay_in_the_prompt_whatever_its_role_is_called(tmp_path, name):
    others = [("Human", "user"), ("System", "system"), ("Observation", "tool"), ("USER", "user")]
    for role, sender in (("role", "content"), ("from", "value")):
        talk = [{role: said, sender: f"{said}?"} for said, _ in others]
        row = {"messages": [*talk, {role: name, sender: "It is 2."}, talk[0], {role: name, sender: "2"}]}
        ((prompt, _),) = read(write(tmp_path / "rows.jsonl", row))
        assert prompt == [*({"role": expected, "content": f"{said}?"} for said, expected in others),
                          {"role": "assistant", "content": "It is 2."}, {"role": "user", "content": "Human?"}]


@pytest.mark.parametrize("column, talk", [
    ("prompt", [ASKED]), ("prompt", [{"name": "x", **ASKED}]), ("messages", [{"weight": 0, **ASKED}]),
    ("conversations", [{"id": 1, **SAID}])])
def test_a_list_of_messages_may_be_its_json_text(tmp_path, column, talk):
    assert (read(write(tmp_path / "a.jsonl", {column: json.dumps(talk), "answer": "2"}))
            == read(write(tmp_path / "b.jsonl", {column: talk, "answer": "2"})))


def test_a_json_text_that_is_no_list_of_messages_is_a_prompt(tmp_path):
    for text in ('[{"id": 1, "name": "x"}]', '[{"id": 1, "role": "user"}] How many?', "[{}]"):
        ((prompt, _),) = read(write(tmp_path / "a.jsonl", {"prompt": text, "answer": "2"}))
        assert prompt == text


def test_a_function_call_is_the_assistants(tmp_path):
    """As in LLaMA-Factory's files: at the end it is to be found, elsewhere it is a message with a call."""
    calls = [{"name": "add", "arguments": {"a": 1}}, {"name": "add", "arguments": '{"a": 2}'}]
    result = {"from": "observation", "value": "3"}
    for value, count in ((calls[0], 1), (calls, 2)):
        called = {"from": "function_call", "value": json.dumps(value)}
        expected = {"role": "assistant", "content": "", "tool_calls": [
            {"type": "function", "function": {"name": "add", "arguments": {"a": i + 1}}} for i in range(count)]}
        path = write(tmp_path / "rows.jsonl", {"conversations": [SAID, called]},
                     {"conversations": [SAID, called, result, {"from": "gpt", "value": "It is 3."}]})
        assert read(path) == [([ASKED], None), ([ASKED, expected, {"role": "tool", "content": "3"}], None)]


def test_a_column_system_is_the_first_message_where_there_is_none(tmp_path):
    told = {"role": "system", "content": "Add."}
    rows = [{"system": "Add.", "conversations": [SAID, {"from": "gpt", "value": "2"}]},
            {"system": "Subtract.", "messages": [told, ASKED]}, {"system": None, "prompt": [ASKED]},
            {"system": "", "prompt": [ASKED]}, {"system": "Add.", "prompt": "1+1?"},
            {"system": "Add.", "prompt": [ASKED, told]}]
    path = write(tmp_path / "rows.jsonl", *rows)
    assert [prompt for prompt, _ in read(path)] == [
        [told, ASKED], [told, ASKED], [ASKED], [ASKED], "1+1?", [told, ASKED, told]]
    assert [row["system"] for _, row in files.file_rows(path)] == [row["system"] for row in rows]


def test_a_row_without_a_prompt_has_an_empty_one_if_an_environment_may_give_it(tmp_path):
    path = write(tmp_path / "rows.jsonl", {"number": 1})
    with pytest.raises(ValueError, match=":1: no column prompt; the columns are number"):
        files.file_rows(path)
    ((_, row),) = files.file_rows(path, prompt_optional=True)
    assert row["prompt"] == [{"role": "user", "content": ""}]


def test_a_message_without_a_text_is_empty():
    assert as_message({"from": "gpt"}) == {"role": "assistant", "content": ""}


def test_columns_of_pictures_may_be_empty(tmp_path):
    for more in ({"picture": None}, {"picture": []}, {"file": {"path": "a.py"}}):
        path = write(tmp_path / "rows.jsonl", GOOD | {"images": [], "image": None, "videos": []} | more)
        assert read(path) == [("1+1?", "2")]
    path = str(tmp_path / "rows.parquet")
    as_parquet(tmp_path / "rows.parquet", [GOOD | {"scan": {"bytes": b"x", "path": "a.png"}}])
    with pytest.raises(ValueError, match=f"^{path}: row 1: scan holds something"):
        read(path)


ADD = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
SCHEMA = {"type": "function", "function": ADD}


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("tools, expected", [
    # Schemas, and functions alone as in xLAM's rows; lists, and texts of lists, of all and of each of them
    *((form(value), [SCHEMA]) for value in (SCHEMA, ADD, SCHEMA | {"strict": True})
      for form in (lambda x: [x], lambda x: json.dumps([x]), lambda x: [json.dumps(x)])),
    (None, []), ([], []), ("[]", []), ("", []), (" \n", []), ("null", [])])
def test_tools_of_a_row(tmp_path, kind, tools, expected):
    rows = [{"prompt": [ASKED], "tools": tools}]
    if isinstance(tools, list) and tools and isinstance(tools[0], dict):
        other = copy.deepcopy(tools)
        other[0].get("function", other[0])["parameters"]["properties"] = {"b": {"type": "string", "enum": ["x"]}}
        rows.append({"prompt": [ASKED], "tools": other})
    path = tmp_path / f"rows.{kind}"
    if kind == "parquet":
        as_parquet(path, rows)
    else:
        write(path, *rows)
    files.file_rows.cache_clear()
    found = [row for _, row in files.file_rows(str(path))]
    assert found[0]["tools"] == expected
    if found[1:]:
        assert found[1]["tools"][0]["function"]["parameters"]["properties"] == {"b": {"type": "string", "enum": ["x"]}}


def test_tools_of_a_row_go_through_the_template(load_prompts, tokenizer, tmp_path):
    rows = [{"prompt": [ASKED], "tools": [ADD]}, {"prompt": [ASKED], "tools": []}, {"prompt": "1+1?", "tools": "[]"}]
    settings = {"task": "file", "max_prompt_length": 200, "train_file": write(tmp_path / "rows.jsonl", *rows)}
    settings["eval_file"] = settings["train_file"]
    texts = [tokenizer.decode(prompt.ids) for prompt in load_prompts(**settings)[1]]
    render = lambda tools: tokenizer.apply_chat_template([ASKED], tools=tools, tokenize=False, add_generation_prompt=True)
    assert texts == [render([SCHEMA]), render(None), "1+1?"] and "add" in texts[0]
    deaf = copy.deepcopy(tokenizer)
    deaf.chat_template = QWEN3
    needs = "a row's tools need messages and a chat template with a place for them"
    alone = "an environment and tools need .* and rows without tools"
    for changed, model, message in (({}, deaf, needs), ({"chat": False}, tokenizer, needs),
                                    ({"environment": "game.py:Game"}, tokenizer, alone), ({"tools": "x.py:y"}, tokenizer, alone)):
        with pytest.raises(ValueError, match=f"^{settings['train_file']}:1: {message}"):
            data.load_prompts(model, SimpleNamespace(**SETTINGS | settings | changed))
    # The first of a kind is tried, with and without tools.
    path = write(tmp_path / "rows.jsonl", *rows[1:], {"prompt": "2+2?", "tools": [ADD]})
    with pytest.raises(ValueError, match=f"^{path}:3: {needs}"):
        load_prompts(**settings)


def test_a_number_reaches_a_reward_as_a_number_and_the_verifier_as_a_text(tmp_path):
    path = write(tmp_path / "rows.jsonl", GOOD | {"answer": 2}, GOOD | {"answer": [0.5, 2]}, GOOD)
    answers = [row["answer"] for _, row in files.file_rows(path)]
    assert answers == [2, [0.5, 2], "2"] and type(answers[0]) is int
    columns = {"prompts": ["1+1?"] * 3, "completions": ["The answer is 2"] * 3, "answer": answers,
               "trainer_state": [None] * 3}
    numeric = user_rewards.Reward("numeric", lambda completions, answer, **_: [float(truth == 2) for truth in answer])
    for reward, expected in ((user_rewards.Reward("accuracy", rewards.exact_accuracy), [1, 1, 1]), (numeric, [1, 0, 0])):
        assert [parts[reward.name] for parts, *_ in user_rewards.score_completions(reward, columns)] == expected
    assert rewards.accuracy(["?"], ["Answer: 0.1"], [0.1]) == [1.0]


def test_a_source_is_not_replaced(tmp_path):
    rows = [GOOD | {"source": "x", "data_source": "y"}, GOOD | {"source": None, "data_source": "y"}, GOOD,
            GOOD | {"data_source": "y", "dataset": "z"}, GOOD | {"dataset": "z"}, GOOD | {"dataset": ["ifeval", "code"]}]
    path = write(tmp_path / "rows.jsonl", *rows)
    assert [row["source"] for _, row in files.file_rows(path)] == ["x", "y", None, "y", "z", "ifeval, code"]


def test_messages_with_calls(tmp_path):
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    as_text = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
    result = {"role": "tool", "content": "3"}
    expected = [ASKED, {"role": "assistant", "content": "", "tool_calls": [call]}, result]
    for message in ({"role": "assistant", "tool_calls": [call]},
                    {"role": "assistant", "content": None, "tool_calls": [as_text]}):
        assert read(write(tmp_path / "rows.jsonl", {"prompt": [ASKED, message, result]})) == [(expected, None)]
    for nothing in ("", "  ", None, "null", {}, "{}"):
        bare = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": nothing}}]}
        (((_, message, _), _),) = read(write(tmp_path / "rows.jsonl", {"prompt": [ASKED, bare, result]}))
        assert message["tool_calls"] == [{"function": {"name": "add", "arguments": {}}}]
    for arguments in ("{", "[1]", [1], 5, "5", "a", [], "[]", 0, "0", False):
        path = write(tmp_path / "rows.jsonl", {"prompt": [ASKED | {"tool_calls": [
            {"function": {"name": "add", "arguments": arguments}}]}]})
        with pytest.raises(ValueError, match=f"^{re.escape(path)}:1: the arguments of a call must be a JSON object, not "):
            read(path)
    for calls in ("add", ["add"], [{"function": "add"}]):
        path = write(tmp_path / "rows.jsonl", {"prompt": [ASKED | {"tool_calls": calls}]})
        with pytest.raises(ValueError, match=f"^{re.escape(path)}:1: (tool_calls must be a list|a call must be a JSON object), not "):
            read(path)


def test_an_answer_may_be_a_number_that_no_float_holds(tmp_path):
    path = write(tmp_path / "rows.jsonl", {"prompt": "10^400?", "answer": 10 ** 400})
    assert read(path) == [("10^400?", 10 ** 400)]


def test_parquet_gives_the_prompts_and_numbers_that_were_written(tmp_path):
    """Arrow gives each message every field of all messages, and each object of arguments every key."""
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet
    calls = [{"role": "assistant", "content": "", "tool_calls": [
        {"function": {"name": "f", "arguments": {key: "x"}}}]} for key in "ab"]
    rows = [{"prompt": [ASKED, calls[0], {"role": "tool", "content": "1", "name": "f"}]},
            {"prompt": [ASKED, calls[1]]}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    assert read(tmp_path / "rows.parquet") == read(write(tmp_path / "rows.jsonl", *rows)) == [
        (row["prompt"], None) for row in rows]
    for kind in (pyarrow.float16(), pyarrow.float32(), pyarrow.float64()):
        listed, answer = pyarrow.list_(kind), {"ground_truth": 0.1, "float": [{"x": 0.7}, {"x": None}]}
        columns = {"prompt": (["a", "b", "c"], pyarrow.string()), "answer": ([0.1, 3.0, 1e-3], kind),
                   "list": ([[0.1, None], [], None], listed), "large": ([[0.3]] * 3, pyarrow.large_list(kind)),
                   "pair": ([[0.1, 0.2]] * 3, pyarrow.list_(kind, 2)), "lists": ([[[0.6]]] * 3, pyarrow.list_(listed)),
                   "reward_model": ([answer, {"ground_truth": None, "float": None}, None],
                                    pyarrow.struct([("ground_truth", kind), ("float", pyarrow.list_(pyarrow.struct([("x", kind)])))])),
                   "map": ([[("a", 1.0)]] * 3, pyarrow.map_(pyarrow.string(), kind)), "float": (["x"] * 3, pyarrow.string())}
        table = pyarrow.table({name: pyarrow.array(*column) for name, column in columns.items()})
        pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
        files.file_rows.cache_clear()
        rows = [row for _, row in files.file_rows(str(tmp_path / "rows.parquet"))]
        assert {name: [row[name] for row in rows] for name in columns} == {name: values for name, (values, _) in columns.items()}


FORMS = [{"prompt": "a\nb, \u00e4", "answer": "007"}, {"prompt": '"c"\tx', "answer": "1e5", "hint": "NaN"}]


def written(path, rows):
    """Writes rows to a file of the form that its name says."""
    name = path.name.lower()
    if ".csv" in name or ".tsv" in name:
        buffer = io.StringIO(newline="")
        writer = csv.DictWriter(buffer, ["prompt", "answer", "hint"], delimiter="\t" if ".tsv" in name else ",")
        writer.writeheader()
        writer.writerows(rows)
        content = ("\ufeff" + buffer.getvalue()).encode()
    elif name.endswith(".parquet"):
        return as_parquet(path, [{"hint": None} | row for row in rows])
    elif name.endswith(".arrow"):
        pyarrow = pytest.importorskip("pyarrow")
        table = pyarrow.Table.from_pylist(rows, pyarrow.schema([(key, pyarrow.string()) for key in ("prompt", "answer", "hint")]))
        with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=1)
        return None
    else:
        content = (json.dumps(rows) if ".json" in name and ".jsonl" not in name else "\n".join(map(json.dumps, rows))).encode()
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)


@pytest.mark.parametrize("name", [
    "rows.jsonl", "rows.JSONL", "rows.jsonl.gz", "ROWS.Jsonl.GZ", "rows.ndjson", "rows.ndjson.gz", "rows.json", "rows.json.gz",
    "rows.Parquet", "rows.csv", "rows.CSV", "rows.tsv", "rows.csv.gz", "rows.arrow"])
def test_forms_of_files(tmp_path, name):
    written(tmp_path / name, FORMS)
    (tmp_path / "README.txt").write_text("no rows")
    for setting in (tmp_path / name, tmp_path, f"{tmp_path}/*", f"x={tmp_path}"):
        files.file_rows.cache_clear()
        rows = [row for _, row in files.file_rows(str(setting))]
        assert [{key: row[key] for key in ("prompt", "answer", "hint") if row.get(key)} for row in rows] == FORMS


def test_a_saved_data_set(tmp_path):
    """As datasets.Dataset.save_to_disk leaves it, and DatasetDict, whose splits are folders."""
    for split in ("train", "test"):
        folder = tmp_path / split
        folder.mkdir()
        (folder / "dataset_info.json").write_text(json.dumps({"features": {}}, indent=2))
        (folder / "state.json").write_text(json.dumps({"_split": split}, indent=2))
        for number, row in enumerate(FORMS):
            written(folder / f"data-0000{number}-of-00002.arrow", [row])
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert read(tmp_path / "train") == [(row["prompt"], row["answer"]) for row in FORMS]
    with pytest.raises(ValueError, match=f"^{tmp_path}: no such file of .jsonl"):
        read(tmp_path)
    with pytest.raises(ValueError, match="files of different splits"):
        read(f"{tmp_path}/*/*")


def test_a_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "rows.jsonl", GOOD)
    assert read("~/rows.jsonl") == [("1+1?", "2")]


def test_only_the_answer_that_is_taken_is_looked_at(tmp_path):
    path = write(tmp_path / "rows.jsonl", GOOD | {"solution": "", "ground_truth": {"a": 1}})
    assert rows_of("train", 0, train_file=path, eval_file="any")[0]["answer"] == "2"


def test_a_ground_truth_that_only_a_reward_understands_is_left_to_it(tmp_path):
    row = {"prompt": "1+1?", "reward_model": {"ground_truth": {"target": 2}}}
    path = write(tmp_path / "rows.jsonl", row)
    assert rows_of("train", 0, train_file=path, eval_file="any") == [row]


def test_a_checksum_knows_every_value_of_every_row():
    rows = [{"prompt": "1+1?", "answer": "2", "extra": [1, {"a": None}]}, {"prompt": "2+2?", "answer": "4"}]
    others = [rows[::-1], rows[:1], [rows[0] | {"answer": "3"}, rows[1]],
              [rows[0] | {"extra": [1, {"a": 0}]}, rows[1]]]
    assert len({checkpoint.checksum_of_rows(rows), *map(checkpoint.checksum_of_rows, others)}) == 5
    assert checkpoint.checksum_of_rows(copy.deepcopy(rows)) == checkpoint.checksum_of_rows(rows)


def sides(path):
    """Returns the prompts of a file's training rows and of those that are held out."""
    return [[row["prompt"] for row in rows_of(split, 0, train_file=path)]
            for split in ("train", "eval")]


def test_prompts_of_a_template_are_not_held_out_in_clumps(tmp_path):
    for template in ("What is {}{} + 1?", "{}x = {}", "{} and {}", "Is {}{} prime?"):
        texts = [template.format(i, j) for i in range(10) for j in range(10)]
        _, held_out = sides(write(tmp_path / "rows.jsonl", *({"prompt": text} for text in texts)))
        assert 4 <= len(held_out) <= 24


def test_a_share_of_a_file_is_held_out_by_its_prompts(tmp_path):
    """The hash is SHA-256, so the same rows are held out on every machine, in every order and in every file."""
    texts = [f"{i}+{i}=?" for i in range(800)]
    train, held_out = sides(write(tmp_path / "rows.jsonl", *({"prompt": text} for text in texts)))
    assert held_out == [text for text in texts if int(hashlib.sha256(text.encode()).hexdigest()[:2], 16) % 8 == 0]
    assert sorted(train + held_out) == sorted(texts) and 70 < len(held_out) < 130
    twice = [{"prompt": text, "answer": answer} for answer in "23" for text in reversed(texts[:100])]
    train, held_out = sides(write(tmp_path / "twice.jsonl", *twice))
    assert len(train + held_out) == 200 and not set(train) & set(held_out)
    # All messages count, not only the last one, and a string counts as the one message with its text.
    last = {"role": "user", "content": "Solve it."}
    messages = [[{"role": "system", "content": text}, last] for text in texts]
    train, held_out = sides(write(tmp_path / "messages.jsonl", *({"prompt": m} for m in messages)))
    assert 70 < len(held_out) < 130
    users = [[{"role": "user", "content": text}] for text in texts]
    train, held_out = sides(write(tmp_path / "users.jsonl", *({"prompt": user} for user in users)))
    assert [user[0]["content"] for user in held_out] == [t for t in texts if files.held_out(t)]


def test_a_file_that_holds_both_sides_is_read_once(tmp_path, monkeypatch):
    path = write(tmp_path / "rows.jsonl", *({"prompt": f"{i}?"} for i in range(100)))
    reads, read_rows = [], files.read_rows
    monkeypatch.setattr(files, "read_rows", lambda path: reads.append(path) or read_rows(path))
    assert len(sides(path)[0]) > 50 and reads == [path]


def test_nothing_is_held_out_of_a_file_where_there_is_another_for_it(tmp_path):
    train_file = write(tmp_path / "train.jsonl", *({"prompt": f"{i}?"} for i in range(40)))
    eval_file = write(tmp_path / "eval.jsonl", *({"prompt": f"{i}?"} for i in range(30, 60)))
    load = lambda split: rows_of(split, 0, train_file=train_file, eval_file=eval_file)
    assert load("train") == [{"prompt": f"{i}?"} for i in range(40)]
    assert load("eval") == [{"prompt": f"{i}?"} for i in range(30, 60)]


@pytest.mark.parametrize("key", [
    lambda i: i // 400, lambda i: i % 2, lambda i: min(2, i // 100)])           # blocks, in turns, of unequal size
def test_a_limit_takes_rows_of_all_sources_from_the_whole_file(tmp_path, key):
    rows = [{"prompt": f"{i}?", "source": "abc"[key(i)], "number": i} for i in range(1200)]
    path = write(tmp_path / "rows.jsonl", *rows)
    taken = rows_of("eval", 120, eval_file=path)
    assert taken == rows_of("train", 120, train_file=path, eval_file="any") == [
        row for row in rows if row in taken] and len(taken) == 120
    for source in "abc":
        share = [row["source"] for row in rows].count(source) / 10
        assert abs([row["source"] for row in taken].count(source) - share) <= 1
    # Every fifth of the file has a fifth of them, about.
    assert all(8 < sum(row["number"] // 240 == fifth for row in taken) < 40 for fifth in range(5))
    assert rows_of("eval", 0, eval_file=path) == rows_of("eval", 5000, eval_file=path) == rows
    held_out = rows_of("eval", 30, train_file=path)
    assert {row["source"] for row in held_out} == {row["source"] for row in rows}


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet"])
def test_rows_are_bytes_until_they_are_read(tmp_path, kind):
    rows = [{"prompt": [{"role": "user", "content": f"{i}?"}], "answer": str(i), "extra_info": {"index": i},
             **({"rest": "x" * 400} if i else {})} for i in range(2000)]
    path = tmp_path / f"rows.{kind}"
    if kind == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        import pyarrow.parquet
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, pyarrow.Table.from_pylist(rows[1:]).schema), path)
    else:
        path.write_text(json.dumps(rows) if kind == "json" else "\n".join(map(json.dumps, rows)))
    files.file_rows.cache_clear()
    gc.collect()
    before = len(gc.get_objects())
    found = files.file_rows(str(path))
    gc.collect()
    assert len(gc.get_objects()) - before < 500
    # A row that lacks a column has it as None, and each reading makes a row anew.
    assert [row for _, row in found] == [{"rest": None} | row for row in rows]
    found[3][1]["prompt"].clear()
    assert found[3][1]["prompt"] == rows[3]["prompt"]


def as_parquet(path, rows):
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet
    path.parent.mkdir(exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


@pytest.fixture
def mixture(tmp_path, monkeypatch):
    """A folder with files of several kinds and shards, beside which the working directory is."""
    monkeypatch.chdir(tmp_path)
    shards = {"data/train-00000-of-00003.parquet": "a", "data/train-00002-of-00003.parquet": "c",
              "data/train-00001-of-00003-9f3b2c.parquet": "b", "data/test-00000-of-00001.parquet": "t"}
    for name, letter in shards.items():
        as_parquet(tmp_path / name, [{"prompt": f"{letter}{i}?", "answer": i} for i in range(2)])
    write(tmp_path / "data/words.jsonl", {"prompt": "w0?", "answer": "two"})
    (tmp_path / "data/README.md").write_text("no rows")
    (tmp_path / "data/.hidden.jsonl").write_text("no rows")
    (tmp_path / "a=b").mkdir()
    write(tmp_path / "a=b/rows.jsonl", {"prompt": "e0?", "answer": "0"})
    (tmp_path / "more/deep").mkdir(parents=True)
    (tmp_path / "more/deep/train.json").write_text(json.dumps([{"prompt": "m0?", "answer": "3", "data_source": "own"}]))
    return tmp_path


@pytest.mark.parametrize("setting, expected", [
    ("data/train-*.parquet", "a0 a1 b0 b1 c0 c1"),
    ("data/*train*,data/words.jsonl,data/test-00000-of-00001.parquet", "a0 a1 b0 b1 c0 c1 w0 t0 t1"),
    ("a=b", "e0"),
    ("**/*.json*", "e0 w0 m0:own"),
    ("all=data/train-*.parquet, test-1=data/test-00000-of-00001.parquet,data/words.jsonl",
     "a0:all a1:all b0:all b1:all c0:all c1:all t0:test-1 t1:test-1 w0"),
    # The name is also the source of rows that have another one.
    ("x={folder}/more/deep/train.json,y=~/data/words.jsonl", "m0:x w0:y"),
    ("a=b/rows.jsonl,./a=b/rows.jsonl,{folder}/a=b/rows.jsonl,z=a=b/rows.jsonl", "e0 e0 e0 e0:z")])
def test_several_files(mixture, monkeypatch, setting, expected):
    """Parquet and JSONL, with the source of rows that the setting names."""
    monkeypatch.setenv("HOME", str(mixture))
    setting = setting.format(folder=mixture)
    files.file_rows.cache_clear()
    rows = [row for _, row in files.file_rows(setting)]
    assert " ".join(row["prompt"][:-1] + f":{row.get('source')}" * bool(row.get("source")) for row in rows) == expected
    assert rows_of("eval", 0, eval_file=setting) == rows


@pytest.mark.parametrize("names", [
    "train.jsonl test.jsonl", "train-00000-of-00001.jsonl validation-00000-of-00001.jsonl", "Train.json TEST.json",
    "a/train/x.jsonl a/dev/x.jsonl", "gsm8k_train.jsonl gsm8k_eval.jsonl rows.jsonl", "valid.jsonl test2.jsonl",
    # These are of one split, or of none that the names say.
    "!train-1.jsonl train-2.jsonl words.jsonl", "!test/a.jsonl test/b.jsonl", "!latest.jsonl training.jsonl trains.jsonl"])
def test_files_of_different_splits_in_one_folder_are_refused(tmp_path, monkeypatch, names):
    # The folder itself may have such a name.
    folder = tmp_path / "train" / "test_rows"
    for name in names.strip("!").split():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(GOOD) + "\n")
    monkeypatch.chdir(tmp_path)
    for setting in ["train/test_rows", f"x={folder}"] * ("/" not in names) + ["train/*/**/*.json*", f"{folder}/**/*.json*"]:
        files.file_rows.cache_clear()
        if names.startswith("!"):
            assert len(files.file_rows(setting)) == len(names.split())
            continue
        with pytest.raises(ValueError, match=f"^{re.escape(setting)}: files of different splits, .*{names.split()[1]}"):
            files.file_rows(setting)
    # Those that are named one by one are all read.
    files.file_rows.cache_clear()
    assert len(files.file_rows(",".join(f"{folder}/{name}" for name in names.strip("!").split()))) == len(names.split())


def test_the_same_prompt_in_two_files_is_on_one_side(tmp_path):
    texts = [f"{i}?" for i in range(100)]
    for name, answer in (("a", "1"), ("b", "2")):
        write(tmp_path / f"{name}.jsonl", *({"prompt": text, "answer": answer} for text in texts))
    train, held_out = sides(f"{tmp_path}/a.jsonl,{tmp_path}/b.jsonl")
    assert len(train + held_out) == 200 and not set(train) & set(held_out)
    assert sorted(held_out) == sorted(2 * [text for text in texts if files.held_out(text)])


@pytest.mark.parametrize("setting, name", [
    ("data/words.jsonl,data/none.jsonl", "data/none.jsonl"), ("data/none-*.parquet", "data/none-*.parquet"),
    ("data/words.jsonl,more", "more"), ("data/README.md", "data/README.md"), ("one, two.jsonl", "one"),
    ("hf://OWNER/NAME/data.jsonl", "hf://OWNER/NAME/data.jsonl"),
    ("words=data/words.jsonl,none=data/none.jsonl", "data/none.jsonl"), ("a=c/rows.jsonl", "c/rows.jsonl"),
    ("words=", "")])
def test_what_is_no_file_is_named_among_several(mixture, setting, name):
    write(mixture / "one, two.jsonl", GOOD)
    with pytest.raises(ValueError, match=f"^{re.escape(name)}: no such file of .jsonl, .* or .arrow, nor a "
                                         "folder or a pattern of such files, which commas separate; "
                                         "SOURCE=PATH names the source of its rows"):
        files.file_rows(setting)
    with pytest.raises(ValueError, match="^a=a=b,b=a=b,a=more: the source a is named twice; a folder or a pattern"):
        files.file_rows("a=a=b,b=a=b,a=more")
    # Commas that separate nothing are left out.
    assert [*files.files_of("data/words.jsonl,")] == [*files.files_of("data/words.jsonl")]
    # A pattern, or its folder, takes a file with a comma in its name.
    assert rows_of("eval", 0, eval_file="one? two.jsonl")[0]["answer"] == "2"


def test_a_path_with_an_equals_sign_is_itself(tmp_path, monkeypatch):
    """Also as a pattern, and beside a file that the text behind the sign names."""
    monkeypatch.chdir(tmp_path)
    for folder in ("year=2024", "year=2025", "held_out", "2024"):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / "part.jsonl", GOOD)
    parts = [(f"year={year}/part.jsonl", None) for year in (2024, 2025)]
    assert [*files.files_of("year=*/part.jsonl")] == [*files.files_of(",".join(name for name, _ in parts))] == parts
    assert [*files.files_of("year=held_out/part.jsonl,n=year=2024")] == [
        ("held_out/part.jsonl", "year"), ("year=2024/part.jsonl", "n")]


def test_a_file_whose_name_reads_like_a_pattern_is_itself(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "rows[1].jsonl", {"prompt": "a?"})
    write(tmp_path / "rows1.jsonl", {"prompt": "b?"})
    (tmp_path / "[x]").mkdir()
    write(tmp_path / "[x]/rows.jsonl", {"prompt": "c?"})
    assert read("rows[1].jsonl, [x]") == [("a?", None), ("c?", None)]


def test_rows_whose_prompts_are_all_equal_may_be_held_out_as_well(tmp_path):
    """As of an environment that makes each game anew."""
    for text in "abcdefgh":
        path = write(tmp_path / "rows.jsonl", *({"prompt": [{"role": "user", "content": text}], "game": i}
                                                for i in range(20)))
        split = "train" if files.held_out(text) else "eval"
        with pytest.raises(ValueError, match=f"none of 20 is for {split}; --eval_file=... names held-out rows, "
                                             "which may be those of the same file"):
            rows_of(split, 0, train_file=path)
        for split in ("train", "eval"):
            assert [row["game"] for row in rows_of(split, 0, path, path)] == [*range(20)]


def test_a_prompt_from_several_columns(tmp_path):
    """By the lines of the page: an index into the choices becomes the letter, which the verifier accepts."""
    with open(f"{ROOT}/docs/measured/data_and_rewards.md") as file:
        (block,) = re.findall(r"^```python\n(# choices\.py.*?)^```$", file.read(), re.M | re.S)
    (tmp_path / "choices.py").write_text(block)
    asked = [{"question": "2+2?", "choices": ["3", "4", "5", "22"], "answer": 1, "subject": "sums"},
             {"question": "Who?", "choices": [f"{i} people" for i in range(10)], "answer": 9, "subject": "people"}]
    as_parquet(tmp_path / "mmlu.parquet", asked)
    printed = launch(tmp_path / "choices.py", tmp_path / "mmlu.parquet")
    (tmp_path / "mmlu.jsonl").write_text(printed)
    rows = rows_of("eval", 0, eval_file=tmp_path / "mmlu.jsonl")
    assert [(row["answer"], row["source"]) for row in rows] == [("B", "sums"), ("J", "people")]
    assert rows[0]["prompt"] == [{"role": "user", "content": (
        "2+2?\nA. 3\nB. 4\nC. 5\nD. 22\nAnswer with the letter of the right choice.")}]
    completions = {"B": 1, "The answer is B.": 1, r"\boxed{B}": 1, "Answer: B. 4": 1, "(B)": 1, "C": 0, "Answer: D. 22": 0}
    columns = {"prompts": ["?"] * 7, "completions": [*completions], "answer": ["B"] * 7, "trainer_state": [None] * 7}
    scored = user_rewards.score_completions(user_rewards.Reward("accuracy", rewards.exact_accuracy), columns)
    assert [parts["accuracy"] for parts, *_ in scored] == [*completions.values()]


HUB_ROWS = "".join(json.dumps({"prompt": f"{i}?", "answer": i}) + "\n" for i in range(3)).encode()
HUB_FILES = {"data/train-00000-of-00001.jsonl": HUB_ROWS, "README.md": b"# Rows"}


class HubAnswers(http.server.BaseHTTPRequestHandler):
    """Answers as the hub does for a data set owner/rows."""

    def do_GET(self):
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        self.server.paths.append(path)
        head, _, file = path.partition("/resolve/main/")
        body, headers = b"", {"X-Repo-Commit": "0" * 40, "ETag": f'"{zlib.crc32(file.encode())}"'}
        status = 200
        if head == "/datasets/owner/rows" and file in HUB_FILES:
            body = HUB_FILES[file]
        elif path == "/api/datasets/owner/rows/tree/main":
            body = json.dumps([{"type": "file", "path": name, "size": len(content), "oid": "0" * 40}
                               for name, content in HUB_FILES.items()]).encode()
        elif path.endswith("/main/"):
            status = 400                                        # an empty name of a file is asked for nowhere
        else:
            status = 404
            headers["X-Error-Code"] = "EntryNotFound" if "owner/rows" in path else "RepoNotFound"
        self.send_response(status)
        for key, value in {"Content-Length": len(body), **headers}.items():
            self.send_header(key, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, *arguments):
        pass


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A server that stands for the hub. Its `paths` are those that it was asked for."""
    from huggingface_hub import constants
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), HubAnswers)
    server.paths = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    importlib.reload(constants)                                 # these are read once, when the package is loaded
    files.file_rows.cache_clear()
    yield server
    server.shutdown()
    monkeypatch.undo()
    importlib.reload(constants)


def test_rows_from_the_hub(hub, tmp_path, monkeypatch):
    name = "hf://datasets/owner/rows/data/train-00000-of-00001.jsonl"
    rows = files.file_rows(name)
    assert [row for _, row in rows] == [{"prompt": f"{i}?", "answer": i} for i in range(3)]
    assert rows[2][0] == f"{name}:3" and len([*tmp_path.glob("hub/**/train-*.jsonl")]) == 1
    # It may stand among others, and have a name.
    other = write(tmp_path / "own.jsonl", GOOD)
    assert [row["source"] for _, row in files.file_rows(f"{other},hub={name}")] == [None] + ["hub"] * 3
    for missing in ("", "/data", "/data/test.parquet"):
        with pytest.raises(ValueError, match=f"^hf://datasets/owner/rows{missing}: no such file; there are "
                                             "data/train-00000-of-00001.jsonl, README.md$"):
            files.file_rows(f"hf://datasets/owner/rows{missing}")
    with pytest.raises(ValueError, match="^hf://datasets/owner/none/a.jsonl: RepositoryNotFoundError"):
        files.file_rows("hf://datasets/owner/none/a.jsonl")
    # Offline, what is in the cache is taken without a question, and anything else is named.
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    importlib.reload(sys.modules["huggingface_hub.constants"])
    files.file_rows.cache_clear()
    hub.paths.clear()
    assert len(files.file_rows(name)) == 3
    with pytest.raises(ValueError, match="^hf://datasets/owner/rows/README.jsonl: OfflineModeIsEnabled"):
        files.file_rows("hf://datasets/owner/rows/README.jsonl")
    assert hub.paths == []


@pytest.mark.parametrize("split, other", [("train", "eval"), ("eval", "train")])
def test_a_file_with_an_empty_side_is_named(tmp_path, split, other):
    texts = [text for text in map(str, range(100)) if files.held_out(text) == (other == "eval")][:3]
    path = write(tmp_path / "rows.jsonl", *({"prompt": text} for text in texts))
    assert len(rows_of(other, 0, train_file=path)) == 3
    with pytest.raises(ValueError, match=f"^{path}: without an eval_file .* none of 3 is for {split}; --eval_file"):
        rows_of(split, 0, train_file=path)


# ------------------------------------------------------------------------------------------ prompt stream


def prompts_of(num_rows):
    rows = [(f"row {i}", {"prompt": f"{i}?", "number": i}) for i in range(num_rows)]
    settings = SimpleNamespace(chat=True, system_prompt="", max_prompt_length=24)
    return data.Prompts(pretrain.make_tokenizer(), rows, settings)


def drawn(num_rows, position, count, seed):
    """The numbers of the rows that are drawn, and the new position."""
    prompts, position = prompts_of(num_rows).draw(position, count, seed)
    return [prompt.row["number"] for prompt in prompts], position


def test_the_order_of_rows_stays_what_it_was():
    """A run that is resumed with a later version of this file goes on with the prompts that are due."""
    assert drawn(10, 7, 6, 3) == ([0, 5, 3, 7, 4, 3], 13)
    rows = files.Rows([pickle.dumps((str(i), {"source": "ab"[i % 3 == 0]})) for i in range(12)])
    assert [int(name) for name, _ in rows.spread(5)] == [2, 5, 9, 10, 11]


@pytest.mark.parametrize("num_rows, count", [(10, 5), (10, 3), (7, 7), (1, 1), (100, 32)])
def test_every_epoch_has_every_row_once(num_rows, count):
    position, rows, prompts = 0, [], prompts_of(num_rows)
    for step in range(3 * num_rows):
        some, position = prompts.draw(position, count, 5)
        assert len(some) == count and position == (step + 1) * count
        rows += [prompt.row["number"] for prompt in some]
    epochs = [rows[i:i + num_rows] for i in range(0, len(rows), num_rows)]
    assert all(sorted(epoch) == list(range(num_rows)) for epoch in epochs)
    assert num_rows < 7 or epochs[0] != epochs[1]


def test_a_curriculum_is_a_line_in_a_script(monkeypatch):
    monkeypatch.setattr(data, "epoch_order", lambda rows, epoch, seed: range(rows))
    assert drawn(10, 0, 4, 3) == ([0, 1, 2, 3], 4) and drawn(10, 8, 4, 5) == ([8, 9, 0, 1], 12)


def test_rows_are_a_function_of_seed_and_position():
    steps = [drawn(50, 10 * step, 10, 1) for step in range(9)]
    data.epoch_order.cache_clear()
    assert steps[::-1] == [drawn(50, 10 * step, 10, 1) for step in reversed(range(9))]
    assert steps[0] != drawn(50, 0, 10, 2) and steps[0] != steps[1] and steps[8][1] == 90


# ------------------------------------------------------------------------------------------------ prompts


@pytest.fixture(scope="module")
def tokenizer():
    return pretrain.make_tokenizer()


def named(*prompts):
    return [(f"rows:{i}", {"prompt": prompt}) for i, prompt in enumerate(prompts, 1)]


USER = [{"role": "user", "content": "1+1?"}]
BEGUN = [*USER, {"role": "assistant", "content": "It is "}]


@pytest.mark.parametrize("prompt, settings, text", [
    ("1+1?", {}, "1+1?"),
    (USER, {}, "<|user|>1+1?<|end|><|assistant|>"),
    (USER, {"system_prompt": "Be brief."}, "<|system|>Be brief.<|end|><|user|>1+1?<|end|><|assistant|>"),
    (USER, {"chat": False}, "1+1?\n"),
    # An assistant's message is continued.
    (BEGUN, {}, "<|user|>1+1?<|end|><|assistant|>It is "),
    (BEGUN, {"chat": False}, "1+1?\nIt is "),
    (BEGUN + USER, {}, "<|user|>1+1?<|end|><|assistant|>It is <|end|><|user|>1+1?<|end|><|assistant|>"),
    (BEGUN, {"system_prompt": "Be brief."},
     "<|system|>Be brief.<|end|><|user|>1+1?<|end|><|assistant|>It is ")])
def test_encode_rows(tokenizer, prompt, settings, text):
    (one,) = data.encode_rows(tokenizer, named(prompt), **settings)
    assert tokenizer.decode(one.ids) == text and one.row == {"prompt": prompt}


def test_rows_are_encoded_at_once_as_they_are_alone(tokenizer):
    """By a tokenizer that begins every text with a token, which templates write themselves."""
    adding = copy.deepcopy(tokenizer)
    adding.add_special_tokens({"bos_token": "<s>"})
    start = adding.bos_token_id
    adding.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", start)])
    for template in (pretrain.CHAT_TEMPLATE, "{{ bos_token }}" + pretrain.CHAT_TEMPLATE):
        adding.chat_template = template
        prompts = ["1+1?", USER, "<s>1+1?", BEGUN, "a longer one\u00e9", USER * 3]
        expected = []
        for prompt in prompts:
            last = prompt[-1]["role"] if isinstance(prompt, list) else ""
            expected.append(adding(prompt).input_ids if not last else adding.apply_chat_template(
                prompt, return_dict=False, add_generation_prompt=last == "user",
                continue_final_message=last == "assistant"))
        assert expected[0][0] == start != expected[0][1] and expected[2][:2] == [start, start]
        expected[2] = expected[2][1:]
        assert [one.ids for one in data.encode_rows(adding, named(*prompts))] == expected
        assert [ids[0] == start for ids in expected[1::2]] == [template != pretrain.CHAT_TEMPLATE] * 3
    assert data.encode_rows(adding, named(USER), chat=False)[0].ids == adding("1+1?\n").input_ids
    assert data.encode_rows(adding, []) == []


def test_a_text_ends_without_the_end_token_that_a_tokenizer_adds(tokenizer):
    adding = copy.deepcopy(tokenizer)
    adding.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    ids = [adding.bos_token_id, adding.eos_token_id]
    adding.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", ids[0]), ("</s>", ids[1])])
    plain = [ids[0], *tokenizer("1+1?").input_ids]
    assert adding("1+1?").input_ids == plain + ids[1:]
    found = data.encode_rows(adding, named("1+1?", "<s>1+1?", USER), chat=False)
    assert [one.ids for one in found] == [plain, plain, plain + tokenizer("\n").input_ids]


def test_a_prompt_with_a_token_that_the_model_does_not_embed(tokenizer):
    image = copy.deepcopy(tokenizer)
    image.add_special_tokens({"additional_special_tokens": ["<img>"]})
    image.embedded = 261
    assert len(data.encode_rows(image, named("1?"))) == 1
    for last in ("see <img>", [{"role": "user", "content": "<img>"}]):
        with pytest.raises(ValueError, match="^rows:2: its prompt has .* a token that the model does not have"):
            data.encode_rows(image, named("1?", last))


def test_a_prompt_without_tokens_is_named(tokenizer):
    empty = copy.deepcopy(tokenizer)
    empty.backend_tokenizer.normalizer = normalizers.Strip()
    with pytest.raises(ValueError, match="^rows:2: its prompt has no tokens"):
        data.encode_rows(empty, named("1?", "\u2003"))


def test_a_template_that_leaves_out_a_message_is_refused(tokenizer, tmp_path):
    deaf = copy.deepcopy(tokenizer)
    deaf.chat_template = ("{% for m in messages if m.role != 'system' and m.role != 'developer' %}"
                          "<|user|>{{ m.content }}{% endfor %}<|assistant|>")
    messages = [[{"role": "user", "content": f"{i}+1?"}] for i in range(8)]
    rows = [{"prompt": one} for one in messages] + [
        {"prompt": [{"role": "developer", "content": "Be brief."}, *messages[0]]}]
    path = write(tmp_path / "rows.jsonl", *rows)
    settings = SETTINGS | {"task": "file", "train_file": path, "eval_file": path, "max_prompt_length": 99}
    data.load_prompts(tokenizer, SimpleNamespace(**settings))
    with pytest.raises(ValueError, match=f"^{path}:9: the chat template leaves out .*'developer'.*Be brief"):
        data.load_prompts(deaf, SimpleNamespace(**settings))
    with pytest.raises(ValueError, match="the chat template leaves out .*'system', 'content': 'Add.'"):
        data.load_prompts(deaf, SimpleNamespace(**settings | {"system_prompt": "Add."}))
    # A thought may be cut from an earlier answer.
    deaf.chat_template = deaf.chat_template.replace("m.content", "m.content.split('</think>')[-1]")
    path = write(tmp_path / "rows.jsonl", {"prompt": [
        *messages[0], {"role": "assistant", "content": "<think>hm</think>1"}, *messages[1]]})
    settings |= {"train_file": path, "eval_file": path}
    data.load_prompts(deaf, SimpleNamespace(**settings))
    # What a tool has returned may be written in another way.
    deaf.chat_template = deaf.chat_template.replace("m.content", "('' if m.role == 'tool' else m.content)")
    path = write(tmp_path / "rows.jsonl", {"prompt": [
        *messages[0], {"role": "assistant", "content": ""}, {"role": "tool", "content": "2"}]})
    data.load_prompts(deaf, SimpleNamespace(**settings | {"train_file": path, "eval_file": path}))
    # But what was called must be there.
    path = write(tmp_path / "rows.jsonl", {"prompt": [
        *messages[0], {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add"}}]},
        {"role": "tool", "content": "2"}]})
    with pytest.raises(ValueError, match="the chat template leaves out .*'add'"):
        data.load_prompts(deaf, SimpleNamespace(**settings | {"train_file": path, "eval_file": path}))
    deaf.chat_template = "<|user|>{{ messages | length }}<|assistant|>"
    with pytest.raises(ValueError, match="the chat template leaves out .*'user'"):
        data.load_prompts(deaf, SimpleNamespace(**SETTINGS | {"model": "theirs"}))


def test_encode_rows_errors(tokenizer):
    with pytest.raises(ValueError, match="^rows:2: system_prompt needs prompts that are lists of messages"):
        data.encode_rows(tokenizer, named(USER, "1+1?"), system_prompt="Be brief.")
    without = copy.deepcopy(tokenizer)
    without.chat_template = None
    with pytest.raises(ValueError, match="which --chat=false does without, fails .*chat_template is not set"):
        data.encode_rows(without, named(USER))
    without.chat_template = "{{ raise_exception('no such role') }}"
    with pytest.raises(ValueError, match=r"^rows:1: the chat template, .* fails for .*1\+1\?.*no such role"):
        data.encode_rows(without, named(USER))


def test_a_row_that_the_template_refuses_is_named_before_the_run(tokenizer, tmp_path):
    """Wherever it stands: prompts are encoded when they are used, but one of each kind is at the start."""
    strict = copy.deepcopy(tokenizer)
    strict.chat_template = pretrain.CHAT_TEMPLATE + (
        "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}")
    prompts = [[{"role": "user", "content": f"{i}+1?"}] for i in range(9000)]
    rows = [{"prompt": prompt} for prompt in prompts]
    path, other = write(tmp_path / "rows.jsonl", *rows), tmp_path / "other.jsonl"
    settings = SETTINGS | {"task": "file", "train_file": path, "eval_file": path, "train_prompts": 0}
    data.load_prompts(strict, SimpleNamespace(**settings))
    write(other, *rows, "", {"prompt": [{"role": "system", "content": "Be brief."}, *prompts[0]]})
    message = "the chat template, .* fails for .*Be brief.*System role not supported"
    with pytest.raises(ValueError, match=f"^{other}:9002: {message}"):
        data.load_prompts(strict, SimpleNamespace(**settings | {"train_file": str(other)}))
    text = text_of(load_rows("algebra", "train", 1)[0])
    with pytest.raises(ValueError, match=f"^{re.escape(text)}: the chat template, .*System role not"):
        data.load_prompts(strict, SimpleNamespace(**SETTINGS | {"system_prompt": "Be brief."}))
    # A kind of its own are messages with calls, in the same roles.
    strict.chat_template = ("{% for m in messages %}<|user|>{{ m.content }}{% if m.tool_calls is defined %}"
                            "{{ raise_exception('no calls') }}{% endif %}{% endfor %}")
    called = {"role": "assistant", "content": "", "tool_calls": [{"name": "add", "arguments": {}}]}
    talk = [*prompts[0], {"role": "assistant", "content": "2"}, *prompts[1]]
    write(other, *rows, {"prompt": talk}, {"prompt": [talk[0], called, talk[2]]})
    with pytest.raises(ValueError, match=f"^{other}:9002: the chat template, .*no calls"):
        data.load_prompts(strict, SimpleNamespace(**settings | {"train_file": str(other)}))
    # An environment and tools have nothing to add to a string or an answer. An agent begins by itself.
    for last in ("1+1?", [*prompts[0], {"role": "assistant", "content": "So"}]):
        write(other, *rows, {"prompt": last})
        changed = settings | {"train_file": str(other)}
        for more in ({"environment": "game.py:Game"}, {"tools": "tools.py:add"}):
            with pytest.raises(ValueError, match=f"^{other}:9001: an environment and tools need prompts that "):
                data.load_prompts(tokenizer, SimpleNamespace(**changed | more))
        data.load_prompts(tokenizer, SimpleNamespace(**changed | {"agent": "agent.py:solve"}))


SETTINGS = {"model": "tiny", "tools": "", "task": "algebra", "prompts_per_step": 1, "train_prompts": 300, "eval_prompts": 40, "seed": 0,
            "train_file": "", "eval_file": "", "chat": True,
            "environment": "", "images": "", "prompt_column": "", "prompt_format": "", "answer_column": "", "system_prompt": "",
            "chat_template": "", "max_prompt_length": 24}


class Counting:
    """Counts the texts that a tokenizer encodes."""

    def __init__(self, tokenizer):
        self.tokenizer, self.count = tokenizer, 0

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)

    def __call__(self, texts, **kwargs):
        self.count += len(texts)
        return self.tokenizer(texts, **kwargs)


@pytest.fixture
def load_prompts():
    counting = Counting(pretrain.make_tokenizer())

    def load_prompts(**settings):
        train_set, eval_set, note = data.load_prompts(counting, SimpleNamespace(**SETTINGS | settings))
        return train_set, eval_set, note, counting
    return load_prompts


def epoch_of(train_set, seed):
    """Returns the prompts of the first epoch, one by one."""
    position, prompts = 0, []
    while position < len(train_set.rows):
        (prompt,), position = train_set.draw(position, 1, seed)
        prompts += [prompt] * (position <= len(train_set.rows))
    return prompts


def test_load_prompts_leaves_out_what_is_too_long(load_prompts, tokenizer):
    train_set, eval_set, note, _ = load_prompts(seed=3)
    drawn = epoch_of(train_set, 3)
    drawn.sort(key=lambda prompt: [row for _, row in train_set.rows].index(prompt.row))
    for prompts, split, count, seed in (drawn, "train", 300, 3), (eval_set, "eval", 40, 0):
        rows = load_rows("algebra", split, count, seed)
        ids = [tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
               for row in rows]
        expected = [(rows[i], ids[i]) for i in range(count) if len(ids[i]) <= 24]
        assert [prompt[:2] for prompt in prompts] == expected
        assert 0 < len(prompts) < count and max(len(prompt.ids) for prompt in prompts) == 24
    n, m = len(drawn), len(eval_set)
    assert note == (
        f"The run trains on 300 prompts of algebra ({300 - n} of 300 have more than max_prompt_length=24 tokens "
        f"and are left out) and is evaluated on 40 held-out prompts of algebra ({40 - m} of 40 have more than "
        "max_prompt_length=24 tokens and are left out).\nThe model reads the first prompt as\n    "
        f"{tokenizer.decode(epoch_of(train_set, 3)[0].ids)}\n    and its answer is "
        f"{epoch_of(train_set, 3)[0].row['answer']!r}")
    _, _, note, _ = load_prompts(train_prompts=0, eval_prompts=0, max_prompt_length=99)
    assert "on 4,096 prompts of algebra (0 of 512 have more than max_prompt_length=99 tokens and" in note
    assert "on 128 held-out prompts of algebra (0 of 128 have more than" in note


def test_prompts_are_drawn_as_if_the_long_ones_were_not_there(load_prompts):
    """Three epochs in batches: the position is all that going on needs."""
    train_set, _, _, _ = load_prompts()
    every = train_set.encoded(range(300))
    assert [prompt.number for prompt in train_set.encoded([7, 3])] == [7, 3]    # as a resumed run asks for them
    fits = [len(prompt.ids) <= 24 for prompt in every]
    assert 30 < sum(fits) < 270
    expected = [every[i]._replace(epoch=epoch) for epoch in range(3)
                for i in data.epoch_order(300, epoch, 0) if fits[i]]
    position, drawn = 0, []
    while position < 900:
        prompts, position = train_set.draw(position, 8, 0)
        assert len(prompts) == 8
        drawn += prompts
    assert drawn[:len(expected)] == expected and len(expected) > 90


def test_a_row_that_the_template_refuses_is_named_once_and_passed_over(tokenizer, tmp_path, capsys, monkeypatch):
    strict = copy.deepcopy(tokenizer)
    strict.chat_template = pretrain.CHAT_TEMPLATE + (
        "{% if 'odd' in messages[0].content %}{{ raise_exception('not this') }}{% endif %}")
    order = data.epoch_order(600, 0, 0)
    odd = {order[550], order[551], order[590]}
    path = write(tmp_path / "rows.jsonl", *({"prompt": [{"role": "user", "content": f"{i}? {'odd' * (i in odd)}"}], "number": i}
                                            for i in range(600)))
    other = write(tmp_path / "other.jsonl", {"prompt": [ASKED]})
    settings = SimpleNamespace(**SETTINGS | {"task": "file", "train_file": path, "eval_file": other, "train_prompts": 0})
    train_set, _, _ = data.load_prompts(strict, settings)
    train_set.check()
    position, drawn = 0, []
    for _ in range(200):                                        # two epochs and a little
        prompts, position = train_set.draw(position, 6, 0)
        assert len(prompts) == 6
        drawn += [prompt.row["number"] for prompt in prompts]
    expected = [i for epoch in range(3) for i in data.epoch_order(600, epoch, 0) if i not in odd]
    assert drawn == expected[:1200] and position == 1206
    said = capsys.readouterr().err.splitlines()
    assert sorted(int(re.search(r"jsonl:(\d+): .*not this.*: this row is passed over$", line)[1]) - 1 for line in said) == sorted(odd)
    # One rank names it.
    monkeypatch.setenv("RANK", "1")
    data.say_once.cache_clear()
    train_set.draw(0, 600, 0)
    assert not capsys.readouterr().err


def test_only_what_is_used_is_encoded(load_prompts, tmp_path):
    """512 training prompts at the start, whatever there is, and those that are drawn."""
    rows = [{"prompt": f"{i}?" + " " * (30 * (i % 4 == 0))} for i in range(12_000)]
    path = write(tmp_path / "rows.jsonl", *rows)
    train_set, eval_set, note, counting = load_prompts(task="file", train_file=path, train_prompts=0)
    assert counting.count == 512 + 40 and len(eval_set) < 40
    first = [data.epoch_order(len(train_set.rows), 0, 0)[i] for i in range(512)]
    long = sum(len(train_set.rows[i][1]["prompt"]) > 24 for i in first)
    assert (f"trains on {len(train_set.rows):,} prompts of {path} ({long:,} of 512 have more than "
            "max_prompt_length=24 tokens and are left out) and") in note
    counting.count = 0
    prompts, position = train_set.draw(0, 100, 0)
    assert len(prompts) == 100 < counting.count == position < 200
    # A step may need more than there are.
    prompts, position = train_set.draw(0, 20_000, 0)
    assert len(prompts) == 20_000 and {prompt.epoch for prompt in prompts} == {0, 1, 2}


def test_load_prompts_takes_the_form_of_the_prompts_from_the_settings(load_prompts, tokenizer):
    prompt = load_prompts(system_prompt="Be brief.", max_prompt_length=99)[1][0]
    assert tokenizer.decode(prompt.ids) == (
        f"<|system|>Be brief.<|end|><|user|>{text_of(prompt.row)}<|end|><|assistant|>")
    prompt = load_prompts(chat=False, task="algebra:2", max_prompt_length=99)[0].draw(0, 1, 0)[0][0]
    assert tokenizer.decode(prompt.ids) == text_of(prompt.row) + "\n"
    assert prompt.row == load_rows("algebra", "train", 300, 0, 2)[data.epoch_order(300, 0, 0)[0]]


QWEN3 = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}
{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"""


def test_the_first_prompt_is_shown_as_the_model_reads_it(load_prompts, tmp_path):
    """What the template writes, special tokens included; of a long one the end is shown."""
    tokenizer = load_prompts()[3].tokenizer
    tokenizer.chat_template = QWEN3
    short = tokenizer.apply_chat_template([{"role": "system", "content": "Add."}, {"role": "user", "content": ""}],
                                          tokenize=False, add_generation_prompt=True)
    for text in ("2+2?", "\n".join(map(str, range(50))), "x" * 2000, *("x" * (n - len(short)) for n in (1000, 1001))):
        messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": text}]
        path = write(tmp_path / "rows.jsonl", {"prompt": messages, "answer": "4"})
        note = data.load_prompts(tokenizer, SimpleNamespace(**SETTINGS | {
            "task": "file", "train_file": path, "eval_file": path, "max_prompt_length": 9999}))[2]
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        shown = note.split("\n    ")[1:-1]
        assert note.endswith("and its answer is '4'")
        assert not any("\n" in line for line in shown)          # each is indented
        assert "\n".join(shown) == (rendered if len(rendered) <= 1000 else f"... {rendered[-1000:]}")
    path = write(tmp_path / "rows.jsonl", {"prompt": "2+2 ="})
    settings = {"task": "file", "train_file": path, "eval_file": path}
    note = load_prompts(**settings)[2]
    assert note.endswith(
        "reads the first prompt as\n    2+2 =\n    (A string is read as it is. The model's chat template is for "
        "lists of messages.)\n    and its answer is None")
    tokenizer = pretrain.make_tokenizer()
    tokenizer.chat_template = None
    assert "(A string" not in data.load_prompts(tokenizer, SimpleNamespace(**SETTINGS | settings))[2]


def test_load_prompts_from_files(load_prompts, tmp_path):
    rows = [{"prompt": f"{i}+1?" + " " * (i % 2 * 30)} for i in range(200)]
    path, other = write(tmp_path / "rows.jsonl", *rows), write(tmp_path / "other.jsonl", *rows[:50])
    train, held_out = sides(path)
    train_set, eval_set, note, _ = load_prompts(
        task="file", train_file=path, train_prompts=100, eval_prompts=0)
    taken = [row["prompt"] for _, row in train_set.rows]
    short = [text for text in taken if len(text) <= 24]
    assert len(taken) == 100 and taken == [text for text in train if text in taken]
    assert sorted(prompt.row["prompt"] for prompt in epoch_of(train_set, 0)) == sorted(short)
    assert [prompt.row["prompt"] for prompt in eval_set] == [t for t in held_out if len(t) <= 24]
    assert f"trains on 100 prompts of {path} ({100 - len(short)} of 100 have more" in note
    count = len(held_out)
    assert f"on {count} held-out prompts of {path} ({count - len(eval_set)} of {count} have more" in note
    train_set, eval_set, note, _ = load_prompts(
        task="file", train_file=path, eval_file=other, train_prompts=0)
    assert len(train_set.rows) == 200 and 15 <= len(eval_set) <= 25
    assert f"on 200 prompts of {path} (100 of 200 have" in note
    assert f"on 40 held-out prompts of {other} ({40 - len(eval_set)} of 40 have" in note


@pytest.mark.parametrize("split, files", [("train", ("long", "short")), ("eval", ("short", "long"))])
def test_load_prompts_wants_one_that_fits_on_each_side(load_prompts, tmp_path, split, files):
    write(tmp_path / "short.jsonl", *[{"prompt": "1?"}] * 7)
    write(tmp_path / "long.jsonl", *[{"prompt": "1" * length} for length in (30, 27, 28)])
    train_file, eval_file = (str(tmp_path / f"{name}.jsonl") for name in files)
    message = f"max_prompt_length=24: none of 3 {split} prompts fits; the shortest has 27 tokens"
    with pytest.raises(ValueError, match=message):
        load_prompts(task="file", train_file=train_file, eval_file=eval_file)


def test_dates_in_the_messages_of_a_parquet_file(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet
    message = {"role": "user", "content": "1+1?", "on": datetime.datetime(2026, 1, 2)}
    row = {"prompt": [message], "answer": "2"}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "rows.parquet")
    ((_, row),) = files.file_rows(str(tmp_path / "rows.parquet"))
    assert row["prompt"] == [message | {"on": "2026-01-02 00:00:00"}]


def test_a_named_column_of_answers_leaves_the_source_as_it_is(tmp_path):
    rows = [{"prompt": "a?", "gold": "1", "data_source": None, "source": "x"}]
    path = write(tmp_path / "rows.jsonl", *rows)
    ((_, row),) = files.file_rows(path, "", "gold")
    assert row["source"] == "x" and row["answer"] == "1"
    ((_, row),) = files.file_rows(write(tmp_path / "other.jsonl", {"prompt": "a?", "gold": "1"}), "", "gold")
    assert "source" not in row


def test_bytes_in_a_message_are_refused_and_dates_are_text():
    assert as_message({"role": "user", "content": "x", "day": datetime.date(2026, 5, 1)})["day"] == "2026-05-01"
    with pytest.raises(ValueError, match="a message cannot hold bytes: b'x'"):
        as_message({"role": "user", "content": b"x"})
