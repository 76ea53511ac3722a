"""
Figures of episodes with an environment, tools or an agent. Runs of single answers do not open this file.
"""
from collections import Counter


def episode_metrics(rollouts, engines):
    """Return the figures of episodes, for a log.

    engines: how many engines sampled them. The seconds that environments took are given per engine.
    """
    def total(name):
        return sum(r.counts.get(name, 0) for r in rollouts)

    N = len(rollouts)
    inserted = sum(len(r.ids) - len(r.prompt_ids) - len(r.logprobs) for r in rollouts)
    endings = Counter(r.finish_reason for r in rollouts)
    figures = {
        "episodes/turns": sum(len(r.spans) for r in rollouts) / N,
        "episodes/inserted_tokens": inserted / N,
        "episodes/ended/done": endings["stop"] / N,
        "episodes/limited": endings["length"] + endings["turns"] + endings["timeout"],
        "tools/call_frequency": total("calls") / N,
        "tools/failure_frequency": total("failures") / max(total("calls"), 1),
        "timing_s/environment": total("seconds") / engines}
    for ending in ("length", "turns", "timeout", "error"):
        figures[f"episodes/ended/{ending}"] = endings[ending] / N
    for name in ("requests", "rows", "untrained_tokens"):       # of agents
        if any(name in r.counts for r in rollouts):
            figures[f"episodes/{name}"] = total(name) / N
    return figures
