"""
How a run begins or resumes, saves, stops and ends. All training scripts share this; no algorithm needs to.

checkpoint.py finds the folder and writes the checkpoints, run_log.py writes the metrics, the samples and the
console output.
"""
import datetime
import json
import math
import os
import resource
import signal
import sys
import time

import torch
import torch.distributed as dist

from configurator import check, input_errors, printable
from runtime import STARTED_IN, checkpoint, distributed, forecast
from runtime.check_settings import check_run, check_suits
from runtime.run_log import RunLog
from runtime.user_code import source_of, specs

# A resumed run must have the same values for these; all other settings may change.
SAME = ("model", "critic_model", "reference_model", "task", "difficulty", "train_prompts", "train_file",
        "eval_file", "reward", "reward_model", "environment", "tools", "max_prompt_length", "chat",
        "system_prompt", "chat_template", "response_template", "chat_template_kwargs", "prompts_per_step",
        "num_generations", "seed", "shuffle", "lora_rank", "lora_alpha")
CODE = ("reward", "environment", "tools")           # settings that name the user's own files


class Run:
    """A run's folder and state, from the start or from a checkpoint.

    settings: what configure returned. script: the training script's __file__. critic: whether it trains one.
    state: what a script of your own wants to find again in run.state when it is resumed, with the values of a
    new run; it is saved as JSON with each checkpoint. Stops the script with a message if the settings do not
    fit each other, the folder or the checkpoint. A collective.
    """

    def __init__(self, settings, script, critic=False, **state):
        self.settings, self.script, self.world_size = settings, script, dist.get_world_size()
        check_run(settings, self.world_size)
        kind = os.path.basename(script).removesuffix(".py").removeprefix("train_")
        located = None
        with input_errors():
            # Only rank 0 reads the clock and looks for checkpoints, so that all ranks agree.
            if dist.get_rank() == 0:
                clock = f"{datetime.datetime.now():%Y%m%d-%H%M%S}"
                # An environment may have changed the working directory already.
                here = lambda path: path if path in ("", "auto") else os.path.join(
                    STARTED_IN, os.path.expanduser(path))
                located = checkpoint.locate_run(here(settings.out_dir), here(settings.resume),
                                                here(f"out/{kind}-{settings.task}-{clock}"))
        self.out_dir, self.resumed = distributed.from_master(located)
        # For load_policy: what it has to know about the adapters, or 0 if there are none.
        self.adapter = settings.lora_rank and (settings.lora_rank, settings.lora_alpha, self.resumed)
        # From here on, beginning with the chat template, code may run that never ends.
        distributed.watchdog.limit(settings.timeout)
        self.state = {"step": 0, "position": 0, "num_tokens": 0, "skipped_updates": {}, "checksums": {},
                      "settings": vars(settings), "world_size": self.world_size} | state
        self.declared = set(self.state)
        if self.resumed:
            has_critic = os.path.isdir(f"{self.resumed}/critic")
            check(has_critic == critic,
                  f"{self.resumed} has {'a' if has_critic else 'no'} critic, unlike runs of {kind}")
            with open(f"{self.resumed}/trainer/state.json", "rb") as file:
                loaded = json.load(file)
            strange = sorted(loaded.keys() - self.state.keys())
            check(not strange, f"{self.resumed} holds {', '.join(strange)}, which {os.path.basename(script)} "
                               "would lose: resume it with the script, in the version, that wrote it")
            self.state |= loaded
        for key in SAME:
            now, then = getattr(settings, key, ""), self.state["settings"].get(key, "")
            check(now == then, f"{key}={now}, but {self.resumed} comes from a run with {key}={then}")
        self.first_step, self.max_steps = self.state["step"], settings.max_steps
        check(self.first_step <= self.max_steps,
              f"max_steps={self.max_steps}, but {self.resumed} has made {self.first_step} steps already")

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
        memory, cuda = forecast.device_memory()
        self.forecast = forecast.says(s, self.world_size, memory, cuda, table=cuda)
        distributed.watchdog.moved("the trial of reward and environment, or the loading of models")

    def begin(self, networks, engine, data_note, updates):
        """Load the optimizers of a resumed run, print the opening lines, catch signals; returns the RunLog.

        networks: {subfolder of a checkpoint: (model, optimizer)}. data_note: a sentence about the prompts.
        updates: the updates of a step, in words.
        """
        with input_errors():
            for place, (network, optimizer) in networks.items() if self.resumed else ():
                checkpoint.load_optimizer(os.path.join(self.resumed, place), network, optimizer)
            config = vars(self.settings) | {"checksums": self.state["checksums"]}
            self.log = RunLog(self.out_dir, self.script, config, self.first_step, self.max_steps)
        dist.barrier()
        check(os.path.isdir(self.out_dir),
              f"out_dir={self.out_dir} is not on a file system that all ranks see")
        s, policy, self.engine = self.settings, networks[""][0], engine
        engine.version = self.first_step
        N = s.prompts_per_step * s.num_generations
        million = sum(p.numel() for p in policy.parameters()) / 1e6
        self.log.say(
            f"{self.out_dir}: {s.model}, {million:.2f} M parameters, on {self.world_size} x "
            f"{next(policy.parameters()).device.type}, engine {engine.name}\n"
            f"Each step uses {s.prompts_per_step} prompts x {s.num_generations} completions = {N} "
            f"sequences and makes {updates}, in micro-batches of at most {s.token_budget} tokens.\n"
            f"The run has {self.max_steps} steps and evaluates "
            f"{f'every {s.eval_interval}' if s.eval_interval else 'its first and last model'}, with "
            f"{s.eval_samples} completions per held-out prompt.\n{printable(data_note)}\n{self.forecast}")
        if (s.environment or s.tools) and s.call_workers:
            self.log.say("call_workers: turns begin when the environments answer, so the run does not "
                         "repeat bit for bit")
        if self.resumed:
            self.log.say(f"resumes {self.resumed}")
            if self.state["world_size"] != self.world_size:
                self.log.say(f"{self.state['world_size']} ranks wrote it: sums round differently on "
                             f"{self.world_size}, so the steps are not bit for bit those of an unbroken run")
            for key in self.changed:
                self.log.say(f"{key}: its file has changed since {self.resumed} was written")
        self.state |= {"settings": vars(s), "world_size": self.world_size}
        self.signals = []
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
        if len(self.signals) == 1 and self.log.master:
            print("\nThis step will be finished and saved, then the run stops. Ctrl-C again ends it at once.",
                  file=sys.stderr, flush=True)

    def stopping(self, signalled=False):
        """Whether a signal has come, or torchrun has died, on any rank. A collective.

        signalled: whether this rank knows of a signal elsewhere.
        """
        mine = bool(self.signals) or signalled
        self.stopped = any(distributed.gathered([mine]))
        return self.stopped

    def may_step(self, name, norm):
        """Log the norm of a gradient and return True, or count a skipped update and return False if the norm
        is not finite. Raises RuntimeError after max_skipped_updates in a row."""
        finite, prefix = math.isfinite(norm), "" if name == "actor" else f"{name}/"
        self.log.add(means={f"{prefix}grad_norm": [norm] if finite else []},
                     sums={f"{name}/skipped_updates": 0 if finite or dist.get_rank() else 1})
        in_a_row = self.state["skipped_updates"]
        in_a_row[name] = 0 if finite else in_a_row.get(name, 0) + 1
        if in_a_row[name] >= self.settings.max_skipped_updates:
            raise RuntimeError(
                f"step {self.state['step']}: {in_a_row[name]} updates of the {name} in a row were skipped, "
                "because the gradient was not finite (max_skipped_updates)")
        return finite

    def end_step(self, rollouts, figures, samples):
        """Write the figures of the step and continue with the next one.

        rollouts: those of all ranks. figures, samples: what rewards.py makes of them for the logs.
        """
        if self.state["step"] == self.first_step:
            self._check_state()                                 # what the loop has put into it
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
        and stops at once, because the new folder has no checkpoint yet. If a save fails, older checkpoints
        are kept, and the script stops only if no other save will follow.
        """
        self._check_state()
        step, problem = self.state["step"], None
        last = step == self.max_steps or self.stopped
        before = os.path.dirname(os.path.abspath(self.resumed)) if self.resumed else self.out_dir
        if step > self.first_step or (last and not os.path.samefile(before, self.out_dir)):
            self.log.flush()
            with self.log.timed("save"):
                problem = checkpoint.save_checkpoint(
                    os.path.join(self.out_dir, f"checkpoint-{step}"), networks, tokenizer, self.state,
                    self.settings.keep_checkpoints, self.log.eval_scores)
            if problem:
                self.log.say(f"step {step}: no checkpoint, the older ones stand: {problem}")
        if step == self.max_steps:
            self.log.write()
        check(not (problem and last), f"the last model could not be saved: {problem}")
        if self.stopped and step < self.max_steps:
            self.log.say(f"stopped by a signal after {step} steps" + (
                f"; --out_dir={self.out_dir} --resume=auto resumes it" if step else ": nothing is saved"))

    def end(self):
        """Close the log, write the report if the run was short, close the engine, leave the process group."""
        self.log.bar.close()
        if self.log.master:
            import report
            self.log.say(report.at_end(self.out_dir))
        self.engine.close()
        distributed.leave()
