"""
What a save and a resume cost apart from the model itself, late in a long run.

    python -m bench.save
    python -m bench.save --steps=1000000

It makes the folder of such a run without models: a metrics.jsonl of `steps` lines, one in ten with an
evaluation.
"""
import json
import os
import random
import statistics
import tempfile
import time

from configurator import configure
from runtime import checkpoint, distributed
from runtime.metrics import RunLog
from tiny import pretrain
# ------------------------------------------------------------------------------------------------------------
steps = 100_000
repeats = 5
# ------------------------------------------------------------------------------------------------------------
configure(globals())
distributed.set_up()
tokenizer, rng = pretrain.make_tokenizer(), random.Random(0)
with tempfile.TemporaryDirectory() as folder:
    out_dir = os.path.join(folder, "run")
    os.makedirs(out_dir)
    with open(f"{out_dir}/metrics.jsonl", "w") as file:
        for step in range(steps):
            figures = {f"figure/{i}": rng.random() for i in range(40)}
            score = {"eval/mean@4": rng.random()} if step % 10 == 0 else {}
            file.write(json.dumps({"step": step} | figures | score) + "\n")
    started = time.perf_counter()
    state = {"step": steps, "checksums": {}, "evaluated": {}, "eval_scores": {}}
    log = RunLog(out_dir, __file__, {"max_steps": steps + 1}, state)
    resume = time.perf_counter() - started
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        checkpoint.save_checkpoint(f"{out_dir}/checkpoint-{steps}", {}, tokenizer, state, 2)
        seconds.append(time.perf_counter() - started)
    print(f"{steps:,} steps: a save takes {statistics.median(seconds):.3f} s apart from the model; "
          f"a resume reads the log in {resume:.1f} s")
distributed.leave()
