"""Too much is told to come again, and what was let in is let out."""

import asyncio

import httpx
import pytest

from keptset_guards import LoadGuard, Turns
from keptset_guards.load import MOST_ADDRESSES


class Clock:
    """Time that a test moves."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Slow:
    """Answers when it is told to."""

    def __init__(self) -> None:
        self.go, self.fails = asyncio.Event(), False

    async def __call__(self, scope, receive, send) -> None:
        await self.go.wait()
        if self.fails:
            raise RuntimeError("inside")
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})


def client_of(app, address: str = "10.0.0.1") -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=app, client=(address, 1))
    return httpx.AsyncClient(transport=transport, base_url="http://server")


async def until_in_work(turns: Turns, requests: int) -> None:
    async with asyncio.timeout(60):
        while turns.in_work != requests:
            await asyncio.sleep(0.001)


async def test_more_than_the_most_in_work_are_told_to_come_again():
    slow, turns = Slow(), Turns(2, None)
    async with client_of(LoadGuard(slow, turns)) as client:
        inside = [asyncio.create_task(client.get("/")) for _ in range(2)]
        await until_in_work(turns, 2)
        refused = await client.get("/")
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["code"] == "too_many_requests"
        slow.go.set()
        assert [(await task).status_code for task in inside] == [200, 200]
        assert (await client.get("/")).status_code == 200


async def test_a_request_that_fails_or_goes_away_gives_its_place_back():
    slow, turns = Slow(), Turns(1, None)
    async with client_of(LoadGuard(slow, turns)) as client:
        gone = asyncio.create_task(client.get("/"))
        await until_in_work(turns, 1)
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        assert turns.in_work == 0
        slow.go.set()
        slow.fails = True
        with pytest.raises(RuntimeError):
            await client.get("/")
        assert turns.in_work == 0


async def test_health_passes_a_full_server():
    slow, turns = Slow(), Turns(1, None)
    async with client_of(LoadGuard(slow, turns)) as client:
        inside = asyncio.create_task(client.get("/"))
        await until_in_work(turns, 1)
        health = asyncio.create_task(client.get("/health"))
        slow.go.set()
        assert (await health).status_code == (await inside).status_code == 200


async def test_a_rate_is_one_clients_and_comes_back_with_time():
    slow, clock = Slow(), Clock()
    slow.go.set()
    app = LoadGuard(slow, Turns(9, 0.5, clock))
    async with client_of(app) as one, client_of(app, "10.0.0.2") as other:
        assert (await one.get("/")).status_code == 200
        refused = await one.get("/")
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "2")
        assert (await other.get("/")).status_code == 200
        clock.now += 2
        assert (await one.get("/")).status_code == 200
        assert (await one.get("/")).status_code == 429


def test_a_burst_is_one_seconds_and_no_more():
    clock = Clock()
    turns = Turns(1, 5.0, clock)
    clock.now = 1000.0
    assert [turns.wait_for_rate("a") == 0 for _ in range(7)] == [True] * 5 + [False] * 2


def test_addresses_are_forgotten_rather_than_kept_for_ever():
    turns = Turns(1, 1.0, Clock())
    for number in range(MOST_ADDRESSES + 10):
        turns.wait_for_rate(str(number))
    assert len(turns._buckets) == MOST_ADDRESSES
    assert turns.wait_for_rate("0") == 0
    assert turns.wait_for_rate(str(MOST_ADDRESSES + 9)) > 0
