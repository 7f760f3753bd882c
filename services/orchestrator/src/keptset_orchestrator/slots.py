"""Places for requests in flight: who waits longest for the earliest step comes first."""

import asyncio
import heapq
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count


class Slots:
    """At most `size` holders at a time.

    Those of an earlier step go before those of a later one, whoever came first: further turns of a slow
    rollout, asked for late, never wait behind rollouts that are sampled ahead. Within a step it is the order
    of asking, so that no prompt overtakes another.
    """

    def __init__(self, size: int) -> None:
        self._free = size
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._numbers = count()

    @asynccontextmanager
    async def hold(self, step: int) -> AsyncIterator[float]:
        """Hold a place; yields the seconds that it took to get one."""
        began = time.monotonic()
        await self._take(step)
        try:
            yield time.monotonic() - began
        finally:
            self._give()

    async def _take(self, step: int) -> None:
        if self._free > 0:  # then nobody waits
            self._free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (step, next(self._numbers), turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # the place came together with the end
                self._give()
            raise

    def _give(self) -> None:
        while self._waiting:
            turn = heapq.heappop(self._waiting)[2]
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
