"""Bearer tokens: which secret a path wants, and whether a request has it."""

import hashlib
import secrets
from collections.abc import Collection

from .asgi import App, Receive, Scope, Send, header, path_of, refuse


class Secret:
    """A token that requests must show; only its hash is kept.

    Args:
        setting: what holds it, for error texts: "inference.api_key".
        text: the token.
    """

    def __init__(self, setting: str, text: str) -> None:
        """Remember the hash."""
        self.setting = setting
        self._digest = hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()

    def is_shown_by(self, scope: Scope) -> bool:
        """Whether the request has `Authorization: Bearer <token>`; takes as long for any wrong one."""
        scheme, _, shown = header(scope, b"authorization").partition(" ")
        # Header values arrive as bytes, which ASGI servers and clients read as Latin-1.
        digest = hashlib.sha256(shown.strip().encode("latin-1")).digest()
        return secrets.compare_digest(digest, self._digest) and scheme.lower() == "bearer"


class AccessGuard:
    """Wants the right secret on every path that is not open, known or unknown, HTTP or WebSocket.

    Args:
        app: what is guarded.
        secret: wanted on every path; None: open, but for the internal ones.
        internal: wanted on the internal paths in place of `secret`; None: `secret` is.
        internal_paths: what only other services use; a path takes all below it with it.
        open_paths: need nothing, exactly as written.
    """

    def __init__(
        self,
        app: App,
        secret: Secret | None,
        internal: Secret | None = None,
        internal_paths: Collection[str] = (),
        open_paths: Collection[str] = ("/health",),
    ) -> None:
        """See the class."""
        self.app, self.secret, self.internal = app, secret, internal
        self.internal_paths, self.open_paths = tuple(internal_paths), frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        wanted = None if scope["type"] == "lifespan" else self.wanted_on(path_of(scope))
        if wanted is None or wanted.is_shown_by(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": "token missing or wrong"})
        else:
            text = f"{wanted.setting} is missing or wrong: send `Authorization: Bearer <{wanted.setting}>`"
            way = {"www-authenticate": "Bearer"}
            await refuse(receive, send, 401, "unauthorized", text, way)

    def wanted_on(self, path: str) -> Secret | None:
        """The secret that this path wants."""
        if path in self.open_paths:
            return None
        inside = any(path == inner or path.startswith(f"{inner}/") for inner in self.internal_paths)
        return self.internal if inside and self.internal is not None else self.secret
