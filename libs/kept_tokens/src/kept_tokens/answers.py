"""The MessagePack form of an answer of ``/inference/v1/generate``.

Inference writes it, the orchestrator reads it. Map-like, with the names of the JSON; what is None is left
out. Every array is little-endian bytes, one entry for each completion token unless it says otherwise.
"""

from typing import NamedTuple, Self

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from .arrays import from_buffer, int32_array, to_buffer
from .errors import KeptTokensError
from .layout import FLOAT32, INT32
from .payload import KeptTokens
from .sample_checks import NO_EVIDENCE


class KeptBytes(msgspec.Struct, frozen=True):
    """The kept sets of a choice's tokens, as ``KeptTokens.to_bytes`` gives them."""

    ids: bytes
    """int32 [sum(counts)]."""
    counts: bytes
    """int32 [T]."""


class VersionSpan(msgspec.Struct, frozen=True):
    """The completion tokens ``start <= t < end`` were sampled by these weights."""

    version: str | int
    """``"v000003"``, or ``"base"`` before any update; ``kept_tokens.versions.version_number`` reads it."""
    start: int
    end: int


class TopLogprobs(msgspec.Struct, frozen=True):
    """The most likely tokens at each position, best first; those masked out (logprob -inf) are left out."""

    ids: bytes
    """int32 [sum(counts)]."""
    logprobs: bytes
    """float32 [sum(counts)]."""
    counts: bytes
    """int32 [T]."""


class ChoiceArrays(NamedTuple):
    """A choice's arrays, verified against each other; T is the number of completion tokens."""

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32] | None
    kept: KeptTokens | None


class Choice(msgspec.Struct, frozen=True, omit_defaults=True):
    """One completion."""

    index: int
    token_ids: bytes
    """int32 [T]."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: bytes | None = None
    """float32 [T], the processed logprob of the sampled token; None if none were asked for."""
    kept_tokens: KeptBytes | None = None
    """None if the request got no masks."""
    weight_versions: list[VersionSpan] | None = None
    top_logprobs: TopLogprobs | None = None
    """Only if more than the sampled token's logprob was asked for."""

    @classmethod
    def build(
        cls,
        index: int,
        token_ids: ArrayLike,
        *,
        logprobs: ArrayLike | None = None,
        kept: KeptTokens | None = None,
        finish_reason: str | None = None,
        stop_reason: int | str | None = None,
        weight_versions: list[VersionSpan] | None = None,
        top_logprobs: TopLogprobs | None = None,
    ) -> Self:
        """From arrays."""
        return cls(
            index=index,
            token_ids=to_buffer(int32_array(token_ids, "token_ids", copy=False)),
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            logprobs=None if logprobs is None else to_buffer(np.asarray(logprobs, np.float32)),
            kept_tokens=None if kept is None else KeptBytes(*kept.to_bytes()),
            weight_versions=weight_versions,
            top_logprobs=top_logprobs,
        )

    def arrays(self, vocab_size: int | None = None, *, require_masks: bool = False) -> ChoiceArrays:
        """The arrays, verified.

        Lengths fit, logprobs are finite, <= 0 and not -9999, sampled ids are in their sets.

        Args:
            vocab_size: ids must be smaller.
            require_masks: the request truncates, so every token must have a kept set.

        Raises:
            KeptTokensError: the text names field, position, value and way out.
        """
        token_ids = from_buffer(self.token_ids, INT32, "token_ids")
        outside = (token_ids < 0) | (
            token_ids >= (np.iinfo(np.int32).max if vocab_size is None else vocab_size)
        )
        if outside.any():
            position = int(outside.argmax())
            raise KeptTokensError(
                "token_ids",
                f"{token_ids[position]} is outside the vocabulary of {vocab_size}",
                position=position,
            )
        return ChoiceArrays(
            token_ids, self._logprobs(len(token_ids)), self._kept(token_ids, vocab_size, require_masks)
        )

    def _logprobs(self, num_tokens: int) -> NDArray[np.float32] | None:
        if self.logprobs is None:
            return None
        logprobs: NDArray[np.float32] = from_buffer(self.logprobs, FLOAT32, "logprobs")
        if len(logprobs) != num_tokens:
            raise KeptTokensError(
                "logprobs", f"has {len(logprobs)} entries, but there are {num_tokens} tokens"
            )
        unusable = ~np.isfinite(logprobs) | (logprobs > 0) | (logprobs == NO_EVIDENCE)
        if unusable.any():
            position = int(unusable.argmax())
            raise KeptTokensError(
                "logprobs",
                f"{logprobs[position]!s} is no logprob of a sampled token (finite, <= 0, not {NO_EVIDENCE})",
                position=position,
            )
        return logprobs

    def _kept(
        self, token_ids: NDArray[np.int32], vocab_size: int | None, require_masks: bool
    ) -> KeptTokens | None:
        if self.kept_tokens is None:
            if require_masks and len(token_ids):
                raise KeptTokensError(
                    "kept_tokens",
                    "is missing, but this request truncates; the server must record kept sets "
                    "(keptset's inference with enable_return_sampling_mask)",
                )
            return None
        kept = KeptTokens.from_bytes(self.kept_tokens.ids, self.kept_tokens.counts)
        return kept.check(len(token_ids), vocab_size, token_ids, require_masks)


class GenerateAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """The whole answer; ``kept_tokens.messages.encode`` and ``decode`` write and read it."""

    request_id: str
    model: str | None = None
    choices: list[Choice] = []
