"""Somebody goes in the middle of a transfer of weights: the run goes on without, and takes them back.

The group is played: whoever has joined waits for the others, and notices nothing of one that is gone.
"""

import asyncio
import math
import time
from collections.abc import Callable

import pytest

from keptset_orchestrator import PeerUnavailableError

from .driving import Drive
from .fake_inference import FakeInference
from .fake_trainer import FakeTrainer
from .played_group import Group

STEPS = 8


@pytest.fixture(autouse=True)
def together(drive: Drive, inference: FakeInference, second: FakeInference, trainer: FakeTrainer) -> None:
    """They send and receive in one group."""
    drive.settings.weights_transfer, trainer.sends_weights = "nccl", True
    drive.settings.steps = STEPS
    inference.group = second.group = trainer.group = Group()
    inference.delay = second.delay = 0.02


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


def check(drive: Drive, trainer: FakeTrainer) -> None:
    """Every step once, every token of the weights before its step."""
    assert [row["step"] for row in drive.rows()] == list(range(1, STEPS + 1))
    for step, batch in trainer.batches.items():
        spans = [span for sample in batch.samples for span in sample.weight_versions]
        assert {span.version for span in spans} == {step - 1}


@pytest.mark.parametrize("how", ["killed", "frozen"])
async def test_a_server_that_goes_is_lost_and_the_others_load_the_files(
    how: str, drive: Drive, inference: FakeInference, second: FakeInference, trainer: FakeTrainer, caplog
):
    if how == "frozen":
        drive.settings.weights_timeout = 2.0
    took = []

    async def go_and_come_back() -> None:
        await until(lambda: trainer.sent == [0, 1])
        if how == "killed":
            second.weights_faults = ["hang"]  # it is in the middle of it
            await until(lambda: not second.weights_faults)
            began = time.monotonic()
            await asyncio.to_thread(second.kill)
        else:
            second.frozen = True
            began = time.monotonic()
        await until(lambda: 2 in inference.posted)
        took.append(time.monotonic() - began)
        assert inference.received == [0, 1], "from its files"
        trainer.hold_from = 6
        await until(lambda: 4 in trainer.batches)
        second.restarted()
        second.posted.clear()
        second.frozen = False
        if how == "killed":
            await asyncio.to_thread(second.start_again)
        await until(lambda: bool(second.posted))
        trainer.hold_from = math.inf

    await asyncio.gather(drive(), go_and_come_back())
    check(drive, trainer)
    assert took[0] < (6 if how == "killed" else 15)
    assert f"inference server {second.url} is lost" in caplog.text
    assert (
        f"{second.url}" in caplog.text.split("the files of version 2 are loaded instead")[0].splitlines()[-1]
    )
    assert trainer.sent[:2] == [0, 1]
    assert 2 not in trainer.sent
    assert trainer.sent[2:] == list(range(3, STEPS + 1)), "the next ones are sent again"
    assert inference.received == trainer.sent
    assert len(trainer.groups) >= 3, "both, one, both"
    assert second.posted[0] not in second.received, "what it came back with is from files"
    assert second.received[-1] == STEPS, "it is in the group again"


async def test_a_trainer_that_goes_leaves_servers_that_load_the_files(
    drive: Drive, inference: FakeInference, second: FakeInference, trainer: FakeTrainer, caplog
):
    async def go_and_come_back() -> None:
        await until(lambda: trainer.sent == [0, 1])
        inference.weights_faults = ["hang"]  # nobody gets to the end of it
        await until(lambda: trainer.sending == 2 and not inference.weights_faults)
        await asyncio.to_thread(trainer.kill)
        await until(lambda: 2 in inference.posted and 2 in second.posted)
        await asyncio.to_thread(trainer.start_again)

    await asyncio.gather(drive(), go_and_come_back())
    check(drive, trainer)
    assert "is lost" not in caplog.text
    assert 2 not in inference.received + second.received
    assert inference.received[-1] == second.received[-1] == STEPS


async def test_an_orchestrator_that_goes_calls_everybody_off_and_the_next_one_goes_on(
    drive: Drive, inference: FakeInference, second: FakeInference, trainer: FakeTrainer
):
    first = asyncio.create_task(drive())
    await until(lambda: trainer.sent == [0, 1])
    second.weights_faults = ["hang"]
    await until(lambda: trainer.sending == 2 and not second.weights_faults)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await until(lambda: trainer.sending is None)
    assert inference.weight_version == 1, "it did not wait for the time to be up"
    await drive()
    check(drive, trainer)
    assert inference.received[-1] == second.received[-1] == STEPS


async def test_a_transfer_that_fails_twice_though_everybody_is_there_stops_the_run(
    drive: Drive, inference: FakeInference, second: FakeInference, trainer: FakeTrainer
):
    """Once it is a warning; always it is a network that was not set up, and an update that takes for ever."""
    second.group = Group()  # it never meets the others
    drive.settings.weights_timeout = 1.0
    with pytest.raises(PeerUnavailableError, match=r"504 not all have come.*gave up waiting for the trainer"):
        await drive()
    assert inference.posted == second.posted == [0]
    assert inference.received == []
