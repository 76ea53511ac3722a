"""
The frame of a run, which all training scripts share: it begins or goes on, saves, stops, and ends.

None of it is part of an algorithm. run_folder.py finds the folder, checkpoint.py writes the checkpoints,
runlog.py the metrics, the samples and the console output.
"""
import datetime
import math
import os
import signal
import sys
import time

import torch.distributed as dist

import checkpoint
import console
import data
import ranks
from configurator import check, input_errors
from rollout import save_rollouts
from run_folder import locate_run
from runlog import RunLog, peak_memory

# A resumed run must have the same values for these; all other settings may change.
SAME = ("model", "critic_model", "task", "difficulty", "train_prompts", "train_file", "eval_file", "reward",
        "reward_model", "environment", "max_prompt_length", "chat", "system_prompt", "prompts_per_step",
        "num_generations", "seed")


class Run:
    """A run's folder and state, from the start or from a checkpoint.

    settings: what configure returned. script: the training script's __file__. state: what a new run's state
    holds apart from the step; it is saved with each checkpoint, and a resumed run gets it back. Stops the
    script with a message if the settings do not fit the folder or the checkpoint. A collective.
    """

    def __init__(self, settings, script, **state):
        console.make_lenient()
        self.settings, self.script, self.world_size = settings, script, dist.get_world_size()
        kind = os.path.basename(script).removesuffix(".py").removeprefix("train_")
        located = None
        with input_errors():
            # Only rank 0 reads the clock and looks for checkpoints, so that all ranks agree.
            if dist.get_rank() == 0:
                clock = f"{datetime.datetime.now():%Y%m%d-%H%M%S}"
                located = locate_run(settings["out_dir"], settings["resume"],
                                     f"out/{kind}-{settings['task']}-{clock}")
        self.out_dir, self.resumed = ranks.from_master(located)
        self.state = {"step": 0, "position": 0, "num_tokens": 0, "skipped_updates": {}, "settings": settings,
                      "world_size": self.world_size, "checksums": {}} | state
        if self.resumed:
            is_ppo, wants_ppo = os.path.isdir(f"{self.resumed}/critic"), "critic_model" in settings
            check(not is_ppo or wants_ppo, f"{self.resumed} has a critic: a run of PPO")
            check(is_ppo or not wants_ppo, f"{self.resumed} has no critic: not a run of PPO")
            with input_errors():
                loaded = checkpoint.load_state(self.resumed)
            # In the sequence of prompts. A run that saved none has passed over no prompt.
            position = loaded.setdefault("position", loaded["step"] * settings["prompts_per_step"])
            check(type(position) is int, f"{self.resumed}: position={position!r:.100} in its state.json")
            strange = sorted(loaded.keys() - self.state.keys())
            check(not strange, f"{self.resumed} holds {', '.join(strange)}, which {os.path.basename(script)} "
                               "would lose: go on with the script, in the version, that wrote it")
            for key, default in state.items():
                value = loaded.get(key, default)
                numbers = isinstance(value, (int, float)) and isinstance(default, (int, float))
                check(default is None or numbers or type(value) is type(default),
                      f"{self.resumed}: {key}={value!r:.100} in its state.json")
            self.state |= loaded
        before = self.state["settings"]
        for key in SAME:
            now, then = settings.get(key), before.get(key, "" if key == "environment" else None)
            check(now == then, f"{key}={now}, but {self.resumed} comes from a run with {key}={then}")
        self.first_step, self.max_steps = self.state["step"], settings["max_steps"]
        check(self.first_step <= self.max_steps,
              f"max_steps={self.max_steps}, but {self.resumed} has made {self.first_step} steps already")

    def check_data(self, train_set, eval_set):
        """Refuse prompts that are not those of the resumed run: their file may have changed."""
        s, before = self.settings, self.state["settings"]
        checksums = {"train_prompts": data.checksum(train_set.rows),
                     "eval_prompts": data.checksum(prompt.row for prompt in eval_set)}
        for key in ("reward", "environment"):
            if ":" in s[key]:
                path = s[key].rpartition(":")[0]
                check(os.path.isfile(path), f"{key}: no such file: {path}")
                checksums[key] = checkpoint.checksum(path)
        same = {key: self.state["checksums"].get(key, value) == value for key, value in checksums.items()}
        # Another number of held-out prompts is no other data.
        same["eval_prompts"] |= s["eval_prompts"] != before.get("eval_prompts")
        for key, what, file in (("train_prompts", "training", s["train_file"]),
                                ("eval_prompts", "held-out", s["eval_file"] or s["train_file"])):
            check(same[key], f"{file or 'task=' + s['task']}: the {what} prompts are not those of "
                             f"{self.resumed}, so this would not be the same run")
        self.changed = [key for key in ("reward", "environment") if not same.get(key, True)]
        self.state["checksums"] = checksums
        # From here on, beginning with a trial of the reward, nothing may take for ever.
        ranks.watchdog.limit(s["timeout"])

    def begin(self, networks, engine, data_note, updates):
        """Load the optimizers of a resumed run, print the opening lines, catch signals; returns the RunLog.

        networks: {place in a checkpoint: (model, optimizer)}. data_note: a sentence about the prompts.
        updates: the updates of a step, in words.
        """
        with input_errors():
            for place, (network, optimizer) in networks.items() if self.resumed else ():
                checkpoint.load_optimizer(os.path.join(self.resumed, place), network, optimizer)
            config = self.settings | {"checksums": self.state["checksums"]}
            self.log = RunLog(self.out_dir, self.script, config, self.first_step, self.max_steps)
        dist.barrier()
        check(os.path.isdir(self.out_dir),
              f"out_dir={self.out_dir} is not on a file system that all ranks see")
        s, policy, self.engine = self.settings, networks[""][0], engine
        N = s["prompts_per_step"] * s["num_generations"]
        million = sum(p.numel() for p in policy.parameters()) / 1e6
        self.log.say(
            f"{self.out_dir}: {s['model']}, {million:.2f} M parameters, on {self.world_size} x "
            f"{next(policy.parameters()).device.type}, engine {engine.name}\n"
            f"Each step uses {s['prompts_per_step']} prompts x {s['num_generations']} completions = {N} "
            f"sequences and makes {updates}, in micro-batches of at most {s['token_budget']} tokens.\n"
            f"The run has {self.max_steps} steps and evaluates every {s['eval_interval']}, with "
            f"{s['eval_samples']} completions per held-out prompt.\n{data_note}")
        if s["environment"] and s["environment_workers"]:
            self.log.say("environment_workers: turns begin when the environments answer, so the run does not "
                         "repeat bit for bit")
        if self.resumed:
            ranks_before = self.state["world_size"]
            self.log.say(f"goes on from {self.resumed}" + ("" if ranks_before == self.world_size else (
                f", which {ranks_before} ranks wrote: sums round differently on {self.world_size}, so the "
                "steps are not bit for bit those of an unbroken run")))
            for key in self.changed:
                self.log.say(f"{key}={s[key]}: the file has changed since {self.resumed} was written")
        self.state |= {"settings": s, "world_size": self.world_size}
        ranks.watchdog.can_save = True
        self.signals = []
        for name in (signal.SIGTERM, signal.SIGINT):
            signal.signal(name, self._signalled)
        return self.log

    def _signalled(self, number, frame):
        # A launcher may pass on a signal that the process has had already. Only a Ctrl-C that comes more than
        # a second after the first signal ends the run, as soon as Python runs again.
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
        self.stopped = any(ranks.gathered([bool(self.signals) or signalled or ranks.orphaned()]))
        return self.stopped

    def may_step(self, name, norm):
        """Whether a gradient's norm is finite. Logs the norm, or else counts a skipped update.

        Raises RuntimeError after max_skipped_updates skipped ones in a row.
        """
        finite, prefix = math.isfinite(norm), "critic/" if name == "critic" else ""
        self.log.mean(f"{prefix}grad_norm", [norm] if finite else [])
        self.log.sum(f"{name}/skipped_updates", 0 if finite or dist.get_rank() else 1)
        in_a_row = self.state["skipped_updates"]
        in_a_row[name] = 0 if finite else in_a_row.get(name, 0) + 1
        if in_a_row[name] >= self.settings["max_skipped_updates"]:
            raise RuntimeError(
                f"step {self.state['step']}: {in_a_row[name]} updates of the {name} in a row were skipped, "
                "because the gradient was not finite (max_skipped_updates)")
        return finite

    def keep_rollouts(self, rollouts, greedy=None):
        """Write the step's rollouts into the checkpoint whose policy they train, if any, for replay.py."""
        folder = os.path.join(self.out_dir, f"checkpoint-{self.state['step']}")
        exists = os.path.isdir(folder) and not os.path.islink(folder)
        if dist.get_rank() == 0 and self.state["step"] > 0 and exists:
            settings = self.settings | {"step": self.state["step"]}
            if problem := save_rollouts(f"{folder}/rollouts.jsonl", settings, rollouts, greedy):
                self.log.say(problem)

    def end_step(self, rollouts):
        """Write the figures of the step and go on to the next. rollouts: all it sampled, on all ranks."""
        tokens = sum(len(r.ids) for r in rollouts)
        self.state["step"] += 1
        self.state["num_tokens"] += tokens
        self.log.metrics |= {"num_tokens": self.state["num_tokens"],
                             "perf/max_memory_allocated_gb": (peak_memory() - self.engine.allocated) / 1e9}
        self.log.end(tokens)

    def save(self, networks, tokenizer):
        """Write a checkpoint of this step. A collective.

        Before its first step a run writes none, unless it stops there and had resumed from another folder. If
        the save fails, older checkpoints are kept; the script stops only if no later save will follow.
        """
        step, problem = self.state["step"], None
        last = step == self.max_steps or self.stopped
        # A run that resumes in another folder has no checkpoint of its own yet.
        before = os.path.dirname(os.path.abspath(self.resumed)) if self.resumed else self.out_dir
        if step > self.first_step or (last and not os.path.samefile(before, self.out_dir)):
            self.log.flush()
            with self.log.timed("save"):
                problem = checkpoint.save_checkpoint(
                    os.path.join(self.out_dir, f"checkpoint-{step}"), networks, tokenizer, self.state,
                    self.settings["keep_checkpoints"], self.log.eval_scores)
            if problem:
                self.log.say(f"step {step}: no checkpoint, the older ones stand: {problem}")
        if step == self.max_steps:
            self.log.write()
        check(not (problem and last), "the last model could not be saved")
        if self.stopped and step < self.max_steps:
            self.log.say(f"stopped by a signal after {step} steps" + (
                f"; --out_dir={self.out_dir} --resume=auto goes on" if step else ": nothing is saved"))

    def end(self):
        """Close the log and the engine and leave the process group."""
        self.log.close()
        self.engine.close()
        ranks.leave()
