"""
Simulate which split of the GPUs into engines and trainers is fastest, for several distributions of lengths.

    python -m bench.splits
    python -m bench.splits --gpus=64 --distributions=skewed --max_staleness=0,1,2,3
    python -m bench.splits --gpus=2 --completions_per_gpu=32 --mean_length=24 --engine_fixed=0.004 \
        --engine_per_sequence=2e-4 --train_fixed=0.05 --train_per_token=2e-4 --sync_seconds=0.1

The default speeds are assumptions about a model of 7 B parameters on GPUs like the H100; nobody has measured
them. Measured speeds can be given on the command line. With two GPUs the only split is one engine and one
trainer, so a machine with two cores is enough to compare the simulation with a real run.

Colocated: every GPU samples its share of the batch, then all train, then all load the new weights.
Split: training step t makes version t + 1 of the weights. With max_staleness=k, the engines sample batch t
with version t - k, and a batch is trained on when all engines have delivered it. An engine finishes its share
before it loads a new version. "In flight" it does not: it loads each version as soon as there is one and adds
the next share, while the sequences that it is working on pause and then go on with the new weights.

The table has the best split of each case, its seconds per step, how many times as fast as colocated that is,
and the shares of the time in which engines sample and trainers train. Prompts cost nothing, and no length is
capped, so the longest completion of a large lognormal batch is very long.
"""
import math

import numpy as np

from configurator import check, configure
# ------------------------------------------------------------------------------------------------------------
gpus = "8,64,512"               # numbers of GPUs; 1/8, 2/8 ... 7/8 of them are tried as engines
distributions = "constant,uniform,geometric,skewed,lognormal"   # of the completions' lengths
max_staleness = "1,2,4"         # versions of the weights
mean_length = 2048              # tokens, in all distributions
completions_per_gpu = 64        # in a step
warm_up = 12                    # steps that are not counted, because the first batches are begun together
steps = 36                      # steps that are counted
seed = 0                        # of the lengths
# speeds: assumptions, see above
engine_fixed = 0.012            # seconds per engine step, which gives every running sequence one token
engine_per_sequence = 1e-4      # additional seconds per engine step for each running sequence
max_running = 256               # sequences that run on an engine at a time; the others wait
train_fixed = 1.0               # seconds per training step
train_per_token = 1.2e-4        # additional seconds for each token of a trainer's share
sync_seconds = 2.0              # seconds in which an engine loads new weights and does nothing else
# ------------------------------------------------------------------------------------------------------------


def skewed(rng, count):
    """One in eight is sixteen times as long as the others."""
    return np.rint(mean_length * 8 / 23 * np.where(rng.permutation(count) % 8 == 0, 16, 1)).astype(int)


def lognormal(rng, count):
    """Their logarithms have a standard deviation of 1, so the mean length is exp(mu + 1/2)."""
    return np.rint(rng.lognormal(math.log(mean_length) - 1 / 2, 1, count)).astype(int).clip(1)


DISTRIBUTIONS = {
    "constant": lambda rng, count: np.full(count, mean_length),
    "uniform": lambda rng, count: rng.integers(1, 2 * mean_length, count),
    "geometric": lambda rng, count: rng.geometric(1 / mean_length, count),
    "skewed": skewed, "lognormal": lognormal}


class Engines:
    """Engines that work at the same time, one in each row of the arrays.

    A sequence starts when there is a place for it and ends as many engine steps later as it has tokens. The
    queue is first in, first out, so what arrives later changes neither of the two. How many seconds pass
    between two engine steps follows from the numbers of steps and tokens between them. So the simulation can
    jump from one load of weights to the next.
    """

    def __init__(self, count):
        self.now = self.busy = self.ended = np.zeros(count)     # seconds; ended: of the last engine step
        self.step = np.zeros(count, int)                        # engine steps so far
        self.places = np.zeros((count, max_running), int)       # the engine step at which each becomes free
        self.starts = self.ends = np.zeros((count, 0), int)     # engine steps, of each sequence

    def add(self, lengths):
        """Queue sequences, [engines, sequences]; returns the engine steps at which all of them have ended."""
        step, rows = self.step[:, None], np.arange(len(lengths))
        self.places = np.sort(np.maximum(self.places, step), axis=1)
        # As many columns as every engine has free places start at once, which saves most of the loop.
        free = min((self.places == step).sum(axis=1).min(), lengths.shape[1])
        starts = np.repeat(step, lengths.shape[1], axis=1)
        self.places[:, :free] += lengths[:, :free]
        for column in range(free, lengths.shape[1]):
            place = self.places.argmin(axis=1)
            starts[:, column] = self.places[rows, place]
            self.places[rows, place] += lengths[:, column]
        self.starts, self.ends = np.hstack([self.starts, starts]), np.hstack([self.ends, starts + lengths])
        return (starts + lengths).max(axis=1)

    def seconds_until(self, step):
        """Seconds from now to the end of an engine step, which each engine still has work for."""
        tokens = np.minimum(self.ends, step[:, None]) - np.minimum(self.starts, step[:, None])
        return engine_fixed * (step - self.step) + engine_per_sequence * tokens.sum(axis=1)

    def load(self, made, in_flight):
        """Load weights that are made at this time, and before that finish all work, or in flight a step."""
        step = self.ends.max(axis=1)
        if in_flight:
            # Bisection finds the engine step that is running when the weights are made.
            low = self.step
            while (low < step).any():
                middle = (low + step) // 2
                # The tolerance is for times that are equal but were added up in different orders.
                there = self.now + self.seconds_until(middle) >= made - 1e-9
                low, step = np.where(there, low, middle + 1), np.where(there, middle, step)
        sampling = self.seconds_until(step)
        self.busy = self.busy + sampling
        self.ended = np.where(step > self.step, self.now + sampling, self.ended)
        self.now, self.step = np.maximum(self.now + sampling, made) + sync_seconds, step
        alive = (self.ends > step[:, None]).any(axis=0)
        self.starts, self.ends = (np.maximum(part[:, alive], step[:, None])
                                  for part in (self.starts, self.ends))


def simulate(batches, engines, trainers, staleness, in_flight=False):
    """The times at which versions 0, 1, ... are made, seconds per step, busy shares of engines and trainers.

    batches: arrays of lengths, warm_up + steps + staleness of them.
    """
    fleet, made, last, history = Engines(engines), [0.0], [], []
    # Sequence i goes to engine i % engines. Sequences of no tokens make the shares equal in number.
    shares = [np.pad(lengths, (0, -len(lengths) % engines)).reshape(-1, engines).T for lengths in batches]
    training = [train_fixed + train_per_token * int(lengths.sum()) / trainers for lengths in batches]
    for share in shares[:staleness + 1]:
        last.append(fleet.add(share))
    for t in range(warm_up + steps):
        # What the engines do until all have delivered batch t does not depend on versions after t.
        version = t if in_flight else t - staleness
        if version > 0:
            fleet.load(made[version], in_flight)
            last.append(fleet.add(shares[version + staleness]))
        history.append((version, fleet.now, fleet.busy))
        # Shares that ended before the engine step that the load waited for did not delay the trainers.
        delivered = np.select([last[t] > fleet.step, last[t] == fleet.step],
                              [fleet.now + fleet.seconds_until(last[t]), fleet.ended])
        made.append(max(made[-1], delivered.max()) + training[t])
    # Time is taken from load to load and not from training step to training step, because the trainers start
    # with a stock of batches, which lasts long where they are hardly faster than the engines. It is a mean,
    # because in flight a long step is often followed by several short ones, so that a median would mislead.
    (first, begun, busy_before), (final, ended, busy) = history[warm_up - 1], history[-1]
    span, sampling = ended.max() - begun.max(), ((busy - busy_before) / (ended - begun)).mean()
    return made, span / steps, sampling, sum(training[first:final]) / span


def numbers(key, lowest):
    """The whole numbers in a setting that is a string of them."""
    parts = globals()[key].split(",")
    check(all(part.isdecimal() and int(part) >= lowest for part in parts),
          f"{key}={globals()[key]}: must be whole numbers of at least {lowest} with commas between them")
    return [int(part) for part in parts]


if __name__ == "__main__":
    configure(globals())
    sizes, limits, names = numbers("gpus", 2), numbers("max_staleness", 0), distributions.split(",")
    check(set(names) <= set(DISTRIBUTIONS),
          f"distributions={distributions}: choose from {', '.join(DISTRIBUTIONS)}")
    for key, lowest in {"mean_length": 16, "completions_per_gpu": 1, "warm_up": max(limits) + 1, "steps": 1,
                        "seed": 0, "max_running": 1, "engine_per_sequence": 0, "train_fixed": 0,
                        "train_per_token": 0, "sync_seconds": 0}.items():
        check(globals()[key] >= lowest, f"{key}={globals()[key]}: must be at least {lowest}")
    check(engine_fixed > 0, f"engine_fixed={engine_fixed}: must be above 0")

    print(f"engine step {engine_fixed:g} s + {engine_per_sequence:g} s per running sequence (at most "
          f"{max_running}); training step {train_fixed:g} s + {train_per_token:g} s per token of a trainer's "
          f"share; weight sync {sync_seconds:g} s")
    line = "{:>4}  {:<11}{:<15}{:>16}{:>10}{:>10}{:>14}{:>15}".format
    print(line("gpus", "lengths", "max_staleness", "engines+trainers", "s/step", "speed-up", "engines busy",
               "trainers busy"))
    for size in sizes:
        counts = sorted({max(1, size * part // 8) for part in range(1, 8)})
        splits = [(count, size - count) for count in counts]
        # Colocated is a split in which every GPU is both, and with no staleness one waits for the other.
        cases = [("colocated", [(size, size)], 0, False)]
        for limit in limits:
            cases += [(f"{limit}", splits, limit, False), (f"{limit}, in flight", splits, limit, True)]
        for name in names:
            rng = np.random.default_rng(seed)
            batches = [DISTRIBUTIONS[name](rng, size * completions_per_gpu)
                       for _ in range(warm_up + steps + max(limits))]
            for case, candidates, limit, in_flight in cases:
                best = min((*simulate(batches, *split, limit, in_flight)[1:], split) for split in candidates)
                per_step, sampling, training, split = best
                if case == "colocated":
                    colocated = per_step
                print(line(size, name, case, "{}+{}".format(*split), f"{per_step:.2f}",
                           f"{colocated / per_step:.2f}", f"{sampling:.0%}", f"{training:.0%}"), flush=True)
