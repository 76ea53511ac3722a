"""
Checkpoints: a run's models and its state on their way to disk and back.

A checkpoint is written next to its final place, synced to disk and then renamed, so it is whole or absent:

    checkpoint-60/            config, model.safetensors in float32, tokenizer: a model folder. Weights of
                              over 5 GB are model-00001-of-00003.safetensors and so on, with their index
    checkpoint-60/trainer/    optimizer (torch.distributed.checkpoint), state.json, checksums.json
    checkpoint-60/critic/     the same for PPO's critic

With lora_rank the folder holds an adapter (lora.py) instead of a model.
"""
import itertools
import json
import os
import pickle
import re
import shutil
import stat
import zlib

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from safetensors.torch import save_file
from transformers.core_model_loading import revert_weight_conversion

from runtime.safe_files import in_words, opened, remove, sync
from weights import full_weights

FILE_BYTES = 5 * 10 ** 9        # of a file of weights at most, unless one tensor has more: rank 0 holds these

# ---------------------------------------------------------------- to disk

def save_checkpoint(folder, networks, tokenizer, state, keep, eval_scores):
    """Write a run's models to `folder` (.../checkpoint-N), and what resuming needs to trainer/ inside it.

    networks: {place in the folder: (model, optimizer)}; the policy's place is "", so that from_pretrained and
    vLLM can load the folder. state: a dict that JSON can hold. Afterwards the older checkpoints go, except
    the `keep` newest and the best by eval_scores, {step: score}. Returns None, or what went wrong if the
    checkpoint could not be written (a full disk, say): the older ones then stay. A collective.
    """
    part = os.path.join(os.path.dirname(folder), "checkpoint.part")
    master = dist.get_rank() == 0
    problem = None
    try:
        if master:
            remove(part)
            os.makedirs(part)
    except OSError as error:
        problem = in_words(error)
    for place, (model, optimizer) in networks.items():
        # Without this PyTorch would make a first step of its own to find out what the state is.
        moments = get_optimizer_state_dict(model, optimizer) if optimizer.state else {}
        if problem := first_problem(problem):
            break
        tensors = full_weights(model)
        try:
            if moments:
                dcp.save(moments, checkpoint_id=os.path.join(part, place, "trainer"))
            if master:
                if adapters := getattr(model, "adapters", None):
                    adapters.save(os.path.join(part, place), dict(tensors))
                else:
                    write_model(model.hf, tensors, os.path.join(part, place))
        # On a full disk libraries raise all kinds of errors; PyTorch's own, the second, is no Exception.
        except (Exception, CheckpointException) as error:
            problem = in_words(error, part)
        # To gather them is a collective, so every rank goes through all, whatever has gone wrong.
        for _ in tensors:
            pass
    problem = first_problem(problem)
    if master and not problem:
        try:
            tokenizer.save_pretrained(part)
            write_state(part, state)
            remove(folder)                              # which may be left over from before a kill
            os.rename(part, folder)
            sync(os.path.dirname(folder))
        except Exception as error:
            problem = in_words(error, part)
    if master and problem:
        shutil.rmtree(part, ignore_errors=True)
    elif master:
        # Newer ones were damaged, or belong to a branch that was abandoned: a resumed run must not go back to
        # them.
        found = checkpoints(os.path.dirname(folder))
        here = found.index(folder)
        scored = [one for one in found[:here + 1] if number(one) in eval_scores]
        best = max(scored, key=lambda one: eval_scores[number(one)], default=None)
        for other in found[:max(0, here + 1 - keep)] + found[here + 1:]:
            if other != best:
                shutil.rmtree(other, ignore_errors=True)
    return first_problem(problem)


def write_model(hf, tensors, folder):
    # What save_pretrained writes, each file as soon as its tensors have come. tensors: (name, whole tensor)
    # of each parameter of the Hugging Face model.
    hf.save_pretrained(folder, state_dict={})                   # only the configs
    parameters = {name for name, _ in hf.named_parameters(remove_duplicate=False)}
    buffers = [(name, x) for name, x in hf.state_dict().items() if name not in parameters]
    files, held = [], {}                                        # the names in each file; what comes next

    def write():
        save_file(held, f"{folder}/{len(files)}.part", {"format": "pt"})
        files.append({name: x.nbytes for name, x in held.items()})
        held.clear()

    # Where a checkpoint's tensor is made of several parameters, these are of one layer.
    layer_of = lambda item: re.match(r".*?\.\d+\.|.*", item[0])[0]
    for _, layer in itertools.groupby(itertools.chain(tensors, buffers), layer_of):
        for name, tensor in revert_weight_conversion(hf, dict(layer)).items():
            if held and sum(x.nbytes for x in held.values()) + tensor.nbytes > FILE_BYTES:
                write()
            held[name] = tensor.cpu().contiguous()
    write()
    names = (["model.safetensors"] if len(files) == 1 else
             [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))])
    for i, name in enumerate(names):
        os.rename(f"{folder}/{i}.part", f"{folder}/{name}")
    if len(files) > 1:
        total = {"total_parameters": hf.num_parameters(), "total_size": sum(sum(x.values()) for x in files)}
        places = {key: name for name, sizes in zip(names, files) for key in sizes}
        with opened(f"{folder}/model.safetensors.index.json", "w") as file:
            json.dump({"metadata": total, "weight_map": places}, file, indent=2)


def first_problem(problem):
    # the problem of the first rank that has one, so that all ranks do the same next
    problems = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    return next(filter(None, problems), None)


def write_state(folder, state):
    # state.json, then checksums.json with the CRC-32 of every file; all of them on disk, not in its cache
    os.makedirs(f"{folder}/trainer", exist_ok=True)
    with opened(f"{folder}/trainer/state.json", "w") as file:
        # A line for each entry: easy to read, and long arrays are written fast.
        file.write("{" + ",\n".join(f"{json.dumps(key)}: {json.dumps(state[key])}" for key in state) + "}\n")
    checksums = {}
    for root, _, files in os.walk(folder):
        for name in files:
            path = os.path.join(root, name)
            sync(path)
            checksums[os.path.relpath(path, folder)] = checksum(path)
        sync(root)
    with opened(f"{folder}/trainer/checksums.json", "w") as file:
        json.dump(checksums, file, indent=1)
    sync(f"{folder}/trainer/checksums.json")
    sync(f"{folder}/trainer")


def checksum(path):
    value = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            value = zlib.crc32(block, value)
    return value


def checksum_of_rows(rows):
    """The CRC-32 of a data set's rows, by which a resumed run recognises its data."""
    value, encode = 0, json.JSONEncoder(default=str).encode
    for row in rows:
        value = zlib.crc32(encode(row).encode(), value)
    return value


# ---------------------------------------------------------------- and back

def checkpoints(out_dir):
    """The checkpoint-N folders of a run, oldest first."""
    names = [name for name in os.listdir(out_dir) if re.fullmatch(r"checkpoint-\d+", name)]
    return [os.path.join(out_dir, name) for name in sorted(names, key=number)]


def number(folder):
    return int(folder.rpartition("-")[2])


def damage(folder):
    """What is wrong with a checkpoint, by its first file that is missing, foreign or altered; or None.

    Only regular files count, and each has to be listed, except rollouts.jsonl, which older runs wrote.
    """
    found = {os.path.relpath(os.path.join(root, name), folder)
             for root, folders, files in os.walk(folder) for name in [*files, *folders]
             if name in files or os.path.islink(os.path.join(root, name))}
    try:
        for name in found:
            if not stat.S_ISREG(os.lstat(os.path.join(folder, name)).st_mode):
                return f"{name} is not a regular file"
        with open(os.path.join(folder, "trainer", "checksums.json")) as file:
            listed = json.load(file)
        if not isinstance(listed, dict):
            return "checksums.json is not a list of files"
        for name in sorted(found - listed.keys() - {"trainer/checksums.json", "rollouts.jsonl"}):
            return f"{name} is not listed in checksums.json"
        for name, value in listed.items():
            if name not in found:
                return f"{name} is missing"
            if checksum(os.path.join(folder, name)) != value:
                return f"{name} is not what was written"
    except OSError as error:
        return in_words(error)
    except (ValueError, RecursionError) as error:
        return f"trainer/checksums.json: {type(error).__name__}: {error}"


# What the description of an optimizer's state may name. A pickle that names anything else could run code.
NAMED = {("pathlib", "PosixPath"), ("torch", "Size"), ("torch.serialization", "_get_layout"),
         ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
         *(("torch.distributed.checkpoint.metadata", name) for name in (
             "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
             "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"))}


# Python's own unpickler, because in the one in C no instruction can be refused.
class KnownNames(pickle._Unpickler):
    def load_build(self):
        # It would set the attributes of a class, for all of the process.
        if callable(self.stack[-2]):
            raise ValueError("it changes a type")
        super().load_build()

    dispatch = pickle._Unpickler.dispatch | {pickle.BUILD[0]: load_build}

    def find_class(self, module, name):
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if (module, name) not in NAMED and not is_dtype:
            raise ValueError(f"it names {module}.{name}, which a checkpoint of this project never does")
        return super().find_class(module, name)


class CheckedReader(dcp.FileSystemReader):
    def __init__(self, folder):
        super().__init__(folder)
        with open(os.path.join(folder, ".metadata"), "rb") as file:
            self.metadata = KnownNames(file).load()
        for info in self.metadata.storage_data.values():
            if info.relative_path != os.path.basename(info.relative_path):
                raise ValueError(f"it names {info.relative_path}, which is not in its folder")

    def read_metadata(self, *_, **__):
        return self.metadata


class PlainBytes(dcp.DefaultLoadPlanner):
    def load_bytes(self, read_item, value):
        # PyTorch reads these with weights_only=False. Where this passes, that is harmless.
        torch.load(value, weights_only=True)
        value.seek(0)
        super().load_bytes(read_item, value)


def load_optimizer(folder, model, optimizer):
    """Put a checkpoint's optimizer state into `optimizer`, resharded to the ranks at hand. A collective.

    The optimizer keeps the learning rate, betas and weight decay that it was made with: settings may change.
    A checkpoint may come from a stranger: ValueError if its files could run code when they are read.
    """
    # Before its first step an optimizer has nothing to save.
    if not os.path.exists(f"{folder}/trainer/.metadata"):
        return
    made_with = [{key: value for key, value in group.items() if key != "params"}
                 for group in optimizer.param_groups]
    state = get_optimizer_state_dict(model, optimizer)
    try:
        reader = CheckedReader(os.path.join(folder, "trainer"))
        saved = {name: sum(f"state.{name}.{key}" in reader.metadata.state_dict_metadata for key in moments)
                 for name, moments in state["state"].items()}
        # Parameters that no text reaches never get a gradient, and so have no state; but none has half of it.
        if not any(saved.values()) or any(0 < saved[name] < len(state["state"][name]) for name in saved):
            raise ValueError("it is not that of this model's parameters")
        dcp.load(state, storage_reader=reader, planner=PlainBytes(allow_partial_load=True))
    # PyTorch's own error is no Exception.
    except (Exception, CheckpointException) as error:
        raise ValueError(f"resume={folder}: its optimizer's state cannot be read: {error!r:.300}") from error
    set_optimizer_state_dict(model, optimizer, state)
    for group, values in zip(optimizer.param_groups, made_with):
        group |= values


def load_state(folder):
    """The `state` that save_checkpoint was given by a run. Raises ValueError if no run writes such a one."""
    path = os.path.join(folder, "trainer", "state.json")
    try:
        with open(path) as file:
            state = json.load(file)
        counts = [state[key] for key in ("step", "position", "num_tokens", "world_size")]
        counts += state["skipped_updates"].values()
        if any(type(count) is not int or count < 0 for count in counts):
            raise ValueError(f"counts of {counts!r:.200}")
        if not isinstance(state["settings"], dict) or not isinstance(state["checksums"], dict):
            raise ValueError("no settings or no checksums")
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not what a run writes: {error!r:.300}") from error
    return state
