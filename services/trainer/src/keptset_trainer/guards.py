"""What every request passes before the ingest API looks at it."""

import asyncio

from fastapi import FastAPI

from keptset_guards import AccessGuard, BodyGuard, LoadGuard, Secret, Turns
from keptset_guards.asgi import App, Message, Receive, Scope, Send, refuse
from keptset_settings import TrainerSettings

MAX_BODY_BYTES = 1 << 16
"""Of all requests but batches."""
RETRY_SECONDS = 5
"""After which a trainer that was stopped may be asked again."""


def guarded(app: FastAPI, settings: TrainerSettings) -> App:
    """The application behind the internal token and the limits."""
    turns = Turns(settings.max_concurrent_requests, settings.max_requests_per_second)
    token = settings.internal_token
    secret = None if token is None else Secret("trainer.internal_token", token.get_secret_value())
    open_paths = ("/health", "/metrics") if settings.open_metrics else ("/health",)
    return EndGuard(AccessGuard(LoadGuard(SmallBodies(app), turns), secret, open_paths=open_paths))


class EndGuard:
    """Tells those that the end of the server leaves without an answer. Uvicorn cancels them some seconds
    after it was told to stop, and would answer a fault (500).
    """

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        begun = False

        async def sent(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self.app(scope, receive, sent)
        except asyncio.CancelledError:
            if begun or scope["type"] != "http":
                raise
            text = "the trainer is stopping; send this again when it is back"
            await refuse(None, send, 503, "stopping", text, {"retry-after": str(RETRY_SECONDS)})


class SmallBodies:
    """Bounds every body but that of a PUT, a batch, which its route streams into a file and bounds itself."""

    def __init__(self, app: App) -> None:
        self.batches, self.others = app, BodyGuard(app, MAX_BODY_BYTES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        chosen: App = self.batches if scope.get("method") == "PUT" else self.others
        await chosen(scope, receive, send)


__all__ = ["guarded"]
