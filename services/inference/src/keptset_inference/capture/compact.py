"""From rows of one width to one flat array, at the price of what is in them."""

import numpy as np

SPARSE = 8
"""Where less than one entry in so many counts, these are taken one by one."""


def compact(rows: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The first `counts[r]` entries of each row r, row after row; a copy.

    Args:
        rows: [R, W].
        counts: [R], 0 to W.
    """
    total = int(counts.sum())
    if total == rows.size:
        return rows.flatten()
    if total * SPARSE > rows.size:
        return rows[np.arange(rows.shape[1], dtype=np.int32) < counts[:, None]]
    place = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
    return rows[np.repeat(np.arange(len(rows)), counts), place]


__all__ = ["compact"]
