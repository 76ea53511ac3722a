"""
Checkpoints, and the folder of a run that holds them.

A checkpoint holds all that a resumed run needs. What run.state consists of is in run.py (new_state), and so
is when a run saves (Run.save, and Run.stop_if_signalled after a signal):

    checkpoint-60/            config, model.safetensors in float32, tokenizer: a model folder. Weights of more
                              than 5 GB are model-00001-of-00003.safetensors and so on, with an index
    checkpoint-60/trainer/    optimizer-00000.safetensors with the first rank's rows of Adam's moments, and so
                              on for each rank of a copy of the weights; run.state as state.json; and, if
                              there are any, run.arrays as arrays.safetensors
    checkpoint-60/critic/     model and optimizer of PPO's critic in the same form

With lora_rank the folder holds an adapter (lora.py) instead of a model. A checkpoint is written next to its
final place, synced to disk and then renamed. An old one is renamed before it is removed. So each of them is
whole or absent. While a run lives, no other run can write to its folder, and a folder that belongs to no run
is left alone.
"""
import atexit
import contextlib
import errno
import fcntl
import json
import math
import os
import re
import shutil
import sys
import time
import zlib
from pathlib import Path
from secrets import token_hex

import numpy as np
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from configurator import InputError, is_of_library

# How a file system says that it cannot sync a folder, or change a mode
UNSUPPORTED = errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EPERM, errno.EBADF
LOCKS = []                      # the open .lock of each folder; a lock lasts as long as the process

# ---------------------------------------------------------------- to disk

def save_checkpoint(folder, networks, tokenizer, state, keep, arrays={}):
    """Write a run's models to `folder` (.../checkpoint-N), and what else a resume needs to trainer/ in it.

    networks: {subfolder: (model.Network, optimizer, or None if nothing trains it)}; the policy's is "", so
    that from_pretrained and vLLM can load the folder. Rank 0 holds a whole model in host memory. state: a
    dict that JSON can hold. arrays: {name: NumPy array}. Afterwards older checkpoints are removed, except the
    `keep` newest and, of those with a score in state["eval_scores"], {step: score}, the best. If a rank
    cannot write its part (because the disk is full, say), it raises the error, and no older checkpoint is
    removed. A collective.
    """
    out_dir = os.path.dirname(folder)
    part = f"{out_dir}/checkpoint.part"
    master = dist.get_rank() == 0
    try:
        # A run that was killed may have left it. None of its files may get into this checkpoint.
        if master and os.path.exists(part):
            shutil.rmtree(part)
        dist.barrier()
        for place, (model, optimizer) in networks.items():
            if optimizer:
                trainer = os.path.join(part, place, "trainer")
                os.makedirs(trainer, exist_ok=True)
                save_optimizer(trainer, model, optimizer)
            model.save(os.path.join(part, place))
        dist.barrier()                                  # all ranks have written
        if master:
            tokenizer.save_pretrained(part)
            write_state(part, state, arrays)
            shutil.rmtree(folder, ignore_errors=True)
            os.rename(part, folder)
            sync(out_dir)
            remove_older(out_dir, state["eval_scores"], keep)
    finally:
        if master:
            shutil.rmtree(part, ignore_errors=True)


def remove_older(out_dir, scores, keep):
    # Removes the checkpoints of a run except the `keep` newest and the best, the newest of equal ones.
    def score(folder):
        return scores.get(str(step_of(folder)), -math.inf)

    saved = checkpoints(out_dir)
    best = max(reversed(saved), key=score)
    old = f"{out_dir}/checkpoint.old"
    shutil.rmtree(old, ignore_errors=True)              # a run that was killed may have left it
    for folder in {*saved} - {best, *saved[-keep:]}:
        with contextlib.suppress(OSError):              # it stays, whole, until the next save
            os.rename(folder, old)
        shutil.rmtree(old, ignore_errors=True)


def write_state(folder, state, arrays={}):
    """Write state.json, and arrays.safetensors if there are arrays; wait until the disk has the folder."""
    trainer = Path(folder, "trainer")
    trainer.mkdir(exist_ok=True)
    if arrays:
        # safetensors would write the memory of an array with gaps, such as a[:, ::2], as it lies.
        whole = {name: np.asarray(array, order="C") for name, array in arrays.items()}
        save_arrays(whole, trainer / "arrays.safetensors")
    (trainer / "state.json").write_text(json.dumps(state))
    share(folder)
    for path in (*Path(folder).rglob("*"), folder):
        sync(path)


def json_text(name, value):
    """Return a value as JSON. Raises InputError if it would be another value when it is read back."""
    text = json.dumps(value, default=str, skipkeys=True)
    restored = json.loads(text)
    # As texts, because NaN is not equal to NaN, and a defaultdict is equal to a dict.
    if repr(restored) != repr(value):
        raise InputError(f"{name} is {value!r:.200}, and a resumed run would read {restored!r:.200}: "
                         "checkpoints keep numbers of Python, text, lists, and dicts whose keys are text")
    return text


@contextlib.contextmanager
def if_supported():
    # Passes over an operation that the file system does not have. All other errors are raised.
    try:
        yield
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise


def sync(path):
    # Waits until a file, or the names in a folder, are on disk and not only in its cache.
    descriptor = os.open(path, os.O_RDONLY)
    with if_supported():
        os.fsync(descriptor)
    os.close(descriptor)


def share(folder):
    """Give the safetensors files in a model's folder the mode of its other files, which the umask has left.
    safetensors lets only their owner read them."""
    mode = os.stat(f"{folder}/tokenizer_config.json").st_mode
    for path in Path(folder).rglob("*.safetensors"):
        with if_supported():
            path.chmod(mode)


def save_optimizer(folder, model, optimizer):
    """Write this rank's rows of an optimizer's state. Of ranks that hold the same rows the first writes.

    Raises InputError if the optimizer keeps anything for a parameter except numbers and tensors of its shape.
    """
    model.reshard()                     # after a forward without backward FSDP2 leaves the root gathered
    *copies, shard = next(model.parameters()).device_mesh.get_coordinate()
    if any(copies):
        return
    moments = {}
    kind = type(optimizer).__name__
    for name, parameter in model.named_parameters():
        for key, x in optimizer.state.get(parameter, {}).items():
            rows = x.to_local() if isinstance(x, DTensor) else torch.as_tensor(x)
            if rows.shape not in ((), parameter.to_local().shape):
                raise InputError(f"{kind} keeps {key} of {name} neither as a number nor in its shape, and "
                                 "could not go on with it. run.begin(policy, None, ...) saves no optimizer")
            moments[f"{name}.{key}"] = rows
    save_file(moments, f"{folder}/optimizer-{shard:05}.safetensors", {"optimizer": kind})


def checksum_of_rows(rows):
    """Return the CRC-32 of a data set's rows, by which a resumed run recognises its data."""
    checksum = 0
    for row in rows:
        checksum = zlib.crc32(json.dumps(row, default=str).encode(), checksum)
    return checksum


# ---------------------------------------------------------------- and back

def checkpoints(out_dir):
    """Return the checkpoint-N folders of a run, oldest first."""
    names = [name for name in os.listdir(out_dir) if re.fullmatch(r"checkpoint-[0-9]+", name)]
    return [os.path.join(out_dir, name) for name in sorted(names, key=step_of)]


def step_of(folder):
    return int(folder.rpartition("-")[2])


def load_optimizers(folder, networks):
    """Put the optimizers' state from a checkpoint into those of `networks`, which are as in save_checkpoint.

    Raises InputError like load_optimizer, and if a network was not loaded from its folder in the checkpoint.
    """
    for place, (model, optimizer) in networks.items():
        saved = str(Path(folder, place))
        # With adapters the initial model is loaded.
        if not model.adapters and model.hf.name_or_path != saved:
            raise InputError(f"resume={folder}: the model {place or 'actor'} was loaded from "
                             f"{model.hf.name_or_path}, not from {saved}")
        if optimizer:
            load_optimizer(saved, model, optimizer)


def load_optimizer(folder, model, optimizer):
    """Put an optimizer's state from a checkpoint into `optimizer`, cut for the ranks of this run.

    The optimizer keeps the learning rate, betas and weight decay that it was made with, because settings may
    change. Raises InputError if the files cannot be read or do not fit the model.
    """
    parameters = dict(model.named_parameters())
    try:
        files = [safe_open(path, "pt") for path in sorted(Path(folder, "trainer").glob("optimizer-*"))]
        if not files:
            raise InputError("it was not saved")
        about = files[0].metadata()                             # None of earlier commits
        if about and about["optimizer"] != type(optimizer).__name__:
            raise InputError(f"{about['optimizer']} has written it: use that, or begin with --model={folder}")
        for entry in files[0].keys():
            name, _, key = entry.rpartition(".")
            if name not in parameters:
                raise InputError(f"the model has no {name}")
            optimizer.state[parameters[name]][key] = read_rows(files, entry, parameters[name])
    except Exception as error:
        if not is_of_library(error):
            raise
        raise InputError(f"resume={folder}: its optimizer's state cannot be read: {error!r:.300}") from error
    restored = optimizer.state
    optimizer.load_state_dict(optimizer.state_dict())           # each value on the device that it needs
    for parameter, values in restored.items():
        for key, x in optimizer.state[parameter].items():       # which now have the parameter's dtype
            optimizer.state[parameter][key] = x.to(values[key].dtype)


def read_rows(files, entry, parameter):
    # Returns this rank's rows of what an optimizer keeps for a parameter. The files have it cut into parts.
    parts = [file.get_slice(entry) for file in files]
    if not parts[0].get_shape():
        return files[0].get_tensor(entry)                       # how many steps were made
    mesh = parameter.device_mesh
    count = -(-len(parameter) // mesh.size(mesh.ndim - 1))      # rows that FSDP2 gives a rank
    first = count * mesh.get_local_rank(mesh.ndim - 1)
    end = first + count
    size = -(-len(parameter) // len(files))                     # rows in a file; the last ones may have fewer
    rows = torch.cat([part[max(0, first - n * size):max(0, end - n * size)] for n, part in enumerate(parts)])
    value = torch.zeros_like(parameter, dtype=rows.dtype)
    if rows.shape != value.to_local().shape:                    # copy_ would repeat a row or a column
        raise InputError(f"{entry} has another shape than its parameter")
    value.to_local().copy_(rows)
    return value


# ---------------------------------------------------------------- the folder of a run

def locate_run(out_dir, resume, default):
    """Return (the run's folder, the checkpoint to resume or None), from the settings out_dir and resume.

    If out_dir is empty, the folder is that of the resumed checkpoint, or without one a new folder whose name
    is `default` and random letters, because two runs may begin in the same second. The folder is locked.
    resume=auto takes the newest checkpoint in out_dir, if there is one. Raises InputError for a resume that
    is no checkpoint or not the newest of its run, and for a folder that holds another run or belongs to no
    run; OSError for a folder that cannot be written.
    """
    if resume == "auto" and not out_dir:
        raise InputError("resume=auto takes the newest checkpoint in out_dir: name an out_dir")
    folder = absolute(out_dir)
    if resume not in ("", "auto"):
        resume = absolute(resume)
        if not os.path.isfile(os.path.join(resume, "trainer", "state.json")):
            raise InputError(f"resume={resume}: not a checkpoint folder")
        folder = folder or os.path.dirname(resume)
    is_new = not folder
    if is_new:
        folder = absolute(f"{default}-{token_hex(3)}")
    # Another run in the folder may be about to end, so the lock comes before looking into it.
    lock(folder)
    if is_new:
        atexit.register(remove_unused, folder)
    saved = checkpoints(folder)
    if resume == "auto":
        resume = max(saved, key=step_of, default="")
    elif resume in saved[:-1]:
        raise InputError(f"resume={resume}: {saved[-1]} is newer; remove it, or name a new out_dir")
    elif resume not in saved and set(os.listdir(folder)) - {".lock"}:
        raise InputError(f"out_dir={folder} holds another run: "
                         "name a new folder, or resume it by --resume=auto")
    return folder, resume or None


def absolute(path):
    return os.path.abspath(os.path.expanduser(path)) if path else ""


def remove_unused(folder):
    # A run that is refused leaves no folder.
    if os.listdir(folder) == [".lock"]:
        shutil.rmtree(folder)


def lock(out_dir):
    """Make a folder, if it is not there, and keep other runs out of it while this process lives.

    Waits up to ten minutes for a run that is still in the folder, because the workers of a torchrun that was
    killed live on until the end of their step. Raises InputError if that run does not end or the folder
    belongs to no run, and OSError if it cannot be written.
    """
    with contextlib.suppress(FileNotFoundError):
        os.stat(out_dir)                        # raises if the path is too long, on which makedirs recurses
    os.makedirs(out_dir, exist_ok=True)
    # A run's folder has a .lock from its first moment on.
    strangers = {name for name in os.listdir(out_dir) if not name.startswith("checkpoint-")}
    if strangers and ".lock" not in strangers:
        raise InputError(f"out_dir={out_dir} holds {min(strangers)} and is not the folder of a run: name "
                         "a new folder")
    LOCKS.append(open(os.path.join(out_dir, ".lock"), "ab"))
    for second in range(600):
        try:
            fcntl.flock(LOCKS[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if second == 0:
                print(f"{out_dir}: another run is writing there; waiting for its end", file=sys.stderr)
            time.sleep(1)
        except OSError as error:
            print(f"{out_dir} cannot be locked against other runs: {error}", file=sys.stderr)
            return
    raise InputError(f"out_dir={out_dir}: another run is writing there")
