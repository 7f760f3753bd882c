"""The ASGI types that are used here, and an error as an answer."""

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


async def refuse(
    send: Send, status: int, kind: str, code: str, message: str, headers: dict[str, str] | None = None
) -> None:
    """Answer `{"error": {"message", "type", "code"}}`."""
    error = {"message": message, "type": kind, "code": code}
    body = json.dumps({"error": error}, separators=(",", ":")).encode()
    everything = {"content-type": "application/json", "content-length": str(len(body)), **(headers or {})}
    pairs = [(name.encode("latin-1"), text.encode("latin-1")) for name, text in everything.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})


def path_of(scope: Scope) -> str:
    """The path below the application's root."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def header(scope: Scope, name: bytes) -> str:
    """The first header of this (lower case) name, or nothing."""
    return next((value.decode("latin-1") for key, value in scope["headers"] if key.lower() == name), "")
