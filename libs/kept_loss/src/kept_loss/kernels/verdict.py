"""One pass over the arguments: the position of every kept id, and what is wrong with the values."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Verdict(NamedTuple):
    """N minus the first position at which something is wrong (0: nowhere), and a count."""

    falling_offsets: int
    temperature: int
    label: int
    kept_id: int
    label_not_kept: int
    unmasked: int
    """How many positions have an empty set."""


@triton.jit
def _verdict_kernel(ids, offsets, labels, temperature, positions, verdict, N, M, V, B: tl.constexpr):
    """One program a position; only writes inside ``positions`` [M], whatever the offsets say."""
    n = tl.program_id(0)
    start = tl.load(offsets + n)
    stop = tl.load(offsets + n + 1)
    falls = (
        (start > stop) | (start < 0) | (stop > M) | ((n == 0) & (start != 0)) | ((n == N - 1) & (stop != M))
    )
    if falls:
        tl.atomic_max(verdict + 0, N - n)
        start = tl.full([], 0, tl.int64)
        stop = tl.full([], 0, tl.int64)
    heat = tl.load(temperature + n)
    if (heat > 0.0) & (heat < float("inf")):  # nan is neither
        pass
    else:
        tl.atomic_max(verdict + 1, N - n)
    label = tl.load(labels + n)
    if (label < 0) | (label >= V):
        tl.atomic_max(verdict + 2, N - n)
    outside = 0
    found = 0
    for first in range(start, stop, B):
        i = first + tl.arange(0, B)
        inside = i < stop
        token = tl.load(ids + i, mask=inside, other=0)
        tl.store(positions + i, tl.zeros([B], tl.int32) + n, mask=inside)
        outside += tl.sum((inside & ((token < 0) | (token >= V))).to(tl.int32), 0)
        found += tl.sum((inside & (token == label)).to(tl.int32), 0)
    if outside > 0:
        tl.atomic_max(verdict + 3, N - n)
    if stop > start:
        if found == 0:
            tl.atomic_max(verdict + 4, N - n)
    else:
        tl.atomic_add(verdict + 5, 1)


def positions_and_verdict(
    ids: Tensor, offsets: Tensor, labels: Tensor, temperature: Tensor, vocabulary: int
) -> tuple[Tensor, Tensor]:
    """int32 [M] positions, and the verdict as int32 [6] on the device: see :class:`Verdict`."""
    num, num_entries = labels.numel(), ids.numel()
    both = torch.zeros(num_entries + 6, dtype=torch.int32, device=labels.device)  # one launch for both
    positions, verdict = both[:num_entries], both[num_entries:]
    if num:
        _verdict_kernel[(num,)](
            ids, offsets, labels, temperature, positions, verdict, num, num_entries, vocabulary,
            B=32, num_warps=1,
        )  # fmt: skip
    return positions, verdict
