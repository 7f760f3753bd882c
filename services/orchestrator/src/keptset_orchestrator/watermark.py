"""A number that only rises, and waiting for it."""

import asyncio


class Watermark:
    """Starts at `value`."""

    def __init__(self, value: int) -> None:
        self.value = value
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []

    def rise(self, value: int) -> None:
        """Wake whoever waits for this or less."""
        assert value >= self.value
        self.value = value
        for wanted, turn in self._waiting:
            if wanted <= value and not turn.done():
                turn.set_result(None)
        self._waiting = [(wanted, turn) for wanted, turn in self._waiting if wanted > value]

    async def at_least(self, value: int) -> None:
        """Return once it is at least `value`."""
        if value > self.value:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append((value, turn))
            await turn
