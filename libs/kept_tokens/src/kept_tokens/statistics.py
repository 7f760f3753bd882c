"""How large kept sets are: what a run shows, mergeable over batches and processes."""

from dataclasses import dataclass, field
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

CAPTURE_WIDTH = 512
"""The bound of keptset's own capture: a set of this size was probably cut by top_k, not by top_p."""


@dataclass(frozen=True)
class KeptStatistics:
    """Statistics of kept-set sizes, exact however they were merged (a histogram of the sizes is kept).

    "Tokens" are those that were given to :meth:`of`: usually the loss tokens. What is undefined because no
    token has a mask (or there is no token) is NaN.
    """

    histogram: NDArray[np.int64] = field(default_factory=lambda: np.zeros(1, np.int64))
    """``histogram[s]`` is the number of tokens with a set of s ids; ``histogram[0]`` those without a mask."""
    bound: int = CAPTURE_WIDTH
    """The largest set that the capture records."""

    @classmethod
    def of(cls, counts: ArrayLike, bound: int = CAPTURE_WIDTH) -> Self:
        """Of the counts of some tokens, integers [T], 0 where there is no mask."""
        array = np.asarray(counts)
        if array.size == 0:
            return cls(bound=bound)
        return cls(np.bincount(array).astype(np.int64), bound)

    def merge(self, other: "KeptStatistics") -> "KeptStatistics":
        """Both together, as if all their tokens had been given at once.

        Raises:
            ValueError: the bounds differ, so that "share at the bound" has no meaning.
        """
        if self.bound != other.bound:
            raise ValueError(f"bound: {self.bound} and {other.bound} cannot be merged; use one bound for all")
        merged = np.zeros(max(len(self.histogram), len(other.histogram)), np.int64)
        merged[: len(self.histogram)] += self.histogram
        merged[: len(other.histogram)] += other.histogram
        return KeptStatistics(merged, self.bound)

    def __eq__(self, other: object) -> bool:
        """Same sizes, same bound."""
        if not isinstance(other, KeptStatistics):
            return NotImplemented
        return self.bound == other.bound and np.array_equal(self.histogram, other.histogram)

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
        """Share of the masked tokens whose set is as large as the capture records (or larger)."""
        return _share(int(self.histogram[self.bound :].sum()), self.num_masked)

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
