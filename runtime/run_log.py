"""What a run writes: its metrics, sample completions, settings and script, and lines on the console."""
import atexit
import contextlib
import errno
import json
import os
import sys
import textwrap
import time
from collections import defaultdict
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from runtime import distributed, health

# What the console shows of a step, in 80 columns: a word, the metric that it stands for, and a format.
CONSOLE = (("reward", "reward", ".3f"), ("length", "completions/mean_length", "4.0f"),
           ("ended by a limit", "episodes/limited", "d"), ("entropy", "entropy", ".3f"),
           ("var", "critic/vf_explained_var", ".2f"),
           ("grad", "grad_norm", ".2f"), ("gap", "sampling/sampling_logp_difference/max", ".0e"))


class RunLog:
    """Writes metrics.jsonl and TensorBoard events, samples.jsonl, config.json and a copy of the script, and
    prints to the console.

    Only rank 0 writes. A run that continues from first_step drops the lines of that step and of later ones,
    because it writes them again. The line of a step consists of `metrics`, a dict of figures that all ranks
    agree on, and of what `add` was given, summed or averaged over all ranks when the step ends. eval_scores,
    {step: eval/mean@k}, has all steps that were evaluated; the best checkpoint is chosen by it. Raises
    ValueError if the folder cannot be written.
    """

    def __init__(self, out_dir, script, settings, first_step, max_steps):
        self.master, self.out_dir = dist.get_rank() == 0, out_dir
        self.sample_interval = settings["sample_interval"]
        self.waiting, self.files = {"metrics.jsonl": [], "samples.jsonl": []}, {}
        self.health, self.eval_scores = health.Watch(settings), {}
        self.start(first_step)
        if self.master:
            try:
                self.health.new = rewind(os.path.join(out_dir, "metrics.jsonl"), first_step)
                for line in self.health.new:
                    self._note_score(line)
                rewind(os.path.join(out_dir, "samples.jsonl"), first_step)
                self.files = {name: open(os.path.join(out_dir, name), "ab", buffering=0)
                              for name in self.waiting}
                Path(out_dir, os.path.basename(script)).write_bytes(Path(script).read_bytes())
                with open(os.path.join(out_dir, "config.json"), "w") as file:
                    json.dump(settings | {"out_dir": out_dir}, file, indent=1)
                self.board = SummaryWriter(out_dir, purge_step=first_step)
            except OSError as error:
                raise ValueError(f"out_dir={out_dir} cannot be written: {error}") from None
        # A user's code may set these to None, or replace them later.
        self.console, bar = sys.stdout or sys.__stdout__, sys.stderr or sys.__stderr__
        self.bar = tqdm(total=max_steps, initial=first_step, disable=not self.master, file=bar, unit="step")
        # Otherwise the bar writes once more as the interpreter ends, below the error that ends the run.
        atexit.register(setattr, self.bar, "disable", True)

    # ------------------------------------------------------------ a step's figures

    def start(self, step):
        """Begin the line of a step."""
        self.metrics, self.timing, self.totals = {"step": step}, defaultdict(float), {}
        self.started = time.perf_counter()
        distributed.watchdog.moved(f"step {step}")

    @contextlib.contextmanager
    def timed(self, name):
        """Add the seconds that the block takes, including its work on the GPU, to timing_s/name."""
        start = time.perf_counter()
        distributed.watchdog.moved(f"step {self.metrics['step']}, {name}")
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.timing[f"timing_s/{name}"] += time.perf_counter() - start
        distributed.watchdog.moved(f"step {self.metrics['step']}, after {name}")

    def add(self, sums={}, means={}):
        """Add to the step's figures over all ranks, without waiting for a GPU.

        sums: {name: a number, or a tensor of one number}. means: {name: a tensor or list of values}; a mean
        that gets no values is logged as 0.
        """
        for name, value in sums.items():
            total, _ = self.totals.get(name, (0.0, None))
            self.totals[name] = total + torch.as_tensor(value).detach(), None
        for name, values in means.items():
            values = values.detach() if torch.is_tensor(values) else torch.tensor(values, dtype=torch.float64)
            total, count = self.totals.get(name, (0.0, 0))
            self.totals[name] = total + values.sum(), count + values.numel()

    def evaluation(self, results):
        """Log the results of an evaluation, and show those over all prompts on the console."""
        self.metrics |= results
        self._note_score(self.metrics)
        least = min((name.count("/") for name in results), default=0)
        # In lines of 80 columns; at a \0 no line is broken, so a figure stays with its name.
        self.say(textwrap.fill(f"step\0{self.metrics['step']:3d}  " + "  ".join(
            f"{name}\0{value:.3f}" for name, value in results.items() if name.count("/") == least),
            80, subsequent_indent="    ", break_on_hyphens=False).replace("\0", " "))
        for text in self.health.news():
            self.say(text)

    def end(self, tokens, samples):
        """Write the step: a line to metrics.jsonl and TensorBoard, a few samples, a line on the console.

        tokens: number of prompt and completion tokens. samples: dicts for samples.jsonl.
        """
        self.timing["timing_s/step"] = seconds = time.perf_counter() - self.started
        self.metrics["perf/throughput"] = tokens / seconds
        self.write()
        if self.master:
            self._append("samples.jsonl", [{"step": self.metrics["step"]} | sample for sample in samples])
        if self.sample_interval and self.metrics["step"] % self.sample_interval == 0:
            self.say("\n".join(
                f"    {plain_text(s['prompt'])[-60:]!r}\n     -> {plain_text(s['completion'])[-40:]!r:44} "
                f"reward {s['reward']:g}, truth {s['truth']!r}" for s in samples[:4]))
        self.say(f"step {self.metrics['step']:3d}  " + "".join(
            f"{word} {self.metrics[name]:{form}}  " for word, name, form in CONSOLE if name in self.metrics)
            + f"{seconds:.1f} s")
        if self.metrics["step"] + 1 == health.FIRST and (warning := self.health.same_scores(
                plain_text(samples[0]["completion"]), samples[0]["truth"])):
            self.say(warning)
        self.bar.set_postfix(reward=f"{self.metrics['reward']:.3f}")
        self.bar.update()

    def write(self):
        """Write the line of this step to metrics.jsonl and TensorBoard. A collective."""
        summed = {}                                             # {name: (total, count)}, over all ranks
        for name, total, count in distributed.gathered(
                [(name, float(total), count) for name, (total, count) in self.totals.items()]):
            before, counted = summed.get(name, (0.0, 0))
            summed[name] = before + total, None if count is None else counted + count
        self.metrics = {name: total if count is None else total / max(count, 1)
                        for name, (total, count) in summed.items()} | self.metrics | self.timing
        if self.master:
            self._append("metrics.jsonl", [self.metrics])
            self.health.new.append(self.metrics)
            # OSError: the disk is full, as _append has said already. ValueError: TensorBoard does not accept
            # every name that a part of a reward may have.
            with contextlib.suppress(OSError, ValueError):
                for name, value in self.metrics.items():
                    self.board.add_scalar(name, value, self.metrics["step"])
                self.board.flush()

    # ------------------------------------------------------------ files and console

    def say(self, text):
        """Print a line, or several, above the progress bar."""
        if self.master:
            tqdm.write(text, file=self.console)

    def flush(self):
        """Write the lines that a full disk has refused."""
        for name in self.files:
            self._append(name, [])

    def _note_score(self, line):
        self.eval_scores |= {line["step"]: value for name, value in line.items()
                             if name.startswith("eval/mean@") and isinstance(value, float)}

    def _append(self, name, rows):
        # Lines that a full disk does not take wait for the next try, so none is lost and none is cut in two.
        self.waiting[name] += [json.dumps(row) + "\n" for row in rows]
        lines, file = "".join(self.waiting[name]).encode(), self.files[name]
        size = file.seek(0, os.SEEK_END)
        try:
            if file.write(lines) < len(lines):
                raise OSError(errno.ENOSPC, "it took only a part")
            # A checkpoint relies on these lines.
            os.fsync(file.fileno())
            self.waiting[name].clear()
        except OSError as error:
            file.truncate(size)
            self.say(f"{name} could not be written, its lines will be written later: {error}")


def rewind(path, step):
    """Drop the lines of a .jsonl log for `step` or later; returns the objects of the lines that stay.

    A line that no run has written, or that a kill has cut off, is dropped as well.
    """
    kept = []
    with open(path, "a+b") as file:                             # a new run has none yet
        file.seek(0)
        for line in file:
            with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
                if (entry := json.loads(line))["step"] < step:
                    kept.append(entry)
    with open(path + ".part", "w") as file:
        file.writelines(json.dumps(entry) + "\n" for entry in kept)
    os.replace(path + ".part", path)
    return kept


def plain_text(text):
    # Returns a prompt or a completion as one string, of messages their contents.
    return text if isinstance(text, str) else " ".join(str(message["content"] or "") for message in text)
