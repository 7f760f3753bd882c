"""Ctrl-C in a terminal reaches every process of the server, and only the server may heed it.

An engine that heeds it refuses what the server still takes on, and ends beside it; a worker that does fails
the requests in work, and while it starts the engine that waits for it. vLLM gives all of them handlers of
their own, so that ignoring the signal would not last: it is blocked, which handlers do not change, and
processes inherit from whoever starts them.

Needs the standard library only.
"""

import signal
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess

_start = BaseProcess.start


def keep_interrupts() -> None:
    """From here on SIGINT is blocked in what `multiprocessing` starts, and in what that starts."""
    BaseProcess.start = _start_blocked  # type: ignore[method-assign]


def _start_blocked(process: BaseProcess) -> None:
    # Otherwise started by the first of them, which unblocks the signal.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        _start(process)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


__all__ = ["keep_interrupts"]
