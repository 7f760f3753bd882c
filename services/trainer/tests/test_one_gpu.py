"""Turns on a GPU: who waits for whom, for how long, and what is said meanwhile."""

import json
import os
import threading
import time
from pathlib import Path

import pytest
import torch

from keptset_guards import GpuTurn
from keptset_trainer import one_gpu, train
from keptset_trainer.one_gpu import OneGpu
from keptset_trainer.ranks import Ranks

from .stored_run import bytes_under, folders_of, results_of, run, spool
from .test_offload import with_memory_of_its_own

pytestmark = pytest.mark.usefixtures("leaves_when_there_is_nothing_to_train")


@pytest.fixture
def engine(tmp_path: Path) -> GpuTurn:
    """One that has the GPU."""
    turn = GpuTurn(tmp_path / "gpu.lock", "an engine", shared=True)
    assert turn.try_to_take()
    return turn


@pytest.fixture
def trainers(tmp_path: Path) -> OneGpu:
    """The trainer's part in it."""
    return OneGpu(GpuTurn(tmp_path / "gpu.lock", "the trainer", shared=False), Ranks(torch.device("cpu")))


def test_the_first_turn_is_waited_for_and_it_is_said_for_whom(engine, trainers, monkeypatch):
    """The engine leaves once it has been said."""
    said = []

    def note(text: str, **_: object) -> None:
        said.append(text)
        engine.give_back()

    monkeypatch.setattr(one_gpu, "print", note, raising=False)
    trainers.first_turn(os.getppid())
    assert trainers.turn.held
    assert said == [f"trainer: waiting for the GPU, which an engine, process {os.getpid()} has"]


def test_no_engine_is_waited_for_without_end(engine, trainers, monkeypatch):
    monkeypatch.setattr(one_gpu, "PATIENCE", 0.2)
    with pytest.raises(
        ValueError, match=r"waited 0 s for the GPU, which an engine, .* put the engine to sleep"
    ):
        trainers.first_turn(None)


def test_who_waits_ends_with_the_ingest_process(engine, trainers):
    with pytest.raises(SystemExit, match="the ingest process 1 is gone"):
        trainers.first_turn(1)


def test_waiting_begins_anew_with_each_turn(engine, trainers, monkeypatch):
    monkeypatch.setattr(one_gpu, "PATIENCE", 0.3)
    assert not trainers.is_ours()
    engine.give_back()
    assert trainers.is_ours()
    trainers.turn.give_back()
    assert engine.try_to_take()
    time.sleep(0.4)
    assert not trainers.is_ours(), "not counted from the first time on"


def test_an_engine_that_waits_comes_between_two_steps_whose_batches_are_there(trainers, tmp_path):
    """As after a start that has steps to train once more; the lock itself knows no queue."""
    stop, got = threading.Event(), []
    engine = GpuTurn(tmp_path / "gpu.lock", "an engine", shared=True)

    def look() -> None:
        while not stop.wait(0.05):
            if engine.try_to_take():
                got.append(time.monotonic())
                engine.give_back()
                return

    trainers.first_turn(None)
    waiting = threading.Thread(target=look)
    waiting.start()
    try:
        trainers.offload = None
        trainers.leave(None, None, None)  # type: ignore[arg-type]
        while not trainers.is_ours():
            time.sleep(one_gpu.POLL_SECONDS)
    finally:
        stop.set()
        waiting.join()
    assert got


def test_a_trainer_that_leaves_its_gpu_between_steps_trains_the_same(
    settings, make_batch, tmp_path, monkeypatch
):
    folders = folders_of(settings)
    colocated = settings.model_copy(
        update={"output_dir": tmp_path / "b", "weights_dir": tmp_path / "bw", "gpu_lock": tmp_path / "lock"}
    )
    shared = folders_of(colocated)
    for one in (folders, shared):
        spool(one, *[make_batch(step) for step in (1, 2, 3)])
    run(settings)
    engine, seen = GpuTurn(colocated.gpu_lock, "an engine", shared=True), []
    finish, load_policy = train.finish, train.load_policy

    def finish_without_the_gpu(folders, record, *rest):
        seen.append(record["step"])
        assert engine.try_to_take(), "an engine may come before the result is there"
        engine.give_back()
        finish(folders, record, *rest)

    monkeypatch.setattr(train, "finish", finish_without_the_gpu)
    monkeypatch.setattr(one_gpu, "leaves", lambda device: True)  # also on a CPU
    monkeypatch.setattr(train, "load_policy", lambda *told: with_memory_of_its_own(load_policy(*told)))
    run(colocated)
    assert seen == [0, 1, 2, 3]
    assert bytes_under(folders.weights) == bytes_under(shared.weights)
    metrics = json.loads(shared.result(3).read_bytes())["metrics"]
    assert {"seconds/offload", "seconds/reload", "seconds/publish"} <= metrics.keys()
    assert results_of(folders) == results_of(shared)
