"""Tries hundreds of malformed inputs on the scripts: each has to be refused in a line that names the culprit.

    python tests/attack.py                         # all of them, in two processes at a time
    python tests/attack.py --only=rewards --jobs=4 # those with this word in "group: name"
    python tests/attack.py --seconds=20            # how long a case may take, otherwise 60

Settings, config files, rows, rewards, models, folders, resumed runs, rollouts and consoles. A refusal has the
exit code 2, no traceback, and a last line with the words given here. Among them stand unusual inputs that are
fine and have to run to their end. Nothing may hang, and no file outside a run's folder may change. Each case
has a forked process (runs.py) and a folder of its own. The exit code is 0 only if all is as expected.
"""
import contextlib
import dataclasses
import io
import json
import os
import pickle
import random
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

# Before torch: models this small lose by a second thread. Nothing here is to be found on a network.
os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
               # It counts the semaphores of processes that were killed.
               "PYTHONWARNINGS": "ignore::UserWarning:multiprocessing.resource_tracker"}
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from runs import ROOT, environment, forkserver, free_port, run_in_child, with_defaults

WORK = Path(tempfile.gettempdir()) / f"attack-{os.getpid()}"
MODEL, JUDGE = WORK / "model", WORK / "judge"
GRPO, DAPO, PPO = "train_grpo.py", "train_dapo.py", "train_ppo.py"
SMALL = {"model": MODEL, "out_dir": "{dir}/run", "reward": f"{WORK}/letters.py:score", "engine": "hf",
         "prompts_per_step": 2, "num_generations": 4, "max_completion_length": 12, "train_prompts": 32,
         "eval_prompts": 4, "eval_samples": 1, "max_steps": 2, "warmup_steps": 0, "learning_rate": 1e-3}
DEFAULTS = {
    GRPO: SMALL, DAPO: SMALL | {"max_num_gen_batches": 4}, PPO: SMALL | {"critic_warmup_steps": 1},
    "sample.py": {key: SMALL[key] for key in ("model", "engine", "max_completion_length", "eval_prompts")}
    | {"samples": 2}, "replay.py": {}}
LETTERS = """
def score(prompts, completions, **_):
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [{"score": sum(ord(c) % 2 == 0 for c in text) / 12} for text in texts]
"""


class Expected(NamedTuple):
    kind: str
    words: str = ""             # a regular expression


def runs(words=""):
    """It ends with exit code 0 and says these words somewhere."""
    return Expected("runs", words)


def either(words):
    """It runs, or is refused with these words."""
    return Expected("either", words)


def later(words):
    """It is refused, or stops in the middle by a RuntimeError, with these words."""
    return Expected("later", words)


class Case(NamedTuple):
    group: str
    name: str
    expected: Expected
    arguments: list             # {dir} stands for the case's folder
    script: str
    files: dict                 # name in that folder -> text, bytes, or a function of the path
    env: dict
    after: object               # function(folder): what is wrong in it afterwards, or None
    ranks: int
    shell: str                  # how a shell redirects it, instead of a fork


# ------------------------------------------------------------------------------------------------------------
# files, and what harms them


def write(path, content):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if callable(content):
        content(path)
    elif isinstance(content, bytes):
        Path(path).write_bytes(content)
    else:
        Path(path).write_text(content)


def link(target):
    return lambda path: os.symlink(target, path)


def replaced(make):
    def replace(path):
        if os.path.lexists(path):
            os.remove(path)
        make(path)
    return replace


def changed(change):
    """A harm that replaces a file's bytes by change(bytes)."""
    return lambda path: Path(path).write_bytes(change(Path(path).read_bytes()))


def edited(change):
    """A harm that changes the object in a JSON file in place, or replaces it by what change returns."""
    def edit(path):
        value = json.loads(Path(path).read_text())
        returned = change(value)
        Path(path).write_text(json.dumps(value if returned is None else returned))
    return edit


def setting(key, value):
    return edited(lambda config: config.update({key: value}))


def drop(key):
    return lambda value: value.__delitem__(key)


def without(key):
    return edited(drop(key))


def copy_of(folder):
    return lambda path: shutil.copytree(folder, path, symlinks=True)


def half(data):
    return data[:len(data) // 2]


def flipped(data):
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1:]


HARMS = {"cut short": changed(half), "with a flipped bit": changed(flipped), "empty": changed(lambda _: b""),
         "removed": os.remove, "a FIFO": replaced(os.mkfifo), "a folder": replaced(os.mkdir),
         "a link": lambda path: (shutil.move(path, WORK / "moved" / str(time.time_ns())),
                                 os.symlink("/etc/hostname", path))}


def seal(folder):
    """Make a checkpoint's checksums those of its files."""
    import checkpoint
    folder = Path(folder)
    (folder / "trainer/checksums.json").unlink(missing_ok=True)
    (folder / "trainer/checksums.json").write_text(json.dumps({
        str(path.relative_to(folder)): checkpoint.checksum(path) for path in folder.rglob("*")
        if path.is_file() and path.name != "rollouts.jsonl"}))


def tensors(change):
    """A harm that changes the dict of tensors in a model.safetensors."""
    def edit(path):
        from safetensors.torch import load_file, save_file
        weights = load_file(path)
        change(weights)
        save_file(weights, path, {"format": "pt"})
    return edit


def shortened(name):
    """A change of a dict of tensors: one of them loses a part."""
    return lambda weights: weights.update({name: weights[name][..., :5].clone()})


def parquet(rows):
    def make(path):
        import pyarrow as pa
        import pyarrow.parquet
        pyarrow.parquet.write_table(pa.Table.from_pylist(rows), path)
    return make


def parquet_bytes():
    with tempfile.NamedTemporaryFile(suffix=".parquet") as file:
        parquet(good_rows())(file.name)
        return Path(file.name).read_bytes()


class Evil:
    """Unpickled, it calls a function."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def pickled_global(module, name, argument):
    """A pickle that calls module.name(argument), by protocol 4, in which a name may have dots."""
    text = lambda word: b"\x8c" + bytes([len(word)]) + word.encode()
    return b"\x80\x04" + text(module) + text(name) + b"\x93" + text(argument) + b"\x85R."


def forged_entry(path):
    """Put a pickle of Evil where a checkpoint's .metadata says that an entry of the optimizer's state is."""
    import torch
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata
    metadata = pickle.loads(Path(path, "trainer/.metadata").read_bytes())
    index = next(index for index in metadata.storage_data
                 if isinstance(metadata.state_dict_metadata[index.fqn], BytesStorageMetadata))
    info, buffer = metadata.storage_data[index], io.BytesIO()
    torch.save(Evil(os.mkdir, str(Path(path).parents[1] / "owned")), buffer)
    with open(Path(path, "trainer", info.relative_path), "ab") as file:
        metadata.storage_data[index] = dataclasses.replace(info, offset=file.tell(),
                                                           length=len(buffer.getvalue()))
        file.write(buffer.getvalue())
    Path(path, "trainer/.metadata").write_bytes(pickle.dumps(metadata))


# ------------------------------------------------------------------------------------------------------------
# what must be so afterwards


def victim_is_whole(folder):
    whole = (folder / "victim").is_file() and (folder / "victim").read_text() == "precious"
    return None if whole else "the victim has changed"


def nothing_ran(folder):
    return "code of a stranger has run" if (folder / "owned").exists() else None


def all_steps(folder):
    steps = [json.loads(line)["step"] for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    return None if steps == [0, 1, 2] else f"metrics.jsonl has the steps {steps}"


def resumed_steps(folder):
    """The run has its four steps, without gaps and twins; what stood there before is not counted."""
    steps = []
    for line in (folder / "run/metrics.jsonl").read_bytes().splitlines():
        try:
            steps.append(json.loads(line)["step"])
        except (ValueError, TypeError, KeyError):
            continue
    steps = [step for step in steps if isinstance(step, int)]
    return None if steps[-2:] == [3, 4] and len(set(steps)) == len(steps) else f"the steps are {steps}"


# ------------------------------------------------------------------------------------------------------------
# the cases

NO_WHOLE = ["", "1.5", "nan", "inf", "-inf", "1e400", "ten", "true", "None", "1+1", "[5]", "'5'", "5 5", "0x",
            "1j", "5\n6", "5\x00", "\udcff", "９１x", "9" * 5000, "(" * 100_000, "-" * 100_000 + "1"]
NO_NUMBER = ["", "nan", "inf", "-inf", "1e400", "-1e400", "x", "True", "1+1", "1,5", "--1", "1e", "1e-",
             "9" * 400]
NO_BOOL = ["", "1", "0", "yes", "no", "on", "None", "2", "'True'"]
POSITIVE = {
    GRPO: "temperature num_generations prompts_per_step max_prompt_length max_completion_length token_budget "
          "updates_per_step max_steps pass_k cov_share eval_samples eval_interval save_interval difficulty "
          "sample_interval keep_checkpoints max_skipped_updates vllm_tensor_parallel_size",
    DAPO: "max_num_gen_batches updates_per_step", PPO: "num_epochs updates_per_epoch kl_horizon max_steps",
    "sample.py": "samples max_completion_length difficulty"}
NOT_NEGATIVE = {
    GRPO: "learning_rate warmup_steps weight_decay grad_clip epsilon epsilon_high dual_clip kl_coef "
          "entropy_coef correction_low correction_high logprob_gap reward_timeout timeout train_prompts "
          "reward_step_timeout eval_prompts vllm_gpu_memory_utilization",
    DAPO: "overlong_buffer overlong_penalty skip_after",
    PPO: "critic_learning_rate critic_warmup_steps value_clip kl_target max_kl",
    "sample.py": "temperature top_p top_k eval_prompts reward_timeout show vllm_gpu_memory_utilization",
    "replay.py": "kl_coef epsilon dual_clip"}
ABOVE_ONE = {GRPO: "beta1 beta2 cov_share vllm_gpu_memory_utilization", PPO: "gamma lam beta1",
             "sample.py": "top_p"}
CHOICES = {GRPO: "task engine dtype advantage kl_in kl_estimator old_logprobs loss_type loss_aggregation "
                 "engine_correction entropy_decay lr_decay",
           PPO: "loss_aggregation lr_decay dtype task engine", DAPO: "loss_type advantage",
           "sample.py": "task engine dtype", "replay.py": "advantage loss_type kl_estimator dtype"}
COMBINATIONS = [  # script, settings, the words of the refusal
    *[(script, settings, words) for script in (GRPO, DAPO, PPO) for settings, words in [
        ("token_budget=70", "token_budget"), ("reward=none", "reward_model"),
        ("train_file=x.jsonl", "train_file"), ("eval_file=x.jsonl", "eval_file"),
        ("reward_weight=2", "reward_weight"), ("reward_model_weight=0", "reward_model_weight"),
        ("vllm_tensor_parallel_size=2", "vllm_tensor_parallel_size"),
        ("max_prompt_length=200 max_completion_length=100", "max_position_embeddings"),
        ("task=file", "train_file"), ("task=file train_file=none.jsonl", "none.jsonl: no such file"),
        ("resume=auto out_dir=", "resume=auto"), ("prompts_per_step=33", "prompts_per_step")]],
    *[(script, settings, words) for script in (GRPO, DAPO) for settings, words in [
        ("epsilon=1", r"\bepsilon="), ("updates_per_step=3", "updates_per_step"),
        ("num_generations=1 prompts_per_step=4", "num_generations"),
        ("advantage=pass_at_k pass_k=5", "pass_k"),
        ("advantage=pass_at_k kl_coef=0.1 kl_in=reward kl_estimator=k1", "pass_at_k"),
        ("advantage=pass_at_k reward_model=x", "pass_at_k"),
        ("dual_clip=1", "dual_clip"), ("dual_clip=3 loss_type=gmpo", "dual_clip"),
        ("kl_coef=0.1 kl_estimator=k1", "kl_estimator"),
        ("kl_coef=0.1 kl_in=reward kl_estimator=k3", "kl_estimator"),
        ("old_logprobs=engine loss_type=gpg", "old_logprobs"),
        ("old_logprobs=engine engine_correction=token_mask", "engine_correction"),
        ("correction_low=2 correction_high=2", "correction_low"),
        ("correction_low=3 correction_high=2", "correction_low")]],
    (DAPO, "advantage=remax", "filter_groups"),
    (DAPO, "max_num_gen_batches=2 filter_groups=false", "max_num"),
    (DAPO, "advantage=reinforce++ filter_groups=false max_num_gen_batches=1 skip_after=1", "skip_after"),
    (DAPO, "overlong_buffer=13", "overlong_buffer"),
    (DAPO, "advantage=remax filter_groups=false max_num_gen_batches=1", "overlong_buffer"),
    (DAPO, "advantage=pass_at_k overlong_buffer=5", "overlong_buffer"),
    (DAPO, "max_num_gen_batches=17", "max_num_gen_batches"),
    (PPO, "dual_clip=1", "dual_clip"), (PPO, "critic_warmup_steps=2", "critic_warmup_steps"),
    (PPO, "kl_horizon=7", "kl_horizon"), (PPO, "kl_target=1", "kl_target"),
    (PPO, "updates_per_epoch=3", "updates_per_epoch")]
# Endings of those that are about pass_at_k, which knows no buffer.
PASS_AT_K = ("pass_k=5", "kl_estimator=k1", "reward_model=x")


def flags(text):
    return [f"--{flag}" for flag in text.split()]


def settings_cases(add):
    for key, values in {"max_steps": NO_WHOLE, "learning_rate": NO_NUMBER, "chat": NO_BOOL}.items():
        for value in values:
            shown = value if len(value) < 20 else f"{value[:3]} x {len(value)}"
            add(f"{key}={shown!r}", rf"--{key} must be", f"--{key}={value}")
    for table, values in ((POSITIVE, ("0",)), (NOT_NEGATIVE, ("-1",)), (ABOVE_ONE, ("1.5",))):
        for script, keys in table.items():
            for key in keys.split():
                for value in values:
                    where = ["{dir}/run/checkpoint-2"] if script == "replay.py" else []
                    add(f"{script} {key}={value}", rf"\.py: {key}(=| must be)", *where, f"--{key}={value}",
                        script=script, files={"run": copy_of(WORK / "grpo")} if where else {})
    for script, keys in CHOICES.items():
        for key in keys.split():
            where = ["{dir}/run/checkpoint-2"] if script == "replay.py" else []
            add(f"{script} {key}=nonsense", rf"\b{key}\b.*nonsense", *where, f"--{key}=nonsense",
                script=script, files={"run": copy_of(WORK / "grpo")} if where else {})
    for script, combination, words in COMBINATIONS:
        no_buffer = ["--overlong_buffer=0"] if script == DAPO and combination.endswith(PASS_AT_K) else []
        add(f"{script} {combination}", words, *flags(combination), *no_buffer, script=script)
    for key in ("beta1", "beta2"):
        add(f"{key}=1", key, f"--{key}=1")
    for key in ("max_step", "learnig_rate", "sync_timeout", "MAX_STEPS", "max-steps", "max_steps ", "",
                "model\n",
                "__name__", "__file__", "settings", "math", "critic_model", "skip_after", "help", "\udcff",
                "x" * 100_000):
        add(f"unknown {key[:20]!r}", "unknown setting", f"--{key}=5")
    add("a sync_timeout that is old", "unknown setting --sync_timeout", "--sync_timeout=5", script=PPO)
    for argument in ("max_steps", "--max_steps", "-max_steps=5", "--", "-", "", "countdown", "=", "model=x",
                     "\udcff", "a\nb", "[" * 100_000):
        add(f"positional {argument[:20]!r}", "cannot take", argument)
    add("value after a space", "cannot take --seed", "--seed", "5")
    add("given twice", "--seed given twice", "--seed=1", "--seed=1")
    add("given twice with another between", "--seed given twice", "--seed=1", "--chat=true", "--seed=2")
    add("seed=1+1", "--seed must be", "--seed=1+1")
    for key in ("prompts_per_step", "num_generations", "eval_samples", "max_completion_length",
                "train_prompts", "eval_prompts", "difficulty", "updates_per_step", "max_prompt_length"):
        add(f"{key} of 30 digits", rf"\b{key}\b", f"--{key}={10 ** 30}")
    for key in ("warmup_steps", "seed", "save_interval", "token_budget", "keep_checkpoints",
                "prompts_per_step"):
        add(f"{key} of 4000 digits", either(rf"\b{key}\b"), f"--{key}={10 ** 4000}")
    for key in ("difficulty=1000000000", "train_prompts=7000", "eval_prompts=5000"):
        add(key, rf"\b{key.partition('=')[0]}\b", f"--{key}")
    for flag in ("temperature=1e308", "timeout=1e300", "reward_timeout=1e300",
                 "reward_step_timeout=1e300", "reward_timeout=1e-300", "grad_clip=1e-320",
                 "epsilon_high=1e300"):
        add(flag, either(rf"\b{flag.partition('=')[0]}\b"), f"--{flag}")
    add("model in quotes", "model='x'", "--model='x'")
    add("model with a newline", "model=", "--model=/no\nsuch")
    add("model with half a surrogate", "model=", "--model=/no\udcff")
    add("task with half a surrogate", "task", "--task=\udcff")
    add("train_file with half a surrogate", r"\.jsonl: no such file", "--task=file",
        "--train_file=\udcff.jsonl")
    add("a tilde that is no user", "no such", "--task=file", "--train_file=~nobody-here/x.jsonl")
    add("out_dir that is not UTF-8", either("out_dir"), "--out_dir={dir}/\udce9")
    add("system_prompt with half a surrogate", either("system_prompt"), "--system_prompt=\udcff",
        "--max_prompt_length=100")
    add("two ranks, prompts_per_step=3", "prompts_per_step=3 does not divide", "--prompts_per_step=3",
        ranks=2)
    add("two ranks, one held-out prompt", "eval_prompts", "--eval_prompts=1", ranks=2)
    add("two ranks run", runs(), ranks=2)
    for flag in ("seed=-1", f"seed={10 ** 30}", "learning_rate=0", "max_steps=2e0", "max_steps=+2",
                 "chat=fAlSe", "grad_clip=0", "reward_timeout=0", "timeout=0", "keep_checkpoints=1_000",
                 "token_budget=1000000000", "temperature=1e-3", "system_prompt=\n", "logprob_gap=1",
                 "train_prompts=8", "beta1=0"):
        add(flag[:30], runs(), f"--{flag}")
    for script in (DAPO, PPO):
        add(f"{script} as it is", runs(), script=script)


CONFIGS = {  # what is in the file -> the words of the refusal after its name
    "stray bytes": (b"model = '\xff\xfe'", ""), "NUL bytes": (b"seed = 1\x00\n", ""),
    "UTF-16": ("seed = 1", ""),
    "a call": ("seed = 1\nmax_steps = int('5')", ":2"), "an import": ("import os", ":1"),
    "an expression": ("seed = 1+1", ":1.*seed"), "a comparison": ("seed = 1 < 2", ":1.*seed"),
    "a deep expression": ("seed = " + "(" * 100_000 + "1" + ")" * 100_000, ""),
    "a long sum": ("seed = " + "1+" * 200_000 + "1", ""), "many signs": ("seed = " + "-" * 100_000 + "1", ""),
    "deep lists": ("seed = " + "[" * 150 + "]" * 150, ":1.*seed"),
    "many dots": ("seed = a" + ".b" * 100_000, ""),
    "unknown key": ("\nlearnig_rate = 1", ":2: unknown setting learnig_rate"),
    "key twice": ("seed = 1\nseed = 2", ":2: seed given twice"), "no literal": ("seed = other", ":1.*seed"),
    "augmented": ("seed += 1", ":1"), "a tuple target": ("seed, chat = 1, True", ":1"),
    "an attribute target": ("seed.x = 1", ":1"), "a subscript target": ("seed[0] = 1", ":1"),
    "a starred target": ("*seed, = [1]", ":1"), "two targets": ("seed = max_steps = 5", ":1"),
    "an annotation": ("seed: int = 1", ":1"), "a walrus": ("(seed := 1)", ":1"), "del": ("del seed", ":1"),
    "if": ("if True:\n    seed = 1", ":1"), "a lambda": ("seed = lambda: 1", ":1.*seed"),
    "an f-string": ("model = f'{1}'", ":1.*model"), "bytes": ("model = b'x'", ":1.*model"),
    "an ellipsis": ("model = ...", ":1.*model"), "None": ("seed = None", ":1.*seed"),
    "a bool for an int": ("seed = True", ":1.*seed"), "a string for an int": ("seed = '1'", ":1.*seed"),
    "an int for a bool": ("chat = 1", ":1.*chat"), "an int for a string": ("model = 5", ":1.*model"),
    "inf": ("kl_coef = 1e999", ":1.*kl_coef"), "nan": ("kl_coef = float('nan')", ":1.*kl_coef"),
    "5000 digits": ("seed = " + "9" * 5000, ""), "a set of lists": ("seed = {[]}", ":1.*seed"),
    "a bare word": ("seed", ":1"), "open string": ("model = 'x", ":1"), "bad indent": ("  seed = 1", ":1"),
    "bad coding": ("# coding: nonsense\nseed = 1", ""),
    "a wrong coding": (b"# coding: ascii\nmodel = '\xc3'", ""),
    "garbage": (random.Random(0).randbytes(10_000_000), ""), "one long line": ("x" * 10_000_000, ""),
    "many lines": ("seed\n" * 500_000, ":1"), "a bad value": ("max_steps = -1", "")}
GOOD_CONFIGS = {"empty": "", "a BOM": "\ufeffseed = 1", "CRLF": "seed = 1\r\nchat = True\r\n",
                "latin-1": b"# coding: latin-1\n# \xe9\nseed = 1", "semicolons": "seed = 1; chat = True",
                "two strings": "lr_decay = 'lin' 'ear'", "brackets": "seed = (\n1)"}


def config_cases(add):
    for name, (content, words) in CONFIGS.items():
        content = content.encode("utf-16") if name == "UTF-16" else content
        add(name, r"max_steps=-1" if name == "a bad value" else rf"x\.py.*{words}" if words else r"x\.py",
            "{dir}/x.py", files={"x.py": content})
    for name, make in {"missing": lambda path: None, "a folder": os.mkdir, "a FIFO": os.mkfifo,
                       "/dev/zero": link("/dev/zero"), "a link to nothing": link("/nonexistent"),
                       "a link to itself": lambda path: os.symlink(path, path)}.items():
        add(name, r"x\.py", "{dir}/x.py", files={"x.py": make})
    add("under a file", r"x\.py", "{dir}/file/x.py", files={"file": ""})
    add("a name of 300 characters", r"xxx\.py", "{dir}/" + "x" * 300 + ".py")
    add("a name with a NUL", r"x\.py", "{dir}/\0x.py")
    add("NUL in a path", "out_dir", "{dir}/x.py", files={"x.py": r"out_dir = '/tmp/a\0b'"})
    add("NUL in model", "model", "{dir}/x.py", files={"x.py": r"model = '/a\0b'"})
    add("NUL in train_file", "train_file|jsonl", "{dir}/x.py", "--task=file",
        files={"x.py": r"train_file = 'a\0b.jsonl'"})
    add("NUL in reward", "reward", "{dir}/x.py", files={"x.py": r"reward = 'a\0b.py:score'"})
    add("half a surrogate in model", "model", "{dir}/x.py", files={"x.py": r"model = '/a\ud800'"})
    add("half a surrogate in out_dir", "out_dir", "{dir}/x.py", files={"x.py": r"out_dir = '/tmp/\ud800'"})
    for name, content in GOOD_CONFIGS.items():
        add(name, runs(), "{dir}/x.py", files={"x.py": content})
    add("/dev/null", "x.py", "{dir}/x.py", files={"x.py": link("/dev/null")})


def good_rows():
    return [{"prompt": [{"role": "user", "content": f"What is {n}+1?"}], "answer": str(n + 1)}
            for n in range(40)]


def jsonl(*rows):
    """Rows, and lines as they are, as the bytes of a file."""
    return b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows)


def prompt(value, **columns):
    return {"prompt": value, "answer": "1"} | columns


def message(content, role="user"):
    return prompt([{"role": role, "content": content}])


def answered(key, value):
    """A row with this for an answer, among rows that have one in the same column."""
    nested = {"ground_truth": value} if key == "reward_model" else value
    return {"prompt": good_rows()[0]["prompt"], key: nested}


BAD_LINES = {
    "cut off": b'{"prompt": "a', "no JSON": b"prompt", "an array cut off": b"[1, ", "a list": [1],
    "a number": 5, "a string": "x", "null": None, "true": True, "deep lists": b"[" * 100_000,
    "deep objects": b'{"a":' * 100_000,
    "no columns": {}, "no prompt": {"question": "x", "answer": "1"}, "prompt null": prompt(None),
    "prompt a number": prompt(5), "prompt true": prompt(True), "prompt an object": prompt({"role": "user"}),
    "prompt empty": prompt(""), "prompt blank": prompt(" \n"), "no messages": prompt([]),
    "messages of numbers": prompt([5]), "messages of strings": prompt(["x"]),
    "messages of lists": prompt([[]]),
    "an empty message": prompt([{}]), "no content": prompt([{"role": "user"}]),
    "no role": prompt([{"content": "x"}]), "content a number": message(5), "content null": message(None),
    "content a list": message([{"type": "text", "text": "x"}]), "content empty": message(""),
    "content blank": message(" \t"), "role a number": message("x", 5), "role null": message("x", None),
    "half a surrogate": message("\ud800"), "half a surrogate in a string": prompt("\udfff"),
    "half a surrogate in a role": message("x", "\ud800"),
    "invalid UTF-8": b'{"prompt": "\xff", "answer": "1"}', "UTF-16": '{"prompt": "x"}'.encode("utf-16"),
    "a control character": b'{"prompt": "a\x01", "answer": "1"}', "a column prompts": prompt("x", prompts=1),
    "a column completions": prompt("x", completions=[]),
    "5000 digits": b'{"prompt": "x", "n": ' + b"9" * 5000 + b"}",
    "no answer": {"prompt": good_rows()[0]["prompt"]}}
BAD_ANSWERS = {"empty": "", "blank": "  ", "NaN": float("nan"), "Infinity": float("inf"),
               "an object": {"a": 1}, "a list": ["1"], "1e400": None}
BAD_FILES = {
    "empty": b"", "blank lines": b"\n \n\t\n", "one row": jsonl(good_rows()[0]), "a folder": os.mkdir,
    "a FIFO": os.mkfifo, "/dev/zero": link("/dev/zero"), "/dev/null": link("/dev/null"),
    "a link to nothing": link("/nonexistent"), "garbage": random.Random(0).randbytes(100_000),
    "a JSON array": json.dumps(good_rows(), indent=1).encode(), "10 MB without a line": b"x" * 10_000_000,
    "all rows of one prompt": jsonl(*[good_rows()[0]] * 20)}
BAD_PARQUET = {
    "garbage": b"x" * 1000, "0 bytes": b"", "its magic alone": b"PAR1PAR1",
    "cut short": lambda: half(parquet_bytes()), "no rows": lambda: parquet([]), "a folder": lambda: os.mkdir,
    "a FIFO": lambda: os.mkfifo, "JSON": jsonl(*good_rows())}
GOOD_ROWS = {
    "NUL in a prompt": message("a\0b"), "another role": message("x", "tool"), "a twin": good_rows()[0],
    "both columns": prompt("x", ground_truth="1"), "a string among messages": prompt("What?"),
    "answer a number": answered("answer", 5), "answer true": answered("answer", True),
    "a long answer": answered("answer", "9" * 100_000), "a nested column": prompt("x", more={"a": [1, None]}),
    "an odd column": prompt("x", **{"": 1, "a b": 2, "\n": 3}), "a column self": prompt("x", self=1),
    "a column solution_str": prompt("x", solution_str="5"), "an emoji": message("\U0001f600\u202e"),
    "prompt twice": b'{"prompt": "a", "prompt": "b", "answer": "1"}'}


def row_cases(add):
    def of_file(name, expected, content, file="rows.jsonl", more=(), **rest):
        add(name, expected, "--task=file", "--train_file={dir}/" + file, "--train_prompts=0",
            *(more if any("--reward=" in flag for flag in more) else ["--reward=", *more]),
            files={file: content}, **rest)

    good = good_rows()
    for name, line in BAD_LINES.items():
        of_file(name, r"rows\.jsonl:3\b", jsonl(*good[:2], line, *good[2:]))
    for key in ("answer", "ground_truth", "solution", "reward_model"):
        for name, value in BAD_ANSWERS.items():
            bad = json.dumps(answered(key, value)).replace("null", "1e400").encode()
            of_file(f"{key} {name}", r"rows\.jsonl:3\b",
                    jsonl(*[answered(key, "1") | {"prompt": row["prompt"]} for row in good[:2]], bad,
                          *[answered(key, "1") | {"prompt": row["prompt"]} for row in good]))
    for name, content in BAD_FILES.items():
        of_file(name, r"rows\.jsonl", content)
        add(f"eval_file {name}", runs() if name in ("one row", "all rows of one prompt") else r"rows\.jsonl",
            "--task=file", f"--train_file={WORK}/rows.jsonl", "--eval_file={dir}/rows.jsonl",
            files={"rows.jsonl": content})
    for name in ("cut off", "no prompt", "content null", "half a surrogate", "a column prompts",
                 "deep lists"):
        add(f"eval_file {name}", r"rows\.jsonl:3\b", "--task=file", f"--train_file={WORK}/rows.jsonl",
            "--eval_file={dir}/rows.jsonl", files={"rows.jsonl": jsonl(*good[:2], BAD_LINES[name])})
    for name, content in BAD_PARQUET.items():
        of_file(f"parquet, {name}", r"rows\.parquet", content() if callable(content) else content,
                "rows.parquet")
    import datetime
    now = datetime.datetime(2026, 1, 1)
    for name, bad in {"bytes in a message": message(b"x"), "a time in a message": message(now),
                      "bytes for a prompt": prompt(b"x"), "a time for a prompt": prompt(now),
                      "a bytes answer": good[0] | {"answer": b"1"},
                      "a list for an answer": good[0] | {"answer": [1]},
                      "a NaN answer": good[0] | {"answer": float("nan")},
                      "a null prompt": {"prompt": None, "answer": "1"}}.items():
        of_file(f"parquet, {name}", r"rows\.parquet: row 1\b", parquet([bad]), "rows.parquet")
    for file in ("rows.txt", "rows", "rows.json", "rows.jsonl.gz"):
        of_file(f"named {file}", re.escape(file), jsonl(*good), file)
    add("a missing file", r"none\.jsonl: no such file", "--task=file", "--train_file={dir}/none.jsonl")
    of_file("prompts too long", "max_prompt_length", jsonl(*good), more=["--max_prompt_length=3"])
    of_file("more asked than there are", either("train_prompts"), jsonl(*good), more=["--train_prompts=50"])
    of_file("a step larger than the file", "prompts_per_step", jsonl(*good), more=["--prompts_per_step=50"])
    strings = [row | {"prompt": row["prompt"][0]["content"]} for row in good]
    of_file("system_prompt with strings", "system_prompt", jsonl(*strings), more=["--system_prompt=Think."])
    of_file("a held-out side of none", "one side", jsonl(*[row for row in good if not held_out(row)]))
    of_file("a training side of none", "one side", jsonl(*[row for row in good if held_out(row)]))
    for name, row in GOOD_ROWS.items():
        of_file(name, runs(), jsonl(*good[:2], row, *good[2:]))
    of_file("strings", runs(), jsonl(*strings))
    of_file("a BOM", runs(), b"\xef\xbb\xbf" + jsonl(*good))
    of_file("CRLF, blank lines and no last newline", runs(),
            jsonl(*good).replace(b"\n", b"\r\n\r\n").rstrip())
    of_file("no answers, a reward of one's own", runs(), jsonl(*[{"prompt": row["prompt"]} for row in good]),
            more=[f"--reward={WORK}/letters.py:score"])
    of_file("no answers", "answer", jsonl(*[{"prompt": row["prompt"]} for row in good]))
    of_file("parquet", runs(), parquet(good), "rows.parquet")
    of_file("parquet, other columns of times and bytes", runs(),
            parquet([row | {"when": now, "image": b"\xff"} for row in good]), "rows.parquet")
    of_file("half a surrogate in an answer", either(r"rows\.jsonl:3\b"),
            jsonl(*good[:2], answered("answer", "\ud800"), *good[2:]))
    of_file("half a surrogate in a column", either(r"rows\.jsonl:3\b"),
            jsonl(*good[:2], prompt("x", more="\ud800"), *good[2:]))
    question = {"question": "What is 1+1?", "answer": "Two.\n#### 2"}
    for name, content, words in (
            ("missing", None, r"train\.jsonl"), ("0 bytes", b"", r"train\.jsonl"),
            ("other keys", jsonl(question, {"prompt": "x"}), r"train\.jsonl:2"),
            ("garbage", jsonl(question, b"\xff\x00"), r"train\.jsonl:2"),
            ("a list", jsonl([1]), r"train\.jsonl:1"),
            ("no ####", jsonl(question, question | {"answer": "Two."}), r"train\.jsonl:2"),
            ("numbers", jsonl(question, {"question": 1, "answer": 2}), r"train\.jsonl:2"),
            ("a FIFO", os.mkfifo, r"train\.jsonl")):
        cache = {".cache/gsm8k/test.jsonl": jsonl(*[question] * 4)}
        add(f"gsm8k, {name}", words, "--task=gsm8k", "--max_prompt_length=150",
            files=cache | ({".cache/gsm8k/train.jsonl": content} if content is not None else {}),
            env={"HOME": "{dir}", "https_proxy": "http://127.0.0.1:9"})
    add("gsm8k from its cache", runs(), "--task=gsm8k", "--max_prompt_length=150", "--train_prompts=0",
        files={f".cache/gsm8k/{name}.jsonl": jsonl(*[question] * 40) for name in ("train", "test")},
        env={"HOME": "{dir}"})


def held_out(row):
    import data
    return data.held_out(row["prompt"][0]["content"])


BAD_VALUES = """
    None, 1.0, 'ab', [], [1.0], [1.0] * (n + 1), ['1'] * n, [b'1'] * n, [float('nan')] * n, [float('inf')] *
    n, [[1.0]] * n, (1.0 for _ in completions), {'score': 1.0}, {1.0, 2.0}, [{'a': 'x'}] * n, [{'a':
    float('nan')}] * n, [{'a': [1]}] * n, [{'a': {'b': 1}}] * n, [{'score': 'x'}] * n, [{'score': 10 **
    400}] * n, [10 ** 400] * n, [-10 ** 400] * n, [1j] * n, [Decimal('NaN')] * n, [Decimal('1e400')] * n,
    [Fraction(10 ** 400)] * n, [object()] * n, [Odd()] * n, [score] * n, [float] * n, numpy.ones((n, 2)),
    numpy.array(1.0), numpy.array(['1'] * n), numpy.full(n, numpy.nan), torch.ones(n, 1), torch.full((n,),
    torch.inf), numpy.array([1j] * n), dict.fromkeys(range(n), 1.0), range(n), bytes(n), [{'a':
    -float('inf')}] * n"""
GOOD_VALUES = """
    [None] * n, (1.0,) * n, numpy.ones(n), numpy.ones(n, bool), torch.ones(n), torch.ones(n,
    requires_grad=True), [True] * n, [Decimal('0.5')] * n, [Fraction(1, 3)] * n, [numpy.float32(1)] * n,
    [torch.tensor(1.0)] * n, [{}] * n, [{'a': None}] * n, [{'score': 1, 'note': 'x'}] * n, [{1: 1.0}] * n,
    [{None: 1.0}] * n, [{'': 1.0}] * n, [{'a/b': 1.0}] * n, [{'a\\nb': 1.0}] * n, [{'\\ud800': 1.0}] * n,
    [{'x' * 9999: 1.0}] * n, [{'a\\0b': 1}] * n, [{'..': 1.0, '/etc': 2.0}] * n"""
RAISES = """
    raise ValueError('x'); raise ValueError; raise ValueError('a\\nb'); raise ValueError('\\ud800'); raise
    Unspeakable; raise GeneratorExit; raise BaseException('x'); raise StopIteration; raise MemoryError;
    sys.exit(0); sys.exit(); sys.exit('bye'); 1 / 0; recurse(); raise SystemExit(2); raise
    UnicodeDecodeError('a', b'', 0, 1, ''); raise TimeoutError; raise ExceptionGroup('x', [ValueError()]);
    raise asyncio.CancelledError"""
HARMLESS = """
    sys.stdout.close(); sys.stderr.close(); sys.stdout = None; sys.stderr = None; sys.stdout = sys.stderr =
    None; os.dup2(os.open('/dev/null', 0), 1); os.dup2(os.open('/dev/null', 0), 2); sys.stdout =
    io.StringIO(); print('\\ud800'); print('x' * 10 ** 6); sys.__stdout__ =
    sys.__stderr__ = None; prompts.clear(), completions.clear(); columns.clear(); completions[0].clear();
    del prompts, completions, columns; signal.signal(signal.SIGALRM, print), signal.alarm(1);
    signal.setitimer(signal.ITIMER_REAL, 1000); random.seed(0); numpy.random.seed(0); torch.manual_seed(0);
    os.chdir('/'); os.environ.clear(); threading.Thread(target=time.sleep, args=(1000,)).start();
    gc.disable(); sys.argv.clear(); sys.path.clear(); logging.disable(); subprocess.run(['true']);
    os.umask(0o777) and os.umask(0o022); asyncio.run(asyncio.sleep(0)); warnings.simplefilter('ignore');
    signal.signal(signal.SIGTERM, signal.SIG_IGN)"""
REWARD = """
import asyncio, gc, io, logging, os, random, signal, subprocess, sys, threading, time, warnings
from decimal import Decimal
from fractions import Fraction
import numpy, torch
calls = 0
class Odd:
    def __float__(self): raise ValueError('odd')
class Unspeakable(Exception):
    def __str__(self): raise ValueError('unspeakable')
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
REWARD_FILES = {  # what is in the file -> the words of the refusal
    "a syntax error": ("def score(:", r"r\.py.*SyntaxError"), "empty": ("", r"r\.py has no function score"),
    "no such function": ("def scores(): pass", r"no function score"),
    "no function": ("score = 5", "no function score"),
    "raises": ("raise ValueError('x')", r"r\.py raised ValueError"), "divides": ("1/0", r"r\.py raised Zero"),
    "sys.exit": ("import sys; sys.exit(0)", r"r\.py raised SystemExit"),
    "SystemExit": ("raise SystemExit", r"r\.py"), "BaseException": ("raise BaseException", r"r\.py"),
    "recursion": ("def f(): f()\nf()", r"r\.py raised Recursion"),
    "no module": ("import no_such", r"r\.py raised Module"),
    "NUL": ("x = 1\0", r"r\.py"), "stray bytes": (b"x = '\xff'", r"r\.py"), "deep": ("(" * 100_000, r"r\.py"),
    "a long sum": ("x = " + "1+" * 200_000 + "1", r"r\.py"),
    "garbage": (random.Random(0).randbytes(1_000_000), r"r\.py"),
    "a missing column": ("def score(prompts, completions, nothing): pass", "column nothing"),
    "a missing column of verl's": ("def score(data_source, solution_str, ground_truth, more): pass",
                                   "column more"),
    "a generator": ("def score(prompts, completions, **c): yield 1.0", "reward score"),
    "no arguments": ("def score(): return [1.0] * 2", later("reward score")),
    "print": ("score = print", "reward"),
    "a builtin": ("score = max", r"reward.*(score|max)"), "a type": ("score = dict", r"reward.*(score|dict)"),
    "a class": ("class score:\n    def __init__(self, completions, **c): pass", "reward score"),
    "a signature that lies": ("def score(*_, **__): return [1.0] * 2\nscore.__signature__ = 5", "score"),
    "a folder": (os.mkdir, r"r\.py"), "a FIFO": (os.mkfifo, r"r\.py"),
    "/dev/zero": (link("/dev/zero"), r"r\.py"),
    "closes stderr and raises": ("import sys; sys.stderr.close(); raise ValueError", None)}
GOOD_REWARD_FILES = {
    "a lambda": "score = lambda completions, **_: [1.0] * len(completions)", "a partial": "import functools\n"
                 "score = functools.partial(lambda n, completions, **_: [n] * len(completions), 1)",
    "an object": "class S:\n    def __call__(self, completions, **_): return [1] * len(completions)\n"
                 "score = S()",
    "keywords alone": "def score(**columns): return [1.0] * len(columns['prompts'])",
    "verl's form": "def score(data_source, solution_str, ground_truth): return {'score': 1, 'n': 'x'}",
    "imports of the repository": "from rewards import accuracy as score", "a BOM": "\ufeff" + LETTERS,
    "a process that stays": "import subprocess\nsubprocess.Popen(['sleep', '5'])" + LETTERS}


def reward_cases(add):
    def of_file(name, expected, content, spec="r.py:score", more=(), file="r.py", after=None):
        add(name, expected, "--reward={dir}/" + spec, *more, files={file: content}, after=after)

    def source(statement="pass", value="[1.0] * n", after=0):
        return REWARD.replace("AFTER", str(after)).replace("STATEMENT", statement).replace("VALUE", value)

    for value in split_values(BAD_VALUES):
        of_file(f"returns {value}", "reward score", source(value=value))
    for value in split_values(GOOD_VALUES):
        of_file(f"returns {value}", runs(), source(value=value))
    for statement in split_statements(RAISES):
        of_file(f"does {statement}", "reward score", source(statement))
    for statement in split_statements(HARMLESS):
        of_file(f"does {statement}", runs(), source(statement), after=all_steps)
    for statement in ("raise ValueError('x')", "sys.exit(0)", "sys.exit()", "raise Unspeakable",
                      "raise BaseException", "raise ValueError('\\ud800')",
                      "sys.stderr.write('x' * 9999), 1 / 0"):
        of_file(f"does {statement} later", later("reward score"), source(statement, after=2))
    for value in ("None", "[1.0]", "['1'] * n", "[float('nan')] * n", "[10 ** 400] * n", "[{'a': 'x'}] * n",
                  "[Odd()] * n"):
        of_file(f"returns {value} later", later("reward score"), source(value=value, after=2))
    slow = ["--reward_timeout=1", "--reward_step_timeout=3"]
    for name, statement in (("sleeps", "time.sleep(1000)"), ("never ends", "while True: pass"),
                            ("swallows all", "linger()")):
        of_file(f"{name} in the trial", "reward score|reward_timeout", source(statement), more=slow)
        of_file(f"{name} later", runs() if name != "swallows all" else later("reward"),
                source(statement, after=2), more=slow)
    for spec, words in {"none.py:score": r"no such file.*none\.py", "r.txt:score": r"reward.*r\.txt",
                        "r.py": "reward",
                        "r.py:": "reward", "r.py:score:": "reward", "r.py:a.b": "reward", "r.py:5": "reward",
                        "r.py::score": "reward", "r.py:sc\udcffore": "reward", "r.py:score ": "reward",
                        "r.py/:score": "reward", "r.py:__name__": "no function __name__"}.items():
        of_file(f"named {spec!r}", words, LETTERS, spec, file="r.txt" if "txt" in spec else "r.py")
    add("no name at all", "reward must be", "--reward=:")
    for name, (content, words) in REWARD_FILES.items():
        # With stderr closed there is nowhere to say it; the exit code remains.
        of_file(f"file: {name}", words if words else Expected("mute"), content)
    for name, content in GOOD_REWARD_FILES.items():
        of_file(f"file: {name}", runs(), content)


def split_statements(text):
    return [" ".join(statement.split()) for statement in text.split(";")]


def split_values(text):
    """The elements of a list in Python's own text."""
    import ast
    text = f"[{' '.join(text.split())}]"
    return [ast.get_source_segment(text, element) for element in ast.parse(text, mode="eval").body.elts]


TEMPLATE = "chat_template.jinja"
THREE_LAYERS = edited(lambda config: config.update(num_hidden_layers=3, layer_types=["full_attention"] * 3))
CONFIG_HARMS = {  # file of a model -> harms, by name, and the words of the refusal
    "config.json": {
        "empty": (b"", r"config\.json"), "no JSON": (b"x", r"config\.json"),
        "a list": (b"[]", r"config\.json"),
        "a number": (b"5", r"config\.json"), "stray bytes": (b"\xff", r"config\.json"),
        "no keys": (b"{}", "broken"),
        "deep": (b"[" * 100_000, r"config\.json"), "a folder": (replaced(os.mkdir), "broken"),
        "a FIFO": (replaced(os.mkfifo), "broken"), "/dev/zero": (replaced(link("/dev/zero")), "broken"),
        "an unknown model_type": (setting("model_type", "nonsense"), "broken.*nonsense|nonsense.*broken"),
        "a vision model": (setting("model_type", "vit"), "broken"),
        "an encoder": (setting("model_type", "t5"), "broken"),
        "model_type a number": (setting("model_type", 5), "broken"),
        "hidden_size a string": (setting("hidden_size", "x"), "broken"),
        "hidden_size 0": (setting("hidden_size", 0), "broken"),
        "layers -1": (setting("num_hidden_layers", -1), "broken"),
        "3 layers": (THREE_LAYERS, r"broken.*layers\.2"),
        "vocab_size 5": (setting("vocab_size", 5), "broken"),
        "vocab_size null": (setting("vocab_size", None), "broken"),
        "dropout": (setting("attention_dropout", 0.1), either("broken.*dropout")),
        "softcapping": (setting("final_logit_softcapping", 30.0), "final_logit_softcapping"),
        "logit_scale": (setting("logit_scale", 0.5), "logit_scale"),
        "remote code": (setting("auto_map", {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.M"}),
                        either("broken")),
        "a dtype of nonsense": (setting("dtype", "nonsense"), either("broken")),
        "no positions": (setting("max_position_embeddings", 8), "max_position_embeddings")},
    "model.safetensors": {
        "empty": (b"", r"broken.*model\.safetensors"),
        "garbage": (b"x" * 1000, r"broken.*model\.safetensors"),
        "cut short": (changed(half), r"broken.*model\.safetensors"),
        "removed": (os.remove, "broken.*weights"),
        "a folder": (replaced(os.mkdir), "broken"), "a FIFO": (replaced(os.mkfifo), "broken"),
        "a header without end": (b"\xff" * 8 + b"{}", r"broken.*model\.safetensors"),
        "no tensors": (tensors(dict.clear), "broken"),
        "a tensor less": (tensors(lambda w: w.pop("model.norm.weight")), r"broken.*model\.norm\.weight"),
        "a tensor more": (tensors(lambda w: w.update(more=w["model.norm.weight"].clone())),
                          either("broken.*more")),
        "a tensor of another shape": (tensors(shortened("model.norm.weight")),
                                      r"broken.*model\.norm\.weight"),
        "whole numbers": (tensors(lambda w: w.update({k: v.long() for k, v in w.items()})),
                          either("broken"))},
    "tokenizer.json": {
        "empty": (b"", "broken.*tokenizer"), "garbage": (b"x", "broken.*tokenizer"),
        "a list": (b"[]", "broken.*tokenizer"),
        "cut short": (changed(half), "broken.*tokenizer"), "removed": (os.remove, "broken.*tokenizer"),
        "no keys": (b"{}", "broken.*tokenizer"), "a FIFO": (replaced(os.mkfifo), "broken.*tokenizer"),
        "a folder": (replaced(os.mkdir), "broken.*tokenizer"), "deep": (b"[" * 100_000, "broken.*tokenizer")},
    "tokenizer_config.json": {
        "empty": (b"", "broken.*tokenizer"), "a list": (b"[]", "broken.*tokenizer"),
        "garbage": (b"x", "broken.*tokenizer"),
        "an unknown class": (setting("tokenizer_class", "Nonsense"), either("broken"))},
    "generation_config.json": {
        "empty": (b"", r"generation_config\.json"), "garbage": (b"x", r"generation_config\.json"),
        "a list": (b"[]", r"generation_config\.json"), "a number": (b"5", r"generation_config\.json"),
        "a FIFO": (replaced(os.mkfifo), "generation_config"),
        "a folder": (replaced(os.mkdir), "generation_config"),
        **{f"eos {value!r}": (setting("eos_token_id", value), "eos_token_id")
           for value in ([], -1, 10 ** 6, 10 ** 30, "x", 1.5, [-1], ["x"], [None], {})}},
    TEMPLATE: {
        "a syntax error": (b"{% for %}", "template"), "raises": (b"{{ raise_exception('no') }}", "template"),
        "divides": (b"{{ 1 / 0 }}", "template"), "without the prompt": (b"Hello", "template|prompt"),
        "empty": (b"", "template|prompt"), "an unknown filter": (b"{{ messages | nonsense }}", "template"),
        "stray bytes": (b"\xff", "tokenizer"),
        "an endless loop": (b"{% for i in range(10**12) %}{% endfor %}", "template"),
        "an escape": (b"{{ ''.__class__.__mro__[1].__subclasses__() }}", "template")}}
SPECIAL_MODELS = [  # files of the model, further arguments, expected
    ("eos null falls through", {"generation_config.json": setting("eos_token_id", None)}, [], runs()),
    ("no generation_config.json", {"generation_config.json": os.remove}, [], runs()),
    ("no chat template", {TEMPLATE: os.remove}, [], "chat template"),
    ("no chat template, chat=false", {TEMPLATE: os.remove}, ["--chat=false"], runs()),
    ("an adapter", {"adapter_config.json": b'{"base_model_name_or_path": "x"}'}, [], "adapter"),
    ("an adapter's weights", {"adapter_config.json": b"{}", "adapter_model.safetensors": b""}, [], "adapter"),
    ("foreign files", {"README.md": "x", "evil.py": "raise ValueError"}, [], runs()),
    ("a name with a blank", {}, ["--model={dir}/broken/../broken//"], runs())]


def model_cases(add):
    def of_model(name, expected, harms, more=(), **rest):
        files = {"broken": copy_of(MODEL)} | {f"broken/{file}": harm for file, harm in harms.items()}
        arguments = more if any("--model=" in flag for flag in more) else ["--model={dir}/broken", *more]
        add(name, expected, *arguments, files=files, **rest)

    for file, harms in CONFIG_HARMS.items():
        for name, (harm, words) in harms.items():
            of_model(f"{file}, {name}", words, {file: harm})
    for name, harms, more, expected in SPECIAL_MODELS:
        of_model(name, expected, harms, more)
    for function, name in ((os.mkdir, "mkdir"), (exec, "exec")):
        call = Evil(function, "{dir}/owned" if function is os.mkdir else "import os; os.mkdir('{dir}/owned')")
        of_model(f"a pickle that calls {name}", "broken", {
            "model.safetensors": os.remove, "pytorch_model.bin": at_home(call)}, after=nothing_ran)
    add("missing", "model=.*broken", "--model={dir}/broken")
    add("an empty folder", r"broken.*config\.json", "--model={dir}/broken", files={"broken": os.mkdir})
    add("a file", "model=.*file", "--model={dir}/file", files={"file": "x"})
    add("a FIFO", "model=.*file", "--model={dir}/file", files={"file": os.mkfifo})
    add("a link to itself", "model=.*file", "--model={dir}/file",
        files={"file": lambda path: os.symlink(path, path)})
    for name in ("no-such/model", "nosuch", "../no", "a/../b", "no such", "a/b/c", "~/none", "-", "", " ",
                 "http://x/y", "a\nb", "./none", "é/ü", "x" * 300):
        add(f"named {name[:20]!r}", "model=", f"--model={name}")
    for name, harms, words in (
            ("missing", None, "critic_model=.*broken"),
            ("another vocabulary", {"config.json": setting("vocab_size", 300)},
             "critic_model=.*broken.*vocabulary"),
            ("no JSON", {"config.json": b"x"}, r"critic_model=.*config\.json|config\.json.*critic_model"),
            ("weights cut short", {"model.safetensors": changed(half)}, r"broken.*model\.safetensors"),
            ("a tensor less", {"model.safetensors": tensors(lambda w: w.pop("model.norm.weight"))},
             "broken.*norm"),
            ("no positions", {"config.json": setting("max_position_embeddings", 8)},
             "max_position_embeddings")):
        files = {"broken": copy_of(MODEL)} | {f"broken/{file}": harm for file, harm in (harms or {}).items()}
        add(f"critic, {name}", words, "--critic_model={dir}/broken", script=PPO, files=files if harms else {})
    two = {f"LABEL_{i}": i for i in range(2)}
    for name, harms, expected in (
            ("as it is", {}, runs()), ("missing", None, "reward_model=.*broken"),
            ("two labels", {"config.json": edited(lambda c: c.update(label2id=two,
                                                                     id2label=dict(enumerate(two))))},
             "broken.*2 labels"),
            ("no JSON", {"config.json": b"x"}, r"broken.*config\.json|config\.json.*broken"),
            ("a list", {"config.json": b"[]"}, r"broken.*config\.json|config\.json.*broken"),
            ("weights cut short", {"model.safetensors": changed(half)}, r"broken.*model\.safetensors"),
            ("weights empty", {"model.safetensors": b""}, r"broken.*model\.safetensors"),
            ("no weights", {"model.safetensors": os.remove}, "broken.*weights"),
            ("no head", {"model.safetensors": tensors(lambda w: w.pop("score.weight"))},
             r"broken.*score\.weight"),
            ("another shape", {"model.safetensors": tensors(shortened("score.weight"))},
             r"broken.*score\.weight"),
            ("NaN", {"model.safetensors": tensors(lambda w: w["score.weight"].fill_(float("nan")))},
             "broken.*finite"),
            ("a tokenizer of garbage", {"tokenizer.json": b"x"}, "broken.*tokenizer"),
            ("no chat template", {TEMPLATE: os.remove}, "broken.*chat template"),
            ("a template that raises", {TEMPLATE: b"{{ 1 / 0 }}"}, "broken.*template"),
            ("no pad token", {"config.json": without("pad_token_id"),
                              "tokenizer_config.json": without("pad_token")},
             "broken.*pad token")):
        files = {"broken": copy_of(JUDGE)} | {f"broken/{file}": harm for file, harm in (harms or {}).items()}
        add(f"reward_model, {name}", expected, "--reward_model={dir}/broken", files=files if harms is not None
            else {})
    add("reward_model, a policy", "broken.*score", "--reward_model={dir}/broken", "--reward=none",
        files={"broken": copy_of(MODEL)})


def at_home(evil):
    """Write a pickle of a call, in whose argument {dir} is the case's folder, two folders above the file."""
    function, (argument,) = evil.call
    return lambda path: Path(path).write_bytes(pickle.dumps(
        Evil(function, argument.replace("{dir}", str(Path(path).parents[1])))))


HOLDER = """
import fcntl, sys, time
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
print("in", flush=True)
time.sleep(2)
"""


def held_for_two_seconds(path):
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, path], stdout=subprocess.PIPE)
    assert holder.stdout.readline() == b"in\n"


def beside_victim(files):
    """Files of a case; a function of the name `victim` stands for a link to a file outside of the run."""
    return {"victim": "precious"} | {
        name: (lambda path: replaced(link(Path(path).parents[len(Path(name).parts) - 1] / "victim"))(path))
        if content == "victim" else content for name, content in files.items()}


def folder_cases(add):
    for name, out_dir in {"a file": "{dir}/file", "under a file": "{dir}/file/run", "/proc": "/proc/x",
                          "/sys": "/sys/x", "/proc/self/fd": "/proc/self/fd", "/dev/null": "/dev/null",
                          "a long name": "{dir}/" + "x" * 300,
                          "a long path": "{dir}" + "/x" * 3000, "the root": "/",
                          "a link to itself": "{dir}/loop",
                          "a link to nothing below a file": "{dir}/dangling"}.items():
        add(name, "out_dir", f"--out_dir={out_dir}", files={
            "file": "", "loop": lambda path: os.symlink(path, path),
            "dangling": lambda path: os.symlink(Path(path).with_name("file") / "x", path)})
    add("NUL in out_dir", "out_dir", "--out_dir={dir}/a\0b")
    for name, files in {"a foreign file": {"run/thesis.tex": "x"}, "a model": {"run": copy_of(MODEL)},
                        "a hidden file": {"run/.git/config": "x"},
                        "a folder of a folder": {"run/photos/1": "x"},
                        "another run": {"run": copy_of(WORK / "grpo")},
                        "a checkpoint of a stranger": {"run/checkpoint-1/config.json": "{}"}}.items():
        add(name, "out_dir=.*run", files=files)
        if name not in ("another run", "a checkpoint of a stranger"):
            add(f"{name}, resume=auto", "out_dir=.*run", "--resume=auto", files=files)
    add("an empty folder", runs(), files={"run": os.mkdir})
    add("an empty folder, resume=auto", runs(), "--resume=auto", files={"run": os.mkdir})
    add("blanks, a newline, non-ASCII", runs(), "--out_dir={dir}/a b\n\u00e9\U0001f600")
    add("slashes and dots", runs(), "--out_dir={dir}//x/.././run//", after=all_steps)
    add("a tilde", runs(), "--out_dir=~/run", env={"HOME": "{dir}"}, after=all_steps)
    add("a link to a folder", runs(), files={"elsewhere": os.mkdir, "run": lambda path: os.symlink(
        Path(path).with_name("elsewhere"), path)}, after=all_steps)
    add("a run that ends in two seconds", runs("another run is writing"), "--resume=auto", "--max_steps=4",
        files={"run": copy_of(WORK / "grpo"), "run/.lock": held_for_two_seconds}, after=resumed_steps)
    for file in (".lock", "config.json", "metrics.jsonl", "samples.jsonl", GRPO, "metrics.jsonl.part",
                 "samples.jsonl.part", "config.json.part", f"{GRPO}.part", "checkpoint.part", "checkpoint-4",
                 "checkpoint-3/rollouts.jsonl", "checkpoint-3/rollouts.jsonl.part"):
        files = beside_victim({"run": copy_of(WORK / "grpo"), f"run/{file}": "victim"})
        # A save that fails, and a folder that cannot be locked, have named the file before.
        words = (re.escape(file) + "|could not be saved" * ("checkpoint" in file)
                 + "|out_dir=" * (file == ".lock"))
        add(f"{file} a link", either(words), "--resume=auto", "--max_steps=4", files=files,
            after=victim_is_whole)
        for name, make in (("FIFO", os.mkfifo), ("folder", os.mkdir)):
            add(f"{file} a {name}", either(words), "--resume=auto", "--max_steps=4",
                files={"run": copy_of(WORK / "grpo"), f"run/{file}": replaced(make)})
    add(".lock alone, a link", r"\.lock", files=beside_victim({"run/.lock": "victim"}), after=victim_is_whole)
    add(".lock alone, a FIFO", r"\.lock", files={"run/.lock": os.mkfifo})
    add(".lock alone, a folder", r"\.lock|out_dir=.*run cannot", files={"run/.lock": os.mkdir})


FILES = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
         "tokenizer_config.json", TEMPLATE, "trainer/.metadata", "trainer/__0_0.distcp", "trainer/state.json",
         "trainer/checksums.json"]
# With whole checksums: what was written by someone who knew how.
STATES = {
    "a list": lambda s: [], "a number": lambda s: 5, "a string": lambda s: "x", "empty": lambda s: {},
    "no step": drop("step"), "no settings": drop("settings"),
    "no num_tokens": drop("num_tokens"), "no world_size": drop("world_size"),
    **{f"{key} {value!r:.20}": (lambda s, key=key, value=value: s.update({key: value})) for key, value in (
        ("step", "3"), ("step", -1), ("step", 10 ** 30), ("step", 1.5), ("step", None), ("step", [3]),
        ("step", True),
        ("step", float("nan")), ("settings", []), ("settings", None), ("settings", 5), ("settings", {}),
        ("num_tokens", "x"), ("num_tokens", None), ("skipped_updates", []),
        ("skipped_updates", {"actor": "x"}), ("skipped_updates", None), ("world_size", "x"),
        ("world_size", None), ("world_size", 0), ("stranger", 1))}}
DAPO_STATES = [
    ("position", "x"), ("position", -5), ("alike", {}), ("alike", ["x"]), ("rests", [1]), ("rests", None)]
METADATA = {
    "mkdir": lambda path: pickle.dumps(Evil(os.mkdir, str(path.parents[3] / "owned"))),
    "exec": lambda path: pickle.dumps(Evil(exec, f"import os; os.mkdir('{path.parents[3]}/owned')")),
    "a dotted name": lambda path: pickled_global("torch.distributed.checkpoint.filesystem", "os.mkdir",
                                                 str(path.parents[3] / "owned")),
    "a class with a dot": lambda path: pickled_global("torch", "Size.__class__", "x"),
    "torch.load": lambda path: pickled_global("torch", "load", "x"), "no pickle": lambda path: b"x",
    "an empty file": lambda path: b"", "a list": lambda path: pickle.dumps([]),
    "None": lambda path: pickle.dumps(None), "cut short": lambda path: half(path.read_bytes()),
    "a memo bomb": lambda path: b"\x80\x04" + b"]" * 100_000 + b"."}
LOG_LINES = {"a blank line": b"", "NULs": b"\0" * 100, "garbage": b"x{", "invalid UTF-8": b"\xff\xfe",
             "a list": b"[1]", "a number": b"5", "null": b"null", "no step": b'{"reward": 1}',
             "a string for a step": b'{"step": "1"}',
             "null for a step": b'{"step": null}', "deep lists": b"[" * 100_000,
             "5000 digits": b'{"step": ' + b"9" * 5000 + b"}"}


def resume_cases(add):
    def resumed(name, expected, *arguments, base="grpo", script=GRPO, harms=None,
                resume="{dir}/run/checkpoint-3", **rest):
        """A run of three steps, each saved, that goes on to the fourth."""
        files = {"run": copy_of(WORK / base)} | {f"run/{file}": harm for file, harm in (harms or {}).items()}
        steps = [] if any("--max_steps=" in flag for flag in arguments) else ["--max_steps=4"]
        add(name, expected, f"--resume={resume}", *steps, *arguments, script=script, files=files,
            **rest)

    newest, harm_newest = "checkpoint-3", lambda change: {"checkpoint-3/trainer/state.json": edited(change),
                                                          "checkpoint-3": seal}
    for script, base in ((GRPO, "grpo"), (DAPO, "dapo"), (PPO, "ppo")):
        resumed(f"{script} goes on", runs("goes on from"), base=base, script=script, after=resumed_steps)
        resumed(f"{script} goes on, auto", runs("goes on from"), base=base, script=script, resume="auto",
                after=resumed_steps)
    add("auto without out_dir", "resume=auto", "--resume=auto", "--out_dir=")
    for name, resume in {"a number": "3", "missing": "{dir}/run/checkpoint-9", "a run": "{dir}/run",
                         "a model": str(MODEL), "a file": "{dir}/run/config.json", "a long name": "x" * 300,
                         "under a file": "{dir}/run/config.json/x",
                         "trainer": "{dir}/run/checkpoint-3/trainer",
                         "half a surrogate": "\udcff", "NUL": "{dir}/\0", "blank": " ",
                         "AUTO": "AUTO"}.items():
        resumed(name, "resume=", resume=resume)
    resumed("older than the newest", "resume=.*newer", resume="{dir}/run/checkpoint-2")
    for key, value in {"task": "countdown", "difficulty": 2, "train_prompts": 30, "max_prompt_length": 60,
                       "chat": "false",
                       "system_prompt": "x", "prompts_per_step": 4, "num_generations": 2, "seed": 1,
                       "model": WORK / "copy", "reward": f"{WORK}/copy/letters.py:score",
                       "reward_model": JUDGE}.items():
        resumed(f"another {key}", rf"\b{key}=", f"--{key}={value}")
    resumed("another critic_model", r"\bcritic_model=", f"--critic_model={MODEL}", base="ppo", script=PPO)
    for key in ("train_file", "eval_file"):
        files = {"train_file": f"{WORK}/rows.jsonl", key: f"{WORK}/copy/rows.jsonl"}
        resumed(f"another {key}", rf"\b{key}=", "--task=file", base="file",
                *(f"--{name}={path}" for name, path in files.items()))
    resumed("max_steps below", "max_steps=2", "--max_steps=2")
    for script, base, words in ((PPO, "grpo", "no critic"), (GRPO, "dapo", "checkpoint-3"),
                                (GRPO, "ppo", "critic"), (DAPO, "ppo", "critic"), (PPO, "dapo", "no critic")):
        resumed(f"{base} by {script}", words, base=base, script=script)
    resumed("grpo by dapo", runs("goes on from"), script=DAPO)

    own = {"checkpoint-3/trainer/state.json": lambda path: edited(lambda s: s["settings"].update(
        train_file=str(Path(path).parents[3] / "rows.jsonl")))(path), "checkpoint-3": seal}
    for name, expected, rows in (("the same rows", runs("goes on"), lambda rows: rows),
                                 ("other rows", "train_file|rows.jsonl|prompts differ",
                                  lambda rows: rows[::-1]),
                                 ("a row more that is not used", runs("goes on"),
                                  lambda rows: rows + rows[:1]),
                                 ("another answer", either("train_file|rows.jsonl|differ"),
                                  lambda rows: [rows[0] | {"answer": "7"}, *rows[1:]])):
        resumed(f"{name} under the same name", expected, "--task=file",
                "--train_file={dir}/run/../rows.jsonl".replace(
            "run/../", ""), base="file", harms=own | {"../rows.jsonl": jsonl(*rows(good_rows()))})
    own = {"checkpoint-3/trainer/state.json": lambda path: edited(lambda s: s["settings"].update(
        reward=f"{Path(path).parents[3]}/letters.py:score"))(path), "checkpoint-3": seal}
    resumed("another reward under the same name", runs("reward.*changed|changed.*reward"),
            "--reward={dir}/letters.py:score", harms=own | {"../letters.py": LETTERS.replace("12", "13")})

    for file in ("metrics.jsonl", "samples.jsonl"):
        for name, line in LOG_LINES.items():
            put = lambda data, line=line: data.split(b"\n", 1)[0] + b"\n" + line + b"\n" + data.split(b"\n",
                                                                                                      1)[1]
            resumed(f"{file}, {name}", runs(re.escape(file) + r":2\b"), harms={file: changed(put)},
                    after=resumed_steps)
        resumed(f"{file}, its last line cut off", runs(),
                harms={file: changed(lambda data: data + b'{"step": 3, "re')}, after=resumed_steps)
        resumed(f"{file} empty", runs(), harms={file: b""}, after=resumed_steps)
        resumed(f"{file} removed", runs(), harms={file: os.remove}, after=resumed_steps)
    for name in ("cut short", "empty", "removed", "with a flipped bit"):
        resumed(f"the run's config.json {name}", runs(), harms={"config.json": HARMS[name]},
                after=resumed_steps)
    resumed("garbage beside", runs(), harms={"events.out.tfevents.1.x": b"\xff", "notes.txt": "x",
                                             "checkpoint-x": "x"})

    for file in FILES:
        for name, harm in HARMS.items():
            # A flipped bit of the checksums may be one of the file that they are about.
            words = rf"{re.escape(os.path.basename(file))}|not a checkpoint"
            words = "damaged" if "checksums" in file and "bit" in name else words
            resumed(f"{file} {name}", rf"checkpoint-3.*({words})", harms={f"{newest}/{file}": harm})
    for name, harm in HARMS.items():
        resumed(f"auto, newest with a state.json {name}", runs("checkpoint-3.*damaged"), resume="auto",
                harms={f"{newest}/trainer/state.json": harm}, after=resumed_steps)
        resumed(f"auto, newest with weights {name}", runs("checkpoint-3.*damaged"), resume="auto",
                harms={f"{newest}/model.safetensors": harm}, after=resumed_steps)
    resumed("auto, all damaged", "resume=auto: all 3", resume="auto",
            harms={f"checkpoint-{step}/model.safetensors": changed(half) for step in (1, 2, 3)})
    resumed("auto, newest an empty folder", runs("checkpoint-4.*damaged"), resume="auto",
            harms={"checkpoint-4": os.mkdir})
    resumed("auto, newest a file", runs(), resume="auto", harms={"checkpoint-4": b"x"})
    resumed("auto, newest a FIFO", runs(), resume="auto", harms={"checkpoint-4": os.mkfifo})
    resumed("auto, a number of 5000 digits", runs(), resume="auto",
            harms={"checkpoint-" + "9" * 200: os.mkdir, "checkpoint-٣": os.mkdir})
    for name, make in {"evil.py": "raise ValueError", "trainer/evil.pkl": b"x", "critic/config.json": "{}",
                       ".hidden": "x"}.items():
        resumed(f"with {name}", f"checkpoint-3.*{re.escape(name)}", harms={f"{newest}/{name}": make})
    for name, content in {"deep": "[" * 100_000, "a list": "[]", "a number": "5", "null": "null",
                          "no files": "{}", "a string": '"x"', "garbage": "x", "stray bytes": b"\xff",
                          "5000 digits": '{"config.json": ' + "9" * 5000 + "}"}.items():
        resumed(f"checksums.json, {name}", r"checkpoint-3.*(checksums\.json|config\.json|listed)",
                harms={f"{newest}/trainer/checksums.json": content})
    for name, value in {"../config.json": 1, "/etc/passwd": 1, "/dev/zero": 1, "": 1, ".": 1, "trainer": 1,
                        "a\0b": 1, "config.json": "x", "tokenizer.json": None, "/proc/self/mem": 1}.items():
        resumed(f"checksums.json with {name!r}", "checkpoint-3.*damaged", harms={
            f"{newest}/trainer/checksums.json": setting(name, value)})
    for name, change in STATES.items():
        expected = either(newest) if name in ("world_size 0", "step True") else newest
        resumed(f"state.json, {name}", expected, harms=harm_newest(change))
    for key, value in DAPO_STATES:
        resumed(f"state.json, {key} {value!r}", newest, base="dapo", script=DAPO,
                harms=harm_newest(lambda s, key=key, value=value: s.update({key: value})))
    resumed("state.json, kl_coef a string", newest, base="ppo", script=PPO,
            harms=harm_newest(lambda s: s.update(kl_coef="x")))
    for name, content in {"NaN": b"NaN", "deep": b"[" * 100_000, "garbage": b"x",
                          "stray bytes": b"\xff"}.items():
        resumed(f"state.json, {name}", newest, harms={f"{newest}/trainer/state.json": content, newest: seal})
    for name, make in METADATA.items():
        resumed(f"forged .metadata, {name}", newest, after=nothing_ran, harms={
            f"{newest}/trainer/.metadata": lambda path, make=make: write(path, make(Path(path))),
            newest: seal})
    resumed("a forged entry", newest, after=nothing_ran, harms={
        f"{newest}/trainer": lambda path: forged_entry(Path(path).parent), newest: seal})
    for name, harm in {"cut short": changed(half), "empty": b"", "garbage": b"x" * 5000}.items():
        resumed(f"sealed distcp, {name}", newest,
                harms={f"{newest}/trainer/__0_0.distcp": harm, newest: seal})
        resumed(f"sealed weights, {name}", newest, harms={f"{newest}/model.safetensors": harm, newest: seal})
    resumed("sealed weights of another shape", newest,
            harms={f"{newest}/model.safetensors": tensors(shortened("model.norm.weight")), newest: seal})
    resumed("sealed config of another size", newest,
            harms={f"{newest}/config.json": setting("hidden_size", 64), newest: seal})
    resumed("sealed optimizer removed", either(newest),
            harms={f"{newest}/trainer/.metadata": os.remove, newest: seal})
    for name, resume in {"slashes": "{dir}//run/./checkpoint-3///",
                         "dots": "{dir}/run/checkpoint-2/../checkpoint-3", "a tilde": "~/run/checkpoint-3",
                         "a relative name": "{up}{dir}/run/checkpoint-3"}.items():
        resumed(f"named by {name}", runs("goes on from"), "--out_dir=", after=resumed_steps,
                env={"HOME": "{dir}"}, resume=resume.replace("{up}", "/".join([".."] * ROOT.count("/"))))
    resumed("into another folder", runs("goes on from"), "--out_dir={dir}/other")


ROLLOUTS = {  # what becomes of the first rollout in rollouts.jsonl
    **{f"no {key}": drop(key) for key in ("ids", "spans", "logprobs", "finish_reason", "score")},
    **{f"{key} {value!r:.30}": (lambda r, key=key, value=value: r.update({key: value})) for key, value in (
        ("ids", []), ("ids", "x"), ("ids", [10 ** 6] * 60), ("ids", [-1] * 60), ("ids", [10 ** 30]),
        ("ids", [1.5] * 60),
        ("ids", None), ("ids", [[1]]), ("spans", []), ("spans", [[0, 10 ** 6]]), ("spans", [[5, 2]]),
        ("spans", [[-3, -1]]),
        ("spans", "x"), ("spans", [1, 2]), ("spans", None), ("logprobs", []), ("logprobs", [0.0]),
        ("logprobs", ["x"]),
        ("logprobs", None), ("logprobs", [1e400] * 12), ("score", "x"), ("score", []), ("finish_reason", 5))},
    "a list": lambda r: [], "a number": lambda r: 5, "a string": lambda r: "x"}
HEADS = {"a list": lambda s: [], "empty": lambda s: s.clear(),
         **{f"no {key}": drop(key) for key in ("step", "num_generations", "prompts_per_step")},
         **{f"{key} {value!r}": (lambda s, key=key, value=value: s.update({key: value})) for key, value in (
             ("step", "x"), ("num_generations", 0), ("num_generations", 3), ("num_generations", "x"),
             ("temperature", "x"), ("temperature", None), ("kl_coef", [1]), ("os", 1), ("json", 5),
             ("__file__", "/x"))}}


def sample_cases(add):
    sample = lambda name, expected, *arguments, **rest: add(f"sample, {name}", expected, *arguments,
                                                            script="sample.py", **rest)
    for flag, words in {"samples=1.5": "samples", "top_k=x": "top_k", "show=many": "show",
                        "temperature=inf": "temperature",
                        "max_completion_length=300": "max_position_embeddings|max_completion_length",
                        f"samples={10 ** 30}": "samples", f"top_k={10 ** 30}": "top_k", "top_p=0": "top_p",
                        "chat=maybe": "chat", "task=file": "eval_file", "eval_file=x.jsonl": "eval_file",
                        "train_file=x.jsonl": "train_file",
                        "reward=x": "reward", "max_prompt_length=5": "unknown setting",
                        "resume=auto": "unknown setting",
                        "model=/no": "model=/no", "output=/no/such/folder/x.jsonl": "output",
                        "output=/": "output", "output=/proc/x": "output", "prompt=a\udcff": "prompt",
                        "eval_prompts=5000": "eval_prompts",
                        "output={dir}": "output", "system_prompt=\udcff": "system_prompt",
                        "prompt=" + "x" * 5000: either("prompt|max_position")}.items():
        sample(flag[:30], words if words else runs(), f"--{flag}")
    sample("output a FIFO", "output", "--output={dir}/x", files={"x": os.mkfifo})
    sample("a positional word", "cannot take x", "x")
    for flag in ("temperature=0", "top_p=1", "top_k=0", "prompt=a\nb\t\x1b[31m\x07",
                 "prompt=\u202e\U0001f600", "prompt=-",
                 "show=0", "eval_prompts=1", "output={dir}/x.jsonl", "output=/dev/null",
                 "system_prompt=Think."):
        sample(flag, runs(), f"--{flag}")
    for name, harms in (("bad rows", {"rows.jsonl": jsonl(*good_rows()[:2], message(None))}),
                        ("no rows", {"rows.jsonl": b""})):
        sample(name, r"rows\.jsonl(:3\b)?", "--task=file", "--eval_file={dir}/rows.jsonl", files=harms)
    sample("a checkpoint", runs("eval/mean@2"), "--model={dir}/run/checkpoint-3",
           files={"run": copy_of(WORK / "grpo")})
    for name in ("config.json, a list", "model.safetensors, cut short", "tokenizer.json, garbage",
                 "chat_template.jinja, raises", "generation_config.json, garbage"):
        file, kind = name.split(", ")
        harm, words = CONFIG_HARMS[file][kind]
        sample(name, words, "--model={dir}/broken", files={"broken": copy_of(MODEL), f"broken/{file}": harm})
    for name, reward in (("raises", "raise ValueError"), ("exits", "sys.exit(0)")):
        source = REWARD.replace("AFTER", "0").replace("STATEMENT", reward).replace("VALUE", "[1.0] * n")
        sample(f"a reward that {name}", later("reward score"), "--reward={dir}/r.py:score",
               files={"r.py": source})

    def replay(name, expected, *arguments, harm=None, file="run/checkpoint-2/rollouts.jsonl", **rest):
        files = {"run": copy_of(WORK / "grpo")} | ({file: harm} if harm is not None else {})
        add(f"replay, {name}", expected, *(arguments or ["{dir}/run/checkpoint-2"]), script="replay.py",
            files=files, **rest)

    def edit_line(number, change):
        def edit(data):
            lines = data.splitlines()
            value = json.loads(lines[number])
            returned = change(value)
            lines[number] = json.dumps(value if returned is None else returned).encode()
            return b"\n".join(lines) + b"\n"
        return changed(edit)

    replay("as it is", runs("grad_norm"))
    replay("without a checkpoint", "name a checkpoint", "--kl_coef=0")
    for name, path in {"a run": "{dir}/run", "the last of a run": "{dir}/run/checkpoint-3",
                       "a model": str(MODEL),
                       "a file": "{dir}/run/config.json", "missing": "{dir}/none", "NUL": "{dir}/\0"}.items():
        replay(f"of {name}", "rollouts|name a checkpoint", path)
    replay("under torchrun", "RANK|torchrun", env={"RANK": "0", "WORLD_SIZE": "1"})
    replay("new_policy missing", "new_policy", "{dir}/run/checkpoint-2", "--new_policy=/no")
    replay("reference missing", "reference", "{dir}/run/checkpoint-2", "--kl_coef=0.1", "--reference=/no")
    replay("token_budget small", "token_budget", "{dir}/run/checkpoint-2", "--token_budget=5")
    replay("remax without greedy", "remax", "{dir}/run/checkpoint-2", "--advantage=remax")
    for name, content in {"empty": b"", "garbage": b"x\n",
                          "a head alone": changed(lambda data: data.splitlines()[0] + b"\n"),
                          "a FIFO": replaced(os.mkfifo),
                          "NULs": b"\0" * 100, "deep": b"[" * 100_000, "cut short": changed(half),
                          "invalid UTF-8": b"\xff\n",
                          "a row less": changed(lambda data: data[:data[:-1].rindex(b"\n") + 1]),
                          "blank lines": b"\n\n", "/dev/zero": replaced(link("/dev/zero"))}.items():
        replay(f"rollouts.jsonl, {name}", r"rollouts\.jsonl", harm=content)
    for name, change in ROLLOUTS.items():
        replay(f"a rollout with {name}", either(r"rollouts\.jsonl:2\b") if name == "finish_reason 5"
               else r"rollouts\.jsonl:2\b", harm=edit_line(1, change))
    for name, change in HEADS.items():
        fine = name in ("no prompts_per_step", "os 1", "json 5", "__file__ '/x'")
        words = r"rollouts\.jsonl|num_generations="
        replay(f"a head with {name}", either(words) if fine else words, harm=edit_line(0, change))
    for name, line in LOG_LINES.items():
        replay(f"metrics.jsonl with {name}", runs("grad_norm"), file="run/metrics.jsonl", harm=changed(
            lambda data, line=line: line + b"\n" + data))
    replay("weights cut short", r"model\.safetensors", file="run/checkpoint-2/model.safetensors",
           harm=changed(half))
    replay("a tokenizer of garbage", "tokenizer", file="run/checkpoint-2/tokenizer.json", harm=b"x")


def console_cases(add):
    for name, shell in {"stdout closed": ">&-", "stderr closed": "2>&-", "both closed": ">&- 2>&-",
                        "all closed": "<&- >&- 2>&-",
                        "stdout on a full disk": "> /dev/full", "stderr on a full disk": "2> /dev/full",
                        "both on a full disk": "> /dev/full 2>&1", "stdout a broken pipe": "| true",
                        "both a broken pipe": "2>&1 | true",
                        "a pipe that breaks later": "2>&1 | head -1"}.items():
        add(name, runs(), shell=shell, after=all_steps)
    rows = jsonl(*[{"prompt": row["prompt"] + [{"role": "user", "content": "\u00e9\U0001f600\u202e"}]}
                   for row in good_rows()])
    for name, env in {"ASCII": {"PYTHONIOENCODING": "ascii"},
                      "the C locale": {"PYTHONUTF8": "0", "LC_ALL": "C"},
                      "strict ASCII": {"PYTHONIOENCODING": "ascii:strict", "PYTHONUTF8": "0",
                                       "LC_ALL": "POSIX"}}.items():
        add(name, runs(), "--task=file", "--train_file={dir}/rows.jsonl", "--train_prompts=0",
            "--sample_interval=1", "--temperature=3", shell="2>&1", env=env, files={"rows.jsonl": rows},
            after=all_steps)


GROUPS = {"settings": settings_cases, "configs": config_cases, "rows": row_cases, "rewards": reward_cases,
          "models": model_cases, "folders": folder_cases, "resumes": resume_cases, "sample": sample_cases,
          "console": console_cases}


# ------------------------------------------------------------------------------------------------------------
# the trial


def all_cases():
    cases = []
    for group, make in GROUPS.items():
        def add(name, expected, *arguments, script=GRPO, files=None, env=None, after=None, ranks=1, shell=""):
            expected = expected if isinstance(expected, Expected) else Expected("refused", expected)
            cases.append(Case(group, name, expected, list(arguments), script, files or {}, env or {}, after,
                              ranks, shell))
        make(add)
    twice = [name for name, count in Counter(f"{case.group}: {case.name}" for case in cases).items()
             if count > 1]
    assert not twice, twice
    return cases


def limited(*arguments):
    """Run a script in a process that cannot take all of the machine's memory, as reading /dev/zero would."""
    resource.setrlimit(resource.RLIMIT_DATA, (8 << 30, 8 << 30))
    run_in_child(*arguments)


class Trial:
    """A case in the processes that try it."""

    def __init__(self, case, folder, seconds=60):
        self.case, self.folder = case, folder
        os.makedirs(folder)
        here = lambda text: str(text).replace("{dir}", str(folder))
        for name, content in case.files.items():
            write(os.path.normpath(folder / name), content)
        arguments = case.arguments
        # replay.py takes its checkpoint first.
        arguments = list(map(here, with_defaults(arguments, DEFAULTS[case.script])))
        env = {key: here(value) for key, value in case.env.items()}
        if case.shell:
            command = shlex.join([sys.executable, case.script, *arguments])
            with open(folder / "log", "ab") as log, open(folder / "errors", "ab") as errors:
                self.processes = [subprocess.Popen(
                    ["bash", "-c", f"set -o pipefail; {command} {case.shell}"], cwd=ROOT, stdout=log,
                    stderr=errors, env=os.environ | env, start_new_session=True)]
        else:
            port = free_port()
            # As Python itself has it, the script's __file__ is absolute.
            self.processes = [forkserver.Process(target=limited, args=(
                f"{ROOT}/{case.script}", arguments, folder / "log", environment(rank, case.ranks, port) | env,
                (), folder / "errors"), daemon=True) for rank in range(case.ranks)]
            for process in self.processes:
                process.start()
        self.deadline = time.monotonic() + seconds

    def codes(self):
        return [process.poll() if self.case.shell else process.exitcode for process in self.processes]

    def ended(self):
        return None not in self.codes() or time.monotonic() > self.deadline

    def problem(self):
        """What is not as expected, or None."""
        codes = self.codes()
        for process in self.processes:
            if self.case.shell:
                # With what the shell has started.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.kill()
        text = {name: (self.folder / name).read_text(errors="replace") if (self.folder / name).exists()
                else ""
                for name in ("log", "errors")}
        self.last = next((line.strip() for part in (text["errors"], text["log"])
                          for line in reversed(part.splitlines())
                          if line.strip()), "")
        if None in codes:
            return "hung"
        self.code = max(codes, key=abs)
        (kind, words), output = self.case.expected, "\n".join(text.values())
        # A progress bar may stand before it on its line.
        refusal = next(iter(re.findall(rf"{self.case.script}: .*", self.last)), "")
        if set(codes) == {0}:
            if kind in ("refused", "mute", "later"):
                return "accepted"
            if "Traceback" in output:
                return "a traceback"
            if kind == "runs" and not re.search(words, output):
                return "ran without a word of it"
        elif kind == "later" and set(codes) == {1}:
            if not (self.last.startswith("RuntimeError: ") and re.search(words, self.last)):
                return "stopped by something else"
        elif "Traceback" in output:
            return "a traceback"
        elif set(codes) != {2}:
            return "another exit code"
        elif kind == "runs":
            return "refused"
        elif kind != "mute" and not (refusal and re.search(words, refusal)):
            return "other words"
        return self.case.after(self.folder) if self.case.after else None


def make_models():
    """A policy, a reward model, and a run of three steps of each kind, to be copied."""
    import torch
    import transformers
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3ForSequenceClassification

    import tiny
    transformers.utils.logging.disable_progress_bar()
    tokenizer = tiny.make_tokenizer()
    for path, kind in ((MODEL, Qwen3ForCausalLM), (JUDGE, Qwen3ForSequenceClassification)):
        torch.manual_seed(0)
        kind(Qwen3Config(
            vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=2, head_dim=16, max_position_embeddings=256,
            num_labels=1, tie_word_embeddings=True, eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id, initializer_range=0.2)).save_pretrained(path)
        tokenizer.save_pretrained(path)
    shutil.copytree(MODEL, WORK / "copy")
    os.mkdir(WORK / "moved")
    for folder in (WORK, WORK / "copy"):
        (folder / "letters.py").write_text(LETTERS)
        (folder / "rows.jsonl").write_bytes(jsonl(*good_rows()))
    saved = ["--save_interval=1", "--keep_checkpoints=5", "--max_steps=3", "--eval_interval=1"]
    of_file = ["--task=file", f"--train_file={WORK}/rows.jsonl"]
    for name, script, more in (("grpo", GRPO, []), ("file", GRPO, of_file), ("dapo", DAPO, []),
                               ("ppo", PPO, [])):
        case = Case("base", name, runs(), [*saved, *more], script, {}, {}, None, 1, "")
        trial = Trial(case, WORK / f"{name}-made")
        while not trial.ended():
            time.sleep(0.01)
        assert not (problem := trial.problem()), f"{name}: {problem}: {trial.last}"
        shutil.copytree(WORK / f"{name}-made/run", WORK / name)


def report(cases, failures, seconds):
    for group in GROUPS:
        tried = [case for case in cases if case.group == group]
        controls = sum(case.expected.kind == "runs" for case in tried)
        bad = sum(trial.case.group == group for trial, _ in failures)
        if tried:
            print(f"{group:10} {len(tried):4} cases, {controls:3} of which run, "
                  f"{len(tried) - bad:4} as expected, {bad:4} not")
    print(f"all        {len(cases):4} cases in {seconds:.0f} s, {len(failures)} not as expected\n")
    for trial, problem in sorted(failures, key=lambda failure: list(GROUPS).index(failure[0].case.group)):
        case = trial.case
        wanted = " ".join(case.expected).strip()
        print(f"{case.group}: {case.name!r}: {problem} ({trial.seconds:.0f} s)\n    wanted {wanted!r}, "
              f"exit codes {trial.codes()}, last line {trial.last[:200]!r}")


def main(only="", jobs=2, seconds=60):
    os.makedirs(WORK)
    begun = time.monotonic()
    try:
        make_models()
        cases = [case for case in all_cases() if only in f"{case.group}: {case.name}"]
        waiting, running, failures = list(enumerate(cases)), [], []
        while waiting or running:
            while waiting and len(running) < int(jobs):
                number, case = waiting.pop(0)
                trial = Trial(case, WORK / f"case-{number}", int(seconds))
                trial.seconds = -time.monotonic()
                running.append(trial)
            time.sleep(0.005)
            for trial in [trial for trial in running if trial.ended()]:
                running.remove(trial)
                trial.seconds += time.monotonic()
                if problem := trial.problem():
                    failures.append((trial, problem))
                shutil.rmtree(trial.folder, ignore_errors=True)
        report(cases, failures, time.monotonic() - begun)
        return bool(failures)
    finally:
        shutil.rmtree(WORK, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(**dict(argument.removeprefix("--").split("=", 1) for argument in sys.argv[1:])))
