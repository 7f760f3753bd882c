"""Training messages: round trip, the hash, and everything that the check refuses."""

from typing import Any

import msgspec
import numpy as np
import pytest

from kept_tokens import KeptTokens, KeptTokensError
from kept_tokens.messages import (
    StepResult,
    TrainingBatch,
    TrainingSample,
    check_batch,
    check_sample,
    check_samples,
    decode,
    encode,
)

FIELDS: dict[str, Any] = {
    "token_ids": [9, 8, 3, 5],
    "loss_mask": [0, 0, 1, 1],
    "logprobs": [0, 0, -0.5, 0],
    "temperatures": [1, 1, 0.7, 1],
    "advantages": [0, 0, 0.5, -0.5],
    "kept": KeptTokens.from_rows([[3, 7], [5]]).pad_tokens(2, 0),
    "must_have_masks": True,
    "source": "reverse",
    "group": "g",
    "sample_id": "s-1",
    "weight_versions": [(0, 2, 3), (1, 3, 4)],
}


def sample(**changes: Any) -> TrainingSample:
    return TrainingSample.build(**{**FIELDS, **changes})


def kept(*rows: list[int]) -> KeptTokens:
    return KeptTokens.from_rows(rows)


def int32(*values: int) -> bytes:
    return np.array(values, "<i4").tobytes()


def test_batch_round_trip() -> None:
    batch = TrainingBatch.build(1, [sample(), sample(kept=None, must_have_masks=False)])
    again = decode(encode(batch), TrainingBatch)
    assert again == batch
    check_batch(batch, vocab_size=10)
    check_batch(again, vocab_size=10)
    masked, free = again.samples
    assert masked.kept() == FIELDS["kept"]
    assert free.kept() is None
    assert masked.num_tokens == 4
    arrays = masked.arrays()
    for name in ("token_ids", "loss_mask", "logprobs", "advantages"):
        np.testing.assert_array_equal(getattr(arrays, name), FIELDS[name])
        assert not getattr(arrays, name).flags.writeable
    np.testing.assert_allclose(arrays.temperatures, FIELDS["temperatures"])
    assert masked.weight_versions[1].version == 1


def test_step_result_round_trip() -> None:
    result = StepResult(3, 3, {"loss": -0.25})
    assert decode(encode(result), StepResult) == result


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"token_ids": [], "loss_mask": [], "kept": None}, "token_ids: is empty"),
        ({"token_ids": [9, 8, 3, 10]}, "token_ids at position 3: 10 is outside the vocabulary of 10"),
        ({"token_ids": [-1, 8, 3, 5]}, "token_ids at position 0: -1 is negative"),
        ({"loss_mask": [0, 1, 1]}, "loss_mask: has 3 bytes, but 4 tokens"),
        ({"loss_mask": [1, 0, 1, 1], "weight_versions": []}, "loss_mask at position 0: 1 is 1 on the first"),
        (
            {"loss_mask": [1, 0, 1, 1], "weight_versions": [], "kept": None, "must_have_masks": False},
            "loss_mask at position 0: 1 is 1 on the first",
        ),
        ({"logprobs": [0, 0, -0.5]}, "logprobs: has 12 bytes, but 4 tokens"),
        ({"temperatures": [1]}, "temperatures: has 4 bytes"),
        ({"advantages": [0] * 5}, "advantages: has 20 bytes"),
        ({"logprobs": [0, 0, np.nan, 0]}, "logprobs at position 2: nan is not finite"),
        ({"logprobs": [0, 0, 0, -np.inf]}, "logprobs at position 3: -inf is not finite"),
        ({"logprobs": [0, 0, 0, np.inf]}, "logprobs at position 3: inf is not finite"),
        ({"logprobs": [0, 0, 0, 0.1]}, "logprobs at position 3: 0.1.* is above 0"),
        ({"logprobs": [0, 0, -9999.0, 0]}, "logprobs at position 2: -9999.0 means"),
        ({"logprobs": [0, -1, -0.5, 0]}, "logprobs at position 1: -1.0 is not 0"),
        ({"logprobs": [np.nan, 0, -0.5, 0]}, "logprobs at position 0: nan is not 0"),
        ({"temperatures": [1, 1, 0.009, 1]}, "temperatures at position 2: 0.009.* is below 0.01"),
        ({"temperatures": [1, 1, -1, 1]}, "temperatures at position 2: -1.0 is below"),
        ({"temperatures": [1, 1, 1, np.nan]}, "temperatures at position 3: nan is not finite"),
        ({"advantages": [0, 0, 0, np.inf]}, "advantages at position 3: inf is not finite"),
        ({"advantages": [0, 0, 0, 1e39]}, "advantages at position 3: inf is not finite"),
        (
            {"kept": kept([9], [], [3], [5])},
            "kept_counts at position 0: 1 is a kept set on a token with loss",
        ),
        (
            {"kept": kept([], [8], [3], [5])},
            "kept_counts at position 1: 1 is a kept set on a token with loss",
        ),
        ({"kept": kept([], [], [3], [])}, r"kept_counts at position 3: 0, but .* \(1 of 4 tokens"),
        ({"kept": None}, "kept_counts at position 2: 0, but this token must have a mask"),
        ({"kept": kept([], [], [4], [5])}, "token_ids at position 2: the sampled id 3 is not in"),
        ({"kept": kept([], [], [3, 10], [5])}, "kept_ids at position 2: 10 is outside"),
        ({"kept": kept([3], [5])}, "kept_counts: has 8 bytes, but 4 tokens"),
        ({"weight_versions": [(0, 2, 2), (0, 2, 4)]}, "weight_versions at position 2: span 2:2 .* is empty"),
        ({"weight_versions": [(0, 2, 5)]}, "weight_versions at position 2: span 2:5"),
        ({"weight_versions": [(0, 3, 4), (1, 2, 3)]}, "weight_versions at position 2: span 2:3 of version 1"),
        ({"weight_versions": [(0, 2, 4), (1, 3, 4)]}, "weight_versions at position 3: span 3:4"),
        ({"weight_versions": [(-1, 2, 4)]}, "weight_versions at position 2: version -1"),
        ({"weight_versions": [(0, 2, 3)]}, "weight_versions at position 3: no span covers"),
    ],
)
def test_refused_alone_and_in_a_batch(changes: dict[str, Any], text: str) -> None:
    wrong = sample(**changes)
    with pytest.raises(KeptTokensError, match=rf"sample \(id 's-1'\): {text}"):
        check_sample(wrong, vocab_size=10)
    batch = TrainingBatch.build(1, [sample(), wrong, sample()])
    with pytest.raises(KeptTokensError, match=rf"sample 1 \(id 's-1'\): {text}") as caught:
        check_batch(batch, vocab_size=10)
    assert (caught.value.sample_index, caught.value.sample_id) == (1, "s-1")


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("token_ids", b"12345", "token_ids: 5 bytes"),
        ("loss_mask", bytes([0, 0, 2, 1]), "loss_mask at position 2: 2 is neither"),
        ("kept_ids", bytes(8), "kept_counts: sum to 3, but kept_ids has 8 bytes"),
        ("kept_counts", b"", "kept_counts: has 0 bytes"),
        ("kept_counts", int32(0, 0, 4, -1), "kept_counts at position 3: -1 is negative"),
        ("kept_ids", int32(3, 3, 5), "kept_ids at position 2: 3 occurs twice"),
        ("kept_ids", int32(3, -3, 5), "kept_ids at position 2: -3 is negative"),
    ],
)
def test_damaged_bytes_are_refused(field: str, value: bytes, text: str) -> None:
    wrong = msgspec.structs.replace(sample(), **{field: value})
    with pytest.raises(KeptTokensError, match=text):
        check_sample(wrong)
    with pytest.raises(KeptTokensError, match=f"sample 1 .*{text}"):
        check_samples([sample(), wrong])


def test_damage_that_only_evens_out_over_two_samples_is_found() -> None:
    """Joined arrays would fit together; the samples do not."""
    long = msgspec.structs.replace(sample(), loss_mask=bytes([0, 0, 1, 1, 0]))
    short = msgspec.structs.replace(sample(), loss_mask=bytes([0, 1, 1]))
    with pytest.raises(KeptTokensError, match=r"sample 0 .*loss_mask: has 5 bytes"):
        check_samples([long, short])
    wide = msgspec.structs.replace(sample(), kept_ids=int32(3, 7, 5, 9))
    narrow = msgspec.structs.replace(sample(), kept_ids=int32(3, 7))
    with pytest.raises(KeptTokensError, match=r"sample 0 .*kept_counts"):
        check_samples([wide, narrow])


def test_untruncated_samples_need_no_masks() -> None:
    check_sample(sample(kept=None, must_have_masks=False))
    check_sample(sample(kept=kept([], [], [3], []), must_have_masks=False))
    check_sample(sample(weight_versions=[]))


def test_context_may_have_any_temperature_that_is_a_number() -> None:
    check_sample(sample(temperatures=[0, 0, 1, 1]))


def test_batch_needs_a_step_and_samples() -> None:
    with pytest.raises(KeptTokensError, match="step: 0"):
        check_batch(TrainingBatch.build(0, [sample()]))
    with pytest.raises(KeptTokensError, match="samples: is empty"):
        check_batch(TrainingBatch.build(1, []))


def test_changed_content_does_not_match_its_hash() -> None:
    batch = TrainingBatch.build(1, [sample()])
    assert len(batch.content_hash) == 16
    changed = msgspec.structs.replace(batch, samples=[sample(advantages=[0, 0, 1, 1])])
    for one in (changed, decode(encode(changed), TrainingBatch)):
        with pytest.raises(KeptTokensError, match="content_hash"):
            check_batch(one)
    damaged = encode(batch).replace(b"reverse", b"reverso")
    with pytest.raises(KeptTokensError, match="content_hash"):
        check_batch(decode(damaged, TrainingBatch))


def test_hash_follows_content_not_step() -> None:
    assert TrainingBatch.build(1, [sample()]).content_hash == TrainingBatch.build(2, [sample()]).content_hash
    assert (
        TrainingBatch.build(1, [sample()]).content_hash != TrainingBatch.build(1, [sample()] * 2).content_hash
    )


@pytest.mark.parametrize("kind", [TrainingBatch, StepResult, TrainingSample])
def test_undecodable_bytes_are_refused(kind: type) -> None:
    for data in (b"", b"\xc1", encode(StepResult(1, 1, {}))[:-1], msgspec.msgpack.encode({"step": "x"})):
        with pytest.raises(KeptTokensError, match=kind.__name__):
            decode(data, kind)


def test_undecodable_sample_is_named() -> None:
    batch = msgspec.msgpack.encode([1, [sample(), [b"", 3]], b""])
    with pytest.raises(KeptTokensError, match="sample 1: TrainingSample"):
        decode(batch, TrainingBatch)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"token_ids": [1.5]}, "token_ids: has dtype"),
        ({"token_ids": [2**31]}, "token_ids: entry 0"),
        ({"loss_mask": [0, 2]}, "loss_mask: .* other than 0 and 1"),
        ({"logprobs": ["a"]}, "logprobs: has dtype"),
        ({"advantages": [None]}, "advantages: has dtype"),
    ],
)
def test_build_refuses_what_the_wire_cannot_hold(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(KeptTokensError, match=text):
        sample(**changes)


FROZEN = {
    "objective": "cross_entropy",
    "kept": None,
    "must_have_masks": False,
    "logprobs": [0, 0, 0, 0],
    "weight_versions": [],
}
REFERENCE = {"reference_logprobs": [0, 0, -1, -2], "reference_weight": 0.1}


def test_frozen_samples_and_references_pass_the_check() -> None:
    check_samples([sample(**FROZEN), sample(**REFERENCE), sample()], vocab_size=10)
    check_sample(sample(**{**REFERENCE, "reference_weight": 0.0}))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"objective": "dpo"}, "objective: 'dpo' is neither 'policy_gradient' nor 'cross_entropy'"),
        ({**FROZEN, "logprobs": [0, 0, -1, 0]}, "logprobs: is set, but 'cross_entropy' has no importance"),
        ({**FROZEN, "weight_versions": [(0, 2, 4)]}, "weight_versions: is set, but"),
        ({**FROZEN, "kept": FIELDS["kept"]}, "kept_ids: is set, but"),
        ({**FROZEN, "must_have_masks": True}, "must_have_masks: is set, but"),
        ({**FROZEN, **REFERENCE}, "reference_logprobs: is set, but"),
        ({**REFERENCE, "reference_logprobs": [0, 0, -1]}, "reference_logprobs: has 12 bytes, but 4 tokens"),
        ({**REFERENCE, "reference_logprobs": [0, 0, -1, 1]}, "reference_logprobs at position 3: 1.0 is no"),
        ({**REFERENCE, "reference_logprobs": [0, 0, -9999, 0]}, "position 2: -9999.0 is no logprob"),
        ({**REFERENCE, "reference_logprobs": [0, 0, float("nan"), 0]}, "position 2: nan is no logprob"),
        ({**REFERENCE, "reference_logprobs": [0, -1, 0, 0]}, "position 1: -1.0 is not 0, but loss_mask"),
        ({**REFERENCE, "reference_weight": -1.0}, "reference_weight: -1.0 is not finite and >= 0"),
        ({**REFERENCE, "reference_weight": float("inf")}, "reference_weight: inf is not finite"),
        ({"reference_weight": 0.1}, "reference_logprobs: is empty, but reference_weight is 0.1; send both"),
    ],
)
def test_objectives_and_references_that_are_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(KeptTokensError) as error:
        check_sample(sample(**changes))
    assert text in str(error.value)
    with pytest.raises(KeptTokensError, match="sample 1"):
        check_samples([sample(), sample(**changes)])
