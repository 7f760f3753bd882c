"""What the row of a step says of its rollouts, and the rollouts themselves, on disk before the batch leaves.

The trainer keeps an accepted batch, so a run that was killed after handing one in does not sample that step
again; the reward statistics for its row are here.
"""

import logging
from collections.abc import Iterable
from pathlib import Path

import msgspec

from .durable import sync_directory, write_durably

log = logging.getLogger(__name__)


class RolloutRecord(msgspec.Struct):
    """The rollouts of one step.

    Attributes:
        step: The step.
        content_hash: Hex, of the batch that was made of them.
        metrics: Their part of the row.
    """

    step: int
    content_hash: str
    metrics: dict[str, float]


class RolloutRecords:
    """Records in `directory`, a file for each batch that was tried: a step may have been sampled twice.

    Beside step-N-HASH.json, which goes when the row is written, lies step-N-HASH.jsonl with a line a rollout,
    which stays.

    Args:
        directory: Created if it is not there.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def write(self, record: RolloutRecord, lines: bytes = b"") -> None:
        """After the return the record survives a crash, and so do the lines of its rollouts."""
        path = self.directory / f"step-{record.step:06d}-{record.content_hash}.json"
        write_durably(path.with_suffix(".jsonl"), lines)
        write_durably(path, msgspec.json.encode(record))

    def find(self, step: int, content_hash: str | None = None) -> RolloutRecord | None:
        """The record of a step's batch, or None.

        Args:
            step: The step.
            content_hash: Of the batch; if it is not known, the last one that was tried.

        Raises:
            ValueError: the file cannot be read.
        """
        paths = self._paths(step)
        if content_hash is not None:
            paths = [path for path in paths if path.stem.endswith(f"-{content_hash}")]
        elif len(paths) > 1:
            log.warning(
                "step %d was sampled %d times; its row takes the last one's rewards", step, len(paths)
            )
        if not paths:
            return None
        path = max(paths, key=lambda path: path.stat().st_mtime_ns)
        try:
            return msgspec.json.decode(path.read_bytes(), type=RolloutRecord)
        except msgspec.MsgspecError as error:
            raise ValueError(f"{path}: no record of rollouts ({error}); remove it") from error

    def keep_only(self, step: int, content_hash: str) -> None:
        """The trainer has accepted this batch: forget the step's others."""
        every = self.directory.glob(f"step-{step:06d}-*.json*")
        self._remove(path for path in every if not path.stem.endswith(f"-{content_hash}"))

    def forget_through(self, step: int) -> None:
        """The rows of these steps are written: their records have served."""
        self._remove(p for p in self.directory.glob("step-*.json") if int(p.stem.split("-")[1]) <= step)

    def _paths(self, step: int) -> list[Path]:
        return list(self.directory.glob(f"step-{step:06d}-*.json"))

    def _remove(self, paths: Iterable[Path]) -> None:
        for path in list(paths):
            path.unlink(missing_ok=True)
        sync_directory(self.directory)
