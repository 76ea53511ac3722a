"""
Which split of the GPUs into engines and trainers is best for which lengths of completions: a simulation.

    python -m bench.splits
    python -m bench.splits --gpus=64 --distributions=skewed --max_staleness=0,1,2,3
    python -m bench.splits --gpus=2 --completions_per_gpu=16 --mean_length=24 --engine_fixed=0.004 ...

The speeds in the settings are assumptions about a model of 7 B parameters on GPUs of the class of an H100.
They were not measured. With --gpus=2 the only split is one engine and one trainer, so that a run on a machine
with two cores can be compared with a simulation that is given the speeds measured there.

Colocated means that all GPUs sample, then all train, then all load the new weights. In a split, version t + 1
of the weights exists when training step t ends, and batch t is sampled with version t - k or, "in flight",
begun when that version exists, where k is max_staleness. An engine that is exact loads new weights between
two of its shares. In flight it loads them while its sequences pause, and these go on with the new weights.
A trainer begins with a batch when all of it has been delivered. Lengths are not capped, prompts cost nothing.
"""
import math
from statistics import mean

import numpy as np

from configurator import check, configure
# ------------------------------------------------------------------------------------------------------------
gpus = "8,64,512"               # numbers of GPUs; the engines get 1/8, 2/8 ... 7/8 of them
distributions = "constant,uniform,geometric,skewed,lognormal"   # of lengths
max_staleness = "1,2,4"         # numbers of training steps
mean_length = 2048              # tokens, the same for all distributions
completions_per_gpu = 64        # in a step
warm_up = 12                    # steps that are left out, in which the engines' lead settles
steps = 36                      # steps that are counted
seed = 0
# speeds, which are assumptions
engine_fixed = 0.012            # seconds that an engine step takes, in which each running sequence gets a token
engine_per_sequence = 1e-4      # seconds that it takes longer for each running sequence
max_running = 256               # sequences that run on an engine at once; the others wait
train_fixed = 1.0               # seconds that a training step takes, whatever is in it
train_per_token = 1.2e-4        # seconds that one GPU trains per token
sync_seconds = 2.0              # seconds that an engine does nothing because it loads weights
# ------------------------------------------------------------------------------------------------------------


def skewed(rng, count):
    """One in eight is sixteen times as long as the others."""
    return np.rint(mean_length * 8 / 23 * np.where(rng.permutation(count) % 8 == 0, 16, 1)).astype(int)


def lognormal(rng, count):
    """The logarithms have a standard deviation of 1. The mean of exp(x) is exp(mu + 1/2)."""
    return np.rint(rng.lognormal(math.log(mean_length) - 1 / 2, 1, count)).astype(int).clip(1)


DISTRIBUTIONS = {
    "constant": lambda rng, count: np.full(count, mean_length),
    "uniform": lambda rng, count: rng.integers(1, 2 * mean_length, count),
    "geometric": lambda rng, count: rng.geometric(1 / mean_length, count),
    "skewed": skewed, "lognormal": lognormal}


class Engines:
    """Engines that sample at the same time, one per row of the arrays.

    Their clocks count engine steps, in which a sequence's end follows from its start. A sequence starts when
    it has a place, in the order of arrival, so later ones change nothing about it. Seconds follow from the
    steps and the tokens that were made in them. So time jumps from one arrival of weights to the next.
    """

    def __init__(self, count):
        self.now, self.busy = np.zeros(count), np.zeros(count)      # seconds
        self.step = np.zeros(count, int)                            # engine steps taken until now
        self.places = np.zeros((count, max_running), int)           # the steps after which they are free
        self.starts = self.ends = np.zeros((count, 0), int)         # the sequences' first and last steps

    def add(self, lengths):
        """Queue sequences ([engines, sequences]; 0: none) and return the steps after which all have ended."""
        self.places.sort(axis=1)
        self.places = np.maximum(self.places, self.step[:, None])
        starts, rows = np.empty_like(lengths), np.arange(len(lengths))
        # The columns that find a free place on every engine need no loop.
        free = min((self.places == self.step[:, None]).sum(axis=1).min(), lengths.shape[1])
        starts[:, :free] = self.step[:, None]
        self.places[:, :free] += lengths[:, :free]
        for column in range(free, lengths.shape[1]):
            first = self.places.argmin(axis=1)
            starts[:, column] = self.places[rows, first]
            self.places[rows, first] += lengths[:, column]
        ends = starts + lengths
        self.starts, self.ends = np.hstack([self.starts, starts]), np.hstack([self.ends, ends])
        return ends.max(axis=1)

    def seconds(self, step):
        """The seconds from now until the end of an engine step of each engine, if no sequence is added."""
        tokens = np.minimum(self.ends, step[:, None]) - np.minimum(self.starts, step[:, None])
        return engine_fixed * (step - self.step) + engine_per_sequence * tokens.sum(axis=1)

    def load(self, made, in_flight):
        """Load weights that are made at that time, after the running engine step or, exact, the last one."""
        step = self.ends.max(axis=1)
        if in_flight:
            # Bisection finds the first engine step that ends when the weights are there.
            low = self.step
            while (low < step).any():
                middle = (low + step) // 2
                # Sums of the same seconds in another order differ by less.
                there = self.now + self.seconds(middle) >= made - 1e-9
                low, step = np.where(there, low, middle + 1), np.where(there, middle, step)
        seconds = self.seconds(step)
        self.busy += seconds
        self.now, self.step = np.maximum(self.now + seconds, made) + sync_seconds, step
        alive = (self.ends > step[:, None]).any(axis=0)
        self.starts, self.ends = (np.maximum(part[:, alive], step[:, None])
                                  for part in (self.starts, self.ends))


def simulate(batches, engines, trainers, staleness, in_flight=False):
    """The times at which versions 0, 1, ... are made, and the busy shares of engines and trainers."""
    fleet, made, last, history = Engines(engines), [0.0], [], []
    # Sequence i goes to engine i % engines. Zeros fill up the last shares.
    shares = [np.pad(lengths, (0, -len(lengths) % engines)).reshape(-1, engines).T for lengths in batches]
    train_seconds = [train_fixed + train_per_token * int(lengths.sum()) / trainers for lengths in batches]
    for batch in range(staleness + 1):
        last.append(fleet.add(shares[batch]))
    for t in range(warm_up + steps):
        # What engines do until all have delivered batch t, depends on no version after t.
        version = t if in_flight else t - staleness
        if version > 0:
            fleet.load(made[version], in_flight)
            last.append(fleet.add(shares[version + staleness]))
        history.append((version, fleet.now, fleet.busy.copy()))
        # An engine that has delivered it before this has not delayed the step.
        delivered = np.where(last[t] > fleet.step, fleet.now + fleet.seconds(last[t]), 0)
        made.append(max(made[-1], delivered.max()) + train_seconds[t])
    (first, begun, busy_before), (final, ended, busy) = history[warm_up - 1], history[-1]
    return (made, (ended.max() - begun.max()) / steps, ((busy - busy_before) / (ended - begun)).mean(),
            sum(train_seconds[first:final]) / (made[final] - made[first]))


def numbers(key, lowest):
    """The numbers in a setting that is a string of them."""
    check(all(part.isdecimal() and int(part) >= lowest for part in globals()[key].split(",")),
          f"{key}={globals()[key]}: must be whole numbers of at least {lowest} with commas between them")
    return [int(part) for part in globals()[key].split(",")]


if __name__ == "__main__":
    configure(globals())
    sizes, leads, names = numbers("gpus", 2), numbers("max_staleness", 0), distributions.split(",")
    check(set(names) <= set(DISTRIBUTIONS),
          f"distributions={distributions}: choose from {', '.join(DISTRIBUTIONS)}")
    for key, lowest in {"mean_length": 16, "completions_per_gpu": 1, "warm_up": max(leads) + 1, "steps": 2,
                        "seed": 0, "engine_fixed": 1e-9, "engine_per_sequence": 0, "max_running": 1,
                        "train_fixed": 0, "train_per_token": 0, "sync_seconds": 0}.items():
        check(globals()[key] >= lowest, f"{key}={globals()[key]}: must be at least {lowest}")
    print(f"Speeds: engine step {engine_fixed:g} s + {engine_per_sequence:g} s per sequence (up to {max_running}), "
          f"training step {train_fixed:g} s + {train_per_token:g} s per token and GPU, sync {sync_seconds:g} s")
    row = "{:>4}  {:<12}{:<16}{:>17}{:>10}{:>10}{:>14}{:>15}".format
    print(row("gpus", "lengths", "max_staleness", "engines+trainers", "s/step", "speed-up", "engines busy",
              "trainers busy"))
    for size in sizes:
        for name in names:
            rng = np.random.default_rng(seed)
            drawn = [DISTRIBUTIONS[name](rng, size * completions_per_gpu)
                     for _ in range(warm_up + steps + max(leads))]
            # GPUs that do both are engines and trainers that wait for each other.
            modes = {"colocated": ([(size, size)], 0, False)}
            splits = [(count, size - count) for count in sorted({max(1, size * i // 8) for i in range(1, 8)})]
            for k in leads:
                modes |= {f"{k}": (splits, k, False), f"{k}, in flight": (splits, k, True)}
            for mode, (candidates, k, in_flight) in modes.items():
                # The mean: the steps after a late delivery may be many short ones, so that the median misleads
                results = []
                for split in candidates:
                    _, seconds, sampling, training = simulate(drawn, *split, k, in_flight)
                    results.append((seconds, split, sampling, training))
                per_step, split, sampling, training = min(results)
                if mode == "colocated":
                    colocated = per_step
                print(row(size, name, mode, "{}+{}".format(*split), f"{per_step:.2f}",
                          f"{colocated / per_step:.2f}", f"{sampling:.0%}", f"{training:.0%}"))
