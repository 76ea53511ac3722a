"""
Checkpoints: a run's models and its state on their way to disk and back.

A checkpoint is written next to its final place, synced to disk and then renamed, so it is whole or absent:

    checkpoint-60/            config, model.safetensors in float32, tokenizer: a model folder
    checkpoint-60/trainer/    optimizer (torch.distributed.checkpoint), state.json, checksums.json
    checkpoint-60/critic/     the same for PPO's critic
"""
import fcntl
import json
import os
import re
import shutil
import sys
import time
import zlib

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import ranks
from weights import full_weights

# ---------------------------------------------------------------- to disk

def save_checkpoint(folder, networks, tokenizer, state, keep, eval_scores):
    """Write a run's models to `folder` (.../checkpoint-N), and what resuming needs to trainer/ inside it.

    networks: {place in the folder: (model, optimizer)}; the policy's place is "", so that from_pretrained and
    vLLM load the folder. state: a dict that JSON can hold. Afterwards the older checkpoints go, except the
    `keep` newest and the best by eval_scores, {step: score}. Returns None, or what went wrong where the
    checkpoint could not be written (a full disk, say): the older ones then stay. A collective.
    """
    part = os.path.join(os.path.dirname(folder), "checkpoint.part")
    master = dist.get_rank() == 0
    problem = None
    try:
        if master:
            shutil.rmtree(part, ignore_errors=True)
            os.makedirs(part)
    except OSError as error:
        problem = repr(error)
    for place, (model, optimizer) in networks.items():
        # These are collectives, so every rank makes them, whatever has gone wrong; one rank keeps the
        # weights.
        whole = {name: tensor.cpu() for name, tensor in full_weights(model) if master}
        # Without this PyTorch would make a first step of its own to find out what the state is.
        has_steps = bool(optimizer.state)
        moments = get_optimizer_state_dict(model, optimizer) if has_steps else {}
        if problem := first_problem(problem):
            break
        try:
            if has_steps:
                dcp.save(moments, checkpoint_id=os.path.join(part, place, "trainer"))
            if master:
                names = {name for name, _ in model.hf.named_parameters(remove_duplicate=False)}
                buffers = {name: x for name, x in model.hf.state_dict().items() if name not in names}
                model.hf.save_pretrained(os.path.join(part, place), state_dict=whole | buffers)
        # On a full disk libraries raise all kinds of errors; PyTorch's own, the second, is no Exception.
        except (Exception, CheckpointException) as error:
            problem = str(error)[-300:]
    problem = first_problem(problem)
    if master and not problem:
        try:
            tokenizer.save_pretrained(part)
            write_state(part, state)
            finish(part, folder)
        except Exception as error:
            problem = repr(error)
    if master and problem:
        shutil.rmtree(part, ignore_errors=True)
    elif master:
        # Newer ones were damaged, or belong to a past that was left: a resumed run must not go back to them.
        found = checkpoints(os.path.dirname(folder))
        here = found.index(folder)
        scored = [one for one in found[:here + 1] if number(one) in eval_scores]
        best = max(scored, key=lambda one: eval_scores[number(one)], default=None)
        for other in found[:max(0, here + 1 - keep)] + found[here + 1:]:
            if other != best:
                shutil.rmtree(other, ignore_errors=True)
    return first_problem(problem)


def first_problem(problem):
    # that of the first rank that has one, so that all ranks do the same next
    return next(filter(None, ranks.gathered([problem])), None)


def write_state(folder, state):
    # state.json, then checksums.json with the CRC-32 of every file; all of them on disk, not in its cache
    os.makedirs(f"{folder}/trainer", exist_ok=True)
    with open(f"{folder}/trainer/state.json", "w") as file:
        json.dump(state, file, indent=1)
    checksums = {}
    for root, _, files in os.walk(folder):
        for name in files:
            path = os.path.join(root, name)
            sync(path)
            checksums[os.path.relpath(path, folder)] = checksum(path)
        sync(root)
    with open(f"{folder}/trainer/checksums.json", "w") as file:
        json.dump(checksums, file, indent=1)
    sync(f"{folder}/trainer/checksums.json")
    sync(f"{folder}/trainer")


def finish(part, folder):
    # A run that was killed and resumed may have left it.
    if os.path.exists(folder):
        shutil.rmtree(folder)
    os.rename(part, folder)
    sync(os.path.dirname(folder))


def sync(path):
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def checksum(path):
    value = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            value = zlib.crc32(block, value)
    return value


# ---------------------------------------------------------------- and back

def checkpoints(out_dir):
    """The checkpoint-N folders of a run, oldest first."""
    names = [name for name in os.listdir(out_dir) if re.fullmatch(r"checkpoint-\d+", name)]
    return [os.path.join(out_dir, name) for name in sorted(names, key=number)]


def number(folder):
    return int(folder.rpartition("-")[2])


def damage(folder):
    """What is wrong with a checkpoint, by the first file that is missing, cut short or altered; or None."""
    try:
        with open(os.path.join(folder, "trainer", "checksums.json")) as file:
            checksums = json.load(file)
        for name, value in checksums.items():
            if checksum(os.path.join(folder, name)) != value:
                return f"{name} is not what was written"
    except (OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


# {folder: open file}; a lock lasts as long as the process.
LOCKS = {}


def claim(out_dir, patience=600):
    """Keep other runs out of a folder while this process lives.

    Waits up to `patience` seconds for a run that is still in it, then raises ValueError: the workers of a
    torchrun that was killed live on until the end of their step.
    """
    out_dir = os.path.abspath(out_dir)
    if out_dir in LOCKS:
        return
    os.makedirs(out_dir, exist_ok=True)
    LOCKS[out_dir] = open(os.path.join(out_dir, ".lock"), "w")
    for second in range(patience + 1):
        try:
            return fcntl.flock(LOCKS[out_dir], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if second == 0:
                print(f"{out_dir}: another run is writing there; waiting for its end", file=sys.stderr)
            time.sleep(1)
        except OSError as error:
            return print(f"{out_dir} cannot be locked against other runs: {error}", file=sys.stderr)
    del LOCKS[out_dir]
    raise ValueError(f"out_dir={out_dir}: another run is writing there")


def locate_run(out_dir, resume, default):
    """(the run's folder, the checkpoint to go on from or None), from the settings out_dir and resume.

    An empty out_dir means the run that the resumed checkpoint belongs to, or `default` where none is resumed;
    any other folder is claimed. resume=auto passes over damaged checkpoints and prints their names. Raises
    ValueError for a resume that is not a checkpoint, is damaged or is not the newest of its run, and for a
    folder that holds another run or only damaged checkpoints.
    """
    if resume == "auto":
        if not out_dir:
            raise ValueError("resume=auto goes on from the newest checkpoint in out_dir: name an out_dir")
        claim(out_dir)
        found = checkpoints(out_dir)
        for folder in reversed(found):
            if not (problem := damage(folder)):
                return out_dir, folder
            print(f"{folder} is damaged and passed over: {problem}", file=sys.stderr)
        if found:
            raise ValueError(f"resume=auto: all {len(found)} checkpoints in {out_dir} are damaged")
        return out_dir, None
    own = os.path.dirname(os.path.abspath(resume)) if resume else ""
    if resume and not os.path.isfile(os.path.join(resume, "trainer", "state.json")):
        raise ValueError(f"resume={resume}: not a checkpoint folder")
    goes_on = bool(resume) and os.path.abspath(out_dir or own) == own
    folder = own if goes_on else out_dir
    if folder:
        # Before looking into it: another run may be about to end.
        claim(folder)
    if goes_on:
        newest = (checkpoints(own) or [resume])[-1]
        if os.path.basename(newest) != os.path.basename(os.path.abspath(resume)):
            raise ValueError(f"resume={resume}: {newest} is newer; remove it, or name a new out_dir")
    elif os.path.isdir(folder) and set(os.listdir(folder)) - {".lock"}:
        raise ValueError(f"out_dir={out_dir} holds another run: "
                         "name a new folder, or go on with it by --resume=auto")
    if resume and (problem := damage(resume)):
        raise ValueError(f"resume={resume}: damaged: {problem}")
    return folder or default, resume or None


def load_optimizer(folder, model, optimizer):
    """Put a checkpoint's optimizer state into `optimizer`, resharded to the ranks at hand. A collective.

    The optimizer keeps the learning rate, betas and weight decay that it was made with: settings may change.
    """
    # Before its first step an optimizer has nothing to save.
    if not os.path.exists(f"{folder}/trainer/.metadata"):
        return
    made_with = [{key: value for key, value in group.items() if key != "params"}
                 for group in optimizer.param_groups]
    state = get_optimizer_state_dict(model, optimizer)
    dcp.load(state, checkpoint_id=os.path.join(folder, "trainer"))
    set_optimizer_state_dict(model, optimizer, state)
    for group, values in zip(optimizer.param_groups, made_with):
        group |= values


def load_state(folder):
    """The `state` that save_checkpoint was given."""
    with open(os.path.join(folder, "trainer", "state.json")) as file:
        return json.load(file)
