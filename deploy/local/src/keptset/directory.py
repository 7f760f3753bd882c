"""The directory of a run: a fresh one for every run."""

import fcntl
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

MARK = ".keptset-run"
"""A file in every run's directory, locked while the run is alive. Only what has it is ever deleted."""


@dataclass(frozen=True)
class RunDirectory:
    """runs/<name>: configs/, logs/, metrics.jsonl and more. In use until its `with` ends."""

    path: Path
    lock: int
    """File descriptor that holds the lock."""

    def __enter__(self) -> "RunDirectory":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.lock)

    @property
    def configs(self) -> Path:
        """Resolved settings, one file a service."""
        return self.path / "configs"

    @property
    def logs(self) -> Path:
        """What each process printed."""
        return self.path / "logs"

    @property
    def metrics(self) -> Path:
        """One row a step."""
        return self.path / "metrics.jsonl"

    @property
    def settings(self) -> Path:
        """The resolved settings of the whole run, to go on with."""
        return self.path / "run.toml"

    @property
    def origin(self) -> Path:
        """Where the run was started, and with which secrets."""
        return self.path / "origin.json"

    @property
    def restarts(self) -> Path:
        """Services that died and were started again."""
        return self.path / "restarts.jsonl"

    @property
    def summary(self) -> Path:
        """What a run came to: the last file that it writes."""
        return self.path / "summary.json"


def create(runs_dir: Path, name: str, *, exact: bool, overwrite: bool) -> RunDirectory:
    """Makes runs_dir/name, which no earlier run may have used: its spool, weights and rows would mix in.

    If it is there already: with `overwrite` it is deleted, if a run made it and none is using it; else, with
    `exact` (somebody asked for this very name), FileExistsError says the ways out; else a number is appended.
    """
    if not name or name in (".", "..") or "/" in name:
        raise ValueError(f"name = {name!r} must be the name of one directory")
    path = runs_dir / name
    if overwrite and path.exists():
        _delete(path)
    number = 1
    while True:
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            pass
        except OSError as error:
            raise ValueError(
                f"runs_dir = {runs_dir}: cannot make {path}: {error.strerror}; choose another --runs-dir"
            ) from error
        if (lock := _take(path)) is not None:
            break
        if exact:
            raise FileExistsError(
                f"{path} exists and a run never mixes with an earlier one: choose another --name, "
                f"or delete the earlier run with --overwrite"
            )
        number += 1
        path = runs_dir / f"{name}-{number}"
    _sign(lock)
    run = RunDirectory(path.resolve(), lock)
    run.configs.mkdir()
    run.logs.mkdir()
    return run


def reopen(path: Path, patience: float) -> RunDirectory:
    """The directory of a run that was stopped or killed.

    Args:
        path: Of the directory.
        patience: Seconds to wait for what a `keptset` that is gone left behind: its watcher ends it.

    Raises:
        ValueError: it is none, or it is in use; the text says the way out.
    """
    if not (path / MARK).is_file():
        what = "is not the directory of a run" if path.is_dir() else "is not there"
        raise ValueError(f"{path} {what}: name one that `keptset run` made, such as runs/reverse-text")
    lock = os.open(path / MARK, os.O_RDWR | os.O_CLOEXEC)
    deadline = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _sign(lock)
            return RunDirectory(path.resolve(), lock)
        except BlockingIOError:
            if _holder_lives(lock) or time.monotonic() > deadline:
                os.close(lock)
                raise ValueError(
                    f"a run is using {path} right now: it needs no resuming; stop it first if it is to be "
                    "started anew"
                ) from None
            time.sleep(0.05)


def _sign(lock: int) -> None:
    """Write down who holds the lock; its services hold it too, until the last has ended."""
    os.ftruncate(lock, 0)
    os.pwrite(lock, str(os.getpid()).encode(), 0)


def _holder_lives(lock: int) -> bool:
    text = os.pread(lock, 20, 0)
    try:
        os.kill(int(text), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        pass
    return True


def _take(path: Path) -> int | None:
    """The lock of a directory that holds nothing but our mark; None if it is in use or was used."""
    if not path.is_dir() or any(entry.name != MARK for entry in path.iterdir()):
        return None
    lock = os.open(path / MARK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:  # another run saw it empty too, and was quicker
        os.close(lock)
        return None
    if any(entry.name != MARK for entry in path.iterdir()):  # likewise, and it has ended since
        os.close(lock)
        return None
    return lock


def _delete(path: Path) -> None:
    if path.is_symlink() or not (path / MARK).is_file():
        raise FileExistsError(
            f"{path} was not made by a run, so --overwrite does not delete it: choose another --name"
        )
    lock = os.open(path / MARK, os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise FileExistsError(
            f"a run is using {path} right now: stop it first, or choose another --name"
        ) from None
    finally:
        os.close(lock)
    shutil.rmtree(path)
