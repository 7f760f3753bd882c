"""How a server calls its workers off while they wait inside NCCL, where no request reaches them.

The server listens on a socket of this machine and takes nobody in; a worker connects to it. Once the server
closes it, or is no more, the worker's end reads the end of file. No file is written.
"""

import os
import select
import socket
import threading
import time
import uuid
from collections.abc import Callable
from types import TracebackType

MOST_WORKERS = 4096


class Lease:
    """The server's end."""

    def __init__(self) -> None:
        self.name = f"keptset-{uuid.uuid4().hex}"
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(f"\0{self.name}")
        self._socket.listen(MOST_WORKERS)

    def end(self) -> None:
        """Call off whoever still works; again changes nothing."""
        self._socket.close()


class CalledOff(RuntimeError):
    """The work was not finished, or what it left behind is none."""


class Watched:
    """Around what may wait for ever: called off at the end of a lease or when it takes too long.

    Args:
        lease: name of the server's. One that cannot be found (the server is on another machine) has no end.
        seconds: for all of it.
        waiting_for: names whom, in errors.
        call_off: makes the waiting thread return; called on another one.
        grace: seconds that the work has to return afterwards. One that does not is stuck for good, and takes
            the process with it: whoever watches over it starts it again.
    """

    def __init__(
        self, lease: str, seconds: float, waiting_for: str, call_off: Callable[[], None], grace: float
    ) -> None:
        self.seconds, self.waiting_for, self.call_off, self.grace = seconds, waiting_for, call_off, grace
        self.why: str | None = None
        self._over, self._tell_over = os.pipe()
        self._lease = socket.socket(socket.AF_UNIX)
        try:
            self._lease.connect(f"\0{lease}")
        except OSError:
            self._lease.close()
        self._thread = threading.Thread(target=self._watch, name="watch-weights", daemon=True)

    def __enter__(self) -> "Watched":
        """Begin to watch."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Raises CalledOff if it was, whatever the work says: what it has done since is worth nothing."""
        os.close(self._tell_over)
        self._thread.join()
        os.close(self._over)
        self._lease.close()
        if self.why is not None:
            raise CalledOff(self.why) from error

    def _watch(self) -> None:
        began = time.monotonic()
        ends = [self._over] + ([] if self._lease.fileno() < 0 else [self._lease.fileno()])
        ended = _first_of(ends, self.seconds)
        if self._over in ended:
            return
        took = time.monotonic() - began
        reason = "it was called off" if ended else f"that was all of {self.seconds:g} s"
        self.why = f"gave up after {took:.1f} s of waiting for {self.waiting_for}: {reason}"
        self.call_off()
        if not _first_of([self._over], self.grace):
            print(f"{self.why}; nothing ends that but this process", flush=True)
            os._exit(70)


def _first_of(ends: list[int], seconds: float) -> set[int]:
    """Which of these descriptors have come to their end first; none within `seconds`.

    Not `select.select`, which refuses descriptors from 1024 on; a worker of many GPUs has more.
    """
    poll = select.poll()
    for end in ends:
        poll.register(end, select.POLLIN)
    return {end for end, _ in poll.poll(seconds * 1000)}


__all__ = ["CalledOff", "Lease", "Watched"]
