"""
The figures of a run: how they are computed from rollouts, and where they are written.

    evaluation        mean@k, pass@k and maj@k of scored rollouts
    rollout_metrics   the rewards, lengths and episodes of a step's rollouts
    RunLog            writes metrics.jsonl, samples.jsonl, TensorBoard's events and the console's lines
"""
import contextlib
import copy
import json
import math
import os
import subprocess
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.tensorboard import SummaryWriter

from configurator import fail
from runtime import distributed, health
from runtime.user_code import shown, source_of, specs
from tasks.check_answer import comparison, extract_answer

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 1_000_000               # bytes of a run's folder for what differs from the commit, and for new code
# What the console shows of a step, in 80 columns: a word, the metric that the word stands for, and a format.
CONSOLE = (("reward", "reward", ".3f"), ("length", "completions/mean_length", "4.0f"),
           ("ended by a limit", "episodes/limited", "d"), ("entropy", "entropy", ".3f"),
           ("var", "critic/vf_explained_var", ".2f"),
           ("grad", "grad_norm", ".2f"), ("gap", "sampling/sampling_logp_difference/mean", ".0e"))


def mean(values):
    # Returns the mean, or 0 if there are no values.
    return sum(values) / max(len(values), 1)


def part_means(parts, prefix):
    """Return {prefix/name/mean: mean} of the numbers in dicts, without NaN; the mean of none is 0."""
    values = defaultdict(list)
    for name, value in (pair for one in parts for pair in one.items()):
        if not isinstance(value, str):
            # Without NaN and infinity, and without what overflows as a sum.
            values[name] += [value] if abs(value) < 1e300 else []
    return {f"{prefix}/{name}/mean": math.fsum(some) / max(len(some), 1) for name, some in values.items()}


def reward_means(rollouts, prefix):
    # Returns the mean of each part of the score, and the share of completions without a final answer.
    answered = [r.answered for r in rollouts if r.answered is not None]
    return part_means([r.parts for r in rollouts], prefix) | (
        {f"{prefix}/no_answer": np.mean(np.logical_not(answered)).item()} if answered else {})


def evaluation(rollouts, k, name="eval"):
    """Return mean@k, pass@k and maj@k of scored rollouts, where each prompt has k adjacent ones.

    mean@k  the mean score
    pass@k  the mean over prompts of the best of k scores; for scores of 0 and 1 this is how often any of the
            k answers is right
    maj@k   the mean over prompts of the score of the commonest answer, or of the first one in a tie. An
            answer has the votes of all that it would be right for, as 1/2 is for 0.5, and B for B) 12. A
            completion without an answer has no vote, and where there are no votes the first one counts
    The figures over all prompts are called {name}/..., those over the prompts of a source
    {name}/{source}/.... Completions without a score are ignored. The mean of each part is
    {name}/rewards/{part}/mean. mean_length is the number of sampled tokens, clipped_ratio the share of
    completions that were cut off, right_ended the share of those with a score above 0 that ended by
    themselves, and unscored counts those whose reward or episode failed.
    """
    values = defaultdict(list)
    for i in range(0, len(rollouts), k):
        scored = [r for r in rollouts[i:i + k] if not math.isnan(r.score)]
        if not scored:
            continue
        scores = [r.score for r in scored]
        texts = [r.completion if isinstance(r.completion, str) else plain_text(r.completion[-1:])
                 for r in scored]
        answers = [extract_answer(text) or "" for text in texts]
        votes = [sum(comparison(answer, other) is True for other in answers) for answer in answers]
        winner = votes.index(max(votes))
        source = rollouts[i].row.get("source")
        for prefix in [name] if source in (None, "") else [name, f"{name}/{source}"]:
            values[f"{prefix}/mean@{k}"].append(mean(scores))
            values[f"{prefix}/pass@{k}"].append(max(scores))
            values[f"{prefix}/maj@{k}"].append(scores[winner])
    return {key: mean(each) for key, each in values.items()} | {
        f"{name}/unscored": len(failures(rollouts)),
        f"{name}/mean_length": mean([len(r.logprobs) for r in rollouts]),
        f"{name}/clipped_ratio": mean([r.finish_reason == "length" for r in rollouts]),
        f"{name}/right_ended": mean([r.finish_reason == "stop" for r in rollouts if r.score > 0]),
        **reward_means(rollouts, f"{name}/rewards")}


def failures(rollouts):
    """Return why completions have no score, or 0 because a reward failed: a text for each of them."""
    return [r.counts.get("problem") or r.problem or "the reward gave no score" for r in rollouts
            if r.problem or math.isnan(r.score)]


def rollout_metrics(rollouts, n, group_std, engines):
    """Return the figures of sampled and scored rollouts for a log; means ignore NaN.

    n: the number of adjacent rollouts per prompt. group_std: losses.group_std. engines: how many engines
    sampled them. The time that environments took is given per engine.
    """
    lengths, scores = [len(r.logprobs) for r in rollouts], np.array([r.score for r in rollouts])
    stds = group_std(torch.from_numpy(scores), n)                                       # [N / n]
    scored = scores[~np.isnan(scores)].tolist()
    figures = {"reward": float(np.nanmean(scores)) if scored else 0.0,
               "reward_std": stds.mean().item(), "frac_reward_zero_std": (stds == 0).double().mean().item(),
               "rewards/min": min(scored, default=0.0), "rewards/max": max(scored, default=0.0),
               "rewards/unscored": len(scores) - len(scored), **reward_means(rollouts, "rewards"),
               **part_means([r.extra for r in rollouts], "logged"),
               "rewards/timeouts": sum(r.problem.endswith("took too long (call_timeout)") for r in rollouts),
               "completions/sampled_tokens": sum(lengths), "completions/mean_length": np.mean(lengths).item(),
               "completions/min_length": min(lengths), "completions/max_length": max(lengths),
               "completions/clipped_ratio": np.mean([r.finish_reason == "length" for r in rollouts]).item()}
    return figures | episode_metrics(rollouts, engines) if any(r.counts for r in rollouts) else figures


def episode_metrics(rollouts, engines):
    # Returns the figures of episodes with an environment.
    turns, calls = sum(len(r.spans) for r in rollouts), sum(r.counts["calls"] for r in rollouts)
    inserted = sum(len(r.ids) - len(r.prompt_ids) - len(r.logprobs) for r in rollouts)
    ended = Counter(r.finish_reason for r in rollouts)
    return {"episodes/turns": turns / len(rollouts), "episodes/inserted_tokens": inserted / len(rollouts),
            **{f"episodes/ended/{'done' if reason == 'stop' else reason}": ended[reason] / len(rollouts)
               for reason in ("stop", "length", "turns", "timeout", "error")},
            "episodes/limited": sum(ended[reason] for reason in ("length", "turns", "timeout")),
            "tools/call_frequency": calls / len(rollouts),
            "tools/failure_frequency": sum(r.counts["failures"] for r in rollouts) / max(calls, 1),
            "timing_s/environment": sum(r.counts["seconds"] for r in rollouts) / engines,
            **{f"episodes/{name}": mean([r.counts.get(name, 0) for r in rollouts])
               for name in ("requests", "rows", "untrained_tokens")
               if any(name in r.counts for r in rollouts)}}


def sample_lines(rollouts, n, tokenizer, step):
    """Return a step's lines of samples.jsonl: the first of n rollouts of each of the first eight prompts."""
    return [{"step": step, "prompt": r.row["prompt"],
             "completion": r.completion if r.counts else plain_text(r.completion), "reward": r.score,
             "finish_reason": r.finish_reason, "truth": r.row.get("answer"),
             "tokens": [tokenizer.batch_decode(r.ids[start:end, None]) for start, end in r.spans],
             "logprobs": (r.logprobs.astype(float).round(3) + 0.0).tolist(),
             **({"extra": r.extra} if r.extra else {})} for r in rollouts[:8 * n:n]]


class RunLog:
    """Writes metrics.jsonl and TensorBoard events, samples.jsonl, config.json and a copy of the script, and
    prints to the console.

    settings: a dict of the run's settings. state: run.state; the log begins at its step, and drops the lines
    of that step and of later ones, because the run writes them again. Only rank 0 writes. The line of a step
    consists of `metrics`, a dict of figures that all ranks agree on, and of what `add` was given, summed or
    averaged over all ranks when the step ends. A disk that is full ends the run.
    """

    def __init__(self, out_dir, script, settings, state):
        self.master, self.out_dir, self.state = dist.get_rank() == 0, out_dir, state
        self.settings, first_step = settings, state["step"]
        self.lines, self.told = [], set()                       # what health.py reads, and what it has said
        self.first_scores = []                                  # of each of the first steps, for same_scores
        if self.master:
            self.lines = rewind(os.path.join(out_dir, "metrics.jsonl"), first_step)
            rewind(os.path.join(out_dir, "samples.jsonl"), first_step)
            Path(out_dir, os.path.basename(script)).write_bytes(Path(script).read_bytes())
            Path(out_dir, "config.json").write_text(json.dumps(
                {"script": os.path.basename(script)} | settings
                | {"checksums": state["checksums"], "out_dir": out_dir}, indent=1))
            # So that a changed losses.py is found again; it is empty where nothing differs from the commit.
            Path(out_dir, "changes.diff").write_text(git("diff", "HEAD", "--", ".")[:LIMIT])
            keep_code(settings, os.path.join(out_dir, "user_code"))
            self.board = SummaryWriter(out_dir, purge_step=first_step)
        self.start(first_step)

    # ------------------------------------------------------------ a step's figures

    def start(self, step):
        """Begin the line of a step, and with it the evaluation that a resumed run's checkpoint holds."""
        if self.state["evaluated"].get("step") != step:
            self.state["evaluated"] = {"step": step}
        self.metrics = {**self.state["evaluated"]}
        self.totals = {}                                        # {name: (total, count)}; of a sum, count 0
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

    def evaluate(self, prompts, k, sample, scorer, name="eval", **sampling):
        """Sample k completions per prompt, with the same seeds every time, score them, and log an evaluation.

        sample: a rollout.Sampler; sampling: keywords for it. Each rank samples for its share of the prompts.
        A collective.
        """
        own = range(dist.get_rank(), len(prompts), dist.get_world_size())
        with self.timed("eval"):
            rollouts = sample([prompts[i] for i in own], k, [f"{name} {i}" for i in own], **sampling)
            scorer(rollouts)
            self.evaluation(distributed.gathered(rollouts), k, name)

    def evaluation(self, rollouts, k, name="eval"):
        """Log the figures of an evaluation's scored rollouts, of all ranks, and show the first three.

        If more than a tenth of them was not scored, the evaluation chooses no best checkpoint.
        """
        step, results, lost = self.metrics["step"], evaluation(rollouts, k, name), failures(rollouts)
        self.metrics |= results
        # A resumed run knows the evaluation of the model that it begins with, and the best checkpoint.
        self.state["evaluated"] |= results
        if lost:
            self.say(f"step {step}: {len(lost)} of {len(rollouts)} held-out completions were not scored; the "
                     f"first: {lost[0]}")
        if len(lost) <= len(rollouts) / 10:
            self.state["eval_scores"] |= {str(step): value for name, value in results.items()
                                          if name.startswith("eval/mean@")}
        self.begun = copy.deepcopy(self.state)                  # so that a stop while sampling saves it
        # The first three are mean@k, pass@k and maj@k; more do not fit into 80 columns.
        shown = [f"{name} {value:.3f}" for name, value in results.items()][:3]
        self.say("  ".join([f"step {step:3d}", *shown]))
        for text in health.news(self.lines, self.settings, self.told):
            self.say(text)

    def write(self, samples=()):
        """Write the line of this step to metrics.jsonl and TensorBoard. A collective.

        samples: the lines that sample_lines returns, for samples.jsonl.
        """
        summed = {}                                             # {name: (total, count)}, over all ranks
        for name, total, count in distributed.gathered(
                [(name, float(total), count) for name, (total, count) in self.totals.items()]):
            before, counted = summed.get(name, (0.0, 0))
            summed[name] = before + total, counted + count
        self.metrics = {name: total / (count or 1) for name, (total, count) in summed.items()} | self.metrics
        if "entropy" in summed:                                 # it has a value for each token of each update
            self.metrics["completions/trained_tokens"] = summed["entropy"][1]
        for name, value in self.metrics.items():
            if not isinstance(value, (int, float)):
                raise TypeError(f"log.metrics[{name!r}] is {shown(value)} and not a number: take its .item(),"
                                f" or on rank 0 log.board.add_histogram({name!r}, values, step)")
        if not self.master:
            return
        self.lines.append({key: self.metrics[key] for key in self.metrics if health.READ.match(key)})
        try:
            for name, lines in (("metrics.jsonl", [self.metrics]), ("samples.jsonl", samples)):
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

    def report(self):
        """Write report.html, in a process of its own, whose failure costs nothing else."""
        if self.master:
            done = subprocess.run([sys.executable, ROOT / "report.py", self.out_dir], capture_output=True,
                                  text=True)
            self.say((done.stdout or done.stderr).strip())

    def show(self, rollouts, samples, seconds):
        """Print the line of a step that took so many seconds, and after an evaluation some of its samples."""
        step = self.metrics["step"]
        for s in samples[:4] if any(name.startswith("eval") for name in self.metrics) else ():
            asked, said = plain_text(s["prompt"]), plain_text(s["completion"])
            self.say(f"    {asked[-60:]!r}\n     -> {said[-40:]!r:44} reward {s['reward']:g}, "
                     f"truth {s['truth']!r}")
        if step < health.FIRST:
            self.first_scores.append([
                (str(r.row.get("source") or ""), r.score, r.answered, plain_text(r.completion)[-80:],
                 r.row.get("answer")) for r in rollouts if not math.isnan(r.score)])
            if len(self.first_scores) == health.FIRST:
                self.say(health.same_scores(sum(self.first_scores, [])))
        odd = health.odd_groups(rollouts, self.settings)
        if odd not in self.told:
            self.told.add(odd)
            self.say(odd)
        shown = [f"{word} {self.metrics[key]:{form}}" for word, key, form in CONSOLE if key in self.metrics]
        self.say("  ".join([f"step {step:3d}", *shown, f"{seconds:.1f} s"]))

    def say(self, text):
        """Print a line, or several, on rank 0."""
        if self.master and text:
            print(text)


def git(*command):
    """Return what git prints for a command in the project's folder; "" without git."""
    with contextlib.suppress(FileNotFoundError):                # git is not installed
        return subprocess.run(["git", "-C", ROOT, *command], capture_output=True, text=True,
                              errors="replace").stdout
    return ""


def keep_code(settings, folder):
    """Copy the user's code to a folder, up to LIMIT bytes: files that the settings name, then *.py files of the
    project that git does not know yet. Below the folder a copy has the full path of its file."""
    named = specs(",".join(map(str, settings.values())))
    # -z: without it git would write bäume.py in quotes and in numbers.
    new = git("ls-files", "-z", "--others", "--exclude-standard", "--exclude=user_code", "*.py").split("\0")
    room = LIMIT
    for path in filter(os.path.isfile, [*map(source_of, named), *map(ROOT.joinpath, new)]):
        content = Path(path).read_bytes()
        if len(content) <= room:
            room -= len(content)
            kept = Path(f"{folder}/{path}")
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_bytes(content)


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
