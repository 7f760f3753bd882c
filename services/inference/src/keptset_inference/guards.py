"""What every request passes before anything else looks at it: the API key, and whether the server may
answer.
"""

import hashlib
import secrets

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from .errors import RequestError
from .state import ServerState

OPEN_PATH = "/health"
"""The only path that needs no key."""
PATHS_WHEN_BROKEN = ("/health", "/metrics", "/keptset/v1/status")


class ApiKeyGuard:
    """Wants `Authorization: Bearer <key>` on every path but /health, known or unknown, HTTP or WebSocket."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        """`key` is compared by its hash, in constant time."""
        self.app = app
        self._digest = _digest(key)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] == "lifespan" or _path(scope) == OPEN_PATH or self._right(Headers(scope=scope)):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": "API key missing or wrong"})
        else:
            error = RequestError(
                "the API key is missing or wrong: send `Authorization: Bearer <inference.api_key>`",
                401,
                "unauthorized",
            )
            response = error.response()
            response.headers["WWW-Authenticate"] = "Bearer"
            await response(scope, receive, send)

    def _right(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        return secrets.compare_digest(_digest(key.strip()), self._digest) and scheme.lower() == "bearer"


class BrokenGuard:
    """Lets nothing through to an engine whose weights are unknown."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        """Look at `state.broken` on every request."""
        self.app, self.state = app, state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        broken = self.state.broken
        if broken is None or scope["type"] != "http" or _path(scope).rstrip("/") in PATHS_WHEN_BROKEN:
            await self.app(scope, receive, send)
        else:
            await RequestError(broken, 503, "broken").response()(scope, receive, send)


def _path(scope: Scope) -> str:
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


__all__ = ["ApiKeyGuard", "BrokenGuard"]
