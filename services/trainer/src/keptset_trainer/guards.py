"""What every request passes before the ingest API looks at it."""

from fastapi import FastAPI

from keptset_guards import AccessGuard, LoadGuard, Secret, Turns
from keptset_guards.asgi import App
from keptset_settings import TrainerSettings


def guarded(app: FastAPI, settings: TrainerSettings) -> App:
    """The application behind the internal token and the limits; the size of a batch is the route's affair."""
    turns = Turns(settings.max_concurrent_requests, settings.max_requests_per_second)
    token = settings.internal_token
    secret = None if token is None else Secret("trainer.internal_token", token.get_secret_value())
    open_paths = ("/health", "/metrics") if settings.open_metrics else ("/health",)
    return AccessGuard(LoadGuard(app, turns), secret, open_paths=open_paths)


__all__ = ["guarded"]
