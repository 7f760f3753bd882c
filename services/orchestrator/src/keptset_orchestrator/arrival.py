"""What is checked where an answer arrives (rules 3 and 4 of the kept set), before anything is trained on."""

import reprlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kept_tokens import KeptTokens, KeptTokensError
from kept_tokens.answers import Choice, GenerateAnswer
from kept_tokens.versions import version_number

from .errors import AnswerError, OtherWeightsError

ENDS = ("stop", "length", "repetition")
"""How a rollout may end; the last one only where sampling.extra_body asks for repetition_detection."""


@dataclass(frozen=True)
class Completion:
    """One checked choice, or several turns of them with the context between.

    Attributes:
        token_ids: int32 [T], as sampled, the token that ended it included.
        logprobs: float32 [T], processed: finite and <= 0; 0 on context, and throughout if a frozen generator
            said it.
        kept: The kept sets of the T tokens, with count 0 on context; None if the source does not truncate.
        finish_reason: One of ENDS, of the last turn.
        stop_token_id: The stop token that ended it, if one did that is not the eos token.
        weight_versions: (version, start, end) over the sampled tokens; none if a frozen generator said it.
        sampled: bool [T], False on context between turns; None: every token was sampled.
        reference: float32 [T], what a reference says of the sampled tokens; None if it was not asked.
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    kept: KeptTokens | None
    finish_reason: str
    stop_token_id: int | None
    weight_versions: list[tuple[int, int, int]]
    sampled: NDArray[np.bool_] | None = None
    reference: NDArray[np.float32] | None = None

    @property
    def is_sampled(self) -> NDArray[np.bool_]:
        """[T]; True where a token was sampled, False on context."""
        return np.ones(len(self.token_ids), bool) if self.sampled is None else self.sampled

    def last_turn(self) -> list[int]:
        """The ids of the last turn."""
        context = np.flatnonzero(~self.is_sampled)
        start = int(context[-1]) + 1 if len(context) else 0
        ids: list[int] = self.token_ids[start:].tolist()
        return ids


def check_answer(
    answer: GenerateAnswer,
    *,
    where: str,
    request_id: str,
    choices: int,
    vocab_size: int,
    truncates: bool,
    max_tokens: int,
    oldest_version: int,
    newest_version: int,
) -> list[Completion]:
    """All choices of an answer, in order of their index.

    Args:
        answer: As decoded.
        where: Names server and request in errors.
        request_id: That was sent.
        choices: That were asked for.
        vocab_size: Every id is below it.
        truncates: Every token must have a kept set with the token in it; else none may have one.
        max_tokens: That a choice may have.
        oldest_version: That the server carried when it was asked.
        newest_version: That it may have loaded meanwhile.

    Raises:
        OtherWeightsError: a token was sampled with other weights.
        AnswerError: anything else, naming server, request, choice and token position.
    """
    if answer.request_id != request_id:
        raise AnswerError(f"{where}: the answer is that of request {reprlib.repr(answer.request_id)}")
    indices = [choice.index for choice in answer.choices]
    if sorted(indices) != list(range(choices)):
        raise AnswerError(f"{where}: asked for {choices} choices, got those of index {reprlib.repr(indices)}")
    for choice in answer.choices:
        tokens = len(choice.token_ids) // 4
        if not 1 <= tokens <= max_tokens:
            raise AnswerError(
                f"{where}, choice {choice.index}: has {tokens} tokens; asked for 1 to {max_tokens}"
            )
    return [
        _check_choice(
            choice,
            f"{where}, choice {choice.index}",
            vocab_size,
            truncates,
            (oldest_version, newest_version),
        )
        for choice in sorted(answer.choices, key=lambda choice: choice.index)
    ]


def _check_choice(
    choice: Choice, where: str, vocab_size: int, truncates: bool, versions: tuple[int, int]
) -> Completion:
    if choice.finish_reason not in ENDS:
        found = reprlib.repr(choice.finish_reason)
        raise AnswerError(f"{where}: finish_reason {found}; a rollout ends by {', '.join(ENDS)}")
    try:
        arrays = choice.arrays(vocab_size, require_masks=truncates)
    except KeptTokensError as error:
        raise AnswerError(f"{where}: {error}") from error
    if arrays.logprobs is None:
        raise AnswerError(f"{where}: no logprobs, though logprobs=0 was asked for")
    if arrays.kept is not None and not truncates:
        raise AnswerError(
            f"{where}: kept_tokens from a source that does not truncate: it was sampled otherwise"
        )
    return Completion(
        token_ids=arrays.token_ids,
        logprobs=arrays.logprobs,
        kept=arrays.kept,
        finish_reason=choice.finish_reason,
        stop_token_id=choice.stop_reason if isinstance(choice.stop_reason, int) else None,
        weight_versions=_check_versions(choice, len(arrays.token_ids), where, versions),
    )


def _check_versions(
    choice: Choice, tokens: int, where: str, versions: tuple[int, int]
) -> list[tuple[int, int, int]]:
    """Spans cover the tokens in order, without gaps, and name versions that rise from oldest to newest."""
    oldest, newest = versions
    spans: list[tuple[int, int, int]] = []
    covered = 0
    for span in choice.weight_versions or []:
        if span.start != covered or span.end < span.start:
            raise AnswerError(
                f"{where}: weight_versions: span {reprlib.repr(span.version)} from {span.start} to "
                f"{span.end} does not follow position {covered}"
            )
        try:
            version = version_number(span.version)
        except ValueError as error:
            raise AnswerError(f"{where}: weight_versions at position {span.start}: {error}") from error
        if not (spans[-1][0] if spans else oldest) <= version <= newest:
            known = (
                f"version {newest}" if oldest == newest else f"versions {oldest} to {newest}, in this order"
            )
            raise OtherWeightsError(
                f"{where}: weight_versions at position {span.start}: sampled with {span.version!r}, "
                f"but this step is sampled with {known}"
            )
        if span.end > span.start:
            spans.append((version, span.start, span.end))
        covered = span.end
    if covered != tokens:
        raise AnswerError(f"{where}: weight_versions cover {covered} of {tokens} tokens")
    return spans
