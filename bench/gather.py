"""
How long it takes until every rank has all rollouts of a step, and how many bytes that is per token.

    torchrun --nproc_per_node=4 -m bench.gather
    torchrun --nproc_per_node=4 -m bench.gather --completion_length=400

The time is that of distributed.gathered, with which every step sends them, from the moment when the last rank
has sampled until all of them go on. The bytes are those that a rank gets, over all tokens of the step. A
second line says the same of the file that rank 0 writes with save_rollouts=true.
"""
import os
import statistics
import tempfile
import time

import numpy as np
import torch.distributed as dist

from configurator import check, configure
from options.saved_rollouts import write_rollouts
from rollout import Rollout
from runtime import distributed
# ------------------------------------------------------------------------------------------------------------
tokens = 2_000_000              # in the rows of a step, over all ranks
prompt_length = 200             # tokens
completion_length = 1800        # tokens; a token has four letters
num_generations = 8             # completions of each prompt
repeats = 9                     # of which the table has the median and the smallest
# ------------------------------------------------------------------------------------------------------------
configure(globals())
check(min(prompt_length, completion_length, num_generations, repeats) > 0, "every setting must be positive")
rank, world_size, *_ = distributed.set_up()
count = tokens // (prompt_length + completion_length) // world_size
check(count > 0, f"tokens={tokens}: that is not a row for each of {world_size} ranks")
rng = np.random.default_rng(rank)
draw = lambda size: rng.integers(0, 151_936, size, dtype=np.int32)
own = []
for i in range(count):
    if i % num_generations == 0:
        prompt, row = draw(prompt_length), {"prompt": "what" * prompt_length, "answer": str(i)}
    r = Rollout.single(prompt, draw(completion_length), rng.standard_normal(completion_length), "stop")
    r.row, r.score = row, float(i % 2)
    r.completion = rng.integers(97, 123, 4 * completion_length, np.uint8).tobytes().decode()
    own.append(r)
received, all_gather = [], dist.distributed_c10d.all_gather     # what dist.all_gather_object calls
dist.distributed_c10d.all_gather = lambda tensors, tensor, **group: [
    received.append(tensor.nbytes * world_size), all_gather(tensors, tensor, **group)]
seconds = []
for _ in range(repeats):
    dist.barrier()
    start = time.perf_counter()
    found = distributed.gathered(own)
    dist.barrier()
    seconds.append(time.perf_counter() - start)
total = sum(len(r.ids) for r in found)
if rank == 0:
    print(f"{world_size} ranks, {len(found):,} rollouts, {total:,} tokens: "
          f"{statistics.median(seconds):.3f} s (smallest of {repeats}: {min(seconds):.3f}), "
          f"{sum(received) / repeats / total:.1f} bytes per token")
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        for step in range(repeats):
            start = time.perf_counter()
            write_rollouts(folder, step, found)
            seconds.append(time.perf_counter() - start)
        size = os.path.getsize(f"{folder}/rollouts/step-000000.parquet")
    print(f"save_rollouts: {statistics.median(seconds):.3f} s (smallest of {repeats}: {min(seconds):.3f}), "
          f"{size / 1e6:.1f} MB, {size / total:.1f} bytes per token")
distributed.leave()
