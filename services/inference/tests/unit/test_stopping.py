"""A server that is asked to stop: what it has begun ends whole, nothing else begins, and all are told."""

import asyncio
import logging
import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace

import httpx
import pytest
import zmq
import zmq.asyncio
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from vllm.v1.engine import async_llm
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.engine.core_client import AsyncMPClient, BackgroundResources
from vllm.v1.engine.exceptions import EngineDeadError

from keptset_inference import guards
from keptset_inference.guards import TURNS
from keptset_inference.state import ServerState
from keptset_inference.stopping import LAST_SECONDS, end_requests, requests_end_first
from keptset_settings import InferenceSettings

from .facts import facts
from .test_answers import output
from .test_app import app as served_app
from .test_app import call
from .test_guards import ask
from .test_route import CUT, Engine, events, piece, whole
from .test_route import ask as generate

GENERATE = "/inference/v1/generate"


class Stopped:
    """An engine that is told to abort and to shut down, and when."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.aborted = asyncio.Event()
        self.output_handler: asyncio.Task[None] | None = None
        self.errors: list[Exception] = []
        self.output_processor = SimpleNamespace(propagate_error=self.errors.append)

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self.calls.append(f"pause {mode}")
        self.aborted.set()

    def shutdown(self, timeout: float | None = None) -> None:
        assert threading.current_thread() is not threading.main_thread()
        self.calls.append(f"shutdown {timeout:.0f}")


class Held:
    """An application whose answers are held until they are let go, behind all guards."""

    def __init__(self, **settings) -> None:
        self.state, self.engine, self.go_on = ServerState(facts()), Stopped(), asyncio.Event()
        inner = FastAPI()

        @inner.post("/stream")
        async def stream() -> StreamingResponse:
            return StreamingResponse(self.parts())

        @inner.post("/{path:path}")
        async def held(path: str) -> str:
            await self.go_on.wait()
            return "whole"

        self.app = guards.guarded(inner, self.state, InferenceSettings(model="m", **settings))

    async def parts(self):
        yield "first"
        waiting = [asyncio.create_task(event.wait()) for event in (self.go_on, self.engine.aborted)]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        yield " and last" if self.go_on.is_set() else " and an error"

    async def begin(self, *paths: str) -> list[asyncio.Task[httpx.Response]]:
        """Requests that are in work."""
        asking = [asyncio.create_task(ask(self.app, "POST", path)) for path in paths]
        await until(lambda: len(self.state.unanswered) + len(self.state.answering) == len(paths))
        return asking


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


def told(answer: httpx.Response) -> bool:
    """Whether it says that the server stops, and when to ask again."""
    code = answer.json()["error"]["code"]
    return (answer.status_code, code) == (503, "stopping") and int(answer.headers["retry-after"]) > 0


async def test_only_what_says_how_the_server_is_is_answered():
    held = Held()
    held.go_on.set()
    held.state.stopping = True
    for path in (GENERATE, "/v1/completions", "/v1/models", "/ping", "/nothing", *TURNS):
        assert told(await ask(held.app, "POST", path)), path
    for path in ("/health", "/metrics", "/keptset/v1/status"):
        assert (await ask(held.app, "POST", path)).status_code == 200


async def test_who_shows_no_key_is_not_even_told():
    held = Held(api_key="key")
    held.state.stopping = True
    assert (await ask(held.app, "POST", GENERATE)).status_code == 401
    assert told(await ask(held.app, "POST", GENERATE, "Bearer key"))


async def test_a_websocket_is_closed_with_the_reason():
    held = Held()
    held.state.stopping = True
    sent = []

    async def send(message: dict) -> None:
        sent.append(message)

    await held.app({"type": "websocket", "path": "/v1/realtime", "headers": []}, None, send)
    assert [message["type"] for message in sent] == ["websocket.close"]
    assert (sent[0]["code"], sent[0]["reason"]) == (1012, "the server is stopping")


async def test_a_full_server_that_stops_says_that_it_stops():
    held = Held(max_concurrent_requests=1)
    (begun,) = await held.begin(GENERATE)
    assert (await ask(held.app, "POST", GENERATE)).status_code == 429
    held.state.stopping = True
    assert told(await ask(held.app, "POST", GENERATE))
    held.go_on.set()
    assert (await begun).json() == "whole"


async def test_the_engine_is_told_once_what_runs_has_ended():
    held = Held()
    asking = await held.begin(GENERATE, "/v1/completions", "/keptset/v1/weights", "/stream")
    server = SimpleNamespace(config=SimpleNamespace(timeout_graceful_shutdown=5))
    with requests_end_first(held.engine, held.state, lambda: server):
        stopping = asyncio.create_task(asyncio.to_thread(held.engine.shutdown, timeout=300))
        await until(lambda: held.state.stopping)
        assert told(await ask(held.app, "POST", GENERATE))
        assert held.engine.calls == []
        held.go_on.set()
        await stopping
    assert [(await answer).text for answer in asking] == ['"whole"'] * 3 + ["first and last"]
    (call,) = held.engine.calls
    assert call.startswith("shutdown")
    assert 200 < server.config.timeout_graceful_shutdown <= 300, "what is left is for slow clients"
    assert "shutdown" not in vars(held.engine), "as it was before"


@pytest.mark.parametrize("seconds", [0, 0.3])
async def test_what_does_not_end_in_time_is_told_so(seconds):
    held = Held()
    *asking, stream = await held.begin(GENERATE, "/v1/completions", "/keptset/v1/weights", "/stream")
    server = SimpleNamespace(config=SimpleNamespace(timeout_graceful_shutdown=5))
    with requests_end_first(held.engine, held.state, lambda: server):
        await asyncio.to_thread(held.engine.shutdown, timeout=seconds)
    assert all([told(await answer) for answer in asking])
    assert (await stream).text == "first and an error"
    assert held.engine.calls == ["pause abort", f"shutdown {LAST_SECONDS:.0f}"]
    assert server.config.timeout_graceful_shutdown == LAST_SECONDS


async def test_an_engine_that_takes_all_the_time_leaves_clients_the_last_seconds():
    """The two come one after the other: with all the time each, whoever stops the server kills it first."""
    held = Held()
    server = SimpleNamespace(config=SimpleNamespace(timeout_graceful_shutdown=5))

    def slow(engine: Stopped, timeout: float) -> None:
        assert timeout > LAST_SECONDS
        clock.now += timeout

    clock = SimpleNamespace(now=100.0)
    clock.monotonic = lambda: clock.now
    with (
        pytest.MonkeyPatch.context() as patch,
        requests_end_first(held.engine, held.state, lambda: server),
    ):
        patch.setattr("keptset_inference.stopping.time", clock)
        patch.setattr(Stopped, "shutdown", slow)
        await asyncio.to_thread(held.engine.shutdown, timeout=300)
    assert clock.now == 400
    assert server.config.timeout_graceful_shutdown == LAST_SECONDS


async def test_an_engine_that_aborts_nothing_is_not_waited_for(monkeypatch):
    monkeypatch.setattr("keptset_inference.stopping.CUT_SECONDS", 0.2)
    held = Held()

    async def hangs(*, mode: str, clear_cache: bool) -> None:
        await asyncio.Event().wait()

    held.engine.pause_generation = hangs
    asking, stream = await held.begin(GENERATE, "/stream")
    async with asyncio.timeout(60):
        await end_requests(held.engine, held.state, 0)
    assert told(await asking)
    held.go_on.set()
    await stream


async def test_whoever_waits_for_a_turn_on_the_gpu_is_told_at_once():
    held = Held()
    *turns, begun = await held.begin("/keptset/v1/sleep", "/keptset/v1/wake", GENERATE)
    ending = asyncio.create_task(end_requests(held.engine, held.state, 300))
    assert all([told(await answer) for answer in turns])
    assert not ending.done()
    held.go_on.set()
    await ending
    assert (await begun).json() == "whole"


async def test_a_client_that_leaves_is_not_waited_for():
    held = Held()
    (begun,) = await held.begin(GENERATE)
    begun.cancel()
    with pytest.raises(asyncio.CancelledError):
        await begun
    async with asyncio.timeout(60):
        await end_requests(held.engine, held.state, 300)
    assert held.engine.calls == []


@pytest.mark.parametrize("stream", [False, True])
async def test_what_the_engine_aborts_as_the_server_ends_is_no_answer(stream):
    rejected = output(tokens=[], sets=None, values=(), finish_reason="abort")
    stopping = ServerState(facts(), stopping=True)
    assert told(await generate(Engine(whole(rejected)), CUT | {"stream": stream}, stopping))
    broken = ServerState(facts(), broken="half-loaded")
    answer = await generate(Engine(whole(rejected)), CUT | {"stream": stream}, broken)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "broken")


@pytest.mark.parametrize("end", [EngineDeadError(), whole(piece(1, finish_reason="abort"))])
async def test_a_stream_that_is_cut_off_says_why(end):
    state = ServerState(facts(), stopping=True)
    engine = Engine(whole(piece(0), finished=False), end)
    first, error = events(await generate(engine, CUT | {"stream": True}, state))
    assert first["choices"][0]["finish_reason"] is None
    assert error["error"]["code"] == "stopping"


async def test_health_and_status_say_so():
    async def lives() -> None:
        return None

    served = served_app(check_health=lives)
    assert (await call(served, "GET", "/keptset/v1/status")).json()["stopping"] is False
    served.state.keptset.stopping = True
    assert told(await call(served, "GET", "/health"))
    assert (await call(served, "GET", "/keptset/v1/status")).json()["stopping"] is True


class Listening:
    """VLLM's own client and handler of outputs, with everything but the engine's process."""

    def __init__(self) -> None:
        context, self.errors, self.processes = zmq.asyncio.Context(), [], []
        self.outputs, receiving = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        receiving.bind("inproc://outputs")
        self.outputs.connect("inproc://outputs")
        client = object.__new__(AsyncMPClient)
        manager = SimpleNamespace(shutdown=lambda timeout: self.processes.append(timeout))
        client.resources = BackgroundResources(context, engine_manager=manager, output_socket=receiving)
        client._finalizer = weakref.finalize(client, client.resources)
        client.decoder, client.utility_results, client.outputs_queue = None, {}, asyncio.Queue()
        self.engine = engine = object.__new__(AsyncLLM)
        engine.engine_core, engine.output_handler = client, None
        engine.output_processor = SimpleNamespace(propagate_error=self.errors.append)
        engine.log_stats, engine.logger_manager = False, None
        engine.renderer = SimpleNamespace(mm_processor_cache=None, shutdown=lambda: None)
        engine._run_output_handler()
        self.handler = engine.output_handler
        self.reported: list[str] = []
        self.log = logging.Handler(logging.WARNING)
        self.log.emit = lambda record: self.reported.append(record.getMessage())
        async_llm.logger.addHandler(self.log)


@pytest.fixture
async def listening():
    there = Listening()
    await asyncio.sleep(0)  # the handler listens
    yield there
    there.outputs.close(linger=0)
    async_llm.logger.removeHandler(there.log)


async def test_an_engine_that_ends_as_told_is_not_reported_as_dead(listening, monkeypatch):
    """VLLM closes what its handler listens to before it cancels the handler. Here the loop is always quicker
    than the thread that does both.
    """
    loop, cancel = asyncio.get_running_loop(), async_llm.cancel_task_threadsafe

    async def settle() -> None:
        resources = listening.engine.engine_core.resources
        await until(lambda: resources.output_queue_task.done() and listening.handler.done())

    def late(task: asyncio.Task) -> None:
        asyncio.run_coroutine_threadsafe(settle(), loop).result(60)
        cancel(task)

    monkeypatch.setattr(async_llm, "cancel_task_threadsafe", late)
    server = SimpleNamespace(config=SimpleNamespace(timeout_graceful_shutdown=5))
    with requests_end_first(listening.engine, ServerState(facts()), lambda: server):
        await asyncio.to_thread(listening.engine.shutdown, timeout=300)
    assert listening.processes, "the engine was told"
    assert listening.reported == []
    await until(lambda: listening.errors)  # whoever still waits for the engine hears of it
    assert isinstance(listening.errors[0], EngineDeadError)


async def test_an_engine_that_dies_untold_is_reported(listening):
    await listening.outputs.send(EngineCoreProc.ENGINE_CORE_DEAD)
    await until(listening.handler.done)
    assert listening.engine.errored, "what vLLM's launcher looks at, and then ends the server"
    assert listening.reported == ["AsyncLLM output_handler failed."]
    assert isinstance(listening.errors[0], EngineDeadError)
