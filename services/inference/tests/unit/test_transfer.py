"""Weights that come over NCCL: the order of it, and what a failure leaves behind.

The engine is a stand-in that notes what it is asked to do; vLLM's own types read what it is given.
"""

import asyncio
import base64
import threading
from typing import Any

import msgspec
import pytest
from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferUpdateInfo

from keptset_inference.arguments import engine_arguments
from keptset_inference.errors import RequestError, StartError
from keptset_inference.state import ServerState
from keptset_inference.weights import update
from keptset_inference.weights.lease import CalledOff, Watched
from keptset_inference.weights.running_model import RunningModel
from keptset_inference.weights.transfer import Transfer
from keptset_inference.weights.update import WeightUpdates
from keptset_settings import InferenceSettings

from .facts import facts
from .test_published import EXPECTED, publish


class Engine:
    """`hangs` names what returns only once its lease has ended, and then has failed; `fails` what fails at
    once; `stuck` what never returns.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.hangs = self.fails = self.stuck = ""
        self.given: dict[str, Any] = {}

    async def _do(self, call: str) -> None:
        self.calls.append(call)
        if call == self.stuck:
            await asyncio.sleep(60)
        if call == self.fails:
            raise RuntimeError("told to")

    async def pause_generation(self, *, mode, clear_cache) -> None:
        await self._do(f"pause {mode}")

    async def ask_workers(self, method, kwargs) -> list[str | None]:
        self.given[method] = kwargs
        if method == self.hangs:
            self.calls.append(method)
            return [await asyncio.to_thread(watched, kwargs["lease"], kwargs["seconds"])]
        try:
            await self._do(method)
        except RuntimeError as error:
            return [None, str(error)]
        return [None, None]

    async def update_weight_version(self, new_version) -> None:
        await self._do(f"name {new_version}")

    async def resume_generation(self) -> None:
        await self._do("resume")


def transfer(number: int = 1, seconds: float = 5.0, **changes: Any) -> Transfer:
    tensors = [(name, "bfloat16", list(shape)) for name, shape in EXPECTED.items()]
    values = {"unique_id": base64.b64encode(bytes([number]) * 128).decode(), "rank_offset": 1}
    values |= {"world_size": 2, "bucket_bytes": 1000, "seconds": seconds, "tensors": tensors}
    return msgspec.convert(values | changes, Transfer)


def watched(lease: str, seconds: float) -> str | None:
    """A worker that waits for a trainer that does not send."""
    gone = threading.Event()
    try:
        with Watched(lease, seconds, "the trainer to send all weights", gone.set, grace=5):
            assert gone.wait(20)
    except CalledOff as error:
        return str(error)
    return None


JOIN = ["keptset_join"]
RECEIVE = ["pause keep", "keptset_receive"]


@pytest.fixture
def server(tmp_path):
    engine, state = Engine(), ServerState(facts(takes_transfers=True))
    model = RunningModel(tmp_path / "model", EXPECTED, tied=True)
    return engine, state, WeightUpdates(engine, state, tmp_path / "weights", model, load_timeout=5.0)


async def test_the_group_is_joined_once_and_each_version_comes_in_one_pause(server):
    engine, state, updates = server
    result = await updates.update(1, transfer())
    assert engine.calls == [*JOIN, *RECEIVE, "name v000001", "resume"]
    assert result.pause_seconds <= result.seconds
    engine.calls.clear()
    await updates.update(2, transfer())
    assert engine.calls == [*RECEIVE, "name v000002", "resume"]
    assert (state.weight_version, state.broken) == (2, None)
    engine.calls.clear()
    await updates.update(2, transfer(2))  # another group: somebody was started again
    assert engine.calls == [*JOIN, *RECEIVE, "name v000002", "resume"]


async def test_vllm_reads_what_its_workers_are_given(server):
    engine, _, updates = server
    await updates.update(1, transfer(7))
    joined = NCCLWeightTransferInitInfo(**engine.given["keptset_join"]["init_info"])
    assert joined.nccl_unique_id_bytes == bytes([7]) * 128
    assert (joined.rank_offset, joined.world_size, joined.packed) == (1, 2, True)
    assert joined.packed_buffer_size_bytes == 1000
    update = NCCLWeightTransferUpdateInfo(**engine.given["keptset_receive"]["update_info"])
    assert dict(zip(update.names, map(tuple, update.shapes), strict=True)) == EXPECTED


@pytest.mark.parametrize("before", [None, 1])
async def test_a_trainer_that_does_not_send_is_named_and_the_previous_weights_run_again(server, before):
    # trl#6796: a missing peer of the weight transfer: hangs for ever
    engine, state, updates = server
    if before is not None:
        publish(updates.root, before)
        await updates.update(before, transfer())
    engine.calls.clear()
    engine.hangs = "keptset_receive"
    with pytest.raises(RequestError) as refused:
        await updates.update(2, transfer(seconds=1))
    said = str(refused.value)
    assert "receiving version 2 failed while waiting for the trainer to send version 2: gave up after" in said
    assert "that was all of 0." in said
    name = "base" if before is None else "v000001"
    assert f"{name} runs again" in said
    joined = JOIN if before is None else []
    assert engine.calls == [*joined, *RECEIVE, "keptset_reload", f"name {name}", "resume"]
    assert (state.weight_version, state.broken) == (before, None)
    engine.hangs = ""
    engine.calls.clear()
    await updates.update(2, transfer(2))
    assert engine.calls == [*JOIN, *RECEIVE, "name v000002", "resume"], "in a group of its own"
    assert state.weight_version == 2


async def test_whoever_asks_for_a_transfer_and_leaves_calls_it_off(server):
    """A load from files goes on; a transfer has lost the one who asked the others."""
    engine, state, updates = server
    publish(updates.root, 1)
    engine.hangs = "keptset_receive"
    asking = asyncio.create_task(updates.update(1, transfer(seconds=60)))
    while engine.hangs not in engine.calls:
        await asyncio.sleep(0.01)
    for other in (None, transfer(), transfer(2)):  # nobody takes part in it, but those of its group
        with pytest.raises(RequestError, match="version 1 is being received") as refused:
            await updates.update(1, other)
        assert refused.value.code == "update_running"
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    async with asyncio.timeout(5):
        await updates.idle()
    assert engine.calls[-3:] == ["keptset_reload", "name base", "resume"]
    assert (state.weight_version, state.broken) == (None, None)
    await updates.update(1)
    assert (state.weight_version, engine.calls[-3]) == (1, "keptset_reload")


@pytest.mark.parametrize("call", ["keptset_join", "keptset_receive"])
async def test_workers_that_never_answer_make_the_server_unhealthy(server, call, monkeypatch):
    engine, state, updates = server
    monkeypatch.setattr(update, "WORKERS_GRACE", 0.1)
    engine.stuck = call
    with pytest.raises(RequestError, match=r"no answer within 1\.1 s.*restart the server") as refused:
        await updates.update(1, transfer(seconds=1))
    assert refused.value.status == 503
    assert state.broken is not None
    assert engine.calls[-1] == "pause abort"


async def test_a_group_that_cannot_be_formed_leaves_the_weights_as_they_are(server):
    engine, state, updates = server
    engine.fails = "keptset_join"
    with pytest.raises(RequestError, match=r"waiting for the trainer to join the workers' group: told to"):
        await updates.update(1, transfer())
    assert engine.calls == [*JOIN, "resume"]
    assert (state.weight_version, state.broken) == (None, None)


async def test_half_received_weights_without_files_to_go_back_to_are_never_sampled(server):
    engine, state, updates = server
    await updates.update(1, transfer())  # published on a disk that this server does not see
    engine.calls.clear()
    engine.fails = "keptset_receive"
    with pytest.raises(RequestError, match=r"told to; which weights are loaded is unknown") as refused:
        await updates.update(2, transfer())
    assert refused.value.status == 503
    assert engine.calls == [*RECEIVE, "pause abort"]
    assert state.broken is not None


async def test_before_any_weight_has_come_the_old_ones_go_on(server):
    engine, state, updates = server
    engine.fails = "pause keep"
    with pytest.raises(RequestError) as refused:
        await updates.update(1, transfer())
    assert refused.value.status == 500
    assert engine.calls[-1] == "resume"
    assert (state.weight_version, state.broken) == (None, None)


async def test_files_load_after_a_transfer_and_failing_go_back_to_what_is_published(server):
    engine, state, updates = server
    for version in (1, 2):
        publish(updates.root, version)
    await updates.update(1, transfer())
    engine.calls.clear()
    engine.fails = "keptset_reload"
    with pytest.raises(RequestError):
        await updates.update(2)
    assert engine.given["keptset_reload"]["weights_path"].endswith("v000001")
    assert state.broken is not None  # the way back failed as well, here


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"tensors": []}, "is missing, which the running model has"),
        (
            {"tensors": [[n, "int8", list(s)] for n, s in EXPECTED.items()]},
            "is int8; send float64, float32, float16, bfloat16",
        ),
        (
            {"tensors": [[n, "float32", [*s, 1]] for n, s in EXPECTED.items()]},
            "in the running model it has",
        ),
        (
            {"tensors": [*([n, "float32", list(s)] for n, s in EXPECTED.items()), ["x", "float32", [1]]]},
            "x is unknown to the running model",
        ),
    ],
)
async def test_what_does_not_fit_the_model_never_touches_the_engine(server, changes, text):
    engine, _, updates = server
    with pytest.raises(RequestError, match=text) as refused:
        await updates.update(1, transfer(**changes))
    assert refused.value.status == 422
    assert engine.calls == []


def test_an_engine_on_a_cpu_is_refused_before_it_starts(tmp_path):
    settings = InferenceSettings(model=str(tmp_path), weights_transfer="nccl")
    with pytest.raises(StartError, match=r'set weights.transfer = "files"'):
        engine_arguments(settings)


async def test_a_server_that_reads_files_alone_says_so(server):
    engine, state, updates = server
    state.facts = facts()
    with pytest.raises(RequestError, match=r"takes no weights over NCCL.*for all services") as refused:
        await updates.update(1, transfer())
    assert (refused.value.status, engine.calls) == (409, [])
