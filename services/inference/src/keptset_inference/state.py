"""What the routes share: facts about the engine, and whether it may answer."""

from dataclasses import dataclass
from typing import Literal

KeptTokensFormat = Literal["kept_tokens", "sampling_mask", "both"]
FORMATS: tuple[KeptTokensFormat, ...] = ("kept_tokens", "sampling_mask", "both")
"""The JSON dialects of the kept sets."""


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
    watermarking: bool = False
    """The engine watermarks requests that do not opt out."""


@dataclass
class ServerState:
    """One server; held in `app.state.keptset`."""

    facts: EngineFacts
    kept_tokens_format: KeptTokensFormat = "kept_tokens"
    """The dialect of answers whose request does not ask for another."""
    weight_version: int | None = None
    """The published version that the engine runs; None: the weights it was started with."""
    broken: str | None = None
    """Why nothing may be answered any more, if that is so."""


__all__ = ["FORMATS", "EngineFacts", "KeptTokensFormat", "ServerState"]
