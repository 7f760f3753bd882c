"""A path wants its secret, and nothing else opens it."""

import httpx
import pytest
from fastapi import FastAPI, WebSocket
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from keptset_guards import AccessGuard, Secret

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
    answer = await ask(AccessGuard(app(), Secret("a setting", KEY)), method, path)
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
    assert (
        await ask(AccessGuard(app(), Secret("a setting", KEY)), "GET", "/v1/models", authorization)
    ).status_code == 401


async def test_the_key_opens_and_health_needs_none():
    guarded = AccessGuard(app(), Secret("a setting", "plain-key"))
    assert (await ask(guarded, "GET", "/v1/models", b"Bearer plain-key")).status_code == 200
    assert (await ask(guarded, "GET", "/v1/models", b"bearer  plain-key ")).status_code == 200
    assert (await ask(guarded, "GET", "/health")).status_code == 200


def test_a_websocket_without_the_key_is_closed_before_it_opens():
    stranger = TestClient(AccessGuard(app(), Secret("a setting", KEY)))
    with pytest.raises(WebSocketDisconnect), stranger.websocket_connect("/v1/realtime"):
        pass
    friend = TestClient(
        AccessGuard(app(), Secret("a setting", "key")), headers={"Authorization": "Bearer key"}
    )
    with friend.websocket_connect("/v1/realtime"):
        pass


async def test_a_key_with_letters_of_any_alphabet_opens():
    guarded = AccessGuard(app(), Secret("a setting", KEY))
    assert (await ask(guarded, "GET", "/v1/models", f"Bearer {KEY}".encode())).status_code == 200


async def test_an_internal_path_takes_what_is_below_it_along():
    guarded = AccessGuard(app(), None, Secret("a setting", "token"), ("/metrics",))
    for path in ("/metrics", "/metrics/", "/metrics/more"):
        assert (await ask(guarded, "GET", path)).status_code == 401
        assert (await ask(guarded, "GET", path, "Bearer token")).status_code == 200
    assert (await ask(guarded, "GET", "/metricsx")).status_code == 200


async def test_errors_name_the_setting_and_not_the_secret():
    answer = await ask(AccessGuard(app(), Secret("inference.api_key", "s3cret")), "GET", "/", "Bearer x")
    assert "inference.api_key" in answer.json()["error"]["message"]
    assert "s3cret" not in answer.text
