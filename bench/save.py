"""
What a save and a resume cost apart from the model itself, late in a long run of train_dapo.py.

    python -m bench.save
    python -m bench.save --prompts=1000000

It makes the folder of such a run without models: a metrics.jsonl of `steps` lines, one in ten with an
evaluation, and a state with an entry for each of `prompts` training prompts.
"""
import json
import os
import random
import statistics
import tempfile
import time

import checkpoint
import ranks
import tiny
from configurator import configure
from runlog import RunLog
# ------------------------------------------------------------------------------------------------------------
steps = 100_000
prompts = 200_000
repeats = 5
# ------------------------------------------------------------------------------------------------------------
configure(globals())
ranks.set_up()
tokenizer, rng = tiny.make_tokenizer(), random.Random(0)
state = {"step": steps, "alike": [rng.randrange(20) for _ in range(prompts)],
         "rests": [rng.randrange(20) for _ in range(prompts)]}
with tempfile.TemporaryDirectory() as folder:
    out_dir = os.path.join(folder, "run")
    os.makedirs(out_dir)
    with open(f"{out_dir}/metrics.jsonl", "w") as file:
        for step in range(steps):
            figures = {f"figure/{i}": rng.random() for i in range(40)}
            score = {"eval/mean@4": rng.random()} if step % 10 == 0 else {}
            file.write(json.dumps({"step": step} | figures | score) + "\n")
    started = time.perf_counter()
    log = RunLog(out_dir, __file__, {"sample_interval": 20}, steps, steps + 1)
    resume = time.perf_counter() - started
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        log.flush()
        problem = checkpoint.save_checkpoint(f"{out_dir}/checkpoint-{steps}", {}, tokenizer, state, 2,
                                             log.eval_scores)
        seconds.append(time.perf_counter() - started)
        assert not problem, problem
    size = os.path.getsize(f"{out_dir}/checkpoint-{steps}/trainer/state.json") / 1e6
    print(f"{steps:,} steps and {prompts:,} prompts: a save takes {statistics.median(seconds):.3f} s "
          f"apart from the model, its state.json {size:.2f} MB; a resume reads the log in {resume:.1f} s")
ranks.leave()
