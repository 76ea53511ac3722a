"""
Seconds of a default step alone on the machine, and with a process that keeps one core busy.

    python -m bench.busy                                        # both engines, as the scripts set OpenMP
    GOMP_SPINCOUNT=300000 python -m bench.busy                  # another setting of GNU's OpenMP
    OMP_WAIT_POLICY=PASSIVE python -m bench.busy --engines=hf

OpenMP's threads spin while they wait for one another. Where there are more of them than free cores, they spend
the others' time: runtime/distributed.py bounds it. Runs alternate, and a figure is the median over their steps but
the first two.
"""
import json
import subprocess
import sys
import tempfile

import numpy as np

from configurator import configure
# ------------------------------------------------------------------------------------------------------------
engines = "vllm,hf"
steps = 8                       # of each run
runs = 2                        # of each engine, alone and with a busy process, in turns
# ------------------------------------------------------------------------------------------------------------
configure(globals())


def seconds_of_steps(engine, shared):
    """Of the steps of one run; shared: with a process that keeps a core busy."""
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if shared else None
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "train_grpo.py", f"--engine={engine}", f"--max_steps={steps}",
                        "--eval_interval=1000", "--eval_prompts=8", "--eval_samples=1", "--save_interval=1000",
                        f"--out_dir={folder}/run"], check=True, capture_output=True)
        with open(f"{folder}/run/metrics.jsonl") as file:
            lines = [json.loads(line) for line in file]
    if busy:
        busy.kill()
    return [line["timing_s/step"] for line in lines if 2 <= line["step"] < steps]


print(f"{'seconds per step':18}{'alone':>8}{'with a busy process':>24}")
for engine in engines.split(","):
    seconds = {False: [], True: []}
    for _ in range(runs):
        for shared in seconds:
            seconds[shared] += seconds_of_steps(engine, shared)
    alone, shared = np.median(seconds[False]), np.median(seconds[True])
    print(f"{engine:18}{alone:8.2f}{shared:14.2f} ({shared / alone:.2f}x)", flush=True)
