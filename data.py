"""Problems: the rows of a task, their prompts as tokens, and which of them a step uses.

A row is a dict. Its `prompt` is a string or a list of chat messages; every other column goes to the reward.

    load_rows      the rows of a task: algebra and countdown are generated, gsm8k is fetched, file is your own
    encode_prompt  a row's prompt as token ids
    next_rows      which rows come next, from the position in the stream and the history of visits
    record_visits  how the prompts went, and which of them rest
"""
import functools
import json
import math
import os
import random
import urllib.request
import zlib
from fractions import Fraction

# ------------------------------------------------------------------------------------------------------------
# algebra. A template draws (problem, steps of the worked solution, answer). At difficulty 1 the numbers are
# small and each step is one small operation on the text before it, so that a model of a million parameters
# learns it in minutes; difficulty d scales the numbers and brings signs, coefficients, layers and fractions.


def term(k, name=""):
    """A signed term of a sum: +2x, -x, +3, and nothing for 0."""
    digits = "" if name and abs(k) == 1 else abs(k)
    return f"{'-' if k < 0 else '+'}{digits}{name}" if k else ""


def polynomial(coefficients, name="x"):
    """The text of a polynomial, highest power first: [1, -5, 6] is x^2-5x+6."""
    powers = range(len(coefficients) - 1, -1, -1)
    names = [f"{name}^{power}" if power > 1 else name * power for power in powers]
    return "".join(map(term, coefficients, names)).removeprefix("+")


def nonzero(rng, low, high):
    """A whole number from low to high, never 0; low = n * (1 - d) keeps it positive at difficulty 1."""
    return rng.choice([value for value in range(low, high + 1) if value])


def absolute_value(rng, d):
    k, m, a = rng.randint(1, d), rng.randint(1, d), nonzero(rng, -9 * d, 4 * d)
    size, c = rng.randint(1, 9 * d), rng.randint(1, 9 * d)
    inside = polynomial([m, a])
    left = polynomial([k, c], f"|{inside}|")
    steps = [f"|{inside}|={size}", f"{polynomial([m, 0])}={size}{term(-a)}"]
    return f"Larger solution of {left}={k * size + c}", steps, Fraction(size - a, m)


def arithmetic_sequence(rng, d):
    first, n = nonzero(rng, 9 * (1 - d), 9 * d), rng.randint(4, 10 * d)
    gap = Fraction(nonzero(rng, 9 * (1 - d), 9 * d), rng.randint(1, d))
    rise = (n - 1) * gap
    steps = [f"d={gap}", f"{n - 1}*{gap}={rise}", f"{first}{term(rise)}"]
    return f"Term {n} of {first}, {first + gap}, {first + 2 * gap}, ...", steps, first + rise


def exponents(rng, d):
    base, power = rng.choice([(b, p) for b in range(2, 11) for p in range(1, 9) if b ** p <= 1000 * d])
    factors = [(i, rng.randint(1, d), nonzero(rng, -9 * d, 4 * d)) for i in range(1, d + 1)]
    k, c = sum(i * m for i, m, a in factors), sum(i * a for i, m, a in factors)
    left = "*".join(f"{base ** i}^({polynomial([m, a])})" for i, m, a in factors)
    steps = [f"{base}^({polynomial([k, c])})={base}^{power}", f"{polynomial([k, 0])}={power}{term(-c)}"]
    return f"Solve {left}={base ** power}", steps, Fraction(power - c, k)


def fractions(rng, d):
    bottoms = [rng.randint(2, 5 + 2 * d) for _ in range(d + 1)]
    value, *others = [Fraction(rng.randint(1, bottom - 1), bottom) for bottom in bottoms]
    text, steps = str(value), []
    for other in others:
        op = rng.choice("+*" if other > value else "+*-")                   # nothing goes below zero
        text = f"({text}){op}{other}" if steps else f"{text}{op}{other}"
        top, bottom = value.numerator * other.numerator, value.denominator * other.denominator
        if op != "*":
            bottom = math.lcm(value.denominator, other.denominator)
            a, b = int(value * bottom), int(other * bottom)
            steps.append(f"{a}/{bottom}{op}{b}/{bottom}")
            top = a + b if op == "+" else a - b
        steps.append(f"{top}/{bottom}")
        value = Fraction(top, bottom)
    return f"Compute {text}", steps, value


def nested_linear(rng, d):
    x, shift = rng.randint(0, 6 * d), nonzero(rng, -5 * d, 5 * d)
    text, value = f"x{term(shift)}", x + shift
    states = [f"x={value}{term(-shift)}"]
    for layer in range(d):
        factor, shift = rng.randint(2, 2 + d), nonzero(rng, -5 * d, 5 * d)
        states.append(f"{factor}({text})={factor * value}")
        text, value = f"{factor}({text}){term(shift)}", factor * value + shift
        states.append(f"{text}={value}")
    factor = rng.randint(2, 2 + d)
    return f"Solve {factor}({text})={factor * value}", states[::-1], x


def polynomial_remainder(rng, d):
    x, lead, last = nonzero(rng, 5 * (1 - d), 5 * d), rng.randint(1, d), nonzero(rng, -9 * d, 9 * d)
    coefficients = [lead, *(nonzero(rng, 9 * (1 - d), 9 * d) for power in range(d)), last]
    value, steps = lead, [f"x={x}"]
    for k in coefficients[1:]:                                              # Horner's rule
        steps += [f"{value}*{x}{term(k)}", f"{value * x}{term(k)}"]
        value = value * x + k
    return f"Remainder of ({polynomial(coefficients)})/({polynomial([1, -x])})", steps, value


def quadratics(rng, d):
    m, p, c = rng.randint(1, d), nonzero(rng, 6 * (1 - d), 6 * d), rng.randint(0, 9 * d)
    q = p + m * rng.randint(1, 7 * d)                                       # the roots are p/m < q/m
    a, b = m * m, -m * (p + q)
    steps = [f"{polynomial([a, b, p * q])}=0", f"({polynomial([m, -p])})({polynomial([m, -q])})=0"]
    return f"Larger root of {polynomial([a, b, p * q + c])}={c}", steps, Fraction(q, m)


def systems(rng, d):
    x, y = (nonzero(rng, 9 * (1 - d), 9 * d) for name in "xy")
    a, b, k, m = rng.randint(1, 2 * d), rng.randint(1, 2 * d), rng.randint(1, d), rng.randint(1, d)
    first, second, wanted = a * x + k * y, b * x - m * k * y, rng.choice("xy")
    ax, bx, total = (term(coefficient, "x")[1:] for coefficient in (a, b, m * a + b))
    steps = [f"{total}={m * first}{term(second)}", f"{total}={m * first + second}"]
    if wanted == "y":
        steps += [f"x={x}", f"{term(k, 'y')[1:]}={first}{term(-a * x)}"]
    text = f"{ax}{term(k, 'y')}={first}, {bx}{term(-m * k, 'y')}={second}. Find {wanted}"
    return text, steps, x if wanted == "x" else y


TEMPLATES = (absolute_value, arithmetic_sequence, exponents, fractions, nested_linear, polynomial_remainder,
             quadratics, systems)


def algebra_problem(rng, difficulty):
    template = rng.choice(TEMPLATES)
    text, steps, answer = template(rng, difficulty)
    solution = "\n".join([*steps, f"Answer: {answer}"])
    return text, {"answer": str(answer), "source": template.__name__, "solution": solution}


def countdown_problem(rng, difficulty):
    numbers = sorted(rng.randint(1, 10 * difficulty) for _ in range(difficulty + 2))
    values = [(number, str(number)) for number in numbers]
    while len(values) > 1:                                      # join two, until the target is left
        rng.shuffle(values)
        (b, right), (a, left) = sorted([values.pop(), values.pop()])
        results = {"+": a + b, "-": a - b, "*": a * b, "/": a // b}
        barred = {"-": a == b, "*": a * b > 100 * difficulty, "/": a % b > 0}
        op = rng.choice([op for op in results if not barred.get(op)])
        values.append((results[op], f"({left}{op}{right})"))
    target, answer = values[0][0], values[0][1][1:-1]
    text = f"Use {', '.join(map(str, numbers))} once each to make {target}"
    return text, {"answer": answer, "source": "countdown", "solution": f"Answer: {answer}",
                  "numbers": numbers, "target": target}


GENERATORS = {"algebra": algebra_problem, "countdown": countdown_problem}

# ------------------------------------------------------------------------------------------------------------
# rows


def load_rows(task, split, count, seed=0, difficulty=1, file=""):
    """The rows of a task's split, "train" or "eval".

    algebra and countdown make `count` distinct problems; gsm8k and file give their first `count`, 0 for all.
    Raises ValueError where there are none such; about a row of a file, the message begins with file:line.
    """
    if task == "gsm8k":
        return gsm8k_rows(split)[:count or None]
    if task == "file":
        return file_rows(file, split)[:count or None]
    if task not in GENERATORS:
        raise ValueError(f"task must be {', '.join(GENERATORS)}, gsm8k or file, not {task!r}")
    if not isinstance(difficulty, int) or difficulty < 1:
        raise ValueError(f"difficulty must be a whole number from 1, not {difficulty!r}")
    if count < 1:
        raise ValueError(f"{split}_prompts must be at least 1 for task {task}, not {count}")
    rng, rows, misses = random.Random(f"{task} {split} {seed} {difficulty}"), {}, 0
    while len(rows) < count:
        text, columns = GENERATORS[task](rng, difficulty)
        # a stable hash of the text decides its split, so that no two seeds can mix training and evaluation
        if text not in rows and (zlib.crc32(text.encode()) % 8 == 0) == (split == "eval"):
            rows[text], misses = {"prompt": [{"role": "user", "content": text}], **columns}, 0
        elif (misses := misses + 1) == 20_000:
            raise ValueError(f"task {task} at difficulty {difficulty} has only {len(rows)} distinct {split} "
                             f"problems; asked for {count}: lower {split}_prompts or raise difficulty")
    return list(rows.values())


def gsm8k_rows(split):
    # Cobbe et al., arXiv 2110.14168, in its original files, kept in a cache folder. The prompt is verl's.
    name = {"train": "train.jsonl", "eval": "test.jsonl"}[split]
    url = f"https://raw.githubusercontent.com/openai/grade-school-math/master/grade_school_math/data/{name}"
    path = os.path.expanduser(f"~/.cache/gsm8k/{name}")
    if not os.path.exists(path):
        try:
            with urllib.request.urlopen(url, timeout=30) as response:
                content = response.read()
        except OSError as error:
            raise ValueError(f"gsm8k: {error}. Download {url} elsewhere and put it at {path}, or use a file "
                             "of your own rows: --task=file --train_file=... --eval_file=...") from error
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(part := f"{path}.{os.getpid()}", "wb") as file:
            file.write(content)
        os.replace(part, path)                                  # whole or not at all, whoever else writes it
    rows = []
    for _, row in read_rows(path):
        text = row["question"] + ' Let\'s think step by step and output the final answer after "####".'
        answer = row["answer"].rpartition("####")[2].strip().replace(",", "")
        rows.append({"prompt": [{"role": "user", "content": text}], "answer": answer, "source": "gsm8k",
                     "solution": row["answer"]})
    return rows


def file_rows(path, split):
    # TRL's rows (answer, ground_truth or solution beside the prompt) and verl's (reward_model, data_source)
    if not path:
        raise ValueError(f"task file needs {split}_file")
    rows, lacking = [], None
    for where, row in read_rows(path):
        check_row(where, row)
        model = row["reward_model"] if isinstance(row.get("reward_model"), dict) else {}
        truths = [row.get("answer"), row.get("ground_truth"), model.get("ground_truth"), row.get("solution")]
        answer = next((str(truth) for truth in truths if truth is not None), None)
        lacking = lacking or (where if answer is None else None)
        added = {"answer": answer, "source": row.get("data_source", row.get("source"))}
        rows.append(row | {key: value for key, value in added.items() if value is not None})
    if not rows:
        raise ValueError(f"{path}: no rows")
    if lacking and any(row.get("answer") is not None for row in rows):
        raise ValueError(f"{lacking}: no answer, ground_truth, reward_model.ground_truth or solution, "
                         "which other rows have")
    columns = dict.fromkeys(key for row in rows for key in row)     # a reward gets the same at every step
    return [dict.fromkeys(columns) | row for row in rows]


def read_rows(path):
    # yields (where, row): what a message about the row begins with, and the row
    if not os.path.isfile(path):
        raise ValueError(f"{path}: no such file")
    if path.endswith(".parquet"):
        import pyarrow.parquet
        try:
            rows = pyarrow.parquet.read_table(path).to_pylist()
        except (OSError, ValueError) as error:
            raise ValueError(f"{path}: not a parquet file ({error})") from error
        yield from ((f"{path}: row {number}", row) for number, row in enumerate(rows, 1))
    elif path.endswith(".jsonl"):
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    try:
                        row = json.loads(line)
                    except (ValueError, RecursionError) as error:
                        raise ValueError(f"{path}:{number}: not JSON ({error})") from error
                    yield f"{path}:{number}", row
    else:
        raise ValueError(f"{path}: rows are read from .jsonl and .parquet files")


def check_row(where, row):
    def need(condition, problem):
        if not condition:
            raise ValueError(f"{where}: {problem}")

    need(isinstance(row, dict), "not an object")
    prompt = row.get("prompt")
    need(prompt is not None, f"no prompt; the columns are {', '.join(row) or 'none'}")
    need(isinstance(prompt, (str, list)),
         f"prompt must be a string or a list of messages, not {type(prompt).__name__}")
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    for message in messages:
        need(isinstance(message, dict) and all(isinstance(message.get(k), str) for k in ("role", "content")),
             f"a message needs a role and a content, both strings: {str(message)[:100]}")
    need(any(message["content"].strip() for message in messages), "empty prompt")


# ------------------------------------------------------------------------------------------------------------
# prompts


def encode_prompt(tokenizer, prompt, chat=True, system_prompt=""):
    """The token ids of a row's prompt.

    Messages go through the tokenizer's chat template, or with chat=False are joined to plain
    text; a string is taken as it is. Raises ValueError for messages without a template, and for
    a system prompt with a string.
    """
    if isinstance(prompt, str):
        if system_prompt:
            raise ValueError("system_prompt needs prompts that are lists of messages; these are strings")
        return tokenizer(prompt).input_ids
    messages = ([{"role": "system", "content": system_prompt}] if system_prompt else []) + prompt
    if not chat:
        return tokenizer("".join(message["content"] + "\n" for message in messages)).input_ids
    if tokenizer.chat_template is None:
        raise ValueError("chat=True, but the tokenizer has no chat template; --chat=false joins the messages")
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def prompt_text(prompt):
    """The text of a prompt, for people: the string, or the last message's content."""
    return prompt if isinstance(prompt, str) else prompt[-1]["content"]


# ------------------------------------------------------------------------------------------------------------
# the prompt stream


@functools.lru_cache(maxsize=4)
def epoch_order(num_rows, epoch, seed):
    return random.Random(f"{seed} {epoch}").sample(range(num_rows), num_rows)


def next_rows(num_rows, position, count, seed, history):
    """The next `count` rows of an endless sequence of epochs, each its own permutation, and the new position.

    Rows that rest by their history (record_visits; {} for none) are passed over, which shortens their rest,
    in `history` itself. A row may come twice, where an epoch ends or many others rest. Position and history
    are all that resuming needs. Raises ValueError for count > num_rows.
    """
    if count > num_rows:
        raise ValueError(f"prompts_per_step={count} is more than the {num_rows} training rows")
    rows = []
    while len(rows) < count:
        epoch, place = divmod(position, num_rows)
        row, position = epoch_order(num_rows, epoch, seed)[place], position + 1
        visits = history.get(str(row))
        if visits and visits["rest"] > 0:
            visits["rest"] -= 1
        else:
            rows.append(row)
    return rows, position


def record_visits(history, rows, means, stds, skip_after):
    """Add a visit to each row's history: {str(row): {means, alike, rest}}.

    means: the mean scores of all its visits, for who reads a checkpoint's state.json. alike: in how many
    visits, up to the last, all completions scored alike (std 0): a prompt that is always right or always
    wrong teaches nothing. From skip_after of those on (0: never) it rests after each visit, for one epoch
    more than after the one before: it is never lost, and costs less and less.
    """
    for row, mean, std in zip(rows, means, stds):
        visits = history.setdefault(str(row), {"means": [], "alike": 0, "rest": 0})
        visits["means"].append(mean)
        visits["alike"] = 0 if std > 0 else visits["alike"] + 1
        visits["rest"] = max(0, visits["alike"] - skip_after + 1) if skip_after else 0
