"""What the README installs is enough to look at a run: TensorBoard serves the scalars that a run writes."""
import json
import socket
import subprocess
import sys
import time
import urllib.request

import pytest
from torch.utils.tensorboard import SummaryWriter

# This machine is asked directly, whatever proxy the environment names.
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


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
