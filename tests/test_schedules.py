"""A sample of the schedules of tests/schedules.py, and what they find in code that is wrong."""
import pytest

import schedules


def test_any_schedule_of_trainers_and_engines():
    with schedules.Modules().in_place() as modules:
        failure = schedules.first_failure(modules, range(150))
    assert not failure, f"python tests/schedules.py --count=1 --first={failure[0]}"
