"""From arrays and padded batches to kept sets and positions."""

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kept_loss import KeptSet, scored_tokens


def read_only(values: list[int], dtype: Any) -> Any:
    array = np.array(values, dtype)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint16, np.uint32])
@pytest.mark.parametrize("rows", [[[3, 17], [], [5]], [[], []], []])
def test_from_arrays_is_from_rows(rows: list[list[int]], dtype: Any) -> None:
    want = KeptSet.from_rows(rows)
    ids, counts = [token for row in rows for token in row], [len(row) for row in rows]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        arrays = KeptSet.from_arrays(read_only(ids, dtype), read_only(counts, dtype))
        tensors = KeptSet.from_arrays(torch.tensor(ids).int(), torch.tensor(counts).int())
        lists = KeptSet.from_arrays(ids, counts, device="cpu")
    for got in (arrays, tensors, lists):
        assert torch.equal(got.ids, want.ids)
        assert torch.equal(got.offsets, want.offsets)
        assert (got.ids.dtype, got.offsets.dtype) == (torch.int32, torch.int64)


def test_from_arrays_copies() -> None:
    array, tensor = np.array([1, 2], np.int32), torch.tensor([1, 2], dtype=torch.int32)
    kept = [KeptSet.from_arrays(one, [2]) for one in (array, tensor)]
    array[0] = tensor[0] = 9
    assert [one.ids.tolist() for one in kept] == [[1, 2], [1, 2]]


@pytest.mark.parametrize(
    ("ids", "counts", "text"),
    [
        ([1, 2], [3], "counts: sum to 3, but there are 2 ids"),
        ([1], [2, -1], "counts: at position 1: -1 is negative"),
        ([1, -1], [2], "ids: at entry 1: -1 is no token id"),
        ([2**31], [1], "ids: at entry 0: 2147483648 is no token id"),
        ([1.0], [1], "ids: has dtype torch.float32"),
        ([1], [True], "counts: has dtype torch.bool"),
        ([[1]], [1], r"ids: has shape \(1, 1\)"),
    ],
)
def test_from_arrays_refuses(ids: Any, counts: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        KeptSet.from_arrays(ids, counts)


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[list[int]], list[list[bool]], list[list[list[int]]]]:
    """Tokens, response mask and sets [B][T]; no first token is scored, every scored one is in its set."""
    num, width = draw(st.integers(0, 4)), draw(st.integers(1, 6))
    tokens = [[draw(st.integers(0, 99)) for _ in range(width)] for _ in range(num)]
    mask = [[t > 0 and draw(st.booleans()) for t in range(width)] for _ in range(num)]
    others = st.lists(st.integers(0, 99), max_size=3)
    sets = [
        [sorted({*draw(others), *([token] if scored else [])}) for token, scored in zip(*pair, strict=True)]
        for pair in zip(tokens, mask, strict=True)
    ]
    return tokens, mask, sets


@settings(max_examples=60, deadline=None)
@given(batches(), st.booleans())
def test_scored_tokens_are_what_a_loop_finds(batch: Any, flat: bool) -> None:
    tokens, mask, sets = batch
    width = len(tokens[0]) if tokens else 1
    where, labels, rows = [], [], []
    for b, sequence in enumerate(tokens):
        for t in range(1, width):
            if mask[b][t]:
                where.append((b, t - 1))
                labels.append(sequence[t])
                rows.append(sets[b][t])

    shape = (len(tokens), width)
    ids = np.array([token for row in sets for one in row for token in one], np.int32)
    counts = np.array([len(one) for row in sets for one in row], np.int32)
    got = scored_tokens(
        torch.tensor(tokens, dtype=torch.int64).reshape(shape),
        torch.tensor(mask, dtype=torch.bool).reshape(shape),
        ids,
        counts if flat else counts.reshape(shape),
    )
    hidden = torch.arange(shape[0] * width).reshape(shape)
    assert hidden.flatten()[got.hidden_positions].tolist() == [int(hidden[place]) for place in where]
    assert got.labels.tolist() == labels
    want = KeptSet.from_rows(rows)
    assert torch.equal(got.kept.ids, want.ids)
    assert torch.equal(got.kept.offsets, want.offsets)


GOOD: dict[str, Any] = {
    "token_ids": torch.tensor([[0, 4, 7], [1, 9, 0]]),
    "response_mask": torch.tensor([[0, 1, 1], [0, 1, 0]]),
    "kept_ids": [4, 5, 7, 9],
    "kept_counts": [0, 2, 1, 0, 1, 0],
}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"token_ids": torch.tensor([4, 7])}, r"token_ids: are torch.int64 \(2,\)"),
        ({"response_mask": torch.ones(2, 2)}, r"response_mask: has shape \(2, 2\), but must be \(2, 3\)"),
        ({"response_mask": torch.tensor([[0, 1, 1], [1, 1, 0]])}, "response_mask: sequence 1: token 0"),
        ({"kept_counts": [2, 1, 1]}, r"kept_counts: has shape \(3,\).* 2 x 3 tokens"),
        ({"kept_counts": [2, 1, 0, 0, 1, 0]}, "kept_counts: sequence 0, token 2: is scored but has no set"),
        ({"kept_ids": [4, 5]}, "counts: sum to 4, but there are 2 ids"),
    ],
)
def test_scored_tokens_refuses(changes: dict[str, Any], text: str) -> None:
    scored_tokens(**GOOD)
    with pytest.raises(ValueError, match=text):
        scored_tokens(**{**GOOD, **changes})


def test_tokens_sampled_without_truncation_may_have_no_set() -> None:
    got = scored_tokens(**{**GOOD, "kept_counts": [2, 1, 0, 0, 1, 0]}, require_sets=False)
    assert got.labels.tolist() == [4, 7, 9]
    assert got.kept.offsets.tolist() == [0, 1, 1, 2]
