"""Weights are sent between two steps: what is sent, to whom, and what is said when it cannot be.

The group is a stand-in that keeps what it is given: NCCL itself needs GPUs.
"""

import asyncio
import base64
import hashlib
import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import uvicorn
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from keptset_trainer import errands, train, weight_sender, weights
from keptset_trainer.app import build_app
from keptset_trainer.buckets import buckets
from keptset_trainer.folders import Folders
from keptset_trainer.nccl_wire import GiveUp, PeersMissing, StuckInGroup
from keptset_trainer.prepare import Sharding
from keptset_trainer.ranks import PATIENCE, Ranks
from keptset_trainer.spool import Spool
from keptset_trainer.weight_sender import TransferBroken, WeightSender

from .played_loop import PlayedLoop
from .test_ranks import Trained, on_ranks

UNIQUE_ID = base64.b64encode(bytes(range(128))).decode()


class KeepingWire:
    """Keeps what is broadcast; `fails_at` the n-th buffer; `stuck` if it cannot be left."""

    def __init__(self, fails_at: int = -1, stuck: bool = False) -> None:
        self.sent: list[torch.Tensor] = []
        self.fails_at, self.stuck, self.left = fails_at, stuck, False

    def broadcast(self, bucket: torch.Tensor, give_up: GiveUp) -> None:
        assert not self.left
        if len(self.sent) == self.fails_at:
            raise PeersMissing("not all of 2 inference worker(s) have taken what was sent")
        self.sent.append(bucket.clone())

    def finish(self, give_up: GiveUp) -> None:
        assert not self.left

    def leave(self) -> None:
        if self.stuck:
            raise StuckInGroup("NCCL does not let go")
        self.left = True


def unpacked(sent: list[torch.Tensor], tensors: list[Any], bucket_bytes: int) -> dict[str, torch.Tensor]:
    """What a receiver makes of it that knows names, types and shapes alone."""
    received, waiting, size = {}, [], 0
    rest = iter(sent)

    def take() -> None:
        buffer, at = next(rest), 0
        for name, kind, shape, length in waiting:
            received[name] = buffer[at : at + length].view(kind).view(shape)
            at += length
        assert at == buffer.numel()
        waiting.clear()

    for name, dtype, shape in tensors:
        kind = getattr(torch, dtype)
        waiting.append((name, kind, shape, int(np.prod(shape)) * kind.itemsize))
        size += waiting[-1][-1]
        if size > bucket_bytes:
            take()
            size = 0
    if waiting:
        take()
    assert next(rest, None) is None
    return received


@given(
    st.lists(st.lists(st.integers(0, 5), max_size=3), max_size=12),
    st.integers(1, 200),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_a_receiver_that_knows_shapes_and_types_finds_every_tensor(shapes, bucket_bytes, dtype):
    tensors = [torch.randn(shape).to(dtype) for shape in shapes]
    told = [[str(n), str(dtype).removeprefix("torch."), list(t.shape)] for n, t in enumerate(tensors)]
    sent = list(buckets(tensors, bucket_bytes))
    received = unpacked(sent, told, bucket_bytes)
    assert all(torch.equal(received[str(n)], tensor) for n, tensor in enumerate(tensors))
    assert all(buffer.numel() > bucket_bytes for buffer in sent[:-1])


@pytest.fixture
def folders(settings) -> Folders:
    folders = Folders(settings.output_dir, settings.weights_dir)
    folders.create()
    return folders


def sender_of(folders: Folders, trained: Trained, wires: list[Any], bucket_bytes: int = 4096) -> WeightSender:
    """A sender whose groups are `wires`, first to last; an exception among them is raised."""

    def make_wire(unique_id: bytes, world_size: int, device: torch.device, give_up: GiveUp) -> Any:
        assert (unique_id, world_size) == (bytes(range(128)), 3)
        wire = wires.pop(0)
        if isinstance(wire, Exception):
            raise wire
        return wire

    sender = WeightSender(
        folders,
        trained.policy.model,
        trained.weights,
        trained.ranks,
        bucket_bytes,
        mint=lambda: bytes(range(128)),
        make_wire=make_wire,
    )
    sender.minted.add(bytes(range(128)))
    return sender


def serve(
    folders: Folders, sender: WeightSender, holds: int, seconds: float = 60.0, **errand: Any
) -> dict[str, Any]:
    """What the sender answers to one errand."""

    async def asked() -> dict[str, Any]:
        asking = asyncio.create_task(errands.ask(folders, errand, seconds))
        while not sender.is_asked():
            await asyncio.sleep(0.01)
        sender.serve(holds)
        assert not sender.is_asked()
        return await asking

    return asyncio.run(asked())


def serve_refused(folders: Folders, sender: WeightSender, holds: int, **errand: Any) -> errands.ErrandFailed:
    with pytest.raises(errands.ErrandFailed) as refused:
        serve(folders, sender, holds, **errand)
    return refused.value


SEND = {"kind": "send", "version": 0, "unique_id": UNIQUE_ID, "world_size": 3}


def published(folders: Folders, trained: Trained, directory: Path) -> None:
    trained.save(folders.checkpoint(0), directory)
    weights.publish(folders.checkpoint(0), folders, 0)


def test_a_group_is_made_while_steps_of_versions_long_gone_are_trained_once_more(folders, tiny_directory):
    """A trainer that has started again holds an old version, of which nothing may be left on the disk."""
    trained = Trained(Ranks(torch.device("cpu")), tiny_directory, "none")
    trained.save(folders.checkpoint(0), tiny_directory)
    weights.publish(folders.checkpoint(0), folders, 7)
    sender = sender_of(folders, trained, [])
    assert serve(folders, sender, 2, kind="group")["unique_id"] == UNIQUE_ID
    refused = serve_refused(folders, sender, 2, **SEND | {"version": 7})
    assert (refused.kind, "which is version 2" in str(refused)) == ("other_version", True)


def test_other_bits_than_the_published_ones_are_not_sent_under_their_name(folders, tiny_directory):
    trained = Trained(Ranks(torch.device("cpu")), tiny_directory, "none")
    published(folders, trained, tiny_directory)
    wire = KeepingWire()
    sender = sender_of(folders, trained, [wire])
    sender.differs = 0
    refused = serve_refused(folders, sender, 0, **SEND)
    assert refused.kind == "other_version"
    assert "trained once more with other bits" in str(refused)
    assert wire.sent == []
    sender.differs = None
    assert serve(folders, sender, 0, **SEND)["bytes"] > 0


def test_what_is_sent_is_what_is_published(folders, tiny_directory):
    trained = Trained(Ranks(torch.device("cpu")), tiny_directory, "none")
    published(folders, trained, tiny_directory)
    wire = KeepingWire()
    sender = sender_of(folders, trained, [wire])
    group = serve(folders, sender, 0, kind="group")
    assert group["unique_id"] == UNIQUE_ID
    done = serve(folders, sender, 0, **SEND)
    assert len(wire.sent) > 3
    received = unpacked(wire.sent, group["tensors"], group["bucket_bytes"])
    manifest = json.loads((folders.version(0) / "manifest.json").read_bytes())["tensors"]
    assert {name: (dtype, shape) for name, dtype, shape in group["tensors"]} == {
        name: (entry["dtype"], entry["shape"]) for name, entry in manifest.items()
    }
    for name, tensor in load_file(folders.version(0) / "model.safetensors").items():
        assert torch.equal(received[name], tensor)
        there = hashlib.blake2b(received[name].numpy().tobytes(), digest_size=16).hexdigest()
        assert there == manifest[name]["blake2b"]
    assert done["bytes"] == sum(buffer.numel() for buffer in wire.sent)
    # the same group is used again
    serve(folders, sender, 0, **SEND)


def two_ranks_send(ranks: Ranks, directory: Path, folders: Folders, sharding: Sharding) -> Any:
    trained = Trained(ranks, directory, sharding)
    published_by = Trained.save
    published_by(trained, folders.checkpoint(0), directory)
    ranks.first_alone(lambda: weights.publish(folders.checkpoint(0), folders, 0))
    fails, wire = KeepingWire(fails_at=2), KeepingWire()
    sender = sender_of(folders, trained, [fails, wire])
    answers = []
    for errand in ({"kind": "group"}, SEND, {"kind": "group"}, SEND):
        if ranks.is_first:
            name = f"{len(answers)}"
            folders.errand.write_text(json.dumps({**errand, "name": name, "seconds": 20}))
        ranks.first_alone(lambda: None)
        sender.serve(0)
        answers.append(errands.answered(folders))
        ranks.first_alone(lambda: None)
    assert not ranks.is_first or answers[1]["kind"] == "peers_missing"
    return [buffer.numpy() for buffer in wire.sent], answers[2] if ranks.is_first else None


@pytest.mark.parametrize("sharding", ["full", "optimizer"])
def test_shards_of_two_ranks_are_sent_whole_by_the_first_also_after_it_broke_off(
    folders, tiny_directory, tmp_path, sharding
):
    (sent, group), (nothing, _) = on_ranks(2, two_ranks_send, tmp_path, tiny_directory, folders, sharding)
    assert nothing == []
    received = unpacked([torch.from_numpy(one) for one in sent], group["tensors"], group["bucket_bytes"])
    for name, tensor in load_file(folders.version(0) / "model.safetensors").items():
        assert torch.equal(received[name], tensor)


@pytest.mark.parametrize("size", [1, 2])
def test_receivers_are_waited_for_as_long_as_other_ranks_wait_for_the_first_one(folders, monkeypatch, size):
    """weights_timeout may be longer than the patience of ranks, and is as long as that by default."""
    now = [1000.0]
    monkeypatch.setattr(weight_sender, "time", SimpleNamespace(monotonic=lambda: now[0]))
    ranks, none = Ranks(torch.device("cpu"), size=size), None
    sender = WeightSender(folders, none, none, ranks, 4096, mint=bytes, make_wire=none)
    errand = {"name": "it", "seconds": 3600.0}
    folders.errand.write_text(json.dumps(errand))
    give_up = sender._give_up(errand, now[0])
    assert give_up() is None
    now[0] += PATIENCE.total_seconds() - 30  # in which a group is left
    assert give_up() == (None if size == 1 else "waited 540.0 s")


def test_what_cannot_be_sent_is_said_and_training_goes_on(folders, tiny_directory):
    trained = Trained(Ranks(torch.device("cpu")), tiny_directory, "none")
    published(folders, trained, tiny_directory)
    missing = PeersMissing(
        "waited 5.0 s for 2 inference worker(s) to join the group that weights are sent to"
    )
    wire = KeepingWire()
    sender = sender_of(folders, trained, [missing, RuntimeError("NCCL error: unhandled"), wire])
    with pytest.raises(errands.ErrandFailed, match=r"version 0 is not what .* holds, which is version 1"):
        serve(folders, sender, 1, **SEND)
    sender.minted.clear()
    with pytest.raises(errands.ErrandFailed, match=r"is not one that this training loop has made") as failed:
        serve(folders, sender, 0, **SEND)
    assert failed.value.kind == "unknown_group"
    assert errands.begun(folders) is None, "no receiver comes for what is refused"
    serve(folders, sender, 0, kind="group")
    with pytest.raises(errands.ErrandFailed, match=r"waited 5.0 s for 2 inference worker\(s\)") as failed:
        serve(folders, sender, 0, **SEND)
    assert failed.value.kind == "peers_missing"
    with pytest.raises(errands.ErrandFailed, match=r"is not one that this training loop has made"):
        serve(folders, sender, 0, **SEND)  # nobody can come to it later
    serve(folders, sender, 0, kind="group")
    with pytest.raises(errands.ErrandFailed, match="could not be joined: NCCL error"):
        serve(folders, sender, 0, **SEND)
    serve(folders, sender, 0, kind="group")
    serve(folders, sender, 0, **SEND)
    assert wire.sent


def test_a_group_that_cannot_be_left_ends_the_loop(folders, tiny_directory):
    trained = Trained(Ranks(torch.device("cpu")), tiny_directory, "none")
    published(folders, trained, tiny_directory)
    sender = sender_of(folders, trained, [KeepingWire(fails_at=2, stuck=True)])
    with pytest.raises(TransferBroken, match=r"NCCL does not let go; .* start the trainer again"):
        serve(folders, sender, 0, **SEND)
    last = errands.answered(folders)
    assert (last["kind"], "have taken what was sent" in last["error"]) == ("send_failed", True)


def test_an_architecture_that_is_stored_under_other_names_is_refused(folders, tiny_directory):
    trained = Trained(Ranks(torch.device("cpu")), tiny_directory, "none")
    published(folders, trained, tiny_directory)
    manifest = folders.version(0) / "manifest.json"
    manifest.write_text(manifest.read_text().replace("model.norm.weight", "norm.weight"))
    sender = sender_of(folders, trained, [])
    with pytest.raises(errands.ErrandFailed, match=r'set weights.transfer = "files"'):
        serve(folders, sender, 0, kind="group")


def test_a_trainer_without_a_gpu_refuses_at_the_start(settings, tiny_directory):
    settings.weights_transfer = "nccl"
    with pytest.raises(
        ValueError, match=r'sends from a GPU, but this trainer is on cpu; .*transfer = "files"'
    ):
        train.train(settings, Ranks(torch.device("cpu")), None)


def app_of(folders: Folders, **changes: object) -> FastAPI:
    options: dict[str, Any] = {"model": "m", "row_tokens": 64, "max_batch_bytes": 1 << 20}
    options |= {"unsafe_ignore_kept_tokens": False, "full_vocabulary_scores": False, "stop": pytest.fail}
    return build_app(Spool(folders, 64), PlayedLoop(), **options | {"sends_weights": True} | changes)


def client_of(folders: Folders, **changes: object) -> httpx.AsyncClient:
    app = app_of(folders, **changes)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://trainer")


BODY = {"unique_id": UNIQUE_ID, "world_size": 3, "seconds": 0.2}


async def test_send_waits_for_the_loop_and_names_it(folders):
    client = client_of(folders)
    answer = await client.post("/keptset/v1/weights/4/send", json=BODY)
    assert answer.status_code == 504
    assert "waited 0.2 s for the training loop" in answer.json()["error"]["message"]
    assert errands.asked(folders) is None, "what nobody waits for is not done later"


async def test_send_gives_what_the_loop_answers(folders):
    def play() -> None:
        while (errand := errands.asked(folders)) is None:
            time.sleep(0.01)
        errands.answer(folders, errand, version=errand["version"], bytes=5, seconds=0.1)

    thread = threading.Thread(target=play, daemon=True)
    thread.start()
    answer = await client_of(folders).post("/keptset/v1/weights/4/send", json=BODY | {"seconds": 20})
    assert (answer.status_code, answer.json()) == (200, {"version": 4, "bytes": 5, "seconds": 0.1})


@pytest.mark.parametrize(
    ("body", "code", "text"),
    [
        ({"unique_id": "short"}, 422, "unique_id"),
        ({"world_size": 1}, 422, "world_size"),
        ({"seconds": 0}, 422, "seconds"),
        ({"more": 1}, 422, "more"),
    ],
)
async def test_a_body_that_cannot_be_meant_is_refused(folders, body, code, text):
    answer = await client_of(folders).post("/keptset/v1/weights/4/send", json=BODY | body)
    assert answer.status_code == code
    assert text in answer.json()["error"]["message"]


async def test_a_trainer_that_publishes_files_alone_says_so(folders):
    for path in ("/keptset/v1/weights/group", "/keptset/v1/weights/4/send"):
        answer = await client_of(folders, sends_weights=False).post(path, json=BODY)
        assert answer.status_code == 409
        assert 'weights.transfer = "nccl"' in answer.json()["error"]["message"]


async def test_whoever_asked_and_left_has_called_it_off(folders):
    """An orchestrator that is killed, or gives up: the loop sees at once that nobody waits."""
    server = uvicorn.Server(uvicorn.Config(app_of(folders), port=0, log_level="error"))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    host, port = server.servers[0].sockets[0].getsockname()
    async with httpx.AsyncClient(base_url=f"http://{host}:{port}", trust_env=False) as client:
        body = BODY | {"seconds": 60}
        asking = asyncio.create_task(client.post("/keptset/v1/weights/4/send", json=body, timeout=70))
        while (errand := errands.asked(folders)) is None:
            await asyncio.sleep(0.01)
        assert not errands.withdrawn(folders, errand)
        asking.cancel()  # closes the connection
        async with asyncio.timeout(5):
            while not errands.withdrawn(folders, errand):
                await asyncio.sleep(0.01)
    server.should_exit = True
    await serving
