"""What every request passes before the orchestrator's own routes answer."""

from fastapi import FastAPI

from keptset_guards import AccessGuard, BodyGuard, LoadGuard, Secret, Turns
from keptset_guards.asgi import App
from keptset_settings import OrchestratorSettings

MAX_CONCURRENT = 64
MAX_BODY_BYTES = 1 << 16
"""None of the routes reads a body."""


def guarded(app: FastAPI, settings: OrchestratorSettings) -> App:
    """The routes behind the internal token, if there is one."""
    token = settings.internal_token
    secret = None if token is None else Secret("orchestrator.internal_token", token.get_secret_value())
    open_paths = ("/health", "/metrics") if settings.open_metrics else ("/health",)
    limited = LoadGuard(BodyGuard(app, MAX_BODY_BYTES), Turns(MAX_CONCURRENT, None))
    return AccessGuard(limited, secret, open_paths=open_paths)


__all__ = ["guarded"]
