"""Problems: the rows of a task, their prompts as tokens, and which of them a step uses.

A row is a dict. Its `prompt` is a string or a list of chat messages, and the reward gets every other column.

    load_rows      the rows of a task: algebra and countdown are generated, gsm8k is fetched, file is your own
    load_prompts   a run's training and held-out rows, encoded, without those that are too long
    encode_prompt  a row's prompt as token ids
    epoch_rows     which rows a step uses, from its position in the endless sequence of epochs
    next_rows      the same for a run in which prompts rest, as record_visits notes
"""
import functools
import json
import math
import numbers
import os
import random
import urllib.request
import zlib
from fractions import Fraction
from types import SimpleNamespace
from typing import NamedTuple

# ------------------------------------------------------------------------------------------------------------
# algebra. A template draws (problem, steps of the worked solution, answer). At difficulty 1 the numbers are
# small and each step is one small operation on the text before it, so that a model of a million parameters
# learns it in minutes. Difficulty d scales the numbers and brings signs, coefficients, layers and fractions.


def term(k, name=""):
    """Returns a signed term of a sum: +2x, -x, +3, and nothing for 0."""
    digits = "" if name and abs(k) == 1 else abs(k)
    return f"{'-' if k < 0 else '+'}{digits}{name}" if k else ""


def polynomial(coefficients, name="x"):
    """Returns the text of a polynomial, the highest power first: [1, -5, 6] is x^2-5x+6."""
    powers = range(len(coefficients) - 1, -1, -1)
    names = [f"{name}^{power}" if power > 1 else name * power for power in powers]
    return "".join(map(term, coefficients, names)).removeprefix("+")


def nonzero(rng, low, high):
    """Draws a whole number from low to high, never 0; low = n * (1 - d) keeps it positive at difficulty 1."""
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
        # A larger number is never subtracted, so that no value goes below zero.
        op = rng.choice("+*" if other > value else "+*-")
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
    # Horner's rule
    for k in coefficients[1:]:
        steps += [f"{value}*{x}{term(k)}", f"{value * x}{term(k)}"]
        value = value * x + k
    return f"Remainder of ({polynomial(coefficients)})/({polynomial([1, -x])})", steps, value


def quadratics(rng, d):
    m, p, c = rng.randint(1, d), nonzero(rng, 6 * (1 - d), 6 * d), rng.randint(0, 9 * d)
    # The roots are p/m < q/m.
    q = p + m * rng.randint(1, 7 * d)
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
    # Two values at a time are joined until only the target is left.
    while len(values) > 1:
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


def load_rows(task, split, count, seed=0, difficulty=1, train_file="", eval_file=""):
    """Returns the rows of a task's split, "train" or "eval".

    algebra and countdown generate `count` distinct problems; count 0 stands for 4,096 of "train" and 128 of
    "eval", or all that the task has if it has fewer. gsm8k and file give their first `count` rows, or all of
    them for 0. Without an eval_file task file sets one in eight prompts of train_file aside: their rows are
    "eval", the others "train". Raises ValueError if there are no such rows, or fewer distinct problems than
    `count`; a message about a row of a file begins with file:line.
    """
    if count < 0:
        raise ValueError(f"{split}_prompts must not be negative, but is {count}")
    if task == "gsm8k":
        return gsm8k_rows(split)[:count or None]
    if task == "file":
        return file_rows(split, train_file, eval_file)[:count or None]
    if task not in GENERATORS:
        raise ValueError(f"task must be {', '.join(GENERATORS)}, gsm8k or file, not {task!r}")
    if not isinstance(difficulty, int) or not 1 <= difficulty <= 100:
        raise ValueError(f"difficulty must be a whole number from 1 to 100, not {difficulty!r}")
    if count > 1_000_000:
        raise ValueError(f"{split}_prompts={count}: at most 1,000,000 problems are generated")
    wanted = count or {"train": 4096, "eval": 128}[split]
    rng, rows, misses = random.Random(f"{task} {split} {seed} {difficulty}"), {}, 0
    while len(rows) < wanted:
        text, columns = GENERATORS[task](rng, difficulty)
        if text not in rows and held_out(text) == (split == "eval"):
            rows[text], misses = {"prompt": [{"role": "user", "content": text}], **columns}, 0
        elif (misses := misses + 1) == 20_000:
            if rows and not count:
                break
            raise ValueError(f"task {task} at difficulty {difficulty} has only {len(rows)} distinct {split} "
                             f"problems, not {count}: lower {split}_prompts or raise difficulty")
    return list(rows.values())


def held_out(text):
    # A stable hash of the prompt's text decides its split, so that no two seeds can mix training and
    # evaluation, and both rows of a prompt that stands in two are on the same side.
    return zlib.crc32(text.encode()) % 8 == 0


def gsm8k_rows(split):
    # Cobbe et al. 2021, https://arxiv.org/abs/2110.14168, in its original files, which are kept in a cache
    # folder. The prompt is verl's.
    name = {"train": "train.jsonl", "eval": "test.jsonl"}[split]
    url = f"https://raw.githubusercontent.com/openai/grade-school-math/master/grade_school_math/data/{name}"
    path = os.path.expanduser(f"~/.cache/gsm8k/{name}")
    if not os.path.exists(path):
        try:
            with urllib.request.urlopen(url, timeout=30) as response:
                content = response.read()
        except OSError as error:
            raise ValueError(f"gsm8k: {error}. Download {url} elsewhere and put it at {path}, or use a file "
                             "of your own rows: --task=file --train_file=...") from error
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(part := f"{path}.{os.getpid()}", "wb") as file:
            file.write(content)
        # The file appears whole or not at all, whoever else is writing it.
        os.replace(part, path)
    rows = []
    for where, row in read_rows(path):
        question, solution = row.get("question"), row.get("answer")
        if not isinstance(question, str) or not isinstance(solution, str) or "####" not in solution:
            raise ValueError(f"{where}: not a row of GSM8K; remove the file, and it is fetched again")
        text = question + ' Let\'s think step by step and output the final answer after "####".'
        answer = solution.rpartition("####")[2].strip().replace(",", "")
        rows.append({"prompt": [{"role": "user", "content": text}], "answer": answer, "source": "gsm8k",
                     "solution": solution})
    if not rows:
        raise ValueError(f"{path}: no rows; remove the file, and it is fetched again")
    return rows


def file_rows(split, train_file, eval_file):
    # Takes TRL's rows (with answer, ground_truth or solution) and verl's (with reward_model and data_source).
    path = eval_file if split == "eval" and eval_file else train_file
    if not path:
        raise ValueError("task file needs train_file" if split == "train" else
                         "task file needs eval_file, or train_file to hold rows out of")
    rows, lacking = [], None
    for where, row in read_rows(path):
        check_row(where, row)
        model = row["reward_model"] if isinstance(row.get("reward_model"), dict) else {}
        # verl's ground truth may be anything that a reward understands. Only text and numbers are answers.
        judged = model.get("ground_truth") if is_answer(model.get("ground_truth")) else None
        truths = {"answer": row.get("answer"), "ground_truth": row.get("ground_truth"),
                  "reward_model.ground_truth": judged, "solution": row.get("solution")}
        key = next((key for key, truth in truths.items() if truth is not None), None)
        if key and not is_answer(truths[key]):
            raise ValueError(f"{where}: {key} must be text or a finite number, not {truths[key]!r:.100}; "
                             "a list may hold several; a column of another name goes to the reward as it is")
        truth = truths.get(key)
        answer = list(map(str, truth)) if isinstance(truth, list) else str(truth) if key else None
        lacking = lacking or (where if answer is None else None)
        added = {"answer": answer, "source": row.get("data_source", row.get("source"))}
        rows.append(row | {key: value for key, value in added.items() if value is not None})
    if not rows:
        raise ValueError(f"{path}: no rows")
    if lacking and any(row.get("answer") is not None for row in rows):
        raise ValueError(f"{lacking}: no answer, ground_truth, reward_model.ground_truth or solution, "
                         "which other rows have")
    # Every row gets every column, so that a reward gets the same columns at every step.
    columns = dict.fromkeys(key for row in rows for key in row)
    rows = [dict.fromkeys(columns) | row for row in rows]
    if eval_file:
        return rows
    sides = {"train": [], "eval": []}
    for row in rows:
        sides["eval" if held_out(whole_text(row["prompt"])) else "train"].append(row)
    if not all(sides.values()):
        raise ValueError(f"{path}: without an eval_file a hash of the prompt sets one in eight rows aside "
                         f"for evaluation, here {len(sides['eval'])} of {len(rows)}, which leaves one side "
                         "empty")
    return sides[split]


def read_rows(path):
    # Yields (where, row); a message about the row begins with `where`.
    if not os.path.isfile(path):
        raise ValueError(f"{path}: no such file")
    if path.endswith(".parquet"):
        import pyarrow.parquet
        try:
            rows = pyarrow.parquet.read_table(path).to_pylist()
        # pyarrow has errors of its own.
        except Exception as error:
            raise ValueError(f"{path}: not a parquet file that can be read ({error})") from error
        yield from ((f"{path}: row {number}", row) for number, row in enumerate(rows, 1))
    elif path.endswith(".jsonl"):
        try:
            with open(path, "rb") as file:
                lines = file.read().splitlines()
        except OSError as error:
            raise ValueError(f"{path}: cannot be read ({error.strerror})") from error
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    row = json.loads(line.decode("utf-8-sig"))
                except (ValueError, RecursionError) as error:
                    raise ValueError(f"{path}:{number}: not JSON ({error})") from error
                if not isinstance(row, dict):
                    raise ValueError(f"{path}:{number}: not an object")
                yield f"{path}:{number}", row
    else:
        raise ValueError(f"{path}: rows are read from .jsonl and .parquet files")


def check_row(where, row):
    def need(condition, problem):
        if not condition:
            raise ValueError(f"{where}: {problem}")

    prompt = row.get("prompt")
    need(prompt is not None, f"no prompt; the columns are {', '.join(row) or 'none'}")
    need(isinstance(prompt, (str, list)),
         f"prompt must be a string or a list of messages, not {type(prompt).__name__}")
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    for message in messages:
        need(isinstance(message, dict) and all(isinstance(message.get(k), str) for k in ("role", "content")),
             f"a message needs a role and a content, both strings: {str(message)[:100]}")
    need(any(message["content"].strip() for message in messages), "empty prompt")
    try:
        text = json.dumps(prompt, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        need(False, f"the prompt cannot be written as JSON: {error}")
    need(text == text.encode(errors="ignore").decode(), "the prompt has half a surrogate pair")
    for key in ("prompts", "completions"):
        need(key not in row, f"a column must not be named {key}: a reward gets something else by that name")


def is_answer(value):
    # A text that says something, a number other than NaN and infinity, or a list of these.
    if isinstance(value, list):
        return value != [] and all(is_answer(one) and not isinstance(one, list) for one in value)
    return bool(value.strip()) if isinstance(value, str) else (
        isinstance(value, numbers.Number) and value - value == 0)


# ------------------------------------------------------------------------------------------------------------
# prompts


class Prompt(NamedTuple):
    row: dict
    ids: list               # token ids, those of the chat template included


def load_prompts(tokenizer, settings, world_size=1):
    """Returns a run's training prompts, its held-out prompts (lists of Prompt) and a sentence about both.

    settings: what configure returns. Prompts of more than max_prompt_length tokens are left out. The held-out
    prompts are the same for every seed. Raises ValueError where load_rows or encode_prompt does, and if too
    few prompts are left for a step, or too few held-out ones for the ranks.
    """
    s = SimpleNamespace(**settings)
    train_set, train_origin = fitting_prompts(tokenizer, s, "train", s.train_prompts, s.seed)
    eval_set, eval_origin = fitting_prompts(tokenizer, s, "eval", s.eval_prompts, 0)
    batches = settings.get("max_num_gen_batches", 1)
    if len(train_set) < s.prompts_per_step * batches:
        raise ValueError(f"prompts_per_step={s.prompts_per_step}" + f" times max_num_gen_batches={batches}"
                         * (batches > 1) + f" is more than the {len(train_set)} training prompts")
    if len(eval_set) < world_size:
        raise ValueError(f"eval_prompts: {len(eval_set)} held-out prompts are fewer than {world_size} ranks")
    return train_set, eval_set, (f"The run trains on {len(train_set):,} prompts ({train_origin}) and is "
                                 f"evaluated on {len(eval_set):,} held-out prompts ({eval_origin}).")


def fitting_prompts(tokenizer, s, split, count, seed):
    # Returns the prompts of a split and where they come from. All rows of a file are loaded, even where only
    # the first `count` are used, because the text says how many there are.
    asked = count if s.task in GENERATORS else min(count, 0)
    rows = load_rows(s.task, split, asked, seed, s.difficulty, s.train_file, s.eval_file)
    prompts = [Prompt(row, encode_prompt(tokenizer, row["prompt"], s.chat, s.system_prompt))
               for row in rows[:count or None]]
    first = prompts[:32]
    if len({tuple(ids) for _, ids in first}) == 1 < len({repr(row["prompt"]) for row, _ in first}):
        raise ValueError(f"model={s.model}: its chat template gives the same tokens for different prompts, "
                         f"{tokenizer.decode(prompts[0].ids)!r:.200}")
    fitting = [prompt for prompt in prompts if len(prompt.ids) <= s.max_prompt_length]
    if not fitting:
        shortest = min(len(prompt.ids) for prompt in prompts)
        raise ValueError(f"max_prompt_length={s.max_prompt_length}: none of the {len(prompts)} {split} "
                         f"prompts fits; the shortest has {shortest} tokens")
    origin = f"{len(prompts):,} generated problems"
    if s.task not in GENERATORS:
        part = "all" if len(prompts) == len(rows) else f"the first {len(prompts):,} of"
        file = s.eval_file if split == "eval" and s.eval_file else s.train_file
        origin = f"{part} {len(rows):,} rows of {file if s.task == 'file' else s.task}"
    if s.task == "file" and not s.eval_file:
        origin += f" that are {'' if split == 'eval' else 'not '}held out"
    left_out = len(prompts) - len(fitting)
    return fitting, origin + (f", without {left_out:,} that are longer than max_prompt_length="
                              f"{s.max_prompt_length} tokens" if left_out else "")


def checksum(prompts):
    """Returns the CRC-32 of the rows of prompts, by which a resumed run knows its data again."""
    value = 0
    for prompt in prompts:
        value = zlib.crc32(json.dumps(prompt.row, default=str).encode(), value)
    return value


def encode_prompt(tokenizer, prompt, chat=True, system_prompt=""):
    """Returns the token ids of a row's prompt.

    Messages go through the tokenizer's chat template, or with chat=False are joined to plain text; a string
    is taken as it is. Raises ValueError for messages without a template, and for a system prompt with a
    string.
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
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    # Templates raise all kinds of errors, about the order of roles, for example.
    except Exception as error:
        raise ValueError(f"the chat template fails: {error}; the messages are {messages!r:.300}") from error


def prompt_text(prompt):
    """Returns what people want to see of a prompt: the string, or the last message's content."""
    return prompt if isinstance(prompt, str) else prompt[-1]["content"]


def whole_text(prompt):
    # All of the prompt: the string, or the contents of all messages.
    return prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)


# ------------------------------------------------------------------------------------------------------------
# the sequence of epochs


@functools.lru_cache(maxsize=4)
def epoch_order(num_rows, epoch, seed):
    return random.Random(f"{seed} {epoch}").sample(range(num_rows), num_rows)


def epoch_rows(num_rows, position, count, seed):
    """Returns `count` row numbers from `position` on in an endless sequence of epochs.

    Each epoch is its own permutation of the rows, so a row may come twice where an epoch ends. Raises
    ValueError for count > num_rows.
    """
    if count > num_rows:
        raise ValueError(f"prompts_per_step={count} is more than the {num_rows} training rows")
    places = [divmod(position + i, num_rows) for i in range(count)]
    return [epoch_order(num_rows, epoch, seed)[place] for epoch, place in places]


# ------------------------------------------------------------------------------------------------------------
# prompts that rest (train_dapo.py)


def next_rows(num_rows, position, count, seed, rests):
    """Returns the next `count` row numbers from `position` on that do not rest, and the new position.

    The sequence is that of epoch_rows. Rows that rest (see record_visits; [] for none) are passed over, which
    shortens their rest in `rests` itself. A row may come twice where an epoch ends or where many others rest.
    Position and rests are all that resuming needs. Raises ValueError for count > num_rows.
    """
    if count > num_rows:
        raise ValueError(f"prompts_per_step={count} is more than the {num_rows} training rows")
    rows = []
    while len(rows) < count:
        epoch, place = divmod(position, num_rows)
        row, position = epoch_order(num_rows, epoch, seed)[place], position + 1
        if rests and rests[row] > 0:
            rests[row] -= 1
        else:
            rows.append(row)
    return rows, position


def record_visits(alike, rests, rows, stds, skip_after):
    """Notes a visit to each of the rows in `alike` and `rests`, which have an entry for every training row.

    alike: the number of visits in a row, up to the last one, in which all completions had the same score (std
    0); a prompt that is always right or always wrong teaches nothing. Once there are skip_after of them (0:
    never) the row rests after each visit, each time for one epoch more than the last time: rests has the
    epochs that are left. No row is lost, but it costs less and less.
    """
    for row, std in zip(rows, stds):
        alike[row] = 0 if std > 0 else alike[row] + 1
        rests[row] = max(0, alike[row] - skip_after + 1) if skip_after else 0
