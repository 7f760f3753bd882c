"""Files that survive a crash: written beside their place, flushed to the disk, renamed into place."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import DiskError


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Name the file of an error: what writes and syncs does not.

    Raises:
        DiskError: the disk did not take it.
    """
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        why = "the disk is full; free some space" if full else f"{error.strerror or error}; look at the disk"
        raise DiskError(f"{path}: {why} and start again: what was acknowledged is there") from error


def write_durably(path: Path, data: bytes) -> None:
    """Readers see the old content or the new, never half of it; after the return it survives a power cut.

    Raises:
        DiskError: the disk did not take it; the old content is there.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.new")
    with writing(path):
        try:
            with open(beside, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)
        except OSError:
            beside.unlink(missing_ok=True)
            raise
        sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Make the directory's entries (created, renamed, removed files) survive a power cut."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
