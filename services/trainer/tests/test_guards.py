"""The internal token, and who may come in without it."""

import asyncio

import httpx
import pytest
from fastapi import FastAPI, Request

from keptset_settings import TrainerSettings
from keptset_trainer.guards import MAX_BODY_BYTES, guarded


def app() -> FastAPI:
    inner = FastAPI()

    @inner.api_route("/{path:path}", methods=["GET", "PUT", "POST"])
    async def anything(path: str, request: Request) -> int:
        return len(await request.body())

    return inner


def client_of(**settings) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=guarded(app(), TrainerSettings(**settings)))
    return httpx.AsyncClient(transport=transport, base_url="http://trainer")


@pytest.mark.parametrize(
    ("method", "path"), [("PUT", "/keptset/v1/steps/1"), ("GET", "/keptset/v1/status"), ("GET", "/metrics")]
)
async def test_with_a_token_every_route_but_health_wants_it(method, path):
    async with client_of(internal_token="token") as client:
        refused = await client.request(method, path)
        assert refused.status_code == 401
        assert "trainer.internal_token" in refused.json()["error"]["message"]
        headers = {"Authorization": "Bearer token"}
        assert (await client.request(method, path, headers=headers)).status_code == 200
        assert (await client.get("/health")).status_code == 200


async def test_metrics_can_be_opened_and_nothing_else_is():
    async with client_of(internal_token="token", open_metrics=True) as client:
        assert (await client.get("/metrics")).status_code == 200
        assert (await client.put("/keptset/v1/steps/1")).status_code == 401


async def test_without_a_token_all_is_open_and_rates_still_count():
    async with client_of(max_requests_per_second=1) as client:
        assert (await client.get("/keptset/v1/status")).status_code == 200
        assert (await client.get("/keptset/v1/status")).status_code == 429
        assert (await client.get("/health")).status_code == 200


@pytest.mark.parametrize("path", ["/keptset/v1/weights/3/send", "/keptset/v1/weights/group", "/nothing"])
async def test_only_a_batch_may_be_large(path):
    """Every other route would hold the whole body in memory before it looks at it."""
    body = b"x" * (MAX_BODY_BYTES + 1)

    async def in_parts():
        for start in range(0, len(body), 1000):
            yield body[start : start + 1000]

    async with client_of() as client:
        for content in (body, in_parts()):  # the second says no length beforehand
            refused = await client.post(path, content=content)
            assert (refused.status_code, refused.json()["error"]["code"]) == (413, "body_too_large")
        assert (await client.post(path, content=body[1:])).json() == MAX_BODY_BYTES
        assert (await client.put("/keptset/v1/steps/1", content=body)).json() == len(body)


@pytest.mark.parametrize("method", ["GET", "PUT", "POST"])
async def test_whoever_the_end_of_the_server_leaves_waiting_is_told_that_it_stops(method):
    """Uvicorn cancels them; of a fault (500) a caller would think otherwise than of a trainer that goes."""
    waiting = asyncio.Event()
    inner = FastAPI()

    @inner.api_route("/{path:path}", methods=["GET", "PUT", "POST"])
    async def never(path: str) -> None:
        waiting.set()
        await asyncio.Event().wait()

    served = guarded(inner, TrainerSettings())
    cancelled: list[asyncio.Task[None]] = []

    async def as_uvicorn(scope, receive, send) -> None:
        cancelled.append(asyncio.create_task(served(scope, receive, send)))
        await cancelled[0]

    transport = httpx.ASGITransport(app=as_uvicorn)
    async with httpx.AsyncClient(transport=transport, base_url="http://trainer") as client:
        asking = asyncio.create_task(client.request(method, "/keptset/v1/steps/1"))
        await waiting.wait()
        cancelled[0].cancel()
        answer = await asking
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "stopping")
    assert int(answer.headers["retry-after"]) > 0
