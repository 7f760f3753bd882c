"""What no route takes, answered like every other error."""

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from keptset_guards import UNROUTED

from .errors import RequestError


class UnknownRoutes:
    """Answers what no route takes (404, 405) like every other error.

    Around the router and not a handler of the app: vLLM's app has copied its handlers already, and none of
    them is for what the router itself raises.
    """

    def __init__(self, router: ASGIApp) -> None:
        """Look at what the router raises."""
        self.router = router

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        try:
            await self.router(scope, receive, send)
        except HTTPException as error:
            code = UNROUTED.get(error.status_code)
            if code is None or scope["type"] != "http":
                raise
            said = f"{scope['method']} {scope['path']}: {error.detail}"
            answer = RequestError(said, error.status_code, code).response()
            answer.headers.update(error.headers or {})
            await answer(scope, receive, send)


__all__ = ["UnknownRoutes"]
