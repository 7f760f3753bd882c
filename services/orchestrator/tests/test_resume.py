"""An orchestrator that was killed and starts again: no step lost, none done twice, each with one row."""

import asyncio
import errno
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from keptset_orchestrator import OrchestratorError
from keptset_orchestrator.errors import DiskError
from keptset_orchestrator.trainer import OtherBatchError
from keptset_settings import to_toml

from .driving import Drive
from .fake_inference import FakeInference
from .fake_trainer import FakeTrainer

UNTIMED = ("step", "reward/mean", "reward/min", "rollout/tokens", "rollout/error_rate", "weight_version")


def untimed(rows: list[dict]) -> list[tuple]:
    """What is the same however often a run was interrupted."""
    return [tuple(row[name] for name in UNTIMED) for row in rows]


@pytest.fixture
async def undisturbed(drive: Drive, inference: FakeInference, trainer: FakeTrainer) -> list[tuple]:
    """Rows of the same run without an interruption."""
    rows = await drive()
    shutil.rmtree(drive.settings.output_dir)
    inference.reset()
    trainer.reset()
    return untimed(rows)


async def interrupt(drive: Drive, when) -> None:
    """Cancel the run as soon as `when()` holds."""
    task = asyncio.create_task(drive())
    async with asyncio.timeout(60):
        while not when():
            assert not task.done(), f"it ended before it could be interrupted: {task}"
            await asyncio.sleep(0.002)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def interrupt_after(drive: Drive, *milliseconds: int) -> None:
    """Interrupt the run so often, each time somewhere else; on a quick machine it may have ended by then."""
    for ms in milliseconds:
        task = asyncio.create_task(drive())
        await asyncio.wait([task], timeout=ms / 1000)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@pytest.mark.parametrize("which", ["rollouts", "metrics.jsonl"])
async def test_run_on_a_full_disk_names_the_file_and_goes_on_when_there_is_space(
    which: str, drive: Drive, trainer: FakeTrainer, undisturbed: list[tuple], monkeypatch: pytest.MonkeyPatch
):
    """The second step's is refused as it is flushed. SQLite's way to be full is in test_state.py."""
    sync = os.fsync

    def refuse(handle: int) -> None:
        if which in os.readlink(f"/proc/self/fd/{handle}") and 1 in trainer.batches:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        with pytest.raises(DiskError, match=rf"{which}.*: the disk is full; free some space"):
            await drive()
    assert untimed(await drive()) == undisturbed
    assert trainer.puts == [1, 2, 3]


async def test_step_that_was_handed_in_is_not_sampled_again(
    drive: Drive, inference: FakeInference, trainer: FakeTrainer, undisturbed: list[tuple]
):
    trainer.hold_from = 1
    await interrupt(drive, lambda: 1 in trainer.batches)
    trainer.hold_from = math.inf
    rows = await drive()
    assert untimed(rows) == undisturbed
    assert trainer.puts == [1, 2, 3]
    assert len(inference.requests) == 6
    assert rows[0].keys() == rows[1].keys()


async def test_step_that_was_not_handed_in_is_sampled_again(
    drive: Drive, inference: FakeInference, trainer: FakeTrainer, undisturbed: list[tuple]
):
    inference.delay = 0.2
    await interrupt(drive, lambda: inference.requests)
    inference.delay = 0.0
    assert untimed(await drive()) == undisturbed
    assert trainer.puts == [1, 2, 3]


async def test_step_is_finished_whenever_the_run_is_interrupted(
    drive: Drive, inference: FakeInference, trainer: FakeTrainer, undisturbed: list[tuple]
):
    await interrupt_after(drive, 60, 120, 180, 240, 300)
    assert untimed(await drive()) == undisturbed
    assert sorted(trainer.batches) == [1, 2, 3]


async def test_killed_process_goes_on(
    drive: Drive, trainer: FakeTrainer, undisturbed: list[tuple], tmp_path: Path
):
    config = tmp_path / "orchestrator.toml"
    config.write_text(to_toml(drive.settings, "orchestrator"))
    trainer.hold_from = 1
    with subprocess.Popen([sys.executable, "-m", "keptset_orchestrator", "--config", str(config)]) as process:
        deadline = time.monotonic() + 200
        while 1 not in trainer.batches:
            assert time.monotonic() < deadline
            assert process.poll() is None
            await asyncio.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    trainer.hold_from = math.inf
    assert untimed(await drive()) == undisturbed
    assert trainer.puts == [1, 2, 3]


async def test_accepted_batch_wins_over_a_resampled_one(
    drive: Drive, inference: FakeInference, trainer: FakeTrainer, undisturbed: list[tuple]
):
    """The PUT of a killed orchestrator arrives after the new one has asked for the trainer's status."""
    trainer.hold_from = 1
    await interrupt(drive, lambda: 1 in trainer.batches)
    trainer.hold_from = math.inf
    accepted = trainer.batches.pop(1)

    def arrives_late(answer):
        trainer.batches.setdefault(1, accepted)
        return answer

    inference.tamper = arrives_late
    drive.settings.train.sampling.seed = 99  # what is sampled now is something else
    rows = await drive()
    assert trainer.batches[1].content_hash == accepted.content_hash
    assert untimed(rows)[0] == undisturbed[0], "the row is that of the accepted batch"
    assert untimed(rows)[1] != undisturbed[1]


async def test_accepted_batch_is_remembered_over_another_interruption(
    drive: Drive, inference: FakeInference, trainer: FakeTrainer, undisturbed: list[tuple]
):
    trainer.hold_from = 1
    await interrupt(drive, lambda: 1 in trainer.batches)
    accepted = trainer.batches.pop(1)

    def arrives_late(answer):
        trainer.batches.setdefault(1, accepted)
        return answer

    inference.tamper = arrives_late
    drive.settings.train.sampling.seed = 99
    records = drive.settings.output_dir / "rollouts"
    await interrupt(drive, lambda: len(trainer.puts) == 2 and len(list(records.glob("*.jsonl"))) == 1)
    trainer.hold_from = math.inf
    assert untimed(await drive())[0] == undisturbed[0]


async def test_batch_of_somebody_else_stops_the_run(
    drive: Drive, inference: FakeInference, trainer: FakeTrainer
):
    await drive()
    foreign = trainer.batches[1]
    trainer.reset()
    inference.reset()
    drive.settings.output_dir = drive.settings.output_dir / "other"
    drive.settings.train.sampling.seed = 99

    def arrives_before(answer):
        trainer.batches.setdefault(1, foreign)
        return answer

    inference.tamper = arrives_before
    with pytest.raises(OrchestratorError, match=r"batch of step 1: 409 .* another orchestrator"):
        await drive()


async def test_rows_of_steps_that_are_done_again_move_aside(
    drive: Drive, inference: FakeInference, trainer: FakeTrainer
):
    rows = await drive()
    del trainer.batches[3]
    again = await drive()
    assert untimed(again) == untimed(rows)
    aside = drive.settings.output_dir / "metrics.dropped.jsonl"
    assert aside.read_text().count("\n") == 1


async def test_torn_row_is_written_again(drive: Drive, trainer: FakeTrainer, undisturbed: list[tuple]):
    trainer.hold_from = 2
    await interrupt(drive, lambda: 2 in trainer.batches)
    with open(drive.settings.output_dir / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 2, "reward/mean": 0.')
    trainer.hold_from = math.inf
    assert untimed(await drive()) == undisturbed


async def test_rows_that_are_gone_are_written_again_from_the_state(drive: Drive, trainer: FakeTrainer):
    rows = await drive()
    (drive.settings.output_dir / "metrics.jsonl").unlink()
    drive.settings.steps = 4
    again = await drive()
    assert untimed(again)[:3] == untimed(rows)
    assert [row["step"] for row in again] == [1, 2, 3, 4]


async def test_row_that_cannot_be_completed_stays_missing_and_is_said(
    drive: Drive, trainer: FakeTrainer, caplog
):
    await drive()
    shutil.rmtree(drive.settings.output_dir)
    drive.settings.steps = 4
    rows = await drive()
    assert [row["step"] for row in rows] == [4]
    for step in (1, 2, 3):
        assert f"step {step}: no record of its rollouts" in caplog.text


async def test_trainer_that_is_still_training_is_waited_for(
    drive: Drive, inference: FakeInference, trainer: FakeTrainer
):
    trainer.hold_from = 1
    await interrupt(drive, lambda: 1 in trainer.batches)
    task = asyncio.create_task(drive())
    await asyncio.sleep(0.2)
    assert inference.posted == [0], "the weights of the step before are not loaded once more"
    trainer.hold_from = math.inf
    await task
    assert inference.posted == [0, 1, 2, 3]


async def test_trainer_that_lost_its_steps_stops_the_run(
    drive: Drive, inference: FakeInference, trainer: FakeTrainer
):
    def lose(answer):
        if "reverse-text-2-" in answer.request_id:
            trainer.batches.clear()
        return answer

    inference.tamper = lose
    with pytest.raises(OtherBatchError, match=r"batch of step 2: 409") as raised:
        await drive()
    assert raised.value.next_step == 1
