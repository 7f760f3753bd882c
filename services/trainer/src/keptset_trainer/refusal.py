"""A request that ends with an error answer."""

from typing import Any

from keptset_guards import error_body


class Refusal(Exception):
    """Ends a request with an error answer, and what else is told beside it."""

    def __init__(
        self, status: int, code: str, message: str, headers: dict[str, str] | None = None, **told: Any
    ) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers
        self.body = {**error_body(status, code, message), **told}
