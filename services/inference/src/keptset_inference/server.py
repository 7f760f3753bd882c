"""The server: vLLM's own app with our routes in front, on vLLM's own HTTP launcher."""

import asyncio
import socket
from argparse import Namespace

from fastapi import FastAPI
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.entrypoints.launchers.launcher import create_server_socket, serve_http
from vllm.logger import configure_logging_if_needed, init_logger
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.system_utils import set_ulimit
from vllm.v1.engine.async_llm import AsyncLLM

from keptset_guards import GpuTurn
from keptset_settings import InferenceSettings

from . import status
from .arguments import engine_arguments, frees_memory
from .capture.flag import WIDTH
from .capture_choice import Choice, Kind
from .engine import running_engine
from .errors import StartError
from .generate import route as generate_route
from .guards import guarded
from .proof import prove_capture
from .sleep import route as sleep_route
from .sleep.sleeper import Sleeper
from .sleep.waking import turn_on_gpu
from .state import EngineFacts, ServerState
from .stopping import requests_end_first
from .unknown_routes import UnknownRoutes
from .weights import route as weights_route
from .weights.running_model import RunningModel, running_model
from .weights.update import WeightUpdates
from .workers import WholeEngine

logger = init_logger("vllm.keptset")

CLOSED_PATHS = ("/scale_elastic_ep", "/is_scaling_elastic_ep")
"""vLLM's routes for operators that we do not serve: ranks that they start would be unproven."""


START_PATIENCE = 7200.0
"""Seconds that the trainer may have the GPU when this server starts: it may be in the middle of a step."""


async def serve(settings: InferenceSettings, capture: Choice | None) -> None:
    """Start the engine, prove it, serve until a signal comes or the engine dies.

    Raises:
        StartError: the text says what is wrong and the way out.
    """
    arguments = engine_arguments(settings)
    # vLLM does so as it makes its configuration: whom we wait for until then would be said to nobody.
    configure_logging_if_needed(arguments.create_logging_config())
    if capture is not None:
        logger.info("kept sets: capture %s (%s)", capture.kind, capture.reason)
    kind = None if capture is None else capture.kind
    with _bound_socket(settings.host, settings.port) as listener:
        turn = await _first_turn(settings)
        async with running_engine(
            arguments,
            capture=kind,
            mask_padded_ids=settings.mask_padded_ids,
            weights_change=_weights_change(settings),
        ) as engine:
            facts = engine_facts(settings, engine.vllm_config, capture=kind)
            app = await build(settings, arguments, engine, facts, turn)
            if turn is not None:
                sleeper: Sleeper = app.state.keptset_sleeper
                await sleeper.sleep()  # the trainer may be waiting; whoever samples wakes it
            logger.info(
                "kept sets: capture %s; weights: %s; listening on http://%s:%d",
                {None: "is off", "v1": f"v1 is on, {WIDTH} ids wide", "native": "native is on"}[kind],
                settings.weights_dir or "no updates",
                settings.host,
                listener.getsockname()[1],
            )
            # vLLM's launcher, not uvicorn's own: that one re-raises SIGTERM before the engine is shut down
            # and orphans its processes. This one shuts the engine down first, and also stops when the engine
            # is dead.
            # It returns what is left to be awaited.
            state: ServerState = app.state.keptset
            with requests_end_first(engine, state, lambda: app.state.server):
                closing = await serve_http(
                    app,
                    sock=listener,
                    host=settings.host,
                    port=listener.getsockname()[1],
                    log_level="warning",
                    access_log=False,
                    timeout_graceful_shutdown=5,
                )
        await closing
        if not state.stopping:
            raise StartError("the engine died while it served; its log is above")


def engine_facts(settings: InferenceSettings, config: VllmConfig, *, capture: Kind | None) -> EngineFacts:
    """What the routes need to know about the engine."""
    model = config.model_config
    names = model.served_model_name
    assert settings.model is not None
    return EngineFacts(
        model=settings.model,
        served_names=tuple([names] if isinstance(names, str) else names),
        vocab_size=model.get_vocab_size(),
        max_model_len=model.max_model_len,
        width={None: None, "v1": WIDTH, "native": model.get_vocab_size()}[capture],
        capture=capture,
        tokenizer=not model.skip_tokenizer_init,
        watermarking=config.watermark_config is not None,
        takes_transfers=settings.weights_transfer == "nccl",
        shares_gpu=settings.gpu_lock is not None,
        frees_memory=frees_memory(),
        workers=config.parallel_config.world_size * config.parallel_config.data_parallel_size,
    )


async def build(
    settings: InferenceSettings,
    arguments: AsyncEngineArgs,
    engine: AsyncLLM,
    facts: EngineFacts,
    turn: GpuTurn | None = None,
) -> FastAPI:
    """VLLM's app, ours in front, the guards around it."""
    tasks = await engine.get_supported_tasks()
    if "generate" not in tasks:
        raise StartError(f"inference.model = {settings.model}: it does not generate text (vLLM says {tasks})")
    args = frontend_arguments(settings, arguments)
    app = build_app(args, tasks, engine.model_config)
    await init_app_state(engine, app.state, args, tasks)
    state = ServerState(facts, settings.kept_tokens_format)
    app.state.keptset = state
    app.state.keptset_updates = WeightUpdates(
        WholeEngine(engine),
        state,
        settings.weights_dir,
        _model_of(settings, arguments),
        settings.load_timeout,
    )

    async def prove() -> None:
        if facts.capture is not None:
            await prove_capture(engine, facts.capture)

    app.state.keptset_sleeper = Sleeper(
        engine, state, app.state.keptset_updates, turn, prove, settings.load_timeout
    )
    put_in_front(app)
    # vLLM's app has built its stack already, and what guards every route belongs outside of all of it.
    app.middleware_stack = guarded(app.middleware_stack or app.build_middleware_stack(), state, settings)
    return app


def put_in_front(app: FastAPI) -> None:
    """Replace vLLM's routes of the same paths by ours, and take away those that are not served."""
    ours = FastAPI()
    for router in (generate_route.router, weights_route.router, sleep_route.router, status.router):
        ours.include_router(router)
    routes = [route for route in ours.router.routes if getattr(route, "tags", None) == ["keptset"]]
    replaced = {*(route.path for route in routes), *CLOSED_PATHS}
    theirs = [route for route in app.router.routes if getattr(route, "path", None) not in replaced]
    app.router.routes[:] = [*routes, *theirs]
    app.router.middleware_stack = UnknownRoutes(app.router.middleware_stack)


def frontend_arguments(settings: InferenceSettings, arguments: AsyncEngineArgs) -> Namespace:
    """What vLLM's app wants to know: its own defaults, and our engine arguments."""
    args = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    for name, value in vars(arguments).items():
        if hasattr(args, name):
            setattr(args, name, value)
    args.host, args.port, args.api_key = settings.host, settings.port, None
    names = arguments.served_model_name
    args.served_model_name = [names] if isinstance(names, str) else names
    return args


def _weights_change(settings: InferenceSettings) -> bool:
    return settings.weights_dir is not None or settings.weights_transfer == "nccl"


def _model_of(settings: InferenceSettings, arguments: AsyncEngineArgs) -> RunningModel | str:
    if not _weights_change(settings):
        return "no weights_dir"
    assert settings.model is not None
    try:
        return running_model(settings.model, arguments.revision)
    except ValueError as error:
        raise StartError(f"weights are to be updated, but {error}") from error


async def _first_turn(settings: InferenceSettings) -> GpuTurn | None:
    """The GPU, before the engine measures how much of it is free; None if nobody else uses it."""
    if settings.gpu_lock is None:
        return None
    if not frees_memory():
        logger.warning(
            "inference.gpu_lock: without CUDA vLLM frees no memory when it sleeps: the engine merely pauses"
        )
    try:
        turn = GpuTurn(settings.gpu_lock, "an inference server", shared=True)
    except ValueError as error:
        raise StartError(f"inference.{error}") from error
    try:
        async with asyncio.timeout(START_PATIENCE):
            await turn_on_gpu(turn)
    except TimeoutError:
        raise StartError(
            f"waited {START_PATIENCE:.0f} s for the GPU, which {turn.holder()} has ({settings.gpu_lock})"
        ) from None
    return turn


def _bound_socket(host: str, port: int) -> socket.socket:
    """Taken before the engine starts, so that a port in use is known at once; not listening yet."""
    set_ulimit()
    try:
        return create_server_socket((host, port), reuse_port=False)
    except OSError as error:
        raise StartError(
            f"inference.host, inference.port: cannot listen on {host}:{port}: {error}"
        ) from error


__all__ = ["build", "engine_facts", "frontend_arguments", "put_in_front", "serve"]
