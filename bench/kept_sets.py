"""
What the logprobs cost from which a rollout's kept sets are read (kept_sets.read_sets), without a model.

    python -m bench.kept_sets

For each top_k: the microseconds per sampled token that vLLM takes to note its list of logprobs, those to read the set
from the list, and the bytes of host memory that the list takes until the answer is whole. top_k=0 notes the logprob of
the sampled token alone.
"""
import itertools
import time
import tracemalloc

import numpy as np
from vllm.logprobs import FlatLogprobs, append_logprobs_for_next_position

from options.kept_sets import TIES, read_sets

TOKENS, SET = 20_000, 6                         # sampled tokens, and how many tokens each of their sets has
VOCABULARY = 151_936

generator = np.random.default_rng(0)
for top_k in (0, 20, 512):
    count = top_k + TIES if top_k else 0
    size = min(TOKENS, 4_000_000 // (count + 1))
    ids = generator.integers(VOCABULARY, size=(size, count + 1))
    logprobs = np.full((size, count + 1), -np.inf, np.float32)
    logprobs[:, :1 + SET] = -1.0                # the sampled token's comes first, and again in the set

    def noted():
        flat = FlatLogprobs()
        for token_ids, values in zip(ids, logprobs):
            append_logprobs_for_next_position(
                flat, token_ids.tolist(), values.tolist(), itertools.repeat(None), 1, count)
        return flat

    began = time.perf_counter()
    flat = noted()
    noting = time.perf_counter() - began
    began = time.perf_counter()
    if top_k:
        read_sets(flat, VOCABULARY)
    reading = time.perf_counter() - began
    tracemalloc.start()
    flat = noted()
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    print(f"top_k={top_k}: {1e6 * noting / size:.1f} us to note, {1e6 * reading / size:.1f} us to read, "
          f"{held / size:,.0f} bytes per token")
