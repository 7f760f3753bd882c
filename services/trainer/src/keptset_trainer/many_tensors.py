"""Kernels over many tensors in one launch each, whatever their sizes: summing up gradients, and AdamW.

A table on the device says where each tensor lies; a program works on one block of one of them.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""Elements of a program."""
TABLES = 64
"""That are kept: one for each recorded layout, whose gradients lie elsewhere."""


@triton.jit
def _sum_up(table, blocks, KIND: tl.constexpr, FRESH: tl.constexpr, BLOCK: tl.constexpr):
    """Rows of the table: a gradient, its float32 sum, their size."""
    place = blocks + 2 * tl.program_id(0)
    row = table + 3 * tl.load(place)
    at = tl.load(place + 1) * BLOCK + tl.arange(0, BLOCK)
    size = tl.load(row + 2)
    gradient = tl.multiple_of(tl.load(row).to(tl.pointer_type(KIND)), 16)
    total = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(tl.float32)), 16)
    # a mask would make loads narrow: only the last block of a tensor has one
    if (tl.load(place + 1) + 1) * BLOCK <= size:
        value = tl.load(gradient + at).to(tl.float32)
        if not FRESH:
            value += tl.load(total + at)
        tl.store(total + at, value)
    else:
        inside = at < size
        value = tl.load(gradient + at, mask=inside).to(tl.float32)
        if not FRESH:
            value += tl.load(total + at, mask=inside)
        tl.store(total + at, value, mask=inside)


@triton.jit
def _adamw(
    table, blocks, factors, clip, sound, beta1, beta2, eps, decay,
    GRADIENT: tl.constexpr, KIND: tl.constexpr, ROUND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows of the table: weight, gradient, two moments, the weight's rounded copy, their size."""
    place = blocks + 2 * tl.program_id(0)
    tensor = tl.load(place)
    row = table + 6 * tensor
    at = tl.load(place + 1) * BLOCK + tl.arange(0, BLOCK)
    size = tl.load(row + 5)
    weight = tl.multiple_of(tl.load(row).to(tl.pointer_type(tl.float32)), 16)
    gradient = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(GRADIENT)), 16)
    first = tl.multiple_of(tl.load(row + 2).to(tl.pointer_type(tl.float32)), 16)
    second = tl.multiple_of(tl.load(row + 3).to(tl.pointer_type(tl.float32)), 16)
    rounded = tl.multiple_of(tl.load(row + 4).to(tl.pointer_type(KIND)), 16)
    scale = tl.load(clip)
    step_size, root = tl.load(factors + 2 * tensor), tl.load(factors + 2 * tensor + 1)
    if tl.load(sound) != 0:
        if (tl.load(place + 1) + 1) * BLOCK <= size:
            g = tl.load(gradient + at).to(tl.float32) * scale
            m = tl.load(first + at)
            m += (g - m) * (1 - beta1)
            v = tl.load(second + at) * beta2 + g * g * (1 - beta2)
            w = tl.load(weight + at) * decay - step_size * m / (tl.sqrt(v) * root + eps)
            tl.store(first + at, m)
            tl.store(second + at, v)
            tl.store(weight + at, w)
            if ROUND:
                tl.store(rounded + at, w.to(KIND))
        else:
            inside = at < size
            g = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32) * scale
            m = tl.load(first + at, mask=inside, other=0.0)
            m += (g - m) * (1 - beta1)
            v = tl.load(second + at, mask=inside, other=0.0) * beta2 + g * g * (1 - beta2)
            old = tl.load(weight + at, mask=inside, other=0.0)
            w = old * decay - step_size * m / (tl.sqrt(v) * root + eps)
            tl.store(first + at, m, mask=inside)
            tl.store(second + at, v, mask=inside)
            tl.store(weight + at, w, mask=inside)
            if ROUND:
                tl.store(rounded + at, w.to(KIND), mask=inside)


KINDS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class Table:
    """Where tensors lie, on the device."""

    def __init__(self, rows: Sequence[tuple[int, ...]], device: torch.device) -> None:
        """Each row: pointers, and the number of elements last."""
        blocks = [(index, number) for index, row in enumerate(rows) for number in range(-(-row[-1] // BLOCK))]
        self.rows = torch.tensor(rows, dtype=torch.int64).to(device)
        self.blocks = torch.tensor(blocks, dtype=torch.int64).to(device)
        self.programs = len(blocks)


class Tables:
    """Made at first use; kept as long as tensors lie where they lay."""

    def __init__(self) -> None:
        self.known: dict[tuple[tuple[int, ...], ...], Table] = {}

    def of(self, groups: Sequence[Sequence[Tensor]]) -> Table:
        """One row for each tensor of the first group and its partners in the others."""
        rows = tuple(
            (*(one.data_ptr() for one in together), together[0].numel())
            for together in zip(*groups, strict=True)
        )
        if rows not in self.known:
            if len(self.known) == TABLES:
                self.known.clear()
            self.known[rows] = Table(rows, groups[0][0].device)
        return self.known[rows]


def fits(tensors: Sequence[Tensor]) -> bool:
    """Whether the kernels can work on them: dense, and as aligned as all memory that torch allocates."""
    return all(tensor.is_contiguous() and tensor.data_ptr() % 16 == 0 for tensor in tensors)


def sum_up(tables: Tables, gradients: Sequence[Tensor], sums: Sequence[Tensor], fresh: bool) -> None:
    """`sums` = gradients, or += gradients; sums are float32, gradients of one type, of which each `fits`."""
    table = tables.of([gradients, sums])
    options: dict[str, Any] = {"KIND": KINDS[gradients[0].dtype], "FRESH": fresh, "BLOCK": BLOCK}
    _sum_up[(table.programs,)](table.rows, table.blocks, **options, num_warps=8)


def adamw_step(
    tables: Tables,
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    first: Sequence[Tensor],
    second: Sequence[Tensor],
    rounded: Sequence[Tensor] | None,
    steps: Tensor,
    clip: Tensor,
    sound: Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """AdamW as torch has it (Loshchilov and Hutter 2019), of gradients times `clip`, if `sound`.

    Args:
        tables: of these tensors.
        weights: float32, as all but the rounded ones and the gradients.
        gradients: of the weights, of one type.
        first: moments.
        second: moments.
        rounded: the weights in half precision, to be written too.
        steps: float32, for each weight the number of this step, from 1.
        clip: a float32 scalar on the device.
        sound: a bool on the device; if False, nothing changes.
        lr: learning rate.
        betas: of the moments.
        eps: added to the root of the second moment.
        weight_decay: times lr.
    """
    counts = steps.double()
    factors = torch.stack([lr / (1 - betas[0] ** counts), (1 - betas[1] ** counts).rsqrt()], 1).float()
    table = tables.of([weights, gradients, first, second, weights if rounded is None else rounded])
    kind = KINDS[torch.float32 if rounded is None else rounded[0].dtype]
    _adamw[(table.programs,)](
        table.rows, table.blocks, factors, clip, sound.to(torch.int32), betas[0], betas[1], eps,
        1 - lr * weight_decay, GRADIENT=KINDS[gradients[0].dtype], KIND=kind, ROUND=rounded is not None,
        BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
