"""What a command line and a config file may say is taken, and the rest is refused with these words."""
import inspect
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import configurator
import losses
from configurator import RULES, check_values, configure
from runs import DAPO, script_path
from runtime.run import check_run

SCRIPT = '''"""
Trains a policy,
and more.

The second paragraph is not for --help.
"""
import math  # ----
from configurator import configure
before = 1
# ----------------------------------------------------------------
# model and task
model = "base"               # folder or hub id
separator = "#### # "        # a hash in a string is no comment
# optimisation,
# a heading of two lines
learning_rate = 2e-4         # peak, after warm-up
max_steps = 10 * 10          # an expression will do for a default
epsilon_high = 0.2           # upper clip bound;
                             # DAPO: 0.28
kl_coef = 0.0
chat = True
__version__ = "1"
betas = [0.9, 0.95]          # not a simple value
def helper(): pass
# ----------------------------------------------------------------
if __name__ == "__main__":
    final = configure(globals())
    print(final, learning_rate)
after = 1
# ----------------------------------------------------------------
later = 1
# ----------------------------------------------------------------
'''
DEFAULTS = {"model": "base", "separator": "#### # ", "learning_rate": 2e-4, "max_steps": 100,
            "epsilon_high": 0.2, "kl_coef": 0.0, "chat": True}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Calls configure as the script would, from the folder that holds it and its config files; a dict."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config").mkdir()
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.setattr(sys, "argv", ["train.py"])

    def run(*argv, **configs):
        for name, source in configs.items():
            (tmp_path / "config" / f"{name}.py").write_text(source)
        namespace = {"__file__": "train.py", "__name__": "script"}
        exec(SCRIPT, namespace)
        before = dict(namespace)
        try:
            settings = vars(configure(namespace, list(argv)))
        except SystemExit:
            assert namespace == before, "a refused command line must change nothing"
            raise
        assert settings.keys() == DEFAULTS.keys() and namespace == before | settings, "only settings change"
        return settings
    return run


@pytest.fixture
def refusal(run, capsys):
    """Returns the one line on stderr that a refused command line leaves."""
    def refusal(*argv, **configs):
        with pytest.raises(SystemExit) as stop:
            run(*argv, **configs)
        captured = capsys.readouterr()
        assert stop.value.code == 2 and captured.out == "" and captured.err.count("\n") == 1
        assert captured.err.startswith("train.py: ")
        return captured.err.removeprefix("train.py: ").strip()
    return refusal


def test_defaults_in_order_of_definition(run):
    assert list(run().items()) == list(DEFAULTS.items())


@pytest.mark.parametrize("text, value", [
    ("model=", ""), ("model=123", "123"), ("model=a=b=c", "a=b=c"), ("model='x'", "'x'"),
    ("model=x.py", "x.py"), ("model=True", "True"), (r"model=a\n", r"a\n"), ("model= a ", " a "),
    ("max_steps=5", 5), ("max_steps=-5", -5), ("max_steps=1e5", 100_000), ("max_steps=1_000", 1000),
    ("max_steps=12345678901234567891", 12345678901234567891),
    ("kl_coef=0", 0.0), ("kl_coef=1", 1.0), ("kl_coef=-1e-3", -1e-3), ("kl_coef=.5", 0.5),
    ("chat=true", True), ("chat=False", False), ("chat=FALSE", False), ("chat=tRuE", True),
])
def test_flag(run, text, value):
    result = run("--" + text)[text.split("=")[0]]
    assert result == value and type(result) is type(value)


@pytest.mark.parametrize("text, words", [
    *[(f"max_steps={bad}", "a whole number") for bad in ("1.5", "", "ten", "true", "nan", "1e999", "1+1")],
    *[(f"kl_coef={bad}", "a finite number") for bad in ("", "x", "True", "nan", "inf", "-inf", "1e999")],
    *[(f"chat={bad}", "True or False") for bad in ("", "1", "0", "yes", "no", "None", "'True'", "(true)")],
])
def test_flag_of_the_wrong_type(refusal, text, words):
    key, value = text.split("=")
    assert refusal("--" + text) == f"--{key} must be {words}, not `{value}`"


@pytest.mark.parametrize("source, value", [
    ("model = 'x'", "x"), ("model = 'a' 'b'", "ab"), ("model = ''", ""), ("max_steps = 1_000", 1000),
    ("max_steps = 1e5", 100_000), ("max_steps = -1", -1), ("kl_coef = 1", 1.0), ("kl_coef = -0.5", -0.5),
    ("chat = False", False), ("model = ('x'\n 'y')", "xy"),
    ('"""Why."""\n# a comment\nmodel = "x"  # another\n', "x"),
])
def test_config(run, source, value):
    settings = run("config/x.py", x=source)
    (result,) = (settings[key] for key in settings if settings[key] != DEFAULTS[key])
    assert result == value and type(result) is type(value)


@pytest.mark.parametrize("source", ["", "# nothing\n", '"""Only a docstring."""'])
def test_config_that_sets_nothing(run, source):
    assert run("config/x.py", x=source) == DEFAULTS


@pytest.mark.parametrize("line, message", [
    ("model = 5", "model must be a string, not `5`"),
    ("model = None", "model must be a string, not `None`"),
    ("model = f'{1}'", "model must be a string"),
    ("max_steps = 64 * 1024", "max_steps must be a whole number, not `64 * 1024`"),
    ("max_steps = other", "max_steps must be a whole number, not `other`"),
    ("max_steps = int('5')", "max_steps must be a whole number"),
    ("max_steps = 1.5", "max_steps must be a whole number, not `1.5`"),
    ("max_steps = '5'", "max_steps must be a whole number, not `'5'`"),
    ("max_steps = True", "max_steps must be a whole number, not `True`"),
    ("kl_coef = False", "kl_coef must be a finite number, not `False`"),
    ("kl_coef = 1e999", "kl_coef must be a finite number"),
    ("kl_coef = {[]: 1}", "kl_coef must be a finite number"),
    ("chat = 1", "chat must be True or False, not `1`"),
    ("chat = true", "chat must be True or False, not `true`"),
    ("chat = 'True'", "chat must be True or False, not `'True'`"),
    ("learnig_rate = 1", "unknown setting learnig_rate; did you mean learning_rate? (--help lists all)"),
    *[(line, "a config file holds only lines of key = literal") for line in (
        "import os", "print(1)", "max_steps += 1", "max_steps: int = 5", "model = separator = 'x'",
        "a, b = 1, 2", "math.pi = 3", "if True: max_steps = 1", "del model", "'a string further down'")],
])
def test_config_line_refused(refusal, line, message):
    assert refusal("config/x.py", x=f"learning_rate = 1\n\n{line}\n").startswith(f"config/x.py:3: {message}")


def test_config_is_never_run(refusal, tmp_path):
    refusal("config/x.py", x="open('trace', 'w')")
    assert not (tmp_path / "trace").exists()


def test_config_with_a_syntax_error(refusal):
    assert refusal("config/x.py", x="max_steps = 1\nkl_coef 0.1\n") == "config/x.py:2: invalid syntax"


def test_config_that_is_missing(refusal):
    assert refusal("config/countdwn.py") == "cannot read config/countdwn.py (no such file)"


@pytest.mark.parametrize("flag, suggestion", [
    ("--learnig_rate", "; did you mean --learning_rate?"),
    ("--learning-rate", "; did you mean --learning_rate?"),
    ("--LEARNING_RATE", "; did you mean --learning_rate?"),
    ("--steps", "; did you mean --max_steps?"),
    ("---chat", "; did you mean --chat?"), ("--zzz", ""), ("--", ""),
])
def test_unknown_flag(refusal, flag, suggestion):
    assert refusal(flag + "=1") == f"unknown setting {flag}{suggestion} (--help lists all)"


@pytest.mark.parametrize("name", ["before", "after", "later", "betas", "helper", "math", "configure",
                                  "__version__", "__name__", "__file__", "settings", "namespace"])
def test_what_is_no_setting(refusal, name):
    assert refusal(f"--{name}=1").startswith(f"unknown setting --{name}")
    assert refusal("config/x.py", x=f"{name} = 1").startswith(f"config/x.py:1: unknown setting {name}")


@pytest.mark.parametrize("arg, meant", [
    ("--chat", "--chat=value"), ("--max_steps", "--max_steps=value"), ("max_steps=5", "--max_steps=5"),
    ("-max_steps=5", "--max_steps=5"), ("model=a=b", "--model=a=b"), ("countdown", "--countdown=value"),
])
def test_malformed_argument(refusal, arg, meant):
    assert refusal(arg) == f"cannot take {arg}; write {meant}, or config/name.py"


def test_value_after_a_space(refusal):
    assert "write --max_steps=value" in refusal("--max_steps", "5")


def test_a_config_file_is_looked_for_here_then_beside_the_script_then_in_the_project(
        tmp_path, monkeypatch, capsys):
    project, mine, here = (tmp_path / name for name in ("project", "mine", "here"))
    for folder in (project, mine, here):
        (folder / "config").mkdir(parents=True)
    (mine / "train.py").write_text(SCRIPT)
    (project / "config" / "x.py").write_text("max_steps = 4\nkl_coef = 1\n")
    monkeypatch.setattr(configurator, "__file__", str(project / "configurator.py"))
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "argv", [str(mine / "train.py")])
    call = lambda file: configure(DEFAULTS | {"__file__": str(mine / "train.py")}, [file])
    found = call("config/x.py")
    assert (found.max_steps, found.kl_coef, found.chat) == (4, 1.0, True)
    # Of several the first one counts, and nothing of the others.
    (mine / "config" / "x.py").write_text("max_steps = 5\nchat = False\n")
    found = call("config/x.py")
    assert (found.max_steps, found.kl_coef, found.chat) == (5, 0.0, False)
    (here / "config" / "x.py").write_text("max_steps = 6\n")
    found = call("config/x.py")
    assert (found.max_steps, found.kl_coef, found.chat) == (6, 0.0, True)
    assert call(str(project / "config" / "x.py")).max_steps == 4
    # A message has the place of the file that was read.
    (mine / "config" / "y.py").write_text("max_stops = 5\n")
    for file, message in (("config/y.py", f"{mine}/config/y.py:1: unknown setting max_stops"),
                          ("config/z.py", "cannot read config/z.py (no such file)")):
        with pytest.raises(SystemExit):
            call(file)
        assert capsys.readouterr().err.startswith(f"train.py: {message}")


def test_the_later_wins_across_files_and_command_line(run):
    configs = {"x": "max_steps = 1\nkl_coef = 0.1", "y": "max_steps = 2"}
    assert run("config/x.py", "--max_steps=3", **configs)["max_steps"] == 3
    assert run("--max_steps=3", "config/x.py", **configs)["max_steps"] == 1
    assert run("config/x.py", "config/y.py", **configs) == DEFAULTS | {"max_steps": 2, "kl_coef": 0.1}
    assert run("--max_steps=3", "--max_steps=4")["max_steps"] == 4


@pytest.mark.parametrize("argv", [["--help"], ["-h"], ["--nonsense", "config/none.py", "--help"]])
def test_help(run, capsys, argv):
    with pytest.raises(SystemExit) as stop:
        run(*argv)
    assert not stop.value.code
    block = re.split("^# -+\n", SCRIPT, flags=re.M)[1]
    assert capsys.readouterr().out == f'''\
Trains a policy,
and more.

The settings and their defaults, which --key=value changes:

{block}
'''


def test_as_a_script(tmp_path):
    """In a process of its own the script reads sys.argv, sees its changed globals, returns exit codes."""
    (tmp_path / "train.py").write_text(SCRIPT)

    def shell(*argv):
        return subprocess.run([sys.executable, "train.py", *argv], cwd=tmp_path, capture_output=True,
                              text=True, env={"PYTHONPATH": str(Path(__file__).resolve().parents[1])})
    settings = SimpleNamespace(**DEFAULTS | {"learning_rate": 1.0})
    assert shell("--learning_rate=1").stdout == f"{settings} 1.0\n"
    refused = shell("--learnig_rate=1")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == \
        "train.py: unknown setting --learnig_rate; did you mean --learning_rate? (--help lists all)\n"
    assert shell("--help").returncode == 0


def test_script_without_rules(tmp_path):
    (tmp_path / "train.py").write_text("max_steps = 1\n")
    with pytest.raises(AssertionError, match="between two comment lines of dashes"):
        configure({"__file__": str(tmp_path / "train.py"), "max_steps": 1}, [])


# ---------------------------------------------------------------- settings of another file

COMMON = '''"""What several scripts share."""
import math
elsewhere = 1
# ----------------------------------------------------------------
device = "cpu"               # above any heading
# optimizer,
# in two lines
max_steps = 100              # the script has its own default
weight_decay = 0.0           # AdamW's
# output, of which nothing is left
model = "shared"             # the script has its own
# logging
log_interval = 5             # steps;
                             # 0: never
# ----------------------------------------------------------------
after = 1
'''
IMPORTING = '''"""Trains."""
from math import *
# ----------------------------------------------------------------
epochs = 1                   # above any heading
# the rest
from common import *         # what several scripts share
# model
model = "base"               # folder or hub id
# loop
max_steps = 7                # of this script
# ----------------------------------------------------------------
'''


@pytest.fixture
def import_run(tmp_path, monkeypatch):
    """Calls configure as a script would that imports the settings of common.py."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py"])

    def import_run(*argv, script=IMPORTING, common=COMMON):
        monkeypatch.delitem(sys.modules, "common", raising=False)
        (tmp_path / "train.py").write_text(script)
        (tmp_path / "common.py").write_text(common)
        namespace = {"__file__": str(tmp_path / "train.py"), "__name__": "script"}
        exec(script, namespace)
        before = dict(namespace)
        settings = vars(configure(namespace, argv))
        assert namespace == before | settings
        return settings
    return import_run


def test_imported_settings_are_the_scripts_own(import_run, tmp_path):
    defaults = {"epochs": 1, "model": "base", "max_steps": 7, "device": "cpu", "weight_decay": 0.0,
                "log_interval": 5}
    assert list(import_run().items()) == list(defaults.items())
    (tmp_path / "recipe.py").write_text("weight_decay = 1\nmodel = 'x'\n")
    assert import_run(f"{tmp_path}/recipe.py", "--log_interval=0", "--max_steps=1") == {
        "epochs": 1, "model": "x", "max_steps": 1, "device": "cpu", "weight_decay": 1.0, "log_interval": 0}


@pytest.mark.parametrize("flag, message", [
    ("--weight_decoy=1", "unknown setting --weight_decoy; did you mean --weight_decay? (--help lists all)"),
    ("--max_step=1", "unknown setting --max_step; did you mean --max_steps? (--help lists all)"),
    ("--elsewhere=1", "unknown setting --elsewhere"), ("--after=1", "unknown setting --after"),
    ("--pi=3", "unknown setting --pi"), ("--common=1", "unknown setting --common"),
    ("--log_interval=often", "--log_interval must be a whole number, not `often`")])
def test_imported_settings_are_refused_like_the_scripts_own(import_run, capsys, flag, message):
    with pytest.raises(SystemExit):
        import_run(flag)
    assert capsys.readouterr().err.startswith(f"train.py: {message}")


def test_help_shows_imported_settings_last(import_run, capsys):
    with pytest.raises(SystemExit):
        import_run("--help")
    _, _, shown = capsys.readouterr().out.partition("changes:\n\n")
    assert shown == '''\
epochs = 1                   # above any heading
# the rest
# model
model = "base"               # folder or hub id
# loop
max_steps = 7                # of this script

# from common, unless set above:
device = "cpu"               # above any heading
# optimizer,
# in two lines
max_steps = 100              # the script has its own default
weight_decay = 0.0           # AdamW's
# output, of which nothing is left
model = "shared"             # the script has its own
# logging
log_interval = 5             # steps;
                             # 0: never

'''


def test_an_import_must_not_overwrite_what_stands_above_it(import_run, capsys):
    with pytest.raises(SystemExit):
        import_run(script=IMPORTING.replace("from common", "max_steps = 1\nfrom common"))
    assert "train.py: `from common import *` overwrites max_steps" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["train_prompts", "eval_prompts", "learning_rate", "weight_decay", "adam_beta1", "adam_beta2"])
def test_numbers_that_must_not_be_negative(capsys, key):
    check_values(SimpleNamespace(**{key: 0}, mine=-1))
    with pytest.raises(SystemExit):
        check_values(SimpleNamespace(**{key: -1}))
    assert capsys.readouterr().err.endswith(f": {key}=-1: must not be negative\n")


def test_settings_of_evaluations_may_be_those_of_the_training():
    """-1 says so. They take no other value that they would not take without eval_."""
    check_values(SimpleNamespace(**dict.fromkeys(configurator.LIKE_TRAINING, -1)))
    for name, value in ("temperature", -0.5), ("top_p", 0.0), ("top_p", 1.5), ("top_k", -2), ("min_p", 1.5):
        with pytest.raises(SystemExit):
            check_values(SimpleNamespace(**{f"eval_{name}": value}))


@pytest.mark.parametrize("key", ["adam_beta1", "adam_beta2"])
def test_a_mean_that_would_never_move_is_refused(capsys, key):
    betas = {"adam_beta1": 0.0, "adam_beta2": 0.999}
    check_values(SimpleNamespace(**betas))
    with pytest.raises(SystemExit):
        check_values(SimpleNamespace(**betas | {key: 1.0}))
    message = capsys.readouterr().err
    assert f"{key}=1.0" in message and message.endswith(": both must be below 1\n")


RECIPES = sorted(Path(__file__).parents[1].glob("config/*/*.py"))


def defaults_of(script):
    """What a script's globals are when it calls configure, as far as the settings go."""
    namespace = {"__file__": str(script), "__doc__": ""}
    exec(re.split("^# -+\n", script.read_text(), flags=re.M)[1], namespace)
    return namespace


@pytest.mark.parametrize("recipe", RECIPES, ids=[path.stem for path in RECIPES])
def test_every_recipe_fits_the_script_that_it_names(recipe):
    root = recipe.parents[2]
    scripts = [path.name for path in root.glob("train_*.py")] + [DAPO]
    names = [name for name in scripts if name in recipe.read_text()] or ["train_grpo.py"]
    names = ["tiny/pretrain.py"] if recipe.read_text().startswith('"""For tiny/pretrain.py') else names
    for name in names:
        script = defaults_of(root / script_path(name))
        defaults = dict(script)
        settings = configure(script, [str(recipe)], rules=losses.RULES)
        assert any(value != defaults[key] for key, value in vars(settings).items())
        if name in scripts:
            check_run(settings, trainers=1)


def test_each_rule_reads_settings_that_a_script_has():
    """A misspelt setting would leave its rule out for ever."""
    scripts = [{"trainers", "samplers", "engines", *defaults_of(path)}
               for path in Path(__file__).parents[1].glob("*_*.py") if "configure(globals()" in path.read_text()]
    for rule, message in (*RULES, *losses.RULES):
        reads = {*inspect.signature(rule).parameters}
        assert any(reads <= settings for settings in scripts), (reads, message)
        assert any({*re.findall(r"{(\w+)}", message)} <= settings for settings in scripts), message


@pytest.mark.parametrize("key", configurator.CHOICES)
def test_a_default_that_is_no_choice_is_refused(key, capsys):
    """As in a script that somebody has edited."""
    with pytest.raises(SystemExit):
        check_values(SimpleNamespace(**{key: "cosin"}))
    assert f"{key}=cosin: choose {', '.join(configurator.CHOICES[key])}" in capsys.readouterr().err


def test_a_name_that_is_no_parameter_of_its_rule_fails(monkeypatch):
    monkeypatch.setattr(configurator, "RULES", [(lambda seed: seed < sead, "")])   # noqa: F821
    with pytest.raises(NameError, match="sead"):
        check_values(SimpleNamespace(seed=1))


def test_bounds_of_a_correction_that_leave_nothing_are_refused(capsys):
    settings = configure(defaults_of(Path(__file__).parents[1] / "train_grpo.py"), ["--correction_low=3"],
                         rules=losses.RULES)
    with pytest.raises(SystemExit):
        check_run(settings, trainers=1)
    assert "correction_low=3.0 is not below correction_high=2.0" in capsys.readouterr().err
    settings = configure(defaults_of(Path(__file__).parents[1] / "train_grpo.py"),
                         ["--engine_correction=token_truncate", "--correction_high=5"], rules=losses.RULES)
    with pytest.raises(SystemExit):
        check_run(settings, trainers=1)
    assert "correction_high=5.0 bounds a mask; correction_cap bounds a truncation" in capsys.readouterr().err


def test_a_script_may_drop_a_setting():
    """Then the rules that read it are left out, and the others stay."""
    settings = configure(defaults_of(Path(__file__).parents[1] / "train_grpo.py"), ["--token_budget=3"])
    del settings.loss_type, settings.kl_estimator
    with pytest.raises(SystemExit):
        check_run(settings, trainers=1)
    settings.token_budget = 128
    check_run(settings, trainers=1)
