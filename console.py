"""The console, which must never end a run: it may be closed, full, or unable to show a character."""
import contextlib
import os
import sys
import unicodedata

TURNS = "\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"


class Lenient:
    """Wraps stdout or stderr and drops, without an error, what it cannot take."""

    def __init__(self, stream):
        # Python gives None where the descriptor was closed before it started.
        self.stream = stream or open(os.devnull, "w")

    def write(self, text):
        # ValueError: it is closed. RuntimeError: a signal's handler writes in the middle of another write.
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            self.stream.write(text)
        return len(text)

    def flush(self):
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            self.stream.flush()

    def __getattr__(self, name):
        return getattr(self.stream, name)


def escape_the_unknown():
    """Let stdout and stderr escape what their encoding lacks."""
    for stream in (sys.stdout, sys.stderr):
        # A reward may have put anything in its place, or closed it.
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(errors="backslashreplace")


def make_lenient():
    """Let print, and whatever else writes to stdout and stderr, go on where these are closed or full."""
    escape_the_unknown()
    sys.stdout, sys.stderr = Lenient(sys.stdout), Lenient(sys.stderr)


def one_line(text):
    """Text as one line, with its line ends and other control characters escaped."""
    return printable(text).replace("\n", r"\n")


def printable(text):
    r"""Text with its control characters escaped, except tabs and line ends: \x1b[2J clears the screen.

    So are half surrogate pairs, and the characters that turn the direction of writing.
    """
    return "".join(c if c in "\t\n" or unicodedata.category(c) not in ("Cc", "Cs") and c not in TURNS
                   else ascii(c)[1:-1] for c in str(text))
