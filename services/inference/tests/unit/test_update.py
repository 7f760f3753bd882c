"""The order of an update, one at a time, and what a failure leaves behind."""

import asyncio
import shutil

import pytest

from keptset_inference.errors import RequestError
from keptset_inference.state import ServerState
from keptset_inference.weights.running_model import RunningModel
from keptset_inference.weights.update import WeightUpdates

from .facts import facts
from .test_published import EXPECTED, publish


class Engine:
    """Notes what it is asked to do; `fails` maps a call to an error, `waits` to an event."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fails: dict[str, Exception] = {}
        self.waits: dict[str, asyncio.Event] = {}

    async def _do(self, call: str) -> None:
        self.calls.append(call)
        if call in self.waits:
            await self.waits[call].wait()
        if call in self.fails:
            raise self.fails[call]

    async def pause_generation(self, *, mode, clear_cache) -> None:
        assert clear_cache
        await self._do(f"pause {mode}")

    async def ask_workers(self, method, kwargs) -> list[str | None]:
        """Of two workers the second one fails, if one does."""
        try:
            await self._do(f"{method} {kwargs['weights_path'].rpartition('/')[2]}")
        except RuntimeError as error:
            return [None, str(error)]
        return [None, None]

    async def update_weight_version(self, new_version) -> None:
        await self._do(f"name {new_version}")

    async def resume_generation(self) -> None:
        await self._do("resume")


@pytest.fixture
def server(tmp_path):
    engine, state = Engine(), ServerState(facts())
    for version in (1, 2):
        publish(tmp_path / "weights", version)
    model = RunningModel(tmp_path / "model", EXPECTED, tied=True)
    return engine, state, WeightUpdates(engine, state, tmp_path / "weights", model, load_timeout=60.0)


def whole(version: int) -> list[str]:
    name = f"v{version:06d}"
    return ["pause keep", f"keptset_reload {name}", f"name {name}", "resume"]


async def test_an_update_pauses_loads_names_and_resumes(server):
    engine, state, updates = server
    result = await updates.update(1)
    assert engine.calls == whole(1)
    assert state.weight_version == result.version == 1
    assert 0 < result.pause_seconds <= result.seconds


async def test_the_version_that_runs_is_nothing_to_do(server):
    engine, _, updates = server
    await updates.update(1)
    again = await updates.update(1)
    assert engine.calls == whole(1)
    assert (again.seconds, again.pause_seconds) == (0, 0)


@pytest.mark.parametrize(("version", "status"), [(7, 404), (2, 409)])
async def test_a_version_that_cannot_be_loaded_never_touches_the_engine(server, version, status):
    engine, state, updates = server
    await updates.update(1)
    (updates.root / "v000002" / "manifest.json").unlink()
    with pytest.raises(RequestError) as refused:
        await updates.update(version)
    assert refused.value.status == status
    assert engine.calls == whole(1)
    assert (state.weight_version, state.broken) == (1, None)


async def test_while_one_loads_another_is_refused_and_the_same_joins(server):
    engine, state, updates = server
    engine.waits["keptset_reload v000001"] = asyncio.Event()
    first, second = (asyncio.create_task(updates.update(1)) for _ in range(2))
    while "keptset_reload v000001" not in engine.calls:
        await asyncio.sleep(0.01)
    with pytest.raises(RequestError, match="version 1 is being loaded") as refused:
        await updates.update(2)
    assert (refused.value.status, refused.value.code) == (409, "update_running")
    engine.waits["keptset_reload v000001"].set()
    assert (await first) == (await second)
    assert engine.calls == whole(1)
    await updates.update(2)
    assert state.weight_version == 2


async def test_a_client_that_leaves_does_not_stop_the_update(server):
    engine, state, updates = server
    engine.waits["keptset_reload v000001"] = asyncio.Event()
    task = asyncio.create_task(updates.update(1))
    while "keptset_reload v000001" not in engine.calls:
        await asyncio.sleep(0.01)
    task.cancel()
    engine.waits["keptset_reload v000001"].set()
    while state.weight_version != 1:
        await asyncio.sleep(0.01)
    assert engine.calls == whole(1)


@pytest.mark.parametrize("before", [None, 1])
async def test_a_failed_load_goes_back_to_the_previous_version(server, before):
    engine, state, updates = server
    if before is not None:
        await updates.update(before)
    engine.calls.clear()
    engine.fails["keptset_reload v000002"] = RuntimeError("out of memory")
    with pytest.raises(RequestError, match=r"out of memory.*runs again") as failed:
        await updates.update(2)
    assert failed.value.status == 500
    previous, name = ("model", "base") if before is None else ("v000001", "v000001")
    assert engine.calls == [
        "pause keep",
        "keptset_reload v000002",
        f"keptset_reload {previous}",
        f"name {name}",
        "resume",
    ]
    assert (state.weight_version, state.broken) == (before, None)
    del engine.fails["keptset_reload v000002"]
    await updates.update(2)
    assert state.weight_version == 2


async def test_a_failed_way_back_breaks_the_server(server):
    engine, state, updates = server
    engine.fails["keptset_reload v000002"] = RuntimeError("disk")
    engine.fails["keptset_reload model"] = RuntimeError("disk again")
    with pytest.raises(RequestError, match=r"disk.*disk again.*restart the server") as failed:
        await updates.update(2)
    assert failed.value.status == 503
    assert state.broken == str(failed.value)
    assert engine.calls[-1] == "pause abort", "what was running gets an answer"


async def test_a_version_that_was_published_anew_is_loaded_again(server):
    """A trainer that was started anew with other weights publishes them as version 0 once more."""
    engine, state, updates = server
    await updates.update(1)
    manifest = updates.root / "v000001" / "manifest.json"
    manifest.write_text(manifest.read_text() + "\n")
    await updates.update(1)
    assert engine.calls == whole(1) * 2
    await updates.update(1)
    assert engine.calls == whole(1) * 2
    shutil.rmtree(manifest.parent)  # pruned, as nobody needs it any more
    await updates.update(1)
    assert engine.calls == whole(1) * 2
    assert state.broken is None


async def test_a_pause_that_takes_too_long_leaves_the_previous_weights_serving(server):
    engine, state, updates = server
    await updates.update(1)
    updates.load_timeout = 0.9
    engine.waits["pause keep"] = asyncio.Event()
    with pytest.raises(RequestError, match=r"0\.9 s .*the engine to pause") as failed:
        await updates.update(2)
    assert failed.value.status == 504
    assert engine.calls[-1] == "resume"
    assert (state.weight_version, state.broken) == (1, None)
    engine.fails["resume"] = RuntimeError("gone")
    with pytest.raises(RequestError, match="restart the server"):
        await updates.update(2)
    assert state.broken is not None


@pytest.mark.parametrize(
    ("stuck", "waits_for"),
    [
        ("keptset_reload v000001", "every worker to load"),
        ("resume", "resume"),
    ],
)
async def test_a_load_that_takes_too_long_breaks_the_server_and_says_whom_it_waited_for(
    server, stuck, waits_for
):
    engine, state, updates = server
    updates.load_timeout = 0.9
    engine.waits[stuck] = asyncio.Event()
    with pytest.raises(RequestError, match=rf"0\.9 s \(inference\.load_timeout\).*{waits_for}"):
        await updates.update(1)
    assert state.broken is not None
    assert state.weight_version is None


async def test_without_a_directory_or_a_comparison_there_are_no_updates(server, tmp_path):
    engine, state, _ = server
    with pytest.raises(RequestError, match=r"inference\.weights_dir"):
        await WeightUpdates(engine, state, None, "no", 1.0).update(1)
    with pytest.raises(RequestError, match="cannot be compared"):
        await WeightUpdates(engine, state, tmp_path, "weights cannot be compared", 1.0).update(1)
    assert engine.calls == []
