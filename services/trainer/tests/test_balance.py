"""Sequences over rows and ranks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keptset_trainer.balance import first_fit_decreasing, rows_of_ranks

LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=60)


@given(LENGTHS, st.integers(50, 200))
def test_rows_hold_every_sequence_once_and_all_but_one_are_half_full(lengths, row_tokens):
    rows = first_fit_decreasing(lengths, row_tokens)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    filled = sorted(sum(lengths[index] for index in row) for row in rows)
    assert filled[-1] <= row_tokens
    assert all(2 * tokens > row_tokens for tokens in filled[1:])


def test_a_sequence_that_fits_no_row_is_named():
    with pytest.raises(ValueError, match=r"sample 1: 9 tokens do not fit trainer.row_tokens = 8"):
        rows_of_ranks([3, 9], 8, 2)


@given(LENGTHS, st.integers(50, 200), st.integers(1, 5))
def test_ranks_have_the_same_number_of_rows_and_every_sequence_is_in_one(lengths, row_tokens, ranks):
    shares = rows_of_ranks(lengths, row_tokens, ranks)
    assert len(shares) == ranks
    assert len({len(rows) for rows in shares}) == 1
    assert sorted(i for rows in shares for row in rows for i in row) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= row_tokens for rows in shares for row in rows)


@given(LENGTHS, st.integers(50, 200), st.integers(2, 5))
def test_rows_of_one_round_differ_by_no_more_than_one_sequence(lengths, row_tokens, ranks):
    for together in zip(*rows_of_ranks(lengths, row_tokens, ranks), strict=True):
        filled = [sum(lengths[i] for i in row) for row in together]
        assert max(filled) - min(filled) <= max(lengths)


def test_one_rank_has_full_rows_and_two_have_even_ones():
    lengths = [40, 40, 40, 40, 20, 20]
    assert rows_of_ranks(lengths, 100, 1) == [[[0, 1, 4], [2, 3, 5]]]
    assert [[sum(lengths[i] for i in row) for row in rows] for rows in rows_of_ranks(lengths, 100, 2)] == [
        [100],
        [100],
    ]


def first_fit_by_looking(lengths: list[int], row_tokens: int) -> list[list[int]]:
    """The plain reference: every row is looked at."""
    rows: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fits = (row for row in rows if sum(lengths[i] for i in row) + lengths[index] <= row_tokens)
        row = next(fits, None)
        if row is None:
            rows.append(row := [])
        row.append(index)
    return rows


@given(st.lists(st.integers(1, 12), max_size=40), st.integers(12, 30))
def test_first_fit_finds_the_row_that_looking_at_all_of_them_finds(lengths: list[int], row_tokens: int):
    assert first_fit_decreasing(lengths, row_tokens) == first_fit_by_looking(lengths, row_tokens)
