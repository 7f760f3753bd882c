"""The first entries of rows, one after the other."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from keptset_inference.capture.compact import compact


@given(st.integers(1, 40).flatmap(lambda width: st.tuples(st.just(width), st.lists(st.integers(0, width)))))
def test_the_first_entries_of_each_row_come_in_order(drawn):
    width, counts = drawn
    rows = np.arange(len(counts) * width, dtype=np.int32).reshape(len(counts), width)
    want = [entry for row, count in zip(rows.tolist(), counts, strict=True) for entry in row[:count]]
    got = compact(rows, np.array(counts, np.int32))
    assert got.tolist() == want
    assert got.dtype == np.int32


def test_a_part_of_a_wider_array_is_copied_too():
    wide = np.arange(12, dtype=np.int32).reshape(2, 6)
    for counts in ([4, 4], [0, 1], [3, 4]):
        got = compact(wide[:, 2:], np.array(counts))
        assert got.tolist() == [2, 3, 4, 5][: counts[0]] + [8, 9, 10, 11][: counts[1]]
        got[:] = 0
    assert wide[0, 2] == 2
