"""The ranks of the training loop as the ingest process sees them; here they only sleep."""

import io
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import uvicorn
from fastapi import FastAPI

from keptset_trainer import child
from keptset_trainer.child import TrainingLoop
from keptset_trainer.folders import Folders
from keptset_trainer.resume import what_is_left
from keptset_trainer.serve import IngestServer


@pytest.fixture
def loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TrainingLoop]:
    sleeper = tmp_path / "sleeper"
    sleeper.write_text('#!/bin/sh\necho "rank $RANK of $WORLD_SIZE at $5"\nexec sleep 60\n')
    sleeper.chmod(0o755)
    # Its own stderr: pytest changes ours between set-up and call, and the ranks' words would get past it.
    stand_in = SimpleNamespace(executable=str(sleeper), stderr=io.StringIO())
    monkeypatch.setattr("keptset_trainer.child.sys", stand_in)
    folders = Folders(tmp_path / "output", tmp_path / "weights")
    folders.create()
    with folders.lock.open("wb") as lock:
        loop = TrainingLoop(folders, lock.fileno(), ranks=3)
        yield loop
        loop.stop(5.0)


def test_the_rank_that_dies_is_named_and_takes_the_others_with_it(loop):
    deadline = time.monotonic() + 100
    while len(loop.lines) < 3:
        assert time.monotonic() < deadline, "waited 100 s for the ranks' first words"
        time.sleep(0.01)
    meeting = f"file://{loop.folders.rendezvous}"
    assert sorted(loop.lines) == [f"rank {rank} of 3 at {meeting}" for rank in range(3)]
    assert loop.is_running()
    assert loop.failure() is None
    os.kill(loop.processes[1].pid, signal.SIGKILL)
    loop.wait()
    assert loop.failure().startswith("rank 1 of 3 of the training loop ended with exit code -9: rank ")
    assert not any(process.poll() is None for process in loop.processes)


def test_told_to_stop_no_rank_has_failed(loop):
    assert loop.stop(5.0) is None
    assert loop.failure() is None
    assert not any(process.poll() is None for process in loop.processes)


def test_a_rank_that_does_not_end_in_time_is_killed_and_that_is_said(loop):
    pid = loop.processes[1].pid
    os.kill(pid, signal.SIGSTOP)  # as one that is writing a large checkpoint
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)  # of two signals that wait the other one comes first
    for step in (3, 4):
        loop.folders.checkpoint(step).mkdir()
    for version in (4, 5, 6):
        loop.folders.version(version).mkdir()
    wrong = loop.stop(0.2)
    assert not any(process.poll() is None for process in loop.processes)
    told = "trainer: told to stop; the training loop has 0.2 s (trainer.shutdown_timeout) to leave its step"
    assert told in child.sys.stderr.getvalue()
    said = "rank 1 of 3 of the training loop did not end within 0.2 s of being told to, and was killed; "
    assert wrong.startswith(said)
    assert "from the checkpoint of step 4 and trains steps 5 to 6 once more, from the spool" in wrong
    assert wrong.endswith("raise trainer.shutdown_timeout")


def test_a_rank_that_fails_as_it_is_told_to_stop_is_named_with_its_last_line(loop):
    """As one whose last checkpoint the disk refuses."""
    process = loop.processes[1]
    os.kill(process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    loop.lines.append("trainer: step 6: its checkpoint cannot be written")
    loop.stopping = True
    os.kill(process.pid, signal.SIGKILL)
    process.wait(100)
    wrong = loop.stop(100.0)
    assert wrong.startswith("told to stop, rank 1 of 3 of the training loop ended with exit code -9: ")
    assert wrong.endswith("trainer: step 6: its checkpoint cannot be written")


@pytest.mark.parametrize(
    ("saved", "published", "said"),
    [
        (None, 0, "it had no checkpoint yet"),
        (0, 0, "from the checkpoint of step 0, the newest step that is published"),
        (4, 4, "from the checkpoint of step 4, the newest step that is published"),
        (4, 5, "from the checkpoint of step 4 and trains step 5 once more"),
        (4, 9, "from the checkpoint of step 4 and trains steps 5 to 9 once more"),
    ],
)
def test_what_an_end_without_a_last_checkpoint_leaves_is_said(tmp_path, saved, published, said):
    folders = Folders(tmp_path / "output", tmp_path / "weights")
    folders.create()
    folders.version(published).mkdir()
    if saved is not None:
        folders.checkpoint(saved).mkdir()
    assert said in what_is_left(folders)


def test_told_to_stop_twice_a_rank_that_has_ended_meanwhile_has_not_failed(loop):
    """Else the others would be killed while they write the last checkpoint."""
    server = IngestServer(uvicorn.Config(FastAPI()), loop)
    server.handle_exit(signal.SIGINT, None)
    loop.processes[1].kill()
    loop.processes[1].wait(100)
    server.handle_exit(signal.SIGINT, None)
    assert loop.failure() is None
