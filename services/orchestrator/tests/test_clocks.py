"""A run whose wall clock is set forward and back by hours, at every look: waits are as long as they were."""

import asyncio
import itertools
import math
import time
from collections.abc import Iterator

import pytest

from keptset_orchestrator import PeerUnavailableError, RolloutFailedError

from .driving import Drive
from .fake_inference import FakeInference
from .fake_trainer import FakeTrainer

HOUR = 3600


@pytest.fixture(autouse=True)
def jumping(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For all threads, the peers' among them. Whoever takes the difference of two looks is off by an hour."""
    real, jumps = time.time, itertools.cycle([HOUR, -HOUR, 0])
    looks = 0

    def now() -> float:
        nonlocal looks
        looks += 1
        return real() + next(jumps)

    monkeypatch.setattr(time, "time", now)
    monkeypatch.setattr(time, "time_ns", lambda: int(now() * 1e9))
    yield
    assert looks > 0, "nobody looked at it, not even the log"


async def test_a_run_with_waits_for_everybody_goes_on(
    drive: Drive, inference: FakeInference, second: FakeInference, trainer: FakeTrainer
):
    drive.settings.max_async_level, drive.settings.steps = 1, 6
    inference.delay = second.delay = 0.1
    trainer.hold_from = 3

    async def trouble() -> None:
        while not second.requests:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(second.kill)
        while 3 not in trainer.batches:
            await asyncio.sleep(0.01)
        second.restarted()
        await asyncio.to_thread(second.start_again)
        await asyncio.sleep(0.5)
        trainer.hold_from = math.inf

    rows, _ = await asyncio.gather(drive(), trouble())
    assert [row["step"] for row in rows] == list(range(1, 7))
    assert all(0 <= value < 60 for row in rows for name, value in row.items() if name.startswith("seconds/"))
    assert trainer.puts == list(range(1, 7))


async def seconds_until(error: type[Exception], drive: Drive) -> float:
    began = time.monotonic()
    with pytest.raises(error):
        await drive()
    return time.monotonic() - began


async def test_a_bound_is_neither_short_nor_long(
    drive: Drive, inference: FakeInference, trainer: FakeTrainer
):
    long = HOUR / 12  # the machine may be busy, but a clock that jumped is off by more
    trainer.hold_from, drive.settings.step_timeout = 1, 1.0
    assert 1 <= await seconds_until(PeerUnavailableError, drive) < long
    trainer.hold_from, drive.settings.step_timeout = math.inf, 30
    inference.weights_faults, drive.settings.weights_timeout = ["hang"], 0.7
    assert 0.7 <= await seconds_until(PeerUnavailableError, drive) < long
    drive.settings.weights_timeout = 30
    inference.faults, drive.settings.request_timeout = ["hang"] * 100, 0.5
    drive.settings.request_attempts = 2
    assert 1 <= await seconds_until(RolloutFailedError, drive) < long
    inference.healthy, drive.settings.startup_timeout = False, 0.6
    assert 0.6 <= await seconds_until(PeerUnavailableError, drive) < long
