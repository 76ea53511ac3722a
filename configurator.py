"""Overrides the settings of a script, left to right, and checks them: `train.py config/x.py --key=value ...`.

The settings are the simple values that a script assigns at module level between two rules (comment lines of
dashes), before it calls configure(globals()). If a line between them is `from config.shared import *`, the
settings of that file, which has the same form, become settings of the script. A config file is looked for in
the working directory, then where the script is, then where this file is.
The type of the default decides which values a setting accepts. Whatever cannot be taken exactly as it is
written stops the script, because a typo must not cost a training run. The rules at the end of this file say
what else is refused. Those about advantages and losses stand in losses.py.
"""
import ast
import atexit
import contextlib
import difflib
import functools
import importlib.util
import inspect
import io
import json
import math
import os
import re
import sys
import time
import traceback
import unicodedata
from pathlib import Path
from types import SimpleNamespace

# The folder in which the run was started. Code of the user's may change the current folder.
STARTED_IN = os.getcwd()
# closing.callback(function) has a function called as the process ends, unless it is killed.
closing = contextlib.ExitStack()
atexit.register(closing.close)
# The settings that config files or the command line have set: {setting: the script's default}.
overridden = {}
# The rules of the script's own, which configure was given.
script_rules = []
KEY = re.compile(r"^(\w+) *=", re.MULTILINE)                    # a line that assigns a setting
# The types of settings, and how a message describes the values that a setting of the type accepts
MUST_BE = {str: "a string", int: "a whole number", float: "a finite number", bool: "True or False"}
# The values of settings that check_values accepts in every script; `choices` of configure are one script's.
CHOICES = {"engine": ("auto", "vllm", "hf"), "dtype": ("auto", "float32", "bfloat16", "float16"),
           "lr_decay": ("constant", "linear", "cosine"), "optimizer": ("adamw", "sgd"),
           "old_logprobs": ("trainer", "engine"), "reward_errors": ("stop", "unscored", "zero"),
           "images": ("", "frozen", "trained")}


def tell_launcher(message, later=0):
    """Tell torchrun, if there is one, why this process ends. Its summary ends with the earliest message.

    later: seconds to add to the time of this message, if another process may have caused it.
    """
    with contextlib.suppress(KeyError, OSError), open(os.environ["TORCHELASTIC_ERROR_FILE"], "x") as file:
        about = {"timestamp": str(int(time.time()) + later)}
        json.dump({"message": {"message": message, "extraInfo": about}}, file)


def fail(message):
    """End the process with a message on one line that its user can act on, and with exit code 2."""
    message = f"{os.path.basename(sys.argv[0])}: " + printable(message).replace("\n", r"\n")
    tell_launcher(message)
    sys.stderr.write(f"{message}\n")                           # in one write, because all ranks do this
    sys.exit(2)


def check(ok, message):
    """Stop the script with the message, which names the setting to change, unless ok is true."""
    if not ok:
        fail(message)


class InputError(ValueError):
    """Says what is wrong with a setting, a file, a model or a function that the user has named."""


@contextlib.contextmanager
def input_errors(*others):
    """Stop the script with the message of an InputError. Its traceback is not shown, because its user cannot
    correct our code; that of the user's own code, if this has raised, stands above the message.

    Any other error is a mistake in the code, and keeps its traceback. others: further errors that count as
    an InputError, such as OSError where a folder of the user's is written.
    """
    try:
        yield
    except (InputError, *others) as error:
        raised = error
        while raised:
            sys.stderr.writelines(map(printable, getattr(raised, "__notes__", [])))
            raised = raised.__cause__
        fail(str(error) or repr(error))


@contextlib.contextmanager
def reading(what):
    """Turn an error that a library raises over a damaged file into an InputError: `what` cannot be read."""
    try:
        yield
    except Exception as error:
        if isinstance(error, InputError) or not is_of_library(error):
            raise
        raise InputError(f"{what} cannot be read: {type(error).__name__}: "
                         + str(error).strip().partition("\n")[0][:300]) from error


def is_of_library(error):
    """Return whether a library or the system has raised an error, and not a line of ours or of the user's."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    file = frames[-1].f_code.co_filename
    # A template for chats is compiled as <template>.
    in_library = re.match(f"<|{re.escape(os.path.dirname(os.__file__))}|.*(site|dist)-packages", file)
    # Compiled code, such as safetensors, has no frame.
    return in_library or isinstance(error, (OSError, UnicodeError)) or type(error).__module__ != "builtins"


def printable(text):
    r"""Text with its control characters escaped, except tabs and line ends: \x1b[2J would clear the screen.

    Half surrogate pairs are escaped as well, and so are format characters, which may reverse the text.
    """
    characters = []
    for character in str(text):
        if character not in "\t\n" and unicodedata.category(character) in ("Cc", "Cf", "Cs"):
            character = ascii(character)[1:-1]
        characters.append(character)
    return "".join(characters)


def make_lenient():
    """Let print go on if stdout or stderr is closed or full, and escape what its encoding does not have.

    What such a console would have shown goes to the null device.
    """
    def lenient(descriptor, method, *text):
        try:
            return method(*text)
        except (OSError, ValueError):
            os.dup2(null.fileno(), descriptor)

    null = open(os.devnull, "w")
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name) or null                     # None if it was closed when the process began
        setattr(sys, name, stream)
        if type(stream) is io.TextIOWrapper:                    # a notebook has streams of its own
            stream.reconfigure(errors="backslashreplace", line_buffering=True)
            stream.write = functools.partial(lenient, descriptor, stream.write)
            stream.flush = functools.partial(lenient, descriptor, stream.flush)


# ------------------------------------------------------------------------------------------------------------
# overriding settings


def read_block(path):
    """Return a script's lines of settings, and then those of the files that these import with *."""
    parts = re.split("^# -+\n", Path(path).read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert len(parts) > 2, f"{path}: the settings belong between two comment lines of dashes"
    # Splits into lines, and for each import its module and the lines below it.
    block, *imports = re.split(r"^from (\S+) import \*.*\n", parts[1], flags=re.MULTILINE)
    imported = ""
    for module, lines_below in zip(imports[::2], imports[1::2]):
        module_block = read_block(importlib.util.find_spec(module).origin)
        twice = [key for key in KEY.findall(block) if key in KEY.findall(module_block)]
        check(not twice, f"{path}: `from {module} import *` overwrites {', '.join(twice)}, which is above it")
        block += lines_below
        imported += f"\n# from {module}, unless set above:\n{module_block}"
    return block + imported


def read_config_file(name, script):
    """Yield (place, key, literal) for each line. The file is parsed, never run: it can only set values."""
    folders = Path(), Path(script).parent, Path(__file__).parent
    paths = [folder / name for folder in folders if os.path.isfile(folder / name)]
    check(paths, f"cannot read {name} (no such file)")
    path = paths[0]
    try:
        tree = ast.parse(path.read_bytes())
    except SyntaxError as error:
        fail(f"{path}:{error.lineno or 1}: {error.msg}")
    lines = tree.body
    if ast.get_docstring(tree) is not None:
        lines = lines[1:]
    for node in lines:
        match node:
            case ast.Assign(targets=[ast.Name(id=key)], value=value):
                yield f"{path}:{node.lineno}: ", key, ast.unparse(value)
            case _:
                fail(f"{path}:{node.lineno}: a config file holds only lines of key = literal")


def assignments(argv, script):
    """Yield (place, key, text of the value) for all that these arguments set; the place of a flag is ""."""
    for argument in argv:
        key, equals, text = argument.removeprefix("--").partition("=")
        flag = argument.startswith("--")
        if flag and equals:
            yield "", key, text
        elif argument.endswith(".py") and not flag:
            yield from read_config_file(argument, script)
        else:
            fail(f"cannot take {argument}; write --{key.lstrip('-')}={text or 'value'}, or config/name.py")


def read_value(literal, kind):
    """Return the value of a literal as a `kind`, or None if it is not one.
    1 is taken for 1.0, 1e5 for 100000."""
    with contextlib.suppress(ValueError, TypeError, SyntaxError, OverflowError):
        value = ast.literal_eval(literal)
        str(value).encode()                                     # files, logs and tokenizers take only UTF-8
        fits = type(value) is kind or type(value) in (int, float) and kind in (int, float)
        if fits and kind(value) == value and value not in (math.inf, -math.inf):
            return kind(value)


def configure(namespace, argv=None, choices={}, rules=()):
    """Apply the command line to `namespace`, a script's globals(), and return all settings in order.

    The settings are the attributes of what it returns. choices: {setting: the values that it may have}; its
    default may be another value. rules: which of its settings have to fit each other, in the form of RULES.
    """
    if argv is None:
        argv = sys.argv[1:]
    block = read_block(namespace["__file__"])
    settings = {}
    for key in KEY.findall(block):
        if type(namespace.get(key)) in MUST_BE and not key.startswith("__"):
            settings[key] = namespace[key]
    if "--help" in argv or "-h" in argv:
        about = (namespace["__doc__"] or "").strip().split("\n\n")[0]
        print(about, "The settings and their defaults, which --key=value changes:", block, sep="\n\n")
        sys.exit()
    for place, key, text in assignments(argv, namespace["__file__"]):
        dashes = "" if place else "--"
        if key not in settings:
            nearest = difflib.get_close_matches(key.replace("-", "_").lower(), settings, 1, 0.4)
            hint = f"; did you mean {dashes}{nearest[0]}?" if nearest else ""
            fail(f"{place}unknown setting {dashes}{key}{hint} (--help lists all)")
        default = namespace[key]
        kind = type(default)
        literal = text
        if not place and kind is str:                           # a string needs no quotes
            literal = repr(text)
        elif not place and kind is bool:                        # true needs no capital
            literal = text.capitalize()
        value = read_value(literal, kind)
        check(value is not None, f"{place}{dashes}{key} must be {MUST_BE[kind]}, not `{text:.200}`")
        check(key not in choices or value in (*choices[key], default),
              f"{key}={value}: choose {', '.join(choices.get(key, ()))}")
        settings[key] = value
        overridden[key] = default
    namespace.update(settings)
    script_rules[:] = rules
    return SimpleNamespace(**settings)


def specs(text):
    """Return the specs in a setting such as "file.py:name,other.py:name"."""
    return [part.strip() for part in text.split(",") if part.strip()]


# ------------------------------------------------------------------------------------------------------------
# checks that refuse settings before a model is loaded. They catch mistakes, and nothing else depends on them.
# A script of your own may drop settings; the rules that read one of these are then left out.

POSITIVE = """num_generations prompts_per_step max_completion_length token_budget num_mini_batches num_epochs
    max_steps eval_samples keep_checkpoints vllm_tensor_parallel_size vllm_gpu_memory_utilization samples
    top_p eval_top_p rollout_ranks sequence_parallel_size steps batch_size correction_cap""".split()
# Settings of your own may be negative.
NOT_NEGATIVE = """learning_rate critic_learning_rate warmup_steps critic_warmup_steps grad_clip temperature
    weight_decay adam_beta1 adam_beta2 eval_temperature eval_top_k eval_min_p
    top_k min_p epsilon epsilon_high correction_low correction_high kl_coef entropy_coef value_clip lam
    max_prompt_length max_turns max_environments max_num_gen_batches overlong_buffer max_staleness
    train_prompts eval_prompts eval_interval save_interval lora_rank shard_ranks logprob_gap timeout
    call_timeout call_workers show""".split()
# from 0 to 1
SHARES = "lam top_p min_p eval_top_p eval_min_p vllm_gpu_memory_utilization harder quick".split()
# With -1 these are the same as in training.
LIKE_TRAINING = "eval_temperature eval_top_p eval_top_k eval_min_p".split()
# Defaults of the scripts that are right for the tiny model, whose config lists them as `suits`
TINY_DEFAULTS = {"learning_rate": 1e-4, "critic_learning_rate": 2e-3, "max_prompt_length": 64,
                 "max_completion_length": 64}

# The parameters of a rule are the settings that it reads. Where it is false, the script stops with the first
# of them and the message. For a training script runtime/run.py adds three numbers to the settings: the ranks
# that train (trainers) and that sample (samplers), and the engines.
RULES = (
    (lambda task, train_file, eval_file: task == "file" or not train_file and not eval_file,
     ": train_file={train_file} and eval_file={eval_file} are read only with --task=file"),
    # evaluate_model.py has no trainers, so it may take 0.
    (lambda temperature, trainers: temperature > 0, ": must be above 0"),
    (lambda min_p: min_p < 1, ": must be below 1"),
    # Scripts without mini-batches train on nothing that was sampled.
    (lambda top_k, top_p, min_p, num_mini_batches: top_k > 0 or top_p == 1 and min_p == 0,
     ": with top_p={top_p} and min_p={min_p} training needs one, such as 20, because it keeps all tokens "
     "that a token was drawn from"),
    (lambda token_budget, max_prompt_length, max_completion_length:
     max_prompt_length + max_completion_length <= token_budget,
     ": less than max_prompt_length + max_completion_length"),
    (lambda agent, environment, tools, system_prompt, max_turns:
     not agent or not (environment or tools or system_prompt or max_turns),
     ": environment, tools, system_prompt and max_turns are the agent's own"),
    (lambda lora_rank, lora_from, offload_base: lora_rank > 0 or not (lora_from or offload_base),
     ": lora_from={lora_from} and offload_base={offload_base} need adapters, lora_from those of its rank"),
    # ranks
    (lambda vllm_tensor_parallel_size, samplers: samplers % vllm_tensor_parallel_size == 0,
     " does not divide the {samplers} ranks that sample"),
    (lambda vllm_tensor_parallel_size, engine: vllm_tensor_parallel_size == 1 or engine == "vllm"
     or engine == "auto" and importlib.util.find_spec("vllm") is not None, " needs engine=vllm"),
    (lambda sequence_parallel_size, trainers: trainers % sequence_parallel_size == 0,
     " does not divide the {trainers} ranks that train"),
    (lambda shard_ranks, trainers: trainers % (shard_ranks or 1) == 0,
     " does not divide the {trainers} ranks that train"),
    (lambda prompts_per_step, engines: prompts_per_step % engines == 0, " is no multiple of {engines}"),
    # updates
    (lambda num_mini_batches, prompts_per_step, num_generations:
     prompts_per_step * num_generations % num_mini_batches == 0, " does not divide the completions per step"),
    (lambda learning_rate, optimizer: optimizer != "sgd" or "learning_rate" in overridden,
     ": a default for AdamW, at which optimizer=sgd learns nothing. Give it its own, as 3 for model=tiny"),
    (lambda adam_beta1, adam_beta2: max(adam_beta1, adam_beta2) < 1,
     " and adam_beta2={adam_beta2}: both must be below 1"))


def check_values(settings):
    """Check each of a script's settings by itself, and by the rules those that have to fit each other."""
    values = vars(settings)
    for key, value in values.items():
        if key in LIKE_TRAINING and value == -1:
            continue
        check(key not in POSITIVE or 0 < value < 2 ** 31,
              f"{key}={value}: must be above 0, and below 2 ** 31")
        check(key not in NOT_NEGATIVE or value >= 0, f"{key}={value}: must not be negative")
        check(key not in SHARES or value <= 1, f"{key}={value}: must be from 0 to 1")
        own_engine = key == "engine" and ":" in value           # file.py:Engine
        check(own_engine or value in CHOICES.get(key, [value]),
              f"{key}={value}: choose {', '.join(CHOICES.get(key, ()))}")
    for rule, message in (*RULES, *script_rules):
        names = [*inspect.signature(rule).parameters]
        if values.keys() >= {*names}:
            check(rule(*(values[name] for name in names)),
                  f"{names[0]}={values[names[0]]}{message.format(**values)}")


def check_tiny_defaults(s, suits):
    """Refuse the defaults for the tiny model with another model, unless the user set them.

    suits: {setting: value} that the model's config says are right for it.
    """
    unsuited = []
    for key, default in TINY_DEFAULTS.items():
        if getattr(s, key, None) == default != suits.get(key) and key not in overridden:
            unsuited.append(f"{key}={default}")
    check(not unsuited, f"{', '.join(unsuited)}: defaults that suit the tiny model and not model={s.model}. "
                        "Give each a value; for a model of 0.6 B parameters start with "
                        "config/tasks/gsm8k.py")
