"""Putting the engine to sleep and waking it, one at a time, and what a failure leaves behind."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from vllm.logger import init_logger

from keptset_guards import GpuTurn

from ..broken import break_server
from ..errors import RequestError
from ..state import ServerState
from ..weights.update import WeightUpdates
from .waking import POLL_SECONDS, Waking

logger = init_logger("vllm.keptset.sleep")

LEVEL = 1
"""Of vLLM's sleep: the weights wait in the host's memory. At level 2 they would be dropped, which saves those
bytes beside the trainer's many more; but whatever a layer holds that is neither parameter nor buffer would
come back as noise, and a server whose next version never comes could not go on."""


class Engine(Protocol):
    """What sleeping needs of vLLM's engine client."""

    async def pause_generation(self, *, mode: Any, clear_cache: bool) -> None: ...

    async def sleep(self, level: int = 1, mode: Any = "abort") -> None: ...

    async def wake_up(self, tags: list[str] | None = None) -> bool: ...


@dataclass(frozen=True)
class Slept:
    """What falling asleep took."""

    seconds: float
    """All of it, waiting for running requests included. 0: it was asleep."""


@dataclass(frozen=True)
class Woken:
    """What waking took."""

    version: int | None
    """That runs; None: the weights that the engine was started with."""
    seconds: float
    """All of it, checking the files included. 0: it was awake with that version."""
    pause_seconds: float
    """How long the load kept the engine from sampling."""
    wake_seconds: float
    """Of it, bringing the memory back."""


T = TypeVar("T")


class Sleeper:
    """One server's turns on its GPU."""

    def __init__(
        self,
        engine: Engine,
        state: ServerState,
        updates: WeightUpdates,
        turn: GpuTurn | None,
        prove: Callable[[], Awaitable[None]],
        seconds: float,
    ) -> None:
        """`turn` is None if the server has its GPU for itself; `seconds` may everything take."""
        self.engine, self.state, self.updates, self.turn = engine, state, updates, turn
        self.prove, self.seconds = prove, seconds
        self._running: tuple[str, asyncio.Task[Any]] | None = None

    async def sleep(self) -> Slept:
        """Let running requests end, then let the GPU go.

        Raises:
            RequestError: 409 it has its GPU for itself; 504 requests still run, and go on; 503 and the server
                is broken.
        """
        turn = self._required()
        return await self._one_at_a_time("falling asleep", lambda: self._sleep(turn))

    async def wake(self, version: int | None = None) -> Woken:
        """Be awake, with a version if one is named; else with the weights that were there.

        Raises:
            RequestError: as `WeightUpdates.update`; 504 somebody else has the GPU, and it sleeps on.
        """
        turn = self._required()
        what = "waking" if version is None else f"waking with version {version}"
        return await self._one_at_a_time(what, lambda: self._wake(turn, version))

    def _required(self) -> GpuTurn:
        if self.turn is None:
            raise RequestError(
                "this server has its GPU for itself: set inference.gpu_lock (a run: colocated = true) "
                "to have it take turns",
                409,
                "not_colocated",
            )
        return self.turn

    async def _one_at_a_time(self, what: str, work: Callable[[], Awaitable[T]]) -> T:
        deadline = time.monotonic() + self.seconds
        while self._running is not None and self._running[0] != what:
            running, task = self._running
            await asyncio.wait({task}, timeout=max(0.0, deadline - time.monotonic()))
            if not task.done():
                raise self._too_long(f"the engine, which is {running}")
        if self._running is None:
            task = asyncio.create_task(self._checked(work))
            self._running = (what, task)
            task.add_done_callback(self._finished)
        # Whoever asks may leave; it goes on.
        result: T = await asyncio.shield(self._running[1])
        return result

    async def _checked(self, work: Callable[[], Awaitable[T]]) -> T:
        if self.state.broken is not None:
            raise RequestError(self.state.broken, 503, "broken")
        return await work()

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._running = None
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("sleep: %s", error)

    async def _sleep(self, turn: GpuTurn) -> Slept:
        if self.state.phase == "asleep":
            return Slept(0.0)
        began = time.monotonic()
        self.state.phase = "falling asleep"
        waiting_for = "the weight update that runs"
        try:
            async with asyncio.timeout(self.seconds):
                await self.updates.idle()
                waiting_for = "running requests to end"
                # Here and not in the engine's queue: one that reached it too late would wait there, asleep.
                while self.state.in_work:
                    await asyncio.sleep(POLL_SECONDS)
        except TimeoutError:
            self.state.phase = "awake"
            raise self._too_long(waiting_for) from None
        waited = time.monotonic()
        try:
            async with asyncio.timeout(self.seconds):
                # What clients have left behind need not be waited for.
                await self.engine.sleep(level=LEVEL, mode="keep")
        except Exception as error:
            raise await self._break(self._failure(error, "the engine to leave the GPU")) from error
        self.state.phase = "asleep"
        turn.give_back()
        slept = Slept(time.monotonic() - began)
        logger.info("asleep after %.2f s, of which %.2f s for requests", slept.seconds, waited - began)
        return slept

    async def _wake(self, turn: GpuTurn, version: int | None) -> Woken:
        if self.state.phase == "awake":
            if version is None:
                return Woken(self.state.weight_version, 0.0, 0.0, 0.0)
            update = await self.updates.update(version)
            return Woken(version, update.seconds, update.pause_seconds, 0.0)
        began, paused = time.monotonic(), 0.0
        waking = Waking(self.engine, self.state, turn, self.prove)
        if version is not None:
            paused = (await self.updates.update(version, pause=waking)).pause_seconds
        if not waking.done:  # that version was there
            await self._come_back(waking)
        woken = Woken(self.state.weight_version, time.monotonic() - began, paused, waking.seconds)
        logger.info(
            "awake after %.2f s, of which %.2f s to come back to the GPU", woken.seconds, waking.seconds
        )
        return woken

    async def _come_back(self, waking: Waking) -> None:
        begun = False
        try:
            async with asyncio.timeout(self.seconds):
                await waking.begin()
                begun = True
                await waking.end()
        except Exception as error:
            failure = self._failure(error, waking.waiting_for)
            try:
                if begun:
                    raise failure from error
                await waking.undo()
            except RequestError:
                raise await self._break(failure) from error
            raise failure from error

    async def _break(self, why: RequestError) -> RequestError:
        return await break_server(self.engine, self.state, f"{why}; what the engine holds is unknown")

    def _failure(self, error: Exception, waiting_for: str) -> RequestError:
        if isinstance(error, TimeoutError):
            return self._too_long(waiting_for)
        return RequestError(f"failed while waiting for {waiting_for}: {error}", 500, "sleep_failed")

    def _too_long(self, waiting_for: str) -> RequestError:
        return RequestError(
            f"gave up after {self.seconds:g} s (inference.load_timeout) of waiting for {waiting_for}",
            504,
            "load_timeout",
        )


__all__ = ["Sleeper", "Slept", "Woken"]
