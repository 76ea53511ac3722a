"""Weights on the move: from the trainer to the engine, to disk, and back."""
import contextlib
import faulthandler
import fcntl
import json
import os
import re
import shutil
import sys
import threading
import time
import zlib

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from transformers.core_model_loading import revert_weight_conversion

import ranks

# ---------------------------------------------------------------- to the engine


def full_weights(policy, dtype=None, names=None):
    """Yield (name, whole tensor) one parameter at a time, cast to dtype where given.

    Gathering a sharded parameter is a collective: every rank has to run through the whole iterator. Beside
    the shards it takes about two copies of the largest parameter: the gathered pieces, and the whole.
    names  None        each parameter once, under its name in the module
           module      a head that shares the embedding's weight is yielded under its own name, too
           checkpoint  that, and the names of a checkpoint: what the module stores fused (the experts of a
                       mixture-of-experts layer) comes apart. vLLM wants those; its CPU build keeps a packed
                       copy of a tied head and refreshes it by that name only
    """
    policy.reshard()  # after a forward without backward FSDP2 leaves the root's parameters gathered
    for name, parameter in policy.hf.named_parameters(remove_duplicate=names is None):
        shard = parameter.detach().to(dtype) if dtype else parameter.detach()   # cast first: less to gather
        tensor = shard.full_tensor()
        if names == "checkpoint":
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
        if torch.cuda.is_available():
            torch.cuda.synchronize()                            # what the block has only launched, too
    finally:
        timer.cancel()


# ---------------------------------------------------------------- to disk

def save_checkpoint(folder, networks, tokenizer, state, keep, eval_scores):
    """Write a run's models to `folder` (…/checkpoint-N), and what resuming needs to trainer/ in it.

    networks: {place in the folder: (model, optimizer)}; the policy's place is "", so that from_pretrained and
    vLLM load the folder. state: a JSON-able dict. Collective: every rank calls it. The folder is written
    beside, synced to disk and then renamed, so that a checkpoint is whole or absent; then its siblings go,
    but for the `keep` newest and the best by eval_scores, {step: score}. Returns None; or, where it could not
    be written (a full disk), what went wrong: the older ones stand then.
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
                names = {name for name, _ in model.hf.named_parameters(remove_duplicate=False)}
                buffers = {name: x for name, x in model.hf.state_dict().items() if name not in names}
                model.hf.save_pretrained(os.path.join(part, place), state_dict=whole | buffers)
        except (Exception, CheckpointException) as error:   # for a full disk libraries raise all kinds, and
            problem = str(error)[-300:]                         # the second, PyTorch's own, is no Exception
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
        # Newer ones were damaged or are of a timeline that was left: a resumed run must not go back to them.
        found = checkpoints(os.path.dirname(folder))
        here = found.index(folder)
        scored = [one for one in found[:here + 1] if number(one) in eval_scores]
        best = max(scored, key=lambda one: eval_scores[number(one)], default=None)
        for other in found[:max(0, here + 1 - keep)] + found[here + 1:]:
            if other != best:
                shutil.rmtree(other, ignore_errors=True)
    return first_problem(problem)


def first_problem(problem):
    # the first rank's that has any, so that all ranks go on alike
    return next(filter(None, ranks.gathered([problem])), None)


def write_state(folder, state):
    # state.json, then checksums.json with the CRC-32 of every file; all of them on the disk, not in its cache
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
    if os.path.exists(folder):                                  # left by a run that was then resumed
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
    """None, or what is wrong with a checkpoint: the first file that is missing, cut short or altered."""
    try:
        with open(os.path.join(folder, "trainer", "checksums.json")) as file:
            checksums = json.load(file)
        for name, value in checksums.items():
            if checksum(os.path.join(folder, name)) != value:
                return f"{name} is not what was written"
    except (OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


LOCKS = {}  # folder: open file, whose lock lasts as long as the process


def claim(out_dir, patience=600):
    """Keep other runs out of a folder while this process lives.

    Waits `patience` seconds for one that is in it, such as the workers of a torchrun that was killed, which
    live on until the end of their step; then raises ValueError.
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
    raise ValueError(f"out_dir={out_dir}: another run is writing there")


def locate_run(out_dir, resume, default):
    """(the run's folder, the checkpoint to go on from or None), from the settings out_dir and resume.

    out_dir "" is the resumed checkpoint's own run, or else `default`; any other folder is claimed.
    resume=auto passes over damaged checkpoints, and prints their names. Raises ValueError for a resume that
    is no checkpoint, damaged, or not the newest of its run, and for a folder that holds another run, or
    nothing but damaged checkpoints.
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
        claim(folder)                                           # before looking into it: a run may be ending
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
