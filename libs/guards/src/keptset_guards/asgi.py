"""The ASGI types that are used here, and an error as an answer."""

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any

from .errors import error_body

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

LINGER_SECONDS = 2.0
"""How long the rest of a refused body is read, to be thrown away."""


async def refuse(
    receive: Receive | None,
    send: Send,
    status: int,
    code: str,
    message: str,
    headers: dict[str, str] | None = None,
) -> None:
    """Answer an error to a request whose body was perhaps not read whole.

    The server must close such a connection (RFC 9112, section 9.3), and says so: a client that was not told
    may send its next request into it. It closes it only once the client has sent all or had time to read the
    answer (section 9.6): the system resets a connection that is closed with something unread in it, and the
    answer that is still on its way is lost.

    Args:
        receive: of the request; None if all of its body was read.
        send: of the request.
        status: of HTTP.
        code: for programs.
        message: for people.
        headers: more of them.
    """
    body = json.dumps(error_body(status, code, message), separators=(",", ":")).encode()
    everything = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
    everything |= headers or {}
    pairs = [(name.encode("latin-1"), text.encode("latin-1")) for name, text in everything.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": body, "more_body": True})
    if receive is not None:
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_SECONDS):
                while (await receive()).get("more_body"):
                    pass
    await send({"type": "http.response.body", "body": b""})


def path_of(scope: Scope) -> str:
    """The path below the application's root."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def header(scope: Scope, name: bytes) -> str:
    """The first header of this (lower case) name, or nothing."""
    return next((value.decode("latin-1") for key, value in scope["headers"] if key.lower() == name), "")
