"""
The frame of a run: how it begins or resumes, what it logs, how it saves, stops and ends.

    Run       the settings, the folder and the state of a run, from the start or from a checkpoint
    RunLog    its metrics and samples, for files, TensorBoard and the console

All training scripts share this file, and no algorithm has to change it. checkpoint.py finds the folder and
writes the checkpoints.
"""
import contextlib
import copy
import datetime
import json
import math
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from safetensors.numpy import load_file
from torch.utils.tensorboard import SummaryWriter

from configurator import check, fail, given, input_errors, printable
from runtime import checkpoint, distributed, health
from runtime.check_model import forecast_note, located
from runtime.check_settings import check_suits, check_values
from runtime.user_code import source_of, specs

ROOT = Path(__file__).resolve().parents[1]
# A resumed run must have the same values for these settings; all other settings may change.
SAME = ("model", "critic_model", "reference_model", "task", "train_prompts", "train_file",
        "eval_file", "reward", "reward_model", "environment", "tools", "agent", "max_prompt_length", "chat",
        "system_prompt", "chat_template", "chat_template_kwargs", "prompts_per_step",
        "num_generations", "seed", "lora_rank")
MAX_SKIPPED = 5                 # this many updates in a row with a gradient that is not finite end the run
FIRST_SCALE = 16                # of the loss in float16, as a power of 2, as in torch.amp.GradScaler
# What the console shows of a step, in 80 columns: a word, the metric that the word stands for, and a format.
CONSOLE = (("reward", "reward", ".3f"), ("length", "completions/mean_length", "4.0f"),
           ("ended by a limit", "episodes/limited", "d"), ("entropy", "entropy", ".3f"),
           ("var", "critic/vf_explained_var", ".2f"),
           ("grad", "grad_norm", ".2f"), ("gap", "sampling/sampling_logp_difference/mean", ".0e"))


def check_run(settings, trainers):
    """Check all settings of a training script. trainers: how many ranks train."""
    # Ranks that train also sample, each for prompts of its own, unless there are ranks for the engines alone.
    samplers = getattr(settings, "rollout_ranks", 0)
    check(trainers > 0, f"rollout_ranks={samplers} leaves no trainer: there are {trainers + samplers} ranks "
                        "(torchrun --nproc_per_node=2 train_async.py has two)")
    engines = samplers // (settings.vllm_tensor_parallel_size or 1) or trainers
    check_values(SimpleNamespace(**vars(settings), trainers=trainers, samplers=samplers or trainers,
                                 engines=engines, passes=getattr(settings, "num_epochs", 1)))


def read_state(resumed, state, settings, script):
    # Returns state and arrays of a checkpoint, if a run with this state and these settings may resume it.
    loaded = json.loads(Path(resumed, "trainer", "state.json").read_bytes())
    if strange := sorted(loaded.keys() - state.keys()):
        fail(f"{resumed} holds {', '.join(strange)}, which {os.path.basename(script)} would lose: resume it "
             "with the script that wrote it, or name what it holds in Run(...)")
    has_critic = os.path.isdir(f"{resumed}/critic")
    check(has_critic == state.get("critic", False), f"{resumed} has {'a' if has_critic else 'no'} critic, "
                                                    f"unlike runs of {os.path.basename(script)}")
    for key in SAME:
        now, then = getattr(settings, key, ""), loaded["settings"].get(key, "")
        # A path may be spelled in another way.
        one, other = (os.path.realpath(located(str(value))) for value in (now, then))
        check(one == other, f"{key}={now}, but {resumed} comes from a run with {key}={then}")
    check(loaded["step"] <= settings.max_steps, f"max_steps={settings.max_steps}, but {resumed} has made "
                                                f"{loaded['step']} steps already")
    arrays = f"{resumed}/trainer/arrays.safetensors"
    return loaded, load_file(arrays) if os.path.exists(arrays) else {}


def checksums_of_files(settings):
    # Returns {path: checksum of its last MiB} of the files of your own and of the models, which may change.
    get = lambda key: getattr(settings, key, "")
    paths = [source_of(one) for key in ("reward", "environment", "tools", "agent") for one in specs(get(key))]
    for key in ("model", "reference_model", "reward_model"):
        paths += Path(located(get(key) or os.devnull)).glob("*")
    return {str(path): checkpoint.checksum(path, 2 ** 20) for path in paths if os.path.isfile(path)}


class Run:
    """A run's folder and state, from the start or from a checkpoint.

    state: what a script wants to find in run.state again, with the values of a new run. A checkpoint has
    run.state as JSON and run.arrays, {name: NumPy array}. Stops a script that does not fit it. A collective.
    """

    def __init__(self, settings, script, **state):
        self.settings, self.script, self.world_size = settings, script, dist.get_world_size()
        check_run(settings, self.world_size)
        kind = os.path.basename(script).removesuffix(".py").removeprefix("train_")
        with input_errors():
            # Only rank 0 reads the clock and looks for checkpoints, so that all ranks agree.
            now, (task, *_) = datetime.datetime.now(), settings.task.split(":")
            self.out_dir, self.resumed, clock = distributed.from_master((*checkpoint.locate_run(
                settings.out_dir, settings.resume, f"out/{kind}-{task}-{now:%Y%m%d-%H%M%S}"),
                now.isoformat()) if dist.get_rank() == 0 else None)
        # For load_policy: what it has to know about the adapters, or 0 if there are none.
        self.adapter = settings.lora_rank and (settings.lora_rank, settings.seed, self.resumed)
        # From here on, beginning with the chat template, code may run that never ends.
        distributed.watchdog.limit(settings.timeout)
        self.state = {"step": 0, "position": 0, "num_tokens": 0, "skipped_updates": {}, "checksums": {},
                      "eval_scores": {}, "evaluated": {}, "settings": vars(settings), "loss_scale": {},
                      "world_size": self.world_size, "clock": clock, "first_gap": None} | state
        self.arrays, self.signalled = {}, 0.0
        if self.resumed:
            loaded, self.arrays = read_state(self.resumed, self.state, settings, script)
            self.state |= loaded
        self.first_step = self.saved = self.state["step"]

    def check_data(self, folders, train_set, eval_set):
        """Raise ValueError for prompts that are not those of the resumed run, and for a model that no device
        can hold or that the default settings do not suit."""
        s, before = self.settings, self.state["settings"]
        check_suits(s, folders.suits)
        self.tokenizer = folders.tokenizer
        for key, file, rows in (("train_prompts", s.train_file, [row for _, row in train_set.named]),
                                ("eval_prompts", s.eval_file or s.train_file, eval_set)):   # with tokens
            found = checkpoint.checksum_of_rows(rows)
            # If the number of held-out prompts was changed, they differ because of that.
            check(self.state["checksums"].get(key, found) == found or getattr(s, key) != before.get(key),
                  f"{file or 'task=' + s.task}: its {key} are not those of {self.resumed}")
            self.state["checksums"][key] = found
        self.notes = [forecast_note(s, self.world_size), folders.note]
        for path, found in checksums_of_files(s).items():
            if self.state["checksums"].get(path, found) != found:
                self.notes.append(f"{path} has changed since {self.resumed} was written")
            self.state["checksums"][path] = found
        distributed.watchdog.moved("the trial of reward and environment, or the loading of models")

    @property
    def gap_bound(self):
        """The largest mean |trainer - engine| of logprobs, in nats, that does not stop the run."""
        first = self.state["first_gap"]
        if self.settings.logprob_gap or distributed.compute_dtype(self.settings.dtype) == torch.float32:
            return self.settings.logprob_gap or 1e-3
        return 0.15 if first is None else max(0.05, 3 * first)  # what 16 bits round off depends on the model

    def begin(self, networks, engine, data_note, updates):
        """Load the optimizers of a resumed run, print the opening lines, catch signals; return the RunLog.

        networks: {subfolder of a checkpoint: (model, optimizer or None)}. updates: those of a step, in words.
        """
        with input_errors():
            if self.resumed:
                checkpoint.load_optimizers(self.resumed, networks)
        dist.barrier()
        check(os.path.isdir(self.out_dir),
              f"out_dir={self.out_dir} is not on a file system that all ranks see")
        self.engine, self.networks, (policy, _) = engine, networks, networks[""]
        said = opening(self, policy, data_note, updates)
        self.state |= {"settings": vars(self.settings), "world_size": self.world_size}
        with input_errors():
            self.log = RunLog(self.out_dir, self.script, vars(self.settings), self.state)
        self.log.say(said)
        for name in [place or "actor" for place in networks] if self.settings.dtype == "float16" else ():
            self._scale_loss(name, self.state["loss_scale"].get(name, FIRST_SCALE))
        engine.version, engine.stop = self.first_step, self.stop
        if self.resumed and self.settings.lora_rank:            # the engine was loaded with the base model
            engine.load_weights(policy.full_weights(naming=engine.naming), self.first_step)
        for name in (signal.SIGTERM, signal.SIGINT):
            signal.signal(name, self._signalled)
        return self.log

    def _signalled(self, number, frame):
        # A launcher may pass on a signal that the process has already received, so only a Ctrl-C that comes
        # more than a second later ends the run.
        if not self.signalled:
            self.signalled, self.engine.signalled = time.monotonic(), True
            self.log.say("The run saves and stops: soon if it samples, otherwise when this step is finished. "
                         "Ctrl-C again ends it at once.")
        elif number == signal.SIGINT and time.monotonic() - self.signalled > 1:
            os._exit(130)

    def due(self, interval):
        """Return whether what comes every `interval` steps is due; it is always due after the last step."""
        step, last = self.state["step"], self.settings.max_steps
        return step == last or step % (interval or last) == 0

    def stop(self, save=None):
        """If a signal has come or torchrun has died, on any rank, save the step as it began, and end the run.

        Engines call this before and after they sample. save: what to call instead of Run.save. A collective.
        """
        if any(distributed.gathered([bool(self.signalled)])):
            self.state |= self.log.begun
            (save or self.save)()
            more = self.saved > self.first_step and f"--out_dir={self.out_dir} --resume=auto goes on"
            self.log.say(f"stopped by a signal after {self.state['step']} steps; {more or 'nothing to save'}")
            self.end()

    def _scale_loss(self, name, exponent):
        # In float16: the loss scale is 2 to the power of the whole part.
        self.state["loss_scale"][name], scale = exponent, 2.0 ** int(exponent)
        self.networks["" if name == "actor" else name][0].set_loss_scale(scale)
        return scale

    def _overflows(self, name, finite):
        # In float16: adapts the loss scale, and returns whether the gradient was only too large for it.
        exponent = self.state["loss_scale"][name]
        scale = self._scale_loss(name, exponent + 0.01 if finite else max(0, int(exponent) - 1))
        self.log.metrics[f"{name}/loss_scale"] = scale
        if overflows := not finite and exponent >= 1:
            self.log.say(f"step {self.state['step']}: a gradient of the {name} is too large for float16, so "
                         f"its update is skipped and the loss scale becomes {scale:g}")
        return overflows

    def may_step(self, name, norm):
        """Log the norm of a gradient and return True, or count a skipped update and return False if the norm
        is not finite. Raises RuntimeError after MAX_SKIPPED in a row. In float16 the loss scale doubles every
        hundred updates, and while it is above 1 it is first halved, without counting the update."""
        finite, in_a_row = math.isfinite(norm), self.state["skipped_updates"]
        if self.settings.dtype == "float16" and self._overflows(name, finite):
            return False
        self.log.add(means={"grad_norm" if name == "actor" else f"{name}/grad_norm": [norm]},
                     sums={f"{name}/skipped_updates": 0 if finite or dist.get_rank() else 1})
        in_a_row[name] = 0 if finite else in_a_row.get(name, 0) + 1
        if not finite:
            self.log.say(f"step {self.state['step']}: an update of the {name} is skipped, because the norm "
                         f"of its gradient is {norm}: is there a NaN among the advantages, or in the loss?")
            if in_a_row[name] >= MAX_SKIPPED:
                raise RuntimeError(f"{MAX_SKIPPED} updates of the {name} in a row were skipped")
        return finite

    def end_step(self, rollouts, figures, samples):
        """Write the figures of the step and a few samples, which rewards.py made of all ranks' rollouts."""
        log, step, tokens = self.log, self.state["step"], sum(len(r.ids) for r in rollouts)
        seconds = time.perf_counter() - log.started
        # Bytes of tensors on this rank's GPU, or of the process, which Linux counts in KiB.
        peak = (torch.cuda.max_memory_allocated() if torch.cuda.is_available() else
                resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
        self.state["step"] += 1
        self.state["num_tokens"] += tokens
        if self.state["first_gap"] is None:
            self.state["first_gap"] = log.metrics.get("sampling/sampling_logp_difference/mean")
        log.metrics |= figures | {
            "num_tokens": self.state["num_tokens"], "perf/throughput": tokens / seconds,
            "perf/max_memory_allocated_gb": (peak - self.engine.allocated) / 1e9, "timing_s/step": seconds}
        if problems := [*filter(None, (r.counts.get("problem", r.problem) for r in rollouts))]:
            log.say(f"step {step}: {len(problems)} of {len(rollouts)} completions failed or took too long; "
                    f"the first: {problems[0]}")
            if all(math.isnan(r.score) for r in rollouts):
                raise RuntimeError(f"nothing was scored; {problems[0]}")
        log.write(samples)
        for s in samples[:4] if any(name.startswith("eval") for name in log.metrics) else ():
            log.say(f"    {plain_text(s['prompt'])[-60:]!r}\n     -> {plain_text(s['completion'])[-40:]!r:44}"
                    f" reward {s['reward']:g}, truth {s['truth']!r}")
        if step + 1 == health.FIRST:
            log.say(health.same_scores(log.lines, plain_text(samples[0]["completion"]), samples[0]["truth"]))
        shown = [f"{word} {log.metrics[name]:{form}}" for word, name, form in CONSOLE if name in log.metrics]
        log.say("  ".join([f"step {step:3d}", *shown, f"{seconds:.1f} s"]))
        log.start(self.state["step"])

    def save(self):
        """Write a checkpoint of this step, unless the run has begun with it. A collective.

        If a save fails, on whichever rank, the script stops, and the older checkpoints stand.
        """
        step = self.state["step"]
        if step > self.saved:
            with self.log.timed("save"):
                try:
                    checkpoint.save_checkpoint(
                        os.path.join(self.out_dir, f"checkpoint-{step}"), self.networks, self.tokenizer,
                        self.state, self.settings.keep_checkpoints, self.arrays)
                except Exception as error:      # on a full disk libraries raise all kinds of errors
                    fail(f"checkpoint-{step} could not be saved, the older ones stand: {error!r:.300}")
            self.saved = step
        if step == self.settings.max_steps:
            self.log.write()

    def end(self):
        """Write the report, close the engine, and leave the process group."""
        if self.log.master:
            # In a process of its own, whose failure costs nothing else.
            done = subprocess.run([sys.executable, ROOT / "report.py", self.out_dir], capture_output=True,
                                  text=True)
            self.log.say((done.stdout or done.stderr).strip())
        self.engine.close()
        distributed.leave()


def opening(run, policy, data_note, updates):
    # Returns the lines with which a run begins.
    s, before = run.settings, run.state["world_size"]
    B, G = s.prompts_per_step, s.num_generations
    million = sum(p.numel() for p in policy.parameters()) / 1e6
    return "\n".join(filter(None, [
        f"{run.out_dir}: {s.model}, {million:.2f} M parameters, on {run.world_size} x "
        f"{next(policy.parameters()).device.type}, engine {run.engine.name}",
        f"Each of {s.max_steps} steps samples {B} x {G} = {B * G} completions (prompts_per_step x "
        f"num_generations) and makes {updates}, in micro-batches of at most {s.token_budget} tokens.",
        printable(data_note), *run.notes,
        (s.environment or s.tools or s.agent) and s.call_workers and
        "call_workers: turns begin when the environments answer, so the run does not repeat bit for bit",
        run.resumed and f"resumes {run.resumed}",
        s.dtype == "bfloat16" and not (
            torch.cuda.is_available() or torch.cpu._is_avx512_bf16_supported()) and
        "dtype=bfloat16: on a processor without AVX512_BF16 this is many times slower than float32",
        before != run.world_size and
        f"{before} ranks wrote it: sums round differently on {run.world_size}, so the steps are not bit for "
        "bit those of an unbroken run"]))


class RunLog:
    """Writes metrics.jsonl and TensorBoard events, samples.jsonl, config.json and a copy of the script, and
    prints to the console.

    settings: a dict of the run's settings. state: run.state; the log begins at its step, and drops the lines
    of that step and of later ones, because the run writes them again. Only rank 0 writes. The line of a step
    consists of `metrics`, a dict of figures that all ranks agree on, and of what `add` was given, summed or
    averaged over all ranks when the step ends. A disk that is full ends the run.
    """

    gathered = staticmethod(distributed.gathered)

    def __init__(self, out_dir, script, settings, state):
        self.master, self.out_dir, self.state = dist.get_rank() == 0, out_dir, state
        self.settings, first_step = settings, state["step"]
        self.lines, self.told = [], set()                       # what health.py reads, and what it has said
        if self.master:
            self.lines = rewind(os.path.join(out_dir, "metrics.jsonl"), first_step)
            rewind(os.path.join(out_dir, "samples.jsonl"), first_step)
            Path(out_dir, os.path.basename(script)).write_bytes(Path(script).read_bytes())
            Path(out_dir, "config.json").write_text(json.dumps(
                {"script": os.path.basename(script)} | settings
                | {"checksums": state["checksums"], "out_dir": out_dir, "defaults": given}, indent=1))
            # So that a changed losses.py is found again; it is empty where nothing differs from the commit.
            Path(out_dir, "changes.diff").write_text(changes())
            self.board = SummaryWriter(out_dir, purge_step=first_step)
        self.start(first_step)

    # ------------------------------------------------------------ a step's figures

    def start(self, step):
        """Begin the line of a step, for a resumed run with the evaluation that its checkpoint holds."""
        if self.state["evaluated"].get("step") != step:
            self.state["evaluated"] = {"step": step}
        self.metrics = {**self.state["evaluated"]}
        self.totals = {}                                        # {name: (total, count)}; 0 counts a sum
        self.begun, self.started = copy.deepcopy(self.state), time.perf_counter()
        distributed.watchdog.moved(f"step {step}")

    @contextlib.contextmanager
    def timed(self, name):
        """Add the seconds that the block takes, including its work on the GPU, to timing_s/name."""
        start, key = time.perf_counter(), f"timing_s/{name}"
        distributed.watchdog.moved(f"step {self.metrics['step']}, {name}")
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.metrics[key] = self.metrics.get(key, 0.0) + time.perf_counter() - start
        distributed.watchdog.moved(f"step {self.metrics['step']}, after {name}")

    def add(self, sums={}, means={}):
        """Add to the step's figures over all ranks, without waiting for a GPU.

        sums: {name: a number, or a tensor of one number}. means: {name: a tensor or list of values}; a mean
        that gets no values is left out.
        """
        for name, values in (sums | means).items():
            values = values.detach() if torch.is_tensor(values) else torch.tensor(values, dtype=torch.float64)
            total, count = self.totals.get(name, (0.0, 0))
            if name in sums or values.numel():
                self.totals[name] = total + values.sum(), 0 if name in sums else count + values.numel()

    def evaluation(self, results, failures=(), count=0):
        """Log the results of an evaluation, and show the first three on the console.

        failures: why completions were not scored, out of `count`. If more than a tenth was not, the
        evaluation chooses no best checkpoint.
        """
        self.metrics |= results
        # A resumed run knows the evaluation of the model that it begins with, and the best checkpoint.
        self.state["evaluated"] |= results
        step = self.metrics["step"]
        if failures:
            self.say(f"step {step}: {len(failures)} of {count} held-out completions were not scored; the "
                     f"first: {failures[0]}")
        if len(failures) <= count / 10:
            self.state["eval_scores"] |= {str(step): value for name, value in results.items()
                                          if name.startswith("eval/mean@")}
        self.begun = copy.deepcopy(self.state)                  # so that a stop in rollouts saves it
        # The first three are mean@k, pass@k and maj@k; more do not fit into 80 columns.
        shown = [f"{name} {value:.3f}" for name, value in results.items()][:3]
        self.say("  ".join([f"step {step:3d}", *shown]))
        for text in health.news(self.lines, self.settings, self.told):
            self.say(text)

    def write(self, samples=()):
        """Write the line of this step to metrics.jsonl and TensorBoard. A collective.

        samples: dicts, which are written to samples.jsonl.
        """
        summed = {}                                             # {name: (total, count)}, over all ranks
        for name, total, count in distributed.gathered(
                [(name, float(total), count) for name, (total, count) in self.totals.items()]):
            before, counted = summed.get(name, (0.0, 0))
            summed[name] = before + total, counted + count
        self.metrics = {name: total / (count or 1) for name, (total, count) in summed.items()} | self.metrics
        if not self.master:
            return
        self.lines.append({key: self.metrics[key] for key in self.metrics if health.READ.match(key)})
        rows = [{"step": self.metrics["step"]} | sample for sample in samples]
        try:
            for name, lines in (("metrics.jsonl", [self.metrics]), ("samples.jsonl", rows)):
                with open(os.path.join(self.out_dir, name), "a") as file:
                    for line in lines:
                        # Rows of a parquet file may hold dates. JSON has neither NaN nor infinity, but null.
                        text = json.dumps(line, default=str)
                        file.write(json.dumps(json.loads(text, parse_constant=lambda name: None)) + "\n")
                    file.flush()
                    os.fsync(file.fileno())                     # a checkpoint relies on these lines
            for name, value in self.metrics.items():
                with contextlib.suppress(ValueError):           # TensorBoard does not accept every name
                    self.board.add_scalar(name, value, self.metrics["step"])
            self.board.flush()
        except OSError as error:
            fail(f"out_dir={self.out_dir} cannot be written: {error}; the checkpoints in it stand")

    def say(self, text):
        """Print a line, or several, on rank 0."""
        if self.master and text:
            print(text)


def changes():
    """Return how the project's files differ from its commit, as a diff of at most 1 MB; "" without git."""
    with contextlib.suppress(FileNotFoundError):                # git is not installed
        # A larger repository may hold the project.
        return subprocess.run(["git", "-C", ROOT, "diff", "HEAD", "--", "."], capture_output=True, text=True,
                              errors="replace").stdout[:1_000_000]
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
