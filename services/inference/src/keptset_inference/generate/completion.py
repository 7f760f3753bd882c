"""One completion as the engine gives it, checked: ids, logprobs and kept sets line up, or the request
fails.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm.outputs import CompletionOutput, WeightVersionSpan

from kept_tokens import KeptTokens, KeptTokensError

from ..capture.csr import kept_tokens
from ..capture.packed import can_pack, unpack_rows
from ..errors import RequestError
from .logprobs import LogprobRows, TokenLogprobs
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
    logprobs: TokenLogprobs | None
    """None if the client wants none."""
    kept: KeptTokens | None
    """T sets; None if the request gets none."""
    weight_versions: list[WeightVersionSpan] | None
    routed_experts: np.ndarray | None


def completion(output: CompletionOutput, sampling: Sampling, vocab_size: int) -> Completion:
    """Check one output of the engine.

    Raises:
        RequestError: status 500; something is missing, does not line up or is no number. 400; the engine
            gave up a request whose structured outputs it could not follow.
    """
    if output.finish_reason == "error":
        raise _given_up(sampling)
    token_ids = np.asarray(output.token_ids, np.int32)
    kept, packed = _kept(output, sampling, token_ids, vocab_size) if sampling.masked else (None, None)
    logprobs = packed or _logprobs(output, sampling, len(token_ids))
    if sampling.masked and logprobs is not None:
        _check_sampled(output, logprobs.logprobs[:, 0])
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


def _logprobs(output: CompletionOutput, sampling: Sampling, num_tokens: int) -> TokenLogprobs | None:
    rows = output.logprobs
    if sampling.params.num_logprobs is None:
        return None
    if num_tokens == 0:
        return LogprobRows().arrays()
    if not isinstance(rows, LogprobRows) or len(rows) != num_tokens:
        there = "none" if rows is None else str(len(rows))
        raise _failed(output, f"{there} logprobs for {num_tokens} tokens")
    return rows.arrays()


def _check_sampled(output: CompletionOutput, sampled: np.ndarray) -> None:
    wrong = ~(np.isfinite(sampled) & (sampled <= 0))
    if wrong.any():
        position = int(wrong.argmax())
        raise _failed(
            output, f"the logprob of token {position} is {sampled[position]!s}, no finite number <= 0"
        )


def _kept(
    output: CompletionOutput, sampling: Sampling, token_ids: np.ndarray, vocab_size: int
) -> tuple[KeptTokens, TokenLogprobs | None]:
    """The sets, and the logprobs if they travelled with them (`capture.packed`)."""
    chunks: Any = output.sampling_mask.token_ids if output.sampling_mask is not None else ()
    logprobs = None
    try:
        if chunks and can_pack(sampling.params) and not output.logprobs:
            ranks, values, kept = unpack_rows(chunks)
            logprobs = TokenLogprobs(token_ids[:, None], values[:, None], ranks)
        else:
            kept = kept_tokens(chunks)
        if len(kept) == len(token_ids) and (kept.counts == 0).any():
            position = int((kept.counts == 0).argmax())
            raise _failed(
                output,
                f"token {position} has no kept set: min_tokens, stop_token_ids, bad_words, allowed_token_ids "
                "and structured_outputs left nothing to sample, or its logits were no numbers (the server's "
                "log says which)",
            )
        kept.check(len(token_ids), vocab_size, token_ids, require_masks=True)
    except KeptTokensError as error:
        raise _failed(output, f"the kept sets that were recorded are wrong: {error}") from error
    return kept, logprobs


def _given_up(sampling: Sampling) -> RequestError:
    """Why vLLM ends a request with an error: a grammar that cannot be compiled or followed, such as
    a{99999999}, which passes vLLM's own checks; or, if it was to fetch a cache from elsewhere, that.
    """
    given = sampling.params
    if given.structured_outputs is not None and "kv_transfer_params" not in (given.extra_args or {}):
        return RequestError(
            "sampling_params.structured_outputs: the engine cannot compile or follow this; ask for less at "
            "once, for example fewer repetitions. The server's log has the backend's own words",
            400,
            "grammar_failed",
        )
    return RequestError("the engine gave the request up (finish_reason = error)", 500, "engine_error")


def _failed(output: CompletionOutput, what: str) -> RequestError:
    return RequestError(f"choice {output.index}: {what}; the request fails", 500, "capture_failed")


__all__ = ["Completion", "completion"]
