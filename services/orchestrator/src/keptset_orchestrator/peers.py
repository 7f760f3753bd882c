"""One other service over HTTP: what its answers and its silence mean, and waiting for its health."""

import asyncio
import json
import time
from collections.abc import Collection
from typing import Any

import httpx

from .errors import PeerRefusedError, PeerUnavailableError

HEALTH_SECONDS = 5.0
"""One question for health or status; a server that needs longer is not well."""
LAST_SECONDS = 1.0
"""The last question for health, whatever is left of the wait."""


MOST_ANSWER_BYTES = 1 << 30
"""Of one answer; a server that sends for ever fills no memory."""

FRAMING = (b"content-encoding", b"content-length", b"transfer-encoding")
"""Headers that say how a body came, which is whole and plain when it is here."""

MOST_PAUSE_SECONDS = 60.0
"""However long a peer asks to wait."""


class TransientError(Exception):
    """An attempt failed in a way that another attempt may not: no connection, a time-out, a 5xx, a 429.

    Attributes:
        lost: the peer itself may be gone (no connection, 503), so ask for its health before the next attempt.
        pause: seconds that the peer asks to wait before the next attempt (429 with Retry-After).
        code: what one of our programs calls a 429.
    """

    def __init__(self, text: str, *, lost: bool, pause: float = 0.0, code: str | None = None) -> None:
        """`text` names the peer and the request."""
        super().__init__(text)
        self.lost = lost
        self.pause = pause
        self.code = code


class Peer:
    """A service at a base URL.

    Args:
        kind: What people call it, "inference server" or "trainer".
        url: Base URL.
        client: Shared by all peers.
        headers: Sent with every request.
    """

    health_path = "/health"

    def __init__(
        self, kind: str, url: str, client: httpx.AsyncClient, headers: dict[str, str] | None = None
    ) -> None:
        self.url = url.rstrip("/")
        self.name = f"{kind} {self.url}"
        self._client = client
        self._headers = headers or {}

    async def call(
        self,
        method: str,
        path: str,
        *,
        seconds: float,
        what: str,
        also: Collection[int] = (),
        headers: dict[str, str] | None = None,
        **content: Any,
    ) -> httpx.Response:
        """One request, answered within `seconds` from the connection to the last byte.

        Args:
            method: HTTP method.
            path: Below the base URL.
            seconds: The bound.
            what: Names the request in errors.
            also: Status codes of 400 and above that the caller wants to see itself.
            headers: Further headers.
            **content: `json=` or `content=`, as httpx takes them.

        Raises:
            TransientError: no connection, a time-out, a 5xx, a 429, or an answer that does not end.
            PeerRefusedError: another 4xx, with the peer's own words.
        """
        try:
            async with asyncio.timeout(seconds):
                request = self._client.build_request(
                    method, self.url + path, headers={**self._headers, **(headers or {})}, **content
                )
                response = await self._receive(request, what)
        except (TimeoutError, httpx.TimeoutException) as error:
            raise TransientError(
                f"{self.name}: {what}: no answer within {seconds:g} s", lost=False
            ) from error
        except httpx.TransportError as error:
            reason = str(error) or type(error).__name__
            raise TransientError(f"{self.name}: {what}: connection failed ({reason})", lost=True) from error
        except httpx.DecodingError as error:
            raise self.unreadable(what, str(error)) from error
        except httpx.InvalidURL as error:
            raise PeerRefusedError(f"{self.name}: not a URL ({error})") from error
        status = response.status_code
        if status < 400 or status in also:
            return response
        said = error_text(response)
        text = f"{self.name}: {what}: {status} {said}"
        if status == 429:  # the one 4xx that is about the moment, not about the request
            asked = response.headers.get("retry-after", "")
            pause = min(MOST_PAUSE_SECONDS, float(asked)) if asked.isdecimal() else 1.0
            raise TransientError(text, lost=False, pause=pause, code=error_code(response))
        if status < 500:
            raise PeerRefusedError(text, said)
        raise TransientError(text, lost=status == 503)

    def unreadable(self, what: str, why: str) -> TransientError:
        """What to raise for an answer that is not of the form that was asked for. It says nothing of what was
        computed, so the request may be sent again, to another server if there is one.
        """
        return TransientError(f"{self.name}: {what}: the answer cannot be read: {why}", lost=False)

    async def _receive(self, request: httpx.Request, what: str) -> httpx.Response:
        """The whole answer, of at most MOST_ANSWER_BYTES."""
        response = await self._client.send(request, stream=True)
        try:
            content = bytearray()
            async for chunk in response.aiter_bytes():
                content += chunk
                if len(content) > MOST_ANSWER_BYTES:
                    why = (
                        f"it is larger than {MOST_ANSWER_BYTES} bytes; ask for less at a time "
                        "(group_size, max_tokens)"
                    )
                    raise self.unreadable(what, why)
        finally:
            await response.aclose()
        headers = [(name, value) for name, value in response.headers.raw if name.lower() not in FRAMING]
        return httpx.Response(response.status_code, headers=headers, content=bytes(content), request=request)

    async def wait_healthy(self, seconds: float) -> None:
        """Return once its health answers 200.

        Raises:
            PeerUnavailableError: it did not within `seconds`, the last question LAST_SECONDS longer at most;
                the text has the last answer.
            PeerRefusedError: /health answers 4xx: whatever listens there, it is no Keptset service.
        """
        deadline = time.monotonic() + seconds
        pause = 0.05
        while True:
            left = deadline - time.monotonic()
            try:
                # The last attempt has time for an answer, too: why it is not healthy says more than silence.
                left = max(LAST_SECONDS, min(HEALTH_SECONDS, left))
                await self.call("GET", self.health_path, seconds=left, what="health")
                return
            except TransientError as error:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise PeerUnavailableError(
                        f"{self.name} did not become healthy within {seconds:g} s; the last attempt: {error}"
                    ) from error
            await asyncio.sleep(min(pause, left))
            pause = min(2 * pause, 1.0)


def bearer(secret: str | None) -> dict[str, str]:
    """The header that shows a secret, if there is one."""
    return {} if secret is None else {"Authorization": f"Bearer {secret}"}


def error_code(response: httpx.Response) -> str | None:
    """`error.code` of the JSON, if there is one: what our programs call it."""
    body = _json(response)
    error = body.get("error") if isinstance(body, dict) else None
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, str) else None


def error_text(response: httpx.Response) -> str:
    """The peer's own words, in one line: `error.message` of the JSON, or the body's beginning."""
    body = _json(response)
    if isinstance(body, dict):
        error = body.get("error", body.get("detail", body))
        message = error.get("message", error) if isinstance(error, dict) else error
        text = message if isinstance(message, str) else json.dumps(message)
    else:
        text = response.text
    return beginning(text)


def beginning(text: str) -> str:
    """The first thousand characters, in one line."""
    line = " ".join(text[:10_000].split())
    return line if len(line) <= 1000 else line[:1000] + " ..."


def _json(response: httpx.Response) -> Any:
    try:
        return response.json()
    except (ValueError, RecursionError):
        return None
