"""The training loop as child processes, one a rank: started, watched, told to stop."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import suppress
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
            say(line)
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

        A rank that ends without having done all takes the others with it, as in `wait`: they would wait for
        it, and not only until `patience` is over if they are on GPUs.

        What went wrong: a rank had to be killed, or failed meanwhile, as one does whose last checkpoint the
        disk refuses. If SIGTERM ended one, it had not loaded its model yet, and nobody has anything to save.
        """
        self.stopping = True
        deadline = time.monotonic() + patience
        failed = self._failed()
        if running := self._running():
            for rank in running:
                self.processes[rank].terminate()
            say(
                f"trainer: told to stop; the training loop has {patience:g} s (trainer.shutdown_timeout) to "
                "leave its step and write a last checkpoint\n"
            )
        late = None
        while (running := self._running()) and not self._broke_off():
            if time.monotonic() >= deadline:
                late = running[0]
                break
            time.sleep(POLL_SECONDS)
        if running and late is None:  # which of them end by themselves says why the first one did
            time.sleep(POLL_SECONDS)
        if -signal.SIGTERM not in self._codes():
            failed = failed or self._failed()
        for process in self.processes:
            process.kill()
            process.wait()
        last_words_until = time.monotonic() + 1
        for forwarder in self.forwarders:
            forwarder.join(max(0.0, last_words_until - time.monotonic()))
        if late is not None:
            return (
                f"{self._which(late)}the training loop did not end within {patience:g} s of being told to, "
                f"and was killed; {what_is_left(self.folders)}. If it only needs more time, raise "
                "trainer.shutdown_timeout"
            )
        return f"told to stop, {self._last_words(failed[0])}" if failed else None

    def _codes(self) -> list[int | None]:
        """Of all ranks; None of one that runs."""
        return [process.poll() for process in self.processes]

    def _running(self) -> list[int]:
        return [rank for rank, code in enumerate(self._codes()) if code is None]

    def _broke_off(self) -> bool:
        """Whether a rank has ended that had not done all."""
        return any(code not in (None, 0) for code in self._codes())

    def _failed(self) -> list[int]:
        """Ranks that ended by themselves and not as they should, in the order in which they did."""
        codes = self._codes()
        in_order = dict.fromkeys([*self.ended, *range(len(codes))])
        return [rank for rank in in_order if codes[rank] not in (None, 0, -signal.SIGTERM)]


def say(text: str) -> None:
    """To whoever reads stderr. If nobody does any more, as after Ctrl-C in a pipeline, it is not said."""
    with suppress(OSError):
        sys.stderr.write(text)
        sys.stderr.flush()


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
