"""Which steps give a trainer more time, by a clock that the test moves."""

import pytest

from keptset_orchestrator import training_time
from keptset_orchestrator.training_time import TrainingTime

STEP = 10.0


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(training_time, "time", clock)
    return clock


def seconds_over(clock: Clock, steps: list[int | None], seconds_each: float) -> float:
    """How long a trainer is waited for that is at these steps, and stays at the last one."""
    time_left = TrainingTime(STEP)
    for step in steps:
        time_left.see(step)
        if time_left.left <= seconds_each:
            break
        clock.now += seconds_each
    clock.now += time_left.left
    assert time_left.left == 0
    return clock.now


@pytest.mark.parametrize("steps", [[], [None] * 50, [3] * 50])
def test_one_step_has_its_time_once_however_often_it_is_seen(clock, steps):
    assert seconds_over(clock, steps, 1) == STEP


def test_each_further_step_has_as_long(clock):
    assert seconds_over(clock, [3, 4, 5, 6], 9) == 3 * 9 + STEP


def test_after_a_start_the_steps_that_are_trained_once_more_have_it_again(clock):
    assert seconds_over(clock, [5, 3, 4, 5], 9) == 3 * 9 + STEP


@pytest.mark.parametrize("steps", [[3, 4, 5] * 1000, [5, 3, 4] * 1000, [9, 8, 7, 8, 9] * 1000])
def test_whoever_starts_again_and_again_has_no_more_time_for_it(clock, steps):
    assert seconds_over(clock, steps, 4) < 10 * STEP
