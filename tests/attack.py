"""Tries hundreds of malformed inputs on the scripts: each has to be refused in a line that names the culprit.

    python tests/attack.py                         # all of them, in two processes at a time
    python tests/attack.py --only=rewards --jobs=4 # those with this word in "group: name"
    python tests/attack.py --every=16              # each sixteenth of them, as .ci/run does

A refusal has the exit code 2, no traceback of our code, and a last line with the words given here. Among the inputs stand
unusual ones that are fine and have to run to their end. Nothing may hang, no code of a stranger may run, and
no file outside a run's folder may change. Each case has a forked process (runs.py) and a folder of its own,
which its arguments call {dir}. The exit code is 0 only if all is as expected.

A group of cases is a function below the tables of its inputs, which map what is expected to inputs. Mostly
that is the words of a refusal, as a regular expression. An input's name is its text.
"""
import contextlib
import functools
import json
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

# Before torch: models this small lose by a second thread. Nothing here is to be found on a network.
os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
               # It counts the semaphores of processes that were killed.
               "PYTHONWARNINGS": "ignore::UserWarning:multiprocessing.resource_tracker"}
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from options.files import held_out
from runs import DAPO, ROOT, environment, free_port, run_in_child, script_path, start_forked, with_defaults

SECONDS = 60                    # that a case may take
WORK = Path(tempfile.gettempdir()) / f"attack-{os.getpid()}"
MODEL, JUDGE, ROWS, OWNED = WORK / "model", WORK / "judge", WORK / "rows.jsonl", WORK / "owned"
GRPO, PPO, ASYNC = "train_grpo.py", "train_ppo.py", "train_async.py"
SAMPLE = "evaluate_model.py"
SMALL = {"model": MODEL, "out_dir": "{dir}/run", "reward": f"{WORK}/letters.py:score", "engine": "hf",
         "prompts_per_step": 2, "num_generations": 4, "max_completion_length": 12, "train_prompts": 32,
         "eval_prompts": 4, "eval_samples": 1, "max_steps": 2, "warmup_steps": 0, "learning_rate": 1e-3}
DEFAULTS = {GRPO: SMALL, DAPO: SMALL | {"max_num_gen_batches": 4}, PPO: SMALL | {"critic_warmup_steps": 1},
            ASYNC: SMALL,
            SAMPLE: {"model": MODEL, "engine": "hf", "max_completion_length": 12, "eval_prompts": 4,
                     "samples": 2}}
RANKS = {ASYNC: 2}              # the others run in one process
BASES = {"grpo": GRPO, "file": GRPO, "dapo": DAPO, "ppo": PPO}     # runs of three steps, to be copied
LETTERS = """
def score(prompts, completions, **_):
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [{"score": sum(ord(c) % 2 == 0 for c in text) / 12} for text in texts]
"""


class Expected(NamedTuple):
    """refused: with these words. runs: with exit code 0, saying the words somewhere.

    either: it runs, or is refused. later: it is refused, or stops in the middle by an error. still: the
    watchdog ends it.
    """
    kind: str
    words: str = ""


runs, either, later, still = (functools.partial(Expected, kind) for kind in "runs either later still".split())


class Case(NamedTuple):
    group: str
    name: str
    expected: Expected
    arguments: tuple
    script: str = GRPO
    files: dict = {}            # name in the case's folder -> what `write` takes
    env: dict = {}
    after: object = None        # function(folder): what is wrong in it afterwards, or None
    ranks: int = 1
    shell: str = ""             # how a shell redirects it, instead of a fork


def add_all(add_one, table, prefix=""):
    """Call add_one(name, expected, input) for a table's inputs: a list, or a text of some with ; between."""
    for expected, inputs in table.items():
        if isinstance(inputs, str):
            inputs = [" ".join(part.split()) for part in inputs.split(";")]
        for item in inputs:
            name = item if isinstance(item, str) else repr(item)
            add_one(f"{prefix} {name}" if prefix else name, expected, item)


# ---- files, and what harms them ----------------------------------------------------------------------------


class Harm(NamedTuple):
    """What do(path) makes or damages."""
    name: str
    do: object

    def __repr__(self):
        return self.name


def write(path, content):
    """content: text, bytes, a dict of changes in a JSON file, or a Harm."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if isinstance(content, Harm):
        content.do(path)
    elif isinstance(content, dict):
        amended(content).do(path)
    else:
        Path(path).write_bytes(content if isinstance(content, bytes) else content.encode())


def changed(name, change):
    return Harm(name, lambda path: Path(path).write_bytes(change(Path(path).read_bytes())))


def amended(change):
    """The keys of a dict in a JSON object."""
    return changed("", lambda text: json.dumps(
        {key: value for key, value in (json.loads(text) | change).items() if value is not GONE}).encode())


def made(name, make):
    """What make(path) creates in place of a file."""
    def replace(path):
        if os.path.lexists(path):
            os.remove(path)
        make(path)
    return Harm(name, replace)


def link(target):
    """{dir} in its target is the case's folder."""
    here = lambda path: target.replace("{dir}", str(WORK / Path(path).relative_to(WORK).parts[0]))
    return made(f"a link to {target}", lambda path: os.symlink(here(path), path))


def broken(folder, harms, name="broken"):
    """A folder's copy of this name, and harms by the names of files in it."""
    copy = Harm("a copy", lambda path: shutil.copytree(folder, path, symlinks=True))
    return {name: copy} | {f"{name}/{file}": harm for file, harm in harms.items()}


def tensor(name, how, change):
    """A tensor of a model.safetensors becomes change(tensor), and goes if that is None."""
    def edit(path):
        from safetensors.torch import load_file, save_file
        weights = load_file(path) | {name: change(load_file(path)[name])}
        save_file({key: value for key, value in weights.items() if value is not None}, path, {"format": "pt"})
    return Harm(f"{name} {how}", edit)


def pickled_call(module, name, argument):
    """A pickle that calls module.name(argument), by protocol 4, in which a name may have dots."""
    return f"\x80\x04c{module}\n{name}\n(V{argument}\ntR.".encode("latin-1")


GONE = Harm("gone", None)
FOLDER, FIFO = made("a folder", os.mkdir), made("a FIFO", os.mkfifo)
ZERO, NULL, LOST = map(link, ("/dev/zero", "/dev/null", "/nonexistent"))
CUT = changed("cut short", lambda text: text[:len(text) // 2])
FLIPPED = changed("with a flipped bit", lambda text: text[:20] + bytes([text[20] ^ 1]) + text[21:])
REMOVED = Harm("removed", os.remove)
LOOP = made("a loop", lambda path: os.symlink(path, path))
DEEP, GARBAGE = b"[" * 100_000, bytes(range(256)) * 1000
EVIL = [pickled_call("os", "mkdir", OWNED),
        pickled_call("builtins", "exec", f"import os; os.mkdir('{OWNED}')")]


def all_steps(folder):
    steps = [json.loads(line)["step"] for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    return None if steps == [0, 1, 2] else f"metrics.jsonl has the steps {steps}"


def resumed_steps(folder):
    """The run has its four steps, without gaps and twins; what stood there before is not counted."""
    steps = []
    for line in (folder / "run/metrics.jsonl").read_bytes().splitlines():
        with contextlib.suppress(ValueError, TypeError, KeyError):
            steps.append(json.loads(line)["step"])
    steps = [step for step in steps if isinstance(step, int)]
    return None if steps[-2:] == [3, 4] and len(set(steps)) == len(steps) else f"the steps are {steps}"


# ---- settings ----------------------------------------------------------------------------------------------
BAD_VALUES = {
    "max_steps": ["", "1.5", "nan", "inf", "-inf", "1e400", "ten", "true", "None", "1+1", "[5]", "'5'", "5 5",
                  "0x", "5\n6", "5\x00", "\udcff", "９１x", "9" * 5000, "(" * 100_000],
    "learning_rate": ["", "nan", "inf", "-inf", "1e400", "x", "True", "1+1", "1,5", "--1", "1e", "9" * 400],
    "chat": ["", "1", "0", "yes", "no", "on", "None", "2", "'True'"]}
BOUND = r"\.py: {}(=| must be)"
BAD_FOR_MANY = [  # a value, the words of the refusal, and which settings must not have it
    ("0", BOUND, {
        GRPO: "temperature num_generations prompts_per_step max_prompt_length max_completion_length "
              "token_budget num_mini_batches max_steps eval_samples correction_cap "
              "keep_checkpoints vllm_tensor_parallel_size "
              "sequence_parallel_size", ASYNC: "rollout_ranks max_steps num_mini_batches",
        DAPO: "num_mini_batches", SAMPLE: "samples max_completion_length",
        PPO: "num_epochs num_mini_batches max_steps"}),
    ("-1", BOUND, {
        GRPO: "learning_rate warmup_steps grad_clip epsilon epsilon_high kl_coef "
              "entropy_coef correction_low correction_high logprob_gap call_timeout timeout train_prompts "
              "eval_prompts vllm_gpu_memory_utilization",
        ASYNC: "max_staleness learning_rate kl_coef",
        DAPO: "overlong_buffer max_num_gen_batches",
        PPO: "critic_learning_rate critic_warmup_steps value_clip",
        SAMPLE: "temperature top_p top_k eval_prompts call_timeout show vllm_gpu_memory_utilization"}),
    ("1.5", BOUND, {GRPO: "vllm_gpu_memory_utilization eval_top_p eval_min_p", PPO: "lam", SAMPLE: "top_p"}),
    ("nonsense", r"\b{}\b.*nonsense", {
        GRPO: "task engine dtype advantage kl_estimator old_logprobs loss_type loss_aggregation "
              "engine_correction lr_decay", ASYNC: "in_flight engine engine_correction",
        PPO: "loss_aggregation lr_decay dtype task engine", DAPO: "loss_type advantage",
        SAMPLE: "task engine dtype"}),
    (f"{10 ** 30}", r"\b{}\b", {
        GRPO: "prompts_per_step max_completion_length train_prompts eval_prompts "
              "num_mini_batches max_prompt_length sequence_parallel_size",
        ASYNC: "rollout_ranks"})]
ITSELF = r"\b{}\b"               # the words are the first setting
TOGETHER = [  # scripts, and a table of settings, of which those for one run stand together
    ([GRPO, DAPO, PPO], {
        ITSELF: "eval_file=x.jsonl; train_file=x.jsonl; "
                "token_budget=70; vllm_tensor_parallel_size=2; "
                "sequence_parallel_size=2; shard_ranks=2",
        "train_file": "task=file", "reward_model": "reward=none", "resume=auto": "resume=auto out_dir=",
        "max_position_embeddings": "max_prompt_length=200 max_completion_length=100",
        "none.jsonl: no such file": "task=file train_file=none.jsonl"}),
    ([GRPO, DAPO], {
        ITSELF: "num_mini_batches=3; num_generations=1 prompts_per_step=4",
        "engine_correction": "old_logprobs=engine engine_correction=token_mask"}),
    ([DAPO], {
        "max_num": "advantage=reinforce++; advantage=turns",
        runs(): "seed=0; max_num_gen_batches=0; max_num_gen_batches=17; "
                "advantage=turns overlong_buffer=5 max_num_gen_batches=0"}),
    ([PPO], {ITSELF: "critic_warmup_steps=2; num_mini_batches=3; reference_model=tiny",
             runs(): ["seed=0"]}),
    ([ASYNC], {
        ITSELF: "rollout_ranks=2; rollout_ranks=3; vllm_tensor_parallel_size=2; sequence_parallel_size=2; "
                "shard_ranks=2; num_mini_batches=7; eval_file=x.jsonl",
        "engine_correction": "old_logprobs=engine engine_correction=token_mask",
        runs(): "seed=0; max_staleness=0; max_staleness=9; in_flight=true max_staleness=2; "
                "in_flight=true max_staleness=0; timeout=20 call_timeout=1; advantage=turns max_staleness=1; timeout=0"}),
    ([GRPO], {
        "advantage=none": "advantage=none; advantage=none kl_coef=1 kl_estimator=k1_reward",
        "skip_zero_advantage": "skip_zero_advantage=true entropy_coef=0.1; "
                               "skip_zero_advantage=true kl_coef=0.1",
        "reference_model": "reference_model=tiny; reference_model=none_here kl_coef=0.1",
        "unknown setting": [f"{key}=5" for key in (
            "max_step", "learnig_rate", "sync_timeout", "MAX_STEPS", "max-steps", "", "model\n", "__name__",
            "__file__", "settings", "math", "critic_model", "skip_after", "help", "\udcff", "x" * 100_000)],
        ITSELF: "task=algebra:1000000000; train_prompts=7000; eval_prompts=5000; stop=,",
        "model='x'": ["model='x'"], "model=": ["model=/no\nsuch"], "task": ["task=\udcff"],
        r"\.jsonl: no such file": "task=file train_file=~no/x.jsonl",
        "must be a string": [
            "task=file train_file=\udcff.jsonl", "model=/no\udcff", "out_dir={dir}/\udce9",
            "system_prompt=\udcff"],
        **{either(rf"\b{key}\b"): [f"{key}={value}"] for key, value in (
            ("temperature", "1e308"), ("timeout", "1e300"), ("call_timeout", "1e-300"),
            ("seed", 10 ** 4000))},
        runs(): ["eval_interval=0 save_interval=0",
                 "advantage=turns kl_coef=0.1 kl_estimator=k1_reward",
                 "seed=-1", f"seed={10 ** 30}", "learning_rate=0", "max_steps=2e0", "max_steps=+2",
                 "chat=fAlSe", "grad_clip=0", "call_timeout=0", "timeout=0", "keep_checkpoints=1_000",
                 "token_budget=1000000000", "temperature=1e-3", "system_prompt=\n"]})]


def settings_cases(add):
    def together(name, expected, settings):
        expected = expected.format(settings.partition("=")[0]) if expected == ITSELF else expected
        add(f"{script} {name}", expected, *[f"--{setting}" for setting in settings.split(" ")], script=script,
            ranks=RANKS.get(script, 1))

    for key, values in BAD_VALUES.items():
        for value in values:
            add(f"{key}={value!r}", rf"--{key} must be", f"--{key}={value}")
    for value, words, keys in BAD_FOR_MANY:
        for script, key in [(script, key) for script in keys for key in keys[script].split()]:
            add(f"{script} {key}={value}", words.format(key), f"--{key}={value}", script=script,
                ranks=RANKS.get(script, 1))
    for script, table in [(script, table) for scripts, table in TOGETHER for script in scripts]:
        add_all(together, table)
    for argument in ("max_steps", "--max_steps", "-max_steps=5", "--", "-", "", "countdown", "=", "model=x",
                     "\udcff", "a\nb", "[" * 100_000):
        add(f"argument {argument!r}", "cannot take", argument)
    add("value after a space", "cannot take --seed", "--seed", "5")
    add("two ranks, 3 prompts", "prompts_per_step=3 is no multiple", "--prompts_per_step=3", ranks=2)
    add("two ranks, one held-out prompt", runs(), "--eval_prompts=1", ranks=2)
    add("two ranks", runs(), ranks=2)
    add("two ranks, rows cut", runs(), "--sequence_parallel_size=2", ranks=2)
    add("two ranks, rows cut over 3", "sequence_parallel_size=3", "--sequence_parallel_size=3", ranks=2)
    add("two roles in one process", "leaves no trainer", script=ASYNC)
    add("RANK alone", "WORLD_SIZE expected", env={"RANK": "0"})
    add("a network that is not there", "address for: nonsense", env={"GLOO_SOCKET_IFNAME": "nonsense"})


# ---- configs -----------------------------------------------------------------------------------------------
CONFIGS = {  # what is in x.py
    r"x\.py": [
        b"model = '\xff\xfe'", b"seed = 1\x00\n", "seed = 1".encode("utf-16"), "# coding: nonsense\nseed = 1",
        "seed = " + "(" * 100_000 + "1" + ")" * 100_000, "seed = " + "9" * 5000,
        b"# coding: ascii\nmodel = '\xc3'", GARBAGE, "x" * 10_000_000, FOLDER, FIFO, ZERO, NULL, LOST, LOOP],
    r"x\.py.*:1": [
        "import os", "seed += 1", "seed, chat = 1, True", "seed.x = 1", "seed[0] = 1", "*seed, = [1]",
        "seed = max_steps = 5", "seed: int = 1", "(seed := 1)", "del seed", "if True:\n    seed = 1", "seed",
        "model = 'x", "  seed = 1", "seed\n" * 500_000],
    r"x\.py.*:1.*seed": [
        "seed = 1+1", "seed = 1 < 2", "seed = " + "[" * 150 + "]" * 150, "seed = other", "seed = lambda: 1",
        "seed = None", "seed = True", "seed = '1'", "seed = {[]}"],
    r"x\.py.*:1.*model": ["model = f'{1}'", "model = b'x'", "model = ...", "model = 5"],
    r"x\.py.*:1.*kl_coef": ["kl_coef = 1e999", "kl_coef = float('nan')"], r"x\.py.*:1.*chat": ["chat = 1"],
    r"x\.py.*:2": ["seed = 1\nmax_steps = int('5')"],
    r"x\.py.*:2: unknown setting learnig_rate": ["\nlearnig_rate = 1"],
    # What is found only when the value is used.
    "max_steps=-1": ["max_steps = -1"], "model": [r"model = '/a\0b'", r"model = '/a\ud800'"],
    "train_file|jsonl": [r"task = 'file'; train_file = 'a\0b.jsonl'"],
    runs(): ["", "seed = 1\nseed = 2", "\ufeffseed = 1", "seed = 1\r\nchat = True\r\n",
             b"# coding: latin-1\n# \xe9\nseed = 1",
             "seed = 1; chat = True", "lr_decay = 'lin' 'ear'", "seed = (\n1)"]}


def config_cases(add):
    add_all(lambda name, words, text: add(name, words, "{dir}/x.py", files={"x.py": text}), CONFIGS)
    for path in ("{dir}/missing/x.py", "{dir}/file/x.py", "{dir}/" + "x" * 300 + ".py", "{dir}/\0x.py"):
        add(path, r"x\.py", path, files={"file": ""})


# ---- rows --------------------------------------------------------------------------------------------------
GOOD = [{"prompt": [{"role": "user", "content": f"What is {n}+1?"}], "answer": str(n + 1)} for n in range(40)]
STRINGS = [row | {"prompt": row["prompt"][0]["content"]} for row in GOOD]
SIDES = [[row for row in STRINGS if held_out(row["prompt"]) == side] for side in (False, True)]


def jsonl(*rows):
    """Rows, and lines as they are, as the bytes of a file."""
    return b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows)


def prompt(value, **columns):
    return {"prompt": value, "answer": "1"} | columns


def message(content, role="user"):
    return prompt([{"role": role, "content": content}])


def answered(key, value, row=GOOD[0]):
    """A row with this for an answer, which is in verl's column if that is the key."""
    return {"prompt": row["prompt"], key: {"ground_truth": value} if key == "reward_model" else value}


def called(calls):
    return prompt([GOOD[0]["prompt"][0] | {"tool_calls": calls}])


ROW = {  # the third row of a file
    r"rows\.jsonl:3\b": [
        b'{"prompt": "a', b"prompt", b"[1, ", [1], 5, "x", None, True, {},
        {"question": "x"}, {"prompt": GOOD[0]["prompt"]},
        prompt(None), prompt(5), prompt({"role": "user"}), prompt(""), prompt(" \n"), prompt([]), prompt([5]),
        prompt(["x"]), prompt([{}]), prompt([{"role": "user"}]), prompt([{"content": "x"}]), message(5),
        message(None), message(""), message(["x"]), message(" \t"), message("x", 5), message("x", None),
        called("x"), called([5]), called({"a": 1}),
        message("\ud800"), prompt("\udfff"), '{"prompt": "x"}'.encode("utf-16"),
        b'{"prompt": "\xff", "answer": "1"}', b'{"prompt": "a\x01", "answer": "1"}',
        b'{"prompt": "x", "n": ' + b"9" * 5000 + b"}"],
    either(r"rows\.jsonl:3\b"): [answered("answer", "\ud800"), prompt("x", more="\ud800")],
    runs(): [
        message("a\0b"), message("x", "tool"), GOOD[0], prompt("x", ground_truth="1"), prompt("What?"),
        answered("answer", 5), answered("answer", True), answered("answer", "9" * 100_000),
        answered("answer", ["1", 2]),
        prompt("x", self=1), prompt("x", more={"a": [1, None]}), prompt("x", **{"": 1, "a b": 2, "\n": 3}),
        prompt("x", solution_str="5"), prompt("x", prompts=1), prompt("x", completions=[]), called(None),
        message("\U0001f600\u202e"),
        b'{"prompt": "a", "prompt": "b", "answer": "1"}']}
FILES = {r"rows\.jsonl": [b"", b"\n \n\t\n", GARBAGE, b"x" * 10_000_000, FOLDER, FIFO, ZERO, NULL, LOST]}
ONE_SIDED = [jsonl(GOOD[0]), jsonl(*[GOOD[0]] * 20)]
TRAIN_FILES = {
    r"rows\.jsonl": ONE_SIDED, "a hash of the prompt decides": [jsonl(*side) for side in SIDES],
    "answer": [jsonl(*[{"prompt": row["prompt"]} for row in GOOD])],
    runs(): [jsonl(*STRINGS), b"\xef\xbb\xbf" + jsonl(*GOOD),
             jsonl(*GOOD).replace(b"\n", b"\r\n\r\n").rstrip()]}
EVAL_FILES = {runs(): ONE_SIDED, r"rows\.jsonl:3\b": [jsonl(*GOOD[:2], b"["), jsonl(*GOOD[:2], prompt(None))]}
PARQUETS = {  # bytes, or rows
    r"rows\.parquet": [b"x" * 1000, b"", b"PAR1PAR1", jsonl(*GOOD), [], FOLDER, FIFO],
    r"rows\.parquet: row 1\b": [[row] for row in (
        message(b"x"), prompt(b"x"), prompt(None), *[prompt("x", answer=value) for value in (
            b"1", [None], float("nan"))])],
    r"rows\.parquet: row 1: image holds something": [[row | {"image": b"\xff"} for row in GOOD]],
    runs(): [[row | {"raw": b"\xff", "image": None} for row in GOOD]]}
QUESTION = {"question": "What is 1+1?", "answer": "Two.\n#### 2"}
GSM8K = {
    r"train\.jsonl": [b"", FIFO, LOST], r"train\.jsonl: row 1": [jsonl([1])],
    r"train\.jsonl:2": [jsonl(QUESTION, row) for row in (
        b"\xff\x00", b"[1, ", b"5x", b'{"question": "x')],
    runs(): [jsonl(*[QUESTION] * 40)]}


def row_cases(add):
    import pyarrow.parquet

    def of_file(name, expected, content, *more, file="rows.jsonl"):
        add(name, expected, *with_defaults(more, {
            "task": "file", "train_file": f"{{dir}}/{file}", "train_prompts": 0, "reward": ""}),
            files={file: content})

    add_all(lambda name, expected, row: of_file(name, expected, jsonl(*GOOD[:2], row, *GOOD[2:])), ROW)
    for key in ("answer", "ground_truth", "solution", "reward_model"):
        rows = [answered(key, "1", row) for row in GOOD]
        for value in ("", "  ", float("nan"), float("inf"), {"a": 1}, ["1", " "]):
            of_file(f"{key} {value!r}", r"rows\.jsonl:3\b", jsonl(*rows[:2], answered(key, value), *rows))
    add_all(of_file, FILES)
    add_all(of_file, TRAIN_FILES)
    add_all(lambda name, expected, content: add(
        name, expected, "--task=file", f"--train_file={ROWS}", "--eval_file={dir}/rows.jsonl",
        files={"rows.jsonl": content}), FILES | EVAL_FILES, "eval_file")
    add_all(lambda name, expected, content: of_file(
        name, expected, Harm("", lambda path: pyarrow.parquet.write_table(
            pyarrow.Table.from_pylist(content), path))
        if isinstance(content, list) else content, file="rows.parquet"), PARQUETS, "parquet")
    add_all(lambda name, expected, train: add(
        name, expected, "--task=gsm8k", "--max_prompt_length=150", "--train_prompts=0",
        files={".cache/gsm8k/test.jsonl": jsonl(*[QUESTION] * 4), ".cache/gsm8k/train.jsonl": train},
        env={"HOME": "{dir}", "https_proxy": "http://127.0.0.1:9"}), GSM8K, "gsm8k")
    for file in ("rows.txt", "rows", "rows.jsonl.gz"):
        of_file(f"named {file}", re.escape(file), jsonl(*GOOD), file=file)
    of_file("prompts too long", "max_prompt_length", jsonl(*GOOD), "--max_prompt_length=3")
    of_file("more asked than there are", either("train_prompts"), jsonl(*GOOD), "--train_prompts=50")
    of_file("a step larger than the file", runs(), jsonl(*GOOD), "--prompts_per_step=50")
    of_file("system_prompt with strings", "system_prompt", jsonl(*STRINGS), "--system_prompt=Think.")
    of_file("a reward of one's own", runs(), TRAIN_FILES["answer"][0], f"--reward={SMALL['reward']}")


# ---- rewards -----------------------------------------------------------------------------------------------
REWARD = """
import asyncio, gc, io, logging, os, random, signal, subprocess, sys, threading, time, warnings
from decimal import Decimal
from fractions import Fraction
import numpy, torch
calls = 0
class Odd:
    def __float__(self): raise ValueError('odd')
def recurse(): recurse()
def linger():
    while True:
        try: time.sleep(0.01)
        except BaseException: pass
def score(prompts, completions, **columns):
    global calls
    calls, n = calls + 1, len(completions)
    if calls > AFTER:
        STATEMENT
    return VALUE if calls > AFTER else [1.0] * n
"""
VALUES = {
    "reward score": """
        None; 1.0; 'ab'; []; [1.0]; [1.0] * (n + 1); ['1'] * n; [b'1'] * n; [float('nan')] * n; [float('inf')]
        * n; [[1.0]] * n; (1.0 for _ in completions); {'score': 1.0}; {1.0, 2.0}; [{'a': 'x'}] * n; [{'a':
        float('nan')}] * n; [{'a': [1]}] * n; [{'a': {'b': 1}}] * n; [{'score': 'x'}] * n; [{'score': 10 **
        400}] * n; [10 ** 400] * n; [1e39] * n; [1j] * n; [Decimal('NaN')] * n; [Decimal('1e400')] * n;
        range(n); [Fraction(10 ** 400)] * n; [object()] * n; [Odd()] * n; [score] * n; numpy.ones((n, 2));
        bytes(n); numpy.array(1.0); numpy.array(['1'] * n); numpy.full(n, numpy.nan); torch.ones(n, 1);
        torch.full((n,), torch.inf); numpy.array([1j] * n); dict.fromkeys(range(n), 1.0)""",
    runs(): """
        [None] * n; (1,) * n; numpy.ones(n); numpy.ones(n, bool); torch.ones(n, requires_grad=True); [{}] * n;
        [True] * n; [Decimal('0.5')] * n; [Fraction(1, 3)] * n; [numpy.float32(1)] * n; [torch.ones(())] * n;
        [{'a': None}] * n; [{'score': 1, 'note': 'x'}] * n; [{1: 1.0}] * n; [{None: 1.0}] * n; [{'': 1}] * n;
        [{'a/b': 1.0}] * n; [{'a\\nb': 1.0}] * n; [{'\\ud800': 1.0}] * n; [{'x' * 9999: 1.0}] * n;
        [{'a\\0b': 1}] * n; [{'..': 1.0, '/etc': 2.0}] * n"""}
STATEMENTS = {
    "reward score": """
        raise ValueError('x'); raise ValueError; raise ValueError('a\\nb'); raise ValueError('\\ud800'); raise
        GeneratorExit; raise BaseException('x'); raise StopIteration; raise MemoryError;
        sys.exit(0); sys.exit(); sys.exit('bye'); 1 / 0; recurse(); raise SystemExit(2); raise
        UnicodeDecodeError('a', b'', 0, 1, ''); raise TimeoutError; raise ExceptionGroup('x', [ValueError()]);
        raise asyncio.CancelledError""",
    runs(): """
        sys.stdout.close(); sys.stderr.close(); sys.stdout = None; sys.stderr = None; sys.stdout = sys.stderr
        = None; os.dup2(os.open('/dev/null', 0), 1); os.dup2(os.open('/dev/null', 0), 2); print('\\ud800');
        sys.stdout = io.StringIO(); print('x' * 10 ** 6); sys.__stdout__ = sys.__stderr__ = None;
        prompts.clear(), completions.clear(); columns.clear(); completions[0].clear(); del prompts,
        completions, columns; signal.signal(signal.SIGALRM, print), signal.alarm(1);
        signal.setitimer(signal.ITIMER_REAL, 1000); signal.signal(signal.SIGTERM, signal.SIG_IGN);
        random.seed(0); numpy.random.seed(0); torch.manual_seed(0); os.chdir('/'); os.environ.clear();
        threading.Thread(target=time.sleep, args=(1000,)).start(); gc.disable(); sys.argv.clear();
        sys.path.clear(); logging.disable(); subprocess.run(['true']); os.umask(0o777) and os.umask(0o022);
        asyncio.run(asyncio.sleep(0)); warnings.simplefilter('ignore')"""}
SLOW = {"reward score|call_timeout": "time.sleep(1000); while True: pass; linger()"}
# What a reward that has passed its trial may do later.
LATE_SLOW = {runs(): "time.sleep(1000); while True: pass; linger(); "
                     "__import__('re').match('(a+)+$', 'a' * 60 + 'b')"}
LATE_VALUES = {later("reward score"): "None; [1.0]; ['1'] * n; [float('nan')] * n; [10 ** 400] * n"}
LATE_STATEMENTS = {later("reward score"): "raise ValueError; sys.exit(0); 1 / 0",
                   later("reward score ended its process with status 3"): "os._exit(3)"}
REWARD_FILES = {  # what is in r.py
    r"r\.py": ["raise SystemExit", "raise BaseException", "x = 1\0", b"x = '\xff'", "(" * 100_000,
               "x = " + "1+" * 200_000 + "1", GARBAGE, FOLDER, FIFO, ZERO],
    r"r\.py.*SyntaxError": ["def score(:"], r"r\.py raised Zero": ["1/0"],
    r"r\.py raised SystemExit": ["import sys; sys.exit(0)"], r"r\.py raised Module": ["import no_such"],
    r"r\.py raised Recursion": ["def f(): f()\nf()"],
    r"r\.py has no function score": [""], "no function score": ["score = 5"],
    "column more": ["def score(data_source, solution_str, ground_truth, more): pass"],
    "reward score": ["def score(prompts, completions, **c): yield 1.0"],
    r"reward.*(score|max)": ["score = max"], r"reward.*(score|dict)": ["score = dict"],
    r"r\.py raised Type": ["score = len(5)"],
    later("reward score"): ["def score(): return [1.0] * 2"],
    r"r\.py raised Value": ["import sys; sys.stderr.close(); raise ValueError"],
    runs(): [
        "from rewards import accuracy as score", "\ufeff" + LETTERS,
        "import functools\nscore = functools.partial(lambda n, completions, **_: [n] * len(completions), 1)",
        "class S:\n    def __call__(self, completions, **_): return [1] * len(completions)\nscore = S()",
        "def score(**columns): return [1.0] * len(columns['prompts'])",
        "def score(data_source, solution_str, ground_truth): return {'score': 1, 'n': 'x'}",
        "import subprocess\nsubprocess.Popen(['sleep', '5'])" + LETTERS]}
REWARD_NAMES = {
    r"no such file.*none\.py": ["none.py:score"], r"reward.*r\.txt": ["r.txt:score"],
    "reward": ["r.py", "r.py:", "r.py:score:", "r.py:a.b", "r.py:5", "r.py::score", "r.py:sc\udcffore",
               "r.py/:score"], "no function __name__": ["r.py:__name__"]}


def reward_cases(add):
    def of_file(name, expected, content, *more, after=None):
        add(name, expected, "--reward={dir}/r.py:score", *more, files={"r.py": content}, after=after)

    def returns(name, expected, value, after=0):
        of_file(name, expected, reward_source("pass", value, after))

    def does(name, expected, statement, *more, after=0):
        of_file(name, expected, reward_source(statement, after=after), *more,
                after=all_steps if expected == runs() and not after else None)

    add_all(returns, VALUES, "returns")
    add_all(does, STATEMENTS)
    add_all(functools.partial(returns, after=2), LATE_VALUES, "later returns")
    add_all(functools.partial(does, after=2), LATE_STATEMENTS, "later")
    slow = ["--call_timeout=1", "--timeout=15"]
    add_all(lambda *case: does(*case, *slow), SLOW)
    add_all(lambda *case: does(*case, *slow, after=2), LATE_SLOW, "later")
    add_all(of_file, REWARD_FILES, "file")
    add_all(lambda name, expected, reward: add(name, expected, f"--reward={{dir}}/{reward}", files={
        "r.py": LETTERS, "r.txt": LETTERS}), REWARD_NAMES)
    add("no name at all", "reward must be", "--reward=:")


def reward_source(statement, value="[1.0] * n", after=0):
    return REWARD.replace("AFTER", str(after)).replace("STATEMENT", statement).replace("VALUE", value)


# ---- environments ------------------------------------------------------------------------------------------
GAME = """
import asyncio, decimal, numpy, sys, time, torch
calls = 0
def linger():
    while True:
        try: time.sleep(0.01)
        except BaseException: pass
class Game:
    def __init__(self): pass
    def reset(self, **row):
        OPENING
    def step(self, text):
        global calls
        calls += 1
        if calls > AFTER:
            STATEMENT
        return '', 0.5, False
"""
TOOL = """
class Game:
    def reset(self, **row): pass
    def look(self, at: str) -> str:
        '''Looks.

        Args:
            at: a place
        '''
"""
ENVIRONMENT_NAMES = {
    "environment must be": ["g.py", "g.py:", "Game", ":", "g.py:Game:", "g.py:a.b"],
    r"environment.*g\.txt": ["g.txt:Game"],
    r"environment.*no such file.*none\.py": ["none.py:Game"], r"g\.py has no Class game": ["g.py:game"]}
ENVIRONMENT_FILES = {  # what is in g.py
    r"environment.*g\.py": ["1/0", "import sys; sys.exit(0)", "class Game(:", "", "Game = 5", GARBAGE,
                            FOLDER],
    r"g\.py:Game: Game\(\) raised": [
        "class Game:\n    def __init__(self, size): pass", "class Game:\n    def __init__(self): 1/0"],
    r"g\.py:Game.* no method reset": ["class Game:\n    def step(self, text): pass"],
    r"g\.py has no Class Game at its top level": ["Game = dict"],
    "a tool needs": [TOOL.replace(": str", ""), TOOL.replace("at: a place", ""),
                     "class Game:\n    def reset(self): pass\n    def look(self, at: str): pass"],
    "Game, .*: reset needs a column colour": [GAME.replace("**row", "colour")],
    runs(): [TOOL, "class Game:\n    def reset(self): pass\n    def get_reward(self): return 1.0"]}
OPENINGS = {
    "Game, before its first turn": "raise ValueError; sys.exit(0); return 5; return b'x'; await 1; "
                   "await asyncio.sleep(1000); row['prompt'][0]['nothing']",
    "reset returned so much .* max_prompt_length=64": "return 'x' * 99",
    runs(): r"return ''; return '\ud800\0'; return '<|end|><|assistant|>'; row['prompt'].clear()"}
STEPS = {
    "environment=.*:Game, in turn": """
        raise ValueError; raise ValueError('a\\nb'); sys.exit(0); raise GeneratorExit;
        raise StopIteration; raise asyncio.CancelledError; return None; return ''; return '', 0.5; return '',
        0.5, 1; return '', 0.5, None; return None, 0.5, False; return 5, 0.5, False; return b'', 0.5, False;
        return ['', 0.5, True]; return '', None, True; return '', float('nan'), True;
        return '', float('-inf'), True; return '', 10 ** 400, True; return '', 1e39, True; return '', 1j,
        True; return '', numpy.ones(2), True; return '', '1', True; return '', torch.tensor(torch.inf), True;
        yield '', 0.5, True""",
    runs(): r"""
        return None, 1, True; return '', True, True; return '', numpy.float32(1), numpy.bool_(True); return
        '', torch.ones(()), True; return '', decimal.Decimal('0.5'), True; return 5, 0.5, True; return
        '\ud800\0\n', 0.5, False; return '<|end|>', 0.5, False; return '😀' * 99, 0.5, False;
        sys.stdout.close(); sys.stdout = sys.stderr = None; print('x' * 10 ** 6); return '', 1e38, True;
        asyncio.run(asyncio.sleep(0))"""}
LATE_STEPS = {
    later("environment=.*:Game, in turn"): r"""
        raise ValueError; raise ValueError('a\nb'); sys.exit(0); return None; return '',
        float('nan'), True""",
    still(): "time.sleep(1000); while True: pass; linger()"}
# Threads are left to themselves.
LATE_IN_THREADS = {runs(): "time.sleep(1000); linger()",
                   later("environment=.*:Game, in turn"): "sys.exit(0); return None"}
ENVIRONMENT_SETTINGS = {
    ITSELF: "max_turns=-1; max_turns=1.5; call_workers=-1; call_workers=x; "
            "call_timeout=-1; call_timeout=nan",
    "needs chat=True": "chat=false",
    runs(): "max_turns=1; call_workers=99; call_timeout=0; reward=none; reward=; "
            "timeout=9 call_timeout=0.8"}


def environment_cases(add):
    def of_file(name, expected, content, *more, files={}, script=GRPO):
        more = with_defaults(more, {"environment": "{dir}/g.py:Game"})
        add(name, expected, *more, files={"g.py": content} | files, script=script)

    def opens(name, expected, statement, *more):
        source = game_source("pass", statement)
        of_file(name, expected, source.replace("def reset", "async def reset") if "await" in name else source,
                "--call_timeout=1", *more)

    def does(name, expected, statement, *more, after=0):
        of_file(name, expected, game_source(statement, after=after), "--call_timeout=0.3",
                "--timeout=5", *more)

    add_all(lambda name, expected, spec: of_file(
        name, expected, game_source(), f"--environment={{dir}}/{spec}", files={"g.txt": GAME}),
        ENVIRONMENT_NAMES, "named")
    add_all(of_file, ENVIRONMENT_FILES, "file")
    add_all(opens, OPENINGS, "reset")
    add_all(does, STEPS)
    # After the trial, four episodes of an evaluation, and a few of the first step.
    add_all(functools.partial(does, after=9), LATE_STEPS, "later")
    add_all(lambda *case: does(*case, "--call_workers=9", after=9), LATE_IN_THREADS, "later, threads")
    add_all(lambda name, expected, settings: of_file(
        name, expected.format(settings.partition("=")[0]) if expected == ITSELF else expected, game_source(),
        *[f"--{setting}" for setting in settings.split(" ")]), ENVIRONMENT_SETTINGS)
    of_file("its tools alone with reward=none", "environment", TOOL, "--reward=none")
    of_file("prompts that are strings", "environment.*lists of messages", game_source(), "--task=file",
            "--train_file={dir}/rows.jsonl", "--train_prompts=0", files={"rows.jsonl": jsonl(*STRINGS)})
    of_file("prompts that end with the assistant", "environment.* not the assistant's", game_source(),
            "--task=file", "--train_file={dir}/rows.jsonl", "--train_prompts=0", files={
                "rows.jsonl": jsonl(*[prompt(row["prompt"] + message("So", "assistant")["prompt"])
                                      for row in GOOD])})
    for name, words, template in (
            ("none", "chat template", REMOVED), ("without a place for tools", "no place for tools", b"""
                {% for m in messages %}{{ m.role }}{{ m.content }}<|end|>{% endfor %}"""),
            ("that rewrites turns", "rewrites earlier turns", b"""{% for m in messages %}{{ m.role }}
                {% if loop.last or m.role == 'user' %}{{ m.content }}{% endif %}<|end|>{% endfor %}"""),
            ("without an end of a turn", "chat template", b"""
                {% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}""")):
        of_file(f"a template {name}", words, TOOL if "tools" in name else game_source(),
                "--model={dir}/broken", files=broken(MODEL, {TEMPLATE: template}))
    for script in (DAPO, PPO, SAMPLE):
        of_file(f"{script}, a step that raises", "environment=.*:Game, in turn", game_source("1/0"), script=script)


def game_source(statement="pass", opening="pass", after=0):
    return GAME.replace("AFTER", str(after)).replace("STATEMENT", statement).replace("OPENING", opening)


# ---- models ------------------------------------------------------------------------------------------------
TEMPLATE, WEIGHTS = "chat_template.jinja", "model.safetensors"
ENDLESS = b"{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
NO_NORM, SHORT_NORM, NO_HEAD, SHORT_HEAD = (
    harm for name in ("model.norm.weight", "score.weight") for harm in (
        tensor(name, "gone", lambda t: None), tensor(name, "shorter", lambda t: t[..., :5].clone())))
MODELS = {  # what becomes of a file of a model
    "config.json": {
        r"config\.json": [b"", b"x", b"[]", b"5", b"\xff", DEEP],
        "broken": [b"{}", {"model_type": "vit"}, {"model_type": "t5"}, {"model_type": 5}, {"hidden_size": 0},
                   {"hidden_size": "x"}, {"num_hidden_layers": -1}, {"vocab_size": 5}, {"vocab_size": None},
                   FOLDER, FIFO, ZERO],
        "broken.*nonsense|nonsense.*broken": [{"model_type": "nonsense"}],
        r"broken.*layers\.2": [{"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}],
        "broken.*differs from what transformers": [{"final_logit_softcapping": 30.0}, {"logit_scale": 0.5}],
        "max_position_embeddings": [{"max_position_embeddings": 8}],
        "broken.*(attn|FlashAttention|kernels)": [{"_attn_implementation": name} for name in (
            "nonsense", "flash_attention_2", "kernels-community/flash-attn")],
        either("broken"): [{"auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}},
                           {"dtype": "nonsense"}]},
    WEIGHTS: {
        "broken: its weights cannot be read": [
            b"", b"x" * 1000, b"\xff" * 8 + b"{}", CUT, REMOVED, FOLDER, FIFO],
        r"broken.*model\.norm\.weight": [NO_NORM, SHORT_NORM]},
    "tokenizer.json": {"broken.*tokenizer": [b"", b"x", b"[]", b"{}", DEEP, CUT, REMOVED, FOLDER, FIFO]},
    "tokenizer_config.json": {"broken.*tokenizer": [b"", b"[]", b"x"]},
    "generation_config.json": {
        r"generation_config\.json": [b"", b"x", b"[]", b"5"], "generation_config": [FOLDER, FIFO],
        "eos_token_id": [{"eos_token_id": value} for value in (
            [], -1, 10 ** 6, 10 ** 30, "x", 1.5, [-1], ["x"], [None], {})],
        runs(): [{"eos_token_id": None}, REMOVED]},
    TEMPLATE: {
        "template": [b"{% for %}", b"{{ raise_exception('no') }}", b"{{ 1 / 0 }}", b"{{ messages | no }}",
                     b"{% for i in range(10**12) %}{% endfor %}", b"{{ ''.__class__.__mro__ }}"],
        "template|prompt": [b"Hello", b""], "tokenizer": [b"\xff"], "chat template": [REMOVED]}}
WHOLE_MODELS = {  # what becomes of several
    "model": {
        "adapter": [{"adapter_config.json": b'{"base_model_name_or_path": "x"}'},
                    {"adapter_config.json": b"{}", "adapter_model.safetensors": b""}],
        "broken: its weights cannot be read": [
            {WEIGHTS: REMOVED, "pytorch_model.bin": content} for content in EVIL],
        runs(): [{"README.md": "x", "evil.py": "raise ValueError"}]},
    "critic_model": {
        "critic_model=.*broken.*embed_tokens.weight has the shape": [{"config.json": {"vocab_size": 300}}],
        "broken: its weights cannot be read": [{WEIGHTS: CUT}], "broken.*norm": [{WEIGHTS: NO_NORM}],
        "max_position_embeddings": [{"config.json": {"max_position_embeddings": 8}}]},
    "reward_model": {
        r"broken.*config\.json|config\.json.*broken": [{"config.json": b"x"}], runs(): [{}],
        "broken.*2 labels": [{"config.json": {"label2id": {"a": 0, "b": 1}, "id2label": {0: "a", 1: "b"}}}],
        "broken: its weights cannot be read": [{WEIGHTS: CUT}, {WEIGHTS: REMOVED}],
        r"broken.*score\.weight": [{WEIGHTS: NO_HEAD}, {WEIGHTS: SHORT_HEAD}],
        "broken.*finite": [{WEIGHTS: tensor("score.weight", "NaN", lambda t: t.fill_(float("nan")))}],
        "broken.*tokenizer": [{"tokenizer.json": b"x"}], "broken.*chat template": [{TEMPLATE: REMOVED}],
        "broken.*template": [{TEMPLATE: b"{{ 1 / 0 }}"}], "broken.*pad token": [
            {"config.json": {"pad_token_id": GONE}, "tokenizer_config.json": {"pad_token": GONE}}]}}


def model_cases(add):
    for key, table in WHOLE_MODELS.items():
        script, base = PPO if key == "critic_model" else GRPO, JUDGE if key == "reward_model" else MODEL
        add_all(lambda name, expected, harms: add(
            name, expected, f"--{key}={{dir}}/broken", script=script, files=broken(base, harms)), table, key)
        add(f"{key} missing", f"{key}=.*broken", f"--{key}={{dir}}/broken", script=script)
    for file, table in MODELS.items():
        add_all(lambda name, expected, harm: add(
            name, expected, "--model={dir}/broken", files=broken(MODEL, {file: harm})), table, file)
    add("a template that never ends", still(), "--model={dir}/broken", "--timeout=5",
        "--call_timeout=0.3", files=broken(MODEL, {TEMPLATE: ENDLESS}))
    for content in ("x", FIFO, LOOP):
        add(f"is {content}", "model=.*file", "--model={dir}/file", files={"file": content})
    for name in ("no-such/model", "nosuch", "../no", "a/../b", "no such", "a/b/c", "~/none", "-", "", " ",
                 "http://x/y", "a\nb", "./none", "é/ü", "x" * 300):
        add(f"named {name}", "model=", f"--model={name}")
    add("slashes and dots", runs(), "--model={dir}/broken/../broken//", files=broken(MODEL, {}))
    add("an empty folder", "broken: no tokenizer in this folder", "--model={dir}/broken",
        files={"broken": FOLDER})
    add("no chat template, chat=false", runs(), "--model={dir}/broken", "--chat=false",
        files=broken(MODEL, {TEMPLATE: REMOVED}))
    add("reward_model a policy", "broken.*score", "--reward_model={dir}/broken", "--reward=none",
        files=broken(MODEL, {}))


# ---- folders -----------------------------------------------------------------------------------------------
OUT_DIRS = {
    r"out_dir|Errno \d+\] .*/": ["{dir}/file", "{dir}/file/run", "{dir}/loop", "{dir}/dangling", "{dir}/" + "x" * 300, "/",
                "{dir}" + "/x" * 3000, "/proc/x", "/sys/x", "/proc/self/fd", "/dev/null"],
    runs(): ["{dir}/a b\n\u00e9\U0001f600"]}
FOREIGN = {
    "out_dir=.*run": [{"run/thesis.tex": "x"}, broken(MODEL, {}, "run"), {"run/.git/config": "x"},
                      {"run/photos/1": "x"}], runs(): [{"run": FOLDER}]}
WRITTEN = [".lock", "config.json", "metrics.jsonl", "samples.jsonl", GRPO, "metrics.jsonl.part",
           "samples.jsonl.part", "config.json.part", f"{GRPO}.part", "checkpoint.part", "checkpoint-4"]


def folder_cases(add):
    add_all(lambda name, expected, out_dir: add(name, expected, f"--out_dir={out_dir}", files={
        "file": "", "loop": LOOP, "dangling": link("{dir}/file/x")}), OUT_DIRS)
    for flags in ([], ["--resume=auto"]):
        add_all(lambda name, expected, files: add(name, expected, *flags, files=files), FOREIGN, f"{flags}")
    add("another run", "out_dir=.*run", files=broken(WORK / "grpo", {}, "run"))
    add("a checkpoint of a stranger", "out_dir=.*run", files={"run/checkpoint-1/config.json": "{}"})
    add("slashes and dots", runs(), "--out_dir={dir}//x/.././run//", after=all_steps)
    add("a tilde", runs(), "--out_dir=~/run", env={"HOME": "{dir}"}, after=all_steps)
    add("a link to a folder", runs(), files={"x": FOLDER, "run": link("{dir}/x")}, after=all_steps)
    for file in WRITTEN:
        # A save that fails, and a folder that cannot be locked, have named the file before.
        words = (re.escape(file) + "|could not be saved" * ("checkpoint" in file)
                 + "|out_dir=" * (file == ".lock"))
        add(f"{file} {FOLDER}", either(words), "--resume=auto", "--max_steps=4",
            files=broken(WORK / "grpo", {file: FOLDER}, "run"))
    add(f".lock alone, {FOLDER}", r"\.lock", files={"run/.lock": FOLDER})


# ---- resumes -----------------------------------------------------------------------------------------------
RESUMES = {
    "resume(=| must)": ["3", "{dir}/run/checkpoint-9", "{dir}/run", str(MODEL), "{dir}/run/config.json",
                        "x" * 300, "{dir}/run/config.json/x", "{dir}/run/checkpoint-3/trainer",
                        "\udcff", "{dir}/\0", "AUTO", " "],
    "resume=.*newer": ["{dir}/run/checkpoint-2"],
    runs("resumes "): ["{dir}//run/./checkpoint-3///", "{dir}/run/checkpoint-2/../checkpoint-3",
                           "~/run/checkpoint-3", ROOT.count("/") * "../" + "./{dir}/run/checkpoint-3"]}
FIXED = {"task": "arithmetic:2", "train_prompts": 30, "max_prompt_length": 60, "chat": "false",
         "system_prompt": "x", "prompts_per_step": 4, "num_generations": 2, "seed": 1, "model": WORK / "copy",
         "reward": f"{WORK}/copy/letters.py:score", "reward_model": JUDGE}
LOG_LINES = [b"", b"\0" * 100, b"x{", b"\xff\xfe", b"[1]", b"5", b"null", b'{"reward": 1}', b'{"step": "1"}',
             b'{"step": null}', DEEP, b'{"step": ' + b"9" * 5000 + b"}"]
MOMENTS = "trainer/optimizer-00000.safetensors"
CHECKPOINT = ["config.json", "generation_config.json", WEIGHTS, "tokenizer.json", "tokenizer_config.json",
              TEMPLATE, MOMENTS, "trainer/state.json"]
LATEST = {  # what stands next to checkpoint-3 in a run that is to find the newest
    "checkpoint-4: its state cannot be read": [{"checkpoint-4": FOLDER}, {"checkpoint-4": b"x"}],
    "checkpoint-9+: its state cannot be read": [{"checkpoint-" + "9" * 200: FOLDER}],
    runs(): [{"checkpoint-٣": FOLDER, "events.out.tfevents.1.x": b"\xff", "checkpoint-x": "x"}]}
# What was written by someone who knew how.
FORGED = {
    ("grpo", "trainer/state.json"): {
        "checkpoint-3": [{"stranger": 1}, {"step": 10 ** 30}, {"settings": {}}]},
    ("grpo", MOMENTS): {"checkpoint-3": [*EVIL, CUT, REMOVED, b"", b"x" * 5000]},
    ("grpo", WEIGHTS): {"checkpoint-3": [CUT, b"", b"x" * 5000, SHORT_NORM]},
    ("grpo", "config.json"): {"checkpoint-3": [{"hidden_size": 64}]},
    ("dapo", "trainer/state.json"): {"checkpoint-3 holds alike": [{"alike": [0] * 32}]}}


def resume_cases(add):
    def resumed(name, expected, *arguments, base="grpo", script=None, harms=None,
                resume="{dir}/run/checkpoint-3", after=None):
        """A run of three steps, each saved, that goes on to the fourth."""
        add(name, expected, f"--resume={resume}", *with_defaults(arguments, {"max_steps": 4}),
            script=script or BASES[base], files=broken(WORK / base, harms or {}, "run"),
            env={"HOME": "{dir}"}, after=after)

    for base in ("grpo", "dapo", "ppo"):
        resumed(f"{base} goes on", runs("resumes "), base=base, after=resumed_steps)
        resumed(f"{base}, auto", runs("resumes "), base=base, after=resumed_steps, resume="auto")
    for base, script, words in (("grpo", PPO, "critic_model=.*cannot"), ("dapo", GRPO, runs("resumes ")),
                                ("ppo", GRPO, "holds critic"), ("ppo", DAPO, "holds critic"),
                                ("dapo", PPO, "critic_model=.*cannot"),
                                ("grpo", DAPO, runs("resumes "))):
        resumed(f"{base} by {script}", words, base=base, script=script)
    add_all(lambda name, expected, resume: resumed(
        name, expected, "--out_dir=", resume=resume, after=resumed_steps if "runs" in expected else None),
        RESUMES, "named")
    resumed("into another folder", runs("resumes "), "--out_dir={dir}/other")
    resumed("max_steps below", "max_steps=2", "--max_steps=2")
    for key, value in FIXED.items():
        resumed(f"another {key}", rf"\b{key}=", f"--{key}={value}")
    resumed("another critic_model", r"\bcritic_model=", f"--critic_model={MODEL}", base="ppo")
    for key in ("train_file", "eval_file"):
        resumed(f"another {key}", rf"\b{key}=", "--task=file", f"--{key}={WORK}/copy/rows.jsonl", base="file",
                *[f"--train_file={ROWS}"] * (key == "eval_file"))
    for file in ("metrics.jsonl", "samples.jsonl"):
        add_all(lambda name, expected, line: resumed(name, expected, after=resumed_steps, harms={
            file: changed("", lambda text: text.replace(b"\n", b"\n" + line + b"\n", 1))}),
            {runs(): LOG_LINES}, f"{file} with")
        for harm in (b"", REMOVED, changed("its last line cut", lambda text: text + b'{"step": 3, "re')):
            resumed(f"{file} {harm}", runs(), harms={file: harm}, after=resumed_steps)
    for harm in (CUT, b"", REMOVED):
        resumed(f"the run's config.json {harm}", runs(), harms={"config.json": harm}, after=resumed_steps)
    for file in CHECKPOINT:
        for harm in (CUT, FLIPPED, b"", REMOVED, FOLDER):
            # Not all of these files are read, and not every bit matters.
            resumed(f"{file} {harm}", either("checkpoint-3"), harms={f"checkpoint-3/{file}": harm})
            if file in (WEIGHTS, "trainer/state.json"):
                resumed(f"auto, {file} {harm}", either("checkpoint-3"), resume="auto",
                        harms={f"checkpoint-3/{file}": harm})
    for file in ("evil.py", "trainer/evil.pkl", "critic/config.json", ".hidden"):
        resumed(f"with {file}", runs("resumes "), harms={f"checkpoint-3/{file}": "x"}, after=resumed_steps)
    add_all(lambda name, expected, harms: resumed(name, expected, harms=harms, resume="auto"), LATEST)
    for (base, file), table in FORGED.items():
        add_all(lambda name, expected, harm: resumed(name, expected, base=base, harms={
            f"checkpoint-3/{file}": harm}), table, f"forged {base} {file}")


# ---- sample ------------------------------------------------------------------------------------------------
SAMPLES = {
    "samples": ["samples=1.5", f"samples={10 ** 30}"], "top_k": ["top_k=x"],
    "show": ["show=many"], "temperature": ["temperature=inf"], "top_p": ["top_p=0"], "chat": ["chat=maybe"],
    "max_position_embeddings|max_completion_length": ["max_completion_length=300"], "reward": ["reward=x"],
    "eval_file": ["task=file", "eval_file=x.jsonl"], "train_file": ["train_file=x.jsonl"],
    "unknown setting": ["prompts_per_step=5", "resume=auto"], "model=/no": ["model=/no"],
    r"Errno \d+\] .*/": ["output=/no/x.jsonl", "output=/", "output={dir}"],
    "prompt": ["prompt=a\udcff"],
    "system_prompt": ["system_prompt=\udcff"], "eval_prompts": ["eval_prompts=5000"], "stop": ["stop=a,,b"],
    either("prompt|max_position"): ["prompt=" + "x" * 5000],
    runs(): ["temperature=0", "top_p=1", "top_k=0", f"top_k={10 ** 30}", "stop=\\n,\\",
             "prompt=a\nb\t\x1b[31m\x07", "prompt=-", "show=0",
             "prompt=\u202e\U0001f600", "eval_prompts=1", "output={dir}/x.jsonl", "output=/dev/null",
             "system_prompt=Think."]}


def sample_cases(add):
    sample = functools.partial(add, script=SAMPLE)
    add_all(lambda name, expected, flag: sample(name, expected, f"--{flag}"), SAMPLES)
    for file, harm, words in (
            ("config.json", b"[]", r"config\.json"), (TEMPLATE, b"{{ 1 / 0 }}", "template"),
            (WEIGHTS, CUT, "broken: its weights cannot be read|cannot run .*broken")):
        sample(file, words, "--model={dir}/broken", files=broken(MODEL, {file: harm}))
    sample("a bad row", r"rows\.jsonl:3\b", "--task=file", "--eval_file={dir}/rows.jsonl",
           files={"rows.jsonl": jsonl(*GOOD[:2], message(None))})
    sample("a positional word", "cannot take x", "x")
    sample("a checkpoint", runs("eval/mean@2"), f"--model={WORK}/grpo/checkpoint-3")
    sample("sys.exit(0)", later("reward score"), "--reward={dir}/r.py:score",
           files={"r.py": reward_source("sys.exit(0)")})


def console_cases(add):
    for shell in (">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-", "> /dev/full", "2> /dev/full",
                  "> /dev/full 2>&1", "| true", "2>&1 | true", "2>&1 | head -1"):
        add(shell, runs(), shell=shell, after=all_steps)
    rows = [prompt(row["prompt"] + message("\u00e9\U0001f600\u202e")["prompt"]) for row in GOOD]
    for env in ({"PYTHONIOENCODING": "ascii"}, {"PYTHONUTF8": "0", "LC_ALL": "C"},
                {"PYTHONIOENCODING": "ascii:strict", "PYTHONUTF8": "0", "LC_ALL": "POSIX"}):
        add(repr(env), runs(), "--task=file", "--train_file={dir}/rows.jsonl", "--train_prompts=0",
            "--temperature=3", shell="2>&1", env=env,
            files={"rows.jsonl": jsonl(*rows)}, after=all_steps)


GROUPS = {"settings": settings_cases, "configs": config_cases, "rows": row_cases, "rewards": reward_cases,
          "environment": environment_cases, "models": model_cases, "folders": folder_cases,
          "resumes": resume_cases, "sample": sample_cases, "console": console_cases}


# ---- the trial ---------------------------------------------------------------------------------------------


def all_cases():
    cases = {}
    for group, make in GROUPS.items():
        def add(name, expected, *arguments, **rest):
            name = name if len(name) <= 100 else f"{name[:80]}... of {len(name)}"
            expected = expected if isinstance(expected, Expected) else Expected("refused", expected)
            assert (group, name) not in cases, f"{group}: {name!r} stands there twice"
            cases[group, name] = Case(group, name, expected, tuple(map(str, arguments)), **rest)
        make(add)
    return list(cases.values())


class Trial:
    """A case in the processes that try it."""

    def __init__(self, case, folder):
        self.case, self.folder = case, folder
        here = lambda text: str(text).replace("{dir}", str(folder))
        for name, content in ({"victim": "precious"} | case.files).items():
            write(os.path.normpath(folder / name), content)
        arguments = list(map(here, with_defaults(case.arguments, DEFAULTS[case.script])))
        env = {key: here(value) for key, value in case.env.items()}
        log, errors = folder / "log", folder / "errors"
        script = script_path(case.script)
        if case.shell:
            command = f"set -o pipefail; {shlex.join([sys.executable, script, *arguments])} {case.shell}"
            with open(log, "ab") as stdout, open(errors, "ab") as stderr:
                self.processes = [subprocess.Popen(
                    ["bash", "-c", command], cwd=ROOT, stdout=stdout, stderr=stderr,
                    env=os.environ | {"PYTHONPATH": ROOT} | env,
                    start_new_session=True)]
        else:
            port = free_port()
            # As Python itself has it, the script's __file__ is absolute.
            self.processes = start_forked(run_in_child, [
                (os.path.join(ROOT, script), arguments, log, environment(rank, case.ranks, port) | env, (), errors)
                for rank in range(case.ranks)], daemon=True)
        self.begun = time.monotonic()

    def codes(self):
        return [process.poll() if self.case.shell else process.exitcode for process in self.processes]

    def ended(self):
        return None not in self.codes() or time.monotonic() > self.begun + SECONDS

    def problem(self):
        """What is not as expected, or None."""
        self.seconds, codes = time.monotonic() - self.begun, self.codes()
        for process in self.processes:
            if self.case.shell:
                # With what the shell has started.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.kill()
        log, errors = [path.read_text(errors="replace") if path.exists() else ""
                       for path in (self.folder / "log", self.folder / "errors")]
        self.last = next((line.strip() for text in (errors, log) for line in reversed(text.splitlines())
                          if line.strip()), "")
        # A progress bar may stand before it on its line.
        refusal = next(iter(re.findall(rf"{self.case.script}: .*", self.last)), "")
        (kind, words), codes = self.case.expected, set(codes)
        stopped, victim = kind in ("later", "still") and codes == {1}, self.folder / "victim"
        end = ("stood still" in errors if kind == "still"
               else re.search(rf"^(?:\[rank\d+\]: )?(?:Runtime|Value|configurator.Input)Error: .*({words})", self.last))
        if None in codes:
            return "hung"
        problems = {
            "accepted": codes == {0} and kind not in ("runs", "either"),
            "stopped by something else": stopped and not end,
            # A traceback of the user's own code is shown from its first line on.
            "a traceback of ours": f'File "{ROOT}/' in log + errors and not stopped,
            "another exit code": not stopped and codes not in ({0}, {2}),
            "ran without a word": codes == {0} and kind == "runs" and not re.search(words, log + errors),
            "refused": codes == {2} and kind == "runs",
            "other words": codes == {2} and not (refusal and re.search(words, refusal)),
            "code of a stranger has run": OWNED.exists() and not OWNED.rmdir(),
            "the victim has changed": not victim.is_file() or victim.read_text() != "precious"}
        return next((problem for problem, so in problems.items() if so), None) or (
            self.case.after(self.folder) if self.case.after else None)


def make_models():
    """A policy, a reward model, and a run of three steps of each kind, to be copied."""
    import torch
    import transformers
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3ForSequenceClassification

    from configurator import TINY_DEFAULTS
    from tiny import pretrain
    transformers.utils.logging.disable_progress_bar()
    tokenizer = pretrain.make_tokenizer()
    for path, kind in ((MODEL, Qwen3ForCausalLM), (JUDGE, Qwen3ForSequenceClassification)):
        torch.manual_seed(0)
        kind(Qwen3Config(
            vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=2, head_dim=16, max_position_embeddings=256,
            num_labels=1, tie_word_embeddings=True, eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id, initializer_range=0.2,
            suits=TINY_DEFAULTS)).save_pretrained(path)
        tokenizer.save_pretrained(path)
    shutil.copytree(MODEL, WORK / "copy")
    for folder in (WORK, WORK / "copy"):
        write(folder / "letters.py", LETTERS)
        write(folder / "rows.jsonl", jsonl(*GOOD))
    saved = ("--save_interval=1", "--keep_checkpoints=5", "--max_steps=3", "--eval_interval=1")
    for name, script in BASES.items():
        of_file = ("--task=file", f"--train_file={ROWS}") if name == "file" else ()
        trial = Trial(Case("bases", name, runs(), saved + of_file, script), WORK / f"{name}-made")
        while not trial.ended():
            time.sleep(0.01)
        assert not (problem := trial.problem()), f"{name}: {problem}: {trial.last}"
        shutil.move(trial.folder / "run", WORK / name)


def report(cases, failures, seconds):
    for group in GROUPS:
        if tried := [case.expected.kind for case in cases if case.group == group]:
            bad = sum(trial.case.group == group for trial, _ in failures)
            print(f"{group:11} {len(tried):4} cases, {tried.count('runs'):3} of which run, "
                  f"{len(tried) - bad:4} as expected, {bad:4} not")
    print(f"all         {len(cases):4} cases in {seconds:.0f} s, {len(failures)} not as expected\n")
    for trial, problem in failures:
        print(f"{trial.case.group}: {trial.case.name!r}: {problem} ({trial.seconds:.0f} s)\n    "
              f"wanted {' '.join(trial.case.expected).strip()!r}, exit codes {trial.codes()}, "
              f"last line {trial.last[:200]!r}")


def main(only="", jobs=2, every=1):
    # No script can take all of the machine's memory, as reading /dev/zero would.
    resource.setrlimit(resource.RLIMIT_DATA, (8 << 30, 8 << 30))
    os.makedirs(WORK)
    begun = time.monotonic()
    try:
        make_models()
        cases = [case for case in all_cases() if only in f"{case.group}: {case.name}"][::int(every)]
        waiting, running, failures = list(enumerate(cases)), [], []
        while waiting or running:
            while waiting and len(running) < int(jobs):
                number, case = waiting.pop(0)
                running.append(Trial(case, WORK / f"case-{number}"))
            time.sleep(0.005)
            for trial in [trial for trial in running if trial.ended()]:
                running.remove(trial)
                if problem := trial.problem():
                    failures.append((trial, problem))
                shutil.rmtree(trial.folder, ignore_errors=True)
        report(cases, failures, time.monotonic() - begun)
        return bool(failures)
    finally:
        shutil.rmtree(WORK, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(**dict(argument.removeprefix("--").split("=", 1) for argument in sys.argv[1:])))
