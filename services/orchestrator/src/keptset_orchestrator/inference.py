"""The inference service as the orchestrator sees it: status, generate, weights."""

import asyncio
import time
from typing import Any

import httpx
import msgspec

from kept_tokens.answers import GenerateAnswer
from kept_tokens.messages import decode

from .errors import PeerMismatchError, PeerRefusedError, PeerUnavailableError
from .peers import HEALTH_SECONDS, Peer, TransientError, bearer, beginning, error_code, error_text

MSGPACK = "application/msgpack"
UPDATE_POLL = 0.2
"""Seconds until a server that is loading other weights is asked again."""


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


class SleepStatus(msgspec.Struct):
    """How a server takes turns on its GPU: the `sleep` object of its status."""

    state: str
    frees_memory: bool = True


class InferenceStatus(msgspec.Struct):
    """What the orchestrator reads of GET /keptset/v1/status."""

    vocab_size: int
    capture: CaptureStatus
    max_model_len: int
    weight_version: int | None = None
    instance: str | None = None
    """Another one at each start; None: a server that does not say."""
    workers: int = 1
    takes_transfers: bool = False
    sleep: SleepStatus | None = None
    """None: it has its GPU for itself."""
    version: str = "?"
    vllm: str = "?"
    model: str | None = None
    broken: str | None = None
    """Why it answers nothing any more until it is started again."""
    stopping: bool = False
    """It was asked to stop, and answers nothing new any more."""


class InferenceServer(Peer):
    """One inference server; counts its requests in flight and remembers whether it was lost."""

    def __init__(
        self, url: str, client: httpx.AsyncClient, api_key: str | None = None, token: str | None = None
    ) -> None:
        super().__init__("inference server", url, client, bearer(api_key))
        self._internal = bearer(token)
        self.in_flight = 0
        self.lost = False
        self.workers = 1
        """Of its engine: ranks of a group that weights are sent to."""
        self.starts = 0
        """How often it was looked at anew: it may have been started again."""
        self.instance: str | None = None
        """That was looked at."""
        self.loaded_by: str | None = None
        """The instance that did the last update."""
        self.pause_seconds = 0.0
        """How long the last update kept it from sampling, as it said."""
        self.wake_seconds = 0.0
        """How long its memory took to come back to its GPU the last time, as it said."""
        self.version: int | None = None
        """Of the weights that it was last made to load."""

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
            TransientError: the answer cannot be read; else as `Peer.call`.
            PeerRefusedError: as `Peer.call`.
        """
        self.in_flight += 1
        try:
            return await generated(self, body, seconds=seconds, what=what)
        finally:
            self.in_flight -= 1

    async def load_weights(
        self, version: int, *, seconds: float, transfer: dict[str, Any] | None = None, wake: bool = False
    ) -> None:
        """Have it load a published version within `seconds`; one that still loads another, for a former
        orchestrator, is asked again. Or have it receive the version as `transfer` says.
        With `wake` it may be asleep, and is awake afterwards.

        Raises:
            TransientError: it is lost: no connection, or 503.
            PeerUnavailableError: not loaded within `seconds`, or a load that failed (5xx).
            PeerRefusedError: it cannot load that version, with its own words.
        """
        deadline = time.monotonic() + seconds
        what = f"load weights version {version}"
        while True:
            left = max(0.05, deadline - time.monotonic())
            try:
                response = await self.call(
                    "POST",
                    "/keptset/v1/wake" if wake else "/keptset/v1/weights",
                    seconds=left,
                    what=what,
                    json={"version": version} | ({} if transfer is None else {"transfer": transfer}),
                    headers=self._internal,
                    also=(409,),
                )
            except TransientError as error:
                if error.lost:
                    raise
                # a 5xx other than 503 is the server's verdict on these weights, not a matter of patience
                raise PeerUnavailableError(
                    f"{self.name} did not load weights version {version} "
                    f"(weights_timeout {seconds:g} s): {error}"
                ) from error
            if response.status_code < 400:
                loaded = _loaded(response)
                self.version, self.loaded_by = version, loaded.instance
                self.pause_seconds, self.wake_seconds = loaded.pause_seconds, loaded.wake_seconds
                return
            refusal = f"{self.name}: {what}: 409 {error_text(response)}"
            if error_code(response) != "update_running":
                raise PeerRefusedError(refusal)
            if time.monotonic() + UPDATE_POLL > deadline:
                raise PeerUnavailableError(f"{refusal} (weights_timeout {seconds:g} s)")
            await asyncio.sleep(UPDATE_POLL)

    async def sleep(self, *, seconds: float) -> None:
        """Have it let running requests end and leave its GPU, within `seconds`; asleep already is fine.

        Raises:
            TransientError: no connection: a server that is gone is not on its GPU either.
            PeerUnavailableError: it is still there, with its own words.
            PeerRefusedError: it does not do this, with its own words.
        """
        deadline = time.monotonic() + seconds
        while True:
            left = max(0.05, deadline - time.monotonic())
            try:
                response = await self.call(
                    "POST",
                    "/keptset/v1/sleep",
                    seconds=left,
                    what="sleep",
                    headers=self._internal,
                    also=(503,),
                )
            except TransientError as error:
                if error.lost:
                    raise
                raise PeerUnavailableError(
                    f"{self.name} did not fall asleep (weights_timeout {seconds:g} s), and the trainer waits "
                    f"for its GPU: {error}"
                ) from error
            if response.status_code < 400:
                return
            if time.monotonic() + UPDATE_POLL > deadline:
                raise PeerUnavailableError(
                    f"{self.name} did not fall asleep (weights_timeout {seconds:g} s), and the trainer waits "
                    f"for its GPU: 503 {error_text(response)}"
                )
            await asyncio.sleep(UPDATE_POLL)  # whoever watches over it may start it again


async def generated(
    peer: Peer, body: dict[str, Any], *, seconds: float, what: str, headers: dict[str, str] | None = None
) -> GenerateAnswer:
    """One request to /inference/v1/generate at a server or a router, answered in MessagePack.

    Raises:
        TransientError: the answer cannot be read; else as `Peer.call`.
        PeerRefusedError: as `Peer.call`.
    """
    response = await peer.call(
        "POST",
        "/inference/v1/generate",
        seconds=seconds,
        what=what,
        json=body,
        headers={"Accept": MSGPACK} | (headers or {}),
    )
    content_type = response.headers.get("content-type", "")
    if not content_type.startswith(MSGPACK):
        raise peer.unreadable(
            what, f"{content_type!r} where {MSGPACK} was asked for: {beginning(response.text)}"
        )
    try:
        return decode(response.content, GenerateAnswer)
    except ValueError as error:
        raise peer.unreadable(what, str(error)) from error


def _loaded(response: httpx.Response) -> "_Loaded":
    try:
        return msgspec.json.decode(response.content, type=_Loaded)
    except msgspec.MsgspecError:
        return _Loaded()  # 200 is what counts; how long it took is for the metrics


class _Loaded(msgspec.Struct):
    pause_seconds: float = 0.0
    wake_seconds: float = 0.0
    instance: str | None = None
