"""Which secret opens what, and a server that may not answer any more."""

import asyncio

import httpx
import pytest
from fastapi import FastAPI

from keptset_inference import guards
from keptset_inference.guards import AsleepGuard, BrokenGuard
from keptset_inference.state import ServerState
from keptset_settings import InferenceSettings

from .facts import facts


def app() -> FastAPI:
    inner = FastAPI()

    @inner.api_route("/{path:path}", methods=["GET", "POST", "OPTIONS", "HEAD"])
    async def anything(path: str) -> str:
        return "inside"

    return inner


async def ask(guarded, method: str, path: str, authorization: str | bytes | None = None) -> httpx.Response:
    headers = {} if authorization is None else {b"Authorization": authorization}
    transport = httpx.ASGITransport(app=guarded)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        return await client.request(method, path, headers=headers)


def settings(**values) -> InferenceSettings:
    return InferenceSettings(model="m", **values)


def bearer(text: str) -> str:
    return f"Bearer {text}"


@pytest.mark.parametrize("path", ["/", "/v1/models", "/keptset/v1/status", "/docs", "/nothing", "/health/"])
async def test_the_key_opens_what_is_public_and_the_token_does_not(path):
    guarded = guards.guarded(app(), ServerState(facts()), settings(api_key="key", internal_token="token"))
    assert (await ask(guarded, "GET", path)).status_code == 401
    assert (await ask(guarded, "GET", path, bearer("token"))).status_code == 401
    assert (await ask(guarded, "GET", path, bearer("key"))).status_code == 200
    assert (await ask(guarded, "GET", "/health")).status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "/keptset/v1/weights",
        "/keptset/v1/weights/",
        "/keptset/v1/sleep",
        "/keptset/v1/wake",
        "/metrics",
        "/metrics/x",
        *guards.VLLMS_OWN,
        "/fault_tolerance/apply",
    ],
)
async def test_the_token_opens_what_is_internal_and_the_key_does_not(path):
    guarded = guards.guarded(app(), ServerState(facts()), settings(api_key="key", internal_token="token"))
    assert (await ask(guarded, "POST", path)).status_code == 401
    assert (await ask(guarded, "POST", path, bearer("key"))).status_code == 401
    assert (await ask(guarded, "POST", path, bearer("token"))).status_code == 200


async def test_without_a_token_the_key_stands_for_it():
    guarded = guards.guarded(app(), ServerState(facts()), settings(api_key="key"))
    assert (await ask(guarded, "POST", "/keptset/v1/weights")).status_code == 401
    assert (await ask(guarded, "POST", "/keptset/v1/weights", bearer("key"))).status_code == 200


async def test_a_token_alone_leaves_the_public_routes_open():
    guarded = guards.guarded(app(), ServerState(facts()), settings(internal_token="token"))
    assert (await ask(guarded, "POST", "/inference/v1/generate")).status_code == 200
    assert (await ask(guarded, "GET", "/metrics")).status_code == 401


async def test_metrics_can_be_opened_and_nothing_else_is():
    secrets = {"api_key": "key", "internal_token": "token", "open_metrics": True}
    guarded = guards.guarded(app(), ServerState(facts()), settings(**secrets))
    assert (await ask(guarded, "GET", "/metrics")).status_code == 200
    assert (await ask(guarded, "GET", "/metrics/x")).status_code == 401
    assert (await ask(guarded, "POST", "/keptset/v1/weights")).status_code == 401


async def test_a_body_over_the_limit_is_refused():
    guarded = guards.guarded(app(), ServerState(facts()), settings(max_body_bytes=100))
    transport = httpx.ASGITransport(app=guarded)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        assert (await client.post("/inference/v1/generate", content=b"x" * 101)).status_code == 413
        assert (await client.post("/inference/v1/generate", content=b"x" * 100)).status_code == 200


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


async def test_a_sleeping_server_answers_what_needs_no_engine_and_says_when_to_come_back():
    state = ServerState(facts())
    guarded = guards.guarded(app(), state, settings())
    engine = ("/inference/v1/generate", "/v1/completions", "/v1/chat/completions", "/pause", "/nothing")
    none = ("/health", "/metrics", "/keptset/v1/status", "/keptset/v1/wake", "/v1/models", "/tokenize")
    for state.phase in ("falling asleep", "asleep", "waking"):
        for path in engine:
            answer = await ask(guarded, "POST", path)
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "asleep"
            assert f"the engine is {state.phase}" in answer.json()["error"]["message"]
            assert int(answer.headers["retry-after"]) > 0
        for path in none:
            assert (await ask(guarded, "POST", path)).status_code == 200
    state.phase = "awake"
    assert (await ask(guarded, "POST", "/inference/v1/generate")).status_code == 200


async def test_what_may_use_the_engine_is_counted_to_the_end_of_its_answer():
    state, going_on = ServerState(facts()), asyncio.Event()
    inner = FastAPI()

    @inner.post("/{path:path}")
    async def answered(path: str) -> str:
        await going_on.wait()
        return "done"

    guarded = AsleepGuard(inner, state)
    paths = ("/inference/v1/generate", "/v1/completions", "/keptset/v1/sleep")
    asking = [asyncio.create_task(ask(guarded, "POST", path)) for path in paths]
    while state.in_work < 2:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)  # for the third, which should not count
    assert state.in_work == 2
    going_on.set()
    await asyncio.gather(*asking)
    assert state.in_work == 0
