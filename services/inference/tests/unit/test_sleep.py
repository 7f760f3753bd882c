"""The order of falling asleep and waking, one at a time, and what a failure leaves behind."""

import asyncio
import subprocess
import sys

import pytest

from keptset_guards import GpuTurn
from keptset_inference.errors import RequestError
from keptset_inference.sleep.sleeper import Sleeper
from keptset_inference.state import ServerState
from keptset_inference.weights.running_model import RunningModel
from keptset_inference.weights.update import WeightUpdates

from . import test_update
from .facts import facts
from .test_published import EXPECTED, publish
from .test_update import whole

START = """
import sys
from keptset_inference import __main__, server

server.START_PATIENCE = 0.1
__main__.main(["--model", sys.argv[1], "--gpu-lock", sys.argv[2], "--port", "0"])
"""

FALL_ASLEEP = ["sleep 1 keep"]


class Engine(test_update.Engine):
    """Notes what it is asked to do, as that of `test_update`; `whole` is whether it woke as a whole."""

    whole = True

    async def sleep(self, level=1, mode="abort") -> None:
        await self._do(f"sleep {level} {mode}")

    async def wake_up(self, tags=None) -> bool:
        await self._do(f"wake {' '.join(tags)}")
        return self.whole and tags == ["kv_cache"]


class Server:
    """A sleeper over an engine that is not there, and a trainer that may have the GPU."""

    def __init__(self, folder):
        self.engine, self.state = Engine(), ServerState(facts(shares_gpu=True))
        for version in (1, 2):
            publish(folder / "weights", version)
        model = RunningModel(folder / "model", EXPECTED, tied=True)
        self.updates = WeightUpdates(self.engine, self.state, folder / "weights", model, load_timeout=60.0)
        self.turn = GpuTurn(folder / "gpu.lock", "an inference server", shared=True)
        self.trainer = GpuTurn(folder / "gpu.lock", "the trainer", shared=False)
        assert self.turn.try_to_take()
        self.sleeper = Sleeper(self.engine, self.state, self.updates, self.turn, self.prove, seconds=60.0)

    async def prove(self) -> None:
        assert self.state.phase == "waking", "nobody else may sample yet"
        await self.engine._do("prove")

    def calls(self) -> list[str]:
        """Since the last time."""
        calls, self.engine.calls = self.engine.calls, []
        return calls


@pytest.fixture
def server(tmp_path):
    return Server(tmp_path)


def waking(*load: str) -> list[str]:
    return ["wake weights", *load, "wake kv_cache", "prove"]


async def test_requests_end_before_it_sleeps_and_then_the_gpu_is_free(server):
    assert not server.trainer.try_to_take()
    server.state.in_work = 2
    sleep = asyncio.create_task(server.sleeper.sleep())
    await asyncio.sleep(0.2)
    assert (server.state.phase, server.calls()) == ("falling asleep", [])
    server.state.in_work = 0
    slept = await sleep
    assert server.calls() == FALL_ASLEEP
    assert (server.state.phase, server.turn.held) == ("asleep", False)
    assert slept.seconds > 0
    assert server.trainer.try_to_take()


async def test_it_wakes_with_a_version_and_samples_nothing_of_before(server):
    await server.sleeper.sleep()
    server.calls()
    woken = await server.sleeper.wake(1)
    assert server.calls() == waking("keptset_reload v000001", "name v000001")
    assert (server.state.phase, server.state.weight_version, woken.version) == ("awake", 1, 1)
    assert 0 < woken.wake_seconds <= woken.pause_seconds <= woken.seconds
    assert not server.trainer.try_to_take()


async def test_it_wakes_with_the_weights_that_were_there(server):
    await server.sleeper.wake(1)
    assert server.calls() == whole(1), "awake as it was, that is an update"
    for version in (None, 1):
        await server.sleeper.sleep()
        woken = await server.sleeper.wake(version)
        assert server.calls() == [*FALL_ASLEEP, *waking()]
        assert woken.version == server.state.weight_version == 1


async def test_asleep_or_awake_already_is_nothing_to_do(server):
    await server.sleeper.wake()
    assert server.calls() == []
    await server.sleeper.sleep()
    server.calls()
    assert (await server.sleeper.sleep()).seconds == 0
    assert server.calls() == []


async def test_two_who_ask_for_the_same_get_the_same(server):
    server.engine.waits["sleep 1 keep"] = asyncio.Event()
    asking = [asyncio.create_task(server.sleeper.sleep()) for _ in range(2)]
    await asyncio.sleep(0.05)
    asking[0].cancel()  # who leaves does not stop it
    server.engine.waits["sleep 1 keep"].set()
    await asking[1]
    assert server.calls() == FALL_ASLEEP


async def test_sleep_and_wake_wait_for_each_other_and_for_an_update(server):
    server.engine.waits["keptset_reload v000001"] = asyncio.Event()
    update = asyncio.create_task(server.updates.update(1))
    while server.engine.calls[-1:] != ["keptset_reload v000001"]:
        await asyncio.sleep(0.01)
    sleep = asyncio.create_task(server.sleeper.sleep())
    await asyncio.sleep(0.05)
    wake = asyncio.create_task(server.sleeper.wake(2))
    await asyncio.sleep(0.05)
    assert server.state.phase == "falling asleep"
    server.engine.waits["keptset_reload v000001"].set()
    await asyncio.gather(update, sleep, wake)
    assert server.calls() == [
        *whole(1),
        *FALL_ASLEEP,
        *waking("keptset_reload v000002", "name v000002"),
    ]


async def test_a_server_with_a_gpu_of_its_own_does_not_sleep(server):
    server.sleeper.turn = None
    for ask in (server.sleeper.sleep, server.sleeper.wake):
        with pytest.raises(RequestError, match="colocated = true") as refused:
            await ask()
        assert refused.value.status == 409


async def test_requests_that_do_not_end_keep_it_awake(server):
    server.sleeper.seconds, server.state.in_work = 0.2, 1
    with pytest.raises(RequestError, match=r"0\.2 s .*running requests to end") as refused:
        await server.sleeper.sleep()
    assert refused.value.status == 504
    assert server.calls() == []
    assert (server.state.phase, server.state.broken, server.turn.held) == ("awake", None, True)


async def test_no_weights_are_taken_asleep_but_by_waking(server):
    await server.sleeper.sleep()
    server.calls()
    with pytest.raises(RequestError, match=r'POST /keptset/v1/wake {"version": 1}') as refused:
        await server.updates.update(1)
    assert (refused.value.status, refused.value.code) == (409, "asleep")
    assert server.calls() == []


async def test_it_sleeps_on_while_the_trainer_has_the_gpu(server):
    await server.sleeper.sleep()
    server.calls()
    assert server.trainer.try_to_take()
    server.sleeper.seconds = server.updates.load_timeout = 2.0  # in which files are read, too
    for version in (None, 1):
        with pytest.raises(
            RequestError, match=r"waiting for the trainer, process \d+, to give the GPU"
        ) as late:
            await server.sleeper.wake(version)
        assert late.value.status == 504
    assert server.calls() == []
    assert (server.state.phase, server.state.broken) == ("asleep", None)
    server.trainer.give_back()
    server.sleeper.seconds = server.updates.load_timeout = 60.0
    await server.sleeper.wake(1)
    assert server.state.phase == "awake"


@pytest.mark.parametrize(("version", "status"), [(7, 404), (2, 409)])
async def test_a_version_that_cannot_be_loaded_does_not_wake_it(server, version, status):
    (server.updates.root / "v000002" / "manifest.json").unlink()
    await server.sleeper.sleep()
    server.calls()
    with pytest.raises(RequestError) as refused:
        await server.sleeper.wake(version)
    assert refused.value.status == status
    assert server.calls() == []
    assert (server.state.phase, server.turn.held) == ("asleep", False)


async def test_a_load_that_fails_wakes_it_with_the_version_before(server):
    await server.sleeper.wake(1)
    await server.sleeper.sleep()
    server.calls()
    server.engine.fails["keptset_reload v000002"] = RuntimeError("disk")
    with pytest.raises(RequestError, match=r"disk; v000001 runs again"):
        await server.sleeper.wake(2)
    assert server.calls() == waking("keptset_reload v000002", "keptset_reload v000001", "name v000001")
    assert (server.state.phase, server.state.weight_version, server.state.broken) == ("awake", 1, None)


@pytest.mark.parametrize("fault", ["sleep 1 keep", "wake weights", "wake kv_cache", "prove", "a part"])
@pytest.mark.parametrize("version", [None, 1])
async def test_what_may_be_there_in_part_breaks_the_server(server, fault, version):
    if fault == "a part":
        server.engine.whole = False
    else:
        server.engine.fails[fault] = RuntimeError("no memory")

    async def sleep_and_wake() -> None:
        await server.sleeper.sleep()
        await server.sleeper.wake(version)

    with pytest.raises(RequestError, match="restart the server") as broken:
        await sleep_and_wake()
    assert broken.value.status == 503
    assert server.state.broken == str(broken.value)
    assert server.calls()[-1] == "pause abort"
    assert server.turn.held, "the trainer must not come where memory may still be taken"
    with pytest.raises(RequestError, match="restart the server"):
        await server.sleeper.wake()


def test_a_server_that_starts_says_who_has_the_gpu(tmp_path):
    """In a process of its own: nothing was logged there before, and so nothing set vLLM's logging up."""
    trainer = GpuTurn(tmp_path / "gpu.lock", "the trainer", shared=False)
    assert trainer.try_to_take()
    command = [sys.executable, "-c", START, str(tmp_path), str(trainer.path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert f"waiting for the GPU, which {trainer.name} has ({trainer.path})" in done.stdout, done.stderr
    assert f"keptset-inference: waited 0 s for the GPU, which {trainer.name} has" in done.stderr
    assert done.returncode == 1
