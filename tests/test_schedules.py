"""A sample of the schedules of tests/schedules.py, which has all of them, and the faults that they must find."""
import pytest

import schedules
from runs import forked

# Of these faults, each of another kind, the first schedules find every one.
KINDS = ("a message for a later step is dropped", "max_staleness is over by one", "a queue is popped twice",
         "weights are announced before they are sent", "an engine does not ignore SIGTERM",
         "an engine resumes with the next step", "ranks of an engine get its weights at different steps")


@pytest.fixture
def modules():
    with schedules.Modules().in_place() as modules:
        yield modules


def test_what_holds_in_every_schedule(modules):
    failure = schedules.first_failure(modules, range(100))
    assert not failure, f"python tests/schedules.py --count=1 --first={failure[0]}"


def test_a_run_that_was_stopped_is_the_one_that_was_not(modules):
    """To the last bit of its weights, whatever the number of its trainers and engines is."""
    starts = 0
    for seed in range(12):
        _, stopped = schedules.schedule(modules, seed, repeats=True)
        _, whole = schedules.schedule(modules, seed, repeats=True, peace=True)
        assert stopped.values.items() >= whole.values.items(), f"seed {seed}"
        starts += stopped.starts
    assert starts > 18


def test_a_seed_repeats(modules):
    digest, history = schedules.schedule(modules, 17)
    again, history_again = schedules.schedule(modules, 17)
    assert digest == again and history.notes == history_again.notes and len(history.notes) > 5


@pytest.mark.parametrize("fault", [fault for fault in schedules.FAULTS if fault[0] in KINDS], ids=lambda f: f[0])
def test_faults_are_found(fault):
    assert schedules.found_after(fault, limit=40)


def test_faults_fit_the_code():
    for what, path, old, new in schedules.FAULTS:
        assert (schedules.ROOT / path).read_text().count(old) == 1 and old != new, what


LATE = """
import sys, threading, time
from runtime import distributed
sys.excepthook = distributed.failed
def listen():
    time.sleep(0.2)
    distributed.end(0)
threading.Thread(target=listen).start()
raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer")
"""


def test_the_end_of_the_run_is_no_lost_connection(tmp_path):
    """An engine may lose others before its own thread hears that the run is over."""
    (tmp_path / "late.py").write_text(LATE)
    assert "Connection closed" not in forked(tmp_path / "log", tmp_path / "late.py")
