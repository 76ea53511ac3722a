"""bench/record.py: what it counts, against a loop, and by a stub what it runs."""
import hashlib
import json
import math
import random
import statistics

import pytest

from bench import record

STUB = '''
import json, os, sys
given = dict(word[2:].split("=") for word in sys.argv[1:] if word.startswith("--"))
assert "config/tasks/compose.py" in sys.argv and given["eval_temperature"] == "1", sys.argv
seed, slow = int(given["seed"]), int(given.get("slow", 0))
os.makedirs(given["out_dir"])
with open(given["out_dir"] + "/metrics.jsonl", "w") as file:
    for step in range(4):
        figures = {"completions/sampled_tokens": 100 + seed, "timing_s/step": os.getpid(), "perf/x": os.getpid()}
        if step == 0:
            figures["table/sampled_tokens"] = 1000
        if step % 2 == 0:
            figures["eval/mean@4"] = 0.1 + 0.2 * step - 0.1 * slow
        file.write(json.dumps({"step": step, **figures}) + "\\n")
'''


def test_tokens_until_a_figure_is_reached():
    rng = random.Random(0)
    for _ in range(100):
        steps = []
        for step in range(12):
            figures = {"step": step, "completions/sampled_tokens": rng.randint(1, 99)}
            if rng.random() < 0.4:
                figures["eval/mean@4"] = rng.random()
            if rng.random() < 0.3:
                figures["table/sampled_tokens"] = rng.randint(1, 99)
            steps.append(figures)
        target = rng.random()
        first = next((i for i in range(12) if steps[i].get("eval/mean@4", -1) >= target), None)
        expected = math.nan
        if first is not None:
            expected = sum(figures["completions/sampled_tokens"] + figures.get("table/sampled_tokens", 0)
                           for figures in steps[:first])
        assert record.tokens_until(target, steps) == pytest.approx(expected, nan_ok=True)


def test_five_runs_are_a_line_that_does_not_depend_on_the_machine(tmp_path, monkeypatch, capsys):
    (tmp_path / "stub.py").write_text(STUB)
    monkeypatch.setattr(record, "WORK", str(tmp_path / "runs"))
    outputs = []
    for settings in ([], [], ["--slow=1"]):
        record.main(f"{tmp_path}/stub.py", *settings)
        outputs.append(capsys.readouterr().out)
    first, again, slow = outputs
    row = first.splitlines()[-1]
    mean = statistics.mean(1000 + 200 + 2 * seed for seed in range(5))
    assert f"| {mean:,.0f} ± " in row and "| 0 of 5 seeds |" in row
    assert again.splitlines()[-1] == row
    runs = []
    for seed in range(5):
        runs.append([])
        for step in range(4):
            figures = {"step": step, "completions/sampled_tokens": 100 + seed}
            figures |= {"table/sampled_tokens": 1000} if step == 0 else {}
            figures |= {"eval/mean@4": 0.1 + 0.2 * step} if step % 2 == 0 else {}
            runs[-1].append(figures)
    digest = hashlib.sha256(json.dumps(runs, sort_keys=True).encode()).hexdigest()
    assert row.endswith(f" | `{digest[:16]}` |")
    # A figure that differs changes the sum, and so does what was reached.
    assert slow.splitlines()[-1].split("|")[2:4] == [" 0 of 5 seeds ", " 0 of 5 seeds "]
    assert digest[:16] not in slow


def test_a_method_is_a_name_or_a_script():
    assert record.command_of("rloo", ["--learning_rate=1e-3"]).startswith(
        "train_grpo.py config/tasks/compose.py config/methods/rloo.py --learning_rate=1e-3 --model=tiny_compose ")
    own = record.command_of("train_mine.py", ["--eval_temperature=0"])
    assert own.startswith("train_mine.py config/tasks/compose.py --eval_temperature=0 ")
    assert own.index("--eval_temperature=1") > own.index("--eval_temperature=0")
