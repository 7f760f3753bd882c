"""Files and directories that either are there completely or not at all, also after a power cut."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

TEMPORARY = ".tmp-"
"""Prefix of everything unfinished; whatever carries it at start-up belongs to a process that died."""


def fsync_path(path: Path) -> None:
    """Force a file or a directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(path: Path, data: bytes) -> None:
    """Write `path` so that a reader sees all of `data` or what was there before."""
    temporary = path.with_name(f"{TEMPORARY}{path.name}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_path(path.parent)


def write_json(path: Path, value: Any) -> None:
    """`write_file` of strict JSON: a NaN is an error."""
    write_file(path, json.dumps(value, indent=1, allow_nan=False).encode() + b"\n")


def new_directory(path: Path) -> Path:
    """An empty temporary sibling of `path`, to be filled and then given to `finish_directory`."""
    temporary = path.with_name(f"{TEMPORARY}{path.name}")
    if temporary.exists():
        shutil.rmtree(temporary)
    temporary.mkdir(parents=True)
    return temporary


def finish_directory(temporary: Path, path: Path) -> None:
    """Force a filled temporary directory to the disk and rename it into place."""
    for entry in sorted(temporary.rglob("*")):
        fsync_path(entry)
    fsync_path(temporary)
    temporary.rename(path)
    fsync_path(path.parent)


def remove_directory(path: Path) -> None:
    """Remove a directory so that no half of it ever carries its name."""
    doomed = path.with_name(f"{TEMPORARY}old-{path.name}")
    if doomed.exists():
        shutil.rmtree(doomed)
    path.rename(doomed)
    shutil.rmtree(doomed)


def sweep(directory: Path) -> None:
    """Remove what a process that died left unfinished in `directory`."""
    for entry in directory.glob(f"{TEMPORARY}*"):
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()
