"""What stands still while weights change: by default the requests that run, frozen where they are."""

from typing import Any, Protocol


class Engine(Protocol):
    """What a pause needs of vLLM's engine client."""

    async def pause_generation(self, *, mode: Any, clear_cache: bool) -> None: ...

    async def resume_generation(self) -> None: ...


class Pause(Protocol):
    """Around a load. Nothing is sampled from `begin` to `end`."""

    waiting_for: str
    """What `begin` waits for, or was waiting for when it was given up."""

    async def begin(self) -> None:
        """Return when the weights may be touched."""

    async def end(self) -> None:
        """Sample again."""

    async def undo(self) -> None:
        """As before `begin`, which failed or was given up; no weight was touched."""


class FrozenRequests:
    """Running requests are put back into the queue and computed anew under the new weights."""

    waiting_for = "the engine to pause"

    def __init__(self, engine: Engine) -> None:
        """`engine` is awake."""
        self.engine = engine

    async def begin(self) -> None:
        """Freeze them, and forget what was computed with the old weights."""
        await self.engine.pause_generation(mode="keep", clear_cache=True)

    async def end(self) -> None:
        """Let them go on."""
        await self.engine.resume_generation()

    async def undo(self) -> None:
        """Let them go on."""
        await self.engine.resume_generation()


__all__ = ["FrozenRequests", "Pause"]
