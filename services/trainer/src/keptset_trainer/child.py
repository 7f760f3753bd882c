"""The training loop as child processes, one a rank: started, watched, told to stop."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from typing import Any

from .folders import Folders
from .resume import what_is_left

POLL_SECONDS = 0.1
LAST_LINES = 30
"""Log lines of the loop that are shown again when it dies."""


class TrainingLoop:
    """The child processes, one a rank. Start it from the main thread: they end with the thread that did.

    A rank that dies takes the others with it: they would wait for it.
    """

    def __init__(self, folders: Folders, lock_descriptor: int, ranks: int) -> None:
        self.folders = folders
        self.stopping = False
        self.ended: list[int] = []
        """Ranks in the order in which they ended."""
        folders.loop_state.unlink(missing_ok=True)  # of a loop that is no more
        folders.rendezvous.unlink(missing_ok=True)
        self.lines: deque[str] = deque(maxlen=LAST_LINES)
        self.processes = [self._start(rank, ranks, lock_descriptor) for rank in range(ranks)]
        self.forwarders = [
            threading.Thread(target=self._follow, args=(rank, process), name=f"loop-{rank}", daemon=True)
            for rank, process in enumerate(self.processes)
        ]
        for forwarder in self.forwarders:
            forwarder.start()

    def _start(self, rank: int, ranks: int, lock_descriptor: int) -> subprocess.Popen[str]:
        arguments = [
            str(self.folders.settings),
            str(os.getpid()),
            f"file://{self.folders.rendezvous.absolute()}",
        ]
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
        return subprocess.Popen(
            [sys.executable, "-m", "keptset_trainer.loop", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **place},
            text=True,
            errors="replace",
            pass_fds=[lock_descriptor],
            process_group=0,  # Ctrl-C and signals to the whole group go through `stop`, in order
        )

    def _follow(self, rank: int, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.lines.append(line.rstrip())
            sys.stderr.write(line)
            sys.stderr.flush()
        process.wait()
        self.ended.append(rank)

    def state(self) -> dict[str, Any] | None:
        """What the loop says it is doing: pid, vocab_size, training (a step or None); None while it loads."""
        try:
            state = json.loads(self.folders.loop_state.read_bytes())
        except FileNotFoundError:
            return None
        return state if state["pid"] == self.processes[0].pid else None

    def vocab_size(self) -> int | None:
        """Of its model, once that is there."""
        state = self.state()
        return None if state is None else state["vocab_size"]

    def absent(self) -> str | None:
        """Never: ranks of one's own are there, or have failed."""
        return None

    def wait(self) -> None:
        """Until all ranks have ended, or one has that should not: then the others are killed."""
        while running := [process for process in self.processes if process.poll() is None]:
            if len(running) < len(self.processes) and self.failure() is not None:
                for process in running:
                    process.kill()
            time.sleep(POLL_SECONDS)

    def failure(self) -> str | None:
        """Why the loop is no more, unless it was told to stop. The rank that died first is named."""
        if self.stopping or self.is_running():
            return None
        if not self.ended:  # its last words are still on their way
            self.forwarders[next(r for r, p in enumerate(self.processes) if p.poll() is not None)].join(1)
        return self._last_words(self.ended[0] if self.ended else 0)

    def _last_words(self, rank: int) -> str:
        last = next((line for line in reversed(self.lines) if line.strip()), "no log line")
        code = self.processes[rank].poll()
        return f"{self._which(rank)}the training loop ended with exit code {code}: {last}"

    def _which(self, rank: int) -> str:
        return f"rank {rank} of {len(self.processes)} of " if len(self.processes) > 1 else ""

    def is_running(self) -> bool:
        """Whether no rank has ended."""
        return all(process.poll() is None for process in self.processes)

    def stop(self, patience: float) -> str | None:
        """SIGTERM, and SIGKILL after `patience` seconds: its files are whole or absent either way.

        What went wrong: a rank had to be killed, or failed meanwhile, as one does whose last checkpoint the
        disk refuses. One that SIGTERM ended had not loaded its model yet, and nothing to save.
        """
        self.stopping = True
        deadline = time.monotonic() + patience
        running = [process for process in self.processes if process.poll() is None]
        if running:
            print(
                f"trainer: told to stop; the training loop has {patience:g} s (trainer.shutdown_timeout) to "
                "leave its step and write a last checkpoint",
                file=sys.stderr,
                flush=True,
            )
        for process in running:
            process.terminate()
        late = None
        for rank, process in enumerate(self.processes):
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                late = rank if late is None else late
                process.kill()
                process.wait()
        for forwarder in self.forwarders:
            forwarder.join(timeout=1)
        if late is not None:
            return (
                f"{self._which(late)}the training loop did not end within {patience:g} s of being told to, "
                f"and was killed; {what_is_left(self.folders)}. If it only needs more time, raise "
                "trainer.shutdown_timeout"
            )
        in_order = (*self.ended, *range(len(self.processes)))
        failed = (rank for rank in in_order if self.processes[rank].poll() not in (0, -signal.SIGTERM))
        first = next(failed, None)
        return None if first is None else f"told to stop, {self._last_words(first)}"


def visible_gpus() -> int:
    """Asked of a process of its own: this one never imports torch. At least 1.

    Raises:
        ValueError: torch does not say.
    """
    asked = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=300, check=False)
    if not done.stdout.strip().isdecimal():
        raise ValueError(f'trainer.ranks: "auto" asks torch how many GPUs there are:\n{done.stderr}')
    return max(1, int(done.stdout))
