"""The body of an error: the same from every service, whoever refuses."""

from typing import Any

from .texts import without_paths

UNROUTED = {404: "unknown_route", 405: "method_not_allowed"}
"""Codes of what no route takes."""

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    429: "rate_limit_error",
    503: "unavailable_error",
}


def error_type(status: int) -> str:
    """The family of an HTTP status, for programs that know vLLM's errors."""
    return _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")


def error_body(status: int, code: str, message: str) -> dict[str, Any]:
    """`{"error": {"message", "type", "code"}}`.

    Args:
        status: The HTTP status.
        code: Short and stable, for our own programs.
        message: Names the field, the value and the way out; paths of this machine are left out of it.
    """
    return {"error": {"message": without_paths(message), "type": error_type(status), "code": code}}
