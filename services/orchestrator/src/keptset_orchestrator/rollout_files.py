"""The rollouts of each step as lines of JSON, on disk before the batch leaves."""

from collections.abc import Iterable
from pathlib import Path

from .durable import sync_directory, write_durably


class RolloutFiles:
    """step-N-HASH.jsonl, a file for each batch that was tried: a step may have been sampled twice.

    Args:
        directory: Of these files. Created if it is not there.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def write(self, step: int, content_hash: str, lines: bytes) -> None:
        """After the return they survive a crash."""
        write_durably(self.directory / f"step-{step:06d}-{content_hash}.jsonl", lines)

    def keep_only(self, step: int, content_hash: str) -> None:
        """The trainer has accepted this batch: forget the step's others."""
        every = self.directory.glob(f"step-{step:06d}-*.jsonl")
        self._remove(path for path in every if not path.stem.endswith(f"-{content_hash}"))

    def _remove(self, paths: Iterable[Path]) -> None:
        removed = False
        for path in list(paths):
            path.unlink(missing_ok=True)
            removed = True
        if removed:
            sync_directory(self.directory)
