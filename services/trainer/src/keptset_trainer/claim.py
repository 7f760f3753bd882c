"""Only one training loop at a time goes over an output directory, wherever its ranks run. Without torch.

Two things keep another one away, since neither is enough alone. A lock of a file is exact, but only where it
is seen: all processes of a machine see it, other machines do on most shared file systems (NFS from version 4,
CephFS, Lustre with `-o flock`) and not on some (object stores that are mounted). The heartbeat is seen
wherever the files are, some seconds late.
"""

import fcntl
import os
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import IO

from keptset_settings import TrainerSettings

from . import heartbeat
from .durable import in_words
from .folders import Folders, folders_of
from .loop_settings import changed_settings

LOCK_PATIENCE = 120.0
"""Seconds for the lock of a loop that is gone: a file server keeps those of a lost machine for a while (NFS:
90 s as a rule)."""
WATCHED_BEATS = 3
"""That a loop on another machine may miss before it counts as gone."""
POLL_SECONDS = 0.1


class Claim:
    """This process is the first rank of the only loop over `settings.output_dir`, from `take` to `end`."""

    def __init__(
        self,
        settings: TrainerSettings,
        settings_path: Path,
        ranks: int,
        by_ingest: bool,
        lock_patience: float = LOCK_PATIENCE,
    ) -> None:
        """`by_ingest`: the ingest process has started this one, and holds its own lock already."""
        self.settings, self.settings_path, self.by_ingest = settings, settings_path, by_ingest
        self.folders: Folders = folders_of(settings)
        self.seconds_a_beat = settings.ranks_timeout / heartbeat.BEATS
        self.lock_patience = lock_patience
        self.sign = heartbeat.first(ranks)
        self.problem: str | None = None
        """Why this loop must not begin another step."""
        self.lock: IO[bytes] | None = None
        self.writing = threading.Lock()
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._renew, name="heartbeat", daemon=True)

    def take(self) -> None:
        """Wait for what a loop that is gone left behind, then begin to beat.

        Raises:
            ValueError: another loop is there, or an ingest process that starts its ranks itself.
        """
        seen = heartbeat.Sign(self.folders)
        if self.settings.ranks != "external" and not self.by_ingest:
            self._refuse_beside_ingest()
        self.lock = lock_of_the_loop(self.folders, seen, self.lock_patience)
        if seen.last is not None and seen.last.ended is None and seen.last.kernel != self.sign.kernel:
            print(
                f"trainer: looking {WATCHED_BEATS * self.seconds_a_beat:g} s whether the last training loop "
                f"({seen.last.who}) is gone: it was on another machine, whose locks may not be seen here",
                flush=True,
            )
            self._watch(seen, WATCHED_BEATS * self.seconds_a_beat)
        self.folders.loop_state.unlink(missing_ok=True)  # of a loop that is no more
        try:
            heartbeat.write(self.folders, self.sign)
        except OSError as error:
            raise ValueError(
                f"{self.folders.heartbeat} cannot be written: {in_words(error)}; without it nobody knows "
                "that this loop lives: free some space or look at the disk, then start again"
            ) from error
        self.thread.start()

    def end(self, words: str) -> None:
        """Leave: others need not wait to see that this loop is gone. `words`: why it ended."""
        self.ended.set()
        if self.thread.is_alive():
            self.thread.join()
        with self.writing:
            there = heartbeat.read(self.folders)
            if there is not None and there.loop == self.sign.loop:
                self._write(replace(self.sign, beat=self.sign.beat + 1, ended=words))
        if self.lock is not None:
            self.lock.close()

    def _refuse_beside_ingest(self) -> None:
        """Its lock is looked at, not held: these settings may be of an earlier run, and then an ingest
        process with ranks = "external" is to come in and write those of this one.
        """
        try:
            with self.folders.lock.open("ab") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"trainer.output_dir {self.folders.output}: a trainer with ranks = {self.settings.ranks!r} "
                "uses it, which starts its ranks itself; stop it, or start it with trainer.ranks = "
                '"external" for ranks that torchrun starts'
            ) from None
        except OSError:
            return  # no locks here, so no ingest process either: it refuses to start

    def _watch(self, seen: heartbeat.Sign, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            refuse_beside(self.folders, seen)
            time.sleep(POLL_SECONDS)

    def _renew(self) -> None:
        while not self.ended.wait(self.seconds_a_beat):
            self.look()
            with self.writing:
                self.sign = replace(self.sign, beat=self.sign.beat + 1)
                self._write(self.sign)

    def _write(self, sign: heartbeat.Heartbeat) -> None:
        try:
            heartbeat.write(self.folders, sign)
        except OSError as error:  # a full disk ends a step, not its sign of life
            print(f"trainer: no sign of life can be written: {error}", file=sys.stderr, flush=True)

    def look(self) -> str | None:
        """To be asked before each step: why this loop must not begin one, if so; else None.

        Ends this process at once if another loop has begun: both would write the same checkpoint.
        """
        there = heartbeat.read(self.folders)
        if there is not None and there.loop != self.sign.loop:
            print(
                f"trainer: another training loop ({there.who}) has begun over {self.folders.output}: this "
                "one ends; nothing that it was doing is published",
                file=sys.stderr,
                flush=True,
            )
            os._exit(1)
        if self.problem is None and (names := changed_settings(self.settings, self.settings_path)):
            self.problem = (
                f"{self.settings_path} has changed since this loop began ({', '.join(names)}): "
                "start the ranks again, and they go on with the new settings"
            )
        return self.problem


def lock_of_the_loop(folders: Folders, seen: heartbeat.Sign, patience: float) -> IO[bytes]:
    """The open `loop.lock`, locked where the file system can: no other loop is there that holds it.

    Raises:
        ValueError: another loop lives, or its lock stays for `patience` seconds.
    """
    path = folders.loop_lock
    lock = path.open("ab")
    deadline = time.monotonic() + patience
    said = False
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            refuse_beside(folders, seen)
        except OSError as error:
            print(
                f"trainer: {path} cannot be locked ({error.strerror}): only the heartbeat keeps two "
                "training loops apart on this file system",
                flush=True,
            )
            return lock
        if time.monotonic() > deadline:
            raise ValueError(
                f"{path}: waited {patience:.0f} s for whoever holds this lock and gives no sign of life: "
                "a process that hangs, or a file server that remembers a lost machine"
            )
        if not said:
            print(f"trainer: waiting for the lock {path} of an earlier training loop", flush=True)
        said = True
        time.sleep(POLL_SECONDS)


def refuse_beside(folders: Folders, seen: heartbeat.Sign) -> None:
    """ValueError if another loop has given a sign of life since the last look."""
    if seen.changed() and seen.last is not None and seen.last.ended is None:
        raise ValueError(
            f"trainer.output_dir {folders.output}: another training loop is there ({seen.last.who})"
            ", and two would train every batch twice; end that one, or leave it to it"
        )
