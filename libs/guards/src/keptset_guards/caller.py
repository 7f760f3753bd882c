"""Work that is only done while whoever asked for it is there."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from .asgi import Receive

T = TypeVar("T")


class CallerLeft(Exception):
    """The connection was closed before there was an answer; nobody reads one any more."""


async def while_asked(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled once the caller's connection is closed.

    Args:
        receive: of the request, whose body has been read.
        work: ends soon after it was cancelled.

    Raises:
        CallerLeft: it was cancelled.
    """
    doing = asyncio.ensure_future(work)
    leaving = asyncio.create_task(_left(receive))
    try:
        await asyncio.wait({doing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            doing.cancel()
            await asyncio.wait({doing})
        if doing.cancelled():
            raise CallerLeft
        return doing.result()
    finally:
        doing.cancel()  # we were cancelled ourselves
        leaving.cancel()


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
