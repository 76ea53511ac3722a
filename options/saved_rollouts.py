"""
Rollouts as arrays, for a checkpoint. Scripts open this file if they save rollouts that were sampled ahead, as
train_async.py does.
"""
import json

import numpy as np

from configurator import InputError
from rollout import Rollout
from runtime.checkpoint import json_text

# These fields of a Rollout are saved although JSON may change them. from_arrays restores the keys of rewards
# and the tuples of versions. The row and the completion hold the user's data, where a change is accepted.
CHANGED_BY_JSON = "rewards", "versions", "row", "completion"

RENAMED = {"row_starts": "sequence_starts", "row_names": "sequence_names"}      # {the older name: the newer}


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
