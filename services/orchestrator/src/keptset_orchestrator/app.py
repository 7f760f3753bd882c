"""The orchestrator's own routes, for people: /health, /metrics (Prometheus) and /keptset/v1/status."""

import asyncio
import contextlib
import re
import socket
from collections.abc import AsyncIterator, Iterator
from importlib.metadata import version
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry, exposition
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.exceptions import HTTPException

from keptset_guards import UNROUTED, error_body
from keptset_guards.asgi import App

from .progress import Progress


def make_app(progress: Progress) -> FastAPI:
    """The routes, reading `progress`."""
    app = FastAPI(title="Keptset orchestrator", version=version("keptset-orchestrator"))
    registry = CollectorRegistry()

    @app.exception_handler(HTTPException)
    async def unrouted(request: Request, error: HTTPException) -> JSONResponse:
        code = UNROUTED.get(error.status_code, "invalid_request")
        said = error_body(error.status_code, code, f"{request.method} {request.url.path}: {error.detail}")
        return JSONResponse(said, error.status_code, error.headers)

    registry.register(_Collector(progress))

    @app.get("/health")
    async def health() -> Response:
        """200 while the run goes on, 503 once it has failed."""
        return Response(status_code=503 if progress.state == "failed" else 200)

    @app.get("/metrics")
    async def metrics() -> Response:
        """The last row of metrics.jsonl as gauges, and counters of requests."""
        return Response(exposition.generate_latest(registry), media_type=exposition.CONTENT_TYPE_LATEST)

    @app.get("/keptset/v1/status")
    async def status() -> dict[str, Any]:
        """What the run is doing."""
        return {
            "service": "orchestrator",
            "version": version("keptset-orchestrator"),
            "step": progress.step,
            "steps": progress.steps,
            "state": progress.state,
            "weight_version": progress.weight_version,
            "error": progress.error,
            "metrics": progress.row,
        }

    return app


class _Collector:
    """Reads the progress when it is scraped."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def collect(self) -> Iterator[Metric]:
        now = self._progress
        yield GaugeMetricFamily("keptset_orchestrator_step", "Step that is being done.", value=now.step)
        yield CounterMetricFamily("keptset_orchestrator_requests", "Rollout requests.", value=now.requests)
        yield CounterMetricFamily(
            "keptset_orchestrator_failed_requests", "Rollout requests that failed.", value=now.failed_requests
        )
        for name, value in now.row.items():
            if isinstance(value, int | float):
                yield GaugeMetricFamily(
                    "keptset_" + re.sub(r"[^a-zA-Z0-9_]", "_", name), f"{name} of the last step.", value=value
                )


class _Server(uvicorn.Server):
    """Leaves the signals to the run."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def serving(app: App, host: str, port: int) -> AsyncIterator[int]:
    """Serve while the body runs; yields the port (of 0, the one that was found).

    Raises:
        ValueError: the address cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        raise ValueError(f"orchestrator.host = {host!r}, port = {port}: {error.strerror or error}") from error
    server = _Server(uvicorn.Config(app, log_config=None, access_log=False, lifespan="off"))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        server.force_exit = True  # nobody's poll keeps a finished run alive
        await task
        listener.close()
