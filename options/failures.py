"""
What a run says when something in a step has failed. It opens this file only then.

    worst_tokens      the tokens at which engine and trainer differ most
    report_failures   why rollouts have no score
    report_skipped    a gradient that is not finite
"""
import math

MAX_SKIPPED = 5                 # this many skipped updates of a network in a row end the run


def worst_tokens(rollouts, logps, gap, tokenizer):
    """Return a line for each of the eight tokens with the largest gap, [C]: the text before it, and both
    logprobs."""
    places = []                                         # (s, t) of each token, in the order of gap
    for s, logp in logps.items():
        places += [(s, t) for t in range(len(logp))]
    lines = []
    for c in gap.argsort(descending=True)[:8].tolist():
        s, t = places[c]
        ids = rollouts[s].sampled_ids
        lines.append(f"  {tokenizer.decode(ids[:t])!r} + {tokenizer.decode(ids[t])!r}: "
                     f"trainer {logps[s][t]:.4f}, engine {rollouts[s].logprobs[t]:.4f}")
    return "\n".join(lines)


def report_failures(rollouts, log, step):
    """Say how many rollouts of a step failed, and why. Raises RuntimeError if none has a score because of
    that."""
    texts = [r.counts.get("problem", r.problem) for r in rollouts]
    problems = [text for text in texts if text]
    unscored = all(math.isnan(r.score) for r in rollouts)
    if problems:
        log.say(f"step {step}: {len(problems)} of {len(rollouts)} completions failed or took too long; the "
                f"first: {problems[0]}")
    if unscored and problems:
        raise RuntimeError(f"nothing was scored; {problems[0]}")
    if unscored:
        log.say(f"step {step}: nothing was scored. Does the script call scorer(...), and does the reward "
                "return more than None?")


def report_skipped(run, name, norm):
    """Count an update of a network that is skipped, because the norm of its gradient is not finite. Raises
    RuntimeError after MAX_SKIPPED in a row."""
    in_a_row = run.state["skipped_updates"]
    in_a_row[name] = in_a_row.get(name, 0) + 1
    run.log.say(f"step {run.state['step']}: an update of the {name} is skipped, because the norm of "
                f"its gradient is {norm}: is there a NaN among the advantages, or in the loss?")
    if in_a_row[name] >= MAX_SKIPPED:
        raise RuntimeError(f"{MAX_SKIPPED} updates of the {name} in a row were skipped")
