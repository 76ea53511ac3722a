"""
Worked answers to two tasks of reasoning-gym, for a warm start by train_sft.py. docs/measured/real_model.md has the
commands that learn from them, and the results.

    python -m bench.worked --out=out/worked                     # sums and differences of two numbers
    python -m bench.worked --task=leap_year --rows=300 --out=out/leap
    python -m bench.worked --scores=out/before.jsonl,out/after.jsonl

A row of train.jsonl is a training question with an answer in one of three styles, which are taken in turns:

    parts   17 - 72   17 < 72: 72 - 10 = 62, 62 - 7 = 55. The answer is -55.
    tens              17 < 72: 70 - 10 = 60, 2 - 7 = -5, 60 - 5 = 55. The answer is -55.
    column            17 < 72: 12 - 7 = 5, 6 - 1 = 5. The answer is -55.

    ends    2033      3 is odd, so leap years end in 2 or 6, and 2033 ends in 3. The answer is No.
    fours             2033 ends in 33, and 33 = 4 * 8 + 1. The answer is No.
    halves            33 is odd. The answer is No.

A third of the training rows of chain_sum are sums, two thirds are differences. eval.jsonl has all held-out
questions, with answers for the held-out loss. No question is in both files.

--scores reads what evaluate_model.py has written by --output, and prints the mean score by kind of question and
by style of answer.
"""
import json
import os
import re
from collections import defaultdict

from configurator import check, configure
from tasks.reasoning_gym import gym_rows
# ------------------------------------------------------------------------------------------------------------
task = "chain_sum"              # chain_sum or leap_year
out = "out/worked"              # the folder of train.jsonl and eval.jsonl
rows = 1200                     # training questions
seed = 0                        # of the training questions
scores = ""                     # files of evaluate_model.py's --output, with commas between; no rows are made
# ------------------------------------------------------------------------------------------------------------


# ---------------------------------------------------------------- sums and differences
def equation(x, sign, y):
    """Return the text `x + y = z` or `x - y = z`, and z."""
    z = x + y if sign == "+" else x - y
    return f"{x} {sign} {y} = {z}", z


def parts(x, sign, y):
    """Add or take off the tens of y, then its ones."""
    steps = []
    for part in (y // 10 * 10, y % 10):
        if part:
            step, x = equation(x, sign, part)
            steps.append(step)
    return steps


def tens(x, sign, y):
    """Do the tens, then the ones, and put the two results together."""
    high, high_result = equation(x // 10 * 10, sign, y // 10 * 10)
    low, low_result = equation(x % 10, sign, y % 10)
    both, _ = equation(high_result, "-" if low_result < 0 else "+", abs(low_result))
    return [high, low, both]


def column(x, sign, y):
    """Do the ones, then the tens, with what is carried or borrowed; the answer puts the digits together."""
    high, low = divmod(x, 10)
    high_of_y, low_of_y = divmod(y, 10)
    if sign == "+":
        carry = (low + low_of_y) // 10
        carried = " + 1" if carry else ""
        last = f"{high} + {high_of_y}{carried} = {high + high_of_y + carry}"
    else:
        if low < low_of_y:
            high -= 1
            low += 10
        last, _ = equation(high, "-", high_of_y)
    first, _ = equation(low, sign, low_of_y)
    return [first, last]


def solve_sum(row, style):
    """Return the steps for a row of chain_sum. A difference takes the smaller number off the larger one."""
    x, sign, y = row["metadata"]["expression"].split()
    x, y = int(x), int(y)
    start = ""
    if sign == "-":
        comparison = "<" if x < y else ">"
        if x == y:
            comparison = "="
        start = f"{x} {comparison} {y}: "
        x, y = max(x, y), min(x, y)
    if x < 10:
        step, _ = equation(x, sign, y)
        steps = [step]
    else:
        steps = style(x, sign, y)
    return start + ", ".join(steps)


def kind_of_sum(row):
    if "+" in row["metadata"]["expression"]:
        return "sums"
    return "differences below 0" if row["answer"].startswith("-") else "differences of 0 or more"


def style_of_sum(text):
    """Return the style of a sampled answer, which need not be right, to a question with two-digit numbers."""
    if text.count(" = ") == 3:
        return "tens"
    return "column" if re.search(r"(^|: )1?\d [+-] \d = ", text) else "parts"


# ---------------------------------------------------------------- leap years
def ends(year):
    """Look at the last two digits."""
    digit = year // 10 % 10
    rule = "odd, so leap years end in 2 or 6" if digit % 2 else "even, so leap years end in 0, 4 or 8"
    return f"{digit} is {rule}, and {year} ends in {year % 10}"


def fours(year):
    """Divide the last two digits by 4."""
    number = year % 100
    rest = f" + {number % 4}" if number % 4 else ""
    return f"{year} ends in {number:02}, and {number} = 4 * {number // 4}{rest}"


def halves(year):
    """Halve the last two digits if that can be done, and look whether it can be done again."""
    number = year % 100
    if number % 2:
        return f"{number} is odd"
    half = number // 2
    return f"{number} is even, {number} / 2 = {half}, and {half} is {'odd' if half % 2 else 'even'}"


def solve_year(row, style):
    """Return the steps for a row about a leap year. Only every fourth century is one."""
    year = row["metadata"]["year"]
    if year % 100 == 0:
        century = year // 100
        rest = f" + {century % 4}" if century % 4 else ""
        return f"{year} ends in 00, and {century} = 4 * {century // 4}{rest}"
    return style(year)


def kind_of_year(row):
    return f"the answer is {row['answer']}"


# The generator with its settings, the function that makes the steps, the styles, and the kind of a question.
TASKS = {
    "chain_sum": ("chain_sum,max_terms=2,max_digits=2", solve_sum, [parts, tens, column], kind_of_sum),
    "leap_year": ('calendar_arithmetic,tasks=["is_leap_year"]', solve_year, [ends, fours, halves], kind_of_year),
}


def worked(task, split, count, seed):
    """Return the rows of a split, each with an answer as its completion. count: how many; 0 stands for all.
    Half of the questions of chain_sum are sums; of those in the training rows every second one is left out."""
    spec, solve, styles, kind = TASKS[task]
    fewer_sums = task == "chain_sum" and split == "train"
    chosen = []
    sums = 0
    for _, row in gym_rows(spec, split, 2 * count if fewer_sums else count, seed):
        if fewer_sums and kind(row) == "sums":
            sums += 1
            if sums % 2:
                continue
        steps = solve(row, styles[len(chosen) % len(styles)])
        chosen.append(row | {"completion": f"{steps}. The answer is {row['answer']}."})
    return chosen[:count or None]


def mean_by_kind(file):
    """Return {kind of question or style of answer: (mean score, share)} of what evaluate_model.py has written
    to a file. Of a kind it is the share of all samples. Styles are those of answers to sums and differences of
    two-digit numbers, and have their share of these."""
    by_kind = defaultdict(list)
    by_style = defaultdict(list)
    with open(file) as lines:
        for line in lines:
            row = json.loads(line)
            kind = kind_of_sum(row) if row["source"] == "chain_sum" else kind_of_year(row)
            for sample in row["samples"]:
                by_kind[kind].append(sample["score"])
                if row["metadata"].get("num_digits") == 2:
                    by_style["in style " + style_of_sum(sample["completion"])].append(sample["score"])
    means = {}
    for groups in (by_kind, by_style):
        total = sum(len(values) for values in groups.values())
        for kind, values in sorted(groups.items()):
            means[kind] = (sum(values) / len(values), len(values) / total)
    return means


if __name__ == "__main__":
    configure(globals())
    check(task in TASKS, f"task={task}: choose one of {', '.join(TASKS)}")
    if scores:
        for file in scores.split(","):
            for kind, (mean, share) in mean_by_kind(file).items():
                print(f"{file}  {kind:24}  mean score {mean:.3f}  {share:4.0%} of the samples")
    else:
        os.makedirs(out, exist_ok=True)
        for split, count, split_seed in (("train", rows, seed), ("eval", 0, 0)):
            with open(f"{out}/{split}.jsonl", "w") as file:
                for row in worked(task, split, count, split_seed):
                    file.write(json.dumps(row) + "\n")
        print(f"{out}: {rows} worked answers")
