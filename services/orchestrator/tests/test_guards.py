"""The internal token: shown to the others, and wanted by our own routes."""

import httpx
import pytest
from pydantic import SecretStr

from keptset_orchestrator.app import make_app
from keptset_orchestrator.errors import OrchestratorError
from keptset_orchestrator.guards import guarded
from keptset_orchestrator.peers import MOST_PAUSE_SECONDS, Peer, TransientError
from keptset_orchestrator.progress import Progress
from keptset_settings import OrchestratorSettings

from .driving import Drive
from .fake_inference import FakeInference
from .fake_trainer import FakeTrainer


async def test_token_opens_trainer_and_weights_and_key_the_rest(
    drive: Drive, inference: FakeInference, trainer: FakeTrainer
):
    inference.api_key, inference.token, trainer.token = "key", "token", "token"
    drive.settings.steps = 1
    drive.settings.inference_api_key = SecretStr("key")
    with pytest.raises(OrchestratorError, match="401"):
        await drive()
    drive.settings.internal_token = SecretStr("token")
    (row,) = await drive()
    assert row["weight_version"] == 1
    assert inference.posted == [0, 1]


@pytest.mark.parametrize("open_metrics", [True, False])
async def test_own_routes_want_the_token_but_for_health(open_metrics):
    settings = OrchestratorSettings(internal_token="token", open_metrics=open_metrics)
    transport = httpx.ASGITransport(app=guarded(make_app(Progress(steps=1)), settings))
    async with httpx.AsyncClient(transport=transport, base_url="http://orchestrator") as client:
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/keptset/v1/status")).status_code == 401
        assert (await client.get("/metrics")).status_code == (200 if open_metrics else 401)
        shown = {"Authorization": "Bearer token"}
        assert (await client.get("/keptset/v1/status", headers=shown)).status_code == 200


@pytest.mark.parametrize(
    ("header", "pause"), [({"retry-after": "7"}, 7), ({"retry-after": "1e9"}, 1), ({}, 1)]
)
async def test_peer_says_how_long_to_wait(header, pause):
    transport = httpx.MockTransport(lambda request: httpx.Response(429, headers=header))
    async with httpx.AsyncClient(transport=transport) as client:
        with pytest.raises(TransientError) as error:
            await Peer("trainer", "http://trainer", client).call("GET", "/", seconds=1, what="x")
    assert (error.value.pause, error.value.lost) == (pause, False)


async def test_no_peer_makes_us_wait_for_ever():
    transport = httpx.MockTransport(lambda request: httpx.Response(429, headers={"retry-after": "999999"}))
    async with httpx.AsyncClient(transport=transport) as client:
        with pytest.raises(TransientError) as error:
            await Peer("trainer", "http://trainer", client).call("GET", "/", seconds=1, what="x")
    assert error.value.pause == MOST_PAUSE_SECONDS
