"""Files and directories that either are there completely or not at all, also after a power cut."""

import errno
import json
import mmap
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


def in_words(failure: OSError) -> str:
    """Why the disk refused."""
    if failure.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "the disk is full"
    return os.strerror(failure.errno) if failure.errno else str(failure)


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


def mapped(path: Path) -> memoryview:
    """The bytes of a file that nobody changes, without a copy of them."""
    with path.open("rb") as file:
        empty = os.fstat(file.fileno()).st_size == 0
        return memoryview(b"" if empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


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
