"""
One HTML page of a run, or of several over each other: curves, samples, settings, and health in words.

    python report.py out/grpo-algebra-...               # writes report.html in the folder
    python report.py out/run0 out/run1 out/run2         # into the first folder; named by what differs

The page needs neither a network nor a server. runtime/report.html draws it; runtime/health.py has the rules of
health. A page of long runs holds a part of what they logged: curves are thinned out, though their peaks stay,
and samples are those of evenly spaced steps.
"""
import ast
import contextlib
import glob
import html
import json
import math
import os
import re
import sys
from collections import defaultdict

from configurator import check, fail
from runtime.health import findings, series
from runtime.safe_files import opened

HERE = os.path.dirname(os.path.abspath(__file__))
# Of all runs together: with so many points of curves and bytes of samples a page stays under 5 MB.
POINTS, SAMPLE_BYTES = 60_000, 3_200_000
AT_END = 10_000_000             # bytes of logs of which a page is made in less than half a second

# The panels: a title, the metrics in it as a regular expression, and a scale: "", "log", or "share" (0 to 1).
PANELS = (
    ("Reward", r"reward|rewards/.+/mean", ""),
    ("Evaluation", r"eval\w*/(mean|pass|maj)@\d+", ""),
    ("Evaluation by set", r"eval\w*/.+/mean@\d+", ""),
    ("Tokens per completion", r"(completions|eval\w*)/mean_length", ""),
    ("Share of completions cut off", r"(completions|eval\w*)/clipped_ratio", "share"),
    ("Entropy, nats per token", r"entropy", ""),
    ("Share of groups without a spread", r"frac_reward_zero_std", "share"),
    ("Norm of the gradient", r"(.+/)?grad_norm", "log"),
    ("Gap between engine and trainer, nats", r"sampling/sampling_logp_difference/(mean|max)", "log"),
    ("KL to the reference model, nats per token", r"kl", ""),
    ("Share of tokens clipped", r"clip_ratio/(low|high)_mean", ""),
    ("Updates skipped, completions without a score", r".+/skipped_updates|rewards/(unscored|timeouts)", ""),
    ("Explained variance of the critic", r"critic/vf_explained_var", ""),
    ("Seconds by phase", r"timing_s/.+", ""),
    ("Staleness, steps", r"async/staleness/.+", ""),
    ("Turns and calls of tools per episode", r"episodes/turns|tools/call_frequency", ""),
    ("How episodes end", r"episodes/ended/.+", "share"))


def read_run(folder):
    """A run's lines of metrics, its settings, and their defaults: those of the script as it ran."""
    for name in ("config.json", "metrics.jsonl"):
        check(os.path.isfile(os.path.join(folder, name)), f"{folder} is not the folder of a run: no {name}")
    with open(os.path.join(folder, "config.json")) as config, open(f"{folder}/metrics.jsonl", "rb") as file:
        settings, lines = json.load(config), [*filter(None, map(parsed, file))]
    scripts, defaults = sorted(glob.glob(os.path.join(glob.escape(folder), "*.py"))), {}
    for path in [*scripts, os.path.join(HERE, "config", "shared.py")]:
        with open(path, "rb") as file:
            for node in ast.parse(file.read()).body:
                if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                    with contextlib.suppress(ValueError):
                        defaults.setdefault(node.targets[0].id, ast.literal_eval(node.value))
    settings = {"script": ", ".join(map(os.path.basename, scripts))} | settings
    return lines, {k: v for k, v in settings.items() if k not in ("checksums", "out_dir", "resume")}, defaults


def parsed(line):
    # The last line of a run that was killed may be cut off. JavaScript's JSON has no NaN.
    with contextlib.suppress(ValueError):
        return json.loads(line, parse_constant=lambda name: None)


def read_samples(folder, budget):
    """The samples of as many steps as fit into a budget of bytes, evenly spaced, and of 125 at most."""
    path, places, end = os.path.join(folder, "samples.jsonl"), defaultdict(list), 0
    if not os.path.isfile(path):
        return []
    with open(path, "rb") as file:
        for line in file:
            if step := re.match(rb'\{"step": (\d+)', line):
                places[int(step[1])].append((end, len(line)))
            end += len(line)
        steps, count, chosen = sorted(places), min(len(places), 125), []
        while count and (not chosen or sum(size for _, size in chosen) > budget and count > 1):
            count = count if not chosen else count * 3 // 4
            spaced = [steps[i * (len(steps) - 1) // max(count - 1, 1)] for i in range(count)]
            chosen = [place for step in spaced for place in places[step]]
        found = []
        for offset, size in chosen:
            file.seek(offset)
            budget -= size
            if budget >= 0 or not found:
                found.append(parsed(file.read(size)))
    return [*filter(None, found)]


def thinned(points, most):
    """Steps and values of a curve, in most points: the lowest and highest of each of most / 2 stretches."""
    size = math.ceil(2 * len(points) / most) if len(points) > most else 1
    stretches = [points[i:i + size] for i in range(0, len(points), size)]
    points = [point for stretch in stretches
              for point in sorted({pick(stretch, key=lambda point: point[1]) for pick in (min, max)})]
    return [step for step, _ in points], [float(f"{value:.5g}") for _, value in points]


def summary(lines):
    """What the page says of a run in a line: its length, time and first evaluation against the last."""
    texts = [f"to step {max((line['step'] for line in lines), default=0)}",
             f"{sum(value for _, value in series(lines, 'timing_s/step')) / 60:.1f} min"]
    for name in ("reward", *sorted({key for line in lines for key in line if re.match(r"eval/[a-z]+@", key)})):
        if points := series(lines, name):
            texts.append(f"{name} {points[0][1]:.3g} → {points[-1][1]:.3g}")
    return texts


def page(folders):
    """The HTML of the page, as a string."""
    read = [read_run(folder) for folder in folders]
    keys = [*dict.fromkeys(key for _, settings, _ in read for key in settings)]
    differ = [key for key in keys if len({repr(settings.get(key)) for _, settings, _ in read}) > 1]
    labels = [", ".join(f"{key}={settings.get(key)}" for key in differ[:2]) for _, settings, _ in read]
    known, panels, drawn = sorted({name for lines, *_ in read for line in lines for name in line}), [], {}
    for title, pattern, scale in PANELS:
        metrics, least = [], 0.01 if title.startswith("Seconds") else 0.0
        for metric in filter(re.compile(pattern).fullmatch, known):
            curves = [series(lines, metric) for lines, *_ in read]
            # What is 0 in all runs, or the same as another metric, says nothing.
            if curves not in drawn.values() and any(abs(y) > least for curve in curves for _, y in curve):
                drawn[metric] = curves
                metrics.append(metric)
        # With several runs a color is a run, so each metric has a panel of its own.
        panels += [{"title": metric if len(read) > 1 else title, "scale": scale, "metrics": some}
                   for some in ([[m] for m in metrics] if len(read) > 1 else [metrics]) for metric in some[:1]]
    most = min(600, POINTS // max(len(read) * len(drawn), 1))
    runs = [{"name": label if labels.count(label) == 1 and label else
             " ".join([label, os.path.basename(os.path.normpath(folder))]).strip(),
             "summary": [folder, *summary(lines)], "findings": findings(lines, settings),
             "curves": {metric: thinned(curves[i], most) for metric, curves in drawn.items() if curves[i]},
             "samples": read_samples(folder, SAMPLE_BYTES // len(read)),
             "settings": {key: [str(settings.get(key, "")), str(defaults.get(key, settings.get(key, "")))]
                          for key in keys}}
            for i, (folder, label, (lines, settings, defaults)) in enumerate(zip(folders, labels, read))]
    text = json.dumps({"runs": runs, "panels": panels}, ensure_ascii=False, separators=(",", ":"))
    with open(os.path.join(HERE, "runtime", "report.html"), encoding="utf-8") as template:
        # Neither </script> nor <!-- may stand in a script element.
        return template.read().replace("DATA", text.replace("<", r"\u003c"), 1).replace(
            "TITLE", html.escape(runs[0]["name"] if len(runs) == 1 else f"{len(runs)} runs"), 1)


def write(folders):
    """Write report.html into the first of the folders, and return its path."""
    path = os.path.join(folders[0], "report.html")
    text = page(folders)
    # Half a surrogate pair, which a sample may hold, is written as its escape: valid in JSON.
    with opened(path, "wb") as file:
        file.write(text.encode(errors="backslashreplace"))
    return path


def at_end(folder):
    """Write the page of a run that has just ended, if that takes less than half a second; returns what to say."""
    logs = (os.path.join(folder, name) for name in ("metrics.jsonl", "samples.jsonl"))
    if sum(map(os.path.getsize, logs)) > AT_END:
        return f"python report.py {folder} writes a page with curves, samples and health."
    try:
        return f"{write([folder])}: curves, samples and health"
    except OSError as error:
        return f"the report could not be written: {error}"


if __name__ == "__main__":
    check(len(sys.argv) > 1 and not sys.argv[1].startswith("-"), __doc__.strip())
    try:
        print(write(sys.argv[1:]))
    except OSError as error:
        fail(f"the report cannot be written: {error}")
