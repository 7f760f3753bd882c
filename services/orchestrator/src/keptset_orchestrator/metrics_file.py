"""metrics.jsonl: one row a step, in order, each step once, whatever was killed when."""

import json
import logging
import math
import os
from pathlib import Path
from typing import Any

from .durable import sync_directory, write_durably, writing

Row = dict[str, Any]

log = logging.getLogger(__name__)


class MetricsFile:
    """The rows of a run.

    Opening repairs what a crash left: a torn last line goes, and of a step that was written twice the earlier
    row. Rows of steps that the run will do again (`next_step` and later) move to metrics.dropped.jsonl.

    Args:
        path: Created if it is not there.
        next_step: The first step whose row is still to come.

    Raises:
        ValueError: a line before the last is no row; the text names file and line.
    """

    def __init__(self, path: Path, next_step: int) -> None:
        self.path = path
        data = path.read_bytes() if path.exists() else b""
        rows = _read_rows(data, path)
        kept = {step: row for step, row in sorted(rows.items()) if step < next_step}
        if dropped := sorted(rows.keys() - kept.keys()):
            aside = path.with_suffix(".dropped.jsonl")
            log.warning("%s: steps %s are done again, their rows are now in %s", path, dropped, aside)
            with open(aside, "ab") as file:
                file.writelines(_line(rows[step]) for step in dropped)
                os.fsync(file.fileno())
        repaired = b"".join(map(_line, kept.values()))
        if repaired != data or not path.exists():
            write_durably(path, repaired)
        self._rows = kept

    @property
    def steps(self) -> set[int]:
        """Steps that have a row."""
        return set(self._rows)

    def append(self, row: Row) -> None:
        """Write a row; after the return it survives a crash.

        Raises:
            ValueError: the step has a row, or a later one has.
            DiskError: the disk did not take it; what it took of it goes at the next start.
        """
        step = row["step"]
        if self._rows and step <= max(self._rows):
            raise ValueError(f"{self.path}: step {step} comes after the row of step {max(self._rows)}")
        with writing(self.path):
            with open(self.path, "ab") as file:
                file.write(_line(row))
                file.flush()
                os.fsync(file.fileno())
            if not self._rows:
                sync_directory(self.path.parent)
        self._rows[step] = row


def _line(row: Row) -> bytes:
    # JSON has no NaN: a mean over nothing is null
    plain = {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in row.items()}
    return json.dumps(plain, allow_nan=False).encode() + b"\n"


def _read_rows(data: bytes, path: Path) -> dict[int, Row]:
    rows: dict[int, Row] = {}
    lines = data.split(b"\n")
    torn = lines.pop()  # what follows the last line break: nothing, or a line that was not finished
    if torn:
        log.warning("%s: the last line is torn and is dropped: %r", path, torn[:80])
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            rows[int(row["step"])] = row
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path}: line {number} is no row of metrics ({error}); repair it or move the file away"
            ) from error
    return rows
