"""What a run needs and no algorithm changes. Import it before PyTorch, which reads these as it is loaded."""
import contextlib
import json
import os
import time

# OpenMP's threads wait for one another by spinning. Where another process wants a core as well, they spin
# away the time that the last of them needs, and a step takes twenty times as long. So they soon go to sleep
# (bench/busy.py).
if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
    os.environ["GOMP_SPINCOUNT"] = "10000"


def tell_launcher(message):
    """Give torchrun, if it is there, why this process ends: its summary ends with what was said first."""
    # A rank that has lost another one may be quick to say so, but that is not the cause.
    later = 60 if "by peer" in message else 0
    with contextlib.suppress(KeyError, OSError), open(os.environ["TORCHELASTIC_ERROR_FILE"], "x") as file:
        about = {"timestamp": str(int(time.time()) + later)}
        json.dump({"message": {"message": message, "extraInfo": about}}, file)
