"""
Draw the pictures of README.md and docs/ from what runs have logged: smollm2.svg, warm_start.svg,
ppo_and_grpo.svg and episodes.svg. And, by Chromium, what report.py makes of a healthy run and of a broken one.

    for seed in 0 1 2; do torchrun train_grpo.py --seed=$seed --out_dir=out/grpo$seed; done
    for seed in 0 1 2; do torchrun train_ppo.py --seed=$seed --out_dir=out/ppo$seed; done
    python -m bench.pictures --grpo=out/grpo0,out/grpo1,out/grpo2 --ppo=out/ppo0,out/ppo1,out/ppo2
    for seed in 0 1 2; do torchrun train_grpo.py config/tasks/smollm2.py --model=out/smollm2 --seed=$seed \
        --out_dir=out/real$seed; done
    python -m bench.pictures --smollm2=out/real0,out/real1,out/real2
    python -m bench.pictures --base=out/base --warm=out/warm0,out/warm1,out/warm2 --then_rl=out/rl0,out/rl1,out/rl2
    python train_grpo.py --learning_rate=5e-3 --out_dir=out/broken
    python -m bench.pictures --healthy=out/grpo0 --broken=out/broken
    python -m bench.pictures --guess=out/game0,out/game1,out/game2 --calculator=out/sums0,out/sums1,out/sums2
"""
import json
import math
import os
import subprocess
import tempfile

import report
from bench.worked import mean_by_kind
from configurator import check, configure
# ------------------------------------------------------------------------------------------------------------
smollm2 = ""                    # folders of runs with config/tasks/smollm2.py, with commas between them
warm = ""                       # out/warm0,out/warm1,... stand for files out/warm0.jsonl, ..., which evaluate_model.py
                                # has written of models that have learned worked answers (docs/measured/real_model.md)
then_rl = ""                    # the same of the models that RL made of those
base = ""                       # the same of the model before both, a single one
grpo = ""                       # folders of runs of train_grpo.py
ppo = ""                        # folders of runs of train_ppo.py
guess = ""                      # folders of runs of train_grpo.py with config/tasks/guess.py
calculator = ""                 # the same with config/tasks/calculator.py
healthy = ""                    # the folder of a run; with Debian's package chromium its report is drawn
broken = ""                     # the same, drawn in dark colors
out = "assets"                  # the folder for the pictures
# ------------------------------------------------------------------------------------------------------------
configure(globals())

# Pixels: a picture, and the part of its two panels that has the curves in it.
WIDTH, HEIGHT, LEFT, TOP, PANEL_WIDTH, PANEL_HEIGHT = 860, 320, (52, 482), 52, 300, 212
INK, GRID, ORANGE, BLUE, GREY = "#1f2937", "#e5e7eb", "#c2410c", "#1d4ed8", "#64748b"


def read(folders):
    """A list of runs; each is the list of its lines in metrics.jsonl, one dict per step.

    Every line gets "completions" and "seconds", which say what the run had done when the step began: the
    completions that it had sampled, and the time that it had trained, without evaluations and checkpoints.
    """
    runs = []
    for folder in folders.split(","):
        for name in ("config.json", "metrics.jsonl"):
            check(os.path.isfile(f"{folder}/{name}"), f"there is no {folder}/{name}")
        with open(f"{folder}/config.json") as config, open(f"{folder}/metrics.jsonl") as metrics:
            settings, lines = json.load(config), [json.loads(line) for line in metrics]
        seconds = 0.0
        for line in lines:
            line["completions"] = line["step"] * settings["prompts_per_step"] * settings["num_generations"]
            line["seconds"] = seconds
            step, evaluation, saving = (line.get(f"timing_s/{part}", 0) for part in ("step", "eval", "save"))
            seconds += step - evaluation - saving
        runs.append(lines)
    return runs


def curves(runs, x, y):
    """For each run the points (x, y) of the lines that have both metrics."""
    found = [[(line[x], line[y]) for line in run if x in line and y in line] for run in runs]
    check(all(found), f"a run has logged no {y}")
    return found


def ticks(end):
    """Round numbers from 0 to `end`, three to seven of them."""
    power = 10 ** math.floor(math.log10(end))
    step = next(power * f for f in (0.2, 0.25, 0.5, 1, 2) if end <= 6.0001 * power * f)
    return [i * step for i in range(math.floor(end / step + 1e-4) + 1)]


def text(x, y, string, style=""):
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{string}</text>\n'


def panel(left, title, x_label, series, y_end, names=()):
    """SVG of a panel. series: (label, color, curves) each, with the label to the right of the panel. names:
    what stands at 0, 1, ... of the x axis, in the place of numbers."""
    right, bottom = left + PANEL_WIDTH, TOP + PANEL_HEIGHT
    x_end = max(x for _, _, runs in series for run in runs for x, _ in run)
    place_x, place_y = lambda x: left + PANEL_WIDTH * x / x_end, lambda y: bottom - PANEL_HEIGHT * y / y_end
    svg = text(left, TOP - 22, title, 'font-size="14" font-weight="600"')
    svg += text((left + right) / 2, bottom + 40, x_label, 'text-anchor="middle"')
    for y in ticks(y_end):
        svg += f'<path d="M{left} {place_y(y):.1f}H{right}" stroke="{GRID if y else INK}"/>\n'
        svg += text(left - 8, place_y(y) + 4, f"{y:,g}", 'text-anchor="end"')
    for x in range(len(names)) if names else ticks(x_end):
        svg += f'<path d="M{place_x(x):.1f} {bottom}v4" stroke="{INK}"/>\n'
        svg += text(place_x(x), bottom + 19, names[x] if names else f"{x:,g}", 'text-anchor="middle"')
    labels = []
    for label, color, runs in series:
        for run in runs:
            points = [(f"{place_x(x):.1f}", f"{place_y(y):.1f}") for x, y in run]
            svg += (f'<polyline points="{" ".join(map(",".join, points))}" fill="none" stroke="{color}" '
                    'stroke-width="1.8" stroke-linejoin="round" stroke-opacity="0.85"/>\n')
            for x, y in points if len(points) < 30 else []:
                svg += f'<circle cx="{x}" cy="{y}" r="2.4" fill="{color}"/>\n'
        labels.append((place_y(sum(run[-1][1] for run in runs) / len(runs)), label, color))
    previous = 0.0
    for y, label, color in sorted(labels):
        # A label stands at the height where its curves end, but not on top of the label above it.
        previous = max(y, previous + 16)
        svg += text(right + 8, previous + 4, label, f'fill="{color}" font-size="13" font-weight="600"')
    return svg


def picture(name, description, *panels):
    path = os.path.join(out, name)
    with open(path, "w") as file:
        file.write(f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
                   f'height="{HEIGHT}" role="img" font-family="Helvetica, Arial, sans-serif" font-size="12" '
                   f'fill="{INK}">\n<title>{description}</title>\n<rect width="{WIDTH}" height="{HEIGHT}" '
                   f'fill="white"/>\n{"".join(panels)}</svg>\n')
    print(path)


def screenshot(folder, name, height, scheme):
    """Draw the upper part of the report of a run. scheme: 0 for dark, 1 for light."""
    from PIL import Image
    path = os.path.join(out, name)
    with tempfile.TemporaryDirectory() as profile:
        subprocess.run(
            ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
             "--disable-background-networking", f"--user-data-dir={profile}", f"--window-size=1180,{height}",
             f"--blink-settings=preferredColorScheme={scheme}", "--virtual-time-budget=3000",
             f"--screenshot={os.path.abspath(path)}", f"file://{os.path.abspath(report.write([folder]))}"],
            check=True, capture_output=True, timeout=120)
    # A palette is a third of the bytes.
    Image.open(path).convert("RGB").quantize(256).save(path, optimize=True)
    print(path)


check(smollm2 or base and warm and then_rl or grpo and ppo or guess and calculator or healthy or broken,
      "name the folders of runs, see --help")
if smollm2:
    real_runs = read(smollm2)
    lengths = curves(real_runs, "step", "eval/mean_length")
    picture("smollm2.svg", "SmolLM2 learns sums: held-out accuracy and the length of completions, by step",
            panel(LEFT[0], "Sums and differences, held-out, a line per run", "step", [
                ("mean@2", ORANGE, curves(real_runs, "step", "eval/mean@2"))], 1),
            panel(LEFT[1], "Tokens per completion, a line per run", "step", [("", BLUE, lengths)],
                  1.1 * max(y for run in lengths for _, y in run)))
if base and warm and then_rl:
    kinds = (("sums", "sums", ORANGE), ("differences of 0 or more", "a - b &#8805; 0", BLUE),
             ("differences below 0", "a - b &lt; 0", GREY))
    styles = (("in style tens", "tens", ORANGE), ("in style parts", "parts", BLUE),
              ("in style column", "column", GREY))
    seeds = []                      # for each seed what mean_by_kind returns: before, after the start, after RL
    for folders in zip(warm.split(","), then_rl.split(","), strict=True):
        seeds.append([mean_by_kind(f"{folder}.jsonl") for folder in (base, *folders)])
    means = [(label, color, [[(x, stage[kind][0]) for x, stage in enumerate(stages)] for stages in seeds])
             for kind, label, color in kinds]
    shares = [(label, color, [[(x, stage[style][1]) for x, stage in enumerate(stages[1:])] for stages in seeds])
              for style, label, color in styles]
    picture("warm_start.svg", "SmolLM2 learns differences: held-out accuracy by kind of question, and how it works",
            panel(LEFT[0], "Held-out accuracy, a line per seed", "", means, 1,
                  names=("base", "worked answers", "then RL")),
            panel(LEFT[1], "How two-digit questions are answered", "share of the samples, a line per seed",
                  shares, 1, names=("worked answers", "then RL")))
if grpo and ppo:
    grpo_runs, ppo_runs = read(grpo), read(ppo)
    picture("ppo_and_grpo.svg", "Held-out accuracy of GRPO and PPO, by completions and by time", *(
        panel(left, f"Held-out mean@4 by {by}", x_label, [
            ("GRPO", ORANGE, curves(grpo_runs, x, "eval/mean@4")),
            ("PPO", BLUE, curves(ppo_runs, x, "eval/mean@4"))], 1)
        for left, by, x_label, x in (
            (LEFT[0], "samples", "completions sampled for training", "completions"),
            (LEFT[1], "time", "seconds, without evaluation and saving", "seconds"))))
for folder, name, height, scheme in ((healthy, "report_healthy.png", 1760, 1),
                                     (broken, "report_broken.png", 1100, 0)):
    if folder:
        screenshot(folder, name, height, scheme)
if guess and calculator:
    games, sums = read(guess), read(calculator)
    picture("episodes.svg", "Episodes: held-out success in a game and with a tool, and calls of the tool",
            panel(LEFT[0], "Held-out success, a line per run", "step", [
                ("game", ORANGE, curves(games, "step", "eval/mean@16")),
                ("tool", BLUE, curves(sums, "step", "eval/mean@4"))], 1),
            panel(LEFT[1], "Calls of the tool per problem", "step", [
                ("", BLUE, curves(sums, "step", "tools/call_frequency"))], 1.1))
