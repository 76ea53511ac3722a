"""What a run needs and no algorithm changes. Import it before PyTorch, which reads these as it is loaded."""
import atexit
import contextlib
import json
import os
import sys
import time

# OpenMP's threads wait for one another by spinning. Where another process wants a core as well, they spin
# away the time that the last of them needs, and a step takes twenty times as long. So they soon go to sleep
# (bench/busy.py).
if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
    os.environ["GOMP_SPINCOUNT"] = "4000"

# What is called as the process ends, unless it is killed: closing.callback(function).
closing = contextlib.ExitStack()
atexit.register(closing.close)


def tell_launcher(message, later=0):
    """Give torchrun, if it is there, why this process ends: its summary ends with what was said first.

    later: seconds to be added to the time, for what another process's end has caused.
    """
    with contextlib.suppress(KeyError, OSError), open(os.environ["TORCHELASTIC_ERROR_FILE"], "x") as file:
        about = {"timestamp": str(int(time.time()) + later)}
        json.dump({"message": {"message": message, "extraInfo": about}}, file)


def refuse(message):
    """End the process with a message that its user can act on, and with exit code 2."""
    message = f"{os.path.basename(sys.argv[0])}: {message}"
    tell_launcher(message)
    # stderr may be closed; the exit code remains.
    with contextlib.suppress(Exception):
        print(message, file=sys.stderr)
    sys.exit(2)
