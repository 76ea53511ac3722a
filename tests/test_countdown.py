"""The task of recipes/countdown.diff, which test_docs.py applies before it runs these tests."""
import re

import pytest

import rewards
from tasks import generate_problems, more_problems

if "countdown" not in more_problems.GENERATORS:
    pytest.skip("recipes/countdown.diff adds countdown", allow_module_level=True)


@pytest.mark.parametrize("difficulty", [1, 2, 3])
def test_countdown_is_solvable(difficulty):
    rows = [row for _, row in generate_problems.generated_rows("countdown", "train", 300, 0, difficulty)]
    for row in rows:
        assert row["solution"] == f"Answer: {row['answer']}" and len(row["numbers"]) == difficulty + 2
        numbers = ", ".join(map(str, row["numbers"]))
        assert row["prompt"][0]["content"] == f"Use {numbers} once each to make {row['target']}"
        assert row["target"] >= 0 and eval(row["answer"]) == row["target"]
        assert sorted(map(int, re.findall(r"\d+", row["answer"]))) == row["numbers"]
    completions = [[{"role": "assistant", "content": row["solution"]}] for row in rows]
    numbers, targets = zip(*[(row["numbers"], row["target"]) for row in rows])
    assert rewards.countdown(None, completions, numbers, targets) == [1.0] * 300
    assert set("+-*/") <= set("".join(row["answer"] for row in rows))


@pytest.mark.parametrize("text, numbers, target, reward", [
    ("Answer: 3+5+8", [3, 5, 8], 16, 1.0),
    ("Answer: 8 + (5 + 3) = 16", [3, 5, 8], 16, 1.0),
    ("so \\boxed{(8-5)\\times 3}", [3, 5, 8], 9, 1.0),
    ("#### 8/(3-8/3)", [3, 3, 8, 8], 24, 1.0),                      # 24 in exact fractions only
    ("Answer: 3*5+8.", [3, 5, 8], 23, 1.0),
    ("Answer: 5÷5+8−8", [5, 5, 8, 8], 1, 1.0),
    ("Answer: 3+5+8", [3, 5, 8], 17, 0.0),
    ("Answer: 8+8", [3, 5, 8], 16, 0.0),                             # not every number
    ("Answer: 3+5+8+0", [3, 5, 8], 16, 0.0),                         # another number
    ("Answer: 3+5+8+5-5", [3, 5, 8], 16, 0.0),                       # one twice
    ("Answer: 35-8", [3, 5, 8], 27, 0.0),                            # digits joined
    ("Answer: 2^3+5", [2, 3, 5], 13, 0.0),
    ("Answer: 2**3+5", [2, 3, 5], 13, 0.0),
    ("Answer: 1 4/2", [1, 2, 4], 3, 0.0),                            # not a mixed number
    ("Answer: 16", [3, 5, 8], 16, 0.0),
    ("Answer: 5/(3-3)", [3, 3, 5], 0, 0.0),
    ("Answer: (3+5+8", [3, 5, 8], 16, 0.0),
    ("Answer: 3(5+8)", [3, 5, 8], 39, 1.0),                          # a product
    ("3+5+8", [3, 5, 8], 16, 1.0),                                   # nothing but an answer
    ("It is 3+5+8, I think", [3, 5, 8], 16, 0.0),                    # no answer marked
    ("Answer: __import__('os').system('false') or 3+5+8", [3, 5, 8], 16, 0.0),
    ("Answer: (lambda: 3+5+8)()", [3, 5, 8], 16, 0.0),
    ("Answer: " + "(" * 9999 + "3+5+8" + ")" * 9999, [3, 5, 8], 16, 0.0),
])
def test_countdown_reward(text, numbers, target, reward):
    assert rewards.countdown(["p"], [text], [numbers], [target]) == [reward]
