"""A run of the orchestrator inside the test's own event loop."""

import json
from dataclasses import dataclass, field
from typing import Any

from keptset_orchestrator.progress import Progress
from keptset_orchestrator.run import run
from keptset_settings import OrchestratorSettings


@dataclass
class Drive:
    """Settings that a test may change, and the run that they make."""

    settings: OrchestratorSettings
    progress: Progress = field(default_factory=lambda: Progress(steps=3))

    async def __call__(self) -> list[dict[str, Any]]:
        """Run to the end; returns the rows."""
        await run(self.settings, self.progress)
        return self.rows()

    def rows(self) -> list[dict[str, Any]]:
        """What metrics.jsonl holds."""
        assert self.settings.output_dir is not None
        path = self.settings.output_dir / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]
