"""Overrides the settings of a script, left to right, and checks them: `train.py config/x.py --key=value ...`.

The settings are the simple values that a script assigns at module level between two rules (comment lines of
dashes), before it calls configure(globals()). If a line between them is `from config.shared import *`, the
settings of that file, which has the same form, become settings of the script. A config file is looked for in
the working directory, then where the script is, then where this file is.
The type of the default decides which values a setting accepts. Whatever cannot be taken exactly as it is
written stops the script, because a typo must not cost a training run. check_values applies the rules at the
end of this file, which say what is refused.
"""
import ast
import contextlib
import difflib
import importlib.util
import inspect
import json
import math
import os
import re
import signal
import sys
import time
import unicodedata
from pathlib import Path
from types import SimpleNamespace

# What config files and the command line set, once configure has run: {setting: the script's default}.
given = {}
KEY = re.compile(r"^(\w+) *=", re.MULTILINE)                    # a line that assigns a setting
# The types of settings, and what is said where a value is not of the type. In a config file it is a literal.
MUST_BE = {str: "a string", int: "a whole number", float: "a finite number", bool: "True or False"}
# What these settings may be in every script, as check_values checks; `choices` of configure are one script's.
CHOICES = {"engine": ("auto", "vllm", "hf"), "dtype": ("auto", "float32", "bfloat16", "float16"),
           "lr_decay": ("constant", "linear", "cosine"), "old_logprobs": ("trainer", "engine"),
           "reward_errors": ("stop", "unscored", "zero")}


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
    print(f"{message}\n", end="", file=sys.stderr)             # as one, because all ranks say it
    sys.exit(2)


def check(ok, message):
    """Stop the script with the message, which names the setting to change, unless ok is true."""
    if not ok:
        fail(message)


@contextlib.contextmanager
def input_errors():
    """Stop the script with the message of a ValueError or OSError, and without a traceback, because its user
    can correct it."""
    try:
        yield
    except (ValueError, OSError) as error:
        fail(str(error) or repr(error))


def read_block(path):
    """Return a script's lines of settings, and then those of the files that these import with *."""
    parts = re.split("^# -+\n", Path(path).read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert len(parts) > 2, f"{path}: the settings belong between two comment lines of dashes"
    own, *imports = re.split(r"^from (\S+) import \*.*\n", parts[1], flags=re.MULTILINE)
    imported = ""
    for module, below in zip(imports[::2], imports[1::2]):
        theirs = read_block(importlib.util.find_spec(module).origin)
        both = [key for key in KEY.findall(own) if key in KEY.findall(theirs)]
        check(not both, f"{path}: `from {module} import *` overwrites {', '.join(both)}, which is above it")
        own, imported = own + below, f"{imported}\n# from {module}, unless set above:\n{theirs}"
    return own + imported


def read_config(name, script):
    """Yield (place, key, source of the value). The file is parsed, never run: it can only set values."""
    places = [folder / name for folder in (Path(), Path(script).parent, Path(__file__).parent)]
    path = next(filter(os.path.isfile, places), None)
    check(path, f"cannot read {name} (no such file)")
    try:
        tree = ast.parse(path.read_bytes())
    except SyntaxError as error:
        fail(f"{path}:{error.lineno or 1}: {error.msg}")
    for node in tree.body[ast.get_docstring(tree) is not None:]:
        match node:
            case ast.Assign(targets=[ast.Name(id=key)], value=value):
                yield f"{path}:{node.lineno}: ", key, ast.unparse(value)
            case _:
                fail(f"{path}:{node.lineno}: a config file holds only lines of key = literal")


def read_value(source, kind):
    """Return the literal in `source` as a `kind`, or None if it is not one.
    1 is taken for 1.0, 1e5 for 100000."""
    with contextlib.suppress(ValueError, TypeError, SyntaxError, OverflowError):
        value = ast.literal_eval(source)
        fits = type(value) is kind or {type(value), kind} == {int, float}
        str(value).encode()                                     # files, logs and tokenizers take only UTF-8
        if fits and kind(value) == value and value not in (math.inf, -math.inf):
            return kind(value)


def configure(namespace, argv=None, choices={}):
    """Apply the command line to `namespace`, a script's globals(), and returns all settings in order.

    The settings are the attributes of what it returns. choices: {setting: what it may be}; its default may be
    something else.
    """
    argv = sys.argv[1:] if argv is None else argv
    block = read_block(namespace["__file__"])
    settings = {key: namespace[key] for key in KEY.findall(block)
                if type(namespace.get(key)) in MUST_BE and not key.startswith("__")}
    if "--help" in argv or "-h" in argv:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)           # a pager may close the pipe
        about = (namespace["__doc__"] or "").strip().split("\n\n")[0]
        print(about, "The settings and their defaults, which --key=value changes:", block, sep="\n\n")
        sys.exit()
    for arg in argv:
        key, equals, text = arg.removeprefix("--").partition("=")
        if arg.endswith(".py") and not arg.startswith("--"):
            found = read_config(arg, namespace["__file__"])
        elif arg.startswith("--") and equals:
            found = [("", key, text)]
        else:
            fail(f"cannot take {arg}; write --{key.lstrip('-')}={text or 'value'}, or config/name.py")
        for place, key, text in found:
            dashes = "" if place else "--"
            if key not in settings:
                nearest = difflib.get_close_matches(key.replace("-", "_").lower(), settings, 1, 0.4)
                hint = f"; did you mean {dashes}{nearest[0]}?" if nearest else ""
                fail(f"{place}unknown setting {dashes}{key}{hint} (--help lists all)")
            given[key] = namespace[key]
            kind = type(settings[key])
            # On the command line a string needs no quotes, and true no capital.
            bare = {str: repr, bool: str.capitalize}.get(kind, str)
            settings[key] = read_value(text if place else bare(text), kind)
            check(settings[key] is not None,
                  f"{place}{dashes}{key} must be {MUST_BE[kind]}, not `{text:.200}`")
            check(key not in choices or settings[key] in (*choices[key], namespace[key]),
                  f"{key}={settings[key]}: choose {', '.join(choices.get(key, ()))}")
    namespace.update(settings)
    return SimpleNamespace(**settings)


def printable(text):
    r"""Text with its control characters escaped, except tabs and line ends: \x1b[2J would clear the screen.

    Half surrogate pairs are escaped as well, and so are format characters, which may reverse the text.
    """
    return "".join(c if c in "\t\n" or unicodedata.category(c) not in ("Cc", "Cf", "Cs") else ascii(c)[1:-1]
                   for c in str(text))


# ------------------------------------------------------------------------------------------------------------
# checks that refuse settings before a model is loaded. They catch mistakes, and nothing else depends on them.
# A script of your own may drop settings; the rules that read one of these are then left out.

POSITIVE = """num_generations prompts_per_step max_completion_length token_budget updates_per_step num_epochs
    num_mini_batches max_steps eval_samples keep_checkpoints vllm_tensor_parallel_size vllm_gpu_memory_utilization samples
    top_p rollout_ranks sequence_parallel_size steps batch_size""".split()
# Settings of your own may be negative.
NOT_NEGATIVE = """learning_rate critic_learning_rate warmup_steps critic_warmup_steps grad_clip temperature
    top_k epsilon epsilon_high correction_low correction_high kl_coef entropy_coef value_clip lam
    max_prompt_length max_turns max_environments max_num_gen_batches overlong_buffer max_staleness
    train_prompts eval_prompts eval_interval save_interval lora_rank shard_ranks logprob_gap timeout
    call_timeout call_workers show""".split()
SHARES = "lam top_p vllm_gpu_memory_utilization harder quick".split()
# Defaults of the scripts that suit the tiny model, whose config says so in `suits`, and no larger one.
SUITS_TINY = {"learning_rate": 1e-4, "critic_learning_rate": 2e-3, "max_prompt_length": 64,
              "max_completion_length": 64}

# The parameters of a rule are the settings that it reads. Where it is false, the script stops with the first
# of them and the message. For a training script three numbers are added to the settings: the ranks that train
# (trainers) and that sample (samplers), and the engines.
RULES = (
    (lambda task, train_file, eval_file: task == "file" or not train_file and not eval_file,
     ": train_file={train_file} and eval_file={eval_file} are read only with --task=file"),
    # evaluate_model.py has no trainers, so it may take 0.
    (lambda temperature, trainers: temperature > 0, ": must be above 0"),
    (lambda top_p, trainers: top_p == 1, ": the trainer computes the probabilities of all tokens"),
    (lambda top_k, trainers: top_k == 0, ": the trainer computes the probabilities of all tokens"),
    (lambda token_budget, max_prompt_length, max_completion_length:
     max_prompt_length + max_completion_length <= token_budget,
     ": less than max_prompt_length + max_completion_length"),
    (lambda agent, environment, tools, system_prompt, max_turns:
     not agent or not (environment or tools or system_prompt or max_turns),
     ": environment, tools, system_prompt and max_turns are the agent's own"),
    (lambda agent, rollout_ranks: not agent, ": train_async.py plays no agents"),
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
    (lambda updates_per_step, prompts_per_step, num_generations:
     prompts_per_step * num_generations % updates_per_step == 0, " does not divide the completions per step"),
    (lambda num_mini_batches, prompts_per_step, num_generations:
     prompts_per_step * num_generations % num_mini_batches == 0, " does not divide the completions per step"),
    (lambda critic_warmup_steps, max_steps: critic_warmup_steps < max_steps, " leaves the policy no step"),
    # the loss
    (lambda engine_correction, old_logprobs: old_logprobs == "trainer" or engine_correction == "none",
     ": with old_logprobs=engine the ratio corrects already"),
    (lambda correction_low, correction_high: correction_low < correction_high,
     " is not below correction_high={correction_high}"),
    (lambda reference_model, kl_coef: not reference_model or kl_coef > 0, " needs a kl_coef above 0"),
    (lambda skip_zero_advantage, entropy_coef, kl_coef, kl_estimator:
     not skip_zero_advantage or entropy_coef == 0 and (kl_coef == 0 or kl_estimator.startswith("k1")),
     ", but entropy_coef or a KL in the loss moves the policy there too"),
    # the advantage
    (lambda num_generations, advantage: num_generations > 1 or advantage in ("reinforce++", "none"),
     ": advantage={advantage} compares a prompt's completions"),
    (lambda advantage, kl_estimator, kl_coef:
     advantage != "none" or kl_coef > 0 and kl_estimator == "k1_advantage",
     " teaches nothing without kl_estimator=k1_advantage and a kl_coef above 0"),
    # what a step of DAPO trains on
    (lambda max_num_gen_batches, advantage:
     max_num_gen_batches == 0 or advantage not in ("reinforce++", "grpo_process", "none"),
     " leaves out prompts that teach something with advantage={advantage}"),
    (lambda overlong_buffer, max_completion_length: overlong_buffer <= max_completion_length,
     ": more than max_completion_length={max_completion_length}"))


def check_values(settings):
    """Check each of a script's settings by itself, and by the rules those that have to fit each other."""
    values = vars(settings)
    for key, value in values.items():
        check(key not in POSITIVE or value > 0, f"{key}={value}: must be above 0")
        check(key not in POSITIVE or value < 2 ** 31, f"{key}={value}: too large")
        check(key not in NOT_NEGATIVE or value >= 0, f"{key}={value}: must not be negative")
        check(key not in SHARES or value <= 1, f"{key}={value}: must be from 0 to 1")
        check(value in CHOICES.get(key, [value]), f"{key}={value}: choose {', '.join(CHOICES.get(key, ()))}")
    for rule, message in RULES:
        names = [*inspect.signature(rule).parameters]
        if values.keys() >= {*names}:
            check(rule(*(values[name] for name in names)),
                  f"{names[0]}={values[names[0]]}{message.format(**values)}")


def check_suits(s, suits):
    """Refuse defaults that nobody set and that do not suit the model. suits: those that its config names."""
    left = [f"{key}={value}" for key, value in SUITS_TINY.items()
            if getattr(s, key, None) == value != suits.get(key) and key not in given]
    check(not left, f"{', '.join(left)}: defaults that suit the tiny model and not model={s.model}. Give "
                    "each a value; for a model of 0.6 B parameters start with config/tasks/gsm8k.py")
