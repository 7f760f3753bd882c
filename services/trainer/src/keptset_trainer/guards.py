"""What every request passes before the ingest API looks at it."""

from fastapi import FastAPI

from keptset_guards import AccessGuard, BodyGuard, LoadGuard, Secret, Turns
from keptset_guards.asgi import App, Receive, Scope, Send
from keptset_settings import TrainerSettings

MAX_BODY_BYTES = 1 << 16
"""Of all requests but batches."""


def guarded(app: FastAPI, settings: TrainerSettings) -> App:
    """The application behind the internal token and the limits."""
    turns = Turns(settings.max_concurrent_requests, settings.max_requests_per_second)
    token = settings.internal_token
    secret = None if token is None else Secret("trainer.internal_token", token.get_secret_value())
    open_paths = ("/health", "/metrics") if settings.open_metrics else ("/health",)
    return AccessGuard(LoadGuard(SmallBodies(app), turns), secret, open_paths=open_paths)


class SmallBodies:
    """Bounds every body but that of a PUT, a batch, which its route streams into a file and bounds itself."""

    def __init__(self, app: App) -> None:
        self.batches, self.others = app, BodyGuard(app, MAX_BODY_BYTES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        chosen: App = self.batches if scope.get("method") == "PUT" else self.others
        await chosen(scope, receive, send)


__all__ = ["guarded"]
