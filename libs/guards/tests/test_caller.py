"""Work ends when whoever asked for it leaves, and not before."""

import asyncio

import pytest

from keptset_guards import CallerLeft, while_asked
from keptset_guards.asgi import Message


class Caller:
    """Its connection; closed by `leave`."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()

    async def receive(self) -> Message:
        await self.gone.wait()
        return {"type": "http.disconnect"}


async def test_the_result_of_work_that_is_done_while_the_caller_waits():
    async def work() -> int:
        return 3

    async def failing() -> int:
        raise ValueError("its own")

    caller = Caller()
    assert await while_asked(caller.receive, work()) == 3
    with pytest.raises(ValueError, match="its own"):
        await while_asked(caller.receive, failing())


@pytest.mark.parametrize("how", ["the caller leaves", "it is cancelled"])
async def test_work_ends_with_its_caller(how):
    caller, ended, begun = Caller(), asyncio.Event(), asyncio.Event()

    async def work() -> None:
        try:
            begun.set()
            await asyncio.sleep(60)
        finally:
            ended.set()

    task = asyncio.create_task(while_asked(caller.receive, work()))
    await begun.wait()
    if how == "the caller leaves":
        caller.gone.set()
        with pytest.raises(CallerLeft):
            await task
    else:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.wait_for(ended.wait(), 5)
    assert ended.is_set()
