"""
The figures of a run: how they are computed from rollouts, and where they are written.

    evaluated           rollouts of held-out prompts, sampled by all ranks and scored
    evaluation_metrics  mean@k, pass@k and maj@k of scored rollouts
    rollout_metrics     the rewards, lengths and episodes of a step's rollouts
    compare_logprobs    compares the engine's logprobs with the trainer's, and stops a run whose engine
                        computes another model
    RunLog              writes metrics.jsonl, samples.jsonl, TensorBoard's events and the console's lines
"""
import contextlib
import copy
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from operator import itemgetter
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.tensorboard import SummaryWriter

from configurator import InputError
from runtime import checkpoint, distributed

ROOT = Path(__file__).resolve().parents[1]
STATUS = "git -c safe.directory=* --no-optional-locks status --porcelain --untracked-files=normal".split()
FIRST_STEPS = 3                 # after these a run says whether all its scores are the same
FIRST_RULES = 9                 # with fewer steps no rule of options/health.py can be broken
# What the console shows of a step, in 80 columns: a word, the metric that the word stands for, and a format.
# token_loss comes from train_sft.py. What the other scripts log as loss is only in metrics.jsonl.
CONSOLE = (("loss", "token_loss", ".4f"), ("reward", "reward", ".3f"),
           ("length", "completions/mean_length", "4.0f"),
           ("ended by a limit", "episodes/limited", "d"), ("entropy", "entropy", ".3f"),
           ("var", "critic/vf_explained_var", ".2f"),
           ("grad", "grad_norm", ".2f"), ("gap", "sampling/sampling_logp_difference/mean", ".0e"))


# ---------------------------------------------------------------- figures of rollouts

def evaluated(prompts, k, sample, scorer, name="eval", **sampling):
    """Return k adjacent scored rollouts per data.Prompt, in the order of the prompts. Every rank gets all.

    Each rank samples for its share of the prompts. The seeds come from a prompt's place, so they are the same
    every time and for any number of ranks. sample: a rollout.Sampler; sampling: keywords for it. scorer: a
    rewards.Scorer, or None. A collective.
    """
    # Neighbours go to different ranks, because they may be of one kind, and that kind may take longest.
    share = range(dist.get_rank(), len(prompts), dist.get_world_size())
    rollouts = sample([prompts[i] for i in share], k, [f"{name} {i}" for i in share], **sampling)
    if scorer:
        scorer(rollouts)
    pairs = [(share[j // k], r) for j, r in enumerate(rollouts)]
    return [r for _, r in sorted(distributed.gathered(pairs), key=itemgetter(0))]


def evaluation_metrics(rollouts, k, name="eval"):
    """Return mean@k, pass@k and maj@k of scored rollouts, where each prompt has k adjacent ones.

    mean@k  the mean score
    pass@k  the mean over prompts of the best of k scores; for scores of 0 and 1 this is how often any of the
            k answers is right
    maj@k   the mean over prompts of the score of the commonest answer: see majority

    Completions without a score are ignored. These figures are called {name}/mean@k and so on for all prompts
    together, and {name}/{source}/mean@k for the prompts of each source. Those below exist only for all
    prompts together:

    {name}/rewards/{part}/mean   the mean of a part of the score
    {name}/mean_length           the mean number of sampled tokens
    {name}/clipped_ratio         the share of completions that were cut off
    {name}/right_ended           of the completions with a score above 0, the share that ended by themselves
    {name}/unscored              how many completions have no score, or the score 0 because a reward failed
    """
    values = defaultdict(list)
    for i in range(0, len(rollouts), k):
        group = rollouts[i:i + k]
        scored = [r for r in group if not math.isnan(r.score)]
        if not scored:
            continue
        scores = [r.score for r in scored]
        prefixes = [name]
        source = group[0].row.get("source")
        if source not in (None, ""):
            prefixes.append(f"{name}/{source}")
        for prefix in prefixes:
            values[f"{prefix}/mean@{k}"].append(mean_or_zero(scores))
            values[f"{prefix}/pass@{k}"].append(max(scores))
            values[f"{prefix}/maj@{k}"].append(majority(scored).score)
    return {
        **{key: mean_or_zero(each) for key, each in values.items()},
        f"{name}/unscored": len(failures(rollouts)),
        f"{name}/mean_length": mean_or_zero([len(r.logprobs) for r in rollouts]),
        f"{name}/clipped_ratio": mean_or_zero([r.finish_reason == "length" for r in rollouts]),
        f"{name}/right_ended": mean_or_zero([r.finish_reason == "stop" for r in rollouts if r.score > 0]),
        **reward_means(rollouts, f"{name}/rewards")}


def majority(rollouts):
    """Return the rollout whose answer has the most votes, the first one in a tie.

    Answers that agree are equal in r.answer, as 1/2 and 0.5 are, or B and "B) 12". A completion without an
    answer has no vote.
    """
    votes = Counter(r.answer for r in rollouts if r.answer)
    counts = [votes[r.answer] for r in rollouts]
    return rollouts[counts.index(max(counts))]


def failures(rollouts):
    """Return a text for each rollout without a score, or with the score 0 because a reward failed."""
    failed = [r for r in rollouts if r.problem or math.isnan(r.score)]
    # counts has the problem of an episode, and r.problem that of a reward.
    return [r.counts.get("problem") or r.problem or "the reward gave no score" for r in failed]


def rollout_metrics(rollouts, n, group_std, engines):
    """Return the figures of sampled and scored rollouts for a log; means ignore NaN.

    n: the number of adjacent rollouts per prompt. group_std: losses.group_std. It is an argument, because
    files in runtime/ import no formulas. engines: how many engines sampled them. The time that environments
    took is given per engine.
    """
    lengths = [len(r.logprobs) for r in rollouts]
    scores = [r.score for r in rollouts]
    scored = [score for score in scores if not math.isnan(score)]
    stds = group_std(torch.tensor(scores, dtype=torch.float64), n)                      # [N / n]
    figures = {
        "reward": mean_or_zero(scores),
        "reward_std": stds.mean().item(),
        "frac_reward_zero_std": (stds == 0).double().mean().item(),
        "rewards/min": min(scored, default=0.0),
        "rewards/max": max(scored, default=0.0),
        "rewards/unscored": len(scores) - len(scored),
        **reward_means(rollouts, "rewards"),
        **part_means([r.extra for r in rollouts], "logged"),
        # This is the end of what user_code.TimeUp says.
        "rewards/timeouts": sum("(call_timeout)" in r.problem for r in rollouts),
        "completions/sampled_tokens": sum(lengths),
        "completions/mean_length": mean_or_zero(lengths),
        "completions/min_length": min(lengths),
        "completions/max_length": max(lengths),
        "completions/clipped_ratio": mean_or_zero([r.finish_reason == "length" for r in rollouts])}
    if any(r.counts for r in rollouts):         # single answers have none
        from options.episode_metrics import episode_metrics
        figures |= episode_metrics(rollouts, engines)
    return figures


def reward_means(rollouts, prefix):
    # Returns the mean of each part of the score, and the share of completions without a final answer.
    figures = part_means([r.parts for r in rollouts], prefix)
    answers = [r.answer for r in rollouts if r.answer is not None and r.row.get("answer") is not None]
    if answers:
        figures[f"{prefix}/no_answer"] = answers.count("") / len(answers)
    return figures


def part_means(dicts, prefix):
    """Return {prefix/name/mean: mean_or_zero} of the numbers in dicts."""
    numbers = defaultdict(list)
    for values_by_name in dicts:
        for name, value in values_by_name.items():
            if not isinstance(value, str):
                numbers[name].append(value)
    return {f"{prefix}/{name}/mean": mean_or_zero(values) for name, values in numbers.items()}


def mean_or_zero(values):
    """Return the mean of numbers without NaN, or 0 if there are none."""
    # What could make their sum infinite is left out as well.
    finite = [value for value in values if abs(value) < 1e300]
    return math.fsum(finite) / max(len(finite), 1)      # the same in every version of Python


def sample_lines(rollouts, n, tokenizer, step):
    """Return a step's lines of samples.jsonl: the first of n rollouts of each of the first eight prompts."""
    lines = []
    for r in rollouts[:8 * n:n]:
        line = {"step": step, "prompt": r.row["prompt"],
                # The completion of an episode has several messages.
                "completion": r.completion if r.counts else plain_text(r.completion), "reward": r.score,
                "finish_reason": r.finish_reason, "truth": r.row.get("answer"),
                # batch_decode returns a text for each row of ids, [n, 1], and so for each token.
                "tokens": [tokenizer.batch_decode(r.ids[start:end, None]) for start, end in r.spans],
                # + 0.0 makes 0.0 of -0.0.
                "logprobs": (r.logprobs.astype(float).round(3) + 0.0).tolist()}
        for key, value in (("extra", r.extra), ("images", r.row.get("images"))):
            if value:
                line[key] = value
        lines.append(line)
    return lines


def plain_text(text):
    """Return a prompt or a completion as one string; of messages, their contents."""
    if isinstance(text, str):
        return text
    return " ".join(str(message["content"] or "") for message in text)


# ---------------------------------------------------------------- engine and trainer

def compare_logprobs(rollouts, logps, bound, tokenizer, version=None):
    """Compare the trainer's logprobs, {s: [len]}, with the engine's for the same tokens; return metrics.

    Both sides have the same weights. The gap of a token is |trainer - engine|, in nats. A mean gap over
    `bound`, or a NaN, therefore means that the weights did not arrive, that a temperature is wrong, or that
    one side computes the model wrongly. It raises RuntimeError, and the message shows the worst tokens. So
    does a mean difference over half of `bound`. Rounding goes both ways, but if the engine samples from a
    part of the distribution and the trainer does not know it, the engine's logprobs are all higher than the
    trainer's. The bound for weights that are known to differ is infinite.

    version: the version of the policy's weights. Rollouts that were sampled with another version raise
    RuntimeError. None accepts all versions. docs/metrics.md explains the metrics. This is a collective, which
    a rank without any logprobs also has to call.
    """
    for s in logps:
        stale = rollouts[s].sampled_by - {version}
        if stale and version is not None:
            raise RuntimeError(f"step {version} compares rollouts of step {min(stale)}'s policy with its "
                               "own: leave them out of compare_logprobs, and take the engine's "
                               "logprobs as the old ones")
    engine_logps = [torch.from_numpy(rollouts[s].logprobs) for s in logps]
    engine_logp = torch.cat([torch.empty(0), *engine_logps])                # [C] of this rank; C may be 0
    trainer_logp = torch.cat([*logps.values()]).cpu() if logps else engine_logp
    difference = trainer_logp - engine_logp
    log_ratio = torch.cat(distributed.gathered([difference]))               # [C] of all ranks
    if len(log_ratio) == 0:                             # no rank compares a token, so nothing can be wrong
        return {}
    gap = log_ratio.abs()
    ratio = log_ratio.exp()
    # A comparison with NaN is False.
    if not (gap.mean() <= bound and abs(log_ratio.mean()) <= bound / 2 and gap.isfinite().all()):
        from options.failures import worst_tokens
        raise RuntimeError(
            f"engine and trainer logprobs differ by {gap.mean():.2g} on average, over logprob_gap={bound:g}, "
            f"or by {log_ratio.mean():+.2g} with their sign, over half of it. Maybe the engine has not got "
            "these weights, or samples with other settings, or one side ignores left padding. "
            f"The worst tokens here:\n{worst_tokens(rollouts, logps, difference.abs(), tokenizer)}")
    metrics = {
        "sampling_logp_difference/mean": gap.mean(),
        "sampling_logp_difference/max": gap.max(),
        "sampling_logp_difference/p99": gap.kthvalue(math.ceil(0.99 * len(gap))).values,
        "importance_sampling_ratio/mean": ratio.mean(),
        "importance_sampling_ratio/max": ratio.max(),
        "importance_sampling_ratio/min": ratio.min(),
        "kl": (ratio - 1 - log_ratio).mean(),
        "effective_sample_size": ratio.mean().double() ** 2 / ratio.square().mean()}
    return {f"sampling/{name}": value.item() for name, value in metrics.items()}


# ---------------------------------------------------------------- the log

class RunLog:
    """Writes metrics.jsonl and TensorBoard events, samples.jsonl, config.json and a copy of the script, and
    prints to the console.

    settings: a dict of the run's settings. state: run.state; the log begins at its step, and drops the lines
    of that step and of later ones, because the run writes them again. Only rank 0 writes. A disk that is full
    ends the run. Attributes besides these:

    master          whether this is rank 0
    history         on rank 0, the metrics of all steps, for health.news, which warns where they look wrong
    reported        the problems that the console has named, because it names each only once
    first_rollouts  the rollouts of the first FIRST_STEPS steps
    board           on rank 0, TensorBoard's writer
    metrics         figures of this step that all ranks agree on; scripts add to them
    totals          {name: the sum of the values that `add` was given in this step on this rank}
    counts          {name: how many values these were}, only for means
    begun           what a stop in the middle of the step saves: a copy of the state from the beginning of the
                    step, or from the end of the step's evaluation
    started         when the step began
    """

    def __init__(self, out_dir, script, settings, state):
        self.master = dist.get_rank() == 0
        self.out_dir = out_dir
        self.settings = settings
        self.state = state
        self.history = []
        self.reported = set()
        self.first_rollouts = []
        if self.master:
            self.history = rewind(f"{out_dir}/metrics.jsonl", state["step"])
            rewind(f"{out_dir}/samples.jsonl", state["step"])
            name = os.path.basename(script)
            config = {"script": name, **settings, "checksums": state["checksums"], "out_dir": out_dir}
            Path(out_dir, name).write_bytes(Path(script).read_bytes())
            Path(out_dir, "config.json").write_text(json.dumps(config, indent=1))
            Path(out_dir, "changes.diff").write_bytes(b"")
            if has_changed_code(settings):
                from options.kept_code import keep_code
                keep_code(settings, out_dir)
            self.board = SummaryWriter(out_dir, purge_step=state["step"])
            threading.excepthook = thread_failed
        self.start(state["step"])

    # ------------------------------------------------------------ a step's figures

    def start(self, step):
        """Begin the line of a step, with the figures of its evaluation if a resumed run knows them."""
        # state["evaluated"] is {"step": step, and the figures of its evaluation}. Checkpoints also hold it.
        if self.state["evaluated"].get("step") != step:
            self.state["evaluated"] = {"step": step}
        self.metrics = dict(self.state["evaluated"])
        self.totals = Counter()
        self.counts = Counter()
        self.begun = copy.deepcopy(self.state)
        self.begun["eval_scores"] = self.state["eval_scores"]           # a stop in this step keeps its score
        self.started = time.perf_counter()
        distributed.watchdog.moved(f"step {step}")

    @contextlib.contextmanager
    def timed(self, name):
        """Add the seconds that the block takes, including its work on the GPU, to timing_s/name."""
        key = f"timing_s/{name}"
        start = time.perf_counter()
        distributed.watchdog.moved(f"step {self.metrics['step']}, {name}")
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.metrics[key] = self.metrics.get(key, 0.0) + time.perf_counter() - start
        distributed.watchdog.moved(f"step {self.metrics['step']}, after {name}")

    @torch.no_grad()
    def add(self, sums={}, means={}):
        """Add to the step's figures over all ranks, without waiting for a GPU.

        sums: {name: a number, or a tensor of one number}. means: {name: a tensor or list of values}; a mean
        that gets no values is left out.
        """
        for name, values in (sums | means).items():
            if not torch.is_tensor(values):
                values = torch.tensor(values, dtype=torch.float64)
            if values.numel():                                  # without this, a mean of nothing would be 0
                self.totals[name] += values.sum()
            if name in means:
                self.counts[name] += values.numel()

    def evaluate(self, prompts, k, sample, scorer, name="eval", **sampling):
        """Sample k completions per prompt as `evaluated` does, and log an evaluation. A collective."""
        with self.timed("eval"):
            # By this prefix the Sampler reads eval_temperature and so on: see rollout.sampling_of.
            rollouts = evaluated(prompts, k, sample, scorer, name, prefix="eval_", **sampling)
            self.evaluation(rollouts, k, name)

    def evaluation(self, rollouts, k, name="eval"):
        """Log the figures of an evaluation's scored rollouts, of all ranks, and show the first three.

        If more than a tenth of them was not scored, the evaluation chooses no best checkpoint.
        """
        step = self.metrics["step"]
        figures = evaluation_metrics(rollouts, k, name)
        failed = failures(rollouts)
        self.metrics |= figures
        self.state["evaluated"] |= figures
        if failed:
            self.say(f"step {step}: {len(failed)} of {len(rollouts)} held-out completions were not scored; "
                     f"the first: {failed[0]}")
        best_by = self.settings.get("best_by") or f"eval/mean@{k}"
        if len(failed) <= len(rollouts) / 10 and best_by in figures:
            self.state["eval_scores"][str(step)] = figures[best_by]
        self.begun = copy.deepcopy(self.state)                  # a stop in this step also saves these figures
        # The first three are mean@k, pass@k and maj@k; more do not fit into 80 columns.
        texts = [f"{key} {value:.3f}" for key, value in figures.items()]
        self.say("  ".join([f"step {step:3d}", *texts[:3]]))
        if len(self.history) >= FIRST_RULES:
            from options.health import news
            for text in news(self.history, self.settings, self.reported):
                self.say(text)

    def write(self, samples=()):
        """Write the line of this step to metrics.jsonl and TensorBoard. A collective.

        samples: the lines that sample_lines returns, for samples.jsonl.
        """
        # A sum has no count, which is 0 here.
        triples = [(name, float(total), self.counts[name]) for name, total in self.totals.items()]
        totals = Counter()                                      # over all ranks, and so are the counts
        counts = Counter()
        for name, total, count in distributed.gathered(triples):
            totals[name] += total
            counts[name] += count
        figures = {name: total / max(counts[name], 1) for name, total in totals.items()}
        self.metrics = figures | self.metrics
        # Scripts that train completions add the entropy of each token in each update; train_sft.py adds none.
        if counts["entropy"]:
            self.metrics["completions/trained_tokens"] = counts["entropy"]
        for name, value in self.metrics.items():
            if not isinstance(value, (int, float)):
                raise TypeError(f"log.metrics[{name!r}] is {value!r:.100} and not a number: take its .item(),"
                                f" or on rank 0 log.board.add_histogram({name!r}, values, step)")
        if not self.master:
            return
        self.history.append(self.metrics)
        try:
            append(f"{self.out_dir}/metrics.jsonl", [self.metrics])
            append(f"{self.out_dir}/samples.jsonl", samples)
            for name, value in self.metrics.items():
                with contextlib.suppress(ValueError):           # TensorBoard does not accept every name
                    self.board.add_scalar(name, value, self.metrics["step"])
            self.board.flush()
        except OSError as error:
            raise InputError(f"out_dir={self.out_dir} cannot be written: {error}; the checkpoints in it "
                             "stand") from error

    # ------------------------------------------------------------ the console, and the page

    def say(self, text):
        """Print a line, or several, on rank 0."""
        if self.master and text:
            print(text)

    def show(self, rollouts, samples, seconds):
        """Print the line of a step that took so many seconds, and after an evaluation some of its samples."""
        step = self.metrics["step"]
        if any(name.startswith("eval") for name in self.metrics):
            for sample in samples[:4]:
                prompt = plain_text(sample["prompt"])
                completion = plain_text(sample["completion"])
                self.say(f"    {prompt[-60:]!r}\n     -> {completion[-40:]!r:44} "
                         f"reward {sample['reward']:g}, truth {sample['truth']!r}")
        if step < FIRST_STEPS:
            self.first_rollouts += rollouts
        if step == FIRST_STEPS - 1:
            self._warn_of_same_scores()
            self.first_rollouts.clear()
        texts = [f"{word} {self.metrics[key]:{form}}" for word, key, form in CONSOLE if key in self.metrics]
        self.say("  ".join([f"step {step:3d}", *texts, f"{seconds:.1f} s"]))

    def _warn_of_same_scores(self):
        scores = defaultdict(set)                               # of each source
        for r in self.first_rollouts:
            if not math.isnan(r.score):
                scores[r.row.get("source")].add(r.score)
        if 1 in map(len, scores.values()):
            from options.health import same_scores
            self.say(same_scores(self.first_rollouts, FIRST_STEPS))

    def report(self):
        """Write report.html in a process of its own, which prints its place. If it fails, the run goes on."""
        if self.master:
            subprocess.run([sys.executable, ROOT / "report.py", self.out_dir])


def thread_failed(details):
    # Shows the error of a thread, except of TensorBoard's. That thread also passes its error on to the next
    # call of `board`, so that `write` ends the run with it. If both threads wrote to the console at once, the
    # message could be lost.
    if not type(details.thread).__module__.startswith("tensorboard"):
        threading.__excepthook__(details)


# ---------------------------------------------------------------- files of the log

def append(path, lines):
    """Append objects to a .jsonl file, and wait until the disk has them: a checkpoint relies on them."""
    with open(path, "a") as file:
        for line in lines:
            # Rows of a parquet file may hold dates. JSON has neither NaN nor infinity, but null.
            text = json.dumps(line, default=str)
            file.write(json.dumps(json.loads(text, parse_constant=lambda name: None)) + "\n")
        file.flush()
        if os.path.isfile(path):                                # /dev/null, for example, is on no disk
            checkpoint.sync(path)


def has_changed_code(settings):
    # Returns whether the settings name a .py file, or git finds files that differ from the commit.
    changes = b""
    with contextlib.suppress(FileNotFoundError):                # git is not installed
        changes = subprocess.run([*STATUS, ROOT], cwd=ROOT, capture_output=True).stdout
    return changes or ".py" in str(settings)


def rewind(path, step):
    """Drop the lines of a .jsonl log for `step` or later; return the objects of the lines that stay.

    A line that no run has written, or that a kill has cut off, is dropped as well.
    """
    earlier = []
    with open(path, "a+b") as file:                             # a new run has no log yet
        file.seek(0)
        for line in file:
            with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
                entry = json.loads(line)
                if entry["step"] < step:
                    earlier.append(entry)
    with open(path + ".part", "w") as file:
        file.writelines(json.dumps(entry) + "\n" for entry in earlier)
    os.replace(path + ".part", path)
    return earlier
