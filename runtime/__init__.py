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


def make_lenient():
    """Let print go on if stdout or stderr is closed or full, and escape what its encoding does not have.

    What such a console would have shown goes to the null device.
    """
    def lenient(call, number):
        def call_or_drop(*text):
            try:
                return call(*text)
            except (OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), number)
        return call_or_drop

    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:                          # it was closed when the process began
            setattr(sys, name, open(os.devnull, "w"))
        stream = getattr(sys, name)
        if type(stream) is io.TextIOWrapper:                    # a notebook has streams of its own
            stream.reconfigure(errors="backslashreplace", line_buffering=True)
            stream.write, stream.flush = lenient(stream.write, number), lenient(stream.flush, number)
