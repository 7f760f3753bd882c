"""Answers as MessagePack: the arrays as they are, 12 bytes a token and 4 a kept id."""

import numpy as np

from kept_tokens.answers import Choice, GenerateAnswer, TopLogprobs, VersionSpan

from .completion import Completion
from .logprobs import NO_ID, TokenLogprobs


def binary_answer(
    request_id: str, model: str | None, choices: list[Completion], *, candidates: bool
) -> GenerateAnswer:
    """The whole answer.

    Args:
        request_id: as the client named it, or our own.
        model: None unless the client named one: an answer has 256 bytes for everything that is no array.
        choices: all of them.
        candidates: whether the client asked for the most likely tokens too.
    """
    return GenerateAnswer(request_id, model, [_choice(choice, candidates) for choice in choices])


def _choice(choice: Completion, candidates: bool) -> Choice:
    spans = choice.weight_versions
    return Choice.build(
        choice.index,
        choice.token_ids,
        logprobs=None if choice.logprobs is None else choice.logprobs.logprobs[:, 0],
        kept=choice.kept,
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
        weight_versions=spans and [VersionSpan(span.version, span.start, span.end) for span in spans],
        top_logprobs=_candidates(choice.logprobs) if candidates and choice.logprobs is not None else None,
    )


def _candidates(logprobs: TokenLogprobs) -> TopLogprobs:
    """The most likely tokens of each position, without those that are masked out."""
    ids, values = logprobs.token_ids[:, 1:], logprobs.logprobs[:, 1:]
    keep = np.isfinite(values) & (ids != NO_ID)
    counts = keep.sum(1, dtype=np.int32)
    return TopLogprobs(ids[keep].tobytes(), values[keep].tobytes(), counts.tobytes())


__all__ = ["binary_answer"]
