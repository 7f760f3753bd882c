"""Logits at the kept ids alone: gather rows of W, never a row of the vocabulary."""

import torch
from torch import Tensor

from .csr import weighted_row_sum

CHUNK_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 26}
"""Elements of the gathered [ids, H] block by device: the cache of a CPU, a small part of a GPU's memory."""


def chunk_of(hidden_size: int, device: torch.device) -> int:
    """How many rows of W are gathered at a time."""
    return max(1, CHUNK_ELEMENTS.get(device.type, 1 << 26) // max(1, hidden_size))


def kept_logits(hidden: Tensor, weight: Tensor, ids: Tensor, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """``hidden[positions[m]] @ weight[ids[m]]``, ``dtype`` [M]; products and sums in ``dtype``."""
    logits = torch.empty(ids.numel(), dtype=dtype, device=hidden.device)
    step = chunk_of(hidden.shape[1], hidden.device)
    for start in range(0, ids.numel(), step):
        part = slice(start, start + step)
        rows = weight.index_select(0, ids[part]).to(dtype)  # [chunk, H]
        rows.mul_(hidden.index_select(0, positions[part]))
        torch.sum(rows, -1, out=logits[part])
    return logits


def add_hidden_gradient(
    grad_hidden: Tensor, weight: Tensor, ids: Tensor, offsets: Tensor, positions: Tensor, grad_logits: Tensor
) -> None:
    """``grad_hidden[n] += sum over m of n: grad_logits[m] * weight[ids[m]]``.

    Args:
        grad_hidden: float32 or float64 [N, H], changed in place.
        weight: [V, H], any dtype.
        ids: int32 [M].
        offsets: int64 [N + 1].
        positions: int64 [M], the row of each id.
        grad_logits: [M], the same dtype as grad_hidden.
    """
    if weight.dtype == grad_hidden.dtype:
        grad_hidden += weighted_row_sum(weight, ids.long(), grad_logits, offsets)
        return
    step = chunk_of(weight.shape[1], weight.device)
    for start in range(0, ids.numel(), step):
        stop = min(start + step, ids.numel())
        rows = weight.index_select(0, ids[start:stop]).to(grad_hidden.dtype)  # [chunk, H]
        first, last = int(positions[start]), int(positions[stop - 1])
        local = offsets[first : last + 2].clamp(start, stop) - start
        entries = torch.arange(stop - start, device=rows.device)
        grad_hidden[first : last + 1] += weighted_row_sum(rows, entries, grad_logits[start:stop], local)


class WeightGradient:
    """``sum over m: grad_logits[m] * hidden[positions[m]]`` for each distinct id, in ascending order of ids.

    Sorting the ids once lets each row of the gradient be summed by itself, in one order: deterministic.
    """

    def __init__(self, hidden: Tensor, ids: Tensor, positions: Tensor, grad_logits: Tensor) -> None:
        """Sort the ids; ``hidden`` is float32 or float64 [N, H], ``grad_logits`` [M] the same dtype."""
        ordered, order = ids.long().sort(stable=True)
        self.ids, counts = torch.unique_consecutive(ordered, return_counts=True)
        self._offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        self._hidden, self._positions, self._grad = hidden, positions[order], grad_logits[order]

    def rows(self, start: int, stop: int) -> Tensor:
        """The gradient of ``weight[self.ids[start:stop]]``, [stop - start, H]."""
        offsets = self._offsets[start : stop + 1]
        first, last = int(offsets[0]), int(offsets[-1])
        return weighted_row_sum(
            self._hidden, self._positions[first:last], self._grad[first:last], offsets - first
        )
