"""Answers as MessagePack: the arrays as they are, 12 bytes a token and 4 a kept id."""

import numpy as np
from vllm.logprobs import FlatLogprobs

from kept_tokens.answers import Choice, GenerateAnswer, TopLogprobs, VersionSpan

from .completion import Completion


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
        logprobs=None if choice.logprobs is None else choice.sampled_logprobs,
        kept=choice.kept,
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
        weight_versions=spans and [VersionSpan(span.version, span.start, span.end) for span in spans],
        top_logprobs=_candidates(choice.logprobs) if candidates and choice.logprobs is not None else None,
    )


def _candidates(flat: FlatLogprobs) -> TopLogprobs:
    """The most likely tokens of each position, without those that are masked out."""
    ids = np.asarray(flat.token_ids, np.int32)
    logprobs = np.asarray(flat.logprobs, np.float32)
    starts, ends = np.asarray(flat.start_indices, np.int64), np.asarray(flat.end_indices, np.int64)
    keep = np.isfinite(logprobs)
    keep[starts] = False  # the sampled token, which has a place of its own
    kept_before = np.concatenate(([0], np.cumsum(keep)))
    counts = (kept_before[ends] - kept_before[starts]).astype(np.int32)
    return TopLogprobs(ids[keep].tobytes(), logprobs[keep].tobytes(), counts.tobytes())


__all__ = ["binary_answer"]
