"""What no algorithm changes. Import a file of it before PyTorch, which reads GOMP_SPINCOUNT early."""
import os

# OpenMP's threads wait for one another by spinning. If another process wants a core as well, they use up the
# time that the last of them needs, and a step takes twenty times as long. So let them soon go to sleep
# (bench/busy.py).
if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
    os.environ["GOMP_SPINCOUNT"] = "4000"
