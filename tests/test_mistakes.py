"""What is wrong with an input becomes a line. A mistake in the code keeps its traceback, and so does the user's own
code, from its first line on."""
import json
import re

import pytest
import torch
from safetensors import safe_open

import attention
from configurator import InputError, input_errors, reading
from model import load_policy
from runs import forked, with_defaults
from options.user_code import load_from
from test_changes import changed, small
from test_train_episodes import SMALL, TOOLS

LINE = "    values = {}\n    return values['contents']\n"           # what raises
RESET = "  def reset(self, **row): pass\n"
CODE = {
    "a file": ("reward", "values = {}\nvalues['contents']\n"),
    "a reward": ("reward", f"def code(prompts, completions, **columns):\n{LINE}"),
    "an async reward": ("reward", f"async def code(prompts, completions, **columns):\n{LINE}"),
    "a reward of verl's form": ("reward", f"def code(solution_str, ground_truth):\n{LINE}"),
    "a constructor": ("environment", f"class code:\n{RESET}  def __init__(self):\n{LINE}"),
    "reset": ("environment", f"class code:\n  def step(self, text): pass\n  def reset(self, **row):\n{LINE}"),
    "step": ("environment", f"class code:\n{RESET}  def step(self, text):\n{LINE}"),
    "an async step": ("environment", f"class code:\n{RESET}  async def step(self, text):\n{LINE}"),
    "a reward of an environment": ("environment", f"class code:\n{RESET}  def get_reward(self):\n{LINE}"),
    "an agent": ("agent", f"def code(row, base_url, api_key):\n{LINE}"),
    "an async agent": ("agent", f"async def code(row, base_url, api_key):\n{LINE}")}


@pytest.mark.parametrize("seconds", [60, 0], ids=["limited", "unlimited"])
@pytest.mark.parametrize("name", CODE)
def test_the_users_own_code_is_shown_from_its_first_line_on_and_the_message_last(name, seconds, tmp_path, talker):
    setting, code = CODE[name]
    file = tmp_path / "mine.py"
    file.write_text(code)
    arguments = with_defaults([f"--{setting}={file}:code", f"--call_timeout={seconds}", f"--model={talker}",
                               f"--out_dir={tmp_path}/run"], SMALL | TOOLS | {"max_turns": 0})
    output = forked(tmp_path / "log", "train_grpo.py", *arguments, code=2)
    *_, last = output.splitlines()
    assert last.startswith("train_grpo.py: ") and "KeyError: 'contents'" in last
    number = 1 + code[:code.index("values['")].count("\n")
    assert {*re.findall(r'File "(.+)", line (\d+)', output)} == {(str(file), str(number))}, output


def test_only_an_input_error_becomes_a_line(capsys):
    with pytest.raises(SystemExit), input_errors():
        raise InputError("rows.jsonl:3: no answer")
    assert capsys.readouterr().err.endswith(": rows.jsonl:3: no answer\n")
    for mistake in (lambda: [a for a, b in [(1, 2, 3)]], lambda: {}["contents"], lambda: open("no such file"),
                    lambda: int("x")):
        with pytest.raises((ValueError, KeyError, OSError)), input_errors():
            mistake()
    with pytest.raises(SystemExit), input_errors(OSError):
        open("no such file")


@pytest.mark.parametrize("damaged", [
    lambda path: json.loads(path.read_bytes()), lambda path: path.read_text("utf-8"), lambda path: open(path / "x"),
    lambda path: torch.load(path), lambda path: safe_open(path, "pt")],
    ids=["JSON", "text", "no file", "torch", "safetensors"])
def test_what_a_library_raises_over_a_file_becomes_a_line(damaged, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"\xff{")
    with pytest.raises(InputError, match="^the file cannot be read: "), reading("the file"):
        damaged(path)


def test_a_message_may_begin_with_an_empty_line():
    """As transformers' about a missing package."""
    class Missing(ImportError):
        pass
    with pytest.raises(InputError, match="^the file cannot be read: Missing: it needs torchvision$"), reading("the file"):
        raise Missing("\nit needs torchvision\nor so")


def test_a_mistake_of_ours_over_a_file_keeps_its_traceback():
    def longest(config):
        return config.max_positions
    for mistake in (lambda: longest(None), lambda: len(5), lambda: [a for a, b in [(1, 2, 3)]]):
        with pytest.raises(Exception) as raised, reading("the file"):
            mistake()
        assert not isinstance(raised.value, InputError)


def test_a_mistake_in_a_model_class_of_the_users_keeps_its_traceback(tmp_path):
    (tmp_path / "my_model.py").write_text("class Model:\n    def __init__(self, config):\n        self.width = config.width\n")
    Model = load_from(f"{tmp_path}/my_model.py:Model", "model", "class")
    with pytest.raises(AttributeError, match="width"), reading("model=mine: its weights"):
        Model(None)


def test_a_mistake_in_attention_keeps_its_traceback_and_names_the_model(folder, monkeypatch, mesh):
    def edited(*arguments, **keywords):
        return no_such_name  # noqa: F821

    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", edited)
    with pytest.raises(NameError, match="no_such_name") as raised:
        load_policy(folder, mesh, torch.float32)
    assert raised.value.__notes__ == [f"model={folder}: this kind of model does not run here"]


def test_an_optimizer_that_sharded_parameters_do_not_have_is_told_so(tmp_path):
    script = changed(tmp_path, ("make_optimizer(policy, learning_rate, settings)",
                                "torch.optim.Adafactor(policy.parameters(), lr=learning_rate)"))
    output = forked(tmp_path / "log", script, *small("tiny", f"--out_dir={tmp_path}/run", "--max_steps=1"), code=1)
    assert "has no such operation for parameters that FSDP2 has sharded" in output.splitlines()[-1]
