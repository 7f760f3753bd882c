"""Our routes in vLLM's app."""

from types import SimpleNamespace

import httpx
import pytest
from fastapi import FastAPI
from vllm.v1.engine.exceptions import EngineDeadError

from keptset_inference.server import put_in_front
from keptset_inference.state import ServerState

from .facts import facts


def app(**engine) -> FastAPI:
    theirs = FastAPI()
    for path in ("/inference/v1/generate", "/scale_elastic_ep", "/v1/completions"):
        theirs.add_api_route(path, lambda: "theirs", methods=["POST"])
    theirs.add_api_route("/health", lambda: "theirs", methods=["GET"])
    put_in_front(theirs)
    theirs.state.keptset = ServerState(facts())
    theirs.state.engine_client = SimpleNamespace(**engine)
    return theirs


async def call(served: FastAPI, method: str, path: str) -> httpx.Response:
    transport = httpx.ASGITransport(app=served)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        return await client.request(method, path, content=b"{}")


async def test_ours_take_the_place_of_vllms_and_the_rest_stays():
    served = app()
    assert "token_ids" in (await call(served, "POST", "/inference/v1/generate")).text
    assert (await call(served, "POST", "/v1/completions")).json() == "theirs"
    assert (await call(served, "POST", "/scale_elastic_ep")).status_code == 404
    paths = [route.path for route in served.router.routes]
    assert paths.count("/inference/v1/generate") == paths.count("/health") == 1


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing", 404, "unknown_route"),
        ("GET", "/inference/v1/generate", 405, "method_not_allowed"),
        ("DELETE", "/v1/completions", 405, "method_not_allowed"),
    ],
)
async def test_what_no_route_takes_is_an_error_like_the_others(method, path, status, code):
    answer = await call(app(), method, path)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert error["message"].startswith(f"{method} {path}: ")
    assert error["code"] == code
    assert answer.headers.get("allow") == ("POST" if status == 405 else None)


async def test_openapi_describes_our_routes():
    schema = app().openapi()
    generate = schema["paths"]["/inference/v1/generate"]["post"]
    body = generate["requestBody"]["content"]["application/json"]["schema"]
    assert {"token_ids", "sampling_params", "kept_tokens", "stream"} <= set(body["properties"])
    assert set(generate["responses"]["200"]["content"]) >= {"application/json", "application/msgpack"}
    assert "422" not in generate["responses"]
    for path in ("weights", "sleep", "wake"):
        assert "post" in schema["paths"][f"/keptset/v1/{path}"]
    assert "get" in schema["paths"]["/keptset/v1/status"]


@pytest.mark.parametrize("capture", ["v1", "native", None])
async def test_status_says_what_runs_here(capture):
    served = app()
    served.state.keptset = ServerState(facts(width=512, capture=capture), "both", weight_version=4)
    status = (await call(served, "GET", "/keptset/v1/status")).json()
    assert status["service"] == "inference"
    assert status["model"] == "/models/tiny"
    assert (status["vocab_size"], status["max_model_len"]) == (1000, 64)
    width = 512 if capture == "v1" else None
    there = capture is not None
    assert status["capture"] == {"enabled": there, "kind": capture or "off", "width": width, "proven": there}
    assert status["formats"] == ["kept_tokens", "sampling_mask", "both"]
    assert (status["kept_tokens_format"], status["weight_version"]) == ("both", 4)
    assert status["vllm"] == "0.32.0"
    assert (status["workers"], status["takes_transfers"]) == (1, False)
    assert status["instance"] == served.state.keptset.instance != ServerState(facts()).instance
    assert status["sleep"] is None


async def test_status_and_health_say_that_it_sleeps():
    async def lives() -> None:
        return None

    served = app(check_health=lives)
    served.state.keptset = ServerState(facts(shares_gpu=True, frees_memory=True), phase="asleep")
    status = (await call(served, "GET", "/keptset/v1/status")).json()
    assert status["sleep"] == {"state": "asleep", "frees_memory": True}
    health = await call(served, "GET", "/health")
    assert (health.status_code, health.json()) == (200, {"state": "asleep"})


async def test_health_follows_the_engine_and_the_weights():
    async def lives() -> None:
        return None

    async def died() -> None:
        raise EngineDeadError()

    served = app(check_health=lives)
    assert (await call(served, "GET", "/health")).status_code == 200
    served.state.keptset.broken = "half-loaded"
    broken = await call(served, "GET", "/health")
    assert (broken.status_code, broken.json()["error"]["message"]) == (503, "half-loaded")
    assert (await call(app(check_health=died), "GET", "/health")).status_code == 503
