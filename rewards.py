"""Rewards: one score for each completion, from a verifier of final answers or from a function of yours.

    check_answer  whether a completion's final answer is the right one
    load_reward   the task's own reward, or a function of yours ("file.py:function", in TRL's or verl's form)
    score         calls a reward on completions, inside a time limit, and checks what it returns
    evaluation    mean@k, pass@k, maj@k
"""
import contextlib
import difflib
import importlib.util
import inspect
import math
import operator
import os
import re
import signal
import sys
from collections import Counter, defaultdict
from fractions import Fraction

# ------------------------------------------------------------------------------------------------------------
# answers


def extract_answer(text):
    r"""The last answer in a text: a \boxed{...}, or the rest of a line after `Answer:` or ####; else None."""
    text += "\n"
    opened, spans = [], []
    for mark in re.finditer(r"\\boxed\s*\{|\\.|[{}]|(?i:answer)\**\s*:|(?<!#)####(?!#)", text):
        if mark[0] == "}":
            if opened and (start := opened.pop())[0] != "{":
                spans.append((start.end(), mark.start()))
        elif mark[0][-1] == "{" and mark[0] != r"\{":
            opened.append(mark)
        elif mark[0][0] != "\\":
            spans.append((mark.end(), None))                    # to the end of the line
    for start, end in sorted(spans, reverse=True):
        if answer := text[start:end or text.index("\n", start)].strip(" \t\r\n*`"):
            return answer


LATEX = [(re.compile(pattern), replacement) for pattern, replacement in [
    (r"\\(?:text|textbf|mathrm|mathbf|mbox)\s*\{([^{}]*)\}", r" \1 "),
    (r"(\^|_|\\sqrt)\s*\{([^{}]*)\}", r"\1(\2)"),
    (r"\\[dt]?frac\s*(\d)\s*(\d)", r" \1/\2"),
    (r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r" (\1)/(\2)"),
    (r"\\left|\\right|\\[()\[\]!]|\\?[$£€%]|\^?\(?\\circ\)?|°", ""),
    (r"\{,\}", ","), (r"\\[,;: ]|~", " "), (r"[−–]", "-"), (r"\*\*", "^"),
    (r"\\times|\\cdot|[×·]", "*"), (r"\\div|÷", "/"),
    (r"^\s*\\?[a-z]\w*\s*=", "")]]
# A unit is up to three words after a number, or a metric symbol at it; some words are part of the value.
OPERATOR = "or|and|not|plus|minus|times|over|less|more|squared|cubed|pi|dozen|hundred|thousand|[mbtr]+illion"
WORD = rf"(?!(?:{OPERATOR})\b)(?:[a-z]{{2,}}|[mglsh])(?:\s?\^\(?[23]\)?)?"
UNIT = re.compile(rf"(?<=[\d)])(?:\s+{WORD}(?:[ /]{WORD}){{0,2}}|(?:[cmk]m|kg|ml)(?:\^\(?[23]\)?)?)$")
THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:(?:,\d{3})+|(?: \d{3})+)(?:\.\d+)?")
MIXED = re.compile(r"([-+]?)\s*(\d+)\s+\(?(\d+)\)?/\(?(\d+)\)?")


def plain(text):
    """The text without LaTeX, currencies, %, capitals, a leading `x =` and a trailing period."""
    if len(text) > 500:                                         # no answer; some patterns take quadratic time
        return text
    text = text.lower()
    for pattern, replacement in LATEX:
        text = pattern.sub(replacement, text)
    return text.strip().rstrip(" .,;")


def power(base, exponent):
    size = max(base.numerator.bit_length(), base.denominator.bit_length())
    if exponent.denominator != 1 or abs(exponent) * size > 4096:
        raise ValueError("not a fraction, or one too long")
    return base ** exponent


PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2, "^": 3}
OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "^": power}


def number(text):
    """The exact value of plain text like -3, 1,234, 0.5, 1 1/2, 5 cm or 2*(3+4)^2; None if it has none."""
    if len(text) > 200:                                         # bounds the recursion, too
        return None
    text = UNIT.sub("", text)
    text = re.sub("[, ]", "", text) if THOUSANDS.fullmatch(text) else text
    text = MIXED.sub(r"\1(\2+\3/\4)", text) if MIXED.fullmatch(text) else text
    tokens = re.findall(r"\d+\.?\d*|\.\d+|\S", text) + ["end"]

    def parse(level):                                           # as far as operators bind tighter than level
        token = tokens.pop(0)
        if token in ("+", "-"):
            value = OPERATIONS[token](0, parse(2))
        elif token == "(":
            value = parse(0)
            if tokens.pop(0) != ")":
                raise ValueError("unbalanced parentheses")
        else:
            value = Fraction(token)
        while PRECEDENCE.get(tokens[0], 0) > level:
            op = tokens.pop(0)
            value = OPERATIONS[op](value, parse(PRECEDENCE[op] - (op == "^")))
        return value

    with contextlib.suppress(ValueError, ZeroDivisionError):
        value = parse(0)
        return value if tokens == ["end"] else None


def same_answer(given, truth):
    """Whether two answers are equal: as exact numbers, or if neither is one as text, less spaces and LaTeX.

    Units, currencies and % are dropped: 50% is 50. Never raises, and no input makes it slow.
    """
    given, truth = plain(given), plain(truth)
    values = number(given), number(truth)
    if values != (None, None):
        return values[0] == values[1]
    return "".join(given.split()) == "".join(truth.split()) != ""


def check_answer(text, truth):
    """Whether a completion's final answer is the truth, which may itself be a worked solution."""
    given = extract_answer(text)
    return given is not None and same_answer(given, extract_answer(truth) or truth)


# ------------------------------------------------------------------------------------------------------------
# rewards. A reward is a function of prompts=, completions= and the rows' columns. It returns a value for each
# completion: a number, None (not scored), or a dict of named parts, the reward being the part "score" or else
# the sum of all. As in TRL a completion is a string, or where the prompt is messages a list of one message.


def content(completion):
    return completion if isinstance(completion, str) else completion[-1]["content"]


def accuracy(prompts, completions, answer, **columns):
    """1.0 for each completion whose final answer is the row's `answer`, else 0.0."""
    return [float(check_answer(content(completion), truth)) for completion, truth in zip(completions, answer)]


def countdown(prompts, completions, numbers, target, **columns):
    """1.0 for each expression of + - * / ( ) that uses every number once and equals the target, else 0.0."""
    rewards = []
    for completion, given, goal in zip(completions, numbers, target):
        text = "".join(plain(extract_answer(content(completion)) or "").partition("=")[0].split())
        right = re.fullmatch(r"[-+*/()0-9]+", text) and number(text) == goal
        rewards.append(float(bool(right) and sorted(map(int, re.findall(r"\d+", text))) == sorted(given)))
    return rewards


def load_reward(spec, task):
    """The reward that the spec "file.py:function" names; for "" the task's own.

    A function with verl's parameters (data_source, solution_str, ground_truth) is adapted; any other must be
    in TRL's form. Raises ValueError if there is no such function, or its file raises.
    """
    if not spec:
        return countdown if task == "countdown" else accuracy
    path, _, name = spec.rpartition(":")
    if not path.endswith(".py") or not name.isidentifier():
        raise ValueError(f"reward must be file.py:function, not {spec!r}")
    if not os.path.isfile(path):
        raise ValueError(f"reward: no such file: {path}")
    module_spec = importlib.util.spec_from_file_location("reward_file", path)
    module = sys.modules["reward_file"] = importlib.util.module_from_spec(module_spec)
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"reward: {path} raised {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        names = [key for key, value in vars(module).items() if callable(value)]
        near = ", ".join(difflib.get_close_matches(name, names) or names)
        raise ValueError(f"reward: {path} has no function {name}; it has {near or 'none'}")
    verl = {"data_source", "solution_str", "ground_truth"} <= inspect.signature(function).parameters.keys()
    return one_by_one(function) if verl else function


def one_by_one(compute_score):
    # verl's compute_score(data_source, solution_str, ground_truth, extra_info=None) as a reward
    def reward(prompts, completions, **columns):
        nothing = [None] * len(completions)
        if {"reward_model", "ground_truth", "answer"} & columns.keys():
            truths = columns.get("ground_truth", columns.get("answer", nothing))
            columns["ground_truth"] = [model["ground_truth"] if model else truth for model, truth in
                                       zip(columns.get("reward_model", nothing), truths)]
        columns = {"data_source": columns.get("source", nothing), "extra_info": nothing, **columns,
                   "solution_str": [content(completion) for completion in completions]}
        arguments = accepted(compute_score, columns)
        return [compute_score(**dict(zip(arguments, values))) for values in zip(*arguments.values())]
    reward.__name__, reward.one_by_one = compute_score.__name__, True
    return reward


def accepted(function, columns):
    # those of the columns that the function takes
    parameters = inspect.signature(function).parameters.values()
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    for p in named:
        if p.default is p.empty and p.name not in columns:
            there = ", ".join(columns)
            raise ValueError(f"reward {name_of(function)} needs a column {p.name}; the columns are {there}")
    if any(p.kind == p.VAR_KEYWORD for p in parameters):
        return columns
    return {p.name: columns[p.name] for p in named if p.name in columns}


def name_of(function):
    return getattr(function, "__name__", type(function).__name__)


class TimeUp(BaseException):
    """A reward ran out of time; not an Exception, so that no `except Exception` in the reward swallows it."""


@contextlib.contextmanager
def time_limit(seconds):
    # For the main thread. Python acts on the signal between its own instructions: a call into C that never
    # returns is not cut off. The signal repeats, for rewards that swallow even TimeUp; 0 seconds is no limit.
    def stop(*_):
        raise TimeUp
    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def score(reward, rows, texts, timeout):
    """(rewards, {part: values}, number of timeouts) of completions, nan for what has no value. A reward
    without named parts is its own only part, under the function's name.

    The reward gets `timeout` seconds (0: no limit) for the batch, or in verl's form for each completion. If a
    batch takes longer its completions are scored one by one, and those that still do get 0.0. RuntimeErrors
    show the completion at which the reward raised, or what it returned instead of a finite number for each.
    """
    shared = [key for key in rows[0] if key != "prompt" and all(key in row for row in rows)]

    def call(batch):                                            # (what the reward returned, what it raised)
        columns = {key: [rows[i][key] for i in batch] for key in shared}
        columns["prompts"] = [rows[i]["prompt"] for i in batch]
        columns["completions"] = [texts[i] if isinstance(rows[i]["prompt"], str) else
                                  [{"role": "assistant", "content": texts[i]}] for i in batch]
        columns = accepted(reward, columns)
        try:
            with time_limit(timeout):
                return reward(**columns), None
        except (Exception, TimeUp) as error:
            return None, error

    values, timeouts, culprit = [], 0, 0                        # 0 also if the batch raises, and none alone
    returned, error = call(range(len(rows))) if not hasattr(reward, "one_by_one") else (None, TimeUp())
    if error is None:
        values = checked(reward, returned, len(rows))
    for i in range(len(rows) if error is not None else 0):
        returned, own_error = call([i])
        if isinstance(own_error, TimeUp):
            returned, timeouts = [0.0], timeouts + 1
        elif own_error is not None:
            error, culprit = own_error, i
            break
        values += checked(reward, returned, 1)
    if isinstance(error, Exception):
        raise RuntimeError(f"reward {name_of(reward)} raised {type(error).__name__}: {error}; "
                           f"the completion is {texts[culprit][:500]!r}") from error
    names = dict.fromkeys(key for _, parts in values for key in parts)
    totals = [total for total, _ in values]
    named = {key: [parts.get(key, math.nan) for _, parts in values] for key in names}
    return totals, named or {name_of(reward): totals}, timeouts


def checked(reward, returned, count):
    # [(reward, parts)] of what a reward returned
    returned = returned.tolist() if hasattr(returned, "tolist") else returned       # an array, a tensor
    if not isinstance(returned, (list, tuple)) or len(returned) != count:
        what = f"{len(returned)} values" if isinstance(returned, (list, tuple)) else type(returned).__name__
        raise RuntimeError(f"reward {name_of(reward)} returned {what}, not a list of {count}, one each")

    def real(value):
        if not hasattr(value, "__float__") or not math.isfinite(value):
            raise RuntimeError(f"reward {name_of(reward)} returned {value!r:.100}: not a finite number")
        return float(value)

    def total_and_parts(value):
        if not isinstance(value, dict):
            return math.nan if value is None else real(value), {}
        if "score" in value:                                    # beside it, verl's functions put notes, too
            value = {key: part for key, part in value.items() if key == "score" or hasattr(part, "__float__")}
        parts = {key: real(part) for key, part in value.items() if part is not None}
        return parts.get("score", math.nan) if "score" in value or not parts else sum(parts.values()), parts

    return [total_and_parts(value) for value in returned]


def try_reward(reward, rows, timeout):
    """Score two made-up completions: a broken reward shows before a model is loaded. Raises ValueError."""
    try:
        _, _, timeouts = score(reward, (rows * 2)[:2], ["Answer: 0", ""], timeout)
    except RuntimeError as error:
        raise ValueError(error) from error
    if timeouts:
        raise ValueError(f"reward {name_of(reward)} took more than reward_timeout={timeout:g} seconds "
                         "for one completion")


# ------------------------------------------------------------------------------------------------------------
# evaluation


def evaluation(results, k):
    """mean@k, pass@k and maj@k over (source, score, answer) of k samples a prompt, the samples adjacent.

    mean@k  mean score
    pass@k  mean over prompts of the best score of k: for a 0/1 score, how often any of k samples is right
    maj@k   mean over prompts of the score of the commonest answer, the first of those equally common; a
            sample without an answer (None) has no vote, a prompt without votes scores as its first sample
    Over all prompts as eval/..., and for each source as eval/{source}/.... A sample that was not scored (nan)
    counts for nothing.
    """
    values = defaultdict(list)
    for i in range(0, len(results), k):
        source = results[i][0]
        scored = [(score, answer) for _, score, answer in results[i:i + k] if not math.isnan(score)]
        if not scored:
            continue
        scores, answers = zip(*scored)
        votes = Counter(answer for answer in answers if answer is not None)
        winner = answers.index(votes.most_common(1)[0][0]) if votes else 0
        for name in ["eval"] + ([f"eval/{source}"] if source else []):
            values[f"{name}/mean@{k}"].append(sum(scores) / len(scores))
            values[f"{name}/pass@{k}"].append(max(scores))
            values[f"{name}/maj@{k}"].append(scores[winner])
    return {name: sum(each) / len(each) for name, each in values.items()}
