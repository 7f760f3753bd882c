"""A server that may answer nothing any more, as what its engine holds is unknown."""

import asyncio
from typing import Any, Protocol

from vllm.logger import init_logger

from .errors import RequestError
from .state import ServerState

logger = init_logger("vllm.keptset")


class Engine(Protocol):
    """What is left to be asked of vLLM's engine client."""

    async def pause_generation(self, *, mode: Any, clear_cache: bool) -> None: ...


async def break_server(engine: Engine, state: ServerState, why: str) -> RequestError:
    """Answer nothing any more but that a restart is needed; whatever runs gets an answer."""
    state.broken = f"{why}: restart the server"
    try:
        async with asyncio.timeout(10):
            await engine.pause_generation(mode="abort", clear_cache=True)
    except Exception as error:
        logger.error("the requests that were running could not be aborted: %r", error)
    return RequestError(state.broken, 503, "broken")


__all__ = ["break_server"]
