"""What a run writes as it goes: metrics, sample completions, settings, the script, lines on the console."""
import contextlib
import errno
import json
import os
import resource
import sys
import time
from collections import Counter, defaultdict

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

import console
import ranks
from console import one_line
from data import prompt_text
from files import in_words, opened, rewind
from packing import prefix_order, row_size
from rewards import content, part_means
from run_folder import claim

# What the console shows of a step: its word for it, the metric, the format.
CONSOLE = (("reward", "reward", ".3f"), ("length", "completions/mean_length", "5.1f"),
           ("entropy", "entropy", ".3f"), ("explained var", "critic/vf_explained_var", ".2f"),
           ("grad norm", "grad_norm", ".2f"), ("logprob gap", "sampling/sampling_logp_difference/max", ".1e"))


class RunLog:
    """Writes metrics.jsonl and TensorBoard events, samples.jsonl, config.json and a copy of the script, and
    prints to the console.

    Only rank 0 writes. A run that goes on from first_step drops the lines of that step and of later ones,
    because it writes them again. A step's line is filled by `metrics`, a dict of figures that all ranks agree
    on, and by `mean` and `sum`, which are taken over all ranks when the step ends. eval_scores, {step:
    eval/mean@k}, has all steps that were evaluated. Raises ValueError if the folder cannot be written.
    """

    def __init__(self, out_dir, script, settings, first_step, max_steps):
        self.master, self.out_dir = dist.get_rank() == 0, out_dir
        self.sample_interval = settings["sample_interval"]
        self.waiting = defaultdict(list)
        self.start(first_step)
        self.eval_scores = {}
        if self.master:
            claim(out_dir)
            try:
                for line in rewind(os.path.join(out_dir, "metrics.jsonl"), first_step):
                    self._note_score(line)
                rewind(os.path.join(out_dir, "samples.jsonl"), first_step)
                with (open(script, "rb") as source,
                      opened(os.path.join(out_dir, os.path.basename(script)), "wb") as copy):
                    copy.write(source.read())
                with opened(os.path.join(out_dir, "config.json"), "w") as file:
                    json.dump(settings | {"out_dir": out_dir}, file, indent=1)
                self.board = SummaryWriter(out_dir, purge_step=first_step)
            except OSError as error:
                raise ValueError(f"out_dir={out_dir} cannot be written: {in_words(error)}") from None
        # Kept, because a reward may replace sys.stdout later.
        console.make_lenient()
        self.console = sys.stdout
        self.bar = tqdm(total=max_steps, initial=first_step, disable=not self.master, unit="step")

    # ------------------------------------------------------------ a step's figures

    def start(self, step):
        """Begin the line of a step."""
        self.metrics, self.timing, self.totals = {"step": step}, defaultdict(float), {}
        self.samples, self.started = [], time.perf_counter()
        ranks.watchdog.moved(f"step {step}")

    @contextlib.contextmanager
    def timed(self, name):
        """Add the seconds that the block takes, the GPU's part included, to timing_s/name."""
        start = time.perf_counter()
        ranks.watchdog.moved(f"step {self.metrics['step']}, {name}")
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.timing[f"timing_s/{name}"] += time.perf_counter() - start
        ranks.watchdog.moved(f"step {self.metrics['step']}, after {name}")

    def mean(self, name, values):
        """Add values, a tensor or list, to the step's mean for this name, which is taken over all ranks.

        A name that gets no values is logged as 0. Nothing here waits for a GPU.
        """
        values = values.detach() if torch.is_tensor(values) else torch.tensor(values, dtype=torch.float64)
        total, count = self.totals.get(name, (0.0, 0))
        self.totals[name] = total + values.sum(), count + values.numel()

    def sum(self, name, value):
        """Add a number, or a tensor of one number, to the step's sum over all ranks."""
        total, _ = self.totals.get(name, (0.0, None))
        self.totals[name] = total + torch.as_tensor(value).detach(), None

    def nothing(self, *names):
        """Log these means as 0 if the step gives them no values."""
        for name in names:
            self.mean(name, [])

    def rollouts(self, rollouts, timeouts, engines=None):
        """Note all ranks' rollouts of the step and keep a few as samples.

        timeouts: this rank's number. engines: how many sampled them, if it was not one per rank.
        """
        self.metrics |= rollout_metrics(rollouts)
        self.sum("rewards/timeouts", timeouts)
        first = [r for i, r in enumerate(rollouts) if i == 0 or r.row != rollouts[i - 1].row]
        self.samples = [{"step": self.metrics["step"], "prompt": r.row["prompt"],
                         "completion": r.completion if r.counts else content(r.completion), "reward": r.score,
                         "finish_reason": r.finish_reason, "truth": r.row.get("answer")} for r in first[:8]]
        if any(r.counts for r in rollouts):
            self.metrics |= episode_metrics(rollouts)
            seconds = sum(r.counts["seconds"] for r in rollouts)
            self.timing["timing_s/environment"] = seconds / (engines or dist.get_world_size())
            if problems := [r.counts["problem"] for r in rollouts if "problem" in r.counts]:
                self.say(f"step {self.metrics['step']}: {len(problems)} episodes failed or took too long; "
                         f"the first: {one_line(problems[0])}")

    def shared_tokens(self, rollouts, chosen, shares):
        """Note the share of the tokens of rollouts[s] for s in chosen that need not be computed again.

        shares: the lists of them that this rank computes. perf/shareable_tokens is what the share would be if
        all were on one rank and in one update. Neither knows of token_budget. A collective.
        """
        order = prefix_order(rollouts, chosen)
        separate = sum(size for _, size, _ in order)
        (computed,) = ranks.total([sum(row_size(prefix_order(rollouts, share)) for share in shares)])
        self.metrics |= {"perf/shared_tokens": 1 - computed / separate if separate else 0.0,
                         "perf/shareable_tokens": 1 - row_size(order) / separate if separate else 0.0}

    def groups(self, stds):
        """Note the spread of the scores of each prompt's rollouts, [P]."""
        self.metrics |= {"reward_std": stds.double().mean().item(),
                         "frac_reward_zero_std": (stds == 0).double().mean().item()}

    def evaluation(self, results):
        """Note the results of an evaluation and show those over all prompts."""
        self.metrics |= results
        self._note_score(self.metrics)
        self.say(f"step {self.metrics['step']:4d} | " + " | ".join(
            f"{name} {value:.3f}" for name, value in results.items() if name.count("/") == 1))

    def end(self, tokens):
        """Write the step: a line to metrics.jsonl and TensorBoard, a few samples, a line on the console.

        tokens: number of prompt and completion tokens.
        """
        self.timing["timing_s/step"] = seconds = time.perf_counter() - self.started
        self.metrics["perf/throughput"] = tokens / seconds
        self.write()
        if self.master:
            self._append("samples.jsonl", self.samples)
        if self.metrics["step"] % self.sample_interval == 0:
            self.say("\n".join(
                f"    {prompt_text(s['prompt'])[-60:]!r:36} -> {conversation(s['completion'])[-60:]!r:52} "
                f"reward {s['reward']:g}, truth {one_line(s['truth'])}" for s in self.samples[:4]))
        timing = {name.removeprefix("timing_s/"): value for name, value in self.timing.items()}
        self.say(f"step {self.metrics['step']:4d} | " + " | ".join(
            f"{word} {self.metrics[name]:{form}}" for word, name, form in CONSOLE if name in self.metrics)
            + f" | {timing.pop('step'):.1f} s: "
            + ", ".join(f"{name} {value:.1f}" for name, value in timing.items() if value >= 0.05))
        self.bar.set_postfix(reward=f"{self.metrics['reward']:.3f}")
        self.bar.update()

    def write(self):
        """Write the line of this step to metrics.jsonl and TensorBoard. A collective."""
        self.metrics = over_all_ranks(self.totals) | self.metrics | self.timing
        if self.master:
            self._append("metrics.jsonl", [self.metrics])
            # A full disk is no news, because the file above has said so. The name of a reward's part may be
            # one that TensorBoard cannot take.
            with contextlib.suppress(OSError, ValueError):
                for name, value in self.metrics.items():
                    self.board.add_scalar(name, value, self.metrics["step"])
                self.board.flush()

    # ------------------------------------------------------------ files and console

    def say(self, text):
        if self.master:
            tqdm.write(text, file=self.console)

    def close(self):
        self.flush()
        self.bar.close()

    def _note_score(self, line):
        self.eval_scores |= {line["step"]: value for name, value in line.items()
                             if name.startswith("eval/mean@") and isinstance(value, float)}

    def flush(self):
        """Write the lines that a full disk refused earlier."""
        for name in list(self.waiting):
            self._append(name, [])

    def _append(self, name, rows):
        # Lines that a full disk does not take wait for the next try: none is lost, none is cut in two.
        self.waiting[name] += [json.dumps(row) + "\n" for row in rows]
        lines = "".join(self.waiting[name]).encode()
        try:
            with opened(os.path.join(self.out_dir, name), "ab") as file:
                size = file.seek(0, os.SEEK_END)
                try:
                    if file.raw.write(lines) < len(lines):
                        raise OSError(errno.ENOSPC, "it took only a part")
                    # A checkpoint is about to count on these lines.
                    os.fsync(file.fileno())
                except OSError:
                    file.truncate(size)
                    raise
            self.waiting[name].clear()
        except OSError as error:
            self.say(f"{name} could not be written, its lines will be written later: {in_words(error)}")


def over_all_ranks(totals):
    # {name: (total, count)} of this rank -> {name: the mean over all ranks, or where count is None the sum}
    own = [(name, float(total), count) for name, (total, count) in totals.items()]
    summed = {}
    for name, total, count in ranks.gathered(own):
        before, counted = summed.get(name, (0.0, 0))
        summed[name] = before + total, None if count is None else counted + count
    return {name: total if count is None else total / max(count, 1)
            for name, (total, count) in summed.items()}


def rollout_metrics(rollouts):
    """What a log says of sampled and scored rollouts; its means ignore scores and parts that are NaN."""
    lengths = [len(r.logprobs) for r in rollouts]
    scores = np.array([r.score for r in rollouts])
    return {"reward": 0.0 if np.isnan(scores).all() else float(np.nanmean(scores)),
            "rewards/unscored": int(np.isnan(scores).sum()), **part_means(rollouts, "rewards"),
            "completions/mean_length": sum(lengths) / len(lengths),
            "completions/min_length": min(lengths), "completions/max_length": max(lengths),
            "completions/clipped_ratio": sum(r.finish_reason == "length" for r in rollouts) / len(lengths)}


def episode_metrics(rollouts):
    """What a log says of episodes with an environment."""
    turns, calls = sum(len(r.spans) for r in rollouts), sum(r.counts["calls"] for r in rollouts)
    inserted = sum(len(r.ids) - len(r.prompt_ids) - len(r.logprobs) for r in rollouts)
    ended = Counter(r.finish_reason for r in rollouts)
    return {"episodes/turns": turns / len(rollouts), "episodes/inserted_tokens": inserted / len(rollouts),
            **{f"episodes/ended/{'done' if reason == 'stop' else reason}": ended[reason] / len(rollouts)
               for reason in ("stop", "length", "turns", "timeout", "error")},
            "tools/call_frequency": calls / len(rollouts),
            "tools/failure_frequency": sum(r.counts["failures"] for r in rollouts) / max(calls, 1)}


def conversation(completion):
    """The text of a completion; of an episode's messages, with what the policy did not say in brackets."""
    if isinstance(completion, str):
        return completion
    texts = []
    for message in completion:
        calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls", [])]
        text = " ".join(part for part in [message["content"], *calls] if part)
        texts.append(text if message["role"] == "assistant" else f"[{text}]")
    return " ".join(texts)


def peak_memory():
    """Bytes: the most that tensors have taken on this rank's GPU; on a CPU the process's peak."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    # Linux counts in KiB, macOS in bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
