"""Overrides a script's settings, from left to right: `python train.py config/name.py --key=value ...`.

The settings are the simple values that a script assigns at module level between two rules (comment lines of
dashes), before it calls configure(globals()). If a line between them is `from config.shared import *`, the
settings of that file, which has the same form, become settings of the script. A config file is looked for in
the working directory, then where the script is, then where this file is. config/name.py may also stand in one
of the folders there.
The type of the default decides which values a setting accepts. Whatever cannot be taken exactly as it is
written stops the script, because a typo must not cost a training run.
"""
import ast
import contextlib
import difflib
import importlib.util
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
    """Stop the script with the message of a ValueError, or of an OSError that names a file, and without a
    traceback, because its user can correct it."""
    try:
        yield
    except (ValueError, OSError) as error:
        if isinstance(error, OSError) and not error.filename:
            raise
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


def read_config(given, script):
    """Yield (place, key, source of the value). The file is parsed, never run: it can only set values."""
    here = Path(__file__).parent
    places = [folder / given for folder in (Path(), Path(script).parent, here)]
    if given.startswith("config/"):                             # config/gspo.py is in config/methods
        places += here.glob(given.replace("config/", "config/*/"))
    path = next(filter(os.path.isfile, places), None)
    check(path, f"cannot read {given} (no such file)")
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
