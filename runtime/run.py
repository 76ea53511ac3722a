"""
The frame of a run: how it begins or resumes, ends its steps, saves, stops and ends.

All training scripts share this file, and no algorithm has to change it. metrics.py logs, checkpoint.py finds
the folder and writes the checkpoints.

What a resumed run needs: new_state lists what run.state keeps, and SAME lists the settings that must stay the
same. checkpoint.py says how state, models and optimizers lie on disk.

What a signal does: a run that samples ends the sampling at once; any other run finishes its step first. Then
Run.stop_if_signalled saves the state with which the present step began, and ends the run, so the resumed run
makes this step from its beginning. At a Ctrl-C that comes more than a second after the first signal, the
process ends at once and saves nothing (catch_signals).
"""
import contextlib
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

from configurator import (check, check_tiny_defaults, check_values, fail, input_errors, is_of_library,
                          overridden, printable, reading)
from runtime import checkpoint, distributed, metrics
from runtime.model_folder import read_config

# A resumed run must have the same values for these settings; all other settings may change.
SAME = ("model", "critic_model", "reference_model", "task", "train_prompts", "train_file",
        "eval_file", "reward", "reward_model", "environment", "tools", "agent", "max_prompt_length", "chat",
        "prompt_format", "system_prompt", "chat_template", "chat_template_kwargs", "seed", "lora_rank",
        "lora_from", "images", "best_by")
# It may have others for these, if its checkpoint holds no rollouts and its position counts rows.
BATCH = "prompts_per_step", "num_generations"
RESUMING = {"resume": "", "out_dir": "", "max_steps": 0}        # these change no evaluation
BOUNDED = "gspo", "gmpo", "cispo", "dppo"       # values of loss_type with clip bounds of their own


# ---------------------------------------------------------------- what a run begins with

def check_run(settings, trainers):
    """Check all settings of a training script. trainers: how many ranks train."""
    # Ranks that train also sample, each for prompts of its own, unless there are ranks for the engines alone.
    rollout_ranks = getattr(settings, "rollout_ranks", 0)
    check(trainers > 0, f"rollout_ranks={rollout_ranks} leaves no trainer: there are "
                        f"{trainers + rollout_ranks} ranks (torchrun --nproc_per_node=2 train_async.py has "
                        "two)")
    engines = rollout_ranks // (settings.vllm_tensor_parallel_size or 1) or trainers
    check_values(SimpleNamespace(**vars(settings), trainers=trainers, samplers=rollout_ranks or trainers,
                                 engines=engines))


def new_state(settings, clock):
    """Return what run.state holds in each script when a run is new. A checkpoint keeps it as JSON."""
    return {"step": 0,                      # how many steps were made
            "position": 0,                  # how many training rows were drawn; the script sets it
            "num_tokens": 0,                # how many tokens the rollouts of all steps had
            "skipped_updates": {},          # {network: how many of its last updates were skipped}
            "loss_scale": {},               # in float16: {network: its exponent, of options/float16.py}
            "checksums": {},                # {train_prompts, eval_prompts: CRC-32 of their rows}
            "evaluated": {},                # the figures of the step's evaluation, and the step
            "eval_scores": {},              # {step, as text: best_by}; they choose the best checkpoint
            "first_gap": None,              # mean |trainer - engine| of logprobs in the first step, in nats
            "settings": vars(settings),     # the settings of the run that saves
            "clock": clock}                 # when the run began, for chat templates that print the date


def read_state(resumed, state, settings, script):
    """Return state and arrays of a checkpoint, if a run with this state and these settings may resume it."""
    arrays = {}
    with input_errors(), reading(f"resume={resumed}: its state"):
        loaded = json.loads(Path(resumed, "trainer", "state.json").read_bytes())
        if os.path.exists(f"{resumed}/trainer/arrays.safetensors"):
            arrays = load_file(f"{resumed}/trainer/arrays.safetensors")
    whole = isinstance(loaded, dict) and isinstance(loaded.get("settings"), dict) and "step" in loaded
    check(whole, f"resume={resumed}: its state cannot be read: it has no settings and no step")
    before = loaded["settings"]
    unknown = sorted(loaded.keys() - state.keys())
    check(not unknown, f"{resumed} holds {', '.join(unknown)}, which {os.path.basename(script)} would lose: "
                       "resume it with the script that wrote it, or name what it holds in Run(...)")
    keys = SAME
    if arrays or not loaded.get("position"):
        keys += BATCH
    for key in keys:
        value = getattr(settings, key, "")
        saved = before.get(key, "")
        # A path may be spelled in another way.
        same = os.path.realpath(str(value)) == os.path.realpath(str(saved))
        check(same, f"{key}={value}, but {resumed} comes from a run with {key}={saved}")
    check(loaded["step"] <= settings.max_steps, f"max_steps={settings.max_steps}, but {resumed} has made "
                                                f"{loaded['step']} steps already")
    if vars(settings) | RESUMING != before | RESUMING:
        loaded["evaluated"] = {}                                # other settings may make other figures
    return loaded, arrays


def memory_note(run, folder):
    """Return the forecast of the memory that a run with the model in a folder takes, or "" if it fits by far.

    On a GPU there always is one, and where the folder has no safetensors to go by. On a CPU a rank has,
    roughly, 16 bytes per parameter for weight, gradient and Adam's moments, and activations of each token of
    a micro-batch.
    """
    settings = run.settings
    with input_errors(), reading(f"{folder}: its config"):
        hidden_size = getattr(read_config(folder).get_text_config(), "hidden_size", 0)
    file_size = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if not torch.cuda.is_available() and hidden_size and file_size:
        parameters = file_size / 2                              # or half of it, if the file is in float32
        networks = 1 + hasattr(settings, "critic_model")
        size = networks * parameters * (16 + 10 * settings.token_budget / hidden_size)
        if size < host / int(os.environ.get("LOCAL_WORLD_SIZE", 1)) / 2:
            return ""
    from options.memory import forecast_note
    return forecast_note(settings, run.world_size)


def locate(settings, script):
    # Returns the run's folder, the checkpoint to resume or None, and the time, as rank 0 sees them: all ranks
    # have to agree.
    place = None
    if dist.get_rank() == 0:
        now = datetime.datetime.now()
        method = os.path.basename(script).removesuffix(".py").removeprefix("train_")
        task = settings.task.partition(":")[0]
        default = f"out/{method}-{task}-{now:%Y%m%d-%H%M%S}"
        place = *checkpoint.locate_run(settings.out_dir, settings.resume, default), now.isoformat()
    return distributed.from_master(place)


def adapter_of(settings, resumed):
    # Returns the arguments of lora.adapt after the policy, or 0 without adapters.
    if not settings.lora_rank:
        return 0
    from options.lora import beginning
    with input_errors():
        return beginning(settings, resumed)


def opening(run, policy):
    """Return the lines with which a run begins."""
    s = run.settings
    size = sum(p.numel() for p in policy.parameters())
    updates = getattr(s, "num_epochs", 1) * getattr(s, "num_mini_batches", 1)
    lines = [f"{run.out_dir}: {s.model}, {size / 1e6:.2f} M parameters, on "
             f"{run.world_size} x {policy.device}, engine {run.engine.name}",
             f"Each of {s.max_steps} steps takes {s.prompts_per_step} x {s.num_generations} = "
             f"{s.prompts_per_step * s.num_generations} completions (prompts_per_step x num_generations) and "
             f"makes {updates} optimizer step(s), in micro-batches of at most {s.token_budget} tokens.",
             *run.notes]
    for key, value in vars(s).items():
        if key in run.state and value != run.state["settings"].get(key):
            lines.append(f"{key}={value} is not read: the run goes on with {key}={run.state[key]} of its "
                         "state")
        if key in BATCH and value != run.state["settings"].get(key, value):
            lines.append(f"{key}={value} is new: the run goes on behind the rows that it has drawn")
    if s.optimizer == "sgd":
        lines.append("optimizer=sgd has no moments: for the policy adam_beta1, adam_beta2 and "
                     "offload_optimizer are not read")
    if s.call_workers and (s.environment or s.tools or s.agent):
        lines.append("call_workers: turns begin when the environments answer, so the run does not repeat bit "
                     "for bit")
    if run.resumed:
        lines.append(f"resumes {run.resumed}")
    if getattr(s, "loss_type", "") in BOUNDED and s.epsilon == 0.2 and s.epsilon_high in (0.2, 0.28):
        lines.append(f"epsilon={s.epsilon:g} and epsilon_high={s.epsilon_high:g} are bounds for "
                     f"loss_type=clip; those of {s.loss_type} are in config/methods/{s.loss_type}.py")
    return "\n".join(filter(None, lines))


# ---------------------------------------------------------------- the run

class Run:
    """A run's folder and state, from the start or from a checkpoint.

    It stops a script whose settings are wrong or do not fit the checkpoint. The keyword arguments `state` are
    what the script wants to find in run.state when it is resumed, with the values of a new run. A collective.

    settings, script    what configure returned; the path of the script
    world_size      how many ranks train
    out_dir         the run's folder
    resumed         the checkpoint that is resumed, or None
    state           what a checkpoint keeps as JSON: new_state, and what the script has named
    run_keys        the entries of the state that no script sets
    arrays          {name: NumPy array}, which a checkpoint keeps as well; train_async.py sets it
    first_step      the step with which this process begins
    saved           the step of the newest checkpoint
    adapter         for load_policy: what it has to know about the adapters, or 0 if there are none
    signalled_at    when the first signal came; None before
    check_data sets tokenizer (the policy's) and notes (for the console). begin sets engine, log and networks:
    {subfolder of a checkpoint: (model, optimizer or None)}, where "" is the checkpoint's own folder.
    """

    def __init__(self, settings, script, **state):
        self.settings = settings
        self.script = script
        self.world_size = dist.get_world_size()
        check_run(settings, self.world_size)
        with input_errors(OSError):
            self.out_dir, self.resumed, clock = locate(settings, script)
        # From here on, beginning with the chat template, code may run that never ends.
        distributed.watchdog.limit(settings.timeout)
        self.state = new_state(settings, clock) | state
        self.run_keys = self.state.keys() - {"position", *state}
        self.arrays = {}
        if self.resumed:
            saved_state, self.arrays = read_state(self.resumed, self.state, settings, script)
            self.state |= saved_state
        self.first_step = self.state["step"]
        self.saved = self.first_step
        self.adapter = adapter_of(settings, self.resumed)
        self.signalled_at = None

    def check_data(self, folders, train_set, eval_set, note):
        """Stop the script for prompts that are not those of the resumed run, and for default settings that do
        not suit the model. Raises ValueError for a model that no device can hold. note: a text about the
        prompts, for the console."""
        check_tiny_defaults(self.settings, folders.suits)
        self.tokenizer = folders.tokenizer
        check_same_prompts(self, "train_prompts", (row for _, row in train_set.rows))
        check_same_prompts(self, "eval_prompts", eval_set)      # with their tokens
        self.notes = [printable(note), folders.note, memory_note(self, folders.policy)]
        distributed.watchdog.moved("the trial of reward and environment, or the loading of models")

    def begin(self, policy, optimizer, engine, **others):
        """Load the optimizers of a resumed run, print the opening lines, catch signals; return the RunLog.

        engine: an engine of rollout.py. others: further models that a checkpoint has to hold, as
        name=(model, its optimizer or None); the name becomes that of a subfolder. A collective.
        """
        networks = {"": (policy, optimizer), **others}
        bfloat16 = distributed.compute_dtype(self.settings.dtype) == torch.bfloat16
        with input_errors():
            for network, _ in networks.values():
                network.begin_training(bfloat16 and self.settings.spread_masters)
            if self.resumed:
                checkpoint.load_optimizers(self.resumed, networks)
        check(os.path.isdir(self.out_dir),
              f"out_dir={self.out_dir} is not on a file system that all ranks see")
        self.engine = engine
        self.networks = networks
        opening_lines = opening(self, policy)
        self.state["settings"] = vars(self.settings)
        config = vars(self.settings) | {"defaults": overridden}
        with input_errors(OSError):
            self.log = metrics.RunLog(self.out_dir, self.script, config, self.state)
        self.log.say(opening_lines)
        if self.settings.dtype == "float16":
            from options.float16 import scale_losses
            scale_losses(self)
        # The engine calls it before and after it samples, and samples no more once engine.signalled is True.
        engine.version = self.first_step
        if self.adapter and engine.name != "none":              # it still has the base model
            engine.update_weights(policy, self.first_step)
        engine.stop_if_signalled = self.stop_if_signalled
        catch_signals(self)
        return self.log

    def stop_if_signalled(self, save=None):
        """If a signal has come on any rank, save the state with which the step began, and end the run.

        If torchrun dies, its workers get a signal too. save: what to call instead of save. A collective.
        """
        if any(distributed.gathered([self.signalled_at is not None])):
            self.state |= self.log.begun
            if self.state["step"] > self.saved:
                (save or self.save)()
            self.log.say(f"stopped by a signal after {self.state['step']} steps; --out_dir={self.out_dir} "
                         "--resume=auto goes on")
            self.end()
            distributed.leave()

    def compare_logprobs(self, rollouts, logps, same_weights=True):
        """Return the metrics of metrics.compare_logprobs, which ends the run if the gap is over gap_bound.
        same_weights: False if others than the present ones may have sampled the rollouts; then none is."""
        if not same_weights:
            return metrics.compare_logprobs(rollouts, logps, math.inf, self.tokenizer)
        bound = gap_bound(self.settings, self.state["first_gap"])
        return metrics.compare_logprobs(rollouts, logps, bound, self.tokenizer, self.state["step"])

    def due(self, step, interval):
        """Return whether what comes every `interval` steps is due before this step; with 0 it comes only at
        the start and after the last step. After the last step it is always due. At the step with which a run
        resumes it is not, if the checkpoint already holds the figures of this step's evaluation."""
        last = self.settings.max_steps
        resumed = step == self.first_step and len(self.state["evaluated"]) > 1
        return step == last or not resumed and step % (interval or last) == 0

    def may_step(self, name, norm):
        """Log the norm of a gradient and return True, or count a skipped update and return False if the norm
        is not finite. Raises RuntimeError after five in a row. In float16 the loss scale doubles every
        hundred updates, and while it is above 1 it is first halved, without counting the update. norm: as
        clip_grad_norm_ returns it. A collective."""
        norm = norm.full_tensor().item()                        # over the shards of all ranks
        finite = math.isfinite(norm)
        if self.settings.dtype == "float16":
            from options.float16 import overflows
            if overflows(self, name, finite):
                return False
        figure = "grad_norm" if name == "actor" else f"{name}/grad_norm"
        skipped = int(not finite and dist.get_rank() == 0)      # all ranks skip it, and it counts once
        self.log.add(means={figure: [norm]}, sums={f"{name}/skipped_updates": skipped})
        in_a_row = self.state["skipped_updates"]
        if finite:
            in_a_row[name] = 0
            return True
        from options.failures import report_skipped
        report_skipped(self, name, norm)
        return False

    def end_step(self, rollouts, group_std=None):
        """Write the figures and some samples of a step's rollouts, of all ranks; with save_rollouts also all
        rollouts. group_std: of losses.py, or None for those of tasks/examples.py, which nobody sampled."""
        log = self.log
        step = self.state["step"]
        samples = []
        num_tokens = sum(len(r.ids) for r in rollouts)
        if self.settings.save_rollouts and log.master:
            from options.saved_rollouts import write_rollouts
            with log.timed("save_rollouts"), input_errors(OSError):
                write_rollouts(self.out_dir, step, rollouts)
        seconds = time.perf_counter() - log.started
        self.state["step"] += 1
        self.state["num_tokens"] += num_tokens
        if step == self.first_step:
            check_state(self)
        if self.state["first_gap"] is None:
            self.state["first_gap"] = log.metrics.get("sampling/sampling_logp_difference/mean")
        log.metrics |= {
            "num_tokens": self.state["num_tokens"],
            "perf/throughput": num_tokens / seconds,
            "perf/max_memory_allocated_gb": (peak_memory() - self.engine.allocated) / 1e9,
            "timing_s/step": seconds}
        if group_std:
            G = self.settings.num_generations
            engines = getattr(self.engine, "engines", self.world_size)
            log.metrics |= metrics.rollout_metrics(rollouts, G, group_std, engines)
            # An episode that went wrong may have a score all the same.
            if metrics.failures(rollouts) or any("problem" in r.counts for r in rollouts):
                from options.failures import report_failures
                report_failures(rollouts, log, step)
            samples = metrics.sample_lines(rollouts, G, self.tokenizer, step)
        with input_errors(OSError):
            log.write(samples)
        log.show(rollouts if group_std else [], samples, seconds)
        log.start(self.state["step"])

    def save(self):
        """Write a checkpoint of this step, unless the run has begun with it, and after the last step the line
        of the last evaluation. If a save fails, on whichever rank, the script stops, and the older
        checkpoints stand. A collective."""
        step = self.state["step"]
        # Figures of a script's own are only in the log.
        figures = {name: value for name, value in self.log.metrics.items() if name.startswith("eval")}
        self.state["evaluated"] |= figures
        check_best_by(self.settings.best_by, step, self.state["evaluated"])
        folder = f"{self.out_dir}/checkpoint-{step}"
        if step > self.saved:
            with self.log.timed("save"), saving(folder):
                check_state(self)
                checkpoint.save_checkpoint(folder, self.networks, self.tokenizer, self.state,
                                           self.settings.keep_checkpoints, self.arrays)
            self.saved = step
        if step == self.settings.max_steps:
            with input_errors(OSError):
                self.log.write()

    def end(self):
        """Write the report, and end engines that are apart. The process group stays, without a timeout."""
        self.log.report()
        self.engine.close()
        distributed.watchdog.limit(0)
        distributed.ending.begin()


# ---------------------------------------------------------------- parts of its methods

def check_same_prompts(run, key, rows):
    # Stops the script if the rows of train_prompts or eval_prompts are not those of the resumed run.
    checksum = checkpoint.checksum_of_rows(rows)
    same = checksum == run.state["checksums"].get(key, checksum)
    # If the number of held-out prompts was changed, they differ because of that.
    same_number = getattr(run.settings, key) == run.state["settings"].get(key)
    check(same or not same_number, f"the {key} are not those of {run.resumed}: a file of rows or the chat "
                                   "template has changed")
    run.state["checksums"][key] = checksum


def catch_signals(run):
    """Have the first signal noted, for stop_if_signalled. A Ctrl-C that comes more than a second later ends
    the process: a launcher may pass on at once what the process has received itself. So does any signal after
    Run.end, when there is nothing left to save."""
    def signalled(number, frame):
        now = time.monotonic()
        over = distributed.ending.script and not distributed.ending.left
        if run.signalled_at is None and not over:
            run.signalled_at = now
            run.engine.signalled = True
            run.log.say("The run saves and stops: soon if it samples, otherwise when this step is finished. "
                        "Ctrl-C again ends it at once.")
        elif over or number == signal.SIGINT and now - run.signalled_at > 1:
            os._exit(128 + number)

    for number in distributed.STOPPING:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:           # nohup ignores it
            signal.signal(number, signalled)


def gap_bound(settings, first_gap):
    """Return the largest mean gap of logprobs, in nats, with which a run goes on: logprob_gap, or if this is
    0, 1e-3 in float32. With 16 bits it depends on how much they round off in this model: 0.15 for the first
    step, and then 3 times its gap, but at least 0.05. first_gap: that of the first step, or None."""
    if settings.logprob_gap:
        return settings.logprob_gap
    if distributed.compute_dtype(settings.dtype) == torch.float32:
        return 1e-3
    return 0.15 if first_gap is None else max(0.05, 3 * first_gap)


def peak_memory():
    # Returns the most bytes that tensors on the GPU have taken, or on a CPU the process.
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024        # Linux counts in KiB


@contextlib.contextmanager
def saving(folder):
    # Stops the script if a checkpoint cannot be saved. On a full disk libraries raise all kinds of errors.
    try:
        yield
    except Exception as error:
        if not is_of_library(error):
            raise
        # Its text names a file, where the operation that failed has one.
        fail(f"{folder} could not be saved, the older ones stand: {type(error).__name__}: {error!s:.300}")


def check_best_by(best_by, step, figures):
    # Stops the script if an evaluation has not made the figure that chooses the best checkpoint. Later it may
    # be missing, because none of its prompts was scored, or because nothing was evaluated.
    _, *names = figures                                         # the first is the step
    check(not best_by or best_by in figures or step > 0 and (not names or figures.get("eval/unscored")),
          f"best_by={best_by}: the evaluation has made {', '.join(names) or 'no figures'}")


def check_state(run):
    """Stop the script if JSON would change what it has put into run.state, or if ranks differ in it. A
    collective."""
    keys = run.state.keys() - run.run_keys
    with input_errors():
        texts = {key: checkpoint.json_text(f"run.state[{key!r}]", run.state[key]) for key in keys}
        checksums = {key: zlib.crc32(text.encode()) for key, text in texts.items()}
    for others in distributed.gathered([checksums]):            # the texts may be long, and the ranks many
        differing = [key for key in keys if others.get(key) != checksums[key]]
        check(not differing, f"the ranks differ in {differing} of run.state, and a resumed run would have "
                             "that of rank 0")
