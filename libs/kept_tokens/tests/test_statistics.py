"""KeptStatistics against numpy, and merging."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kept_tokens.statistics import KeptStatistics

counts = st.lists(st.integers(0, 40), max_size=60)


@given(counts)
def test_equals_numpy(given_counts: list[int]) -> None:
    stats = KeptStatistics.of(given_counts, bound=30)
    sizes = np.array([c for c in given_counts if c])
    assert stats.num_tokens == len(given_counts)
    if len(sizes) == 0:
        assert math.isnan(stats.size_mean)
        assert math.isnan(stats.size_p99)
        return
    assert stats.coverage == len(sizes) / len(given_counts)
    assert stats.size_mean == pytest.approx(sizes.mean())
    assert stats.size_p50 == np.quantile(sizes, 0.5, method="inverted_cdf")
    assert stats.size_p99 == np.quantile(sizes, 0.99, method="inverted_cdf")
    assert stats.singleton_share == (sizes == 1).mean()
    assert stats.bound_share == (sizes >= 30).mean()


@given(counts, counts)
def test_merging_is_counting_together(one: list[int], other: list[int]) -> None:
    merged = KeptStatistics.of(one).merge(KeptStatistics.of(other))
    together = KeptStatistics.of(one + other)
    assert merged == together
    assert merged.metrics() == together.metrics()


def test_metrics_leave_out_what_is_undefined() -> None:
    assert KeptStatistics.of([]).metrics() == {}
    assert KeptStatistics.of([0, 0]).metrics() == {"kept/coverage": 0.0}
    assert KeptStatistics.of([0, 1, 3, 512]).metrics() == {
        "kept/coverage": 0.75,
        "kept/size_mean": 172.0,
        "kept/size_p50": 3.0,
        "kept/size_p99": 512.0,
        "kept/singleton_share": 1 / 3,
        "kept/bound_share": 1 / 3,
    }


def test_different_bounds_do_not_merge() -> None:
    with pytest.raises(ValueError, match="bound: 512 and 8"):
        KeptStatistics.of([1]).merge(KeptStatistics.of([1], bound=8))
