"""Answers that break a rule stop the run and say where: server, request, choice, position."""

from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from kept_tokens import KeptTokens
from kept_tokens.answers import Choice, GenerateAnswer, KeptBytes, VersionSpan
from keptset_orchestrator import AnswerError

from .driving import Drive
from .fake_inference import FakeInference
from .fake_trainer import FakeTrainer

Change = Callable[[Choice], Choice]


def floats(choice: Choice) -> np.ndarray:
    return np.frombuffer(choice.logprobs, "<f4").copy()


def with_logprob(value: float) -> Change:
    def change(choice: Choice) -> Choice:
        logprobs = floats(choice)
        logprobs[-1] = value
        return msgspec.structs.replace(choice, logprobs=logprobs.tobytes())

    return change


def with_kept(change: Callable[[list[list[int]], list[int]], list[list[int]]]) -> Change:
    def changed(choice: Choice) -> Choice:
        kept = KeptTokens.from_bytes(choice.kept_tokens.ids, choice.kept_tokens.counts)
        tokens = np.frombuffer(choice.token_ids, "<i4").tolist()
        rows = KeptTokens.from_rows(change(kept.rows(), tokens))
        return msgspec.structs.replace(choice, kept_tokens=KeptBytes(*rows.to_bytes()))

    return changed


def with_fields(**fields: object) -> Change:
    return lambda choice: msgspec.structs.replace(choice, **fields)


def with_span(version: str, first: int = 0, missing: int = 0) -> Change:
    def change(choice: Choice) -> Choice:
        tokens = len(choice.token_ids) // 4
        return msgspec.structs.replace(
            choice, weight_versions=[VersionSpan(version, first, tokens - missing)]
        )

    return change


LAST = "last token"
OF_ONE_CHOICE = {
    "no masks": (with_fields(kept_tokens=None), r"kept_tokens: is missing"),
    "a mask lost": (
        with_kept(lambda rows, _: [*rows[:-1], []]),
        rf"counts at position {LAST}: 0, but this token",
    ),
    "masks of other tokens": (
        with_kept(lambda rows, tokens: [*rows[:-1], [(tokens[-1] + 1) % 200]]),
        rf"sampled_ids at position {LAST}: the sampled id \d+ is not in the kept set",
    ),
    "a mask too few": (
        with_kept(lambda rows, _: rows[:-1]),
        r"counts: has \d+ entries, but there are \d+ tokens",
    ),
    "an id beyond the vocabulary": (
        with_kept(lambda rows, _: [*rows[:-1], [*rows[-1], 261]]),
        rf"ids at position {LAST}: 261 is outside the vocabulary of 261",
    ),
    "an id twice": (
        lambda choice: msgspec.structs.replace(
            choice,
            kept_tokens=KeptBytes(
                choice.kept_tokens.ids + choice.kept_tokens.ids[-4:],
                choice.kept_tokens.counts[:-4]
                + (np.frombuffer(choice.kept_tokens.counts[-4:], "<i4") + 1).tobytes(),
            ),
        ),
        rf"ids at position {LAST}: \d+ occurs twice",
    ),
    "a NaN": (with_logprob(float("nan")), rf"logprobs at position {LAST}: nan is no logprob"),
    "minus infinity": (with_logprob(float("-inf")), rf"logprobs at position {LAST}: -inf is no logprob"),
    "no evidence": (with_logprob(-9999.0), rf"logprobs at position {LAST}: -9999.0 is no logprob"),
    "a probability above 1": (with_logprob(0.5), rf"logprobs at position {LAST}: 0.5 is no logprob"),
    "no logprobs": (with_fields(logprobs=None), r"no logprobs"),
    "a logprob too few": (
        lambda choice: msgspec.structs.replace(choice, logprobs=choice.logprobs[:-4]),
        r"logprobs: has \d+ entries, but there are \d+ tokens",
    ),
    "half a logprob": (
        lambda choice: msgspec.structs.replace(choice, logprobs=choice.logprobs[:-2]),
        r"logprobs: \d+ bytes are no whole number",
    ),
    "a token beyond the vocabulary": (
        lambda choice: msgspec.structs.replace(
            choice, token_ids=choice.token_ids[:-4] + np.int32(261).tobytes()
        ),
        rf"token_ids at position {LAST}: 261 is outside the vocabulary",
    ),
    "a negative token": (
        lambda choice: msgspec.structs.replace(
            choice, token_ids=choice.token_ids[:-4] + np.int32(-1).tobytes()
        ),
        rf"token_ids at position {LAST}: -1 is outside the vocabulary",
    ),
    "other weights": (
        with_span("v000007"),
        r"weight_versions at position 0: sampled with 'v000007', but this step",
    ),
    "unreadable weights": (with_span("latest"), r"weight_versions at position 0: weight version 'latest'"),
    "a token of no weights": (with_span("v000000", missing=1), r"weight_versions cover \d+ of \d+ tokens"),
    "weights from the second token on": (
        with_span("v000000", first=1),
        r"from 1 to \d+ does not follow position 0",
    ),
    "no weights": (with_fields(weight_versions=None), r"weight_versions cover 0 of \d+ tokens"),
    "no tokens": (
        with_fields(token_ids=b"", logprobs=b"", kept_tokens=KeptBytes(b"", b""), weight_versions=[]),
        r"has 0 tokens; asked for 1 to 12",
    ),
    "more tokens than were asked for": (
        lambda choice: msgspec.structs.replace(
            choice,
            token_ids=choice.token_ids[:4] * 13,
            logprobs=choice.logprobs[:4] * 13,
            kept_tokens=KeptBytes(choice.token_ids[:4] * 13, np.ones(13, "<i4").tobytes()),
            weight_versions=[VersionSpan("v000000", 0, 13)],
        ),
        r"has 13 tokens; asked for 1 to 12",
    ),
    "counts beyond all bounds": (
        lambda choice: msgspec.structs.replace(
            choice,
            kept_tokens=KeptBytes(
                choice.kept_tokens.ids,
                choice.kept_tokens.counts[:-4] + np.int32(2**31 - 1).tobytes(),
            ),
        ),
        r"counts: sum to \d+, but there are \d+ ids",
    ),
    "a negative count": (
        lambda choice: msgspec.structs.replace(
            choice,
            kept_tokens=KeptBytes(
                choice.kept_tokens.ids, choice.kept_tokens.counts[:-4] + np.int32(-1).tobytes()
            ),
        ),
        rf"counts at position {LAST}: -1 is negative",
    ),
    "an aborted request": (with_fields(finish_reason="abort"), r"finish_reason 'abort'"),
}


@pytest.mark.parametrize("name", OF_ONE_CHOICE)
async def test_choice_that_breaks_a_rule_stops_the_run(
    name: str, drive: Drive, inference: FakeInference, trainer: FakeTrainer
):
    change, text = OF_ONE_CHOICE[name]
    spoiled: list[tuple[str, int]] = []

    def tamper(answer: GenerateAnswer) -> GenerateAnswer:
        if "reverse-text-1-1" not in answer.request_id:
            return answer
        tokens = len(answer.choices[2].token_ids) // 4
        spoiled.append((answer.request_id, tokens))
        choices = [change(choice) if choice.index == 2 else choice for choice in answer.choices]
        return msgspec.structs.replace(answer, choices=choices)

    inference.tamper = tamper
    with pytest.raises(AnswerError) as raised:
        await drive()
    (request_id, tokens), said = spoiled[0], str(raised.value)
    assert f"inference server {inference.url}: request {request_id} (source reverse-text), choice 2: " in said
    raised.match(text.replace(LAST, str(tokens - 1)))
    assert len(spoiled) == 1, "an answer that breaks a rule is not asked for again"
    assert trainer.puts == []


OF_THE_ANSWER = {
    "a choice too few": (
        lambda a: {"choices": a.choices[:-1]},
        r"asked for 4 choices, got those of index \[0, 1, 2\]",
    ),
    "a choice doubled": (lambda a: {"choices": [*a.choices[:-1], a.choices[0]]}, r"of index \[0, 1, 2, 0\]"),
    "no choices": (lambda a: {"choices": []}, r"of index \[\]"),
    "masks of another choice": (
        lambda a: {
            "choices": [
                msgspec.structs.replace(one, kept_tokens=other.kept_tokens)
                for one, other in zip(a.choices, [*a.choices[1:], a.choices[0]], strict=True)
            ]
        },
        r"choice \d: (counts: has \d+ entries|sampled_ids at position \d+: the sampled id \d+ is not in)",
    ),
    "a name of a million letters": (lambda a: {"request_id": "x" * 1_000_000}, r"of request 'xx.{0,40}xx'"),
    "another request's": (
        lambda a: {"request_id": "of-somebody"},
        r"the answer is that of request 'of-somebody'",
    ),
}


@pytest.mark.parametrize("name", OF_THE_ANSWER)
async def test_answer_that_breaks_the_contract_stops_the_run(
    name: str, drive: Drive, inference: FakeInference, trainer: FakeTrainer
):
    # verl#438: n > 1: ignored, or identical samples
    change, text = OF_THE_ANSWER[name]
    inference.tamper = lambda answer: msgspec.structs.replace(answer, **change(answer))
    with pytest.raises(AnswerError, match=text):
        await drive()
    assert trainer.puts == []


async def test_masks_where_nothing_truncates_stop_the_run(drive: Drive, inference: FakeInference):
    drive.settings.train.sampling.top_p = 1.0
    drive.settings.train.sampling.top_k = -1

    def tamper(answer: GenerateAnswer) -> GenerateAnswer:
        choices = [
            msgspec.structs.replace(
                choice,
                kept_tokens=KeptBytes(choice.token_ids, np.ones(len(choice.token_ids) // 4, "<i4").tobytes()),
            )
            for choice in answer.choices
        ]
        return msgspec.structs.replace(answer, choices=choices)

    inference.tamper = tamper
    with pytest.raises(AnswerError, match="kept_tokens from a source that does not truncate"):
        await drive()


async def test_choices_may_come_in_any_order(drive: Drive, inference: FakeInference, trainer: FakeTrainer):
    drive.settings.steps = 1
    await drive()
    in_order = trainer.batches.pop(1)
    inference.restarted()
    inference.tamper = lambda answer: msgspec.structs.replace(answer, choices=answer.choices[::-1])
    await drive()
    assert trainer.batches[1].content_hash == in_order.content_hash


async def test_a_rollout_that_went_round_in_circles_is_trained_on(
    drive: Drive, inference: FakeInference, trainer: FakeTrainer
):
    """As sampling.extra_body asks for with repetition_detection; vLLM then says so."""
    drive.settings.steps = 1
    sampling = drive.settings.train.sampling
    sampling.extra_body = {"repetition_detection": {"max_pattern_size": 2, "min_count": 2}}
    ended = with_fields(finish_reason="repetition", stop_reason="repetition_detected")
    inference.tamper = lambda answer: msgspec.structs.replace(answer, choices=[*map(ended, answer.choices)])
    (row,) = await drive()
    assert row["rollout/truncated_share"] == 0
    assert trainer.batches[1].samples
