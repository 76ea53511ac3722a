"""Weights on the move: from the trainer to the engine, to disk, and back."""
import contextlib
import faulthandler
import json
import os
import re
import shutil
import sys
import threading
import zlib

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from transformers.core_model_loading import revert_weight_conversion

import ranks

# ---------------------------------------------------------------- to the engine


def full_weights(policy, dtype=None, engine_names=None):
    """Yield (name, whole tensor) one parameter at a time, cast to dtype where given.

    Gathering a sharded parameter is a collective: every rank has to run through the whole iterator. At most
    one whole parameter exists beside the shards.
    engine_names  None        each parameter once, under its name in the module
                  module      a head that shares the embedding's weight is yielded under its own name, too
                  checkpoint  that, and the names of a checkpoint: what the module stores fused (the experts
                              of a mixture-of-experts layer) comes apart. vLLM wants those; its CPU build
                              keeps a packed copy of a tied head and refreshes it by that name only
    """
    policy.reshard()  # after a forward without backward FSDP2 leaves the root's parameters gathered
    for name, parameter in policy.hf.named_parameters(remove_duplicate=engine_names is None):
        tensor = parameter.detach().full_tensor()
        tensor = tensor.to(dtype) if dtype else tensor
        if engine_names == "checkpoint":
            yield from revert_weight_conversion(policy.hf, {name: tensor}).items()
        else:
            yield name, tensor


@contextlib.contextmanager
def deadline(seconds, what):
    """Ends the process, with a message and where each thread stood, if the block takes longer; 0: never.

    From a thread of its own, because a collective that waits for a lost rank never returns to Python.
    """
    def give_up():
        print(f"{what} did not finish within {seconds:g} seconds: this rank waits for another one, or for "
              "its engine. The run stops; go on from its newest checkpoint", file=sys.stderr, flush=True)
        faulthandler.dump_traceback()
        os._exit(1)
    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    if seconds:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


# ---------------------------------------------------------------- to disk

def save_checkpoint(folder, networks, tokenizer, state, keep, best):
    """Write a run's models to `folder` (…/checkpoint-N), and what resuming needs to trainer/ in it.

    networks: {place in the folder: (model, optimizer)}; the policy's place is "", so that from_pretrained and
    vLLM load the folder. state: a JSON-able dict. Collective: every rank calls it. The folder is written
    beside, synced to disk and then renamed, so that a checkpoint is whole or absent; then its siblings go,
    but for the `keep` newest and checkpoint-`best`. Returns None; or, where it could not be written (a full
    disk), what went wrong: nothing has changed then.
    """
    part = os.path.join(os.path.dirname(folder), "checkpoint.part")
    master = dist.get_rank() == 0
    problem = None
    try:
        if master:
            shutil.rmtree(part, ignore_errors=True)
            os.makedirs(part)
    except OSError as error:
        problem = error
    for place, (model, optimizer) in networks.items():
        # Collectives, so on every rank, whatever has gone wrong; one rank keeps the whole weights.
        whole = {name: tensor.cpu() for name, tensor in full_weights(model) if master}
        has_steps = bool(optimizer.state)   # before its first step PyTorch would make one to find the state
        moments = get_optimizer_state_dict(model, optimizer) if has_steps else {}
        if problem := first_problem(problem):
            break
        try:
            if has_steps:
                dcp.save(moments, checkpoint_id=os.path.join(part, place, "trainer"))
            if master:
                model.hf.save_pretrained(os.path.join(part, place), state_dict=whole)
        except (OSError, SafetensorError, CheckpointException) as error:
            problem = error
    try:
        if master and not problem:
            tokenizer.save_pretrained(part)
            os.makedirs(f"{part}/trainer", exist_ok=True)
            checksums = sync_and_checksum(part)
            with open(f"{part}/trainer/state.json", "w") as file:
                json.dump(state | {"checksums": checksums}, file, indent=1)
            sync(f"{part}/trainer/state.json")
    except OSError as error:
        problem = error
    problem = first_problem(problem)
    if master and problem:
        shutil.rmtree(part, ignore_errors=True)
    elif master:
        if os.path.exists(folder):                              # left by a run that was then resumed
            shutil.rmtree(folder)
        os.rename(part, folder)
        sync(os.path.dirname(folder))                           # the new one stands, then old ones go
        for old in checkpoints(os.path.dirname(folder))[:-keep]:
            if not old.endswith(f"checkpoint-{best}"):
                shutil.rmtree(old)
    dist.barrier()
    return problem


def first_problem(problem):
    # the first rank's that has any; so that all ranks go on alike
    problems = ranks.gathered([problem and f"{type(problem).__name__}: {problem}"[:500]])
    return next(filter(None, problems), None)


def sync_and_checksum(folder):
    # {file: CRC-32} of all files in it, each of them on the disk and not in its cache alone
    checksums = {}
    for root, _, files in os.walk(folder):
        for name in files:
            path = os.path.join(root, name)
            sync(path)
            checksums[os.path.relpath(path, folder)] = checksum(path)
        sync(root)
    return checksums


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
    steps = sorted(int(name.removeprefix("checkpoint-")) for name in names)
    return [os.path.join(out_dir, f"checkpoint-{step}") for step in steps]


def damage(folder):
    """None, or what is wrong with a checkpoint: the first file that is missing, cut short or altered."""
    try:
        for name, value in load_state(folder)["checksums"].items():
            if checksum(os.path.join(folder, name)) != value:
                return f"{name} is not what was written"
    except (OSError, ValueError, KeyError) as error:
        return f"{type(error).__name__}: {error}"


def locate_run(out_dir, resume, default):
    """(the run's folder, the checkpoint to go on from or None), from the settings out_dir and resume.

    out_dir "" is the resumed checkpoint's own run, or else `default`. resume=auto passes over damaged
    checkpoints, and prints their names. Raises ValueError for a resume that is no checkpoint, damaged, or
    not the newest of its run, and for a folder that holds another run, or only damaged checkpoints.
    """
    if resume == "auto":
        if not out_dir:
            raise ValueError("resume=auto goes on from the newest checkpoint in out_dir: name an out_dir")
        found = checkpoints(out_dir) if os.path.isdir(out_dir) else []
        for folder in reversed(found):
            if not (problem := damage(folder)):
                return out_dir, folder
            print(f"{folder} is damaged and passed over: {problem}", file=sys.stderr)
        if found:
            raise ValueError(f"resume=auto: all {len(found)} checkpoints in {out_dir} are damaged")
        return out_dir, None
    if resume:
        if not os.path.isfile(os.path.join(resume, "trainer", "state.json")):
            raise ValueError(f"resume={resume}: not a checkpoint folder")
        own = os.path.dirname(os.path.abspath(resume))
        newest, goes_on = checkpoints(own)[-1], os.path.abspath(out_dir or own) == own
        if goes_on and os.path.basename(newest) != os.path.basename(os.path.abspath(resume)):
            raise ValueError(f"resume={resume}: {newest} is newer; remove it, or name a new out_dir")
        if problem := damage(resume):
            raise ValueError(f"resume={resume}: damaged: {problem}")
        if goes_on:
            return own, resume
    if os.path.isdir(out_dir) and os.listdir(out_dir):
        raise ValueError(f"out_dir={out_dir} holds another run: "
                         "name a new folder, or go on with it by --resume=auto")
    return out_dir or default, resume or None


def load_optimizer(folder, model, optimizer):
    """Put a checkpoint's optimizer state into `optimizer`, resharded to the ranks at hand. Collective."""
    if not os.path.exists(f"{folder}/trainer/.metadata"):  # it had made no step yet
        return
    state = get_optimizer_state_dict(model, optimizer)
    dcp.load(state, checkpoint_id=os.path.join(folder, "trainer"))
    set_optimizer_state_dict(model, optimizer, state)


def load_state(folder):
    """The `state` that save_checkpoint was given."""
    with open(os.path.join(folder, "trainer", "state.json")) as file:
        return json.load(file)
