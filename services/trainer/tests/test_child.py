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
    loop.stop(5.0)
    assert loop.failure() is None
    assert not any(process.poll() is None for process in loop.processes)


def test_a_rank_that_does_not_end_in_time_is_killed_and_that_is_said(loop):
    pid = loop.processes[1].pid
    os.kill(pid, signal.SIGSTOP)  # as one that is writing a large checkpoint
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)  # of two signals that wait the other one comes first
    loop.stop(0.2)
    assert not any(process.poll() is None for process in loop.processes)
    said = child.sys.stderr.getvalue()
    assert "did not end within 0.2 s of being told to (trainer.shutdown_timeout), and is killed" in said
    assert "is trained once more after the next start" in said


def test_told_to_stop_twice_a_rank_that_has_ended_meanwhile_has_not_failed(loop):
    """Else the others would be killed while they write the last checkpoint."""
    server = IngestServer(uvicorn.Config(FastAPI()), loop)
    server.handle_exit(signal.SIGINT, None)
    loop.processes[1].kill()
    loop.processes[1].wait(100)
    server.handle_exit(signal.SIGINT, None)
    assert loop.failure() is None
