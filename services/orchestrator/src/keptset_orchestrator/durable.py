"""Files that survive a crash: written beside their place, flushed to the disk, renamed into place."""

import os
from pathlib import Path


def write_durably(path: Path, data: bytes) -> None:
    """Readers see the old content or the new, never half of it; after the return it survives a power cut."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.new")
    with open(beside, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Make the directory's entries (created, renamed, removed files) survive a power cut."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
