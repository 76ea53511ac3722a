"""
The frame of a run: how it begins or resumes, ends its steps, saves, stops and ends.

All training scripts share this file, and no algorithm has to change it. metrics.py logs, checkpoint.py finds
the folder and writes the checkpoints.
"""
import datetime
import json
import math
import os
import resource
import signal
import time
import zlib
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from safetensors.numpy import load_file

from configurator import (check, check_tiny_defaults, check_values, fail, input_errors, overridden,
                          printable)
from runtime import checkpoint, distributed, metrics
from runtime.check_model import forecast_note, located
from runtime.user_code import json_text

# A resumed run must have the same values for these settings; all other settings may change.
SAME = ("model", "critic_model", "reference_model", "task", "train_prompts", "train_file",
        "eval_file", "reward", "reward_model", "environment", "tools", "agent", "max_prompt_length", "chat",
        "system_prompt", "chat_template", "chat_template_kwargs", "prompts_per_step",
        "num_generations", "seed", "lora_rank")
MAX_SKIPPED = 5                 # this many updates in a row with a gradient that is not finite end the run
BOUNDED = "gspo", "gmpo", "cispo", "dppo"       # values of loss_type with clip bounds of their own
FIRST_SCALE = 16                # of the loss in float16, as a power of 2, as in torch.amp.GradScaler


def check_run(settings, trainers):
    """Check all settings of a training script. trainers: how many ranks train."""
    # Ranks that train also sample, each for prompts of its own, unless there are ranks for the engines alone.
    samplers = getattr(settings, "rollout_ranks", 0)
    check(trainers > 0, f"rollout_ranks={samplers} leaves no trainer: there are {trainers + samplers} ranks "
                        "(torchrun --nproc_per_node=2 train_async.py has two)")
    engines = samplers // (settings.vllm_tensor_parallel_size or 1) or trainers
    check_values(SimpleNamespace(**vars(settings), trainers=trainers, samplers=samplers or trainers,
                                 engines=engines))


def read_state(resumed, state, settings, script):
    # Returns state and arrays of a checkpoint, if a run with this state and these settings may resume it.
    loaded = json.loads(Path(resumed, "trainer", "state.json").read_bytes())
    if strange := sorted(loaded.keys() - state.keys()):
        fail(f"{resumed} holds {', '.join(strange)}, which {os.path.basename(script)} would lose: resume it "
             "with the script that wrote it, or name what it holds in Run(...)")
    for key in SAME:
        now, then = getattr(settings, key, ""), loaded["settings"].get(key, "")
        # A path may be spelled in another way.
        one, other = (os.path.realpath(located(str(value))) for value in (now, then))
        check(one == other, f"{key}={now}, but {resumed} comes from a run with {key}={then}")
    check(loaded["step"] <= settings.max_steps, f"max_steps={settings.max_steps}, but {resumed} has made "
                                                f"{loaded['step']} steps already")
    arrays = f"{resumed}/trainer/arrays.safetensors"
    return loaded, load_file(arrays) if os.path.exists(arrays) else {}


def check_state(state, keys):
    """Stop the script if JSON would change one of these values, or if ranks differ in one. A collective."""
    with input_errors():
        sums = {key: zlib.crc32(json_text(f"run.state[{key!r}]", state[key]).encode()) for key in keys}
    for others in distributed.gathered([sums]):                 # the texts may be long, and the ranks many
        check(sums == others, f"the ranks differ in {[*dict(sums.items() ^ others.items())]} of run.state, "
                               "and a resumed run would have that of rank 0")


class Run:
    """A run's folder and state, from the start or from a checkpoint.

    state: what a script wants to find in run.state again, with the values of a new run. A checkpoint has
    run.state as JSON and run.arrays, {name: NumPy array}. Ends a script that the checkpoint does not fit. A
    collective.
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
        in_float32 = distributed.compute_dtype(settings.dtype) == torch.float32
        self.logprob_gap = settings.logprob_gap or (1e-3 if in_float32 else 0)
        # From here on, beginning with the chat template, code may run that never ends.
        distributed.watchdog.limit(settings.timeout)
        self.state = {"step": 0, "position": 0, "num_tokens": 0, "skipped_updates": {}, "checksums": {},
                      "eval_scores": {}, "evaluated": {}, "settings": vars(settings), "loss_scale": {},
                      "clock": clock, "first_gap": None}
        self.own_state = self.state.keys() - {"position"}       # which no script sets
        self.state |= state
        self.arrays, self.signalled = {}, 0.0
        if self.resumed:
            loaded, self.arrays = read_state(self.resumed, self.state, settings, script)
            self.state |= loaded
        self.first_step = self.saved = self.state["step"]

    def check_data(self, folders, train_set, eval_set):
        """Raise ValueError for prompts that are not those of the resumed run, and for a model that no device
        can hold or that the default settings do not suit."""
        s, before = self.settings, self.state["settings"]
        check_tiny_defaults(s, folders.suits)
        self.tokenizer = folders.tokenizer
        for key, file, rows in (("train_prompts", s.train_file, (row for _, row in train_set.rows)),
                                ("eval_prompts", s.eval_file or s.train_file, eval_set)):   # with tokens
            found = checkpoint.checksum_of_rows(rows)
            # If the number of held-out prompts was changed, they differ because of that.
            check(self.state["checksums"].get(key, found) == found or getattr(s, key) != before.get(key),
                  f"{file or 'task=' + s.task}: its {key} are not those of {self.resumed}")
            self.state["checksums"][key] = found
        self.notes = [forecast_note(s, self.world_size), folders.note]
        distributed.watchdog.moved("the trial of reward and environment, or the loading of models")

    @property
    def gap_bound(self):
        """The largest mean |trainer - engine| of logprobs, in nats, that does not stop the run."""
        first = self.state["first_gap"]
        # What 16 bits round off depends on the model.
        return self.logprob_gap or (0.15 if first is None else max(0.05, 3 * first))

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
        self.state["settings"] = vars(self.settings)
        with input_errors():
            self.log = metrics.RunLog(
                self.out_dir, self.script, vars(self.settings) | {"defaults": overridden}, self.state)
        self.log.say(said)
        for name in [place or "actor" for place in networks] if self.settings.dtype == "float16" else ():
            self._scale_loss(name, self.state["loss_scale"].get(name, FIRST_SCALE))
        engine.version, engine.stop = self.first_step, self.stop
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
            self._leave(save or self.save)

    def _leave(self, save):
        self.state |= self.log.begun
        save()
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

    def end_step(self, rollouts, group_std):
        """Write the figures of a step's rollouts, of all ranks, and some samples. group_std: of losses.py."""
        log, step, tokens = self.log, self.state["step"], sum(len(r.ids) for r in rollouts)
        seconds, G = time.perf_counter() - log.started, self.settings.num_generations
        # Bytes of tensors on this rank's GPU, or of the process, which Linux counts in KiB.
        peak = (torch.cuda.max_memory_allocated() if torch.cuda.is_available() else
                resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
        self.state["step"] += 1
        self.state["num_tokens"] += tokens
        check_state(self.state, self.state.keys() - self.own_state)
        if self.state["first_gap"] is None:
            self.state["first_gap"] = log.metrics.get("sampling/sampling_logp_difference/mean")
        engines = getattr(self.engine, "engines", self.world_size)
        log.metrics |= metrics.rollout_metrics(rollouts, G, group_std, engines) | {
            "num_tokens": self.state["num_tokens"], "perf/throughput": tokens / seconds,
            "perf/max_memory_allocated_gb": (peak - self.engine.allocated) / 1e9, "timing_s/step": seconds}
        if problems := [*filter(None, (r.counts.get("problem", r.problem) for r in rollouts))]:
            log.say(f"step {step}: {len(problems)} of {len(rollouts)} completions failed or took too long; "
                    f"the first: {problems[0]}")
        if all(math.isnan(r.score) for r in rollouts):
            if problems:
                raise RuntimeError(f"nothing was scored; {problems[0]}")
            log.say(f"step {step}: nothing was scored. Does the script call scorer(...), and does the reward "
                    "return more than None?")
        samples = metrics.sample_lines(rollouts, G, self.tokenizer, step)
        log.write(samples)
        log.show(rollouts, samples, seconds)
        log.start(self.state["step"])

    def save(self):
        """Write a checkpoint of this step, unless the run has begun with it. A collective.

        After the last step it also writes the line of the last evaluation. If a save fails, on whichever
        rank, the script stops, and the older checkpoints stand.
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
        """Write the report, end engines that are apart, and leave the process group."""
        scores = self.state["eval_scores"]
        best = max(reversed(scores), key=scores.get, default=0)
        if int(best) > self.first_step and not os.path.isdir(f"{self.out_dir}/checkpoint-{best}"):
            self.log.say(f"Step {best} has the best evaluation but no checkpoint: save_interval says which "
                         "models are saved")
        self.log.report()
        self.engine.close()
        distributed.leave()


def opening(run, policy, data_note, updates):
    # Returns the lines with which a run begins.
    s, B, G = run.settings, run.settings.prompts_per_step, run.settings.num_generations
    million = sum(p.numel() for p in policy.parameters()) / 1e6
    return "\n".join(filter(None, [
        f"{run.out_dir}: {s.model}, {million:.2f} M parameters, on {run.world_size} x "
        f"{next(policy.parameters()).device.type}, engine {run.engine.name}",
        f"Each of {s.max_steps} steps samples {B} x {G} = {B * G} completions (prompts_per_step x "
        f"num_generations) and makes {updates}, in micro-batches of at most {s.token_budget} tokens.",
        printable(data_note), *run.notes,
        *(f"{key}={value} is not read: the run goes on with {key}={run.state[key]} of its state"
          for key, value in vars(s).items() - run.state["settings"].items() if key in run.state),
        (s.environment or s.tools or s.agent) and s.call_workers and
        "call_workers: turns begin when the environments answer, so the run does not repeat bit for bit",
        run.resumed and f"resumes {run.resumed}",
        getattr(s, "loss_type", "") in BOUNDED and s.epsilon == 0.2 and s.epsilon_high in (0.2, 0.28) and
        f"epsilon={s.epsilon:g} and epsilon_high={s.epsilon_high:g} are bounds for loss_type=clip; those of "
        f"{s.loss_type} are in config/methods/{s.loss_type}.py",
        s.dtype == "bfloat16" and not (
            torch.cuda.is_available() or torch.cpu._is_avx512_bf16_supported()) and
        "dtype=bfloat16: on a processor without AVX512_BF16 this is many times slower than float32"]))
