"""The size of a body, and how long its sender may be silent in the middle of it."""

import asyncio

from .asgi import App, Message, Receive, Scope, Send, header, refuse

PATIENCE = 60.0
"""Seconds between two parts of a body."""


class BodyGuard:
    """Answers 413 to a body of more than `max_bytes`, 408 to one whose sender falls silent.

    The application never sees the rest of such a body: to it, the client has gone.
    """

    def __init__(self, app: App, max_bytes: int, patience: float = PATIENCE) -> None:
        """`patience` in seconds."""
        self.app, self.max_bytes, self.patience = app, max_bytes, patience

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        length = header(scope, b"content-length")
        if length.isdecimal() and int(length) > self.max_bytes:
            await self._too_large(receive, send)
            return
        body = _Body(receive, send, self.max_bytes, self.patience)
        try:
            await self.app(scope, body.receive, body.send)
        except Exception:
            if body.fault is None or body.answering:
                raise
        if body.fault is None or body.answering:
            return
        if body.fault == "large":
            await self._too_large(None if body.complete else receive, send)
        else:
            text = f"waited {self.patience:.0f} s for more of the body; send the request again"
            await refuse(receive, send, 408, "stalled_body", text)

    async def _too_large(self, receive: Receive | None, send: Send) -> None:
        text = f"the body is larger than {self.max_bytes} bytes; send less at a time"
        await refuse(receive, send, 413, "body_too_large", text)


class _Body:
    """One request's way in and out."""

    def __init__(self, receive: Receive, send: Send, max_bytes: int, patience: float) -> None:
        self._receive, self._send, self.left, self.patience = receive, send, max_bytes, patience
        self.complete = self.answering = False
        self.fault: str | None = None

    async def receive(self) -> Message:
        if self.fault is not None:
            return {"type": "http.disconnect"}
        if self.complete:
            return await self._receive()
        try:
            message = await asyncio.wait_for(self._receive(), self.patience)
        except TimeoutError:
            self.fault = "stalled"
            return {"type": "http.disconnect"}
        if message["type"] == "http.request":
            self.left -= len(message.get("body", b""))
            self.complete = not message.get("more_body", False)
        if self.left < 0:
            self.fault = "large"
            return {"type": "http.disconnect"}
        return message

    async def send(self, message: Message) -> None:
        if self.fault is None or self.answering:  # else the guard answers, not the application
            self.answering = True
            await self._send(message)
