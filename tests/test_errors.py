"""An error has one form, from whichever service and whichever part of it."""

from types import SimpleNamespace

import httpx
import pytest
from fastapi import FastAPI

from keptset_guards import AccessGuard, Secret
from keptset_guards.asgi import App
from keptset_inference.errors import RequestError
from keptset_inference.unknown_routes import UnknownRoutes
from keptset_orchestrator.app import make_app
from keptset_orchestrator.peers import error_code, error_text
from keptset_orchestrator.progress import Progress
from keptset_trainer.app import build_app
from keptset_trainer.folders import Folders
from keptset_trainer.refusal import Refusal
from keptset_trainer.spool import Spool


def inference(_: object) -> FastAPI:
    """What stands around vLLM's router; its unit tests show that it stands there."""
    app = FastAPI()
    app.add_api_route("/health", lambda: {}, methods=["GET"])
    app.router.middleware_stack = UnknownRoutes(app.router.middleware_stack)
    return app


def trainer(directory) -> FastAPI:
    folders = Folders(directory / "trainer", directory / "weights")
    folders.create()
    return build_app(
        Spool(folders, 64),
        SimpleNamespace(state=lambda: None, failure=lambda: None, stopping=False),
        model="m",
        row_tokens=64,
        max_batch_bytes=1024,
        unsafe_ignore_kept_tokens=False,
        full_vocabulary_scores=False,
        stop=lambda reason: None,
    )


def orchestrator(_: object) -> FastAPI:
    return make_app(Progress(steps=1))


async def ask(app: App, method: str, path: str) -> httpx.Response:
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
        return await client.request(method, path)


@pytest.mark.parametrize("service", [inference, trainer, orchestrator])
async def test_what_no_route_takes_is_the_same_error_from_every_service(service, tmp_path):
    app = service(tmp_path)
    answer = await ask(app, "GET", "/nothing")
    assert answer.status_code == 404
    said = {"message": "GET /nothing: Not Found", "type": "not_found_error", "code": "unknown_route"}
    assert answer.json() == {"error": said}
    answer = await ask(app, "DELETE", "/health")
    assert answer.status_code == 405
    said = {"message": "DELETE /health: Method Not Allowed", "type": "invalid_request_error"}
    assert answer.json() == {"error": {**said, "code": "method_not_allowed"}}
    assert answer.headers["allow"] == "GET"


@pytest.mark.parametrize("service", [inference, trainer, orchestrator])
async def test_a_guard_answers_like_the_service_behind_it(service, tmp_path):
    guarded = AccessGuard(service(tmp_path), Secret("a.setting", "secret"))
    answer = await ask(guarded, "GET", "/nothing")
    assert answer.status_code == 401
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "code"}
    assert (error["type"], error["code"]) == ("authentication_error", "unauthorized")


@pytest.mark.parametrize(
    "body", [RequestError("said", 409, "a_code").body(), Refusal(409, "a_code", "said", step=3).body]
)
def test_the_orchestrator_reads_the_code_of_either_service(body):
    answer = httpx.Response(409, json=body)
    assert (error_code(answer), error_text(answer)) == ("a_code", "said")
    assert body["error"]["type"] == "conflict_error"


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"error": 1}', b'{"error": {"code": 409}}', b"\xff"])
def test_an_answer_of_somebody_else_has_no_code(body):
    assert error_code(httpx.Response(409, content=body)) is None
