"""One completion as the engine gives it, checked: ids, logprobs and kept sets line up, or the request
fails.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput, WeightVersionSpan

from kept_tokens import KeptTokens, KeptTokensError

from ..capture.csr import kept_tokens
from ..errors import RequestError
from .sampling import Sampling


@dataclass(frozen=True)
class Completion:
    """A choice of an answer, or of a chunk of a stream; T is its number of tokens."""

    index: int
    token_ids: np.ndarray
    """int32 [T]. With stop strings: every token that was sampled, those that spell the stop string
    included."""
    finish_reason: str | None
    stop_reason: int | str | None
    logprobs: FlatLogprobs | None
    """T positions, the sampled token first in each; None if the client wants none."""
    kept: KeptTokens | None
    """T sets; None if the request gets none."""
    weight_versions: list[WeightVersionSpan] | None
    routed_experts: np.ndarray | None

    @property
    def sampled_logprobs(self) -> np.ndarray:
        """float32 [T], the sampled tokens'."""
        assert self.logprobs is not None
        values = self.logprobs.logprobs
        return np.array([values[start] for start in self.logprobs.start_indices], np.float32)


def completion(output: CompletionOutput, sampling: Sampling, vocab_size: int) -> Completion:
    """Check one output of the engine.

    Raises:
        RequestError: status 500; something is missing, does not line up or is no number.
    """
    if output.finish_reason == "error":
        raise RequestError("the engine gave the request up (finish_reason = error)", 500, "engine_error")
    token_ids = np.asarray(output.token_ids, np.int32)
    logprobs = _logprobs(output, sampling, len(token_ids))
    kept = _kept(output, token_ids, vocab_size) if sampling.masked else None
    return Completion(
        index=output.index,
        token_ids=token_ids,
        finish_reason=output.finish_reason,
        stop_reason=output.stop_reason,
        logprobs=logprobs if sampling.logprobs is not None or sampling.params.logprob_token_ids else None,
        kept=kept,
        weight_versions=output.weight_versions,
        routed_experts=output.routed_experts,
    )


def _logprobs(output: CompletionOutput, sampling: Sampling, num_tokens: int) -> FlatLogprobs | None:
    flat = output.logprobs
    if sampling.params.num_logprobs is None:
        return None
    if num_tokens == 0:
        return FlatLogprobs()
    if not isinstance(flat, FlatLogprobs) or len(flat) != num_tokens:
        there = "none" if flat is None else str(len(flat))
        raise _failed(output, f"{there} logprobs for {num_tokens} tokens")
    if sampling.masked:
        for position, start in enumerate(flat.start_indices):
            value = flat.logprobs[start]
            if not math.isfinite(value) or value > 0:
                raise _failed(output, f"the logprob of token {position} is {value}, no finite number <= 0")
    return flat


def _kept(output: CompletionOutput, token_ids: np.ndarray, vocab_size: int) -> KeptTokens:
    chunks: Any = output.sampling_mask.token_ids if output.sampling_mask is not None else ()
    try:
        kept = kept_tokens(chunks)
        return kept.check(len(token_ids), vocab_size, token_ids, require_masks=True)
    except KeptTokensError as error:
        raise _failed(output, f"the kept sets that were recorded are wrong: {error}") from error


def _failed(output: CompletionOutput, what: str) -> RequestError:
    return RequestError(f"choice {output.index}: {what}; the request fails", 500, "capture_failed")


__all__ = ["Completion", "completion"]
