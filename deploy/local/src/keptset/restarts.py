"""Starting services that died again, within bounds, and a record of it: restarts.jsonl of the run."""

import json
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from keptset.display import Display
from keptset.supervisor import ProcessDied, Supervisor, describe_exit

WRONG_SETTINGS = 2
"""Exit code of a service that cannot use its settings or directories: starting it again would not help."""


class Restarts:
    """What a run does about processes that die.

    Args:
        most: How often each service may be started again without a step being finished in between.
        path: Of restarts.jsonl.
        display: Is told.
    """

    def __init__(self, most: int, path: Path, display: Display) -> None:
        self._most = most
        self._path = path
        self._display = display
        self._in_vain: Counter[str] = Counter()

    def check(self, supervisor: Supervisor) -> None:
        """Start whatever died again.

        Raises:
            ProcessDied: of the first that may not be started again.
        """
        while True:
            try:
                supervisor.check()
                return
            except ProcessDied as death:
                if self._in_vain[death.name] >= self._most or death.code == WRONG_SETTINGS:
                    if self._in_vain[death.name]:
                        death.add_note(f"it was started again {self._in_vain[death.name]} times in vain")
                    raise
                self._in_vain[death.name] += 1
                supervisor.restart(death.process)
                self._record(death)

    def finished_a_step(self) -> None:
        """The run goes forward: what died before is forgiven."""
        self._in_vain.clear()

    def _record(self, death: ProcessDied) -> None:
        how = describe_exit(death.code)
        entry = {"service": death.name, "ended": how, "at": datetime.now(UTC).isoformat(timespec="seconds")}
        with self._path.open("a") as file:
            file.write(json.dumps(entry) + "\n")
        times = f"{self._in_vain[death.name]} of {self._most}"
        self._display.line(death.name, f"died ({how}); started again ({times} until the next step)")


def count(path: Path) -> dict[str, int]:
    """How often each service of a run was started again, all in all."""
    if not path.exists():
        return {}
    entries: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines() if line]
    return dict(Counter(entry["service"] for entry in entries))
