"""
The frame of a run: how it begins or resumes, what it logs, how it saves, stops and ends.

    Run       the settings, the folder and the state of a run, from the start or from a checkpoint
    RunLog    its metrics and samples, for files, TensorBoard and the console

All training scripts share this file, and no algorithm has to change it. checkpoint.py finds the folder and
writes the checkpoints.
"""
import atexit
import contextlib
import datetime
import json
import math
import os
import resource
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from safetensors.numpy import load_file
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from configurator import check, fail, input_errors, printable
from runtime import checkpoint, distributed, forecast, health
from runtime.check_model import ROOT, end_note
from runtime.check_settings import check_suits, check_values, same
from runtime.user_code import source_of, specs

# A resumed run must have the same values for these settings; all other settings may change.
SAME = ("model", "critic_model", "reference_model", "task", "difficulty", "train_prompts", "train_file",
        "eval_file", "reward", "reward_model", "environment", "tools", "max_prompt_length", "chat",
        "system_prompt", "chat_template", "response_template", "chat_template_kwargs", "prompts_per_step",
        "num_generations", "seed", "shuffle", "lora_rank")
CODE = ("reward", "environment", "tools")           # settings that name the user's own files
MAX_SKIPPED = 5                 # the run stops after so many updates in a row whose gradient is not finite
# What the console shows of a step, in 80 columns: a word, the metric that the word stands for, and a format.
CONSOLE = (("reward", "reward", ".3f"), ("length", "completions/mean_length", "4.0f"),
           ("ended by a limit", "episodes/limited", "d"), ("entropy", "entropy", ".3f"),
           ("var", "critic/vf_explained_var", ".2f"),
           ("grad", "grad_norm", ".2f"), ("gap", "sampling/sampling_logp_difference/max", ".0e"))


def check_run(settings, trainers):
    """Check all settings of a training script. trainers: how many ranks train."""
    # Ranks that train also sample, each for prompts of its own, unless there are ranks for the engines alone.
    samplers = getattr(settings, "rollout_ranks", 0)
    check(trainers > 0, f"rollout_ranks={samplers} leaves no trainer: there are {trainers + samplers} ranks "
                        "(torchrun --nproc_per_node=2 train_async.py has two)")
    engines = samplers // (settings.vllm_tensor_parallel_size or 1) or trainers
    check_values(SimpleNamespace(**vars(settings), trainers=trainers, samplers=samplers or trainers,
                                 engines=engines, passes=getattr(settings, "num_epochs", 1)))


class Run:
    """A run's folder and state, from the start or from a checkpoint.

    settings: what configure returned. script: the training script's __file__. critic: whether the script
    trains a critic. state: what a script of your own wants to find again in run.state when it is resumed,
    with the values of a new run; run.state is saved as JSON with each checkpoint, and run.arrays, {name:
    NumPy array}, as a file of its own. Stops the script with a message if the settings do not fit each other,
    the folder or the checkpoint. A collective.
    """

    def __init__(self, settings, script, critic=False, **state):
        self.settings, self.script, self.world_size = settings, script, dist.get_world_size()
        check_run(settings, self.world_size)
        # The console as it is before a user's code is called, which may set sys.stdout to None or replace it.
        self.console = sys.stdout, sys.stderr
        kind = os.path.basename(script).removesuffix(".py").removeprefix("train_")
        with input_errors():
            # Only rank 0 reads the clock and looks for checkpoints, so that all ranks agree.
            now = datetime.datetime.now()
            self.out_dir, self.resumed, clock = distributed.from_master((*checkpoint.locate_run(
                settings.out_dir, settings.resume, f"out/{kind}-{settings.task}-{now:%Y%m%d-%H%M%S}"),
                now.isoformat()) if dist.get_rank() == 0 else None)
        # For load_policy: what it has to know about the adapters, or 0 if there are none.
        self.adapter = settings.lora_rank and (settings.lora_rank, settings.seed, self.resumed)
        # From here on, beginning with the chat template, code may run that never ends.
        distributed.watchdog.limit(settings.timeout)
        self.state = {"step": 0, "position": 0, "num_tokens": 0, "skipped_updates": {}, "checksums": {},
                      "eval_scores": {}, "evaluated": {}, "settings": vars(settings),
                      "world_size": self.world_size, "clock": clock} | state
        self.declared, self.arrays = set(self.state), {}
        if self.resumed:
            self._read_state(kind, critic)
        for key in SAME:
            now, then = getattr(settings, key, ""), self.state["settings"].get(key, "")
            check(same(now, then), f"{key}={now}, but {self.resumed} comes from a run with {key}={then}")
        self.first_step, self.max_steps = self.state["step"], settings.max_steps
        check(self.first_step <= self.max_steps,
              f"max_steps={self.max_steps}, but {self.resumed} has made {self.first_step} steps already")

    def _read_state(self, kind, critic):
        has_critic = os.path.isdir(f"{self.resumed}/critic")
        check(has_critic == critic,
              f"{self.resumed} has {'a' if has_critic else 'no'} critic, unlike runs of {kind}")
        loaded = json.loads(Path(self.resumed, "trainer", "state.json").read_bytes())
        strange = sorted(loaded.keys() - self.state.keys())
        check(not strange, f"{self.resumed} holds {', '.join(strange)}, which "
                           f"{os.path.basename(self.script)} would lose: resume it with the script, in the "
                           "version, that wrote it")
        self.state |= loaded
        if os.path.exists(path := f"{self.resumed}/trainer/arrays.safetensors"):
            self.arrays = load_file(path)

    def check_data(self, base, train_set, eval_set):
        """Refuse prompts that are not those of the resumed run, whose file may have changed, and a model that
        no device can hold or that the default settings do not suit. base: its folder. Raises ValueError."""
        s, before = self.settings, self.state["settings"]
        check_suits(s, base)
        checksums = {"train_prompts": checkpoint.checksum_of_rows(row for _, row in train_set.named),
                     "eval_prompts": checkpoint.checksum_of_rows(prompt.row for prompt in eval_set)}
        for key in CODE:
            for path in sorted({*map(source_of, specs(getattr(s, key)))}):
                if not path.endswith(".py"):                    # an installed module
                    continue
                check(os.path.isfile(path), f"{key}: no such file: {path}")
                checksums[key] = checksums.get(key, 0) ^ checkpoint.checksum(path)
        same = {key: self.state["checksums"].get(key, value) == value for key, value in checksums.items()}
        # If the number of held-out prompts was changed, they differ because of that.
        same["eval_prompts"] |= s.eval_prompts != before.get("eval_prompts")
        for key, what, file in (("train_prompts", "training", s.train_file),
                                ("eval_prompts", "held-out", s.eval_file or s.train_file)):
            check(same[key], f"{file or 'task=' + s.task}: the {what} prompts are not those of "
                             f"{self.resumed}, so this would not be the same run")
        self.changed = [key for key in CODE if not same.get(key, True)]
        self.state["checksums"] = checksums
        self.end_note = end_note(base, train_set.tokenizer) if s.chat else ""
        memory, cuda = forecast.device_memory()
        self.forecast = forecast.says(s, self.world_size, memory, cuda)
        distributed.watchdog.moved("the trial of reward and environment, or the loading of models")

    def begin(self, networks, engine, data_note, updates):
        """Load the optimizers of a resumed run, print the opening lines, catch signals; return the RunLog.

        networks: {subfolder of a checkpoint: (model, optimizer or None)}. data_note: a sentence about the
        prompts. updates: the updates of a step, in words.
        """
        with input_errors():
            if self.resumed:
                checkpoint.load_optimizers(self.resumed, networks)
        dist.barrier()
        check(os.path.isdir(self.out_dir),
              f"out_dir={self.out_dir} is not on a file system that all ranks see")
        self.log = RunLog(self.out_dir, self.script, vars(self.settings), self.state, self.console)
        self.engine = engine
        engine.version = self.first_step
        policy, _ = networks[""]
        if self.resumed and self.settings.lora_rank:            # the engine was loaded with the base model
            engine.load_weights(policy.full_weights(naming=engine.naming), self.first_step)
        self.log.say(opening(self, policy, data_note, updates))
        self.state |= {"settings": vars(self.settings), "world_size": self.world_size}
        self.signals, self.stopped = [], False
        for name in (signal.SIGTERM, signal.SIGINT):
            signal.signal(name, self._signalled)
        return self.log

    def _check_state(self):
        # What a resumed run would not get back is refused now, and not when it is missed.
        for key, value in self.state.items():
            check(key in self.declared, f"run.state[{key!r}] would be lost when the run is resumed: declare "
                                        f"it, Run(settings, __file__, {key}=...)")
            comes_back = json.loads(json.dumps(value, default=repr, skipkeys=True))
            check(repr(comes_back) == repr(value),
                  f"run.state[{key!r}] would not come back from a checkpoint as it is: it may hold strings, "
                  "Python's numbers, None, lists, and dicts with strings as keys")

    def _signalled(self, number, frame):
        # A launcher may pass on a signal that the process has already received. Only a Ctrl-C that comes more
        # than a second after the first signal ends the run, as soon as Python runs again.
        if number == signal.SIGINT and self.signals and time.monotonic() - self.signals[0] > 1:
            os._exit(130)
        self.signals.append(time.monotonic())
        if len(self.signals) == 1:
            self.log.say("This step will be finished and saved, then the run stops. Ctrl-C again ends it at "
                         "once.", error=True)

    def due(self, interval):
        """Return whether what happens every `interval` steps is due; 0 stands for the first step alone."""
        return self.state["step"] % (interval or self.max_steps) == 0

    def stopping(self, signalled=False):
        """Return whether a signal has come, or torchrun has died, on any rank. A collective.

        signalled: whether this rank knows of a signal elsewhere.
        """
        self.stopped = any(distributed.gathered([bool(self.signals) or signalled]))
        return self.stopped

    def may_step(self, name, norm):
        """Log the norm of a gradient and return True, or count a skipped update and return False if the norm
        is not finite. Raises RuntimeError after MAX_SKIPPED in a row."""
        finite, prefix = math.isfinite(norm), "" if name == "actor" else f"{name}/"
        self.log.add(means={f"{prefix}grad_norm": [norm]},
                     sums={f"{name}/skipped_updates": 0 if finite or dist.get_rank() else 1})
        if not finite:
            self.log.say(f"step {self.state['step']}: an update of the {name} is skipped, because the norm "
                         f"of its gradient is {norm}: is there a NaN among the advantages, or in the loss?")
        in_a_row = self.state["skipped_updates"]
        in_a_row[name] = 0 if finite else in_a_row.get(name, 0) + 1
        if in_a_row[name] >= MAX_SKIPPED:
            raise RuntimeError(
                f"step {self.state['step']}: {in_a_row[name]} updates of the {name} in a row were skipped, "
                "because the gradient was not finite")
        return finite

    def end_step(self, rollouts, figures, samples):
        """Write the figures of the step and continue with the next step.

        rollouts: those of all ranks. figures, samples: what rewards.py makes of them for the logs.
        """
        if self.state["step"] == self.first_step:
            self._check_state()                                 # what the loop has put into the state
        tokens, log = sum(len(r.ids) for r in rollouts), self.log
        # Bytes of tensors on this rank's GPU, or of the process, which Linux counts in KiB.
        peak = (torch.cuda.max_memory_allocated() if torch.cuda.is_available() else
                resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
        self.state["step"] += 1
        self.state["num_tokens"] += tokens
        log.metrics |= figures | {"num_tokens": self.state["num_tokens"],
                                  "perf/max_memory_allocated_gb": (peak - self.engine.allocated) / 1e9}
        if problems := [*filter(None, (r.counts.get("problem", r.problem) for r in rollouts))]:
            log.say(f"step {log.metrics['step']}: {len(problems)} completions failed or took too long; "
                    f"the first: {problems[0]}")
            if all(math.isnan(r.score) for r in rollouts):
                raise RuntimeError(f"nothing was scored; {problems[0]}")
        log.end(tokens, samples)

    def save(self, networks, tokenizer):
        """Write a checkpoint of this step. A collective.

        A run that has made no step yet writes none. The exception is a run that was resumed in a new folder
        and stops at once, because the new folder has no checkpoint yet. If a save fails, the script stops,
        and the older checkpoints stand.
        """
        self._check_state()
        step = self.state["step"]
        last = step == self.max_steps or self.stopped
        before = os.path.dirname(os.path.abspath(self.resumed)) if self.resumed else self.out_dir
        if step > self.first_step or (last and not os.path.samefile(before, self.out_dir)):
            with self.log.timed("save"):
                problem = checkpoint.save_checkpoint(
                    os.path.join(self.out_dir, f"checkpoint-{step}"), networks, tokenizer, self.state,
                    self.settings.keep_checkpoints, self.arrays)
            check(not problem, f"checkpoint-{step} could not be saved, the older ones stand: {problem}")
        if step == self.max_steps:
            self.log.write()
        elif self.stopped:
            self.log.say(f"stopped by a signal after {step} steps" + (
                f"; --out_dir={self.out_dir} --resume=auto resumes it" if step else ": nothing is saved"))

    def end(self):
        """Close the log, write the report, close the engine, and leave the process group."""
        self.log.bar.close()
        if self.log.master:
            report = os.path.join(ROOT, "report.py")
            # In a process of its own, whose failure costs nothing else.
            done = subprocess.run([sys.executable, report, self.out_dir], capture_output=True, text=True)
            self.log.say((done.stdout or done.stderr).strip())
        self.engine.close()
        distributed.leave()


def opening(run, policy, data_note, updates):
    # Returns the lines that say what a run is.
    s, state, device = run.settings, run.state, next(policy.parameters()).device.type
    N = s.prompts_per_step * s.num_generations
    million = sum(p.numel() for p in policy.parameters()) / 1e6
    evaluates = f"every {s.eval_interval}" if s.eval_interval else "its first and last model"
    lines = [f"{run.out_dir}: {s.model}, {million:.2f} M parameters, on {run.world_size} x {device}, engine "
             f"{run.engine.name}",
             f"Each step uses {s.prompts_per_step} prompts x {s.num_generations} completions = {N} sequences "
             f"and makes {updates}, in micro-batches of at most {s.token_budget} tokens.",
             f"The run has {run.max_steps} steps and evaluates {evaluates}, with {s.eval_samples} "
             "completions per held-out prompt.", printable(data_note), run.forecast]
    if run.end_note:
        lines.append(run.end_note)
    if (s.environment or s.tools) and s.call_workers:
        lines.append("call_workers: turns begin when the environments answer, so the run does not repeat bit "
                     "for bit")
    if run.resumed:
        lines.append(f"resumes {run.resumed}")
        if state["world_size"] != run.world_size:
            lines.append(f"{state['world_size']} ranks wrote it: sums round differently on {run.world_size}, "
                         "so the steps are not bit for bit those of an unbroken run")
        lines += [f"{key}: its file has changed since {run.resumed} was written" for key in run.changed]
    return "\n".join(lines)


class RunLog:
    """Writes metrics.jsonl and TensorBoard events, samples.jsonl, config.json and a copy of the script, and
    prints to the console.

    settings: a dict of the run's settings. state: run.state; the log begins at its step, and drops the lines
    of that step and of later ones, because the run writes them again. Only rank 0 writes. The line of a step
    consists of `metrics`, a dict of figures that all ranks agree on, and of what `add` was given, summed or
    averaged over all ranks when the step ends. A disk that is full ends the run. console: where to print, if
    not to the present sys.stdout and sys.stderr.
    """

    def __init__(self, out_dir, script, settings, state, console=None):
        self.master, self.out_dir, self.state = dist.get_rank() == 0, out_dir, state
        self.health = health.Watch(settings)
        first_step = state["step"]
        self.start(first_step)
        if self.master:
            with self._writing():
                self.health.new = rewind(os.path.join(out_dir, "metrics.jsonl"), first_step)
                rewind(os.path.join(out_dir, "samples.jsonl"), first_step)
                Path(out_dir, os.path.basename(script)).write_bytes(Path(script).read_bytes())
                Path(out_dir, "config.json").write_text(json.dumps(
                    settings | {"checksums": state["checksums"], "out_dir": out_dir}, indent=1))
                # So that a changed losses.py is found again; none where nothing differs from the commit.
                Path(out_dir, "changes.diff").unlink(missing_ok=True)
                if diff := changes():
                    Path(out_dir, "changes.diff").write_text(diff[:1_000_000])
                self.board = SummaryWriter(out_dir, purge_step=first_step)
        self.console, self.errors = console or (sys.stdout, sys.stderr)
        self.bar = tqdm(total=settings["max_steps"], initial=first_step, disable=not self.master,
                        file=self.errors, unit="step")
        # Otherwise the bar writes once more as the interpreter ends, below the error that ends the run.
        atexit.register(setattr, self.bar, "disable", True)

    # ------------------------------------------------------------ a step's figures

    def start(self, step):
        """Begin the line of a step, for a resumed run with the evaluation that its checkpoint holds."""
        known = self.state["evaluated"] if self.state["evaluated"].get("step") == step else {}
        self.metrics, self.timing, self.totals = {"step": step} | known, defaultdict(float), {}
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

    def evaluation(self, results, failures=(), count=0):
        """Log the results of an evaluation, and show those over all prompts on the console.

        failures: why completions were not scored, out of `count`. If more than a tenth was not, the
        evaluation chooses no best checkpoint.
        """
        self.metrics |= results
        step, least = self.metrics["step"], min((name.count("/") for name in results), default=0)
        # A resumed run knows the evaluation of the model that it begins with, and which checkpoint is the
        # best.
        known = self.state["evaluated"] if self.state["evaluated"].get("step") == step else {}
        self.state["evaluated"] = known | {"step": step} | results
        if failures:
            self.say(f"step {step}: {len(failures)} of {count} held-out completions were not scored; the "
                     f"first: {failures[0]}")
        if len(failures) <= count / 10:
            self.state["eval_scores"] |= {str(step): value for name, value in results.items()
                                          if name.startswith("eval/mean@")}
        lines = [f"step {step:3d}"]                             # of at most 80 columns
        for name, value in results.items():
            if name.count("/") > least:
                continue
            figure = f"  {name} {value:.3f}"
            if len(lines[-1] + figure) > 80:
                lines.append("  ")
            lines[-1] += figure
        self.say("\n".join(lines))
        for text in self.health.news():
            self.say(text)

    def end(self, tokens, samples):
        """Write the step: a line to metrics.jsonl and TensorBoard, a few samples, a line on the console.

        tokens: number of prompt and completion tokens. samples: dicts for samples.jsonl.
        """
        self.timing["timing_s/step"] = seconds = time.perf_counter() - self.started
        self.metrics["perf/throughput"] = tokens / seconds
        self.write(samples)
        if any(name.startswith("eval") for name in self.metrics):       # samples are shown as often
            self.say("\n".join(
                f"    {plain_text(s['prompt'])[-60:]!r}\n     -> {plain_text(s['completion'])[-40:]!r:44} "
                f"reward {s['reward']:g}, truth {s['truth']!r}" for s in samples[:4]))
        if self.metrics["step"] + 1 == health.FIRST and (warning := self.health.same_scores(
                plain_text(samples[0]["completion"]), samples[0]["truth"])):
            self.say(warning)
        self.say(f"step {self.metrics['step']:3d}  " + "".join(
            f"{word} {self.metrics[name]:{form}}  " for word, name, form in CONSOLE if name in self.metrics)
            + f"{seconds:.1f} s")
        self.bar.set_postfix(reward=f"{self.metrics['reward']:.3f}", refresh=False)
        self.bar.update()

    def write(self, samples=()):
        """Write the line of this step to metrics.jsonl and TensorBoard, and its samples. A collective."""
        summed = {}                                             # {name: (total, count)}, over all ranks
        for name, total, count in distributed.gathered(
                [(name, float(total), count) for name, (total, count) in self.totals.items()]):
            before, counted = summed.get(name, (0.0, 0))
            summed[name] = before + total, None if count is None else counted + count
        self.metrics = {name: total if count is None else total / max(count, 1)
                        for name, (total, count) in summed.items()} | self.metrics | self.timing
        if not self.master:
            return
        self.health.new.append(self.metrics)
        with self._writing():
            append(os.path.join(self.out_dir, "metrics.jsonl"), [self.metrics])
            append(os.path.join(self.out_dir, "samples.jsonl"),
                   [{"step": self.metrics["step"]} | sample for sample in samples], default=str)
            for name, value in self.metrics.items():
                with contextlib.suppress(ValueError):           # TensorBoard does not accept every name
                    self.board.add_scalar(name, value, self.metrics["step"])
            self.board.flush()

    # ------------------------------------------------------------ files and console

    @contextlib.contextmanager
    def _writing(self):
        try:
            yield
        except OSError as error:
            fail(f"out_dir={self.out_dir} cannot be written: {error}; the checkpoints in it stand")

    def say(self, text, error=False):
        """Print a line, or several, above the progress bar; with error=True to stderr."""
        if self.master:
            tqdm.write(text, file=self.errors if error else self.console)


def append(path, rows, default=None):
    """Append dicts to a .jsonl file and wait until the disk has them, because a checkpoint relies on them.

    JSON has no NaN and no infinity: null stands for these. default: as in json.dumps, for the rows of a
    parquet file, whose messages may hold dates.
    """
    try:
        lines = [json.dumps(row, allow_nan=False, default=default) for row in rows]
    except ValueError:
        lines = [json.dumps(finite(row), default=default) for row in rows]
    with open(path, "a") as file:
        file.writelines(line + "\n" for line in lines)
        file.flush()
        os.fsync(file.fileno())


def finite(value):
    # Returns a copy of what JSON can hold, with None for NaN and infinity.
    if isinstance(value, dict):
        return {name: finite(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def changes():
    """Return how the project's files differ from its commit, as a diff with new .py files; "" without git."""
    def git(*arguments):
        return subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True,
                              errors="replace").stdout

    try:
        new = git("ls-files", "--others", "--exclude-standard", "*.py").splitlines()
        new = "".join(git("diff", "--no-index", "/dev/null", path) for path in new)
        return git("diff", "HEAD", "--", ".") + new             # a larger repository may hold the project
    except FileNotFoundError:                                   # git is not installed
        return ""


def rewind(path, step):
    """Drop the lines of a .jsonl log for `step` or later; return the objects of the lines that stay.

    A line that no run has written, or that a kill has cut off, is dropped as well.
    """
    kept = []
    with open(path, "a+b") as file:                             # a new run has no log yet
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
    """Return a prompt or a completion as one string; of messages, their contents."""
    return text if isinstance(text, str) else " ".join(str(message["content"] or "") for message in text)
