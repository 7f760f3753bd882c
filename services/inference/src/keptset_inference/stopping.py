"""Between being asked to stop and stopping: nothing new is taken on, and what was taken on ends whole.

vLLM's launcher tells the engine at once and goes on accepting requests, which the engine then aborts. Here
the engine is told once nobody waits for it any more.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from vllm.logger import init_logger
from vllm.v1.engine.exceptions import EngineDeadError

from keptset_guards.asgi import path_of

from .state import ServerState, stopping

logger = init_logger("vllm.keptset")

TURN_PATHS = ("/keptset/v1/sleep", "/keptset/v1/wake")
"""Not waited for: they may wait for others themselves, for longer than a server has to stop."""
POLL_SECONDS = 0.05
CUT_SECONDS = 3.0
"""To answer what did not end in time."""
LAST_SECONDS = 5.0
"""At least so long the engine has to end, and after it clients to read what they were answered."""
SERVICE_RESTART = 1012
"""Of a WebSocket that is closed (RFC 6455, IANA's registry)."""


class Engine(Protocol):
    """What stopping needs of vLLM's engine client."""

    output_handler: asyncio.Task[None] | None
    """Hands on what the engine puts out; None: it would start with the next request."""
    output_processor: Any

    async def pause_generation(self, *, mode: Any, clear_cache: bool) -> None: ...

    def shutdown(self, timeout: float | None = None) -> None: ...


class Server(Protocol):
    """What stopping needs of uvicorn's server."""

    config: Any


class StoppingGuard:
    """Lets nothing new through once the server is asked to stop, and knows what it let through before."""

    def __init__(self, app: ASGIApp, state: ServerState, always: Collection[str]) -> None:
        """Look at `state.stopping` on every request; keep `state.unanswered` and `state.answering`. The paths
        `always` pass, and are not waited for.
        """
        self.app, self.state, self.always = app, state, frozenset(always)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        path = "" if scope["type"] == "lifespan" else path_of(scope).rstrip("/")
        if scope["type"] == "lifespan" or path in self.always:
            await self.app(scope, receive, send)
        elif not self.state.stopping:
            await self._watched(path, scope, receive, send)
        elif scope["type"] == "websocket":
            await send(
                {"type": "websocket.close", "code": SERVICE_RESTART, "reason": "the server is stopping"}
            )
        else:
            await stopping().response()(scope, receive, send)

    async def _watched(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        state, task = self.state, asyncio.current_task()
        assert task is not None
        state.unanswered[task] = path

        async def sent(message: Message) -> None:
            if state.unanswered.pop(task, None) is not None:
                state.answering.add(task)
            await send(message)

        try:
            await self.app(scope, receive, sent)
        except asyncio.CancelledError:
            if not state.stopping or task not in state.unanswered or scope["type"] != "http":
                raise
            task.uncancel()
            await stopping().response()(scope, receive, sent)
        finally:
            state.unanswered.pop(task, None)
            state.answering.discard(task)


@contextmanager
def requests_end_first(engine: Engine, state: ServerState, server: Callable[[], Server]) -> Iterator[None]:
    """Within, whoever tells the engine to shut down waits until requests have ended.

    Args:
        engine: Its `shutdown(timeout)` is called in a thread by vLLM's launcher, at the signal.
        state: Of the server.
        server: The launcher's, which is there by then.
    """
    loop = asyncio.get_running_loop()

    def shutdown(timeout: float | None = None) -> None:
        seconds = timeout or 0.0
        deadline = time.monotonic() + seconds
        asyncio.run_coroutine_threadsafe(end_requests(engine, state, seconds), loop).result()
        asyncio.run_coroutine_threadsafe(_expect_nothing(engine), loop).result()
        # To the application an answer has ended when uvicorn has it: a large one is still on its way to a
        # slow client, and is cut off by the end of uvicorn's patience.
        # The engine goes before that, by the same deadline.
        type(engine).shutdown(engine, timeout=max(LAST_SECONDS, deadline - time.monotonic()))
        loop.call_soon_threadsafe(engine.output_processor.propagate_error, EngineDeadError())
        server().config.timeout_graceful_shutdown = max(LAST_SECONDS, deadline - time.monotonic())

    vars(engine)["shutdown"] = shutdown
    try:
        yield
    finally:
        vars(engine).pop("shutdown", None)


async def end_requests(engine: Engine, state: ServerState, seconds: float) -> None:
    """Take nothing on, and return when what was taken on has ended, or `seconds` and CUT_SECONDS later: what
    has no answer yet is answered 503, and streams end with an error.
    """
    state.stopping = True
    for task in [task for task, path in state.unanswered.items() if path in TURN_PATHS]:
        task.cancel()
    logger.info("asked to stop: %d requests have %g s to end", _in_work(state), seconds)
    deadline = time.monotonic() + seconds
    while _in_work(state) and time.monotonic() < deadline:
        await asyncio.sleep(POLL_SECONDS)
    if not _in_work(state):
        return
    logger.warning(
        "%d requests did not end within %g s (inference.vllm.shutdown_timeout); they are cut off",
        _in_work(state),
        seconds,
    )
    for task in list(state.unanswered):
        task.cancel()
    try:
        async with asyncio.timeout(CUT_SECONDS):
            await engine.pause_generation(mode="abort", clear_cache=False)
            while _in_work(state):
                await asyncio.sleep(POLL_SECONDS)
    except Exception as error:
        logger.error("%d requests could not be ended: %r", _in_work(state), error)


async def _expect_nothing(engine: Engine) -> None:
    """Called before the engine is told to end, so that its end is none that anybody reports.

    vLLM itself first closes what its handler listens to, which the handler takes for the engine's death, and
    then cancels it: whichever comes first to the loop. An engine that died before has been reported by then.
    """
    # Not left there as one that has ended: to vLLM's watchdog that is a dead engine, and it would end the
    # server while the engine still ends.
    handler, engine.output_handler = engine.output_handler, None
    if handler is not None:
        handler.cancel()
        await asyncio.wait([handler], timeout=CUT_SECONDS)


def _in_work(state: ServerState) -> int:
    return len(state.unanswered) + len(state.answering)


__all__ = ["StoppingGuard", "end_requests", "requests_end_first"]
