"""Waking as what is around a load: weights come back first, caches last, and nothing old is ever sampled."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from vllm.logger import init_logger

from keptset_guards import GpuTurn

from ..errors import RequestError
from ..state import ServerState

logger = init_logger("vllm.keptset.sleep")

POLL_SECONDS = 0.05
SECONDS_BETWEEN_WORDS = 30.0


class Engine(Protocol):
    """What waking needs of vLLM's engine client."""

    async def wake_up(self, tags: list[str] | None = None) -> bool: ...


async def turn_on_gpu(turn: GpuTurn) -> None:
    """Return when it is this server's turn. Whoever calls this bounds it; the log says whom it waits for."""
    word_at = time.monotonic()
    while not turn.try_to_take():
        if time.monotonic() >= word_at:
            logger.info("waiting for the GPU, which %s has (%s)", turn.holder(), turn.path)
            word_at = time.monotonic() + SECONDS_BETWEEN_WORDS
        await asyncio.sleep(POLL_SECONDS)


class Waking:
    """From asleep to awake: a `Pause` around the load of a version, or around nothing.

    vLLM has two kinds of memory that may come back one after the other: the weights, and the KV cache. What a
    load needs besides fits where the KV cache will be.
    """

    def __init__(
        self, engine: Engine, state: ServerState, turn: GpuTurn, prove: Callable[[], Awaitable[None]]
    ) -> None:
        """`prove` raises unless the capture is still in place; called before anybody else may sample."""
        self.engine, self.state, self.turn, self.prove = engine, state, turn, prove
        self.waiting_for = "the GPU"
        self.done = False
        self.seconds = 0.0
        """Until the weights were there, and from the load's end on."""
        self._touched = False

    async def begin(self) -> None:
        """The weights of before are back."""
        began = time.monotonic()
        if not self.turn.try_to_take():
            self.waiting_for = f"{self.turn.holder()}, to give the GPU back"
            await turn_on_gpu(self.turn)
        self.waiting_for = "the engine to take its weights back to the GPU"
        self.state.phase, self._touched = "waking", True
        await self.engine.wake_up(["weights"])
        self.seconds += time.monotonic() - began

    async def end(self) -> None:
        """The rest is back too, with an empty cache; requests are answered."""
        began = time.monotonic()
        self.waiting_for = "the engine to take its KV cache back to the GPU"
        if not await self.engine.wake_up(["kv_cache"]):
            raise RequestError("the engine did not wake as a whole", 500, "wake_failed")
        await self.prove()
        self.state.phase, self.done = "awake", True
        self.seconds += time.monotonic() - began

    async def undo(self) -> None:
        """Asleep as before, if nothing has come back yet.

        Raises:
            RequestError: a part may have.
        """
        if self._touched:
            raise RequestError("a part of the engine's memory may have come back", 500, "wake_failed")
        self.turn.give_back()


__all__ = ["Waking", "turn_on_gpu"]
