"""The console, which must never end a run: it may be closed, full, or unable to show a character."""
import contextlib
import os
import sys


class Lenient:
    """Wraps stdout or stderr: what it cannot take is dropped, or shown escaped, without an error."""

    def __init__(self, stream):
        # Python gives None where the descriptor was closed before it started.
        self.stream = stream or open(os.devnull, "w")
        # A reward may have put anything there, or closed it.
        with contextlib.suppress(AttributeError, ValueError):
            self.stream.reconfigure(errors="backslashreplace")

    def write(self, text):
        # A ValueError says that it is closed.
        with contextlib.suppress(OSError, ValueError):
            self.stream.write(text)
        return len(text)

    def flush(self):
        with contextlib.suppress(OSError, ValueError):
            self.stream.flush()

    def __getattr__(self, name):
        return getattr(self.stream, name)


def make_lenient():
    """Make print, and whatever else writes to stdout and stderr, go on where they cannot take a text."""
    sys.stdout, sys.stderr = Lenient(sys.stdout), Lenient(sys.stderr)


def one_line(text):
    """Text as one line, with its line ends and other control characters escaped."""
    return printable(text).replace("\n", r"\n")


def printable(text):
    r"""Text with its control characters escaped, except for line ends: \x1b[2J would clear the screen."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in str(text))
