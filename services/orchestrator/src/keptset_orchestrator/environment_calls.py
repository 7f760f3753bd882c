"""Calls into environments: somebody else's code, which may raise, hang, or never come back."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

from .errors import EnvironmentFaultError

T = TypeVar("T")


async def call_environment(function: Callable[..., T], *arguments: object, seconds: float, what: str) -> T:
    """`function(*arguments)` in a thread of its own.

    A daemon, unlike those of `asyncio.to_thread`: one that hangs keeps neither the run nor the process.

    Args:
        function: Of the environment.
        *arguments: For it.
        seconds: How long it may take.
        what: Source, rollout and function, for errors.

    Raises:
        EnvironmentFaultError: It raised, or took too long.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():  # nobody waits any more
            return
        if error is None:
            future.set_result(result)  # type: ignore[arg-type]
        else:
            future.set_exception(error)

    def work() -> None:
        result, error = None, None
        try:
            result = function(*arguments)
        except BaseException as raised:
            # A future does not take StopIteration, and SystemExit is no reason to leave either.
            error = EnvironmentFaultError(f"{what} raised {type(raised).__name__}: {raised}")
            error.__cause__ = raised
        with contextlib.suppress(RuntimeError):  # the run has ended meanwhile
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=work, name=what, daemon=True).start()
    try:
        return await asyncio.wait_for(future, seconds)
    except TimeoutError:
        raise EnvironmentFaultError(
            f"{what}: waited {seconds:g} s (orchestrator.environment_timeout); raise that, or bound what the "
            "environment does"
        ) from None
