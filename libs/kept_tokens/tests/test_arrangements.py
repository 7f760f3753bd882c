"""Cutting, padding, joining and splitting carry every token's record along, however they are nested."""

from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kept_tokens import KeptTokens
from kept_tokens.messages import (
    CROSS_ENTROPY,
    TrainingSample,
    check_sample,
    cut_sample,
    join_samples,
    pad_sample,
    split_sample,
)

VOCAB = 40


class Token(NamedTuple):
    """All that a sample says of one token: the plain model that the operations are compared with."""

    token_id: int
    loss: bool = False
    logprob: float = 0.0
    temperature: float = 1.0
    advantage: float = 0.0
    reference: float = 0.0
    kept: tuple[int, ...] = ()
    version: int | None = None


FLOATS = st.floats(-8, 0, width=32)


@st.composite
def tokens(draw: st.DrawFn) -> list[Token]:
    """A prompt, then sampled tokens and context in any order: two turns, stop strings, whatever."""
    found = [Token(draw(st.integers(0, VOCAB - 1)))]
    for _ in range(draw(st.integers(0, 11))):
        kept = draw(st.sets(st.integers(0, VOCAB - 1), min_size=1, max_size=5))
        if draw(st.booleans()):
            found.append(
                Token(
                    draw(st.sampled_from(sorted(kept))),
                    True,
                    draw(FLOATS),
                    draw(st.sampled_from([0.5, 1.0])),
                    draw(st.floats(-2, 2, width=32)),
                    draw(FLOATS),
                    tuple(sorted(kept)),
                    draw(st.integers(0, 2)),
                )
            )
        else:
            found.append(Token(draw(st.integers(0, VOCAB - 1))))
    return found


def sample_of(found: list[Token], **changes: Any) -> TrainingSample:
    versions, last = [], None
    for t, token in enumerate(found):
        if token.version is not None:
            if versions and versions[-1][2] == t and last == token.version:
                versions[-1] = (token.version, versions[-1][1], t + 1)
            else:
                versions.append((token.version, t, t + 1))
        last = token.version
    fields: dict[str, Any] = {
        "token_ids": [token.token_id for token in found],
        "loss_mask": [token.loss for token in found],
        "logprobs": [token.logprob for token in found],
        "temperatures": [token.temperature for token in found],
        "advantages": [token.advantage for token in found],
        "kept": KeptTokens.from_rows([token.kept for token in found]),
        "must_have_masks": True,
        "source": "s",
        "group": "g",
        "sample_id": "i",
        "weight_versions": versions,
        "reference_logprobs": [token.reference for token in found],
        "reference_weight": 0.5,
    }
    return TrainingSample.build(**{**fields, **changes})


def tokens_of(sample: TrainingSample) -> list[Token]:
    arrays, kept, reference = sample.arrays(), sample.kept(), sample.reference()
    assert kept is not None
    assert reference is not None
    versions: list[int | None] = [None] * sample.num_tokens
    for version, start, end in sample.weight_versions:
        versions[start:end] = [version] * (end - start)
    columns = [column.tolist() for column in arrays]
    rows = [tuple(row) for row in kept.rows()]
    return [Token(*values) for values in zip(*columns, reference.tolist(), rows, versions, strict=True)]


@given(tokens())
def test_model_and_sample_say_the_same(found: list[Token]) -> None:
    sample = sample_of(found)
    check_sample(sample, VOCAB)
    assert tokens_of(sample) == found


@given(st.data())
def test_nested_operations_never_move_a_mask(data: st.DataObject) -> None:
    found = data.draw(tokens())
    sample = sample_of(found)
    for _ in range(data.draw(st.integers(1, 8))):
        operation = data.draw(st.sampled_from(["cut", "pad", "join", "split"]))
        if operation == "cut":
            stop = data.draw(st.integers(1, len(found)))
            start = data.draw(st.integers(0, stop - 1))
            sample, found = cut_sample(sample, start, stop), found[start:stop]
        elif operation == "pad":
            more = data.draw(st.integers(0, 4))
            sample, found = pad_sample(sample, more, token_id=3), found + [Token(3)] * more
        elif operation == "join":
            others = data.draw(st.lists(tokens(), max_size=2))
            before = data.draw(st.integers(0, len(others)))
            order = [*others[:before], found, *others[before:]]
            sample = join_samples([sample if one is found else sample_of(one) for one in order])
            found = [token for one in order for token in one]
        else:
            middle = data.draw(st.integers(0, len(found)))
            lengths = [length for length in (middle, len(found) - middle) if length]
            parts = split_sample(sample, lengths)
            chosen = data.draw(st.integers(0, len(parts) - 1))
            start = sum(lengths[:chosen])
            sample, found = parts[chosen], found[start : start + lengths[chosen]]
        assert tokens_of(sample) == found


@settings(max_examples=40)
@given(st.lists(tokens(), min_size=1, max_size=4))
def test_split_is_the_inverse_of_join(drawn: list[list[Token]]) -> None:
    samples = [sample_of(found) for found in drawn]
    assert split_sample(join_samples(samples), [sample.num_tokens for sample in samples]) == samples


@settings(max_examples=40)
@given(tokens(), st.integers(0, 5))
def test_padded_and_cut_samples_still_pass_the_check(found: list[Token], more: int) -> None:
    check_sample(pad_sample(sample_of(found), more), VOCAB)
    for stop in range(1, len(found) + 1):
        check_sample(cut_sample(sample_of(found), 0, stop), VOCAB)


def test_sample_without_masks_joins_one_with_masks_by_empty_sets() -> None:
    masked = sample_of([Token(1), Token(2, True, -1.0, kept=(2, 3), version=0)], must_have_masks=False)
    plain = sample_of([Token(1), Token(2, True, -1.0, version=0)], must_have_masks=False, kept=None)
    kept = join_samples([plain, masked]).kept()
    assert kept is not None
    assert kept.rows() == [[], [], [], [2, 3]]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"must_have_masks": False}, "must_have_masks"),
        ({"reference_weight": 0.0}, "reference_weight"),
        ({"reference_logprobs": None}, "with and without reference_logprobs"),
        ({"objective": CROSS_ENTROPY}, "objective"),
    ],
)
def test_what_cannot_be_said_of_both_is_refused(changes: dict[str, Any], text: str) -> None:
    first = [Token(1), Token(2, True, -1.0, kept=(2,), version=0)]
    with pytest.raises(ValueError, match=text):
        join_samples([sample_of(first), sample_of(first, **changes)])


def test_wrong_bounds_are_named() -> None:
    sample = sample_of([Token(1), Token(2)])
    with pytest.raises(ValueError, match="1:3 is empty or not inside the 2 tokens"):
        cut_sample(sample, 1, 3)
    with pytest.raises(ValueError, match="2:2 is empty"):
        cut_sample(sample, 2, 2)
    with pytest.raises(ValueError, match="cannot pad by -1"):
        pad_sample(sample, -1)
    with pytest.raises(ValueError, match="lengths sum to 3"):
        split_sample(sample, [1, 2])
    with pytest.raises(ValueError, match="nothing to join"):
        join_samples([])


def test_padding_keeps_the_wire_types() -> None:
    padded = pad_sample(sample_of([Token(1)]), 3)
    assert len(padded.token_ids) == 16
    assert len(padded.loss_mask) == 4
    assert np.frombuffer(padded.temperatures, "<f4").tolist() == [1, 1, 1, 1]
