"""bench/splits.py against a simulation of every single token, and against times computed by hand."""
from types import SimpleNamespace

import numpy as np
import pytest

from bench import splits
from runs import launch


def token_by_token(batches, count, staleness, in_flight):
    """When versions 0 to 40 are made. Of the engines that can go on, the one furthest behind takes a step."""
    engines = [SimpleNamespace(rank=rank, now=0.0, begun=0, work=[]) for rank in range(count)]
    made, delivered, needed = [0.0], [[] for _ in batches], lambda e: max(0, e.begun - staleness)
    while len(made) <= 40:
        e = min((e for e in engines if e.work or needed(e) < len(made)), key=lambda e: e.now)
        if (v := needed(e)) < len(made) and (v == 0 or not e.work or in_flight and made[v] < e.now + 1e-9):
            e.now = max(e.now, made[v]) + splits.sync_seconds * (v > 0)
            e.work += [[e.begun, length] for length in batches[e.begun][e.rank::count]]
            e.begun += 1
            continue
        before, running = e.work, min(len(e.work), splits.max_running)
        e.now += splits.engine_fixed + splits.engine_per_sequence * running
        e.work = [[batch, left - 1] for batch, left in before[:running] if left > 1] + before[running:]
        for batch in {batch for batch, _ in before} - {batch for batch, _ in e.work}:
            delivered[batch].append(e.now)
        while len(delivered[t := len(made) - 1]) == count:
            made.append(max(made[-1], *delivered[t]) + 3 + splits.train_per_token * sum(batches[t]) / count)
    return made[:41]


@pytest.fixture(autouse=True)
def settings():
    vars(splits).update(engine_fixed=1, engine_per_sequence=0.5, max_running=8, train_fixed=3,
                        train_per_token=0.25, sync_seconds=2, warm_up=10, steps=30)


# With 0.5 many things happen at the same time, and with 25 sequences some have to wait for a place.
@pytest.mark.parametrize("in_flight, per_sequence", [(0, 0.5), (0, 0.0719), (1, 0.5), (1, 0.0719)])
@pytest.mark.parametrize("engines, staleness, sequences", [(1, 0, 25), (1, 1, 25), (3, 4, 25), (5, 4, 8)])
def test_every_token(engines, staleness, sequences, per_sequence, in_flight):
    vars(splits).update(engine_per_sequence=per_sequence, train_per_token=0.05)
    batches = [np.random.default_rng(i).integers(1, 20, sequences) for i in range(50)]
    made, *_ = splits.simulate(batches, engines, engines, staleness, in_flight)
    assert made == pytest.approx(token_by_token(batches, engines, staleness, in_flight), rel=1e-9)


# Colocated: 2 sequences sample for 4 * 2 s, trainers take 5 s, the sync 2 s. k=1: 8 sequences sample 4 * 5 s,
# later 4 for 4 * 3 s; the trainer takes 7 s. In flight: two batches make two tokens together, two alone.
@pytest.mark.parametrize("count, staleness, in_flight, made, figures", [
    (2, 0, False, [0, 13, 28, 43], (15, 8 / 15, 5 / 15)),
    (1, 1, False, [0, 27, 34, 48, 62, 76], (14, 12 / 14, 7 / 14)),
    (1, 1, True, [0, 27, 34, 54, 61, 81, 88], (13.5, 22 / 27, 14 / 27))])
def test_constant_lengths_by_hand(count, staleness, in_flight, made, figures):
    times, *rest = splits.simulate([np.full(4, 4)] * 50, count, count, staleness, in_flight)
    assert times[:len(made)] == pytest.approx(made) and rest == pytest.approx(figures)


def test_what_is_refused():
    assert "gpus=8,1: must be whole numbers of at least 2" in launch("-mbench.splits", "--gpus=8,1", code=2)
