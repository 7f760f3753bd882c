"""metrics.jsonl: a row a step, written by the orchestrator."""

import json
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class MetricsTail:
    """Reads the rows of a growing file, each once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0

    def new_rows(self) -> list[Row]:
        """The complete rows that came since the last call; a half-written line waits for its end."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            if file.seek(0, 2) < self._offset:  # rows of steps that are done again have left
                self._offset = 0
            file.seek(self._offset)
            data = file.read()
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        return [json.loads(line) for line in complete.splitlines() if line.strip()]
