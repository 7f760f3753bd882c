"""The API key, and a server that may not answer any more."""

import httpx
import pytest
from fastapi import FastAPI, WebSocket
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from keptset_inference.guards import ApiKeyGuard, BrokenGuard
from keptset_inference.state import ServerState

from .facts import facts

KEY = "a-kéy"


def app() -> FastAPI:
    inner = FastAPI()

    @inner.websocket("/v1/realtime")
    async def talk(socket: WebSocket) -> None:
        await socket.accept()
        await socket.close()

    @inner.api_route("/{path:path}", methods=["GET", "POST", "OPTIONS", "HEAD"])
    async def anything(path: str) -> str:
        return "inside"

    return inner


async def ask(guarded, method: str, path: str, authorization: str | bytes | None = None) -> httpx.Response:
    headers = {} if authorization is None else {b"Authorization": authorization}
    transport = httpx.ASGITransport(app=guarded)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        return await client.request(method, path, headers=headers)


@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", "HEAD"])
@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/v1/models",
        "/keptset/v1/status",
        "/metrics",
        "/docs",
        "/openapi.json",
        "/nothing",
        "/healthy",
        "/health/",
        "//health",
        "/HEALTH",
    ],
)
async def test_without_the_key_nothing_answers(method, path):
    answer = await ask(ApiKeyGuard(app(), KEY), method, path)
    assert answer.status_code == 401
    assert answer.headers["WWW-Authenticate"] == "Bearer"
    if method != "HEAD":
        assert "Bearer" in answer.json()["error"]["message"]
        assert answer.json()["error"]["code"] == "unauthorized"


@pytest.mark.parametrize(
    "authorization",
    [
        b"",
        b"Bearer",
        b"Bearer ",
        b"Bearer wrong",
        b"Basic a-k\xc3\xa9y",
        b"a-k\xc3\xa9y",
        b"Bearer a-k\xc3\xa9",
        b"\xff\xfe",
    ],
)
async def test_a_wrong_key_is_no_key(authorization):
    assert (await ask(ApiKeyGuard(app(), KEY), "GET", "/v1/models", authorization)).status_code == 401


async def test_the_key_opens_and_health_needs_none():
    guarded = ApiKeyGuard(app(), "plain-key")
    assert (await ask(guarded, "GET", "/v1/models", b"Bearer plain-key")).status_code == 200
    assert (await ask(guarded, "GET", "/v1/models", b"bearer  plain-key ")).status_code == 200
    assert (await ask(guarded, "GET", "/health")).status_code == 200


def test_a_websocket_without_the_key_is_closed_before_it_opens():
    stranger = TestClient(ApiKeyGuard(app(), KEY))
    with pytest.raises(WebSocketDisconnect), stranger.websocket_connect("/v1/realtime"):
        pass
    friend = TestClient(ApiKeyGuard(app(), "key"), headers={"Authorization": "Bearer key"})
    with friend.websocket_connect("/v1/realtime"):
        pass


async def test_a_broken_server_answers_only_that_it_is_broken():
    state = ServerState(facts())
    guarded = BrokenGuard(app(), state)
    assert (await ask(guarded, "POST", "/v1/completions")).status_code == 200
    state.broken = "which weights are loaded is unknown"
    for path in ("/v1/completions", "/inference/v1/generate", "/keptset/v1/weights", "/ping"):
        answer = await ask(guarded, "POST", path)
        assert answer.status_code == 503
        assert answer.json()["error"]["message"] == state.broken
    for path in ("/health", "/metrics", "/keptset/v1/status"):
        assert (await ask(guarded, "GET", path)).status_code == 200
