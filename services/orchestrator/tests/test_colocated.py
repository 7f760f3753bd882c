"""One GPU for both: the engine sleeps from before a batch is handed in until its weights are loaded, whatever
is killed when.
"""

import asyncio
import math
import shutil

import pytest

from keptset_orchestrator import PeerMismatchError, PeerRefusedError, PeerUnavailableError

from .driving import Drive
from .fake_inference import FakeInference
from .fake_trainer import FakeTrainer
from .test_resume import interrupt, interrupt_after, untimed


@pytest.fixture
def journal() -> list[str]:
    """What is asked of both, in order."""
    return []


@pytest.fixture
def one_gpu(drive: Drive, inference: FakeInference, trainer: FakeTrainer, journal: list[str]) -> Drive:
    """The run over one GPU; neither is ever there with the other."""
    drive.settings.colocated = True
    share(inference, trainer, journal)
    return drive


def share(inference: FakeInference, trainer: FakeTrainer, journal: list[str]) -> None:
    inference.colocated = inference.asleep = trainer.shares_gpu = True
    inference.journal = trainer.journal = journal
    trainer.can_start = lambda: inference.asleep or bool(trainer.batches) or bool(inference.posted)


def in_short(journal: list[str]) -> list[str]:
    """With each run of equal entries once."""
    return [one for one, before in zip(journal, ["", *journal], strict=False) if one != before]


def step(number: int) -> list[str]:
    return ["generate", "sleep", f"put {number}", f"wake {number}"]


async def test_rows_are_those_of_two_gpus_and_the_engine_sleeps_while_the_trainer_steps(
    drive: Drive, inference: FakeInference, trainer: FakeTrainer, journal: list[str]
):
    apart = await drive()
    shutil.rmtree(drive.settings.output_dir)
    inference.reset()
    trainer.reset()
    share(inference, trainer, journal)
    drive.settings.colocated = True
    rows = await drive()
    assert in_short(journal) == ["sleep", "wake 0", *step(1), *step(2), *step(3)]
    for row, other in zip(rows, apart, strict=True):
        assert row.keys() - other.keys() == {"seconds/sleep", "seconds/wake"}
        assert row["seconds/wake"] == 0.125
        assert row["seconds/sleep"] > 0
        same = [name for name in other if not name.startswith("seconds/")]
        assert [row[name] for name in same] == [other[name] for name in same]


@pytest.fixture
async def undisturbed(
    one_gpu: Drive, inference: FakeInference, trainer: FakeTrainer, journal: list[str]
) -> list[tuple]:
    rows = await one_gpu()
    shutil.rmtree(one_gpu.settings.output_dir)
    inference.reset()
    trainer.reset()
    journal.clear()
    share(inference, trainer, journal)
    return untimed(rows)


async def test_a_run_that_is_interrupted_anywhere_goes_on(
    one_gpu: Drive, inference: FakeInference, trainer: FakeTrainer, undisturbed: list[tuple]
):
    await interrupt_after(one_gpu, 40, 80, 120, 160, 200, 240)
    assert untimed(await one_gpu()) == undisturbed
    assert sorted(trainer.batches) == [1, 2, 3]


async def test_the_next_orchestrator_does_not_wake_the_engine_before_the_step_is_done(
    one_gpu: Drive,
    inference: FakeInference,
    trainer: FakeTrainer,
    journal: list[str],
    undisturbed: list[tuple],
):
    trainer.hold_from = 2
    await interrupt(one_gpu, lambda: 2 in trainer.batches)
    journal.clear()
    task = asyncio.create_task(one_gpu())
    await asyncio.sleep(0.3)
    assert journal == ["sleep"], "asleep already, and stays so"
    trainer.hold_from = math.inf
    assert untimed(await task) == undisturbed
    assert in_short(journal) == ["sleep", "wake 2", *step(3)]


async def test_an_engine_that_was_left_awake_sleeps_before_the_trainer_is_waited_for(
    one_gpu: Drive,
    inference: FakeInference,
    trainer: FakeTrainer,
    journal: list[str],
    undisturbed: list[tuple],
):
    """Orchestrator and trainer were killed while it sampled: the trainer waits for its GPU."""
    inference.asleep = False
    trainer.can_start = lambda: inference.asleep or bool(inference.posted)
    assert untimed(await one_gpu()) == undisturbed


@pytest.mark.parametrize("when", ["asleep", "awake"])
async def test_an_engine_that_is_killed_comes_back_asleep_and_is_woken(
    when: str,
    one_gpu: Drive,
    inference: FakeInference,
    trainer: FakeTrainer,
    journal: list[str],
    undisturbed: list[tuple],
):
    inference.delay = 0.05
    if when == "asleep":
        trainer.hold_from = 2

    async def restart() -> None:
        while not (2 in trainer.batches if when == "asleep" else "put 1" in journal and not inference.asleep):
            await asyncio.sleep(0.002)
        await asyncio.to_thread(inference.kill)
        inference.weight_version, inference.asleep = None, True
        await asyncio.sleep(0.1)
        trainer.hold_from = math.inf
        await asyncio.sleep(0.2)
        await asyncio.to_thread(inference.start_again)

    rows, _ = await asyncio.gather(one_gpu(), restart())
    assert untimed(rows)[0] == undisturbed[0]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert not inference.asleep


async def test_an_engine_that_cannot_start_while_the_trainer_steps_is_waited_for(
    one_gpu: Drive, inference: FakeInference, trainer: FakeTrainer
):
    """It dies as it is told to sleep, and the step takes longer than the patience with a start."""
    one_gpu.settings.startup_timeout, trainer.hold_from = 2.0, 1

    def dies(answer):
        if not inference.asleep and trainer.hold_from == 1:
            inference.sleep_faults, inference.healthy = ["reset"], False
        return answer

    async def starts_again() -> None:
        while 1 not in trainer.batches:
            await asyncio.sleep(0.01)
        await asyncio.sleep(3.5)
        trainer.hold_from = math.inf
        await asyncio.sleep(0.3)
        inference.healthy, inference.asleep = True, True

    inference.tamper = dies
    rows, _ = await asyncio.gather(one_gpu(), starts_again())
    assert [row["step"] for row in rows] == [1, 2, 3]


async def test_of_two_engines_the_one_that_died_sleeps_while_the_trainer_steps(
    one_gpu: Drive, inference: FakeInference, trainer: FakeTrainer, journal: list[str]
):
    second = FakeInference()
    share(second, trainer, journal)
    try:
        one_gpu.settings.inference_urls.append(second.url)
        inference.delay = 0.1
        trainer.hold_from = 1

        async def lose_and_find() -> None:
            while "generate" not in journal:
                await asyncio.sleep(0.002)
            await asyncio.to_thread(second.kill)
            second.weight_version, second.asleep = None, True
            second.posted.clear()
            while 1 not in trainer.batches:
                await asyncio.sleep(0.002)
            before = len(journal)
            await asyncio.to_thread(second.start_again)
            await asyncio.sleep(0.5)
            assert not [one for one in journal[before:] if "wake" in one], "the trainer is there"
            assert second.asleep
            assert inference.asleep
            trainer.hold_from = math.inf

        rows, _ = await asyncio.gather(one_gpu(), lose_and_find())
        assert [row["step"] for row in rows] == [1, 2, 3]
        assert second.posted[-1] == 3
    finally:
        second.kill()


@pytest.mark.parametrize("who", ["inference", "trainer"])
@pytest.mark.parametrize("colocated", [True, False])
async def test_all_take_turns_or_nobody(
    who: str, colocated: bool, one_gpu: Drive, inference: FakeInference, trainer: FakeTrainer
):
    one_gpu.settings.colocated = colocated
    inference.colocated = trainer.shares_gpu = colocated
    inference.asleep = False
    trainer.can_start = lambda: True
    if who == "inference":
        inference.colocated = not colocated
    else:
        trainer.shares_gpu = not colocated
    refusal = PeerRefusedError if colocated and who == "inference" else PeerMismatchError
    said = {
        (True, "inference"): "has its GPU for itself",
        (True, "trainer"): "takes no turns on its GPU",
    }.get((colocated, who), "set colocated = true for the run")
    with pytest.raises(refusal, match=said):
        await one_gpu()
    assert trainer.batches == {}


@pytest.mark.parametrize("fault", [504, 500, 503])
async def test_an_engine_that_stays_on_the_gpu_stops_the_run(
    fault: int, one_gpu: Drive, inference: FakeInference, trainer: FakeTrainer
):
    one_gpu.settings.weights_timeout = 3.0
    inference.tamper = lambda answer: inference.sleep_faults.extend([fault] * 20) or answer
    with pytest.raises(PeerUnavailableError, match=rf"did not fall asleep .* told to answer {fault}"):
        await one_gpu()
    assert trainer.batches == {}, "the batch is not handed in"


async def test_an_engine_that_falls_asleep_at_the_second_try_is_fine(
    one_gpu: Drive, inference: FakeInference
):
    inference.sleep_faults = [503]
    assert len(await one_gpu()) == 3


async def test_the_internal_token_opens_sleeping_and_waking(
    one_gpu: Drive, inference: FakeInference, trainer: FakeTrainer
):
    from pydantic import SecretStr

    inference.token = trainer.token = "token"
    one_gpu.settings.internal_token = SecretStr("token")
    assert len(await one_gpu()) == 3
