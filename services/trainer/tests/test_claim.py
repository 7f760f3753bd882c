"""One loop over a directory, on whichever machine: a lock where it is seen, the heartbeat where it is not."""

import errno
import fcntl
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import pytest

from keptset_settings import TrainerSettings
from keptset_trainer import heartbeat, loop_settings
from keptset_trainer.claim import Claim
from keptset_trainer.external import ExternalLoop
from keptset_trainer.folders import Folders, folders_of
from keptset_trainer.loop import run
from keptset_trainer.serve import serve, take_lock

PATIENCE = 100.0
FAST = 0.6
"""Of `ranks_timeout`: a beat every 50 ms."""


@pytest.fixture
def external(settings: TrainerSettings) -> TrainerSettings:
    settings = settings.model_copy(update={"ranks": "external", "ranks_timeout": FAST})
    folders_of(settings).create()
    write(settings)
    return settings


@pytest.fixture
def folders(external: TrainerSettings) -> Folders:
    return folders_of(external)


def write(settings: TrainerSettings) -> None:
    """As the ingest process does."""
    folders_of(settings).settings.write_text(settings.model_dump_json())


@pytest.fixture
def watchful(external: TrainerSettings) -> TrainerSettings:
    """Of a loop that looks a long time whether another one beats, so that a busy machine's does within it."""
    return external.model_copy(update={"ranks_timeout": PATIENCE})


def claim_of(settings: TrainerSettings, by_ingest: bool = False, lock_patience: float = PATIENCE) -> Claim:
    return Claim(settings, folders_of(settings).settings, 2, by_ingest, lock_patience)


@pytest.fixture
def claim(external: TrainerSettings) -> Iterator[Claim]:
    claim = claim_of(external)
    claim.take()
    yield claim
    claim.end("they were told to stop")


class Elsewhere:
    """A loop on another machine, whose lock is not seen here: only its heartbeat is."""

    def __init__(self, folders: Folders, beats: bool) -> None:
        self.folders, self.beats = folders, beats
        self.sign = replace(heartbeat.first(2), kernel="another machine", host="elsewhere", pid=7)
        self._write()
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._beat)

    def __enter__(self) -> None:
        self.thread.start()

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.thread.join()

    def _beat(self) -> None:
        while self.beats and not self.over.wait(FAST / 12):
            self.sign = replace(self.sign, beat=self.sign.beat + 1)
            self._write()

    def _write(self) -> None:
        with suppress(FileNotFoundError):  # another loop writes too, by way of the same temporary name
            heartbeat.write(self.folders, self.sign)


def wait_for(what: str, condition) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"waited {PATIENCE} s for {what}"
        time.sleep(0.01)


def test_a_second_loop_on_the_same_machine_is_refused_while_the_first_lives(claim, external):
    with pytest.raises(
        ValueError, match=rf"2 ranks, the first of them process {os.getpid()} on .*end that one"
    ):
        claim_of(external).take()


def test_a_loop_that_has_ended_is_followed_at_once(claim, external, folders):
    folders.loop_state.write_text("{}")
    claim.end("they were told to stop")
    second = claim_of(external)
    second.take()
    assert not folders.loop_state.exists(), "what the last one said of itself is said no more"
    second.end("x")


def test_a_process_that_holds_the_lock_and_gives_no_sign_is_waited_for_and_named(external, folders):
    with folders.loop_lock.open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(
            ValueError, match=r"loop.lock: waited 0 s for whoever holds this lock and gives no"
        ):
            claim_of(external, lock_patience=0.2).take()


def test_a_loop_on_another_machine_whose_lock_is_not_seen_is_seen_by_its_heartbeat(watchful, folders):
    with (
        Elsewhere(folders, beats=True),
        pytest.raises(ValueError, match=r"2 ranks, the first of them process 7 on elsewhere"),
    ):
        claim_of(watchful).take()


def test_a_loop_on_another_machine_that_is_gone_is_followed_when_it_has_been_watched(
    external, folders, capsys
):
    with Elsewhere(folders, beats=False):
        claim = claim_of(external)
        claim.take()
    assert (
        "looking 0.15 s whether the last training loop (2 ranks, the first of them" in capsys.readouterr().out
    )
    assert heartbeat.read(folders).loop == claim.sign.loop
    claim.end("x")


def test_a_disk_that_takes_no_sign_of_life_is_named_before_anything_is_loaded(external, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("keptset_trainer.claim.heartbeat.write", full)
    with pytest.raises(ValueError, match=r"heartbeat.json cannot be written: the disk is full; .*free some"):
        claim_of(external).take()


def test_a_file_system_without_locks_is_told_and_leaves_it_to_the_heartbeat(
    watchful, folders, monkeypatch, capsys
):
    def without_locks(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("keptset_trainer.claim.fcntl.flock", without_locks)
    with Elsewhere(folders, beats=True), pytest.raises(ValueError, match="another training loop is there"):
        claim_of(watchful).take()
    assert "loop.lock cannot be locked (No locks available)" in capsys.readouterr().out
    with pytest.raises(
        ValueError, match=r"lock cannot be locked \(No locks available\), so two trainers could"
    ):
        take_lock(folders)  # ingest has nothing else to be kept apart by


def test_two_that_began_at_once_do_not_both_go_on(external, folders):
    """Neither saw a sign of the other: the one that finds the other's ends at once."""
    code = (
        "import sys, time; from pathlib import Path; from keptset_trainer.claim import Claim; "
        "from keptset_trainer.loop_settings import wait_for_settings; path = Path(sys.argv[1]); "
        "Claim(wait_for_settings(path), path, 2, False).take(); print('taken', flush=True); time.sleep(100)"
    )
    command = [sys.executable, "-c", code, str(folders.settings)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "taken\n"
        with Elsewhere(folders, beats=True):
            said = process.communicate(timeout=PATIENCE)[1]
    assert process.returncode == 1
    assert "another training loop (2 ranks, the first of them process 7 on elsewhere) has begun over" in said


def test_ranks_under_torchrun_are_refused_beside_an_ingest_process_that_starts_its_own(external, folders):
    own = external.model_copy(update={"ranks": 2})
    with folders.lock.open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as `serve` does
        with pytest.raises(
            ValueError, match=r"a trainer with ranks = 2 uses it.*trainer.ranks = \"external\""
        ):
            claim_of(own).take()
        for settings, by_ingest in ((own, True), (external, False)):
            claim = claim_of(settings, by_ingest)
            claim.take()
            claim.end("x")


def test_ranks_that_found_the_settings_of_an_earlier_run_let_an_ingest_process_in_and_take_its_own(
    external, folders
):
    """It had started its ranks itself; now torchrun is there before ingest, which no longer does."""
    write(external.model_copy(update={"ranks": 2}))
    early = claim_of(loop_settings.wait_for_settings(folders.settings))
    early.take()
    with take_lock(folders):
        write(external)
        assert "settings.json has changed since this loop began (ranks)" in early.look()
        early.end("x")
        again = claim_of(loop_settings.wait_for_settings(folders.settings))
        again.take()
        assert again.look() is None
        again.end("x")


def test_an_ingest_process_that_would_start_ranks_beside_living_ones_changes_nothing_for_them(
    claim, external, folders, capsys
):
    own = {"model": external.model, "output-dir": folders.output, "weights-dir": folders.weights, "ranks": 2}
    assert serve([text for name, value in own.items() for text in (f"--{name}", str(value))]) == 2
    assert "another training loop is there (2 ranks, the first of them process" in capsys.readouterr().err
    assert claim.look() is None, "the settings are still those that it began with"


@pytest.mark.parametrize("left", ["", '{"loop": "a', "[]", '{"of_tomorrow": 1}'])
def test_a_heartbeat_that_cannot_be_read_stops_neither_loop_nor_ingest(external, folders, left):
    """Two loops wrote it at once, or one of another version did."""
    folders.heartbeat.write_text(left)
    folders.loop_state.write_text('{"pid": 1')
    ingest = ExternalLoop(folders, patience=PATIENCE)
    assert said_of(ingest).startswith("no external ranks have come yet")
    claim = claim_of(external)
    claim.take()
    folders.heartbeat.write_text(left)
    wait_for("the next beat", lambda: heartbeat.read(folders) is not None)
    assert ingest.absent() is None
    claim.end("x")


def test_ranks_that_have_read_different_settings_do_not_train_together(settings, monkeypatch):
    """Each rank reads the file by itself, and ingest may have written it anew in between."""

    class Both:
        def gathered(self, own: TrainerSettings) -> list[TrainerSettings]:
            return [own, own.model_copy(update={"seed": 1, "port": 9})]

    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    monkeypatch.setattr("keptset_trainer.ranks.join", lambda *_: Both())
    with pytest.raises(SystemExit, match=r"rank 1 has read other settings than rank 0 \(seed\), .*again"):
        run(settings, None, None, None)


def test_a_loop_of_another_version_than_ingest_begins_no_step(claim, folders):
    folders.settings.write_text('{"of_tomorrow": 1}')
    assert "has changed since this loop began (those of another version)" in claim.look()


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"seed": 1, "optimizer": {"lr": 1e-4}}, "optimizer.lr, seed"),
        (
            {"loss": {"kind": "geometric_mean"}},
            "loss.clip_high, loss.clip_low, loss.high, loss.kind, loss.low",
        ),
        ({"ranks": 2}, "ranks"),
        ({"port": 9, "max_waiting_batches": 3, "internal_token": "secret"}, None),
    ],
)
def test_a_loop_of_other_settings_than_ingest_has_now_begins_no_step(claim, external, changes, names):
    write(TrainerSettings.model_validate(external.model_dump() | changes))
    said = claim.look()
    assert (
        said is None
        if names is None
        else f"settings.json has changed since this loop began ({names})" in said
    )


def test_settings_that_nobody_writes_are_waited_for_with_a_word_and_a_bound(tmp_path, capsys):
    with pytest.raises(ValueError, match=r"settings.json: waited 0 s for it.*start keptset-trainer with"):
        loop_settings.wait_for_settings(tmp_path / "settings.json", patience=0.3)
    assert (
        "settings.json, which the ingest process writes when it starts (0 s at most)"
        in capsys.readouterr().out
    )


def test_settings_of_another_version_are_no_traceback(tmp_path):
    path = tmp_path / "settings.json"
    path.write_text('{"ranks": "external", "of_tomorrow": 1}')
    with pytest.raises(
        ValueError, match=r"settings.json: of_tomorrow: .*not what an ingest process of this version"
    ):
        loop_settings.wait_for_settings(path)


def said_of(loop: ExternalLoop) -> str:
    return loop.absent() or "they are there"


def test_ingest_knows_by_its_own_clock_whether_external_ranks_live(external, folders):
    loop = ExternalLoop(folders, patience=PATIENCE)
    assert said_of(loop).startswith("no external ranks have come yet")
    assert (loop.state(), loop.vocab_size(), loop.failure()) == (None, None, None)

    claim = claim_of(external)
    claim.take()
    wait_for("ranks", lambda: loop.absent() is None)
    assert loop.state() is None, "they load their model"
    folders.loop_state.write_text(json.dumps({"pid": 1, "vocab_size": 261, "training": 3}))
    assert (loop.state() or {}).get("training") == 3

    claim.ended.set()  # as if it were killed
    claim.thread.join()
    loop.patience = FAST
    wait_for("them to be missed", lambda: said_of(loop).startswith("no sign of life from external ranks for"))
    assert (loop.state(), loop.vocab_size()) == (None, 261), "batches are still checked and taken in"

    # another ingest process cannot know yet, and then it does
    again = ExternalLoop(folders, patience=PATIENCE)
    assert again.vocab_size() == 261
    assert said_of(again).startswith("looking whether the external ranks (2 ranks, the first of them")
    again = ExternalLoop(folders, patience=FAST)
    wait_for(
        "them to be missed", lambda: said_of(again).startswith("no sign of life from external ranks for")
    )

    claim.end(f"step 3 cannot be written to {folders.output}/checkpoints: the disk is full")
    assert (
        "step 3 cannot be written to output_dir/checkpoints: the disk is full; what is handed in waits for"
        in said_of(again)
    )


def test_waiting_for_external_ranks_ends_when_ingest_is_told_to(folders):
    loop = ExternalLoop(folders, patience=FAST)
    thread = threading.Thread(target=loop.wait)
    thread.start()
    assert loop.is_running()
    assert loop.stop(0.0) is None
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert not loop.is_running()
    assert loop.stopping
