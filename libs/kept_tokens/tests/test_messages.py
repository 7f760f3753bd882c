"""Training messages: round trip, the hash, and everything that the check refuses."""

import numpy as np
import pytest

from kept_tokens import KeptTokens, KeptTokensError
from kept_tokens.messages import (
    StepResult,
    TrainingBatch,
    TrainingSample,
    check_batch,
    check_sample,
    decode,
    encode,
)

FIELDS = dict(
    token_ids=[9, 8, 3, 5],
    loss_mask=[0, 0, 1, 1],
    logprobs=[0, 0, -0.5, 0],
    temperatures=[1, 1, 1, 1],
    advantages=[0, 0, 0.5, 0.5],
    kept=KeptTokens.from_rows([[3, 7], [5]]).pad_tokens(2, 0),
    must_have_masks=True,
    source="reverse",
    group="g",
    sample_id="s-1",
    weight_versions=[(0, 2, 4)],
)


def sample(**changes: object) -> TrainingSample:
    return TrainingSample.build(**{**FIELDS, **changes})  # type: ignore[arg-type]


def test_batch_round_trip() -> None:
    batch = TrainingBatch.build(1, [sample(), sample(kept=None, must_have_masks=False)])
    again = decode(encode(batch), TrainingBatch)
    assert again == batch
    check_batch(again, vocab_size=10)
    assert again.samples[0].kept() == FIELDS["kept"]
    assert again.samples[1].kept() is None
    np.testing.assert_array_equal(again.samples[0].arrays().token_ids, FIELDS["token_ids"])


def test_step_result_round_trip() -> None:
    result = StepResult(3, 3, {"loss": -0.25})
    assert decode(encode(result), StepResult) == result


def test_sample_outside_vocabulary_is_refused() -> None:
    with pytest.raises(
        KeptTokensError, match=r"s-1.*token_ids at position 0: 9 is outside the vocabulary of 9"
    ):
        check_sample(sample(), vocab_size=9)
