"""The two kinds of errors that people see: a server that refuses to start, a request that is refused or
fails.
"""

from typing import Any

import msgspec
from fastapi import Response

from keptset_guards import error_body


class StartError(ValueError):
    """The server cannot start, or not go on; the text names the field, the value and the way out."""


class RequestError(ValueError):
    """A request that is refused or fails.

    Args:
        message: names the field, the position, the value and the way out.
        status: the HTTP status.
        code: short and stable, for programs.
        retry_after: seconds after which the same may be asked again.
    """

    def __init__(
        self,
        message: str,
        status: int = 400,
        code: str = "invalid_request",
        retry_after: int | None = None,
    ) -> None:
        """Remember what is answered."""
        super().__init__(message)
        self.status = status
        self.code = code
        self.retry_after = retry_after

    def body(self) -> dict[str, Any]:
        """`{"error": {"message", "type", "code"}}`."""
        return error_body(self.status, self.code, str(self))

    def response(self) -> Response:
        """As an HTTP answer."""
        response = json_response(self.body(), self.status)
        if self.retry_after is not None:
            response.headers["Retry-After"] = str(self.retry_after)
        return response


def json_response(body: Any, status: int = 200) -> Response:
    """Compact JSON (no space after `:` and `,`)."""
    return Response(msgspec.json.encode(body), status, media_type="application/json")


__all__ = ["RequestError", "StartError", "json_response"]
