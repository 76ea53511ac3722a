"""What a user meets who brings a model, rows, a reward and a judge: three pages of docs/, from first_run.md on."""
import http.server
import json
import random
import re
import shutil
import threading
import time

import pytest
from transformers import AutoConfig

import runs
from runs import forked, lines, refused
from runtime import model_folder
from configurator import TINY_DEFAULTS
from test_docs import BLOCKS, TEXTS
from test_train_grpo import SMALL, train
from tiny import pretrain


@pytest.fixture(scope="module")
def stranger(folder, tmp_path_factory):
    """The model `folder` as if it had not been made by tiny/."""
    path = shutil.copytree(folder, tmp_path_factory.mktemp("stranger") / "model")
    config = json.loads((path / "config.json").read_text())
    del config["suits"]
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


# ---------------------------------------------------------------- settings of the tiny model


@pytest.mark.parametrize("script, keys", [
    ("train_grpo.py", "learning_rate=0.0001, max_prompt_length=64, max_completion_length=64"),
    ("train_dapo.py", "learning_rate=0.0001, max_prompt_length=64, max_completion_length=64"),
    ("train_sft.py", "learning_rate=0.0001, max_prompt_length=64, max_completion_length=64"),
    ("train_ppo.py", "learning_rate=0.0001, critic_learning_rate=0.002, max_prompt_length=64, "
                     "max_completion_length=64"),
    ("evaluate_model.py", "max_completion_length=64")])
def test_defaults_for_the_tiny_model_are_refused_for_another(stranger, tmp_path, script, keys):
    message = f"{keys}: defaults that suit the tiny model and not model={stranger}. Give each a value; "
    refused([f"--model={stranger}", "--engine=hf"], message, tmp_path, script=script)


def test_what_is_given_is_taken(stranger, folder, reward_file, tmp_path):
    """On the command line, even the default; in a config file; in an edited copy; and by a model of tiny/."""
    some = {key: value for key, value in SMALL.items() if key not in TINY_DEFAULTS}
    given = [f"--{key}={value}" for key, value in TINY_DEFAULTS.items() if not key.startswith("critic")]
    small = runs.with_defaults([reward_file], some | {"max_steps": 1, "model": stranger})
    config = tmp_path / "mine.py"
    config.write_text("".join(one[2:] + "\n" for one in given))
    with open("train_grpo.py") as file:
        text = file.read()
    edited = {"learning_rate": "2e-4", "max_prompt_length": "60", "max_completion_length": "12"}
    for key, value in edited.items():
        text, count = re.subn(rf"^{key} = \S+", f"{key} = {value}", text, flags=re.M)
        assert count == 1
    (tmp_path / "train_mine.py").write_text(text)
    for number, arguments in enumerate((["train_grpo.py", *given], ["train_grpo.py", str(config)],
                                        [f"{tmp_path}/train_mine.py"])):
        forked(tmp_path / "log", *arguments, *small, f"--out_dir={tmp_path}/{number}")
    # A checkpoint says what its model has said.
    for model, suits in ((stranger, None), (folder, TINY_DEFAULTS)):
        small = runs.with_defaults([reward_file, *given], some | {"max_steps": 1, "model": model})
        forked(tmp_path / "log", "train_grpo.py", *small, f"--out_dir={tmp_path}/{suits is None}")
        found = AutoConfig.from_pretrained(f"{tmp_path}/{suits is None}/checkpoint-1")
        assert getattr(found, "suits", None) == suits
    trained = f"{tmp_path}/False/checkpoint-1"
    small = runs.with_defaults([reward_file], some | {"max_steps": 1, "model": trained})
    forked(tmp_path / "log", "train_grpo.py", *small, f"--out_dir={tmp_path}/next")


def test_what_suits_the_tiny_model_is_what_the_scripts_are_shipped_with():
    for script in ("train_grpo.py", "train_ppo.py", "train_dapo.py", "train_async.py", "train_sft.py"):
        with open(runs.script_path(script)) as file:
            text = file.read()
        for key, value in TINY_DEFAULTS.items():
            found = re.findall(rf"^{key} = (\S+)", text, re.M)
            assert [float(one) for one in found] == [value] * (not key.startswith("critic") or "ppo" in script)
    for model in ("tiny/algebra", "tiny/compose", "tiny/episodes"):
        assert AutoConfig.from_pretrained(model).suits == TINY_DEFAULTS
    assert pretrain.make_model(pretrain.make_tokenizer()).config.suits == TINY_DEFAULTS


def test_a_tilde_in_the_name_of_a_model(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    shutil.copytree(folder, tmp_path / "m")
    assert model_folder.check_model("~/m") == f"{tmp_path}/m"


def test_a_run_is_resumed_with_another_spelling(folder, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{i}+1?", "answer": "2"}) + "\n" for i in range(40)))
    run = [f"--out_dir={tmp_path}/run", "--task=file"]
    small = {**SMALL, "model": folder, "max_prompt_length": 64}
    forked(tmp_path / "log", "train_grpo.py", *runs.with_defaults(
        [*run, f"--train_file={rows}", "--max_steps=1"], small))
    said = forked(tmp_path / "log", "train_grpo.py", *runs.with_defaults(
        [*run, f"--train_file={tmp_path}/./rows.jsonl", "--max_steps=2", "--resume=auto"],
        small | {"model": folder + "/"}))
    assert "resumes " in said
    refused(runs.with_defaults([*run, f"--train_file={tmp_path}/other.jsonl", "--resume=auto"], small),
            f"train_file={tmp_path}/other.jsonl, but ", tmp_path)


# ---------------------------------------------------------------- a judge


class Server(http.server.ThreadingHTTPServer):
    """Answers as an OpenAI-compatible server does, after a while, that a number is even or not."""
    daemon_threads, running, most, failing, delay, broken = True, 0, 0, 0.05, 0.2, False

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            server = self.server
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            question = asked["messages"][0]["content"]
            server.running += 1
            server.most = max(server.most, server.running)
            time.sleep(server.delay)
            server.running -= 1
            said = "Yes." if sum(map(ord, question)) % 2 else "No."
            code = 400 if server.broken or server.rng.random() < server.failing else 200
            body = json.dumps({"error": {"message": "overloaded"}} if code == 400 else {
                "id": "1", "object": "chat.completion", "created": 0, "model": "MODEL", "choices": [
                    {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": said}}]})
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *arguments):
            pass

    def __init__(self):
        super().__init__(("localhost", 0), self.Handler)
        self.rng = random.Random(0)
        threading.Thread(target=self.serve_forever, daemon=True).start()


@pytest.fixture
def judged(tmp_path):
    """A server, and the setting that names the judge of docs/rewards.md, which asks it."""
    pytest.importorskip("aiohttp")
    (block,) = [block for _, _, block in BLOCKS if block.startswith("# my_judge.py")]
    server = Server()
    (tmp_path / "my_judge.py").write_text(block.replace("localhost:8001", f"localhost:{server.server_port}"))
    yield server, f"--reward={tmp_path}/my_judge.py:judge"
    server.shutdown()


def test_a_judge_that_fails_now_and_then(judged, folder, tmp_path):
    server, reward = judged
    metrics, output = train(folder, tmp_path / "run", reward, "--reward_errors=unscored",
                            "--call_timeout=20", "--prompts_per_step=8")
    unscored = [line["rewards/unscored"] for line in metrics[:2]]
    assert 0 < sum(unscored) < 32 and all(0 < line["reward"] < 1 for line in metrics[:2])
    assert all(line["rewards/judge/mean"] == pytest.approx(line["reward"]) for line in metrics[:2])
    assert re.search(r"step \d: \d+ of \d+ completions failed or took too long; the first: the reward raised "
                     "ClientResponseError: 400", output)
    # All calls of a step were asked at once.
    assert server.most >= 8 and metrics[0]["timing_s/reward"] < 32 * server.delay / 2
    # By default the first failure stops the run.
    output = train(folder, tmp_path / "stops", reward, "--prompts_per_step=8", code=1)[1]
    assert "reward judge raised ClientResponseError" in output and "the completion is" in output


def test_a_step_in_which_nothing_is_scored_stops_the_run(judged, folder, tmp_path):
    server, reward = judged
    server.failing = 0.0
    processes = runs.begin(tmp_path / "log", "train_grpo.py", *runs.with_defaults(
        [reward, "--reward_errors=unscored", f"--out_dir={tmp_path}/run"],
        SMALL | {"model": folder, "max_steps": 50, "eval_interval": 1000}))
    while not lines(tmp_path / "run"):
        time.sleep(0.05)
    server.broken = True
    output = runs.finish(processes, tmp_path / "log", code=1)
    assert "nothing was scored; the reward raised ClientResponseError" in output.splitlines()[-1]
    assert 1 <= len(lines(tmp_path / "run")) < 50
    # A judge that answers nothing at all is refused before a model is loaded.
    refused([reward, "--reward_errors=unscored", f"--model={folder}", "--engine=hf"],
            "the reward raised ClientResponseError", tmp_path)


def test_the_filter_of_the_page_leaves_what_is_sometimes_solved(tmp_path):
    """The commands of docs/data_and_rewards.md, on the shipped model."""
    rows = [{"prompt": [{"role": "user", "content": f"Solve x+{a}={a + b}"}], "answer": str(b), "level": a}
            for a in range(1, 6) for b in range(1, 6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    output = forked(tmp_path / "log", "evaluate_model.py", "--task=file", f"--eval_file={tmp_path}/rows.jsonl",
                    "--eval_prompts=0", "--samples=8", "--engine=hf", f"--output={tmp_path}/sampled.jsonl")
    sampled = lines(tmp_path, "sampled.jsonl")
    assert [{key: one[key] for key in row} for one, row in zip(sampled, rows, strict=True)] == rows
    page = TEXTS["docs/data_and_rewards.md"]
    (code,) = re.findall(r'python -c "(import json; [^"]*)" > some.jsonl', page)
    found = runs.launch("-c", code.replace("\\\n", ""), cwd=tmp_path)
    expected = [one for one in sampled if 0 < one["mean@8"] < 1]
    assert [json.loads(line) for line in found.splitlines()] == expected
    assert 0 < len(expected) < len(rows), output
    # What is left trains.
    (tmp_path / "some.jsonl").write_text(found)
    forked(tmp_path / "log", "train_grpo.py", "--task=file", f"--train_file={tmp_path}/some.jsonl",
           f"--eval_file={tmp_path}/rows.jsonl", "--prompts_per_step=2", "--max_steps=1", "--eval_prompts=4",
           "--engine=hf", f"--out_dir={tmp_path}/run")
    asked = [sample["prompt"] for sample in lines(tmp_path / "run", "samples.jsonl")]
    assert asked and all(prompt in [one["prompt"] for one in expected] for prompt in asked)
