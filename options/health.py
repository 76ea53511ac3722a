"""
What the figures of a run say about its health, in words for the console and for report.py's page.

A run opens this file once it is long enough for a rule, or if its first scores are all the same.

A rule compares the mean of a metric over WINDOW steps with a limit. These are rules of thumb: a healthy run
may break one, and a run that breaks none may still learn the wrong thing.
"""
import math
import textwrap
from collections import defaultdict, namedtuple
from operator import itemgetter

from rewards import content

WINDOW = 5                      # steps in a mean
LEAST = 5                       # a rule is broken if so many means in a row are beyond its limit

# The limit of a rule is the larger of `least` and `factor` times the first mean, and the rule is broken by
# means over it or under it (side). If so, `meaning` says what that means, and `to_try` what may help, with
# {settings}.
Rule = namedtuple("Rule", "metric side least factor meaning to_try")
GAP = "sampling/sampling_logp_difference/mean"
RULES = (
    Rule(GAP, "over", 1e-4, 5.0,
         "The gap between engine and trainer has grown: the engine samples with other weights.",
         "a smaller max_staleness in train_async.py; in a script of your own look at its weight sync"),
    Rule("entropy", "under", 0.0, 0.1,
         "The entropy has collapsed: samples hardly differ any more, so there is little to learn from.",
         "a smaller learning_rate (now {learning_rate}), epsilon_high=0.28, or entropy_coef=0.001"),
    Rule("reward", "under", None, None,                         # see limit
         "The reward has lost a third of its best value, and more than half of what it had gained.",
         "a smaller learning_rate (now {learning_rate}), or kl_coef=0.01"),
    Rule("frac_reward_zero_std", "over", 0.9, 0.0,
         "In nearly all groups the completions have the same score, so they teach nothing.",
         "easier or harder prompts, a finer reward, or more num_generations (now {num_generations})"),
    Rule("completions/clipped_ratio", "over", 0.2, 0.0,
         "Many completions are cut off at the length limit.",
         "a reward that does not pay for length, or more max_completion_length (now "
         "{max_completion_length})"),
    Rule("actor/skipped_updates", "over", 0.0, 0.0,
         "Updates are skipped, because their gradient is not finite.",
         "a smaller learning_rate (now {learning_rate}), or dtype=float32 (now {dtype})"),
    Rule("kl", "over", 0.3, 5.0,
         "The KL to the reference model keeps growing.",
         "a larger kl_coef (now {kl_coef}), or a smaller learning_rate (now {learning_rate})"))
# These two are normally broken once the reward is nearly as high as eval/pass@k, the best of k samples.
UNLESS_SOLVED = {"entropy", "frac_reward_zero_std"}


def limit(rule, first, best, settings):
    """Return the limit of a rule. first: the first mean. best: the highest mean so far."""
    if rule.metric == "reward":
        return min((first + best) / 2, best - abs(best) / 3)
    least = rule.least
    if rule.metric == GAP and settings.get("max_staleness"):
        least = 0.1                                             # most of the gap is between two policies
    if rule.metric == "frac_reward_zero_std" and settings.get("num_generations") == 1:
        least = 1.0                                             # groups of one have no spread
    return max(least, rule.factor * first)


def findings(lines, settings):
    """Return a dict for each broken rule: metric, first and last step of the latest stretch in which it was
    broken, whether that is over, and text.

    lines: dicts of metrics, one per step, as in metrics.jsonl. settings: a dict of the run's settings.
    """
    broken_rules = []
    solved = solved_steps(lines)
    values = defaultdict(lambda: "not set", settings)           # for {settings} in the texts
    for rule in RULES:
        metric = rule.metric
        smooth = means(lines, metric)
        best = -math.inf
        stretch = []                        # [(how far beyond the limit, step, mean, limit)]
        latest = []                         # the last stretch that is long enough
        for step, mean in smooth:
            best = max(best, mean)
            bound = limit(rule, smooth[0][1], best, settings)
            beyond = mean - bound
            if rule.side == "under":
                beyond = -beyond
            if beyond > 0 and not (metric in UNLESS_SOLVED and step in solved):
                stretch.append((beyond, step, mean, bound))
            else:
                stretch = []
            if len(stretch) >= LEAST:
                latest = stretch
        if not latest:
            continue
        first = latest[0][1]
        last = latest[-1][1]
        _, _, worst, bound = max(latest, key=itemgetter(0))
        over = last != smooth[-1][0]
        when = f"since step {first}"
        if over:
            when = f"between steps {first} and {last}"
        text = (f"{rule.meaning} {metric}, averaged over {WINDOW} steps, is {rule.side} {bound:.2g} {when}, "
                f"at worst {worst:.2g}. Try {rule.to_try.format_map(values)}.")
        broken_rules.append({"metric": metric, "first": first, "last": last, "over": over, "text": text})
    return sorted(broken_rules, key=itemgetter("first"))        # a cause comes before what follows from it


def solved_steps(lines):
    # Returns the steps in which the mean reward has nearly reached the highest eval/pass@k so far. If the
    # reward was never lower, nothing was solved.
    rewards = dict(means(lines, "reward"))
    lowest = min(rewards.values(), default=math.inf)
    ceiling = -math.inf
    steps = set()
    for line in lines:
        for name, value in line.items():
            if name.startswith("eval/pass@") and isinstance(value, float):
                ceiling = max(ceiling, value)
        reward = rewards.get(line["step"], -math.inf)
        if lowest < ceiling and reward >= ceiling - 0.1 * abs(ceiling):
            steps.add(line["step"])
    return steps


def series(lines, metric):
    """Return [(step, value)] of a metric, for the steps in which it is a finite number."""
    points = [(line["step"], line.get(metric)) for line in lines]
    return [(step, value) for step, value in points
            if isinstance(value, (int, float)) and math.isfinite(value)]


def means(lines, metric):
    """Return [(step, mean over the WINDOW values that end with this step's)] of a metric."""
    points = series(lines, metric)
    smooth = []
    for end in range(WINDOW, len(points) + 1):
        window = points[end - WINDOW:end]
        smooth.append((window[-1][0], sum(value for _, value in window) / WINDOW))
    return smooth


def news(lines, settings, reported):
    """Return the texts, in lines of 80 columns, of rules that are broken in the last of the lines and that
    `reported`, a set of metrics, does not name; it names them from then on."""
    texts = []
    for rule in findings(lines, settings):
        if rule["metric"] not in reported and rule["last"] == lines[-1]["step"]:
            reported.add(rule["metric"])
            texts.append(filled(rule["text"]))
    return texts


def same_scores(rollouts, steps):
    """Return a text, in lines of 80 columns, for each source whose scores are all the same, one text if those
    of all sources are, or "". A source with less than a tenth of the scores may have a few hard prompts.

    rollouts: those of the first `steps` steps.
    """
    scored = [r for r in rollouts if not math.isnan(r.score)]
    groups = defaultdict(list)
    for r in scored:
        groups[r.row.get("source")].append(r)
    if len({r.score for r in scored}) == 1:
        groups = {None: scored}
    texts = []
    for source, group in groups.items():
        if len({r.score for r in group}) > 1 or 10 * len(group) < len(scored):
            continue
        first = group[0]
        ending = content(first.completion)
        of_source = f" of the source {source}" if source else ""
        text = (f"All {len(group)} scores{of_source} in the first {steps} steps are {first.score:g}, "
                "so they teach nothing. Does the reward read what the model writes? The first completion, "
                f"where {first.row.get('answer')!r} is right, ends with {ending[-80:]!r}.")
        unanswered = sum(r.answer == "" and r.row.get("answer") is not None for r in group)
        if unanswered:
            text += f" In {unanswered} of them no answer was found."
        texts.append(filled(text))
    return "\n".join(texts)


def filled(text):
    # Returns the text in lines of 80 columns.
    return textwrap.fill(text, 80, initial_indent="    ", subsequent_indent="    ")
