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


tokens = st.tuples(counts, st.sampled_from([None, 8, 30]))


@given(tokens, tokens)
def test_merging_is_counting_together(one: tuple, other: tuple) -> None:
    merged = KeptStatistics.of(*one).merge(KeptStatistics.of(*other))
    if one[1] == other[1]:
        together = KeptStatistics.of(one[0] + other[0], one[1])
        assert merged == together
        assert merged.metrics() == together.metrics()
    bounded = [(count, bound) for counts, bound in (one, other) for count in counts if bound and count]
    if bounded:
        assert merged.bound_share == np.mean([count >= bound for count, bound in bounded])
    else:
        assert math.isnan(merged.bound_share)


def test_metrics_leave_out_what_is_undefined() -> None:
    assert KeptStatistics.of([]).metrics() == {}
    assert KeptStatistics.of([0, 0], bound=512).metrics() == {"kept/coverage": 0.0}
    assert "kept/bound_share" not in KeptStatistics.of([0, 1, 512]).metrics()
    assert KeptStatistics.of([0, 1, 3, 512], bound=512).metrics() == {
        "kept/coverage": 0.75,
        "kept/size_mean": 172.0,
        "kept/size_p50": 3.0,
        "kept/size_p99": 512.0,
        "kept/singleton_share": 1 / 3,
        "kept/bound_share": 1 / 3,
    }
