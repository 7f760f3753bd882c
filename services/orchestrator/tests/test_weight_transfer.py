"""The trainer is asked to send and the servers to receive: together, and only once the trainer is ready.

The group is played: whoever joins waits for the others, as NCCL does.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from keptset_guards import error_body
from keptset_orchestrator import PeerMismatchError, PeerUnavailableError
from keptset_orchestrator.errors import OtherVersionError, TransferFailedError
from keptset_orchestrator.fleet import Fleet
from keptset_orchestrator.inference import InferenceServer
from keptset_orchestrator.trainer import Trainer
from keptset_orchestrator.weight_transfer import WeightTransfer

from .driving import Drive
from .fake_inference import FakeInference
from .fake_trainer import FakeTrainer
from .played_group import Group
from .served import Served

LONGEST_TAKEN = 3600.0
"""By trainers (`SendRequest.seconds`) and servers (`Transfer.seconds`)."""


class PlayedTrainer(Served):
    def __init__(self, group: Group) -> None:
        self.group, self.groups, self.version, self.pid = group, 0, 3, 100
        self.sends_weights, self.sending, self.training = True, None, None
        app = FastAPI()

        @app.get("/keptset/v1/status")
        async def status() -> dict[str, Any]:
            return {"next_step": 4, "weight_version": 3, "vocab_size": 9, "loop_pid": self.pid} | {
                "training": self.training,
                "sends_weights": self.sends_weights,
                "sending": self.sending,
            }

        @app.post("/keptset/v1/weights/group")
        async def make() -> dict[str, Any]:
            self.groups += 1
            tensors = [["w", "float32", [2]]]
            return {"unique_id": f"group-{self.groups}", "bucket_bytes": 8, "tensors": tensors}

        @app.post("/keptset/v1/weights/{version}/send")
        async def send(version: int, request: Request) -> JSONResponse:
            body = await request.json()
            assert body["seconds"] <= LONGEST_TAKEN
            if version != self.version:
                return refusal(409, f"version {version} is not what the loop holds", "other_version")
            self.sending = version
            there = await self.group.join(
                body["unique_id"], version, range(1), body["world_size"], body["seconds"]
            )
            self.sending = None
            if not there:
                return refusal(504, "waited for 3 inference worker(s) to join")
            return JSONResponse({"version": version})

        super().__init__(app)


class PlayedServer(Served):
    def __init__(self, group: Group) -> None:
        self.group, self.received, self.hangs = group, list[dict[str, Any]](), False
        app = FastAPI()

        @app.post("/keptset/v1/weights")
        async def weights(request: Request) -> JSONResponse:
            body = await request.json()
            self.received.append(body)
            if "transfer" not in body:
                return JSONResponse({"version": body["version"], "seconds": 1.0, "pause_seconds": 0.25})
            transfer = body["transfer"]
            assert transfer["seconds"] <= LONGEST_TAKEN
            if self.hangs:
                await asyncio.sleep(60)
            first = transfer["rank_offset"]
            there = await self.group.join(
                transfer["unique_id"],
                body["version"],
                range(first, first + (2 if first > 1 else 1)),
                transfer["world_size"],
                transfer["seconds"],
            )
            if not there:
                return refusal(503, "gave up of waiting for the trainer to send")
            return JSONResponse({"version": body["version"], "seconds": 1.0, "pause_seconds": 0.125})

        super().__init__(app)


def refusal(status: int, message: str, code: str = "a_code") -> JSONResponse:
    return JSONResponse(error_body(status, code, message), status)


@pytest.fixture
def played() -> Iterator[tuple[PlayedTrainer, list[PlayedServer]]]:
    group = Group()
    trainer, servers = PlayedTrainer(group), [PlayedServer(group) for _ in range(2)]
    yield trainer, servers
    for one in (trainer, *servers):
        one.kill()


@pytest.fixture
async def peers(played) -> AsyncIterator[tuple[Trainer, list[InferenceServer]]]:
    trainer, servers = played
    async with httpx.AsyncClient(timeout=None, trust_env=False) as client:
        known = [InferenceServer(server.url, client) for server in servers]
        known[1].workers = 2
        yield Trainer(trainer.url, client), known


async def test_all_ranks_meet_and_the_group_is_used_again(played, peers):
    (trainer, servers), (peer, known) = played, peers
    transfer = WeightTransfer(peer, 30.0)
    for version in (3, 4):
        trainer.version = version
        await transfer.update(version, known)
    assert trainer.groups == 1
    assert [one["version"] for one in servers[0].received] == [3, 4]
    first, second = (server.received[0]["transfer"] for server in servers)
    assert (first["rank_offset"], second["rank_offset"], first["world_size"]) == (1, 2, 4)
    assert first["tensors"] == [["w", "float32", [2]]]
    assert [server.pause_seconds for server in known] == [0.125, 0.125]


async def test_who_may_take_longer_than_a_transfer_can_last_is_asked_for_that(played, peers):
    """weights_timeout is for loads from files, for falling asleep and waking too, and has no upper bound."""
    (_, servers), (peer, known) = played, peers
    await WeightTransfer(peer, 2 * LONGEST_TAKEN).update(3, known)
    assert [one["version"] for one in servers[0].received] == [3]


async def test_a_new_group_when_somebody_was_started_again(played, peers):
    (trainer, servers), (peer, known) = played, peers
    transfer = WeightTransfer(peer, 30.0)
    await transfer.update(3, known)
    trainer.pid, trainer.version = 101, 4
    await transfer.update(4, known)
    known[0].starts += 1
    trainer.version = 5
    await transfer.update(5, known)
    assert [one["transfer"]["unique_id"] for one in servers[1].received] == ["group-1", "group-2", "group-3"]


async def test_a_trainer_that_refuses_leaves_the_servers_as_they_are(played, peers):
    (trainer, servers), (peer, known) = played, peers
    trainer.version = 2
    with pytest.raises(
        OtherVersionError, match=rf"trainer {trainer.url}: send weights version 3: 409 version 3"
    ):
        await WeightTransfer(peer, 30.0).update(3, known)
    trainer.sends_weights = False
    with pytest.raises(PeerMismatchError, match=r'sends no weights: set weights.transfer = "nccl"'):
        await WeightTransfer(peer, 30.0).update(3, known)
    assert [server.received for server in servers] == [[], []]


async def test_a_server_that_does_not_come_is_named(played, peers):
    (_, servers), (peer, known) = played, peers
    servers[1].hangs = True
    with pytest.raises(TransferFailedError) as raised:
        await WeightTransfer(peer, 1.5).update(3, known)
    said = str(raised.value)
    assert f"called off with no answer yet: {known[1].name}" in said
    assert "504 waited for 3 inference worker(s) to join" in said


async def test_a_trainer_that_is_gone_is_named_and_the_servers_are_not_asked(played, peers):
    (trainer, servers), (peer, known) = played, peers
    await asyncio.to_thread(trainer.kill)
    with pytest.raises(PeerUnavailableError, match=f"trainer {trainer.url}: status"):
        await WeightTransfer(peer, 0.3).update(3, known)
    assert servers[0].received == []


@pytest.mark.parametrize("training", [3, None])
async def test_weights_that_the_trainer_no_longer_holds_are_loaded_from_files(
    training, played, peers, caplog
):
    """It has begun with the next step by the time it could send; the next version is sent again."""
    (trainer, servers), (peer, known) = played, peers
    trainer.version, trainer.training = 4, training
    fleet = Fleet(
        known,
        lambda *_: None,
        startup_timeout=30,
        weights_timeout=30,
        transfer=WeightTransfer(peer, 30.0),
    )
    await fleet.load_weights(3)
    assert [server.received for server in servers] == [[{"version": 3}]] * 2
    assert [server.version for server in known] == [3, 3]
    assert "the files of version 3 are loaded instead" in caplog.text
    await fleet.load_weights(4)
    assert all("transfer" in server.received[1] for server in servers)


@pytest.mark.parametrize("training", [4, 5])
async def test_a_trainer_that_is_at_a_later_step_is_not_waited_for(training, played, peers):
    """It would answer when the step is done, and hold other weights."""
    (trainer, servers), (peer, known) = played, peers
    trainer.training = training
    with pytest.raises(OtherVersionError, match=f"published version 3 and trains step {training}"):
        await WeightTransfer(peer, 30.0).update(3, known)
    assert trainer.groups == 0
    assert [server.received for server in servers] == [[], []]


async def test_a_trainer_that_trains_steps_once_more_is_not_waited_for(played, peers):
    """It has published the version in an earlier life, and holds one of long before."""
    (trainer, servers), (peer, known) = played, peers
    trainer.training = 2
    with pytest.raises(OtherVersionError, match="was started again and trains step 2 once more"):
        await WeightTransfer(peer, 30.0).update(3, known)
    assert trainer.groups == 0
    assert [server.received for server in servers] == [[], []]


@pytest.mark.parametrize("level", [0, 1, 3])
async def test_every_version_is_sent_before_the_trainer_goes_on(
    level: int, drive: Drive, inference: FakeInference, trainer: FakeTrainer
):
    """Above level 0 the batch of the next step is there while a step is trained, and is held back."""
    drive.settings.max_async_level, drive.settings.steps = level, 6
    drive.settings.weights_transfer, trainer.sends_weights = "nccl", True
    rows = await drive()
    assert len(rows) == 6
    assert inference.received == inference.posted == trainer.sent == list(range(7))


async def test_orchestrator_that_comes_back_in_the_middle_of_a_step_has_files_loaded(
    drive: Drive, inference: FakeInference, trainer: FakeTrainer
):
    drive.settings.max_async_level = 1
    drive.settings.weights_transfer, trainer.sends_weights = "nccl", True
    trainer.hold_from = 2
    first = asyncio.create_task(drive())
    while 2 not in trainer.batches:
        await asyncio.sleep(0.01)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    inference.restarted()
    again = asyncio.create_task(drive())
    while inference.posted != [0, 1, 1]:
        await asyncio.sleep(0.01)
        assert not again.done()
    trainer.hold_from = math.inf
    assert [row["step"] for row in await again] == [1, 2, 3]
    assert inference.received == trainer.sent == [0, 1, 2, 3]
