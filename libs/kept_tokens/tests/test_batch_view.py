"""A batch that is looked at where it lies says and is refused as one that was decoded."""

import tracemalloc
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kept_tokens import KeptTokens, KeptTokensError, sample_checks
from kept_tokens.messages import (
    BatchView,
    TrainingBatch,
    TrainingSample,
    check_batch,
    check_samples,
    decode,
    encode,
)

VOCAB_SIZE = 1000


def sample(tokens: int, name: str = "s", width: int = 3, **changes: Any) -> TrainingSample:
    """The first token is context; the sets of the others are `width` consecutive ids."""
    said = tokens - 1
    starts = np.arange(said) % (VOCAB_SIZE - width)
    ids = (starts[:, None] + np.arange(width)).ravel()
    arrays: dict[str, Any] = {
        "token_ids": np.concatenate([[0], starts]),
        "loss_mask": np.arange(tokens) > 0,
        "logprobs": np.concatenate([[0.0], np.full(said, -1.0)]),
        "temperatures": np.ones(tokens),
        "advantages": np.ones(tokens),
    }
    return TrainingSample.build(
        **arrays | changes,
        kept=KeptTokens(ids, np.full(said, width)).pad_tokens(left=1),
        must_have_masks=True,
        source="test",
        group="g",
        sample_id=name,
    )


@given(st.lists(st.integers(2, 40), min_size=1, max_size=6))
def test_a_view_has_what_decoding_gives(lengths: list[int]) -> None:
    data = encode(TrainingBatch.build(3, [sample(n, str(i)) for i, n in enumerate(lengths)]))
    view, batch = BatchView(memoryview(data)), decode(data, TrainingBatch)
    assert (view.step, view.content_hash) == (batch.step, batch.content_hash)
    assert list(view.samples) == batch.samples
    assert view.samples[-1] == batch.samples[-1]
    assert view.samples[1:] == batch.samples[1:]
    assert view.samples.lengths() == lengths
    assert view.hash_of_content() == batch.content_hash
    check_batch(view, VOCAB_SIZE)


def test_a_sample_that_nobody_asks_for_is_not_looked_into() -> None:
    """Its last fields are no sample's: whoever decodes it says so, whoever reads another does not."""
    good = [sample(5, "0"), sample(9, "1")]
    broken = msgspec.msgpack.encode([*msgspec.to_builtins(good[1], builtin_types=(bytes,))[:-1], "heavy"])
    data = msgspec.msgpack.encode([1, [good[0], msgspec.Raw(broken)], bytes(16)])
    view = BatchView(data)
    assert view.samples.lengths() == [5, 9]
    assert view.samples[0] == good[0]
    with pytest.raises(KeptTokensError, match=r"sample 1.*TrainingSample: cannot be decoded"):
        view.samples[1]
    with pytest.raises(KeptTokensError, match=r"sample 0.*TrainingSample: cannot be decoded"):
        BatchView(msgspec.msgpack.encode([1, [[7]], bytes(16)])).samples.lengths()
    for damaged in (data[:-1], b"\x93\x01" + b"\x91" * 100_000):
        with pytest.raises(KeptTokensError, match="TrainingBatch: cannot be decoded"):
            BatchView(damaged)
        with pytest.raises(KeptTokensError, match="TrainingBatch: cannot be decoded"):
            decode(damaged, TrainingBatch)


@pytest.mark.parametrize("at_once", [1, 500, 1 << 22])
def test_the_first_wrong_sample_is_named_however_many_are_checked_together(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_checks, "BYTES_AT_ONCE", at_once)
    nan = np.concatenate([[0.0], np.full(19, np.nan)])
    samples = [sample(20, str(i), **({"logprobs": nan} if i in (7, 9) else {})) for i in range(12)]
    view = BatchView(encode(TrainingBatch.build(1, samples)))
    with pytest.raises(KeptTokensError, match=r"sample 7 \(id '7'\): logprobs at position 1: nan"):
        check_batch(view, VOCAB_SIZE)
    own = [0, 4, 9, 11]
    with pytest.raises(KeptTokensError, match=r"sample 9 \(id '9'\): logprobs"):
        check_samples((view.samples[i] for i in own), VOCAB_SIZE, own)
    check_samples((view.samples[i] for i in own[:2]), VOCAB_SIZE, own[:2])


def test_checking_a_large_batch_takes_little_memory_beside_it() -> None:
    data = encode(TrainingBatch.build(1, [sample(20_000, str(i), width=8) for i in range(60)]))
    assert len(data) > 50_000_000
    tracemalloc.start()
    try:
        check_batch(BatchView(data), VOCAB_SIZE)
        assert tracemalloc.get_traced_memory()[1] < len(data)
    finally:
        tracemalloc.stop()
