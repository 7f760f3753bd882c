"""What the routes share: facts about the engine, and whether it may answer."""

import asyncio
import uuid
from dataclasses import dataclass, field
from typing import Any, Literal

from .errors import RequestError

KeptTokensFormat = Literal["kept_tokens", "sampling_mask", "both"]
FORMATS: tuple[KeptTokensFormat, ...] = ("kept_tokens", "sampling_mask", "both")
"""The JSON dialects of the kept sets."""
Phase = Literal["awake", "falling asleep", "asleep", "waking"]


@dataclass(frozen=True)
class EngineFacts:
    """What does not change while the server runs."""

    model: str
    """As the settings name it."""
    served_names: tuple[str, ...]
    """What requests may call the model."""
    vocab_size: int
    """Columns of the logits."""
    max_model_len: int
    """Prompt and completion together, in tokens."""
    width: int | None
    """The most ids of a kept set that can be recorded; None: capture is off."""
    capture: Literal["v1", "native"] | None = None
    """What records them."""
    tokenizer: bool = True
    """The engine has one; without, vLLM ignores stop strings and bad words."""
    takes_transfers: bool = False
    """Weights may come over NCCL."""
    workers: int = 1
    """Processes that each hold weights: ranks of an NCCL group that weights are sent to."""
    watermarking: bool = False
    """The engine watermarks requests that do not opt out."""
    shares_gpu: bool = False
    """It takes turns with a trainer: it can be put to sleep and woken."""
    frees_memory: bool = False
    """Its memory leaves the GPU while it sleeps. Not on a CPU, where it merely pauses."""


@dataclass
class ServerState:
    """One server; held in `app.state.keptset`."""

    facts: EngineFacts
    kept_tokens_format: KeptTokensFormat = "kept_tokens"
    """The dialect of answers whose request does not ask for another."""
    weight_version: int | None = None
    """The published version that the engine runs; None: the weights it was started with."""
    phase: Phase = "awake"
    """Only an engine that is awake is asked for anything."""
    in_work: int = 0
    """Requests that may use the engine, from their arrival to the last byte of their answer."""
    instance: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Of this start: one that was started again has another."""
    broken: str | None = None
    """Why nothing may be answered any more, if that is so."""
    stopping: bool = False
    """It was asked to stop: what it has begun ends, and nothing else begins."""
    unanswered: dict[asyncio.Task[Any], str] = field(default_factory=dict)
    """Requests whose answer has not begun, and their paths."""
    answering: set[asyncio.Task[Any]] = field(default_factory=set)
    """Requests whose answer is being sent."""


RETRY_AFTER = 5
"""Seconds after which whoever met a sleeping engine may look again: it sleeps for as long as a step takes.
Of one that stops: whatever starts it again, or sends requests elsewhere, needs a moment."""


def asleep(phase: Phase) -> RequestError:
    """The answer to what only an engine that is awake can do."""
    return RequestError(
        f"the engine is {phase}: the trainer has the GPU while it steps; whoever runs both wakes it, with "
        "POST /keptset/v1/wake",
        503,
        "asleep",
        RETRY_AFTER,
    )


def stopping() -> RequestError:
    """The answer to what comes after the server was asked to stop, or did not end in time."""
    return RequestError(
        "the server was asked to stop, and takes no more requests: send this to another one, or to this one "
        "when it is started again",
        503,
        "stopping",
        RETRY_AFTER,
    )


__all__ = ["FORMATS", "EngineFacts", "KeptTokensFormat", "Phase", "ServerState", "asleep", "stopping"]
