"""
Compare methods on a task where they differ, config/tasks/compose.py. A run of 80 steps takes about 90 seconds on
one core. Each finished run becomes a line of bench/methods.jsonl. The same command goes on where it stopped,
runs what has no line yet, and prints the table and draws assets/methods.svg from all that has one.

    python -m bench.methods --jobs=2                            # the whole table: an evening on two cores
    python -m bench.methods --methods=grpo,rloo --seeds=0,1 --tune=false
    python -m bench.methods --methods=mine --add="mine=train_mine.py config/tasks/compose.py"
    python -m bench.methods --methods=trl --tune=false          # TRL's GRPOTrainer: bench/trl_grpo.py
    python -m bench.methods --stress=true                       # rollouts four steps old, 20% wrong answers
    python -m bench.methods --problems=512 --tune=false         # on so few problems that they come again
    python -m bench.methods --methods=none                      # only the table and the picture

All methods run at the learning rate of config/tasks/compose.py. Then each runs at three learning rates with a seed
that is not in the table, and at the best of them, if it is another one, with the seeds of the table. Each run
samples 20,480 completions, DAPO at most. mean@4 is the mean over depths 2 to 5 of what is held out. The
seconds of a line are those of the steps, without evaluations. Its processor seconds are those of the whole
process, with its start and two evaluations.
"""
import ast
import json
import math
import os
import random
import shlex
import shutil
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from configurator import check, configure, read_config_file
# ------------------------------------------------------------------------------------------------------------
methods = ""                    # with commas between them; empty: all, under stress five; none runs nothing
seeds = ""                      # with commas between them; empty: 0,1,2,3,4, under stress 0,1,2
learning_rates = "2.5e-4,5e-4,1e-3"  # of which each method's best is chosen
tuning_seed = 100               # the seed that chooses; it is not in the table
tune = True                     # run the learning rates; False leaves it at that of config/tasks/compose.py
trl = "out/trl/bin/python"      # the interpreter that has TRL; where there is none, trl is not among all
add = ""                        # a method of your own: NAME=script.py and its settings, as on a command line
stress = False                  # train_async.py with max_staleness=4, and one training row in five is wrong
problems = 0                    # how many to train on; 0: 4,096, of which none comes twice
jobs = 1                        # runs at once, each on a core of its own (under stress on two)
results = "bench/methods.jsonl" # a line for each finished run
work = "out/methods"            # a folder for the runs themselves
out = "assets"                  # the folder for the picture
# ------------------------------------------------------------------------------------------------------------
RECIPE = "config/tasks/compose.py"
GRPO = f"train_grpo.py {RECIPE}"
SHARED = {key: ast.literal_eval(value) for _, key, value in read_config_file(RECIPE, __file__)}
METHODS = {
    "grpo": GRPO, "rloo": f"{GRPO} config/methods/rloo.py",
    "reinforce++": f"{GRPO} config/methods/reinforce_pp.py",
    "one_update": f"{GRPO} --num_mini_batches=1", "ppo": f"train_ppo.py {RECIPE}",
    # `git apply recipes/dapo.diff` makes this script.
    "dapo": f"train_dapo.py {RECIPE} --max_num_gen_batches=2 --max_steps=40",
    "gspo": f"{GRPO} config/methods/gspo.py", "cispo": f"{GRPO} config/methods/cispo.py",
    "dr_grpo": f"{GRPO} config/methods/dr_grpo.py", "trl": f"-m bench.trl_grpo {RECIPE}",
    "dppo": f"{GRPO} config/methods/dppo.py"}
UNDER_STRESS = "grpo,rloo,reinforce++,cispo,dppo"
BASE = (f"evaluate_model.py --model={SHARED['model']} --task={SHARED['task']} --samples=64 --show=0 "
        f"--eval_prompts={SHARED['eval_prompts']} --max_completion_length={SHARED['max_completion_length']} "
        "--engine=hf")
DEPTHS = ("depth 2", "depth 3", "depth 4", "depth 5")
STALENESS, WRONG = 4, 0.2
# Pixels and colors, as in pictures.py.
WIDTH, LEFT, TOP, ROW, PLOT = 860, 130, 64, 28, 560
INK, GRID, ORANGE, BLUE, GREY = "#1f2937", "#e5e7eb", "#c2410c", "#1d4ed8", "#64748b"


# ---------------------------------------------------------------- statistics
def two_sided(t, df):
    """P(|T| >= |t|) of Student's t. With t = sqrt(df) tan(a) its density is that of cos(a)^(df - 1)."""
    steps, end = 2000, math.atan(abs(t) / math.sqrt(df))
    area = lambda a, b: sum(                                    # Simpson's rule
        (1 if i in (0, steps) else 4 if i % 2 else 2) * math.cos(a + (b - a) * i / steps) ** (df - 1)
        for i in range(steps + 1)) * (b - a) / steps / 3
    return area(end, math.pi / 2) / area(0, math.pi / 2)


def quantile(df, outside=0.05):
    """The t beyond which, on both sides together, Student's t falls with this probability."""
    low, high = 0.0, 1e3
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if two_sided(middle, df) > outside else (low, middle)
    return high


def half_width(values):
    """Of the 95% interval of the mean, by Student's t; NaN for a single value."""
    if len(values) < 2:
        return math.nan
    return quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))


def paired_p(differences):
    """Two-sided p of the paired t-test: that the mean of the differences is 0; NaN for fewer than two."""
    if len(differences) < 2:
        return math.nan
    spread, mean = statistics.stdev(differences), statistics.mean(differences)
    if spread == 0:
        return float(mean == 0)
    return two_sided(mean / spread * math.sqrt(len(differences)), len(differences) - 1)


def holm(ps):
    """p-values corrected for their number (Holm 1979); NaN stays, and does not count."""
    order = sorted((i for i, p in enumerate(ps) if not math.isnan(p)), key=lambda i: ps[i])
    corrected, largest = [math.nan] * len(ps), 0.0
    for rank, i in enumerate(order):
        corrected[i] = largest = max(largest, min(1.0, (len(order) - rank) * ps[i]))
    return corrected


def ranks(values):
    """From 1 for the smallest; equal values share the mean of theirs."""
    return [sum(other < value for other in values) + (values.count(value) + 1) / 2 for value in values]


def spearman(a, b):
    """The correlation of the ranks; NaN where a side has equal values only, or fewer than three."""
    if len(a) < 3 or len(set(a)) == 1 or len(set(b)) == 1:
        return math.nan
    return statistics.correlation(ranks(a), ranks(b))


# ---------------------------------------------------------------- runs
def wrong_rows(seed):
    """Write the task's rows to two files, with a wrong answer in a fifth of those to train on."""
    from tasks.generate_problems import generated_rows
    for split, count, share in (("train", 0, WRONG), ("eval", SHARED["eval_prompts"], 0)):
        rng, rows = random.Random(seed), [row for _, row in generated_rows(
            SHARED["task"], split, count, seed)]
        answers = [row["answer"] for row in rows]
        for row in rows:
            if rng.random() < share:
                row["answer"] = rng.choice([one for one in answers if one != row["answer"]])
            del row["solution"]
        with open(f"{work}/{split}-{seed}.jsonl", "w") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


def command_of(method, seed, rate):
    """The command of a run, which is also its name in the file of results."""
    command = f"{METHODS[method]} --learning_rate={rate:g} --seed={seed}"
    if not stress:
        return command + f" --train_prompts={problems}" * bool(problems)
    return (f"torchrun {command.replace('train_grpo.py', 'train_async.py', 1)} --max_staleness={STALENESS} "
            f"--task=file --train_file={work}/train-{seed}.jsonl --eval_file={work}/eval-{seed}.jsonl")


def suffix():
    """Of the names of what belongs to these runs alone."""
    return "_stress" * stress + f"_{problems}" * bool(problems)


def finished():
    """The lines of the file of results, by command."""
    if not os.path.exists(results):
        return {}
    with open(results) as file:
        return {line["command"]: line for line in map(json.loads, file)}


def launch(command, log):
    """What a command has printed, and the seconds of processor time that it took."""
    words = shlex.split(command)
    if words[0] == "torchrun":
        words[:1] = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    python = trl if "bench.trl_grpo" in words else sys.executable
    with open(log, "w") as file:
        process = subprocess.Popen([python, *words], stdout=file, stderr=subprocess.STDOUT,
                                   env=os.environ | {"OMP_NUM_THREADS": "1"})
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    with open(log) as file:
        output = file.read()
    if process.returncode:
        raise RuntimeError(f"exit code {process.returncode}\n{output[-2000:]}")
    return output, usage.ru_utime + usage.ru_stime


def scores_of(figures, metric):
    """A figure of an evaluation by depth, and its mean over the depths, of which none counts more."""
    found = {key.split("/")[1]: value for key, value in figures.items()
             if key.startswith("eval/depth ") and key.endswith(metric)}
    return (round(statistics.mean(found.values()), 4), {key: round(found[key], 4) for key in sorted(found)})


def train(method, seed, rate):
    """A run from its start to its line."""
    folder = f"{work}/{method}-{rate:g}-{seed}{suffix()}"
    shutil.rmtree(folder, ignore_errors=True)
    command = command_of(method, seed, rate)
    _, processor = launch(f"{command} --out_dir={shlex.quote(folder)}", f"{folder}.log")
    with open(f"{folder}/metrics.jsonl") as file:
        lines = [json.loads(line) for line in file]
    if "eval/mean@4" not in lines[-1] or len(lines) < 2:
        raise RuntimeError(f"the run was stopped: {folder}.log")
    after, depths = scores_of(lines[-1], "mean@4")
    seconds = sum(line.get("timing_s/step", 0) - line.get("timing_s/eval", 0) - line.get("timing_s/save", 0)
                  for line in lines)
    with open(f"{folder}/config.json") as file:
        settings = json.load(file)
    batches = sum(line.get("train/num_gen_batches", 1) for line in lines[:-1])
    completions = batches * settings["prompts_per_step"] * settings["num_generations"]
    return {"method": method, "seed": seed, "learning_rate": rate, "stress": stress, "problems": problems,
            "before": scores_of(lines[0], "mean@4")[0], "after": after, "depths": depths,
            "pass@4": scores_of(lines[-1], "pass@4")[0], "completions": completions,
            "seconds": round(seconds, 1), "processor_seconds": round(processor, 1), "command": command}


def look_at_base():
    """What the base model can do: one attempt, and the best of 64."""
    output, _ = launch(BASE, f"{work}/base.log")
    figures = {key: float(value) for key, value in
               (line.rsplit(maxsplit=1) for line in output.splitlines() if line.startswith("eval/"))}
    once, by_depth = scores_of(figures, "mean@64")
    best, best_by_depth = scores_of(figures, "pass@64")
    return {"method": "base", "mean@64": once, "mean@64 by depth": by_depth, "pass@64": best,
            "pass@64 by depth": best_by_depth, "command": BASE}


lock, failures = threading.Lock(), []


def measure(tasks):
    """Run those of the (command, function, arguments) that have no line yet."""
    def one(command, function, arguments):
        began = time.time()
        try:
            line = json.dumps(function(*arguments))
        except Exception as error:
            line = ""
            failures.append(f"{command}: {error}")
        with lock:
            if line:
                with open(results, "a") as file:
                    file.write(line + "\n")
            print(f"{time.time() - began:5.0f} s  {line or failures[-1]}", flush=True)

    done = finished()
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(lambda task: one(*task), [task for task in tasks if task[0] not in done]))


# ---------------------------------------------------------------- table and picture
def by_seed(lines, method, rate):
    """{seed: line} of a method's runs in the table."""
    return {line["seed"]: line for line in lines if line["method"] == method and line["seed"] != tuning_seed
            and math.isclose(line["learning_rate"], rate)}


def best_rate(lines, method):
    """The best learning rate by the tuning seed, or 0.0 as long as not all of them have been run."""
    found = {line["learning_rate"]: line["after"] for line in lines if line["method"] == method
             and line["seed"] == tuning_seed}
    return max(found, key=found.get) if len(found) >= len(learning_rates.split(",")) else 0.0


def known(lines):
    """The lines of such runs, if their command is still the method's, or the method was added elsewhere."""
    such = [line for line in lines if line["method"] != "base"
            and (line["stress"], line.get("problems", 0)) == (stress, problems)]
    return [line for line in such if line["method"] not in METHODS
            or line["command"] == command_of(line["method"], line["seed"], line["learning_rate"])]


def agreement(runs):
    """Spearman's correlation of the means on every other seed and on the others, of the methods that have most
    seeds; their number; the seeds that they share."""
    most = max(map(len, runs.values()), default=0)
    several = {method: found for method, found in runs.items() if len(found) == most > 1}
    shared = sorted(set.intersection(*map(set, several.values()))) if several else []
    if len(shared) < 2:
        return math.nan, len(several), shared
    means = [[statistics.mean(found[seed]["after"] for seed in half) for found in several.values()]
             for half in (shared[::2], shared[1::2])]
    return spearman(*means), len(several), shared


def print_table(title, runs, default):
    """A row for each method, by its mean; `default` has the runs that they are compared with."""
    pairs = {method: [line["after"] - default[seed]["after"] for seed, line in found.items()
                      if seed in default] for method, found in runs.items()}
    corrected = dict(zip(runs, holm([math.nan if method == "grpo" else paired_p(pairs[method])
                                     for method in runs])))
    print(f"\n{title}\n\n| method | learning rate | seeds | mean@4 | against the default | p | "
          "depth 2, 3, 4, 5 | processor seconds |\n| --- | ---: | ---: | --- | --- | --- | --- | ---: |")
    order = sorted(runs, key=lambda m: -statistics.mean(line["after"] for line in runs[m].values()))
    for method in order:
        lines = list(runs[method].values())
        column = lambda key, lines=lines: [line[key] for line in lines]
        spread, p = half_width(column("after")), corrected[method]
        against = "" if method == "grpo" or not pairs[method] else f"{statistics.mean(pairs[method]):+.3f}"
        verdict = "" if math.isnan(p) else f"{p:.3f}" + ", not told apart" * (p >= 0.05)
        depths = ", ".join(f"{statistics.mean(d.get(key, math.nan) for d in column('depths')):.2f}"
                           for key in DEPTHS)
        mean = f"{statistics.mean(column('after')):.3f}" + f" ± {spread:.3f}" * (not math.isnan(spread))
        times = [line["processor_seconds"] for line in lines if "processor_seconds" in line]
        print(f"| {method} | {lines[0]['learning_rate']:g} | {len(lines)} | {mean} | {against} | {verdict} | "
              f"{depths} | {f'{statistics.median(times):.0f}' if times else ''} |")
    rho, count, shared = agreement(runs)
    if not math.isnan(rho):
        print(f"\nThe order of {count} methods with seeds {shared[::2]} and with seeds {shared[1::2]} has "
              f"Spearman's correlation {rho:.2f}.")
    return order


def text(x, y, string, style=""):
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{string}</text>\n'


def draw(order, runs, tuned, base):
    """A row for each method: its runs as dots, the interval of their mean as a line."""
    values = [line["after"] for found in [*runs.values(), *tuned.values()] for line in found.values()]
    before = statistics.mean(line["before"] for found in runs.values() for line in found.values())
    end = math.ceil(10 * max([*values, base.get("pass@64", 0)])) / 10
    place, bottom = lambda x: LEFT + PLOT * min(x, end) / end, TOP + ROW * len(order)
    svg = text(LEFT, 24, "Held-out mean@4, a dot per run, and the 95% interval of their mean",
               'font-size="14" font-weight="600"')
    for i in range(round(10 * end) + 1):
        svg += f'<path d="M{place(i / 10):.1f} {TOP}V{bottom}" stroke="{GRID if i else INK}"/>\n'
        svg += text(place(i / 10), bottom + 18, f"{i / 10:g}", 'text-anchor="middle"')
    for x, label in ((before, "base"), (base.get("pass@64"), "base, best of 64")):
        if x is not None:
            svg += f'<path d="M{place(x):.1f} {TOP}V{bottom}" stroke="{GREY}" stroke-dasharray="4 3"/>\n'
            svg += text(place(x), TOP - 8, label, f'text-anchor="middle" fill="{GREY}"')
    for row, method in enumerate(order):
        y = TOP + ROW * (row + 0.5)
        svg += text(LEFT - 10, y + 4, method, 'text-anchor="end" font-size="13"')
        for color, found, shift in ((ORANGE, runs[method], 0), (BLUE, tuned.get(method, {}), 8)):
            after = [line["after"] for line in found.values()]
            if len(after) > 1:
                mean, spread = statistics.mean(after), half_width(after)
                low, high = place(max(0, mean - spread)), place(mean + spread)
                svg += (f'<path d="M{low:.1f} {y + shift:.1f}H{high:.1f}" stroke="{color}" '
                        'stroke-width="1.8" stroke-opacity="0.6"/>\n')
            svg += "".join(f'<circle cx="{place(one):.1f}" cy="{y + shift:.1f}" r="3.2" fill="{color}" '
                           'fill-opacity="0.8"/>\n' for one in after)
    rate = f"{SHARED['learning_rate']:g}"
    labels = [(ORANGE, f"learning rate {rate}"), *[(BLUE, "best of three")] * bool(tuned)]
    for i, (color, label) in enumerate(labels):
        svg += text(LEFT + PLOT + 16, TOP + 16 + 18 * i, label, f'fill="{color}" font-weight="600"')
    path, height = os.path.join(out, f"methods{suffix()}.svg"), bottom + 34
    with open(path, "w") as file:
        file.write(f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
                   f'height="{height}" role="img" font-family="Helvetica, Arial, sans-serif" font-size="12" '
                   f'fill="{INK}">\n<title>Held-out accuracy by method, a dot per run</title>\n<rect '
                   f'width="{WIDTH}" height="{height}" fill="white"/>\n{svg}</svg>\n')
    print(path)


def report():
    """The tables and the picture of all that has a line."""
    lines, base = known(finished().values()), finished().get(BASE, {})
    own = dict.fromkeys([*METHODS, *(line["method"] for line in lines)])
    at = lambda rates: {m: found for m in own if rates(m) and (found := by_seed(lines, m, rates(m)))}
    runs, best = at(lambda m: SHARED["learning_rate"]), at(lambda m: best_rate(lines, m))
    if base:
        print("\nThe base model, held-out, and the best of 64 samples by depth: mean@64 "
              f"{base['mean@64']:.3f}, pass@64 {base['pass@64']:.3f} "
              f"({', '.join(f'{value:.2f}' for value in base['pass@64 by depth'].values())})")
    if not runs:
        print("no run has been finished")
        return
    order = print_table("At the same learning rate", runs, runs.get("grpo", {}))
    if best:
        print_table(f"At the best learning rate by seed {tuning_seed}", best, best.get("grpo", {}))
    draw(order, runs, {m: found for m, found in best.items()
                       if not math.isclose(best_rate(lines, m), SHARED["learning_rate"])}, base)


if __name__ == "__main__":
    configure(globals())
    if add:
        name, _, given = add.partition("=")
        check(given and ".py" in given.split()[0] and name not in METHODS,
              f"add={add}: write NAME=script.py and its settings, with a name that is new")
        METHODS[name] = given
    every = [method for method in METHODS if method != "trl" or shutil.which(trl)]
    methods = methods or (UNDER_STRESS if stress else ",".join(every))
    wanted = [] if methods == "none" else methods.split(",")
    for method in wanted:
        check(method in METHODS, f"methods={methods}: choose from {', '.join(METHODS)}")
        check(not stress or METHODS[method].startswith("train_grpo.py "),
              f"methods={methods}: under stress only what train_grpo.py runs, not {method}")
    check("trl" not in wanted or shutil.which(trl),
          f"trl={trl}: no such interpreter; bench/against_trl.py says how to make one with TRL")
    numbers = lambda key, given, kind: [kind(one) for one in given.split(",")]
    try:
        table_seeds = numbers("seeds", seeds or ("0,1,2" if stress else "0,1,2,3,4"), int)
        rates = numbers("learning_rates", learning_rates, float)
    except ValueError as error:
        check(False, f"seeds={seeds}, learning_rates={learning_rates}: {error}")
    check(tuning_seed not in table_seeds, f"tuning_seed={tuning_seed} is one of the table's seeds")
    check(not (stress and problems), f"problems={problems}: under stress there are 4,096")
    check(jobs > 0, f"jobs={jobs}: must be above 0")
    os.makedirs(work, exist_ok=True)
    plan = lambda seeds, rates: [(command_of(method, seed, rate), train, (method, seed, rate))
                                 for seed in seeds for rate in rates for method in wanted]
    for seed in [*table_seeds, tuning_seed] if stress and wanted else []:
        wrong_rows(seed)
    if wanted and not stress and not problems and not add:
        measure([(BASE, look_at_base, ())])
    measure(plan(table_seeds, [SHARED["learning_rate"]]))
    if tune:
        measure(plan([tuning_seed], rates))
        lines = known(finished().values())
        measure([task for task in plan(table_seeds, rates) if task[2][2] == best_rate(lines, task[2][0])])
    report()
    check(not failures, "failed: " + "; ".join(failure.splitlines()[0] for failure in failures))
