"""All rollouts of a step as a parquet file, if save_rollouts is set. No other run opens this file."""
import json
from pathlib import Path

import pyarrow.parquet

from runtime.checkpoint import sync


def write(out_dir, step, rollouts):
    """Write the rollouts of a step to out_dir/rollouts/step-000012.parquet, a row for each, in their order.

    The columns step, ids, spans, logprobs and score have the types of a Rollout's fields. Parts are JSON,
    because rewards may name other parts in another step, and so is a completion of messages. A file appears
    whole or not at all. It replaces that of an earlier attempt at the step, and the files of later steps,
    which an attempt before a resume has left, are removed. Raises OSError if the disk is full.
    """
    rows = []
    for r in rollouts:
        completion = r.completion
        if not isinstance(completion, str):
            completion = json.dumps(completion, default=str)
        rows.append({"step": step, "ids": r.ids, "spans": [*r.spans], "logprobs": r.logprobs,
                     "score": r.score, "parts": json.dumps(r.parts), "completion": completion})
    folder = Path(out_dir, "rollouts")
    folder.mkdir(exist_ok=True)
    part = folder / "step.part"
    path = folder / f"step-{step:06}.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), part)
    sync(part)
    part.replace(path)
    for other in folder.glob("step-*.parquet"):
        if other > path:
            other.unlink()
