"""The two files that a reader reads stay short: their lines, the loop, its branches, and the settings."""
import ast
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
