"""The ranks of the training loop as the ingest process sees them; here they only sleep."""

import io
import os
import signal
import time
from collections.abc import Callable, Iterator
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

TRAINS = "trap 'exit 0' TERM"
LOADS = "trap - TERM"
"""Its model: it has no handler yet, and SIGTERM just ends it."""
HANGS = "trap '' TERM"
FAILS = "trap 'echo its checkpoint cannot be written; exit 1' TERM"


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., TrainingLoop]]:
    """Ranks of which each does something of its own when it is told to stop; they are at it on return."""
    script = tmp_path / "rank"
    # Its own stderr: pytest changes ours between set-up and call, and the ranks' words would get past it.
    stand_in = SimpleNamespace(executable=str(script), stderr=io.StringIO())
    monkeypatch.setattr("keptset_trainer.child.sys", stand_in)
    folders = Folders(tmp_path / "output", tmp_path / "weights")
    folders.create()
    loops = []

    def start(*ranks: str) -> TrainingLoop:
        cases = "".join(f"{rank}) {does};;\n" for rank, does in enumerate(ranks))
        words = 'echo "rank $RANK of $WORLD_SIZE at $5"'
        script.write_text(f"#!/bin/sh\ncase $RANK in\n{cases}esac\n{words}\nwhile :; do sleep 0.02; done\n")
        script.chmod(0o755)
        with folders.lock.open("wb") as lock:
            loops.append(TrainingLoop(folders, lock.fileno(), ranks=len(ranks)))
        deadline = time.monotonic() + 100
        while len(loops[-1].lines) < len(ranks):
            assert time.monotonic() < deadline, "waited 100 s for the ranks' first words"
            time.sleep(0.01)
        return loops[-1]

    yield start
    for loop in loops:
        for process in loop.processes:
            process.kill()
            process.wait()


@pytest.fixture
def loop(start: Callable[..., TrainingLoop]) -> TrainingLoop:
    return start(TRAINS, TRAINS, TRAINS)


def test_the_rank_that_dies_is_named_and_takes_the_others_with_it(loop):
    meeting = f"file://{loop.folders.rendezvous}"
    assert sorted(loop.lines) == [f"rank {rank} of 3 at {meeting}" for rank in range(3)]
    assert loop.is_running()
    assert loop.failure() is None
    os.kill(loop.processes[1].pid, signal.SIGKILL)
    loop.wait()
    assert loop.failure().startswith("rank 1 of 3 of the training loop ended with exit code -9: rank ")
    assert not any(process.poll() is None for process in loop.processes)


def test_told_to_stop_no_rank_has_failed(loop):
    assert loop.stop(100.0) is None
    assert loop.failure() is None
    assert [process.poll() for process in loop.processes] == [0, 0, 0]


@pytest.mark.parametrize("ranks", [[LOADS, TRAINS, FAILS], [FAILS, HANGS, LOADS], [LOADS] * 3])
def test_where_one_was_still_loading_there_is_nothing_to_save_and_none_has_failed(start, ranks):
    """Those that have loaded miss it, and end with whatever error that gives."""
    loop = start(*ranks)
    assert loop.stop(1000.0) is None
    assert not any(process.poll() is None for process in loop.processes)


def test_a_rank_that_fails_as_it_is_told_to_stop_takes_those_with_it_that_wait_for_it(start):
    """They are not waited for, and are not the cause."""
    loop = start(HANGS, FAILS, HANGS)
    wrong = loop.stop(1000.0)
    assert wrong.startswith("told to stop, rank 1 of 3 of the training loop ended with exit code 1: ")
    assert wrong.endswith("its checkpoint cannot be written")
    assert not any(process.poll() is None for process in loop.processes)


def test_told_to_stop_with_a_rank_that_is_lost_nobody_waits_for_the_others(start):
    loop = start(HANGS, HANGS)
    loop.processes[1].kill()
    loop.processes[1].wait(100)
    wrong = loop.stop(1000.0)
    assert wrong.startswith("told to stop, rank 1 of 2 of the training loop ended with exit code -9: ")


def test_ranks_are_told_to_stop_though_nobody_reads_what_is_said(start, monkeypatch):
    """Ctrl-C ends all of a pipeline, `| tee log` too."""
    loop = start(TRAINS)
    monkeypatch.setattr(child.sys, "stderr", Unread())
    assert loop.stop(100.0) is None
    assert loop.processes[0].poll() == 0


class Unread(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


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
    loop.lines.append("trainer: step 6: its checkpoint cannot be written")
    loop.stopping = True
    loop.processes[1].kill()
    loop.processes[1].wait(100)
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
