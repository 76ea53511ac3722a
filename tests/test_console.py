"""The console: whatever it cannot take, a run goes on."""
import os
import subprocess
import sys

import pytest

from configurator import printable
from runs import ROOT, begin, lines, with_defaults

REWARD = """
import sys
def score(prompts, completions, **_):
    print("caf\\u00e9 \\ud800 \\x1b[2J")
    return [0.5 * (i % 2) for i in range(len(completions))]
"""


@pytest.fixture()
def command(folder, tmp_path):
    (tmp_path / "rewards.py").write_text(REWARD)
    return ["train_grpo.py", *with_defaults([f"--out_dir={tmp_path}/run"], {
        "model": folder, "reward": f"{tmp_path}/rewards.py:score", "engine": "hf", "max_steps": 2,
        "prompts_per_step": 4, "num_generations": 4, "max_completion_length": 12, "train_prompts": 16,
        "eval_prompts": 4, "eval_samples": 1})]


@pytest.mark.parametrize("redirection, coding", [
    ("<&- >&- 2>&-", "utf-8"), ("2>&1 | true", "utf-8"), (">OUT 2>&1", "ascii")])
def test_a_run_goes_on_without_a_console(command, tmp_path, redirection, coding):
    line = " ".join([sys.executable, *command, redirection.replace("OUT", f"{tmp_path}/out")])
    code = subprocess.run(["bash", "-o", "pipefail", "-c", line], cwd=ROOT, timeout=120,
                          env=os.environ | {"PYTHONIOENCODING": coding}).returncode
    assert code == 0 and [line["step"] for line in lines(tmp_path / "run")] == [0, 1, 2]
    if coding == "ascii":
        assert "caf\\xe9 \\ud800" in (tmp_path / "out").read_text()


def test_a_run_goes_on_where_its_console_is_full(command, tmp_path):
    (process,) = begin("/dev/full", *command)
    process.join(120)
    assert process.exitcode == 0 and [line["step"] for line in lines(tmp_path / "run")] == [0, 1, 2]


def test_no_library_warns_of_what_is_fine(tmp_path):
    """Nothing is on stderr with vLLM, which sets up its own logging. See also test_train_grpo.py."""
    pytest.importorskip("vllm")
    said = subprocess.run(
        [sys.executable, "train_grpo.py", "--engine=vllm", "--max_steps=1", "--prompts_per_step=4",
         "--train_prompts=16", "--eval_prompts=4", f"--out_dir={tmp_path}/run"], cwd=ROOT, capture_output=True,
        text=True, timeout=300)
    assert said.returncode == 0 and said.stdout.startswith(f"{tmp_path}/run: tiny, ")
    assert said.stderr == ""
    assert said.stdout.endswith("run/report.html: curves, samples and health\n")


@pytest.mark.parametrize("text, shown", [
    ("a\x1b[2Jb", r"a\x1b[2Jb"), ("two\nlines", "two\nlines"), ("café", "café"), ("\ud800", r"\ud800"),
    ("\u202eabc", r"\u202eabc"), ("a\rb\0", r"a\rb\x00"), (None, "None"),
    ("a\tb\xa0\u3000\u200d", "a\tb\xa0\u3000\\u200d")])
def test_control_characters_are_escaped(text, shown):
    assert printable(text) == shown
