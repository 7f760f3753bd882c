"""A training loop whose ranks somebody else starts, on whichever nodes, watched through files."""

import json
import sys
import threading
import time
from collections import deque
from typing import Any

from . import heartbeat
from .child import LAST_LINES
from .folders import Folders

POLL_SECONDS = 0.2
WAY_OUT = "what is handed in waits for them: start them with torchrun; their own log says what ended them"


class ExternalLoop:
    """The training loop as ingest sees it; it has nothing to start and nothing to stop.

    Ranks that are away are no failure: they may come back, and find what waits in the spool. They are away if
    none has ever come, if their heartbeat says that they have ended, or if it does not change for `patience`
    seconds of this process's clock.
    """

    def __init__(self, folders: Folders, patience: float) -> None:
        self.folders, self.patience = folders, patience
        self.stopping = False
        self.lines: deque[str] = deque(maxlen=LAST_LINES)
        self.told = threading.Event()
        self.looking = threading.Lock()
        self.sign = heartbeat.Sign(folders)
        self.changed_at: float | None = None
        """None: not since this process began."""
        self.began = time.monotonic()
        self.vocabulary: int | None = None
        self.was_absent: bool | None = None
        self.state()  # a loop of before says how large the vocabulary is

    def state(self) -> dict[str, Any] | None:
        """What the living loop says it is doing; None while it loads, or if there is none."""
        try:
            state: dict[str, Any] = json.loads(self.folders.loop_state.read_bytes())
        except (OSError, ValueError):  # not there, or two loops have written over each other
            return None
        self.vocabulary = state["vocab_size"]
        return state if self.absent() is None else None

    def vocab_size(self) -> int | None:
        """Of the model, as the last loop said; None if none ever had it loaded."""
        self.state()
        return self.vocabulary

    def absent(self) -> str | None:
        """Why nobody trains right now; None if ranks are there, which may still load their model."""
        self._look()
        last, now = self.sign.last, time.monotonic()
        if last is None:
            return f"no external ranks have come yet ({now - self.began:.0f} s after the start); {WAY_OUT}"
        if last.ended is not None:
            words = last.ended  # /health is for everybody, and names no paths
            for name in ("output", "weights"):
                words = words.replace(str(getattr(self.folders, name).absolute()), f"{name}_dir")
            return f"the external ranks ({last.who}) have ended: {words}; {WAY_OUT}"
        still = now - (self.began if self.changed_at is None else self.changed_at)
        if still >= self.patience:
            return f"no sign of life from external ranks for {still:.0f} s (the last: {last.who}); {WAY_OUT}"
        return f"looking whether the external ranks ({last.who}) live" if self.changed_at is None else None

    def failure(self) -> str | None:
        """None: ranks may always come back."""
        return None

    def is_running(self) -> bool:
        """Whether it was not told to stop."""
        return not self.told.is_set()

    def wait(self) -> None:
        """Look at the heartbeat until told to stop, and say when ranks come and go."""
        while not self.told.wait(POLL_SECONDS):
            absent = self.absent()
            if self.was_absent != (absent is not None):
                self.was_absent = absent is not None
                there = f"external ranks are there ({self.sign.last.who})" if self.sign.last else ""
                print(f"trainer: {absent or there}", file=sys.stderr, flush=True)

    def stop(self, patience: float) -> None:
        """The ranks stay: they train what the spool holds, and then wait for the next ingest process. Whoever
        tells them to stop is torchrun, which waits as long as its own environment says (`torchrun`).
        """
        self.stopping = True
        self.told.set()

    def _look(self) -> None:
        with self.looking:  # asked by requests and by the thread that waits
            if self.sign.changed():
                self.changed_at = time.monotonic()
