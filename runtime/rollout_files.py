"""All rollouts of a step as a parquet file, if save_rollouts is set. No other run opens this file."""
import json
from pathlib import Path

from pyarrow import Table, parquet

from runtime.checkpoint import sync


def write(out_dir, step, rollouts):
    """Write the rollouts of a step to out_dir/rollouts/step-000012.parquet, a row for each, in their order.

    The columns ids, spans, row_starts, logprobs and score have the types of a Rollout's fields. The parts of
    the score are JSON, because a reward may name other parts in another step, and so is a completion that
    consists of messages. A file appears whole or not at all. It replaces that of an earlier attempt at the
    step, and files of later steps, which the run had written before it was resumed, are removed. Raises
    OSError if the disk is full, for example.
    """
    rows = []
    for r in rollouts:
        completion = r.completion
        if not isinstance(completion, str):
            completion = json.dumps(completion, default=str)
        rows.append({"step": step, "ids": r.ids, "spans": [*r.spans], "row_starts": [*r.row_starts],
                     "logprobs": r.logprobs, "score": r.score, "parts": json.dumps(r.parts),
                     "completion": completion})
    folder = Path(out_dir, "rollouts")
    folder.mkdir(exist_ok=True)
    path = folder / f"step-{step:06}.parquet"
    part = folder / ".part"                                     # who reads the folder passes over such a name
    parquet.write_table(Table.from_pylist(rows), part)
    sync(part)
    part.replace(path)
    for other in folder.glob("step-*.parquet"):
        if other > path:
            other.unlink()
