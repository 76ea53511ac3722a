"""bench/methods.py: its statistics against slow references, and by a stub that it goes on and reads runs."""
import itertools
import json
import math
import os
import random
import statistics

import mpmath
import pytest

from bench import methods
from runs import ROOT, forked, load_rows, refused, script_path

# ---------------------------------------------------------------- statistics


@pytest.mark.parametrize("df", [1, 2, 3, 4, 9, 30])
def test_student_s_t(df):
    for t in (0.0, 0.3, 1.0, 2.5, 12.0, -2.5):
        # The regularised incomplete beta function.
        reference = mpmath.betainc(df / 2, 0.5, 0, df / (df + t * t), regularized=True)
        assert methods.two_sided(t, df) == pytest.approx(float(reference), rel=1e-9)
    assert methods.two_sided(methods.quantile(df), df) == pytest.approx(0.05, abs=1e-6)


def test_student_s_t_in_a_table():
    for df, quantile in ((1, 12.706), (2, 4.303), (4, 2.776), (9, 2.262)):
        assert methods.quantile(df) == pytest.approx(quantile, abs=6e-4)


def test_an_interval_holds_the_mean_as_often_as_it_says():
    rng, held = random.Random(0), 0
    width = methods.quantile(3)
    for _ in range(4000):
        values = [rng.gauss(0.3, 0.02) for _ in range(4)]
        held += abs(statistics.mean(values) - 0.3) <= width * statistics.stdev(values) / 2
    assert held / 4000 == pytest.approx(0.95, abs=0.012)
    assert methods.half_width(values) == pytest.approx(width * statistics.stdev(values) / 2)
    assert math.isnan(methods.half_width([0.3]))


def test_a_paired_test():
    rng = random.Random(1)
    for n in (2, 3, 5, 8):
        differences = [rng.gauss(0.03, 0.05) for _ in range(n)]
        mean = sum(differences) / n
        variance = sum((one - mean) ** 2 for one in differences) / (n - 1)
        squared = mean ** 2 * n / variance
        reference = mpmath.betainc((n - 1) / 2, 0.5, 0, (n - 1) / (n - 1 + squared), regularized=True)
        assert methods.paired_p(differences) == pytest.approx(float(reference), rel=1e-9)
    assert methods.paired_p([0.0, 0.0]) == 1 and methods.paired_p([0.1, 0.1]) == 0
    assert math.isnan(methods.paired_p([0.1]))
    # Where there is nothing to find, one test in twenty finds something.
    found = sum(methods.paired_p([rng.gauss(0, 1) for _ in range(4)]) < 0.05 for _ in range(1000))
    assert 25 <= found <= 80


def test_holm():
    """Against its definition: p is below a level after the correction if Holm's procedure rejects at it."""
    rng = random.Random(2)
    for _ in range(50):
        ps = [rng.random() ** 3 for _ in range(rng.randint(1, 6))]
        corrected = methods.holm(ps)
        for level in (0.01, 0.05, 0.2, 0.5):
            rejected, left = set(), sorted(range(len(ps)), key=lambda i: ps[i])
            while left and ps[left[0]] <= level / len(left):
                rejected.add(left.pop(0))
            assert {i for i, p in enumerate(corrected) if p <= level} == rejected
    assert methods.holm([0.03, math.nan])[0] == 0.03 and math.isnan(methods.holm([0.03, math.nan])[1])


def test_spearman():
    rng = random.Random(3)
    for _ in range(50):
        n = rng.randint(3, 9)
        a, b = ([rng.random() for _ in range(n)] for _ in "ab")
        places = [[sorted(side).index(value) for value in side] for side in (a, b)]
        squares = sum((i - j) ** 2 for i, j in zip(*places))
        assert methods.spearman(a, b) == pytest.approx(1 - 6 * squares / (n * (n * n - 1)))
    # Values that are equal have the mean of their ranks over all orders in which they could stand.
    tied = [0.2, 0.1, 0.2, 0.3, 0.2]
    orders = [[sorted(range(5), key=lambda i: (tied[i], tie[i])).index(i) + 1 for i in range(5)]
              for tie in itertools.permutations(range(5))]
    assert methods.ranks(tied) == pytest.approx([statistics.mean(place) for place in zip(*orders)])
    assert math.isnan(methods.spearman([1, 1, 1], [1, 2, 3])) and math.isnan(methods.spearman([1, 2], [1, 2]))


def test_the_order_of_methods_on_disjoint_seeds():
    def runs(**after):
        return {name: {seed: {"after": value} for seed, value in enumerate(values)}
                for name, values in after.items()}
    same = runs(a=[0.1, 0.1, 0.1], b=[0.2, 0.2, 0.2], c=[0.3, 0.3, 0.3], d=[0.9])
    assert methods.agreement(same) == (pytest.approx(1), 3, [0, 1, 2])
    # Seeds 0 and 2 have the order a, b, c, seed 1 has the other one.
    turned = runs(a=[0.1, 0.6, 0.1], b=[0.2, 0.5, 0.2], c=[0.3, 0.4, 0.3])
    assert methods.agreement(turned)[0] == pytest.approx(-1)
    assert math.isnan(methods.agreement(runs(a=[0.1, 0.2], b=[0.2, 0.1]))[0])


# ---------------------------------------------------------------- runs

STUB = '''
import json, os, sys, time
while time.process_time() < 0.3:
    pass
given = dict(one[2:].split("=") for one in sys.argv[1:])
folder, seed, rate = given["out_dir"], int(given["seed"]), float(given["learning_rate"])
here = os.path.dirname(__file__)
with open(f"{here}/calls", "a") as file:
    file.write(f"{seed} {rate:g} {os.environ['OMP_NUM_THREADS']}\\n")
if os.path.exists(f"{here}/fails-{seed}"):
    sys.exit("no luck")
assert not os.path.exists(folder)
os.makedirs(folder)
with open(f"{folder}/config.json", "w") as file:
    json.dump({"prompts_per_step": 4, "num_generations": 2}, file)
figures = lambda value: {f"eval/{depth}{k}@4": value for depth in ("", "depth 2/", "depth 3/")
                         for k in ("mean", "pass")}
after = 0.4 + seed / 1000 - abs(rate - 1e-3) * 100
with open(f"{folder}/metrics.jsonl", "w") as file:
    for line in ({"step": 0, "timing_s/step": 5, "timing_s/eval": 2, **figures(0.1)},
                 {"step": 1, "timing_s/step": 3, "train/num_gen_batches": 3},
                 {"step": 2, "timing_s/step": 2, "timing_s/eval": 2, **figures(after)}):
        file.write(json.dumps(line) + "\\n")
'''


@pytest.fixture
def command(tmp_path):
    (tmp_path / "stub.py").write_text(STUB)
    return ["-m", "bench.methods", "--methods=stub", f"--add=stub={tmp_path}/stub.py",
            f"--results={tmp_path}/lines.jsonl", f"--work={tmp_path}/work", f"--out={tmp_path}"]


def calls(tmp_path):
    return sorted((tmp_path / "calls").read_text().splitlines())


def test_it_goes_on_where_it_stopped(command, tmp_path):
    (tmp_path / "fails-1").touch()
    output = forked(tmp_path / "log", *command, "--seeds=0,1,2", "--tune=false", code=2)
    last = output.splitlines()[-1]
    assert "no luck" in output and "failed: " in last and "--seed=1" in last
    assert calls(tmp_path) == ["0 0.0005 1", "1 0.0005 1", "2 0.0005 1"]
    (tmp_path / "fails-1").unlink()
    output = forked(tmp_path / "log", *command, "--seeds=0,1,2,3", "--tune=false", "--jobs=2")
    assert calls(tmp_path) == ["0 0.0005 1", "1 0.0005 1", "1 0.0005 1", "2 0.0005 1", "3 0.0005 1"]
    lines = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    assert sorted(line["seed"] for line in lines) == [0, 1, 2, 3]
    assert all(0.3 <= line["processor_seconds"] < 30 for line in lines)
    assert {key: value for key, value in lines[0].items() if key not in ("command", "processor_seconds")} == {
        "method": "stub", "seed": 0, "learning_rate": 5e-4, "stress": False, "problems": 0, "before": 0.1,
        "after": 0.35, "depths": {"depth 2": 0.35, "depth 3": 0.35}, "pass@4": 0.35, "completions": 8 * 4, "seconds": 6}
    assert "| stub | 0.0005 | 4 | 0.351 ± 0.002 |" in output
    # It runs nothing twice, and shows what is there also where nothing is to be run.
    forked(tmp_path / "log", *command, "--seeds=0,1,2,3", "--tune=false")
    output = forked(tmp_path / "log", "-m", "bench.methods", "--methods=none", *command[4:])
    assert "| stub | 0.0005 | 4 |" in output and len(calls(tmp_path)) == 5
    assert (tmp_path / "methods.svg").read_text().count("<circle") == 4


def test_the_learning_rate_is_chosen_by_another_seed(command, tmp_path):
    output = forked(tmp_path / "log", *command, "--seeds=0,2")
    assert calls(tmp_path) == sorted([f"{seed} 0.0005 1" for seed in (0, 2, 100)] + [
        "100 0.00025 1", "100 0.001 1", "0 0.001 1", "2 0.001 1"])
    assert "| stub | 0.0005 | 2 | 0.351 ±" in output and "| stub | 0.001 | 2 | 0.401 ±" in output
    # The seed that has chosen, and the learning rates that were not, are not in the picture.
    assert (tmp_path / "methods.svg").read_text().count("<circle") == 4


def test_runs_on_few_problems_have_a_table_of_their_own(command, tmp_path):
    """The method there is another one than without the setting; a line from before the setting has none."""
    forked(tmp_path / "log", *command, "--seeds=0,1", "--tune=false")
    before = (tmp_path / "lines.jsonl").read_text().replace(', "problems": 0', "")
    (tmp_path / "lines.jsonl").write_text(before)
    output = forked(tmp_path / "log", *command, "--seeds=1,2,3", "--tune=false", "--problems=512")
    assert "| stub | 0.0005 | 3 | 0.352 ±" in output and (tmp_path / "methods_512.svg").exists()
    lines = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    assert all(line["command"].endswith(" --train_prompts=512") for line in lines[2:]) and len(lines) == 5
    output = forked(tmp_path / "log", *command, "--seeds=0,1", "--tune=false")
    assert "| stub | 0.0005 | 2 | 0.350 ±" in output and len(calls(tmp_path)) == 5


def test_wrong_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(methods, "work", str(tmp_path))
    methods.wrong_rows(0)
    for split, share in (("train", 0.2), ("eval", 0)):
        rows = [json.loads(line) for line in (tmp_path / f"{split}-0.jsonl").read_text().splitlines()]
        right = {row["prompt"][0]["content"]: row["answer"]
                 for row in load_rows("compose", split, len(rows) if split == "eval" else 0, 0)}
        wrong = [row for row in rows if row["answer"] != right[row["prompt"][0]["content"]]]
        assert len(rows) == len(right) and len(wrong) / len(rows) == pytest.approx(share, abs=0.02)


def test_every_method_has_a_script_and_its_recipe():
    for command in methods.METHODS.values():
        script, *arguments = command.replace("-m bench.trl_grpo", "bench/trl_grpo.py").split()
        for name in [script, *(one for one in arguments if one.endswith(".py"))]:
            with open(os.path.join(ROOT, script_path(name))):
                pass


@pytest.mark.parametrize("arguments, message", [
    (["--methods=grppo"], "methods=grppo: choose from grpo, rloo"),
    (["--methods=ppo", "--stress=true"], "under stress only what train_grpo.py runs, not ppo"),
    (["--methods=trl", "--trl=no/python"], "trl=no/python: no such interpreter"),
    (["--methods=trl", "--stress=true"], "under stress only what train_grpo.py runs, not trl"),
    (["--add=grpo=train_grpo.py"], "write NAME=script.py and its settings, with a name that is new"),
    (["--seeds=0,x"], "seeds=0,x"), (["--seeds=0,100"], "tuning_seed=100 is one of the table's seeds"),
    (["--stress=true", "--problems=9"], "problems=9: under stress there are 4,096"),
    (["--jobs=0"], "jobs=0: must be above 0")])
def test_what_is_refused(tmp_path, arguments, message):
    refused([f"--work={tmp_path}", f"--results={tmp_path}/lines.jsonl", *arguments], message, tmp_path,
            "bench/methods.py")
