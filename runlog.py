"""What a run leaves in its folder, beside checkpoints: metrics, sample completions, settings, the script."""
import contextlib
import json
import os
import shutil
import time
from collections import defaultdict

import torch.distributed as dist
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm


class RunLog:
    """metrics.jsonl and the same for TensorBoard, samples.jsonl, config.json, the script, a console.

    Rank 0 writes; on other ranks all but the clock does nothing. A run that goes on from first_step drops the
    lines of that step and of later ones: it writes them again.
    """

    def __init__(self, out_dir, script, settings, first_step, max_steps):
        self.master, self.out_dir, self.timing = dist.get_rank() == 0, out_dir, defaultdict(float)
        self.bar = tqdm(total=max_steps, initial=first_step, disable=not self.master, unit="step")
        if self.master:
            os.makedirs(out_dir, exist_ok=True)
            for name in ("metrics.jsonl", "samples.jsonl"):
                rewind(os.path.join(out_dir, name), first_step)
            shutil.copy(script, out_dir)
            with open(os.path.join(out_dir, "config.json"), "w") as file:
                json.dump(settings | {"out_dir": out_dir}, file, indent=1)
            self.board = SummaryWriter(out_dir, purge_step=first_step)

    @contextlib.contextmanager
    def timed(self, name):
        """Adds the seconds that the block takes to timing["timing_s/name"]."""
        start = time.perf_counter()
        yield
        self.timing[f"timing_s/{name}"] += time.perf_counter() - start

    def say(self, text):
        if self.master:
            tqdm.write(text)

    def metrics(self, values):
        """Write a step's metrics, a dict of numbers with its "step"."""
        if self.master:
            self._append("metrics.jsonl", [values])
            for name, value in values.items():
                self.board.add_scalar(name, value, values["step"])
            self.board.flush()

    def samples(self, rows):
        """Write sample completions, dicts with their "step"."""
        if self.master:
            self._append("samples.jsonl", rows)

    def _append(self, name, rows):
        with open(os.path.join(self.out_dir, name), "a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


def rewind(path, step):
    """Drop the lines of a .jsonl log that speak of `step` or later, and a last one that was cut off."""
    if os.path.exists(path):
        with open(path) as file:
            lines = [line for line in file if line.endswith("\n") and json.loads(line)["step"] < step]
        with open(path + ".part", "w") as file:
            file.writelines(lines)
        os.replace(path + ".part", path)
