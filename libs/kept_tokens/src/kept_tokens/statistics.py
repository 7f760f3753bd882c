"""How large kept sets are: what a run shows, mergeable over batches and processes."""

from dataclasses import dataclass, field
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True)
class KeptStatistics:
    """Statistics of kept-set sizes, exact however they were merged (a histogram of the sizes is kept).

    "Tokens" are those that were given to :meth:`of`: usually the loss tokens. What is undefined because no
    token has a mask (or there is no token) is NaN.
    """

    histogram: NDArray[np.int64] = field(default_factory=lambda: np.zeros(1, np.int64))
    """``histogram[s]`` is the number of tokens with a set of s ids; ``histogram[0]`` those without a mask."""
    num_bounded: int = 0
    """Tokens with a mask whose bound was given."""
    num_at_bound: int = 0
    """Those of them whose set is as large as that."""

    @classmethod
    def of(cls, counts: ArrayLike, bound: int | None = None) -> Self:
        """Of the counts of some tokens, integers [T], 0 where there is no mask.

        Args:
            counts: Of tokens that were sampled alike.
            bound: The largest set that they could have: the top_k that they were sampled with, or the width
                of what recorded them. None: it is not known here.
        """
        array = np.asarray(counts)
        if array.size == 0:
            return cls()
        histogram = np.bincount(array).astype(np.int64)
        if bound is None:
            return cls(histogram)
        # ties, which some samplers keep, may make a set larger
        return cls(histogram, int(np.count_nonzero(array)), int(np.count_nonzero(array >= bound)))

    def merge(self, other: "KeptStatistics") -> "KeptStatistics":
        """Both together, as if all their tokens had been given at once, each with its bound."""
        merged = np.zeros(max(len(self.histogram), len(other.histogram)), np.int64)
        merged[: len(self.histogram)] += self.histogram
        merged[: len(other.histogram)] += other.histogram
        return KeptStatistics(
            merged, self.num_bounded + other.num_bounded, self.num_at_bound + other.num_at_bound
        )

    def __eq__(self, other: object) -> bool:
        """Same sizes, as many at their bounds."""
        if not isinstance(other, KeptStatistics):
            return NotImplemented
        bounds = (self.num_bounded, self.num_at_bound) == (other.num_bounded, other.num_at_bound)
        return bounds and np.array_equal(self.histogram, other.histogram)

    __hash__ = None  # type: ignore[assignment]

    @property
    def num_tokens(self) -> int:
        """All tokens."""
        return int(self.histogram.sum())

    @property
    def num_masked(self) -> int:
        """Tokens with a mask."""
        return int(self.histogram[1:].sum())

    @property
    def coverage(self) -> float:
        """Share of the tokens that have a mask."""
        return _share(self.num_masked, self.num_tokens)

    @property
    def size_mean(self) -> float:
        """Mean number of ids over the tokens with a mask."""
        return _share(int(self.histogram @ np.arange(len(self.histogram))), self.num_masked)

    def size_quantile(self, share: float) -> float:
        """The smallest size such that at least ``share`` of the masked tokens have no larger one."""
        if not self.num_masked:
            return float("nan")
        at_most = np.cumsum(self.histogram[1:])
        return float(np.searchsorted(at_most, share * self.num_masked, side="left") + 1)

    @property
    def size_p50(self) -> float:
        """Median size (a size that occurs)."""
        return self.size_quantile(0.5)

    @property
    def size_p99(self) -> float:
        """99th percentile of the size."""
        return self.size_quantile(0.99)

    @property
    def singleton_share(self) -> float:
        """Share of the masked tokens whose set is the sampled id alone: their logprob is exactly 0."""
        return _share(int(self.histogram[1]) if len(self.histogram) > 1 else 0, self.num_masked)

    @property
    def bound_share(self) -> float:
        """Share of the masked tokens whose set is as large as its bound allows (or larger), among those whose
        bound is known: top_k cut them, or nothing more would have been recorded.
        """
        return _share(self.num_at_bound, self.num_bounded)

    def metrics(self) -> dict[str, float]:
        """Under the names of the metrics rows (``kept/...``); what is undefined is left out."""
        named = {
            "kept/coverage": self.coverage,
            "kept/size_mean": self.size_mean,
            "kept/size_p50": self.size_p50,
            "kept/size_p99": self.size_p99,
            "kept/singleton_share": self.singleton_share,
            "kept/bound_share": self.bound_share,
        }
        return {name: value for name, value in named.items() if value == value}


def _share(part: int, whole: int) -> float:
    return part / whole if whole else float("nan")
