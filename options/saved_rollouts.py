"""
Rollouts on disk. A run opens this file with save_rollouts, or if its script saves rollouts that were sampled
ahead, as train_async.py does.

    write_rollouts           writes the rollouts of a step as a parquet file
    as_arrays, from_arrays   turn rollouts into arrays for a checkpoint, and back
"""
import json
from pathlib import Path

import numpy as np
from pyarrow import Table, parquet

from configurator import InputError
from rollout import Rollout
from runtime.checkpoint import json_text, sync

# These fields of a Rollout are saved although JSON may change them. from_arrays restores the keys of rewards
# and the tuples of versions. The row and the completion hold the user's data, where a change is accepted.
CHANGED_BY_JSON = "rewards", "versions", "row", "completion"

RENAMED = {"row_starts": "sequence_starts", "row_names": "sequence_names"}      # {the older name: the newer}


def write_rollouts(out_dir, step, rollouts):
    """Write the rollouts of a step to out_dir/rollouts/step-000012.parquet, a row for each, in their order.

    The columns ids, spans, sequence_starts, logprobs and score have the types of a Rollout's fields. The
    parts of the score are JSON, because a reward may name other parts in another step, and so is a completion
    that consists of messages. A file appears whole or not at all. It replaces that of an earlier attempt at
    the step, and files of later steps, which the run had written before it was resumed, are removed. Raises
    OSError if the disk is full, for example.
    """
    rows = []
    for r in rollouts:
        completion = r.completion
        if not isinstance(completion, str):
            completion = json.dumps(completion, default=str)
        rows.append({"step": step, "ids": r.ids, "spans": [*r.spans], "sequence_starts": [*r.sequence_starts],
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


def as_arrays(rollouts):
    """Return Rollouts as {name: array}, for a checkpoint.

    Fields that you have added to a rollout are kept as well. Raises InputError for a field that is neither an
    array of numbers, nor a number of NumPy, nor a value that JSON holds. In rows and completions a date, say,
    becomes text.
    """
    arrays = {}
    records = []                            # for each rollout its fields that are no arrays, by name
    for i, r in enumerate(rollouts):
        record = {}
        for key, value in vars(r).items():
            if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufc":         # numbers
                arrays[f"{i}.{key}"] = value
                continue
            if key not in CHANGED_BY_JSON:
                json_text(f"the field {key} of a rollout", value)       # raises if JSON would change it
            record[key] = value
        records.append(record)
    text = json.dumps(records, default=str)
    return arrays | {"records": np.frombuffer(text.encode(), np.uint8)}


def from_arrays(arrays):
    """Return the Rollouts of which as_arrays made these arrays. Without arrays there are none.

    Raises InputError if an older version of this code made them, which wrote no "records". Its rollouts had
    other fields.
    """
    if not arrays:
        return []
    if "records" not in arrays:                 # it was called "rest" then
        raise InputError("the checkpoint holds rollouts of an older version of this code: resume with that "
                         "version, or with another max_staleness, so that they are sampled again")
    rollouts = []
    for record in json.loads(arrays["records"].tobytes()):
        r = Rollout.__new__(Rollout)        # its __init__ would refuse fields that you have added
        for key, value in record.items():
            setattr(r, RENAMED.get(key, key), value)
        r.rewards = {int(token): reward for token, reward in r.rewards.items()}
        r.versions = tuple(map(tuple, r.versions))
        rollouts.append(r)
    for name, array in arrays.items():
        if name != "records":
            i, key = name.split(".")
            setattr(rollouts[int(i)], RENAMED.get(key, key), array[()])     # [()] makes a number
    return rollouts
