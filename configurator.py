"""Overrides a script's settings, from left to right: `python train.py config/name.py --key=value ...`.

The settings are the simple values that a script assigns at module level between two rules (comment lines of
dashes), before it calls configure(globals()). If a line between them is `from config.shared import *`, the
settings of that file, which has the same form, become settings of the script. A config file is looked for in
the working directory, then where the script is, then where this file is.
The type of the default decides which values a setting accepts. Whatever cannot be taken exactly as it is
written stops the script, because a typo must not cost a training run.
"""
import ast
import contextlib
import difflib
import json
import math
import os
import sys
import time
import tokenize
import unicodedata
from pathlib import Path
from types import SimpleNamespace

# The names of the settings that config files and the command line set, once configure has run.
given = set()
MUST_BE = {str: "a string", int: "a whole number", float: "a finite number", bool: "True or False"}


def tell_launcher(message, later=0):
    """Tell torchrun, if there is one, why this process ends. Its summary ends with the earliest message.

    later: seconds to add to the time of this message, if another process may have caused it.
    """
    with contextlib.suppress(KeyError, OSError), open(os.environ["TORCHELASTIC_ERROR_FILE"], "x") as file:
        about = {"timestamp": str(int(time.time()) + later)}
        json.dump({"message": {"message": message, "extraInfo": about}}, file)


def refuse(message):
    """End the process with a message that its user can act on, and with exit code 2."""
    message = f"{os.path.basename(sys.argv[0])}: {message}"
    tell_launcher(message)
    # If stderr is closed, there is still the exit code.
    with contextlib.suppress(Exception):
        print(message, file=sys.stderr)
    sys.exit(2)


def fail(message):
    refuse(printable(message).replace("\n", r"\n"))             # on one line


def check(ok, message):
    """Stops the script with the message, which names the setting to change, unless ok is true."""
    if not ok:
        fail(message)


@contextlib.contextmanager
def input_errors():
    """Stops the script with the message of a ValueError and no traceback, because its user can correct it."""
    try:
        yield
    except ValueError as error:
        fail(error)


def did_you_mean(name, names, dashes=""):
    nearest = difflib.get_close_matches(name.replace("-", "_").lower(), names, n=1, cutoff=0.4)
    return f"; did you mean {dashes}{nearest[0]}?" if nearest else ""


def read_layout(path):
    """The script's [key, comment lines] in order, then those of the files that its block imports with *.

    The key of a heading is ''. What the script itself assigns is listed only there.
    """
    with tokenize.open(path) as script:
        statements = ast.parse(script.read()).body
        script.seek(0)
        parts = [(token.start, "", token.string.lstrip("#").strip())
                 for token in tokenize.generate_tokens(script.readline) if token.type == tokenize.COMMENT]
    rules = [start for start, _, text in parts if start[1] == 0 and set(text) == {"-"}]
    assert len(rules) >= 2, f"{path}: the settings belong between two comment lines of dashes"
    parts += [((node.lineno, node.col_offset), ast.unparse(getattr(node, "targets", [node])[0]), "")
              for node in statements if isinstance(node, (ast.Assign, ast.ImportFrom))]
    layout = []
    for start, key, text in sorted(part for part in parts if rules[0] < part[0] < rules[1]):
        # A comment is a heading if it starts at the margin, otherwise it is about the key above it.
        if key or not layout or (start[1] == 0 and layout[-1][0]):
            layout.append([key, []])
        if not key:
            layout[-1][1].append(text)
    for place, (statement, _) in enumerate(layout[:]):
        if statement.endswith(" import *"):
            # The script has imported it, so Python knows where it is.
            file = Path(sys.modules[statement.split()[1]].__file__)
            imported, own = read_layout(file), {key for key, _ in layout if key}
            above = {key for key, _ in layout[:place] if key} & {key for key, _ in imported}
            assert not above, f"{path}: `{statement}` overwrites {', '.join(above)}, which stands above it"
            layout.append(["", [file.name]])
            layout += [[key, lines if key else [f"{file.name}: {lines[0]}", *lines[1:]]]
                       for key, lines in imported if key not in own]
    return layout


def show_help(docstring, layout, settings):
    print(docstring.strip().split("\n\n")[0])
    flags = {key: f"  --{key}={default!r}  " for key, default in settings.items()}
    # The width is limited, so that one long default does not move all comments to the right.
    width = min(48, max(map(len, flags.values()), default=0))
    heading = []
    for key, lines in layout:
        if not key:
            heading = ["", *lines]
        elif key in flags:
            comment = ("\n" + " " * width).join(lines)
            print(*heading, (flags[key].ljust(width) + comment).rstrip(), sep="\n")
            heading = []


def read_config(given, script):
    """Yields (place, key, source of the value). The file is parsed, never run: it can only set values."""
    folders = Path(), Path(script).parent, Path(__file__).parent
    path = next((folder / given for folder in folders if os.path.isfile(folder / given)), None)
    if not path:
        there = Path(given).parent
        names = [str(there / file.name) for folder in folders for file in (folder / there).glob("*.py")]
        fail(f"cannot read {given} (no such file){did_you_mean(given, names)}")
    try:
        tree = ast.parse(Path(path).read_bytes())
        # This raises an error now if a value is nested too deeply.
        ast.unparse(tree)
    except SyntaxError as error:
        fail(f"{path}:{error.lineno or 1}: {error.msg}")
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        fail(f"cannot read {path} ({type(error).__name__}: {error})")
    for node in tree.body[ast.get_docstring(tree) is not None:]:
        match node:
            case ast.Assign(targets=[ast.Name(id=key)], value=value):
                yield f"{path}:{node.lineno}: ", key, ast.unparse(value)
            case _:
                fail(f"{path}:{node.lineno}: a config file holds only lines of key = literal")


def read_value(source, kind):
    """The literal in `source` as a `kind`, or None if it is not one. 1 is taken for 1.0, 1e5 for 100000."""
    with contextlib.suppress(ValueError, TypeError, SyntaxError, OverflowError, RecursionError, MemoryError):
        value = ast.literal_eval(source)
        fits = type(value) is kind or {type(value), kind} == {int, float}
        if fits and kind(value) == value and value not in (math.inf, -math.inf):
            return kind(value)


def configure(namespace, argv=None, choices={}):
    """Applies the command line to `namespace`, a script's globals(), and returns all settings in order.

    The settings are the attributes of what it returns. choices: {setting: what it may be}, besides its default.
    """
    argv = sys.argv[1:] if argv is None else argv
    layout = read_layout(namespace["__file__"])
    settings = {key: namespace[key] for key, _ in layout
                if type(namespace.get(key)) in MUST_BE and not key.startswith("__")}
    if "--help" in argv or "-h" in argv:
        with contextlib.suppress(BrokenPipeError):
            show_help(namespace["__doc__"] or "", layout, settings)
            sys.stdout.flush()
            sys.exit()
        os._exit(0)                                             # a pager has closed the pipe
    on_command_line = set()
    for arg in argv:
        key, equals, text = arg.removeprefix("--").partition("=")
        if arg.endswith(".py") and not arg.startswith("--"):
            found, seen = read_config(arg, namespace["__file__"]), set()
        elif arg.startswith("--") and equals:
            found, seen = [("", key, text)], on_command_line
        else:
            fail(f"cannot take {arg}; write --{key.lstrip('-')}={text or 'value'}, or config/name.py")
        for place, key, text in found:
            dashes = "" if place else "--"
            if key not in settings:
                nearest = did_you_mean(key, settings, dashes)
                fail(f"{place}unknown setting {dashes}{key}{nearest} (--help lists all)")
            if key in seen:
                fail(f"{place}{dashes}{key} given twice")
            seen.add(key)
            given.add(key)
            kind = type(settings[key])
            # On the command line a string needs no quotes, and true no capital.
            bare = {str: repr, bool: str.capitalize}.get(kind, str)
            settings[key] = read_value(text if place else bare(text), kind)
            if settings[key] is None:
                literal = "a literal and " if place else ""
                fail(f"{place}{dashes}{key} must be {literal}{MUST_BE[kind]}, not `{text:.200}`")
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
