"""What every request passes before anything else looks at it: secrets, whether the server stops, load, size,
and whether it may answer and is awake.
"""

from starlette.types import ASGIApp, Receive, Scope, Send

from keptset_guards import AccessGuard, BodyGuard, LoadGuard, Secret, Turns
from keptset_settings import InferenceSettings

from .errors import RequestError
from .state import ServerState, asleep
from .stopping import StoppingGuard

TURNS = ("/keptset/v1/weights", "/keptset/v1/sleep", "/keptset/v1/wake")
VLLMS_OWN = (
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/start_profile",
    "/stop_profile",
    "/scale_elastic_ep",
    "/fault_tolerance",
)
"""Routes of vLLM that change the server and not only answer; not there unless vLLM is told to open them."""
INTERNAL_PATHS = (*TURNS, *VLLMS_OWN, "/metrics")
"""What only the other services, Prometheus and who runs it use."""
EXEMPT_FROM_LOAD = ("/health", *TURNS)
"""A server that is full is no less healthy, and new weights must not wait for room."""
ALWAYS_ANSWERED = ("/health", "/metrics", "/keptset/v1/status")
"""Also by a server that is broken or stops: they say so."""
PATHS_WHEN_ASLEEP = (*ALWAYS_ANSWERED, *TURNS, "/v1/models", "/version", "/tokenize", "/detokenize")
"""What needs no engine. Everything else, vLLM's own routes too, would wait in its queue for it to wake."""


def guarded(app: ASGIApp, state: ServerState, settings: InferenceSettings) -> ASGIApp:
    """The application behind all guards; who shows no secret learns nothing of the others."""
    stack: ASGIApp = BodyGuard(BrokenGuard(AsleepGuard(app, state), state), settings.max_body_bytes)
    turns = Turns(settings.max_concurrent_requests, settings.max_requests_per_second)
    # Outside of the limit on load: a server that is full of what is to end has no turn to offer in a second.
    stack = StoppingGuard(LoadGuard(stack, turns, EXEMPT_FROM_LOAD), state, ALWAYS_ANSWERED)
    key, token = settings.api_key, settings.internal_token
    return AccessGuard(
        stack,
        None if key is None else Secret("inference.api_key", key.get_secret_value()),
        None if token is None else Secret("inference.internal_token", token.get_secret_value()),
        INTERNAL_PATHS,
        ("/health", "/metrics") if settings.open_metrics else ("/health",),
    )


class BrokenGuard:
    """Lets nothing through to an engine whose weights are unknown."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        """Look at `state.broken` on every request."""
        self.app, self.state = app, state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        broken = self.state.broken
        if broken is None or scope["type"] != "http" or _path(scope).rstrip("/") in ALWAYS_ANSWERED:
            await self.app(scope, receive, send)
        else:
            await RequestError(broken, 503, "broken").response()(scope, receive, send)


class AsleepGuard:
    """Lets nothing through to an engine that sleeps, and counts what it let through before."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        """Look at `state.phase` on every request; keep `state.in_work`."""
        self.app, self.state = app, state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        state = self.state
        if scope["type"] != "http" or _path(scope).rstrip("/") in PATHS_WHEN_ASLEEP:
            await self.app(scope, receive, send)
        elif state.phase != "awake":
            await asleep(state.phase).response()(scope, receive, send)
        else:
            state.in_work += 1
            try:
                await self.app(scope, receive, send)
            finally:
                state.in_work -= 1


def _path(scope: Scope) -> str:
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


__all__ = ["AsleepGuard", "BrokenGuard", "guarded"]
