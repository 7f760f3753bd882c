"""The inference service as the orchestrator sees it: status, generate, weights."""

import asyncio
import time
from typing import Any

import httpx
import msgspec

from kept_tokens.answers import GenerateAnswer
from kept_tokens.messages import decode

from .errors import AnswerError, PeerMismatchError, PeerUnavailableError
from .peers import HEALTH_SECONDS, Peer, TransientError, bearer

MSGPACK = "application/msgpack"


class CaptureStatus(msgspec.Struct):
    """How a server captures kept sets: the `capture` object of its status."""

    enabled: bool
    kind: str
    width: int | None = None
    proven: bool = False

    @property
    def works(self) -> bool:
        """Masks come with truncated requests, and the process that samples has shown it."""
        return self.enabled and self.kind != "off" and self.proven


class InferenceStatus(msgspec.Struct):
    """What the orchestrator reads of GET /keptset/v1/status."""

    vocab_size: int
    capture: CaptureStatus
    max_model_len: int
    weight_version: int | None = None
    version: str = "?"
    vllm: str = "?"
    model: str | None = None


class InferenceServer(Peer):
    """One inference server; counts its requests in flight and remembers whether it was lost."""

    def __init__(
        self, url: str, client: httpx.AsyncClient, api_key: str | None = None, token: str | None = None
    ) -> None:
        super().__init__("inference server", url, client, bearer(api_key))
        self._internal = bearer(token)
        self.in_flight = 0
        self.lost = False

    async def status(self) -> InferenceStatus:
        """What it says of itself.

        Raises:
            PeerMismatchError: the answer is none of a Keptset inference server.
            TransientError, PeerRefusedError: as `Peer.call`.
        """
        response = await self.call("GET", "/keptset/v1/status", seconds=HEALTH_SECONDS, what="status")
        try:
            return msgspec.json.decode(response.content, type=InferenceStatus)
        except msgspec.MsgspecError as error:
            raise PeerMismatchError(
                f"{self.name}: /keptset/v1/status is not that of a Keptset inference server ({error})"
            ) from error

    async def generate(self, body: dict[str, Any], *, seconds: float, what: str) -> GenerateAnswer:
        """One request to /inference/v1/generate, answered in MessagePack.

        Raises:
            AnswerError: the answer cannot be read.
            TransientError, PeerRefusedError: as `Peer.call`.
        """
        self.in_flight += 1
        try:
            response = await self.call(
                "POST",
                "/inference/v1/generate",
                seconds=seconds,
                what=what,
                json=body,
                headers={"Accept": MSGPACK},
            )
        finally:
            self.in_flight -= 1
        content_type = response.headers.get("content-type", "")
        if not content_type.startswith(MSGPACK):
            raise AnswerError(f"{self.name}: {what}: answered {content_type!r} where {MSGPACK} was asked for")
        try:
            return decode(response.content, GenerateAnswer)
        except ValueError as error:  # msgspec's errors are ValueErrors
            raise AnswerError(f"{self.name}: {what}: the answer cannot be read: {error}") from error

    async def load_weights(self, version: int, *, seconds: float) -> None:
        """Have it load a published version; attempts that fail to connect are repeated for `seconds`.

        Raises:
            PeerUnavailableError: not loaded within `seconds`.
            PeerRefusedError: it cannot load that version, with its own words.
        """
        deadline = time.monotonic() + seconds
        pause = 0.1
        while True:
            try:
                await self.call(
                    "POST",
                    "/keptset/v1/weights",
                    seconds=max(0.05, deadline - time.monotonic()),
                    what=f"load weights version {version}",
                    json={"version": version},
                    headers=self._internal,
                )
                return
            except TransientError as error:
                left = deadline - time.monotonic()
                # a 5xx other than 503 is the server's verdict on these weights, not a matter of patience
                if not error.lost or left <= 0:
                    raise PeerUnavailableError(
                        f"{self.name} did not load weights version {version} "
                        f"(weights_timeout {seconds:g} s): {error}"
                    ) from error
                self.lost = True
            await asyncio.sleep(min(pause, left))
            pause = min(2 * pause, 2.0)
