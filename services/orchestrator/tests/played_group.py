"""An NCCL group that is played: whoever joins waits for the others."""

import asyncio

from keptset_guards import CallerLeft, while_asked
from keptset_guards.asgi import Receive


class Group:
    """Who has come; `complete` once all ranks of a version have."""

    def __init__(self) -> None:
        self.ranks: dict[tuple[str, int], set[int]] = {}

    async def join(
        self,
        unique_id: str,
        version: int,
        ranks: range,
        world_size: int,
        seconds: float,
        receive: Receive | None = None,
    ) -> bool:
        """Whether all came in time, and before whoever asked (of whom one would `receive` that) left."""
        work = self._join(unique_id, version, ranks, world_size, seconds)
        try:
            return await (work if receive is None else while_asked(receive, work))
        except CallerLeft:
            return False

    async def _join(
        self, unique_id: str, version: int, ranks: range, world_size: int, seconds: float
    ) -> bool:
        here = self.ranks.setdefault((unique_id, version), set())
        assert not here & set(ranks), "two with one rank"
        here |= set(ranks)
        for _ in range(int(seconds / 0.01)):
            if len(here) == world_size:
                return True
            await asyncio.sleep(0.01)
        return False
