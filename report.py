"""
One HTML page of a run, or of several for comparison: curves, samples, settings, and health in words.

    python report.py out/grpo-algebra-...               # writes report.html into the folder
    python report.py out/run0 out/run1 out/run2         # into the first; runs are named by what differs

The page needs neither a network nor a server. runtime/report.html is its template, and runtime/health.py has
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

from runtime.health import findings, series

HERE = os.path.dirname(os.path.abspath(__file__))
# These numbers of points and of bytes of samples keep a page under 5 MB.
POINTS, SAMPLE_BYTES = 60_000, 3_200_000

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
    ("Seconds by phase", r"timing_s/.+", ""),
    ("Staleness, steps", r"async/staleness/.+", ""),
    ("Turns and calls of tools per episode", r"episodes/turns|tools/call_frequency", ""),
    ("How episodes end", r"episodes/ended/.+", "share"))


def read_run(folder):
    """Return a run's lines of metrics, its settings, and the script's defaults of those that were given."""
    with open(f"{folder}/config.json", "rb") as config, open(f"{folder}/metrics.jsonl", "rb") as metrics:
        settings, lines = json.load(config), [*filter(None, map(parsed, metrics))]
    defaults = settings.pop("defaults", {})
    return lines, {k: v for k, v in settings.items() if k not in ("checksums", "out_dir", "resume")}, defaults


def parsed(line):
    # The last line of a run that was killed may be cut off. JavaScript's JSON has no NaN.
    with contextlib.suppress(ValueError):
        return json.loads(line, parse_constant=lambda name: None)


def read_samples(folder, budget):
    """{step: samples} of evenly spaced steps, at most 125 and about `budget` bytes in all."""
    with open(os.path.join(folder, "samples.jsonl"), "rb") as file:
        lines = file.readlines()
    steps = [[*some] for _, some in itertools.groupby(lines, lambda line: line.partition(b",")[0])]
    count = min(len(steps), 125, 1 + budget * len(steps) // (1 + sum(map(len, lines))))
    chosen = [steps[i * (len(steps) - 1) // max(count - 1, 1)] for i in range(count)]
    samples = [[*filter(None, map(parsed, some))] for some in chosen]
    return {some[0]["step"]: some for some in samples if some}


def thinned(points, most):
    """Steps and values of a curve, at most `most`: the lowest and highest of each of most / 2 stretches."""
    size = math.ceil(2 * len(points) / most) if len(points) > most else 1
    parts = [points[i:i + size] for i in range(0, len(points), size)]
    kept = [point for part in parts
            for point in sorted({pick(part, key=lambda point: point[1]) for pick in (min, max)})]
    return [step for step, _ in kept], [float(f"{value:.5g}") for _, value in kept]


def summary(lines, metrics):
    """Return what came out of a run, as texts: first and last scores, what has none, steps and minutes."""
    scores = [f"{metric} {points[0][1]:.3g} → {points[-1][1]:.3g}"
              for pattern in (r"eval/mean@\d+", r"eval/(pass|maj)@\d+", "reward")
              for metric in filter(re.compile(pattern).fullmatch, metrics)
              if (points := series(lines, metric))]
    unscored = sum(count for _, count in series(lines, "rewards/unscored"))
    minutes = sum(seconds for _, seconds in series(lines, "timing_s/step")) / 60
    return [*scores, *([f"{unscored:.0f} completions without a score"] if unscored else []),
            f"to step {max((line['step'] for line in lines), default=0)}", f"{minutes:.1f} min"]


def page(folders):
    """Return the HTML of the page, as a string."""
    read, panels = [read_run(folder) for folder in folders], []
    values = {key: [str(settings.get(key, "")) for _, settings, _ in read]
              for _, settings, _ in read for key in settings}
    defaults = {key: str(default) for *_, defaults in read for key, default in defaults.items()}
    differ = [key for key in values if len(set(values[key])) > 1][:2]
    names = [", ".join(f"{key}={values[key][i]}" for key in differ) for i in range(len(read))]
    metrics = sorted({metric for lines, *_ in read for line in lines for metric in line})
    most = min(600, POINTS // (len(read) * len(metrics) + 1))
    for title, pattern, scale in PANELS:
        curves = {}                                             # {metric: (steps, values) of each run}
        for metric in filter(re.compile(pattern).fullmatch, metrics):
            # A step without a gradient has no place on a scale of logarithms.
            found = [thinned([(step, value) for step, value in series(lines, metric)
                              if value > 0 or scale != "log"], most) for lines, *_ in read]
            # A curve that is 0 in all runs, or the same as another one of the panel, is left out.
            if any(any(ys) for _, ys in found) and found not in curves.values():
                curves[metric] = found
        panels += [{"title": title, "scale": scale, "curves": curves}] if curves else []
    runs = [{"name": name if names.count(name) == 1 and name else f"{name} {os.path.basename(run)}".strip(),
             "summary": summary(lines, metrics), "findings": findings(lines, settings),
             "samples": read_samples(run, SAMPLE_BYTES // len(read))}
            for run, name, (lines, settings, _) in zip(folders, names, read)]
    text = json.dumps({"runs": runs, "panels": panels, "settings": [
        [key, *each, defaults.get(key, each[0])] for key, each in values.items()]}, ensure_ascii=False)
    with open(os.path.join(HERE, "runtime", "report.html"), encoding="utf-8") as template:
        # Neither </script> nor <!-- may stand in a script element.
        return template.read().replace("DATA", text.replace("<", r"\u003c"), 1)


def write(folders):
    """Write report.html into the first of the folders, and return its path."""
    path = os.path.join(folders[0], "report.html")
    # A sample may hold half a surrogate pair, at which a browser may fail. It becomes a question mark.
    text = page([os.path.normpath(folder) for folder in folders]).encode(errors="replace")
    with open(path, "wb") as file:
        file.write(text)
    return path


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__.strip())
    try:
        print(f"{write(sys.argv[1:])}: curves, samples and health")
    except (OSError, json.JSONDecodeError) as error:            # a kill may have cut config.json off
        sys.exit(f"report.py {' '.join(sys.argv[1:])}: there is no report: {error}")
