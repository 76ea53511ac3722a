"""CI runs the README's own lines, and what they install is enough to look at a run by TensorBoard."""
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request

import pytest
from torch.utils.tensorboard import SummaryWriter

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# This machine is asked directly, whatever proxy the environment names.
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def test_ci_runs_the_lines_of_the_readme(tmp_path):
    for name in (".ci/run", "README.md"):
        os.makedirs((tmp_path / name).parent, exist_ok=True)
        shutil.copy(os.path.join(ROOT, name), tmp_path / name)
    (tmp_path / "run").write_text('#!/bin/sh\necho "$*"\n')
    (tmp_path / "run").chmod(0o755)
    run = lambda: subprocess.run([tmp_path / ".ci" / "run"], capture_output=True, text=True)
    assert run().stdout.splitlines() == [
        "torchrun train_grpo.py --max_steps=3 --eval_prompts=16",
        "torchrun train_ppo.py --max_steps=3 --eval_prompts=16 --critic_warmup_steps=1",
        "torchrun --nproc_per_node=2 train_async.py --max_steps=3 --eval_prompts=16", "ruff check",
        "python tests/golden.py", "pytest -n 2", "python tests/attack.py --every=16",
        "python tests/every_failure.py --every=40"]
    readme = (tmp_path / "README.md").read_text()
    for line in ("\n./run torchrun train_grpo.py\n```", "```sh\n./run pytest -n 2"):
        (tmp_path / "README.md").write_text(readme.replace(line, "\n```"))
        without = run()
        assert without.returncode == 1 and "block of README.md" in without.stderr and not without.stdout


def test_run_makes_its_environment_once(tmp_path):
    shutil.copy(os.path.join(ROOT, "run"), tmp_path / "run")
    for name in ("requirements.txt", "requirements-cpu.txt"):
        (tmp_path / name).write_text("# no package\n")

    def run(*words, path=os.environ["PATH"]):
        done = subprocess.run([tmp_path / "run", *words], cwd="/", env=os.environ | {"PATH": path},
                              capture_output=True, text=True)
        return done.returncode, done.stdout.splitlines()[-1:], done.stderr.splitlines()[-1:]

    tell = "python", "-c", "import os, sys; print(os.getcwd(), sys.prefix)"
    told = [f"{tmp_path} {tmp_path}/.venv"]
    (tmp_path / "bin").mkdir()
    for name in ("dirname", "readlink", "rm", "sh"):
        os.symlink(shutil.which(name), tmp_path / "bin" / name)
    assert run(*tell, path=f"{tmp_path}/bin") == (
        1, [], ["run: it needs Python 3.11, 3.12 or 3.13: install one of them"])
    (tmp_path / "bin" / "python3").write_text("#!/bin/sh\n[ $1 = -c ] || { mkdir .venv; exit 1; }\n")
    (tmp_path / "bin" / "python3").chmod(0o755)
    code, _, [line] = run(*tell, path=f"{tmp_path}/bin:/usr/bin:/bin")
    assert code == 1 and "apt install python3-venv" in line and not (tmp_path / ".venv").exists()
    assert run(*tell)[:2] == (0, told)
    assert run() == (1, [], ["run: name a command, such as ./run torchrun train_grpo.py"])
    # What is installed is not looked at again, until the list changes.
    os.rename(tmp_path / ".venv" / "bin" / "pip", tmp_path / "pip")
    assert subprocess.run([tmp_path / "run", *tell], capture_output=True, text=True).stdout.splitlines() == told
    for name in ("requirements.txt", "requirements-cpu.txt"):
        (tmp_path / name).write_text("./no_such_package\n")
    code, _, [line] = run(*tell)
    assert code == 1 and "were not installed, see above" in line
    shutil.rmtree(tmp_path / ".venv")
    (tmp_path / ".venv").mkdir()
    code, _, [line] = run(*tell)
    assert code == 1 and f"{tmp_path}/.venv has no pip: remove that folder" in line


def test_run_is_that_of_its_own_folder(tmp_path):
    """Through a link, and whatever CDPATH says. Of several first starts one makes the environment."""
    for folder in ("here/project", "there/project", "elsewhere"):
        (tmp_path / folder).mkdir(parents=True)
        shutil.copy(os.path.join(ROOT, "run"), tmp_path / folder / "run")
        for name in ("requirements.txt", "requirements-cpu.txt"):
            (tmp_path / folder / name).write_text("# no package\n")
    here = tmp_path / "here"
    os.remove(tmp_path / "elsewhere/run")
    os.symlink("../here/project/run", tmp_path / "elsewhere/run")
    commands = ["project/run", "../elsewhere/run", "./project/run"]
    tell = "python", "-c", "import os, sys; print(os.getcwd(), sys.prefix)"
    starts = [subprocess.Popen([command, *tell], cwd=here, env=os.environ | {"CDPATH": str(tmp_path / "there")},
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for command in commands]
    for start in starts:
        output, errors = start.communicate(timeout=120)
        assert output.splitlines()[-1:] == [f"{here}/project {here}/project/.venv"] and not errors, errors
    assert not (tmp_path / "there/project/.venv").exists() and not (tmp_path / "elsewhere/.venv").exists()


def test_tensorboard_shows_a_scalar(tmp_path):
    with SummaryWriter(tmp_path / "logs" / "run") as board:
        board.add_scalar("eval/mean@4", 0.25, 7)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(tmp_path / "logs"),
               "--host=127.0.0.1", f"--port={port}"]
    with open(tmp_path / "output", "w") as output:
        viewer = subprocess.Popen(command, stdout=output, stderr=output)

    def get(path):
        return DIRECT.open(f"http://127.0.0.1:{port}/{path}", timeout=10).read().decode()

    try:
        # The viewer answers only after a while, and its first answers may name no run yet.
        tags, deadline = {}, time.monotonic() + 60
        while not tags:
            if viewer.poll() is not None or time.monotonic() > deadline:
                pytest.fail((tmp_path / "output").read_text())
            time.sleep(0.2)
            try:
                tags = json.loads(get("data/plugin/scalars/tags"))
            except OSError:
                continue
        assert list(tags["run"]) == ["eval/mean@4"]
        assert "<tb-webapp" in get("")
        [(_, step, value)] = json.loads(get("data/plugin/scalars/scalars?run=run&tag=eval%2Fmean%404"))
        assert (step, value) == (7, 0.25)
    finally:
        viewer.kill()
        viewer.wait()


@pytest.mark.parametrize("script, given", [
    ("train_grpo.py", {}), ("train_ppo.py", {}), ("train_async.py", {}), ("train_sft.py", {}),
    ("evaluate_model.py", {}), ("tiny/pretrain.py", {}),
    ("train_grpo.py", {"GOMP_SPINCOUNT": "7"}), ("train_grpo.py", {"OMP_WAIT_POLICY": "PASSIVE"})])
def test_openmp_is_set_before_pytorch_is_imported(script, given):
    """Unless somebody has set it already."""
    program = ("import os, runpy, sys\n"
               "class AtTorch:\n"
               "    def find_spec(name, *_):\n"
               "        if name == 'torch': sys.exit(os.environ.get('GOMP_SPINCOUNT', 'unset'))\n"
               f"sys.meta_path.insert(0, AtTorch); sys.path.insert(0, '.'); runpy.run_path('{script}')")
    env = {key: value for key, value in os.environ.items() if "OMP_" not in key} | given
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=env, capture_output=True, text=True)
    assert run.stderr.strip() == given.get("GOMP_SPINCOUNT", "unset" if given else "4000")
