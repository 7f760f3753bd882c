"""What the run is doing, for whoever asks: the loop writes, the routes read."""

from dataclasses import dataclass, field
from typing import Any, Literal

State = Literal["starting", "rollout", "train", "weights", "eval", "done", "failed"]


@dataclass
class Progress:
    """The state of a run.

    Attributes:
        steps: Of the whole run.
        step: That is being done; 0 before the first.
        state: What is being done for it.
        weight_version: That the inference servers carry; None before they were asked.
        row: The last row of metrics.
        requests: Rollout requests so far.
        failed_requests: Those of them that failed and were sent again.
        error: Why the run failed.
    """

    steps: int
    step: int = 0
    state: State = "starting"
    weight_version: int | None = None
    row: dict[str, Any] = field(default_factory=dict)
    requests: int = 0
    failed_requests: int = 0
    error: str | None = None
