"""
What the checksums of a weight sync cost: syncs of one process, with and without them in turn.

    python -m bench.checksums --engine=hf --model=tiny

The times are medians. Without checksums all sums are 0.
"""
import os
import statistics
import sys
import time

from runtime import distributed
import torch

import rollout
from configurator import configure
from model import load_policy
import weights
from runtime.model_folder import check_trainable
# ------------------------------------------------------------------------------------------------------------
model = "tiny"
engine = "vllm"
dtype = "float32"
syncs = 40
# ------------------------------------------------------------------------------------------------------------
settings = configure(globals())
*_, mesh, _ = distributed.set_up()
path, kind = check_trainable(settings.model, length=64), getattr(torch, dtype)
policy = load_policy(path, mesh, kind)
sampler = rollout.engine_class(engine)(path, kind, 64, [0], 0.4)
checksum = weights.checksum
seconds = {True: [], False: []}
for version in range(syncs):
    for summed in seconds:
        for module in (weights, sys.modules[type(sampler).__module__]):         # they import it by name
            module.checksum = checksum if summed else lambda tensor: 0
        began = time.perf_counter()
        sampler.load_weights(weights.engine_weights(policy, sampler.naming, kind), version)
        seconds[summed].append(time.perf_counter() - began)
after, before = (1e3 * statistics.median(seconds[summed][3:]) for summed in (True, False))
print(f"{engine}, {dtype}: {before:.1f} ms without checksums, {after:.1f} ms with them, {after / before - 1:+.0%}")
os._exit(0)
