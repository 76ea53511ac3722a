"""
What the figures of a run say about its health, in words for the console and for report.py's page.

A rule compares the mean of a metric over WINDOW steps with a threshold. These are rules of thumb: a healthy
run may break one, and a run that breaks none may still learn the wrong thing.
"""
import itertools
import math
import re
import textwrap
from collections import defaultdict

WINDOW = 5                      # steps in a mean
LEAST = 5                       # means in a row that are beyond the threshold of a rule that is broken
FIRST = 3                       # steps after which a run says that all its scores are the same

# For each metric: whether its rule is broken over (1) or under (-1) the threshold; the threshold, from the
# mean over the first WINDOW steps, the highest mean so far, and the settings; what it means if the rule is
# broken; and what to try, with {settings}. With max_staleness most of the gap is between two policies.
RULES = {
    "sampling/sampling_logp_difference/mean": (
        1, lambda first, best, s: max(0.1 if s.get("max_staleness") else 1e-4, 5 * first),
        "The gap between engine and trainer has grown: the engine samples with other weights.",
        "a smaller max_staleness in train_async.py; in a script of your own look at its weight sync"),
    "entropy": (-1, lambda first, best, s: 0.1 * first,
        "The entropy has collapsed: samples hardly differ any more, so there is little to learn from.",
        "a smaller learning_rate (now {learning_rate}), epsilon_high=0.28, or entropy_coef=0.001"),
    "reward": (-1, lambda first, best, s: min((first + best) / 2, best - abs(best) / 3),
        "The reward has lost a third of its best value, and more than half of what it had gained.",
        "a smaller learning_rate (now {learning_rate}), or kl_coef=0.01"),
    "frac_reward_zero_std": (1, lambda first, best, s: 0.9 if s.get("num_generations") != 1 else 1.0,
        "In nearly all groups the completions have the same score, so they teach nothing.",
        "easier or harder prompts, a finer reward, or more num_generations (now {num_generations})"),
    "completions/clipped_ratio": (1, lambda first, best, s: 0.2,
        "Many completions are cut off at the length limit.",
        "a reward that does not pay for length, or more max_completion_length (now {max_completion_length})"),
    "actor/skipped_updates": (1, lambda first, best, s: 0.0,
        "Updates are skipped, because their gradient is not finite.",
        "a smaller learning_rate (now {learning_rate}), or dtype=float32 (now {dtype})"),
    "kl": (1, lambda first, best, s: max(0.3, 5 * first),
        "The KL to the reference model keeps growing.",
        "a larger kl_coef (now {kl_coef}), or a smaller learning_rate (now {learning_rate})")}
# These two are normally broken once the reward is nearly as high as eval/pass@k, the best of k samples.
UNLESS_SOLVED = {"entropy", "frac_reward_zero_std"}
# The metrics that are read here.
READ = re.compile(rf"({'|'.join(['step', *RULES])})$|eval/pass@")


def findings(lines, settings):
    """Return a dict for each broken rule: metric, first and last step of the latest stretch in which it was
    broken, whether that is over, and text.

    lines: dicts of metrics, one per step, as in metrics.jsonl. settings: a dict of the run's settings.
    """
    ceiling, solved, found, rewards = -math.inf, set(), [], dict(means(lines, "reward"))
    lowest = min(rewards.values(), default=math.inf)            # nothing is solved if the reward never rose
    for line in lines:
        ceiling = max([ceiling, *(value for name, value in line.items()
                                  if name.startswith("eval/pass@") and isinstance(value, float))])
        if lowest < ceiling and rewards.get(line["step"], -math.inf) >= ceiling - 0.1 * abs(ceiling):
            solved.add(line["step"])
    for metric, (sign, threshold, meaning, to_try) in RULES.items():
        best, smooth, checked = -math.inf, means(lines, metric), []
        for step, mean in smooth:
            best = max(best, mean)
            limit = threshold(smooth[0][1], best, settings)
            broken = sign * (mean - limit) > 0 and not (metric in UNLESS_SOLVED and step in solved)
            checked.append((broken, step, mean, limit))
        stretches = [[*some] for broken, some in itertools.groupby(checked, lambda one: one[0]) if broken]
        for stretch in [some for some in stretches if len(some) >= LEAST][-1:]:
            first, last = stretch[0][1], stretch[-1][1]
            *_, worst, limit = max(stretch, key=lambda one: sign * (one[2] - one[3]))
            over = last != smooth[-1][0]
            when = f"between steps {first} and {last}" if over else f"since step {first}"
            found.append({"metric": metric, "first": first, "last": last, "over": over, "text": (
                f"{meaning} {metric}, averaged over {WINDOW} steps, is {'over' if sign > 0 else 'under'} "
                f"{limit:.2g} {when}, at worst {worst:.2g}. "
                f"Try {to_try.format_map(defaultdict(lambda: 'not set', settings))}.")})
    return sorted(found, key=lambda one: one["first"])          # a cause comes before what follows from it


def series(lines, metric):
    """[(step, value)] of a metric, of the steps in which it is a finite number."""
    return [(line["step"], line[metric]) for line in lines
            if isinstance(line.get(metric), (int, float)) and math.isfinite(line[metric])]


def means(lines, metric):
    """[(step, mean over the WINDOW values that end with this step's)] of a metric."""
    steps, values = [*zip(*series(lines, metric))] or [(), ()]
    ends = range(WINDOW, len(values) + 1)
    return [(steps[end - 1], sum(values[end - WINDOW:end]) / WINDOW) for end in ends]


def news(lines, settings, told):
    """Return the texts, in lines of 80 columns, of rules that are broken in the last of the lines and that
    `told`, a set of metrics, does not name; it names them from then on."""
    now = [one for one in findings(lines, settings)
           if one["metric"] not in told and one["last"] == lines[-1]["step"]]
    told |= {one["metric"] for one in now}
    return [filled(one["text"]) for one in now]


def same_scores(samples):
    """Return a text, in lines of 80 columns, for each source whose scores are all the same, one text if those
    of all sources are, or "". A source with less than a tenth of the samples may have a few hard prompts.

    samples: those of the first steps, as tuples (source, score, whether an answer was found, or None if
    nobody looked for one, the end of the completion, the right answer).
    """
    groups = defaultdict(list)
    for sample in samples:
        groups[sample[0]].append(sample)
    if len({score for _, score, *_ in samples}) == 1:
        groups = {None: samples}
    texts = []
    for source, group in groups.items():
        _, scores, answered, completions, truths = zip(*group)
        if len({*scores}) == 1 and 10 * len(group) >= len(samples):
            missing = answered.count(False)
            of_source = f" of the source {source}" if source else ""
            unread = f" In {missing} of them no answer was found." if missing else ""
            texts.append(filled(
                f"All {len(scores)} scores{of_source} in the first {FIRST} steps are {scores[0]:g}, so they "
                f"teach nothing. Does the reward read what the model writes? The first completion, where "
                f"{truths[0]!r} is right, ends with {completions[0]!r}.{unread}"))
    return "\n".join(texts)


def odd_groups(rollouts, settings):
    """Return a text, in lines of 80 columns, if groups of a step have different rows or the same one, else "".

    rollouts: those of the step, of which num_generations adjacent ones are a group. settings: as for news.
    Raises RuntimeError for a group with different rows if loss_aggregation is prompt_mean.
    """
    n, text = settings.get("num_generations", 1), ""
    # An environment's reset or an agent may have changed the prompt.
    tasks = [str(r.row | {"prompt": ""}) for r in rollouts]     # text, because NaN is not equal to NaN
    if any(task != tasks[i - i % n] for i, task in enumerate(tasks)):
        text = (f"Rollouts of different rows stand where the num_generations={n} rollouts of one row should "
                "be. What compares the rollouts of a prompt is wrong.")
        if settings.get("loss_aggregation") == "prompt_mean":
            raise RuntimeError(text)
    elif len({str(r.row) for r in rollouts[::n]}) * n < len(rollouts):
        text = ("Several groups of a step answer the same row. Do all ranks draw the same prompts, or is a group "
                "trained twice? A file that has a row twice, or that ends within a step, does this too.")
    return filled(text)


def filled(text):
    # The text in lines of 80 columns.
    return textwrap.fill(text, 80, initial_indent="    ", subsequent_indent="    ")
