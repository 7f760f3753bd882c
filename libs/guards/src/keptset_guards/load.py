"""How many requests may be in work, and how many may come in a second."""

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Collection

from .asgi import App, Receive, Scope, Send, path_of, refuse

MOST_ADDRESSES = 4096
"""Clients whose rate is remembered; whoever was longest silent is forgotten first."""


class Turns:
    """Who may go on.

    Args:
        max_concurrent: requests in work at a time.
        per_second: of one client address, with a burst of one second's (at least one); None: any.
        clock: seconds, never going back.
    """

    def __init__(
        self, max_concurrent: int, per_second: float | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """See the class."""
        self.max_concurrent, self.per_second, self.clock = max_concurrent, per_second, clock
        self.in_work = 0
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # address -> (tokens, when)

    def wait_for_rate(self, address: str) -> float:
        """0 and one token taken, or the seconds until there is one (token bucket)."""
        if self.per_second is None:
            return 0.0
        burst, now = max(1.0, self.per_second), self.clock()
        tokens, since = self._buckets.pop(address, (burst, now))
        tokens = min(burst, tokens + (now - since) * self.per_second)
        wait = 0.0 if tokens >= 1 else (1 - tokens) / self.per_second
        self._buckets[address] = (tokens - 1 if wait == 0 else tokens, now)
        while len(self._buckets) > MOST_ADDRESSES:
            self._buckets.popitem(last=False)
        return wait


class LoadGuard:
    """Answers 429 with Retry-After to what is too much; `exempt` paths always pass and do not count."""

    def __init__(self, app: App, turns: Turns, exempt: Collection[str] = ("/health",)) -> None:
        """`turns` may be shared by several guards."""
        self.app, self.turns, self.exempt = app, turns, frozenset(exempt)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http" or path_of(scope) in self.exempt:
            await self.app(scope, receive, send)
            return
        turns = self.turns
        client = scope.get("client")
        wait = turns.wait_for_rate(client[0] if client else "")
        if wait > 0:
            await _too_many(
                receive, send, wait, f"more than {turns.per_second:g} requests a second from one address"
            )
        elif turns.in_work >= turns.max_concurrent:
            await _too_many(receive, send, 1.0, f"{turns.in_work} requests are in work, which is the most")
        else:
            turns.in_work += 1
            try:
                await self.app(scope, receive, send)
            finally:
                turns.in_work -= 1


async def _too_many(receive: Receive, send: Send, wait: float, why: str) -> None:
    seconds = max(1, math.ceil(wait))
    text = f"{why}; send this again in {seconds} s"
    await refuse(receive, send, 429, "too_many_requests", text, {"retry-after": str(seconds)})
