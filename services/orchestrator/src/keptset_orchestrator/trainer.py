"""The trainer as the orchestrator sees it: hand in a batch, wait for its result."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import httpx
import msgspec

from kept_tokens.messages import StepResult, decode

from .errors import (
    OrchestratorError,
    OtherVersionError,
    PeerMismatchError,
    PeerRefusedError,
    PeerUnavailableError,
    TransferFailedError,
)
from .peers import HEALTH_SECONDS, Peer, TransientError, bearer, error_code, error_text
from .training_time import TrainingTime

T = TypeVar("T")

MSGPACK = "application/msgpack"
LONG_POLL_SECONDS = 30
"""How long the trainer may hold a question for a step's result."""
MOST_PAUSE = 2.0
"""Seconds between two attempts, unless the trainer asks for more."""

SPOOL_FULL = "spool_full"
"""What the trainer calls it that too many batches wait to be trained."""


class TrainerStatus(msgspec.Struct):
    """What the orchestrator reads of GET /keptset/v1/status."""

    next_step: int
    weight_version: int
    """The newest that is published."""
    vocab_size: int
    row_tokens: int | None = None
    trained_step: int | None = None
    training: int | None = None
    """The step that it is at, and whose weights it holds afterwards; None: at none, or it does not say."""
    unsafe_ignore_kept_tokens: bool = False
    full_vocabulary_scores: bool | None = None
    """None: a trainer of before there were objectives and references."""
    version: str = "?"
    model: str | None = None
    sends_weights: bool = False
    sending: int | None = None
    """The version that it is ready to send, or sends."""
    shares_gpu: bool = False
    """It is on its GPU only while it steps."""
    loop_pid: int | None = None
    """Of the process that trains; another one knows no group of before."""


class WeightsGroup(msgspec.Struct):
    """A new NCCL group of the trainer's, and what it will send to it."""

    unique_id: str
    bucket_bytes: int
    tensors: list[tuple[str, str, list[int]]]


class OtherBatchError(OrchestratorError):
    """409: the trainer holds another batch for this step, or expects another step.

    Attributes:
        content_hash: hex of the batch that is there, None if there is none.
        next_step: the first step that the trainer has not accepted.
    """

    def __init__(self, text: str, content_hash: str | None, next_step: int | None) -> None:
        """`text` names trainer and step, with the trainer's words."""
        super().__init__(text)
        self.content_hash = content_hash
        self.next_step = next_step


class Trainer(Peer):
    """The trainer."""

    def __init__(self, url: str, client: httpx.AsyncClient, token: str | None = None) -> None:
        super().__init__("trainer", url, client, bearer(token))

    async def status(self, *, seconds: float) -> TrainerStatus:
        """What it says of itself; asked again while it cannot be reached, for `seconds` at most.

        Raises:
            PeerMismatchError: the answer is none of a Keptset trainer.
            PeerUnavailableError: no answer within `seconds`.
        """

        async def once() -> TrainerStatus:
            response = await self.call("GET", "/keptset/v1/status", seconds=HEALTH_SECONDS, what="status")
            if _object(response).get("vocab_size", 0) is None:  # it was started again since it was healthy
                raise TransientError(f"{self.name}: status: it is still loading its model", lost=False)
            try:
                return msgspec.json.decode(response.content, type=TrainerStatus)
            except msgspec.MsgspecError as error:
                raise PeerMismatchError(
                    f"{self.name}: /keptset/v1/status is not that of a Keptset trainer ({error})"
                ) from error

        return await self._patiently(once, seconds)

    async def hand_in(self, step: int, batch: bytes, *, seconds: float, training: float) -> None:
        """PUT the batch of a step; returns once the trainer holds it on disk.

        The same bytes may be put again, so attempts that fail to connect or get a 5xx are repeated.

        Args:
            step: The step.
            batch: As it is sent.
            seconds: For a trainer that cannot be reached or fails, anew whenever it could be.
            training: For one that has no room as too many batches wait; each step that it comes to meanwhile,
                also one that it trains once more, has as long.

        Raises:
            OtherBatchError: 409.
            PeerRefusedError: 413, 422 and other 4xx: the text names sample and position.
            PeerUnavailableError: not accepted within `seconds`, or no room for `training` seconds, in which
                it came to no other step.
        """

        async def once() -> httpx.Response:
            return await self.call(
                "PUT",
                f"/keptset/v1/steps/{step}",
                seconds=seconds,
                what=f"batch of step {step}",
                content=batch,
                headers={"Content-Type": MSGPACK},
                also=(409,),
            )

        time_left, pause = TrainingTime(training), 0.1
        while True:
            try:
                response = await self._patiently(once, seconds, but=SPOOL_FULL)
                break
            except TransientError as full:
                time_left.see(await self._training())
                if time_left.left <= 0:
                    at = "no step that it names" if time_left.at is None else f"step {time_left.at}"
                    raise PeerUnavailableError(
                        f"{full} (waited {training:g} s for it to be done with {at})"
                    ) from full
                await asyncio.sleep(min(max(pause, full.pause), time_left.left))
                pause = min(2 * pause, MOST_PAUSE)
        if response.status_code == 409:
            body = _object(response)
            raise OtherBatchError(
                f"{self.name}: batch of step {step}: 409 {error_text(response)}",
                body.get("content_hash"),
                body.get("next_step"),
            )

    async def result(self, step: int, *, seconds: float, patience: float) -> StepResult:
        """Wait for an accepted step to be trained.

        Args:
            step: The step.
            seconds: For the training. Earlier steps that the trainer is at first, as one that was started
                again may be, have as long each.
            patience: For a trainer that cannot be reached meanwhile: it may have been started again.

        Raises:
            PeerUnavailableError: no result within `seconds`, or unreachable for `patience` seconds.
            PeerRefusedError: the trainer does not know the step (404).
        """
        time_left, absent = TrainingTime(seconds), ""
        while True:
            left = time_left.left
            if left <= 0:
                raise PeerUnavailableError(
                    f"{self.name} did not finish step {step} within {seconds:g} s{absent}"
                )
            wait = max(0, min(LONG_POLL_SECONDS, int(left)))

            async def once(wait: int = wait) -> httpx.Response:
                return await self.call(
                    "GET",
                    f"/keptset/v1/steps/{step}?wait={wait}",
                    seconds=wait + HEALTH_SECONDS,
                    what=f"result of step {step}",
                    headers={"Accept": MSGPACK},
                )

            asked = time.monotonic()
            response = await self._patiently(once, min(patience, left))
            if response.status_code == 202:
                said = _object(response)
                at, waits_for = said.get("training"), said.get("waits_for")
                time_left.see(at if isinstance(at, int) and at <= step else None)
                absent = f": {waits_for}" if waits_for else ""
                # a trainer that answers at once does not make this a busy loop
                await asyncio.sleep(max(0.0, min(0.2, left) - (time.monotonic() - asked)))
                continue
            try:
                result = decode(response.content, StepResult)
            except ValueError as error:
                raise PeerMismatchError(
                    f"{self.name}: result of step {step} cannot be read: {error}"
                ) from error
            if result.step != step:
                raise PeerMismatchError(
                    f"{self.name}: asked for step {step}, answered with step {result.step}"
                )
            return result

    async def weights_group(self, *, seconds: float) -> WeightsGroup:
        """A new group, of which nobody is a member yet.

        Raises:
            PeerMismatchError: the answer is none.
            PeerUnavailableError: no answer within `seconds`.
            PeerRefusedError: with the trainer's own words.
        """

        async def once() -> WeightsGroup:
            path = "/keptset/v1/weights/group"
            response = await self.call("POST", path, seconds=seconds, what="group for weights")
            try:
                return msgspec.json.decode(response.content, type=WeightsGroup)
            except msgspec.MsgspecError as error:
                raise PeerMismatchError(f"{self.name}: group for weights: {error}") from error

        return await self._patiently(once, seconds)

    async def send_weights(self, version: int, unique_id: str, world_size: int, *, seconds: float) -> None:
        """Have it send a version to a group; returns once all of it has been taken.

        Raises:
            TransferFailedError: not within `seconds`, or it does not know the group; with the trainer's own
                words.
            OtherVersionError: it does not hold that version.
            PeerRefusedError: it cannot send.
        """
        what = f"send weights version {version}"
        try:
            response = await self.call(
                "POST",
                f"/keptset/v1/weights/{version}/send",
                seconds=seconds + HEALTH_SECONDS,
                what=what,
                also=(409,),
                json={"unique_id": unique_id, "world_size": world_size, "seconds": seconds},
            )
        except TransientError as error:
            raise TransferFailedError(str(error), trainer_lost=error.lost) from error
        if response.status_code == 409:
            code = error_code(response)
            refusal = f"{self.name}: {what}: 409 {error_text(response)}"
            if code == "unknown_group":
                raise TransferFailedError(refusal, trainer_lost=True)
            raise OtherVersionError(refusal) if code == "other_version" else PeerRefusedError(refusal)

    async def _training(self) -> int | None:
        """The step that it is at; None: at none, or it does not say right now."""
        try:
            response = await self.call("GET", "/keptset/v1/status", seconds=HEALTH_SECONDS, what="status")
        except TransientError:
            return None
        at = _object(response).get("training")
        return at if isinstance(at, int) else None

    async def _patiently(self, once: Callable[[], Awaitable[T]], seconds: float, but: str | None = None) -> T:
        """Repeat `once` while it fails transiently, with growing pauses, until `seconds` are over.

        Raises:
            PeerUnavailableError: they are.
            TransientError: the answer is a 429 of the code `but`, which the caller waits for itself.
        """
        began = time.monotonic()
        pause = 0.1
        while True:
            try:
                return await once()
            except TransientError as error:
                if but is not None and error.code == but:
                    raise
                left = began + seconds - time.monotonic()
                if left <= 0:
                    raise PeerUnavailableError(f"{error} (asked again for {seconds:g} s)") from error
                asked = error.pause
            await asyncio.sleep(min(max(pause, asked), left))
            pause = min(2 * pause, MOST_PAUSE)


def _object(response: httpx.Response) -> dict[str, Any]:
    try:
        body = response.json()
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}
