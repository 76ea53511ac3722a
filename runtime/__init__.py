"""What a run needs and no algorithm changes. Import it before PyTorch, which reads GOMP_SPINCOUNT early."""
import atexit
import contextlib
import json
import os
import sys
import time

# OpenMP's threads wait for one another by spinning. If another process wants a core as well, they use up the
# time that the last of them needs, and a step takes twenty times as long. So let them soon go to sleep
# (bench/busy.py).
if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
    os.environ["GOMP_SPINCOUNT"] = "4000"

# Calls functions as the process ends, unless it is killed: closing.callback(function).
closing = contextlib.ExitStack()
atexit.register(closing.close)


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
