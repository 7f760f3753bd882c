"""The two kinds of errors that people see: a server that refuses to start, a request that is refused or
fails.
"""

from typing import Any

import msgspec
from fastapi import Response

from keptset_guards import without_paths


class StartError(ValueError):
    """The server cannot start, or not go on; the text names the field, the value and the way out."""


class RequestError(ValueError):
    """A request that is refused or fails.

    Args:
        message: names the field, the position, the value and the way out.
        status: the HTTP status.
        code: short and stable, for programs.
    """

    def __init__(self, message: str, status: int = 400, code: str = "invalid_request") -> None:
        """Remember what is answered."""
        super().__init__(message)
        self.status = status
        self.code = code

    def body(self) -> dict[str, Any]:
        """`{"error": {"message", "type", "code"}}`."""
        return {
            "error": {"message": without_paths(str(self)), "type": error_type(self.status), "code": self.code}
        }

    def response(self) -> Response:
        """As an HTTP answer."""
        return json_response(self.body(), self.status)


def error_type(status: int) -> str:
    """The family of an HTTP status."""
    known = {
        401: "authentication_error",
        404: "not_found_error",
        409: "conflict_error",
        503: "unavailable_error",
    }
    return known.get(status, "invalid_request_error" if status < 500 else "server_error")


def json_response(body: Any, status: int = 200) -> Response:
    """Compact JSON (no space after `:` and `,`)."""
    return Response(msgspec.json.encode(body), status, media_type="application/json")


__all__ = ["RequestError", "StartError", "error_type", "json_response"]
