"""A body is as large as is allowed, and its sender does not fall silent."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

from keptset_guards import BodyGuard


def app(seen: list[int]) -> FastAPI:
    inner = FastAPI()

    @inner.post("/whole")
    async def whole(request: Request) -> int:
        seen.append(len(await request.body()))
        return seen[-1]

    @inner.post("/parsed")
    async def parsed(body: list[int]) -> int:
        seen.append(len(body))
        return seen[-1]

    @inner.post("/streams")
    async def streams(request: Request) -> StreamingResponse:
        length = len(await request.body())

        async def parts() -> AsyncIterator[bytes]:
            yield str(length).encode()
            yield b" bytes"

        return StreamingResponse(parts())

    return inner


def client_of(guarded) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(app=guarded),
        base_url="http://server",
        headers={"Content-Type": "application/json"},
    )


async def chunks(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


@pytest.mark.parametrize("path", ["/whole", "/parsed"])
@pytest.mark.parametrize("announced", [True, False])
async def test_one_byte_too_many_is_refused_and_never_seen(path, announced):
    seen: list[int] = []
    body = b"[1,2,3,4,5]"
    async with client_of(BodyGuard(app(seen), len(body) - 1)) as client:
        answer = await client.post(path, content=body if announced else chunks(body[:6], body[6:]))
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
    assert answer.headers["connection"] == "close", "what is left of the body is not read"
    assert not seen


@pytest.mark.parametrize("path", ["/whole", "/parsed", "/streams"])
async def test_the_largest_body_passes(path):
    seen: list[int] = []
    body = b"[1,2,3,4,5]"
    async with client_of(BodyGuard(app(seen), len(body))) as client:
        assert (await client.post(path, content=chunks(body[:6], body[6:]))).status_code == 200


async def test_a_sender_that_falls_silent_is_let_go():
    async def silent() -> AsyncIterator[bytes]:
        yield b"[1,"
        await asyncio.sleep(30)

    async with client_of(BodyGuard(app([]), 100, patience=0.05)) as client:
        answer = await client.post("/whole", content=silent())
    assert (answer.status_code, answer.json()["error"]["code"]) == (408, "stalled_body")


async def test_faults_of_the_application_stay_its_own():
    async def faulty(scope, receive, send) -> None:
        await receive()
        raise RuntimeError("inside")

    async with client_of(BodyGuard(faulty, 100)) as client:
        with pytest.raises(RuntimeError, match="inside"):
            await client.post("/", content=b"x")
