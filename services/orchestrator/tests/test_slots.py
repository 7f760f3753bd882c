"""Who gets a place when there are few."""

import asyncio

import pytest

from keptset_orchestrator.slots import Slots
from keptset_orchestrator.watermark import Watermark


async def test_earlier_steps_go_first_and_within_a_step_who_asked_first():
    slots, order = Slots(1), []

    async def take(name: str, step: int) -> None:
        async with slots.hold(step):
            order.append(name)

    async with slots.hold(1):
        waiting = [asyncio.create_task(take(*one)) for one in (("b", 2), ("c", 2), ("d", 3), ("a", 1))]
        await asyncio.sleep(0)
    await asyncio.gather(*waiting)
    assert order == ["a", "b", "c", "d"]


@pytest.mark.parametrize("when", ["before its turn", "with its turn"])
async def test_place_of_one_who_gives_up_goes_to_the_next(when: str):
    slots = Slots(1)

    async def take() -> None:
        async with slots.hold(1):
            pass

    async with slots.hold(1):
        gives_up, next_one = asyncio.create_task(take()), asyncio.create_task(take())
        await asyncio.sleep(0)
        if when == "before its turn":
            gives_up.cancel()
            await asyncio.sleep(0)
    gives_up.cancel()
    async with asyncio.timeout(5):
        await next_one
        async with slots.hold(1):
            pass


async def test_no_more_than_there_are_places_and_the_wait_is_told():
    slots, inside, most = Slots(3), 0, 0

    async def take() -> float:
        nonlocal inside, most
        async with slots.hold(1) as waited:
            inside += 1
            most = max(most, inside)
            await asyncio.sleep(0.02)
            inside -= 1
            return waited

    waits = await asyncio.gather(*(take() for _ in range(9)))
    assert most == 3
    assert max(waits) > 0.039, "the last three have waited for two others each"
    assert sorted(waits)[2] < sorted(waits)[3] / 2, "the first three for nobody"


async def test_watermark_wakes_those_it_has_reached():
    mark = Watermark(0)
    await mark.at_least(0)
    two, three = asyncio.create_task(mark.at_least(2)), asyncio.create_task(mark.at_least(3))
    await asyncio.sleep(0)
    mark.rise(2)
    await two
    assert not three.done()
    mark.rise(5)
    await three
