"""The report of a run: rules of health, what the page holds, and how a real browser shows it."""
import html
import itertools
import json
import os
import random
import re
import shutil
import subprocess
from types import SimpleNamespace

import pytest

import report
from runs import ROOT, launch
from options import health

GAP, ZERO_STD = "sampling/sampling_logp_difference/mean", "frac_reward_zero_std"


def broken(lines, **settings):
    return [found["metric"] for found in health.findings(lines, settings)]


def curve(name, *values):
    return [{"step": step, name: value} for step, value in enumerate(values)]


def test_the_guide_lists_all_rules():
    with open(os.path.join(ROOT, "docs/metrics.md")) as file:
        _, _, table = file.read().partition("| metric | broken | unless |")
    table, _, _ = table.partition("\n\n")
    assert set(re.findall(r"^\| `(\S+)` \|", table, re.M)) == {rule.metric for rule in health.RULES}


@pytest.mark.parametrize("metric, healthy, ill, settings", [
    (GAP, [1e-6] * 10 + [9e-5] * 20, [1e-6] * 10 + [1.1e-4] * 20, {}),
    # Five times what it was.
    (GAP, [0.01] * 10 + [0.049] * 20, [0.01] * 10 + [0.051] * 20, {}),
    (GAP, [1e-6] * 10 + [0.09] * 20, [1e-6] * 10 + [0.11] * 20, {"max_staleness": 4}),
    ("entropy", [1.0] * 10 + [0.11] * 20, [1.0] * 10 + [0.09] * 20, {}),
    # Half of what it gained, and a third of its best.
    ("reward", [0.0] * 5 + [0.9] * 10 + [0.46] * 10, [0.0] * 5 + [0.9] * 10 + [0.44] * 10, {}),
    ("reward", [0.7] * 5 + [0.9] * 10 + [0.61] * 10, [0.7] * 5 + [0.9] * 10 + [0.59] * 10, {}),
    ("reward", [-1.0] * 30, [-1.0] * 5 + [-0.5] * 10 + [-0.8] * 10, {}),
    (ZERO_STD, [0.89] * 30, [0.91] * 30, {"num_generations": 8}),
    ("completions/clipped_ratio", [0.19] * 30, [0.21] * 30, {}),
    ("actor/skipped_updates", [0] * 30, [0] * 10 + [1] + [0] * 19, {}),
    ("kl", [0.29] * 30, [0.001] * 5 + [0.31] * 20, {}),
    ("kl", [0.2] * 5 + [0.99] * 20, [0.2] * 5 + [1.01] * 20, {})])
def test_a_rule_fires_beyond_its_threshold_only(metric, healthy, ill, settings):
    assert broken(curve(metric, *healthy), **settings) == []
    (found,) = health.findings(curve(metric, *ill), settings)
    assert found["metric"] == metric and metric in found["text"] and "Try " in found["text"]
    assert "{" not in found["text"]


def test_a_finding_says_when_how_far_and_what_to_try():
    values = [1.0] * 10 + [0.05] * 10 + [1.0] * 10
    (found,) = health.findings(curve("entropy", *values), {"learning_rate": 3e-4})
    # The mean over five steps is under 0.1 where all five are low.
    assert (found["first"], found["last"]) == (14, 19)
    assert "under 0.1 between steps 14 and 19, at worst 0.05. Try a smaller learning_rate (now 0.0003)" in \
        found["text"]
    (found,) = health.findings(curve("entropy", *values[:20]), {})
    assert "since step 14" in found["text"] and "(now not set)" in found["text"]


def test_findings_come_in_the_order_of_their_beginning():
    """Completions were cut off before the entropy collapsed, although its rule stands first."""
    lines = [{"step": i, "completions/clipped_ratio": float(i > 5), "entropy": 1.0 if i < 20 else 0.01}
             for i in range(40)]
    first, second = health.findings(lines, {})
    assert (first["metric"], second["metric"]) == ("completions/clipped_ratio", "entropy")
    assert first["first"] < second["first"]


def test_rules_need_their_figures():
    """No rule fires in a run of four steps, without metrics, for NaN and None, or for an outlier."""
    assert broken([]) == [] and broken([{"step": 0}]) == []
    assert broken(curve("completions/clipped_ratio", *[1.0] * 4)) == []
    assert broken(curve("entropy", *[1.0] * 8, *[float("nan"), None] * 10)) == []
    assert broken(curve("reward", *[0.5] * 8, 0.0, *[0.5] * 8)) == []
    noise = random.Random(0)
    assert broken(curve("reward", *(0.3 + 0.2 * noise.random() for _ in range(1000)))) == []
    # A group of one has no spread.
    assert broken(curve(ZERO_STD, *[1.0] * 30), num_generations=1) == []


def test_a_solved_task_needs_neither_entropy_nor_spread():
    def run(rewards, best):
        return [{"step": i, "reward": reward, "entropy": 1.0 if i < 10 else 0.01, ZERO_STD: min(i / 20, 1.0)}
                | ({"eval/pass@4": best} if i % 10 == 0 else {}) for i, reward in enumerate(rewards)]
    climbing = [0.2] * 10 + [0.95] * 20
    assert broken(run(climbing, 1.0)) == []
    # The best of four samples would still gain 0.3.
    assert broken(run([0.2] * 10 + [0.7] * 20, 1.0)) == ["entropy", ZERO_STD]
    assert broken(run([0.2] * 10 + [0.7] * 20, 0.75)) == []
    # Without an evaluation nobody knows what could be gained.
    assert broken([{**line, "eval/pass@4": None} for line in run(climbing, 1.0)]) == ["entropy", ZERO_STD]


def test_rewards_that_are_always_the_same_are_told_of():
    """At pass@k = 0 nothing is solved."""
    for reward in (0.0, 1.0):
        lines = [{"step": step, "reward": reward, ZERO_STD: 1.0, "eval/pass@4": reward} for step in range(30)]
        assert broken(lines) == [ZERO_STD]


def test_scores_of_the_first_steps_that_are_all_the_same_are_told_of():
    """All of them in one text, otherwise in one for each source in which they are."""
    def rollouts(samples):
        return [SimpleNamespace(row={"source": source, "answer": truth}, score=score, answer={True: "7", False: "", None: None}[answered],
                                completion=completion) for source, score, answered, completion, truth in samples]

    def told(*samples):
        texts = health.same_scores(rollouts(samples), 3).split("\n    All")
        return [" ".join(text.split()) for text in texts if text]
    silent = [("", 0.0, False, "a", "1"), ("", 1.0, True, "b", "2")]
    assert told(*silent) == told() == []
    all_the_same = [("a", 0.0, True, "So it is\n18", "18"), ("b", 0.0, False, "?", "proof"), ("b", 0.0, False, "", "proof")]
    (words,) = told(*all_the_same)
    assert words.startswith("All 3 scores in the first 3 steps are 0, so they teach nothing.")
    assert words.endswith(r"where '18' is right, ends with 'So it is\n18'. In 2 of them no answer was found.")
    assert all(len(line) <= 80 for line in health.same_scores(rollouts(all_the_same), 3).splitlines())
    (words,) = told(*silent, *all_the_same[1:], ("c", 1.0, None, "x", "3"), ("c", 0.5, None, "y", "3"))
    assert "All 2 scores of the source b in the first 3 steps are 0" in words and "where 'proof' is right" in words
    (words,) = told(*silent, ("d", 1.0, None, "x", "{}"))
    assert "All 1 scores of the source d in the first 3 steps are 1" in words and "no answer" not in words
    # These are a few prompts of many sources.
    assert told(*silent * 5, ("d", 1.0, None, "x", "{}")) == []


def test_a_run_says_what_is_broken_now_and_once():
    lines, told, steps = [], set(), itertools.count()

    def go_on(*values):
        lines.extend({"step": next(steps), "completions/clipped_ratio": value} for value in values)
        return health.news(lines, {"max_completion_length": 64}, told)
    assert go_on() == [] and go_on(*[0.0] * 10) == []
    # It was over before the evaluation: no news.
    assert go_on(*[1.0] * 6, *[0.0] * 12) == []
    (text,) = go_on(*[1.0] * 8)
    words = " ".join(text.split())
    assert "over 0.2 since step 29, at worst 1. Try a reward that does not pay for length" in words, words
    assert "max_completion_length (now 64)" in words
    assert all(len(line) <= 80 for line in text.splitlines())
    assert go_on(*[1.0] * 8) == []


# ------------------------------------------------------------------------------------------------------------
EVIL = '</script><script>document.title = "taken"</script><b>bold</b><!-- &lt; \ud800 \u2028 \x1b'


def write_run(folder, count=20, samples=8, tokens=6, text="a", **settings):
    """A made-up run: settings, metrics and samples."""
    os.makedirs(folder)
    randoms = random.Random(0)
    (folder / "config.json").write_text(json.dumps(
        {"learning_rate": 1e-4, "seed": 0, "task": "algebra", "out_dir": str(folder), "checksums": {},
         "defaults": {"learning_rate": 1e-4}} | settings))
    with open(folder / "metrics.jsonl", "w") as file:
        for step in range(count):
            reward = step / count + randoms.random() / 10
            line = {"step": step, "reward": reward, "rewards/same/mean": reward,
                    "entropy": 1 - 0.5 * step / count, "grad_norm": randoms.random() + 0.1,
                    GAP: 1e-6 + 1e-7 * randoms.random(),
                    "sampling/sampling_logp_difference/max": 1e-5, ZERO_STD: 0.25,
                    "completions/mean_length": 20 + randoms.random(), "completions/clipped_ratio": 0.0,
                    "kl": 0.0, "timing_s/gen": randoms.random(), "timing_s/step": 2 + randoms.random()}
            line |= {f"rewards/part{i}/mean": randoms.random() for i in range(30)}
            if step % 10 == 0:
                line |= {"eval/mean@4": step / count, "eval/pass@4": 1.0,
                         "eval/hard/mean@4": step / 2 / count}
            file.write(json.dumps(line) + "\n")
        file.write('{"step": 999, "rewa')
    with open(folder / "samples.jsonl", "w") as file:
        for step in range(count):
            for _ in range(samples):
                file.write(json.dumps({
                    "step": step, "prompt": [{"role": "user", "content": f"{text}?"}], "completion": text,
                    "reward": float("nan"), "finish_reason": "stop", "truth": text,
                    "tokens": [[text, *["xyzw"] * (tokens - 1)]], "logprobs": [-0.123] * tokens}) + "\n")
    return str(folder)


def content(path):
    """What a page's script gets."""
    with open(path) as file:
        text = file.read()
    assert text.count("<script") == text.count("</script>") == 2
    return json.loads(re.search(r'type="application/json">(.*?)</script>', text, re.S)[1])


def drawn(found):
    return {metric: each for panel in found["panels"] for metric, each in panel["curves"].items()}


def test_the_page_of_a_run(tmp_path):
    path = report.write([write_run(tmp_path / "run", learning_rate=1e-3, text=EVIL)])
    assert path == str(tmp_path / "run" / "report.html")
    found = content(path)
    (run,) = found["runs"]
    assert run["name"] == "run" and run["findings"] == [] and "to step 19" in run["summary"]
    assert run["summary"][0] == "eval/mean@4 0 → 0.5"           # the headline
    settings = {key: values for key, *values in found["settings"]}
    assert settings["learning_rate"] == ["0.001", "0.0001"] and settings["seed"] == ["0", "0"]
    assert not {"out_dir", "checksums"} & settings.keys()
    # What is 0 throughout is not drawn, and what is twice in a panel once.
    curves = drawn(found)
    assert "kl" not in curves and curves["eval/mean@4"] == [[[0, 10], [0.0, 0.5]]]
    assert "reward" in curves and "rewards/same/mean" not in curves
    # Text comes as it was, whatever it holds.
    first = run["samples"]["0"][0]
    assert first["truth"] == first["completion"] == EVIL.replace("\ud800", "?") and first["reward"] is None
    assert {step: len(some) for step, some in run["samples"].items()} == {str(step): 8 for step in range(20)}


def test_several_runs_are_named_by_what_differs(tmp_path):
    folders = [write_run(tmp_path / name, **given) for name, given in (
        ("one", {}), ("two", {"seed": 1}), ("three", {"seed": 1, "learning_rate": 1e-3}),
        ("four", {"seed": 1}))]
    found = content(report.write(folders))
    assert [run["name"] for run in found["runs"]] == [
        "learning_rate=0.0001, seed=0", "learning_rate=0.0001, seed=1 two", "learning_rate=0.001, seed=1",
        "learning_rate=0.0001, seed=1 four"]
    assert all(len(each) == 4 for each in drawn(found).values())
    assert ["seed", "0", "1", "1", "1", "0"] in found["settings"]
    assert not os.path.exists(os.path.join(folders[1], "report.html"))
    found = content(report.write([folders[1], folders[3]]))
    assert [run["name"] for run in found["runs"]] == ["two", "four"]


def test_a_long_run_fits_into_five_megabytes(tmp_path):
    folder = write_run(tmp_path / "run", count=10_000, samples=8, tokens=30)
    path = report.write([folder])
    found = content(path)
    samples, (steps, values) = found["runs"][0]["samples"], drawn(found)["grad_norm"][0]
    assert os.path.getsize(path) < 5e6 and sum(map(len, samples.values())) == 1000
    assert {"0", "9999"} < samples.keys()
    assert all(len(xs) == len(ys) <= 600 for each in drawn(found).values() for xs, ys in each)
    # Its peaks stay.
    with open(os.path.join(folder, "metrics.jsonl")) as file:
        logged = [json.loads(line)["grad_norm"] for line in file if line.endswith("}\n")]
    assert [min(values), max(values)] == pytest.approx([min(logged), max(logged)], rel=1e-4)
    assert steps == sorted(steps) and values == pytest.approx([logged[step] for step in steps], rel=1e-4)


def test_long_samples_fit_as_well(tmp_path):
    path = report.write([write_run(tmp_path / "run", count=40, samples=8, tokens=10_000)])
    (run,) = content(path)["runs"]
    assert os.path.getsize(path) < 5e6 and 8 <= sum(map(len, run["samples"].values())) < 100


def test_a_folder_that_is_no_run_is_named(tmp_path):
    said = launch("report.py", tmp_path, code=1)
    assert f"there is no report: [Errno 2] No such file or directory: '{tmp_path}/config.json'" in said
    assert "python report.py out/" in launch("report.py", code=1)
    for name in ("config.json", "metrics.jsonl"):
        (tmp_path / name).write_text('{"a": 1')
    assert f"{tmp_path}: there is no report: Expecting" in launch("report.py", tmp_path, code=1)


# ------------------------------------------------------------------------------------------------------------
def in_browser(page, profile):
    """The page's DOM once its script has run, and what it wrote to the console."""
    shown = subprocess.run(
        ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync",
         f"--user-data-dir={profile}", "--enable-logging=stderr", "--virtual-time-budget=3000", "--dump-dom",
         f"file://{page}"], capture_output=True, text=True, errors="replace", timeout=120)
    assert "</html>" in shown.stdout, shown.stderr
    return shown.stdout, [line for line in shown.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.skipif(not shutil.which("chromium"), reason="needs a browser: apt-get install chromium")
def test_a_browser_draws_it(tmp_path):
    """No error on its console, curves and samples are drawn, and a sample's text stays text."""
    folders = [write_run(tmp_path / name, text=EVIL, seed=seed) for seed, name in enumerate("ab")]
    talk = [{"role": "assistant", "content": "48"}, {"role": "user", "content": "lower"},
            {"role": "assistant", "content": "40"}]
    with open(tmp_path / "a" / "samples.jsonl", "a") as file:
        file.write(json.dumps({
            "step": 20, "prompt": "Guess.", "completion": talk, "reward": 1.0, "truth": None,
            "finish_reason": "stop", "tokens": [["4", "8"], ["4", "0", "<|end|>"]],
            "logprobs": [-0.5, -1.0, -2.0, -3.0, -4.0]}) + "\n")
    for chosen in (folders, folders[:1]):
        page = report.write(chosen)
        dom, errors = in_browser(page, tmp_path / "profile")
        assert errors == []
        assert dom.count('class="curve"') == sum(map(len, drawn(content(page)).values())) >= 10
        assert "NaN" not in re.search("<svg.*</svg>", dom, re.S)[0]
        assert "<title>taken" not in dom and "<b>bold" not in dom
    # The last sample comes first. Its turns are apart, and each token has its logprob.
    sample = dom[dom.rindex('class="sample"'):]
    assert re.findall(r'title="logprob (\S+), probability', sample) == ["-0.5", "-1", "-2", "-3", "-4"]
    assert re.search("prompt: Guess.</pre>.*>8</span>.*user: lower</pre>.*>0</span>", sample, re.S)
    assert "&lt;|end|&gt;</span>" in sample
    # A prompt, a token, the truth and the end of a sample are text, whatever they hold.
    (tmp_path / "a" / "samples.jsonl").write_text(json.dumps(
        {"step": 0, "prompt": EVIL, "completion": EVIL, "reward": 0.0, "truth": EVIL, "finish_reason": EVIL,
         "tokens": [[EVIL]], "logprobs": [0.0]}))
    dom, errors = in_browser(report.write(folders[:1]), tmp_path / "profile")
    assert errors == [] and "<title>taken" not in dom and "<b>bold" not in dom
    assert html.unescape(dom).count("</script><script>document.title") == 4


def test_a_short_breach_later_does_not_hide_a_long_one():
    rewards = [1.0] * 40
    lines = [{"step": step, "completions/clipped_ratio": float(10 <= step < 60 or step in (100, 101)),
              "reward": reward, "rewards/max": reward} for step, reward in enumerate(rewards * 3)]
    (found,) = [one for one in health.findings(lines, {}) if one["metric"] == "completions/clipped_ratio"]
    assert found["first"] < 30 and 50 < found["last"] < 80
