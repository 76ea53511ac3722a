"""What a run needs and no algorithm changes. Import it before PyTorch, which reads GOMP_SPINCOUNT early."""
import atexit
import contextlib
import ctypes
import json
import os
import signal
import sys
import time

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


class Lenient:
    """Wraps stdout or stderr. What a closed or full one cannot take is dropped without an error."""

    def __init__(self, stream):
        # Python gives None if the descriptor was closed before it started.
        self.stream = stream or open(os.devnull, "w")

    def write(self, text):
        # ValueError: it is closed. RuntimeError: a signal handler writes in the middle of another write.
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            self.stream.write(text)
        return len(text)

    def flush(self):
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            self.stream.flush()

    def __getattr__(self, name):
        return getattr(self.stream, name)


def make_lenient():
    """Let print go on if stdout or stderr is closed or full, and escape what its encoding does not have."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        # It is None where it was closed before Python started, and a user's code may have replaced it.
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(errors="backslashreplace", line_buffering=True)
        setattr(sys, name, Lenient(stream))


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
