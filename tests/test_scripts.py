"""The scripts: every name that they use is defined, and where two do the same thing they say it in the same words."""
import ast
import builtins
import difflib
import os
import re

import pytest

import config.sampling
import config.shared
from runs import ROOT, script_path

OTHERS = ["train_dapo.py", "train_ppo.py", "train_async.py", "train_sft.py"]
# Comments that differ because the method does.
METHOD = {
    "# The ratio compares the policy with pi_old, the policy before the first update. For the age of the",
    'task = "algebra"                # algebra, compose, gsm8k, or file for your own rows, with their answers',
    "max_prompt_length = 64          # in tokens; longer prompts are left out of evaluations",
    "max_completion_length = 64      # in tokens, of what is sampled; longer rows than both together are left out",
    "learning_rate = 1e-4            # the peak; a model of 1 B parameters wants about 1e-5",
    "max_steps = 60                  # each makes an update with prompts_per_step rows",
    'reward = ""                     # file.py:function,... or math_verify; if empty, the task\'s own; none: nothing',
    "seed = 0                        # of generated problems, order of rows, sampling"}
SETTINGS = {"train_grpo.py": config.shared, **dict.fromkeys(OTHERS, config.shared),
            "evaluate_model.py": config.sampling}


def source_of(script):
    with open(os.path.join(ROOT, script_path(script))) as file:
        return file.read()


def undefined_names(source):
    """Return the names that a script reads and that neither it nor Python defines."""
    read, defined = set(), {"__file__", *dir(builtins)}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else defined).add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            defined.add(node.name)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            defined.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            defined |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return read - defined


@pytest.mark.parametrize("script", SETTINGS)
def test_every_name_is_defined(script):
    missing = undefined_names(source_of(script)) - vars(SETTINGS[script]).keys()
    assert not missing, f"{script}: {', '.join(sorted(missing))}"


def test_an_undefined_name_is_found():
    assert undefined_names("from os import *\nx = 1\ndef f(y):\n    return x + y + z + sum([w for w in v])") == {"v", "z"}


@pytest.mark.parametrize("script", ["train_grpo.py", *OTHERS])
def test_the_comment_above_the_import_names_the_shared_settings_that_are_read(script):
    source = source_of(script)
    comment = re.search(r"((?:^#.*\n)+)from config\.shared import \*", source, re.M)[1]
    named = dict(re.findall(r"(\w+)=([^,\s]*[^,.\s])", comment))
    assert {key: ast.literal_eval(value) for key, value in named.items()} == {
        key: getattr(config.shared, key) for key in undefined_names(source)}


def parts(line):
    """Return the code of a line and its comment."""
    code, sign, comment = line.partition("#")
    return (line.rstrip(), "") if code.count('"') % 2 else (code.rstrip(), comment.strip())


@pytest.mark.parametrize("script", OTHERS)
def test_two_scripts_differ_in_their_method_alone(script):
    """Prints the difference to train_grpo.py, in which no comment is another wording of the same thing."""
    ours, theirs = (source_of(name).splitlines() for name in ("train_grpo.py", script))
    difference = [*difflib.unified_diff(ours, theirs, "train_grpo.py", script, n=0, lineterm="")]
    print("\n".join(difference))
    comments = {}                                               # of train_grpo.py, by code
    for line in ours:
        code, comment = parts(line)
        comments.setdefault(code.strip(), []).append(comment)
    reworded = []
    for line in theirs:
        code, comment = parts(line)
        before = comments.get(code.strip(), [])
        if not comment or comment in before or "DAPO" in comment or comment.startswith("---"):
            continue
        close = difflib.get_close_matches(comment, before, 1, 0.0 if code.strip() else 0.85)
        if close and line.strip() not in METHOD:
            reworded += [close[0], line]
    assert not reworded, "\n".join(reworded)
