"""The training loop as ingest sees it, whoever starts its ranks."""

from collections import deque
from typing import Any, Protocol


class WatchedLoop(Protocol):
    """`child.TrainingLoop`: its ranks are ingest's own; `external.ExternalLoop`: somebody else's."""

    stopping: bool
    """It was told to stop, or is about to be."""
    lines: deque[str]
    """Its last words, if they are known."""

    def state(self) -> dict[str, Any] | None:
        """What it says it is doing: pid, vocab_size, training (a step or None); None while it loads."""

    def vocab_size(self) -> int | None:
        """Of its model; None before that is known."""

    def absent(self) -> str | None:
        """Why nobody trains for now, though that is no failure; None if somebody does, or is about to."""

    def failure(self) -> str | None:
        """Why it is no more, unless it was told to stop."""

    def is_running(self) -> bool:
        """Whether it is there to be told to stop."""

    def wait(self) -> None:
        """Until it has ended."""

    def stop(self, patience: float) -> str | None:
        """Have it end, within `patience` seconds; what went wrong with that, None if nothing did."""
