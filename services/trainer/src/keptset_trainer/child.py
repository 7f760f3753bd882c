"""The training loop as a child process: started, watched, told to stop."""

import json
import os
import subprocess
import sys
import threading
from collections import deque
from typing import Any

from .folders import Folders

LAST_LINES = 30
"""Log lines of the loop that are shown again when it dies."""


class TrainingLoop:
    """The child process. Start it from the main thread: the child ends with the thread that made it."""

    def __init__(self, folders: Folders, lock_descriptor: int) -> None:
        self.folders = folders
        self.stopping = False
        folders.loop_state.unlink(missing_ok=True)  # of a loop that is no more
        self.process = subprocess.Popen(
            [sys.executable, "-m", "keptset_trainer.loop", str(folders.settings), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ},  # see the README: threads that spin
            text=True,
            errors="replace",
            pass_fds=[lock_descriptor],
            process_group=0,  # Ctrl-C and signals to the whole group go through `stop`, in order
        )
        self.lines: deque[str] = deque(maxlen=LAST_LINES)
        self.forwarder = threading.Thread(target=self._forward, name="loop-log", daemon=True)
        self.forwarder.start()

    def _forward(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            sys.stderr.write(line)
            sys.stderr.flush()

    def state(self) -> dict[str, Any] | None:
        """What the loop says it is doing: pid, vocab_size, training (a step or None); None while it loads."""
        try:
            state = json.loads(self.folders.loop_state.read_bytes())
        except FileNotFoundError:
            return None
        return state if state["pid"] == self.process.pid else None

    def failure(self) -> str | None:
        """Why the loop is no more, unless it was told to stop."""
        code = self.process.poll()
        if code is None or self.stopping:
            return None
        self.forwarder.join(timeout=1)
        last = next((line for line in reversed(self.lines) if line.strip()), "no log line")
        return f"the training loop ended with exit code {code}: {last}"

    def stop(self, patience: float) -> None:
        """SIGTERM, and SIGKILL after `patience` seconds: its files are whole or absent either way."""
        self.stopping = True
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(patience)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.forwarder.join(timeout=1)
