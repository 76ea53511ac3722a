"""
Worked answers to chain_sum, a task of reasoning-gym, for a warm start by train_sft.py: docs/recipes.md.

    python -m bench.worked --out=out/worked
    torchrun train_sft.py --model=out/smollm2 --task=file --train_file=out/worked/train.jsonl \
        --eval_file=out/worked/eval.jsonl --reward=tasks.reasoning_gym:full_marks --temperature=0.7 \
        --max_prompt_length=96 --max_completion_length=64 --prompts_per_step=16 --max_steps=40 \
        --learning_rate=1e-4 --eval_interval=20 --eval_samples=2 --save_interval=0 --out_dir=out/warm
    python evaluate_model.py --model=out/warm/checkpoint-40 --samples=16 --temperature=0.7 \
        --task=reasoning_gym:chain_sum,max_terms=2,max_digits=2 --reward=tasks.reasoning_gym:full_marks
    torchrun train_grpo.py config/tasks/smollm2.py --model=out/warm/checkpoint-40 --max_completion_length=64

The questions are those of config/tasks/smollm2.py: sums and differences of two numbers of up to two digits. A
row of train.jsonl is a training question with an answer in one of three styles, which are taken in turns:

    plain   17 - 72 = -55. The answer is -55.
    parts   72 - 10 = 62, 62 - 7 = 55, so 17 - 72 = -55. The answer is -55.
    swap    72 is more than 17, and 72 - 17 = 55, so it is -55. The answer is -55.

eval.jsonl has all held-out questions, with answers for the held-out loss. No question is in both files.
"""
import json
import os

from configurator import configure
from tasks.reasoning_gym import gym_rows
# ------------------------------------------------------------------------------------------------------------
out = "out/worked"              # the folder of train.jsonl and eval.jsonl
rows = 300                      # training questions
styles = "plain,parts,swap"     # those that are taken in turns
seed = 0                        # of the training questions
# ------------------------------------------------------------------------------------------------------------
TASK = "chain_sum,max_terms=2,max_digits=2"


def plain(a, sign, b, value):
    return f"{a} {sign} {b} = {value}."


def parts(a, sign, b, value):
    """The tens first, then the ones, on the larger number of a difference."""
    large, small = (a, b) if sign == "+" else (max(a, b), min(a, b))
    steps = []
    for part in (small // 10 * 10, small % 10):
        if part:
            result = large + part if sign == "+" else large - part
            steps.append(f"{large} {sign} {part} = {result}")
            large = result
    return ", ".join([*steps, f"so {a} {sign} {b} = {value}."]) if steps else plain(a, sign, b, value)


def swap(a, sign, b, value):
    """What the larger number has to do with it."""
    if sign == "+":
        return f"{a} + {b} is the same as {b} + {a}, and {b} + {a} = {value}."
    if value == 0:
        return f"{a} is the same as {b}, so it is 0."
    large, small = max(a, b), min(a, b)
    return f"{large} is more than {small}, and {large} - {small} = {large - small}, so it is {value}."


STYLES = {"plain": plain, "parts": parts, "swap": swap}


def worked(row, style):
    """Return a row of the task with an answer in a style."""
    a, sign, b = row["metadata"]["expression"].split()
    a, b = int(a), int(b)
    value = a + b if sign == "+" else a - b
    assert str(value) == row["answer"]
    return row | {"completion": f"{STYLES[style](a, sign, b, value)} The answer is {value}.", "style": style}


if __name__ == "__main__":
    configure(globals())
    os.makedirs(out, exist_ok=True)
    names = styles.split(",")
    for split, count in (("train", rows), ("eval", 128)):
        with open(f"{out}/{split}.jsonl", "w") as file:
            for number, (_, row) in enumerate(gym_rows(TASK, split, count, seed if split == "train" else 0)):
                file.write(json.dumps(worked(row, names[number % len(names)])) + "\n")
    print(f"{out}: {rows} worked answers in the styles {styles}")
