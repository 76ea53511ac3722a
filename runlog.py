"""What a run leaves in its folder, beside checkpoints: metrics, sample completions, settings, the script."""
import contextlib
import errno
import json
import os
import resource
import shutil
import time
from collections import defaultdict

import torch
import torch.distributed as dist
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from weights import claim


class RunLog:
    """metrics.jsonl and the same for TensorBoard, samples.jsonl, config.json, the script, a console.

    Rank 0 writes; on other ranks all but the clock does nothing. A run that goes on from first_step drops the
    lines of that step and of later ones: it writes them again.
    """

    def __init__(self, out_dir, script, settings, first_step, max_steps):
        self.master, self.out_dir = dist.get_rank() == 0, out_dir
        self.timing, self.waiting = defaultdict(float), defaultdict(list)
        self.bar = tqdm(total=max_steps, initial=first_step, disable=not self.master, unit="step")
        if self.master:
            claim(out_dir)
            for name in ("metrics.jsonl", "samples.jsonl"):
                rewind(os.path.join(out_dir, name), first_step)
            shutil.copy(script, out_dir)
            with open(os.path.join(out_dir, "config.json"), "w") as file:
                json.dump(settings | {"out_dir": out_dir}, file, indent=1)
            self.board = SummaryWriter(out_dir, purge_step=first_step)

    @contextlib.contextmanager
    def timed(self, name):
        """Adds the seconds that the block takes, the GPU's part included, to timing["timing_s/name"]."""
        start = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.timing[f"timing_s/{name}"] += time.perf_counter() - start

    def say(self, text):
        if self.master:
            with contextlib.suppress(OSError):                  # a console that is a file on a full disk
                tqdm.write(text)

    def advance(self, **shown):
        """Move the bar on by a step, with these figures beside it."""
        with contextlib.suppress(OSError):
            self.bar.set_postfix(**shown)
            self.bar.update()

    def close(self):
        self.flush()
        with contextlib.suppress(OSError):
            self.bar.close()

    def metrics(self, values):
        """Write a step's metrics, a dict of numbers with its "step"."""
        if self.master:
            self._append("metrics.jsonl", [values])
            with contextlib.suppress(OSError):                  # the file above says what went wrong
                for name, value in values.items():
                    self.board.add_scalar(name, value, values["step"])
                self.board.flush()

    def eval_scores(self):
        """{step: eval/mean@k} of all lines so far; empty on other ranks than 0."""
        path = os.path.join(self.out_dir, "metrics.jsonl")
        if not self.master or not os.path.exists(path):
            return {}
        with open(path) as file:
            lines = [json.loads(line) for line in file]
        return {line["step"]: value for line in lines for name, value in line.items()
                if name.startswith("eval/mean@")}

    def samples(self, rows):
        """Write sample completions, dicts with their "step"."""
        if self.master:
            self._append("samples.jsonl", rows)

    def rollouts(self, folder, settings, rollouts, scores, greedy):
        """Write the rollouts of a step to rollouts.jsonl in `folder`, the checkpoint that sampled them.

        The settings and "step", then a line for each. greedy: a score of each prompt, in its first line, or
        empty.
        """
        if self.master:
            lines = [settings] + [vars(r) | {"score": score} for r, score in zip(rollouts, scores)]
            for line, value in zip(lines[1::len(rollouts) // max(1, len(greedy))], greedy):
                line["greedy"] = value
            path = os.path.join(folder, "rollouts.jsonl")
            try:
                with open(path + ".part", "w") as file:
                    file.writelines(json.dumps(line) + "\n" for line in lines)
                os.replace(path + ".part", path)
            except OSError as error:
                self.say(f"{path} could not be written: {error}")

    def flush(self):
        """Write what a full disk has not taken before."""
        for name in list(self.waiting):
            self._append(name, [])

    def _append(self, name, rows):
        # Lines that a full disk does not take wait for the next try: none is lost, none is cut in two.
        self.waiting[name] += [json.dumps(row) + "\n" for row in rows]
        lines = "".join(self.waiting[name]).encode()
        try:
            with open(os.path.join(self.out_dir, name), "ab", buffering=0) as file:
                size = file.tell()
                try:
                    if file.write(lines) < len(lines):
                        raise OSError(errno.ENOSPC, "no space for all of it")
                    os.fsync(file.fileno())                     # before a checkpoint that counts on them
                except OSError:
                    file.truncate(size)
                    raise
            self.waiting[name].clear()
        except OSError as error:
            self.say(f"{name} could not be written, its lines wait: {error}")


def peak_memory():
    """Bytes: the most that tensors have taken on this rank's GPU; on a CPU the process's peak."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def rewind(path, step):
    """Drop the lines of a .jsonl log that speak of `step` or later, and a last one that was cut off."""
    if os.path.exists(path):
        with open(path) as file:
            lines = [line for line in file if line.endswith("\n") and json.loads(line)["step"] < step]
        with open(path + ".part", "w") as file:
            file.writelines(lines)
        os.replace(path + ".part", path)
