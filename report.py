"""
One HTML page of a run, or of several for comparison: curves, samples, settings, and health in words.

    python report.py out/grpo-algebra-...               # writes report.html into the folder
    python report.py out/run0 out/run1 out/run2         # into the first; runs are named by what differs

The page needs neither a network nor a server. runtime/report.html is its template, and options/health.py has
the rules of health. Of a long run the page shows a part: curves are thinned out, but keep their peaks, and
samples are those of evenly spaced steps.
"""
import contextlib
import itertools
import json
import math
import os
import re
import sys
from operator import itemgetter
from pathlib import Path

from options.health import findings, series

# These numbers of points and of bytes of samples keep a page under 5 MB.
POINTS, SAMPLE_BYTES = 60_000, 3_200_000

# The panels: a title, the metrics in it as a regular expression, and a scale: "", "log", or "share" (0 to 1).
PANELS = (
    ("Reward", r"reward|rewards/.+/mean", ""),
    ("Evaluation", r"eval\w*/(mean|pass|maj)@\d+", ""),
    ("Evaluation by set", r"eval\w*/.+/mean@\d+", ""),
    ("Tokens per completion", r"(completions|eval\w*)/mean_length", ""),
    ("Share of completions cut off", r"(completions|eval\w*)/clipped_ratio", "share"),
    ("Entropy, and loss of answers, nats per token", r"entropy|(eval/)?token_loss", ""),
    ("Share of groups without a spread", r"frac_reward_zero_std", "share"),
    ("Norm of the gradient", r"(.+/)?grad_norm", "log"),
    ("Gap between engine and trainer, nats", r"sampling/sampling_logp_difference/(mean|max)", "log"),
    ("KL to the reference model, nats per token", r"kl", ""),
    ("Share of tokens clipped", r"clip_ratio/(low|high)_mean", ""),
    ("Updates skipped, completions without a score", r".+/skipped_updates|rewards/(unscored|timeouts)", ""),
    ("Seconds by phase", r"timing_s/.+", ""),
    ("Staleness, steps", r"async/staleness/.+", ""),
    ("Turns and calls of tools per episode", r"episodes/turns|tools/call_frequency", ""),
    ("How episodes end", r"episodes/ended/.+", "share"))


def read_run(folder):
    """Return a run's lines of metrics, its settings, and the script's defaults of those that were given."""
    settings = json.loads(Path(folder, "config.json").read_bytes())
    with open(f"{folder}/metrics.jsonl", "rb") as metrics:
        lines = whole_lines(metrics)
    defaults = settings.pop("defaults", {})
    for key in ("checksums", "out_dir", "resume"):
        settings.pop(key, None)
    return lines, settings, defaults


def whole_lines(lines):
    # Returns the objects of lines of JSON. The last line of a run that was killed may be cut off.
    objects = []
    for line in lines:
        with contextlib.suppress(ValueError):
            # JavaScript's JSON has no NaN.
            objects.append(json.loads(line, parse_constant=lambda name: None))
    return objects


def read_samples(folder, budget):
    """{step: samples} of evenly spaced steps, at most 125 and about `budget` bytes in all."""
    lines = Path(folder, "samples.jsonl").read_bytes().splitlines(keepends=True)
    steps = [[*group] for _, group in itertools.groupby(lines, lambda line: line.partition(b",")[0])]
    count = min(len(steps), 125, 1 + budget * len(steps) // (1 + sum(map(len, lines))))
    by_step = {}
    for i in range(count):
        samples = whole_lines(steps[i * (len(steps) - 1) // max(count - 1, 1)])
        if samples:
            by_step[samples[0]["step"]] = samples
    return by_step


def thinned(points, most):
    """Steps and values of a curve, at most `most`: the lowest and highest of each of most / 2 stretches."""
    size = math.ceil(2 * len(points) / most) if len(points) > most else 1
    kept = []
    for start in range(0, len(points), size):
        stretch = points[start:start + size]
        lowest = min(stretch, key=itemgetter(1))
        highest = max(stretch, key=itemgetter(1))
        kept += sorted({lowest, highest})
    return [step for step, _ in kept], [float(f"{value:.5g}") for _, value in kept]


def summary(lines, metrics):
    """Return what came out of a run, as texts: first and last scores, what has none, steps and minutes."""
    texts = []
    for pattern in (r"eval/mean@\d+", r"eval/(pass|maj)@\d+", "reward"):
        for metric in filter(re.compile(pattern).fullmatch, metrics):
            values = [value for _, value in series(lines, metric)]
            if values:
                texts.append(f"{metric} {values[0]:.3g} → {values[-1]:.3g}")
    unscored = sum(count for _, count in series(lines, "rewards/unscored"))
    if unscored:
        texts.append(f"{unscored:.0f} completions without a score")
    last_step = max((line["step"] for line in lines), default=0)
    minutes = sum(seconds for _, seconds in series(lines, "timing_s/step")) / 60
    return [*texts, f"to step {last_step}", f"{minutes:.1f} min"]


def panels_of(lines_of_runs, metrics):
    """Return the panels that have curves: title, scale, and {metric: (steps, values) of each run}."""
    most = min(600, POINTS // (len(lines_of_runs) * len(metrics) + 1))
    panels = []
    for title, pattern, scale in PANELS:
        curves = {}
        for metric in filter(re.compile(pattern).fullmatch, metrics):
            curve = []
            for lines in lines_of_runs:
                points = series(lines, metric)
                if scale == "log":                              # where 0, of no gradient, has no place
                    points = [(step, value) for step, value in points if value > 0]
                curve.append(thinned(points, most))
            # A curve that is 0 in all runs, or the same as another one of the panel, is left out.
            if any(any(values) for _, values in curve) and curve not in curves.values():
                curves[metric] = curve
        if curves:
            panels.append({"title": title, "scale": scale, "curves": curves})
    return panels


def page(folders):
    """Return the HTML of the page, as a string."""
    lines_of_runs, settings_of_runs, defaults_of_runs = zip(*map(read_run, folders))
    values = {}                                                 # {setting: its value in each run, as a text}
    for key in itertools.chain(*settings_of_runs):
        values[key] = [str(settings.get(key, "")) for settings in settings_of_runs]
    defaults = {}
    for run_defaults in defaults_of_runs:
        defaults |= {key: str(default) for key, default in run_defaults.items()}
    differing = [key for key in values if len(set(values[key])) > 1][:2]
    names = [", ".join(f"{key}={values[key][i]}" for key in differing) for i in range(len(folders))]
    metrics = sorted(set().union(*itertools.chain(*lines_of_runs)))
    runs = []
    for folder, name, lines, settings in zip(folders, names, lines_of_runs, settings_of_runs):
        if not name or names.count(name) > 1:
            name = f"{name} {os.path.basename(folder)}".strip()
        runs.append({"name": name, "summary": summary(lines, metrics), "findings": findings(lines, settings),
                     "samples": read_samples(folder, SAMPLE_BYTES // len(folders))})
    rows = [[key, *texts, defaults.get(key, texts[0])] for key, texts in values.items()]
    data = {"runs": runs, "panels": panels_of(lines_of_runs, metrics), "settings": rows}
    text = json.dumps(data, ensure_ascii=False)
    template = Path(__file__).with_name("runtime") / "report.html"
    # Neither </script> nor <!-- may stand in a script element.
    return template.read_text("utf-8").replace("DATA", text.replace("<", r"\u003c"), 1)


def write(folders):
    """Write report.html into the first of the folders, and return its path."""
    path = os.path.join(folders[0], "report.html")
    # A sample may hold half a surrogate pair, at which a browser may fail. It becomes a question mark.
    text = page([*map(os.path.normpath, folders)]).encode(errors="replace")
    Path(path).write_bytes(text)
    return path


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__.strip())
    try:
        print(f"{write(sys.argv[1:])}: curves, samples and health")
    except (OSError, json.JSONDecodeError) as error:            # a kill may have cut config.json off
        sys.exit(f"report.py {' '.join(sys.argv[1:])}: there is no report: {error}")
