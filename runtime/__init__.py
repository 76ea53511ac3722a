"""What a run needs and no algorithm changes. Import it before PyTorch, which reads these as it is loaded."""
import os

# OpenMP's threads wait for one another by spinning. Where another process wants a core as well, they spin away the
# time that the last of them needs, and a step takes twenty times as long; so they soon go to sleep (bench/busy.py).
if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
    os.environ["GOMP_SPINCOUNT"] = "10000"
