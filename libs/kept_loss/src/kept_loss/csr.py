"""Sums over the rows of a CSR structure: deterministic on every device, accurate for rows of any width."""

import torch
import torch.nn.functional as F
from torch import Tensor

FAN_IN = 64
"""Terms that are added one after the other before their sum is passed on: rounding then grows with the
logarithm of a row's width, not with the width."""


def positions_of(offsets: Tensor, num_entries: int) -> Tensor:
    """The row of each entry, int64 [M]; always a row that exists, also for offsets that make no sense."""
    entries = torch.arange(num_entries, device=offsets.device)
    rows = torch.searchsorted(offsets, entries, right=True) - 1
    return rows.clamp_(0, max(0, offsets.numel() - 2))


def row_max(values: Tensor, positions: Tensor, num_rows: int) -> Tensor:
    """The largest entry of each row, [N]; -inf for an empty one. NaN if an entry is."""
    largest = values.new_full((num_rows,), -torch.inf)
    return largest.scatter_reduce_(0, positions, values, "amax")


def first_entry_where(condition: Tensor, positions: Tensor, num_rows: int) -> Tensor:
    """The first entry of each row for which the condition holds, int64 [N]; M if there is none."""
    none = condition.numel()
    entries = torch.arange(none, device=condition.device)
    first = entries.new_full((num_rows,), none)
    return first.scatter_reduce_(0, positions, torch.where(condition, entries, none), "amin")


def row_sum(values: Tensor, offsets: Tensor) -> Tensor:
    """The sum of each row of float64 ``values`` [M], float64 [N]; 0 for an empty one."""
    assert values.dtype == torch.float64
    if values.numel() == 0:
        return values.new_zeros(offsets.numel() - 1)
    return torch.segment_reduce(values, "sum", offsets=offsets, initial=0.0, unsafe=True)


def weighted_row_sum(table: Tensor, index: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    """``out[n] = sum over the entries m of row n of weights[m] * table[index[m]]``, [N, H].

    Args:
        table: float32 or float64 [R, H].
        index: int64 [M], rows of the table.
        weights: [M], the table's dtype.
        offsets: int64 [N + 1].
    """
    if index.numel() == 0:
        return table.new_zeros(offsets.numel() - 1, table.shape[1])
    runs, rows_of_runs = _runs(offsets)
    sums = F.embedding_bag(
        index, table, runs, mode="sum", per_sample_weights=weights, include_last_offset=True
    )
    while rows_of_runs is not None:
        entries = torch.arange(sums.shape[0], device=sums.device)
        runs, upper = _runs(rows_of_runs)
        sums = F.embedding_bag(entries, sums, runs, mode="sum", include_last_offset=True)
        rows_of_runs = upper
    return sums


def _runs(offsets: Tensor) -> tuple[Tensor, Tensor | None]:
    """Cut rows into runs of at most FAN_IN entries.

    Returns the runs' offsets and, if any row was cut, the offsets of the rows over the runs.
    """
    counts = offsets.diff()
    if int(counts.max()) <= FAN_IN:
        return offsets, None
    runs_of_row = (counts + FAN_IN - 1) // FAN_IN
    rows_of_runs = F.pad(runs_of_row.cumsum(0), (1, 0))
    num_runs = int(rows_of_runs[-1])
    row = torch.repeat_interleave(runs_of_row, output_size=num_runs)
    place = torch.arange(num_runs, device=offsets.device) - rows_of_runs[row]
    runs = torch.cat([offsets[row] + place * FAN_IN, offsets[-1:]])
    return runs, rows_of_runs
