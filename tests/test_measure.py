"""What a reader opens stays small: the lines of the scripts, the loop, its branches, the settings, and all files whose
code a run executes."""
import ast
import io
import json
import os
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

from config import shared
from configurator import KEY, read_block
from runs import ROOT


def keys(script):
    return {*KEY.findall(read_block(Path(ROOT) / script))}


def own_settings(script):
    """The names that a script itself assigns between its two dashed rules."""
    return keys(script) - keys(shared.__file__)


@pytest.mark.parametrize("script, most_lines", [("train_grpo.py", 330), ("train_ppo.py", 330)])
def test_a_script_is_short(script, most_lines):
    assert len((Path(ROOT) / script).read_text().splitlines()) <= most_lines


def test_the_loop_of_grpo_is_short_and_plain():
    source = (Path(ROOT) / "train_grpo.py").read_text()
    (loop,) = [node for node in ast.parse(source).body if isinstance(node, ast.For)]
    assert ast.unparse(loop.target) == "step" and 60 < loop.end_lineno - loop.lineno + 1 <= 130
    assert sum(isinstance(node, ast.If) for node in ast.walk(loop)) <= 12


def test_grpo_has_few_settings_of_its_own():
    own = own_settings("train_grpo.py")
    assert {"model", "learning_rate", "max_steps"} <= own and not {"dtype", "save_interval"} & own
    assert len(own) <= 38


# ---------------------------------------------------------------- the files that a run opens

# A sitecustomize.py, which notes the file of all code that the process executes, wherever it is imported.
HOOK = """
import os, sys
path = os.environ.pop("OPENED", None)       # processes that the run starts do not have it
seen = set()

def hook(event, args):
    file = event == "exec" and getattr(args[0], "co_filename", "")
    if file and file not in seen:
        seen.add(file)
        with open(path, "a") as opened:
            opened.write(file + "\\n")

if path:
    sys.addaudithook(hook)
"""
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
REWARD = """
def bright(completions, answer, **columns):
    return [float(truth in completion[-1]["content"]) for completion, truth in zip(completions, answer)]
"""


def tokens_of(path):
    """How many tokens a file has, without comments and docstrings."""
    count = 0
    starts = True                                               # whether a statement may begin here
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type in LAYOUT:
            starts = starts or token.type != tokenize.COMMENT
            continue
        count += not (starts and token.type == tokenize.STRING)
        starts = False
    return count


def opened(folder, *arguments):
    """{file: its tokens} of the repository's files that a run of three steps and its resume open."""
    (folder / "sitecustomize.py").write_text(HOOK)
    # A git that sees no changes: if the code differs from its commit, a run opens one file more.
    (folder / "git").write_text("#!/bin/sh\n")
    (folder / "git").chmod(0o755)
    env = os.environ | {"PYTHONPATH": str(folder), "OPENED": str(folder / "opened"),
                        "PATH": f"{folder}:{os.environ['PATH']}"}
    for last in (["--max_steps=3"], ["--max_steps=4", "--resume=auto"]):
        subprocess.run([sys.executable, "train_grpo.py", "--prompts_per_step=4", "--eval_prompts=8", "--eval_interval=2",
                        "--save_interval=2", *arguments, *last, f"--out_dir={folder}/run"], cwd=ROOT, env=env, check=True)
    files = {Path(ROOT, name).resolve() for name in (folder / "opened").read_text().splitlines()}
    files = {path.relative_to(ROOT) for path in files if path.is_relative_to(ROOT) and path.is_file()}
    counts = {str(path): tokens_of(ROOT / path) for path in files | {Path("train_grpo.py")} if path.parts[0] != ".venv"}
    return {path: count for path, count in sorted(counts.items(), key=lambda pair: -pair[1]) if count}


@pytest.mark.parametrize("kind, most_files, most_tokens", [
    ("plain", 19, 30_800), ("plain --engine=hf", 19, 30_500), ("a user's own", 24, 35_800)])
def test_a_run_opens_few_files(tmp_path, kind, most_files, most_tokens):
    """Those that only some runs need are opened by the setting that needs them."""
    arguments = kind.split()[1:]
    if kind == "a user's own":
        rows = [{"prompt": [{"role": "user", "content": f"Say {i}."}], "answer": str(i)} for i in range(64)]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (tmp_path / "mine.py").write_text(REWARD)
        (tmp_path / "chat.jinja").write_text(TEMPLATE)
        arguments = ["--task=file", f"--train_file={tmp_path}/rows.jsonl", f"--reward={tmp_path}/mine.py:bright",
                     f"--chat_template={tmp_path}/chat.jinja", "--engine=hf"]
    counts = opened(tmp_path, *arguments)
    listed = "\n".join(f"{count:6} {path}" for path, count in counts.items())
    assert len(counts) <= most_files and sum(counts.values()) <= most_tokens, (
        f"{len(counts)} files of {sum(counts.values())} tokens:\n{listed}")
