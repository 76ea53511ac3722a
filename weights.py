"""Weights on the move: from the trainer to the engine, to disk, and back."""
import json
import os
import re
import shutil

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict


def full_weights(policy, dtype=None, tied=False):
    """Yield (checkpoint name, whole tensor) one parameter at a time, cast to dtype where given.

    Gathering a sharded parameter is a collective: every rank has to run through the whole
    iterator. At most one whole parameter exists beside the shards. tied: yield a head that
    shares the embedding's weight under its own name too. Engines want that: vLLM's CPU build
    keeps a packed copy of the head and refreshes it by that name only.
    """
    policy.reshard()  # after a forward without backward FSDP2 leaves the root's parameters gathered
    for name, parameter in policy.hf.named_parameters(remove_duplicate=not tied):
        tensor = parameter.detach().full_tensor()
        yield name, tensor.to(dtype) if dtype else tensor


def save_checkpoint(folder, policy, optimizer, tokenizer, state, keep, critic=None, critic_optimizer=None):
    """Write the model to `folder` (…/checkpoint-N), and what resuming needs to trainer/ and critic/ in it.

    from_pretrained and vLLM load the folder. state: a JSON-able dict. Collective: every rank calls it. The
    folder is written beside, synced to disk and then renamed, so that a checkpoint is whole or absent; after
    that only the `keep` newest of its siblings stay.
    """
    part = folder + ".part"
    master = dist.get_rank() == 0
    if master:
        shutil.rmtree(part, ignore_errors=True)
        os.makedirs(part)
    dist.barrier()
    networks = [(policy, optimizer, part)]
    if critic:
        networks.append((critic, critic_optimizer, f"{part}/critic"))
    for model, its_optimizer, place in networks:
        whole = {name: tensor.cpu() for name, tensor in full_weights(model) if master}  # one rank keeps them
        if its_optimizer.state:  # asked before its first step, PyTorch would make one, and shift Adam's count
            dcp.save(get_optimizer_state_dict(model, its_optimizer), checkpoint_id=f"{place}/trainer")
        if master:
            model.hf.save_pretrained(place, state_dict=whole)
    if master:
        tokenizer.save_pretrained(part)
        os.makedirs(f"{part}/trainer", exist_ok=True)
        with open(f"{part}/trainer/state.json", "w") as file:
            json.dump(state, file, indent=1)
        for root, _, files in os.walk(part):
            for name in files:
                fsync(os.path.join(root, name))
            fsync(root)
        if os.path.exists(folder):                              # left by a run that was then resumed
            shutil.rmtree(folder)
        os.rename(part, folder)
        fsync(os.path.dirname(folder))                          # the new one stands, then an old one goes
        for old in checkpoints(os.path.dirname(folder))[:-keep]:
            shutil.rmtree(old)
    dist.barrier()


def fsync(path):
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def checkpoints(out_dir):
    """The checkpoint-N folders of a run, oldest first."""
    names = [name for name in os.listdir(out_dir) if re.fullmatch(r"checkpoint-\d+", name)]
    steps = sorted(int(name.removeprefix("checkpoint-")) for name in names)
    return [os.path.join(out_dir, f"checkpoint-{step}") for step in steps]


def locate_run(out_dir, resume, default):
    """(the run's folder, the checkpoint to go on from or None), from the settings out_dir and resume.

    out_dir "" is the resumed checkpoint's own run, or else `default`. Raises ValueError for a resume that is
    no checkpoint or not the newest of its run, and for a folder that holds another run.
    """
    if resume == "auto" and not out_dir:
        raise ValueError("resume=auto goes on from the newest checkpoint in out_dir: name an out_dir")
    if resume not in ("", "auto"):
        if not os.path.isfile(os.path.join(resume, "trainer", "state.json")):
            raise ValueError(f"resume={resume}: not a checkpoint folder")
        own = os.path.dirname(os.path.abspath(resume))
        if os.path.abspath(out_dir or own) == own:
            if os.path.basename(newest := checkpoints(own)[-1]) != os.path.basename(os.path.abspath(resume)):
                raise ValueError(f"resume={resume}: {newest} is newer; remove it, or name a new out_dir")
            return own, resume
    taken = os.path.isdir(out_dir) and bool(os.listdir(out_dir))
    if taken and resume != "auto":
        raise ValueError(f"out_dir={out_dir} holds another run: "
                         "name a new folder, or go on with it by --resume=auto")
    if resume == "auto":
        return out_dir, (checkpoints(out_dir) or [None])[-1] if taken else None
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


def rewind_log(path, step):
    """Drop the lines of a .jsonl log that speak of `step` or later: a resumed run writes them again."""
    if os.path.exists(path):
        with open(path) as file:
            lines = [line for line in file if line.endswith("\n") and json.loads(line)["step"] < step]
        with open(path + ".part", "w") as file:
            file.writelines(lines)
        os.replace(path + ".part", path)
