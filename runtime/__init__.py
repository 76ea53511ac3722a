"""What a run needs and no algorithm changes. Import it before PyTorch, which reads GOMP_SPINCOUNT early."""
import atexit
import contextlib
import ctypes
import io
import os
import signal
import sys

# The folder in which the run was started. Code of the user's may change the current folder.
STARTED_IN = os.getcwd()

# OpenMP's threads wait for one another by spinning. If another process wants a core as well, they use up the
# time that the last of them needs, and a step takes twenty times as long. So let them soon go to sleep
# (bench/busy.py).
if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
    os.environ["GOMP_SPINCOUNT"] = "4000"

# If torchrun is killed, Linux sends its workers SIGTERM: a run saves and stops.
if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)                  # PR_SET_PDEATHSIG

# Calls functions as the process ends, unless it is killed: closing.callback(function).
closing = contextlib.ExitStack()
atexit.register(closing.close)


class Suppressing(contextlib.suppress, contextlib.ContextDecorator):
    """contextlib.suppress as a decorator."""


class Console(io.FileIO):
    """stdout or stderr that drops what it cannot take because it is closed or full, and stays open."""
    write, close = Suppressing(OSError)(io.FileIO.write), io.FileIO.flush


def make_lenient():
    """Let print go on if stdout or stderr is closed or full, and escape what its encoding does not have."""
    for name, stream in (("stdout", sys.stdout), ("stderr", sys.stderr)):
        if stream and type(stream) is not io.TextIOWrapper:     # a notebook has streams of its own
            continue
        try:
            stream.flush()
            console = Console(stream.fileno(), "w", closefd=False)
        except (AttributeError, OSError, ValueError):           # it is closed
            console = Console(os.devnull, "w")
        setattr(sys, name, io.TextIOWrapper(console, getattr(stream, "encoding", None), "backslashreplace",
                                            line_buffering=True))
