"""Folders and checkpoints of strangers: nothing is overwritten, nothing of theirs is run."""
import errno
import os
import shutil
import sys
import time

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import fully_shard

from model import load_policy
from runs import begin, finish
from runtime import checkpoint, metrics
from runtime.model_folder import load_tokenizer
from tiny import pretrain

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@pytest.fixture
def model(mesh):
    torch.manual_seed(0)
    return fully_shard(torch.nn.Linear(4, 4), mesh=mesh)


@pytest.fixture
def saved(model, tmp_path):
    """The optimizer of a model after one step, and the folder tmp_path/checkpoint-1 that holds its state."""
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    os.makedirs(tmp_path / "checkpoint-1" / "trainer")
    checkpoint.save_optimizer(str(tmp_path / "checkpoint-1" / "trainer"), model, optimizer)
    return str(tmp_path / "checkpoint-1"), optimizer


def test_our_own_optimizer_is_read(saved, model):
    folder, optimizer = saved
    fresh = torch.optim.AdamW(model.parameters(), 0.5, weight_decay=0.25)
    checkpoint.load_optimizer(folder, model, fresh)
    for parameter in model.parameters():
        assert fresh.state[parameter]["step"] == 1
        for name in ("exp_avg", "exp_avg_sq"):
            ours, theirs = fresh.state[parameter][name], optimizer.state[parameter][name]
            assert theirs.full_tensor().any() and torch.equal(ours.full_tensor(), theirs.full_tensor())
    # The settings rule.
    assert fresh.param_groups[0]["lr"] == 0.5 and fresh.param_groups[0]["weight_decay"] == 0.25


@pytest.mark.parametrize("make", [
    lambda w, b: torch.optim.AdamW([{"params": [b], "weight_decay": 0.0}, {"params": [w]}], 0.1),
    lambda w, b: torch.optim.AdamW([w, b], 0.1, amsgrad=True),
    lambda w, b: torch.optim.SGD([b, w], 0.1, momentum=0.9)])
def test_any_optimizer_goes_on_where_it_stopped(model, tmp_path, make):
    """Whatever it keeps, and however it groups its parameters."""
    os.makedirs(tmp_path / "trainer")
    again, finals = make(*model.parameters()), []
    start = [p.full_tensor().clone() for p in model.parameters()]
    for optimizer in (make(*model.parameters()), again):
        if optimizer is again:
            checkpoint.load_optimizer(str(tmp_path), model, again)
        for step in range(optimizer is again, 2):
            model(torch.arange(4.0)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if (step, optimizer is again) == (0, False):
                checkpoint.save_optimizer(str(tmp_path / "trainer"), model, optimizer)
                after_one = [p.full_tensor().clone() for p in model.parameters()]
        finals.append([p.full_tensor().clone() for p in model.parameters()])
        with torch.no_grad():
            for p, value in zip(model.parameters(), after_one):
                p.to_local().copy_(value)
    for ours, theirs, before in zip(*finals, start):
        assert torch.equal(ours, theirs) and not torch.equal(ours, before)


class Halves(torch.optim.SGD):
    """Keeps its momentum in bfloat16."""

    def step(self):
        super().step()
        for state in self.state.values():
            state["momentum_buffer"] = state["momentum_buffer"].bfloat16()


def test_what_an_optimizer_keeps_has_the_same_dtype_after_a_resume(saved, model):
    folder, _ = saved
    optimizer = Halves(model.parameters(), 0.1, 0.9)
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    checkpoint.save_optimizer(f"{folder}/trainer", model, optimizer)
    again = Halves(model.parameters(), 0.1, 0.9)
    checkpoint.load_optimizer(folder, model, again)
    for parameter, state in optimizer.state.items():
        value = again.state[parameter]["momentum_buffer"]
        assert value.dtype == torch.bfloat16 and value.device == parameter.device
        assert torch.equal(value.full_tensor(), state["momentum_buffer"].full_tensor()) and value.full_tensor().any()


def test_a_number_that_is_no_tensor_is_kept(saved, model):
    """Optimizers of other packages count their steps in one."""
    folder, optimizer = saved
    for state in optimizer.state.values():
        state["step"] = 3
    checkpoint.save_optimizer(f"{folder}/trainer", model, optimizer)
    again = torch.optim.AdamW(model.parameters(), 0.1)
    checkpoint.load_optimizer(folder, model, again)
    assert [state["step"] for state in again.state.values()] == [3, 3]


@pytest.mark.parametrize("kept", [torch.ones(4), torch.ones(4, 1), torch.ones(1)])
def test_what_could_not_be_resumed_is_not_saved(saved, model, kept):
    folder, optimizer = saved
    optimizer.state[model.weight]["row_var"] = kept
    with pytest.raises(ValueError, match="^AdamW keeps row_var of weight neither as a number nor in its shape"):
        checkpoint.save_optimizer(f"{folder}/trainer", model, optimizer)


def test_another_optimizer_is_named(saved, model):
    folder, optimizer = saved
    with pytest.raises(ValueError, match="AdamW has written it: use that, or begin with"):
        checkpoint.load_optimizer(folder, model, torch.optim.SGD(model.parameters(), 0.1))
    # Earlier commits have not written which one it is.
    path = f"{folder}/trainer/optimizer-00000.safetensors"
    save_file(load_file(path), path)
    checkpoint.load_optimizer(folder, model, optimizer)


def test_one_that_has_made_no_step_is_read(model, tmp_path):
    os.makedirs(tmp_path / "trainer")
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    checkpoint.save_optimizer(str(tmp_path / "trainer"), model, optimizer)
    checkpoint.load_optimizer(str(tmp_path), model, optimizer)
    assert not optimizer.state


@pytest.mark.parametrize("change", [
    lambda moments: moments.update({"weights.exp_avg": torch.ones(4, 4)}),
    lambda moments: moments.update({"weight.exp_avg": torch.ones(4, 3)}),
    # These would be repeated until they fit.
    lambda moments: moments.update({"weight.exp_avg": torch.ones(4, 1)}),
    lambda moments: moments.update({"weight.exp_avg": torch.ones(1, 4)}),
    lambda moments: moments.update({"weight.exp_avg": torch.ones(4)}),
    lambda moments: moments.update({"bias.exp_avg": torch.ones(1)})])
def test_moments_of_another_model_are_refused(saved, model, change):
    """One belongs to no parameter of this model, or has another shape."""
    folder, optimizer = saved
    moments = load_file(f"{folder}/trainer/optimizer-00000.safetensors")
    change(moments)
    save_file(moments, f"{folder}/trainer/optimizer-00000.safetensors")
    with pytest.raises(ValueError, match=f"resume={folder}: its optimizer's state cannot be read"):
        checkpoint.load_optimizer(folder, model, optimizer)


# ---------------------------------------------------------------- what a checkpoint consists of

@pytest.fixture
def whole(tmp_path):
    folder = tmp_path / "run" / "checkpoint-1"
    os.makedirs(folder / "trainer")
    for name in ("config.json", "tokenizer_config.json"):
        (folder / name).write_text("{}")
    checkpoint.write_state(str(folder), {"step": 1})
    return folder


@pytest.mark.parametrize("umask, mode", [(0o022, 0o644), (0o027, 0o640), (0o002, 0o664)])
def test_files_have_the_mode_of_ordinary_ones(folder, mesh, tmp_path, umask, mode):
    """safetensors gives its files 0600, which on a shared disk lets nobody else load a checkpoint."""
    policy = load_policy(folder, mesh, torch.float32, adapter=(2, 0, None) if umask == 0o022 else None)
    optimizer = torch.optim.AdamW(policy.parameters())
    saved, before = str(tmp_path / "checkpoint-1"), os.umask(umask)
    try:
        arrays = {"kept": np.zeros(2, np.float32)}
        checkpoint.save_checkpoint(saved, {"": (policy, optimizer)}, load_tokenizer(folder), {"eval_scores": {}}, 1,
                                   arrays)
    finally:
        os.umask(before)
    files = [path for path in (tmp_path / "checkpoint-1").rglob("*") if path.is_file()]
    assert any("model.safetensors" in path.name for path in files)
    assert {oct(path.stat().st_mode & 0o777) for path in files} == {oct(mode)}


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


@pytest.mark.parametrize("number", checkpoint.UNSUPPORTED)
@pytest.mark.parametrize("operation, kind", [("fsync", "folder"), ("fsync", "file"), ("chmod", "file")])
def test_a_file_system_need_not_have_every_operation(folder, mesh, tmp_path, monkeypatch, number, operation, kind):
    """The checkpoint is whole, and no descriptor stays open. A full disk is another thing."""
    do, errors = getattr(os, operation), [number]

    def refuse(path, *rest, **more):
        if os.path.isdir(path if operation == "chmod" else f"/proc/self/fd/{path}") == (kind == "folder"):
            raise OSError(errors[-1], os.strerror(errors[-1]))
        return do(path, *rest, **more)

    def save(step):
        networks = {"": (load_policy(folder, mesh, torch.float32), None)}
        checkpoint.save_checkpoint(f"{tmp_path}/checkpoint-{step}", networks, load_tokenizer(folder),
                                   {"eval_scores": {}}, 2)

    save(1)
    opened = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, operation, refuse)
    save(2)
    metrics.append(str(tmp_path / "log.jsonl"), [{"step": 1}])
    assert len(os.listdir("/proc/self/fd")) == opened and (tmp_path / "log.jsonl").read_text() == '{"step": 1}\n'
    ours, theirs = (load_file(tmp_path / f"checkpoint-{step}/model.safetensors") for step in (2, 1))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
    errors.append(errno.ENOSPC)
    with pytest.raises(OSError):
        save(3)
    assert len([*tmp_path.glob("checkpoint*")]) == 2


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
    assert len({*folders}) == 3 and all(folder.startswith(f"{tmp_path}/out/grpo-") for folder in folders)


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
        with pytest.raises(OSError, match=f"'{out_dir}"):
            checkpoint.locate_run(str(out_dir), "", "out/x")


def test_only_the_newest_stay_where_none_was_evaluated(folder, mesh, tmp_path):
    networks, tokenizer = {"": (load_policy(folder, mesh, torch.float32), None)}, load_tokenizer(folder)
    save = lambda step, scores: checkpoint.save_checkpoint(
        str(tmp_path / f"checkpoint-{step}"), networks, tokenizer, {"eval_scores": scores}, 1)
    for step, scores, kept in ((1, {}, [1]), (2, {"0": 1.0}, [2]), (3, {"2": 0.0}, [2, 3])):
        save(step, scores)
        assert [*map(checkpoint.step_of, checkpoint.checkpoints(str(tmp_path)))] == kept


def test_a_network_without_an_optimizer_is_saved_and_has_to_come_from_its_checkpoint(folder, mesh, tmp_path):
    saved, load = str(tmp_path / "checkpoint-1"), lambda path: load_policy(path, mesh, torch.float32)
    policy, average = load(folder), load(folder)
    average.hf.get_input_embeddings().weight.data.mul_(2)
    optimizer = torch.optim.AdamW(policy.parameters())
    networks = {"": (policy, optimizer), "average": (average, None)}
    checkpoint.save_checkpoint(saved, networks, load_tokenizer(folder), {"eval_scores": {}}, 1)
    assert not os.path.exists(f"{saved}/average/trainer")
    policy, again = load(saved), load(f"{saved}/average")
    for ours, theirs in zip(again.parameters(), average.parameters()):
        assert torch.equal(ours.full_tensor(), theirs.full_tensor())
    checkpoint.load_optimizers(saved, {"": (policy, optimizer), "average": (again, None)})
    for place, network in (("average", load(folder)), ("other", again)):
        with pytest.raises(ValueError, match=rf"the model {place or 'actor'} was loaded from .*, not .*/{place}"):
            checkpoint.load_optimizers(saved, {"": (policy, optimizer), place: (network, None)})


def test_an_error_without_words_is_an_error(mesh, whole, monkeypatch):
    """A save that fails with an empty message (MemoryError) must not count as a checkpoint."""
    def fails(*_, **__):
        raise MemoryError
    network = type("Network", (), {"save": fails})()
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    folder = str(whole.parent / "checkpoint-2")
    monkeypatch.setattr(checkpoint, "save_optimizer", lambda *_: None)
    with pytest.raises(MemoryError):
        checkpoint.save_checkpoint(folder, {"": (network, optimizer)}, None, {"step": 2}, 2)
    assert not os.path.exists(folder) and not os.path.exists(whole.parent / "checkpoint.part")
    assert checkpoint.checkpoints(str(whole.parent)) == [str(whole)]
    shutil.rmtree(whole)


# ---------------------------------------------------------------- operations that fail

def failing(*_, **__):
    raise OSError(5, "Input/output error")


@pytest.mark.parametrize("operation", ["unlink", "rename"])
def test_what_cannot_be_removed_is_a_whole_checkpoint_or_none(tmp_path, monkeypatch, operation):
    for step in range(1, 5):
        os.makedirs(tmp_path / f"checkpoint-{step}" / "trainer")
        (tmp_path / f"checkpoint-{step}" / "trainer" / "state.json").touch()
    with monkeypatch.context() as broken:
        broken.setattr(os, operation, failing)
        checkpoint.remove_older(str(tmp_path), {}, 2)
    saved = checkpoint.checkpoints(tmp_path)
    assert len(saved) >= 3 and all(os.path.exists(f"{path}/trainer/state.json") for path in saved)
    checkpoint.remove_older(str(tmp_path), {}, 2)
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-3", "checkpoint-4"]


def test_nothing_of_a_save_that_was_killed_gets_into_a_checkpoint(mesh, tmp_path, monkeypatch):
    """A run of two ranks may have left a second rank's optimizer, which one rank would read."""
    stale = tmp_path / "checkpoint.part" / "trainer" / "optimizer-00001.safetensors"
    os.makedirs(stale.parent)
    stale.touch()
    save = lambda: checkpoint.save_checkpoint(
        str(tmp_path / "checkpoint-1"), {}, pretrain.make_tokenizer(), {"eval_scores": {}}, 1)
    with monkeypatch.context() as broken:
        broken.setattr(os, "unlink", failing)
        with pytest.raises(OSError, match="Input/output error"):
            save()
    assert not os.path.exists(tmp_path / "checkpoint-1")
    save()
    assert os.listdir(tmp_path) == ["checkpoint-1"]
    assert os.listdir(tmp_path / "checkpoint-1" / "trainer") == ["state.json"]


OPERATIONS = {"open", "os.chmod", "os.listdir", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.scandir"}


class FailInTurn:
    """An audit hook that counts such operations of Python, and lets one of them fail."""
    chosen = None

    def __call__(self, event, arguments):
        if self.chosen is not None and event in OPERATIONS:
            self.count += 1
            if self.count == self.chosen:
                raise OSError(28, "No space left on device")


def test_every_failure_of_a_save_leaves_whole_checkpoints(folder, mesh, tmp_path):
    """Of the operations that Python makes; tests/every_failure.py fails all in real runs."""
    policy, tokenizer = load_policy(folder, mesh, torch.float32), load_tokenizer(folder)
    networks = {"": (policy, torch.optim.AdamW(policy.parameters()))}
    before, out_dir = tmp_path / "before", tmp_path / "run"
    hook = FailInTurn()
    sys.addaudithook(hook)                                      # it stays, but does nothing afterwards

    def save(path, step):
        checkpoint.save_checkpoint(str(path / f"checkpoint-{step}"), networks, tokenizer, {"eval_scores": {}}, 2)

    def contents(path):
        return {file.relative_to(path): file.read_bytes() for file in path.rglob("*") if file.is_file()}

    before.mkdir()
    save(before, 1)
    save(before, 2)
    whole, tried, failed = contents(before / "checkpoint-1"), 1, 0
    while True:
        shutil.rmtree(out_dir, ignore_errors=True)
        shutil.copytree(before, out_dir)
        hook.chosen, hook.count = tried, 0
        try:
            save(out_dir, 3)
        except OSError:
            failed += 1
        reached, hook.chosen = hook.count >= tried, None
        saved = sorted(out_dir.glob("checkpoint-*"))
        assert len(saved) >= 2 and all(contents(path) == whole for path in saved), tried
        if not reached:
            break
        tried += 1
    assert tried > 50 and failed > 20
