"""What is asked of the router, and one that is not there."""

import asyncio
from pathlib import Path

import httpx
import pytest
from pydantic import SecretStr

from keptset_orchestrator import PeerMismatchError, PeerRefusedError, PeerUnavailableError
from keptset_orchestrator import router as router_module
from keptset_orchestrator.fleet import Fleet
from keptset_orchestrator.inference import InferenceServer
from keptset_orchestrator.router import Router

from .driving import Drive
from .fake_inference import FakeInference
from .fake_trainer import FakeTrainer
from .real_router import RealRouter


@pytest.fixture
def routed(drive: Drive, router: RealRouter) -> Drive:
    drive.settings.router_url = router.url
    return drive


async def test_router_is_told_of_the_servers_and_weights_pass_it_by(
    routed: Drive, inference: FakeInference, second: FakeInference, router: RealRouter
):
    rows = await routed()
    assert router.servers() == {inference.url, second.url}
    assert len(inference.requests) + len(second.requests) == 3 * 2
    assert inference.posted == second.posted == [0, 1, 2, 3]
    assert all(row["rollout/error_rate"] == 0 for row in rows)


async def test_the_api_key_goes_along(routed: Drive, inference: FakeInference):
    inference.api_key, routed.settings.steps = "sesame", 1
    routed.settings.inference_api_key = SecretStr("sesame")
    (row,) = await routed()
    assert row["rollout/error_rate"] == 0


async def test_the_same_rollouts_come_with_a_router_and_without(
    routed: Drive, inference: FakeInference, trainer: FakeTrainer, tmp_path: Path
):
    await routed()
    by_way_of_it = {step: batch.content_hash for step, batch in trainer.batches.items()}
    trainer.reset()
    inference.reset()
    routed.settings.router_url, routed.settings.output_dir = None, tmp_path / "direct"
    await routed()
    assert {step: batch.content_hash for step, batch in trainer.batches.items()} == by_way_of_it


async def test_router_that_knows_a_server_of_somebody_else_is_refused(
    routed: Drive, inference: FakeInference, router: RealRouter
):
    """It would get requests, and no weights."""
    other = FakeInference()
    try:
        routed.settings.inference_urls.append(other.url)
        await routed()
        routed.settings.inference_urls.remove(other.url)
        routed.settings.steps += 1
        with pytest.raises(PeerMismatchError, match=rf"router {router.url} sends requests to {other.url}"):
            await routed()
    finally:
        other.kill()


async def test_server_that_the_router_cannot_reach_is_left_out_and_one_without_any_is_an_error(
    routed: Drive, inference: FakeInference, second: FakeInference, router: RealRouter, monkeypatch
):
    """Healthy when it was inspected, and gone when the router looked."""
    monkeypatch.setattr(router_module, "TAKE_SECONDS", 2.0)
    async with httpx.AsyncClient(timeout=None, trust_env=False) as client:
        servers = [InferenceServer(one.url, client) for one in (inference, second)]
        await asyncio.to_thread(second.kill)
        fleet = Fleet(
            servers,
            lambda *_: None,
            startup_timeout=1.0,
            weights_timeout=1.0,
            router=Router(router.url, client),
        )
        assert await Router(router.url, client).send_to(servers, servers) == [servers[1]]
        assert router.servers() == {inference.url}
        router.forget_servers()
        await asyncio.to_thread(inference.kill)
        with pytest.raises(PeerUnavailableError, match=f"router {router.url} takes none of the inference"):
            await fleet._tell_router()
        await fleet.close()


async def test_refusal_of_a_server_arrives_in_its_own_words(routed: Drive, inference: FakeInference):
    inference.faults = [400]
    with pytest.raises(PeerRefusedError, match=r"router .*: request \S+ .*: 400 told to answer 400"):
        await routed()


@pytest.mark.parametrize("fault", [429, 500, 503, "reset"])
async def test_failed_attempt_is_repeated_and_counted(
    fault: str | int, routed: Drive, inference: FakeInference
):
    routed.settings.steps = 1
    inference.faults = [fault, fault]
    (row,) = await routed()
    assert row["rollout/error_rate"] == 0.5
    assert len({body["request_id"] for body in inference.requests}) == 4, "each attempt has its own id"


async def test_something_else_than_a_router_is_named(drive: Drive, trainer: FakeTrainer):
    drive.settings.router_url = trainer.url
    with pytest.raises(PeerRefusedError, match=rf"router {trainer.url}: health: 404"):
        await drive()


async def test_router_that_does_not_listen_is_named(drive: Drive, trainer: FakeTrainer):
    drive.settings.router_url, drive.settings.startup_timeout = "http://127.0.0.1:9", 0.5
    with pytest.raises(
        PeerUnavailableError, match=r"router http://127.0.0.1:9 did not become healthy within"
    ):
        await drive()
    assert trainer.puts == []


async def test_router_killed_in_mid_step_is_waited_for_and_told_again(
    drive: Drive, inference: FakeInference, second: FakeInference, trainer: FakeTrainer, tmp_path: Path
):
    router = RealRouter(tmp_path / "log")
    drive.settings.router_url = router.url
    inference.holds = second.holds = lambda body: "-text-2-" in body["request_id"]

    async def restart() -> None:
        while not any(map(inference.holds, inference.requests)):
            await asyncio.sleep(0.01)
        await asyncio.to_thread(router.kill)
        inference.holds = second.holds = lambda body: False
        await asyncio.to_thread(router.start)

    try:
        rows, _ = await asyncio.gather(drive(), restart())
        assert [row["rollout/error_rate"] > 0 for row in rows] == [False, True, False]
        assert router.servers() == {inference.url, second.url}
        assert trainer.puts == [1, 2, 3]
    finally:
        router.kill()
