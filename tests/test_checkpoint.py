"""Folders and checkpoints of strangers: nothing is overwritten, nothing of theirs is run."""
import dataclasses
import json
import os
import pathlib
import pickle
import shutil
import time

import pytest
import torch
import torch.distributed.checkpoint as dcp

from runs import begin, finish
from runtime import checkpoint
from runtime.run_log import RunLog

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class Evil:
    """Unpickled, it makes a file."""
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return torch.nn.Linear(4, 4)


@pytest.fixture
def saved(mesh, model, tmp_path):
    """The optimizer of a model after one step, in tmp_path/checkpoint-1/trainer."""
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    os.makedirs(tmp_path / "checkpoint-1" / "trainer")
    dcp.save(checkpoint.get_optimizer_state_dict(model, optimizer),
             checkpoint_id=str(tmp_path / "checkpoint-1" / "trainer"))
    optimizer.zero_grad()
    return str(tmp_path / "checkpoint-1"), optimizer


def test_our_own_optimizer_is_read(saved, model):
    folder, optimizer = saved
    fresh = torch.optim.AdamW(model.parameters(), 0.5, weight_decay=0.25)
    checkpoint.load_optimizer(folder, model, fresh)
    for parameter in model.parameters():
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(fresh.state[parameter][name], optimizer.state[parameter][name])
    # The settings rule.
    assert fresh.param_groups[0]["lr"] == 0.5 and fresh.param_groups[0]["weight_decay"] == 0.25


def test_a_forged_description_runs_no_code(saved, model, tmp_path):
    folder, optimizer = saved
    with open(f"{folder}/trainer/.metadata", "wb") as file:
        pickle.dump(Evil(tmp_path / "owned"), file)
    with pytest.raises(ValueError, match="names posix.mkdir"):
        checkpoint.load_optimizer(folder, model, torch.optim.AdamW(model.parameters(), 0.1))
    assert not os.path.exists(tmp_path / "owned")


def test_a_forged_description_changes_no_class(saved, model):
    folder, optimizer = saved
    # protocol 4: the class pathlib.PosixPath, the state (None, {"exists": PosixPath}), BUILD, STOP
    name = b"\x8c\x07pathlib\x8c\x09PosixPath\x93"
    forged = b"\x80\x04" + name + b"N}\x8c\x06exists" + name + b"s\x86b."
    exists = pathlib.PosixPath.exists
    with open(f"{folder}/trainer/.metadata", "wb") as file:
        file.write(forged)
    with pytest.raises(ValueError, match="it changes a type"):
        checkpoint.load_optimizer(folder, model, optimizer)
    assert pathlib.PosixPath.exists is exists


@pytest.mark.parametrize("lacking", ["exp_avg_sq", ""])
def test_a_description_that_lacks_moments_is_refused(saved, model, lacking):
    """Half of a parameter's state, or that of all parameters."""
    folder, optimizer = saved
    with open(f"{folder}/trainer/.metadata", "rb") as file:
        metadata = pickle.load(file)
    first = next(key for key in metadata.state_dict_metadata if key.endswith("exp_avg_sq"))
    metadata.state_dict_metadata = {
        key: value for key, value in metadata.state_dict_metadata.items()
        if key != first and (lacking or not key.startswith("state."))}
    with open(f"{folder}/trainer/.metadata", "wb") as file:
        pickle.dump(metadata, file)
    with pytest.raises(ValueError, match="not that of this model's parameters"):
        checkpoint.load_optimizer(folder, model, optimizer)


@pytest.mark.parametrize("path", ["../__0_0.distcp", "/dev/zero"])
def test_a_forged_description_names_no_other_file(saved, model, path):
    folder, optimizer = saved
    with open(f"{folder}/trainer/.metadata", "rb") as file:
        metadata = pickle.load(file)
    metadata.storage_data = {index: dataclasses.replace(info, relative_path=path)
                             for index, info in metadata.storage_data.items()}
    with open(f"{folder}/trainer/.metadata", "wb") as file:
        pickle.dump(metadata, file)
    with pytest.raises(ValueError, match=f"it names {path}, which is not in its folder"):
        checkpoint.load_optimizer(folder, model, optimizer)


def test_a_forged_entry_runs_no_code(mesh, model, tmp_path):
    """DCP stores what is no tensor as pickled bytes, which it would read without weights_only."""
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    state = checkpoint.get_optimizer_state_dict(model, optimizer)
    state["param_groups"][0]["lr"] = Evil(tmp_path / "owned")
    os.makedirs(tmp_path / "checkpoint-1" / "trainer")
    dcp.save(state, checkpoint_id=str(tmp_path / "checkpoint-1" / "trainer"))
    with pytest.raises(ValueError, match="optimizer's state cannot be read"):
        checkpoint.load_optimizer(str(tmp_path / "checkpoint-1"), model, optimizer)
    assert not os.path.exists(tmp_path / "owned")


# ---------------------------------------------------------------- what a checkpoint consists of

@pytest.fixture
def whole(tmp_path):
    folder = tmp_path / "run" / "checkpoint-1"
    os.makedirs(folder / "trainer")
    (folder / "config.json").write_text("{}")
    checkpoint.write_state(str(folder), {"step": 1})
    assert checkpoint.damage(str(folder)) is None
    return folder


def test_rollouts_may_come_later(whole):
    (whole / "rollouts.jsonl").write_text("{}\n")
    assert checkpoint.damage(str(whole)) is None


def replaced(path, make):
    os.remove(path)
    make(path)


@pytest.mark.parametrize("harm, problem", [
    (lambda f: os.remove(f / "config.json"), "config.json is missing"),
    (lambda f: (f / "modeling.py").write_text("import os"), "modeling.py is not listed"),
    (lambda f: os.symlink("/etc/hostname", f / "extra"), "extra is not a regular file"),
    (lambda f: os.symlink("/etc", f / "folder"), "folder is not a regular file"),
    (lambda f: replaced(f / "config.json", os.mkfifo), "config.json is not a regular file"),
    (lambda f: replaced(f / "trainer/checksums.json", os.mkfifo), "checksums.json is not a regular file"),
    (lambda f: replaced(f / "trainer/checksums.json", lambda path: os.symlink("/dev/zero", path)),
     "checksums.json is not a regular file"),
    (lambda f: (f / "trainer/checksums.json").write_text("[" * 100_000), "Error"),
    (lambda f: (f / "trainer/checksums.json").write_text("[]"), "not a list of files"),
    (lambda f: (f / "trainer/checksums.json").write_text(json.dumps({"../../../etc/passwd": 1})),
     "config.json is not listed"),
    (lambda f: (f / "config.json").write_text("{ }"), "config.json is not what was written")])
def test_what_is_wrong_is_said_and_nothing_hangs(whole, harm, problem):
    harm(whole)
    assert problem in checkpoint.damage(str(whole))


# ---------------------------------------------------------------- folders

LOCATE = """
import os, sys, time
from runtime import checkpoint
out_dir, go, end = sys.argv[1:]
while not os.path.exists(go):
    pass
folder, _ = checkpoint.locate_run("", "", out_dir)
print(folder, flush=True)
while not os.path.exists(end):
    time.sleep(0.01)
"""


def test_runs_that_begin_in_the_same_second_have_folders_of_their_own(tmp_path):
    (tmp_path / "locate.py").write_text(LOCATE)
    logs, places = [tmp_path / f"log {n}" for n in range(3)], [tmp_path / "go", tmp_path / "end"]
    processes = [begin(log, tmp_path / "locate.py", tmp_path / "out" / "grpo", *places) for log in logs]
    time.sleep(0.2)
    (tmp_path / "go").touch()
    deadline = time.monotonic() + 60
    while not all(log.exists() and log.read_text() for log in logs) and time.monotonic() < deadline:
        time.sleep(0.01)
    (tmp_path / "end").touch()
    folders = [finish(some, log).strip() for some, log in zip(processes, logs)]
    assert sorted(folders) == [str(tmp_path / "out" / name) for name in ("grpo", "grpo-2", "grpo-3")]


@pytest.mark.parametrize("resume", ["", "auto"])
def test_what_is_no_run_is_left_alone(tmp_path, resume):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="holds config.json and is not the folder of a run"):
        checkpoint.locate_run(str(tmp_path), resume, "out/x")
    assert os.listdir(tmp_path) == ["config.json"]


def test_a_name_may_have_a_tilde_and_slashes(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert checkpoint.locate_run("~/run//", "auto", "out/x") == (str(tmp_path / "run"), None)
    checkpoint.LOCKS.clear()                                    # as at the end of a process
    assert checkpoint.locate_run("~/run/", "auto", "out/x") == (str(tmp_path / "run"), None)


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    for out_dir in (tmp_path / "file", tmp_path / "file" / "run", "/proc/run", tmp_path / ("x" * 300)):
        with pytest.raises(ValueError, match="out_dir="):
            checkpoint.locate_run(str(out_dir), "", "out/x")


@pytest.mark.parametrize("name", [
    ".lock", "config.json", "metrics.jsonl", "metrics.jsonl.part", "samples.jsonl", "samples.jsonl.part",
    "test_checkpoint.py"])
def test_links_and_pipes_are_not_followed(mesh, tmp_path, name):
    (tmp_path / "precious").write_text('{"step": 0}\n')
    os.makedirs(tmp_path / "run")
    (tmp_path / "run" / ".lock").touch()
    (tmp_path / "run" / "metrics.jsonl").touch()
    (tmp_path / "run" / "samples.jsonl").touch()
    place = tmp_path / "run" / name
    for plant, word in ((lambda: place.symlink_to(tmp_path / "precious"), "it is a link"),
                        (lambda: os.mkfifo(place), "not a regular file|No such device")):
        place.unlink(missing_ok=True)
        plant()
        with pytest.raises(ValueError, match=f"out_dir=.*{name}: .*({word})"):
            checkpoint.locate_run(str(tmp_path / "run"), "auto", "out/x")
            RunLog(str(tmp_path / "run"), __file__, {"sample_interval": 1}, 0, 1)
        checkpoint.LOCKS.clear()
    assert (tmp_path / "precious").read_text() == '{"step": 0}\n'


def test_an_error_without_words_is_an_error(mesh, whole, monkeypatch):
    """A save that fails with an empty message (MemoryError) must not count as a checkpoint."""
    def fails(*_, **__):
        raise MemoryError
    hf = type("HF", (), {"named_parameters": lambda self, remove_duplicate=True: [],
                         "state_dict": lambda self: {}, "save_pretrained": fails})()
    network = type("Network", (), {"hf": hf, "reshard": lambda self: None})()
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    folder = str(whole.parent / "checkpoint-2")
    problem = checkpoint.save_checkpoint(folder, {"": (network, optimizer)}, None, {"step": 2}, 2, {})
    assert "MemoryError" in problem and not os.path.exists(folder)
    assert checkpoint.checkpoints(str(whole.parent)) == [str(whole)]
    shutil.rmtree(whole)
