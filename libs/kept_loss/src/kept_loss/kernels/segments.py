"""Sums of scaled rows by segment, deterministic and without atomics: both gradients of the kept head.

Entries are cut into blocks of equal size whatever segments they belong to, so that neither a position with
100,000 ids nor an id that occurs in thousands of sets holds up the rest. Inside a block the sums are one
small matrix product.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import INTERPRETED


@triton.jit
def _sum_blocks(
    source, rows, coefs, order, segments, out, edges, M, H,
    HAS_ORDER: tl.constexpr, SPLIT_COEF: tl.constexpr, UPCAST: tl.constexpr,
    B: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """One block of B entries x BH columns.

    Segments that lie inside are stored; the (at most two) that cross a border of the block leave a float32
    partial sum in edges[block, 0 (left) | 1 (right)].
    """
    block, hblock = tl.program_id(0).to(tl.int64), tl.program_id(1)
    j = tl.arange(0, B)
    at = block * B + j
    inside = at < M
    segment = tl.load(segments + at, mask=inside, other=-1)
    before = tl.load(segments + at - 1, mask=inside & (at > 0), other=-1)
    entry = at
    if HAS_ORDER:
        entry = tl.load(order + at, mask=inside, other=0)
    coef = tl.load(coefs + entry, mask=inside, other=0.0)
    head = (inside & ((segment != before) | (j == 0))).to(tl.int32)
    local = tl.cumsum(head, 0) - 1  # [B] number of the segment inside this block
    count = tl.sum(head, 0)

    row = tl.load(rows + entry, mask=inside, other=0).to(tl.int64)
    column = hblock * BH + tl.arange(0, BH)
    used = (inside & (coef != 0.0))[:, None] & (column < H)[None, :]  # a coefficient of 0 reads nothing
    tile = tl.load(source + row[:, None] * H + column[None, :], mask=used, other=0.0)  # [B, BH]

    member = (local[None, :] == j[:, None]) & inside[None, :]  # [segment, entry]
    weights = tl.where(member, coef[None, :], 0.0)
    if UPCAST:
        total = tl.dot(weights, tile.to(tl.float32), input_precision="ieee", out_dtype=tl.float32)
    elif SPLIT_COEF:  # bf16 rows: the coefficient as a sum of two bf16, so that it keeps 16 bits
        high = weights.to(tile.dtype)
        low = (weights - high.to(tl.float32)).to(tile.dtype)
        total = tl.dot(high, tile, out_dtype=tl.float32)
        total = tl.dot(low, tile, total, out_dtype=tl.float32)
    else:
        total = tl.dot(weights, tile, input_precision="ieee", out_dtype=tl.float32)

    target = tl.max(tl.where(member, segment[None, :], -1), 1).to(tl.int64)  # [segment]
    end = block * B + B
    first = tl.max(tl.where(j == 0, segment, -1), 0)
    last = tl.max(tl.where(j == B - 1, segment, -1), 0)
    from_left = (block > 0) & (first == tl.load(segments + block * B - 1, mask=block > 0, other=-2))
    to_right = (end < M) & (last == tl.load(segments + end, mask=end < M, other=-2))
    left = from_left & (j == 0)
    right = to_right & (j == count - 1) & (left == 0)
    whole = (j < count) & (left == 0) & (right == 0)

    in_row = (column < H)[None, :]
    place = out + target[:, None] * H + column[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=whole[:, None] & in_row)
    edge = edges + (block * 2 + right.to(tl.int64)[:, None]) * H + column[None, :]
    tl.store(edge, total, mask=(left.to(tl.int32) + right.to(tl.int32) > 0)[:, None] & in_row)


@triton.jit
def _join_edges(segments, out, edges, M, H, BLOCKS, B: tl.constexpr, BH: tl.constexpr, R: tl.constexpr):
    """The block in which a crossing segment begins adds up its partial sums, in order, and stores the row."""
    block, hblock = tl.program_id(0).to(tl.int64), tl.program_id(1)
    end = block * B + B
    if end < M:
        segment = tl.load(segments + end - 1)
        continues = segment == tl.load(segments + end)
        begins = (segment != tl.load(segments + block * B)) | (block == 0)
        if not begins:
            begins = segment != tl.load(segments + block * B - 1)
        if continues & begins:
            column = hblock * BH + tl.arange(0, BH)
            in_row = column < H
            total = tl.load(edges + (block * 2 + 1) * H + column, mask=in_row, other=0.0)
            k = block + 1
            more = True
            while more:
                b = k + tl.arange(0, R)
                same = (b < BLOCKS) & (tl.load(segments + b * B, mask=b < BLOCKS, other=-1) == segment)
                place = edges + (b[:, None] * 2) * H + column[None, :]
                part = tl.load(place, mask=same[:, None] & in_row[None, :], other=0.0)
                total += tl.sum(part, 0)
                more = tl.sum(same.to(tl.int32), 0) == R
                k += R
            tl.store(out + segment.to(tl.int64) * H + column, total.to(out.dtype.element_ty), mask=in_row)


def segment_sum(
    source: Tensor,
    rows: Tensor,
    coefs: Tensor,
    segments: Tensor,
    out: Tensor,
    order: Tensor | None = None,
    block: int = 64,
    columns: int = 128,
) -> Tensor:
    """``out[s] = sum of coefs[j] * source[rows[j]]`` over the entries j of segment s.

    Args:
        source: [R, H].
        rows: integers [M].
        coefs: float32 [M]; a coefficient of 0 reads nothing.
        segments: integers [M], never falling.
        out: [S, H]; rows of segments without entries stay as they are.
        order: integers [M]; if given, the entry at place j of ``segments`` is ``rows[order[j]]``.
        block: entries of one program.
        columns: columns of one program, at most.
    """
    M, H = rows.numel(), source.shape[1]
    if M == 0:
        return out
    blocks = triton.cdiv(M, block)
    columns = min(columns, triton.next_power_of_2(max(H, 16)))
    # A coefficient may exceed the largest float16, if the loss is scaled; the interpreter knows no bfloat16.
    upcast = source.dtype == torch.float16 or (INTERPRETED and source.dtype == torch.bfloat16)
    edges = torch.empty(blocks, 2, H, dtype=torch.float32, device=source.device)
    grid = (blocks, triton.cdiv(H, columns))
    _sum_blocks[grid](
        source, rows, coefs, segments if order is None else order, segments, out, edges, M, H,
        HAS_ORDER=order is not None, SPLIT_COEF=source.dtype == torch.bfloat16, UPCAST=upcast,
        B=block, BH=columns, num_warps=4,
    )  # fmt: skip
    _join_edges[grid](segments, out, edges, M, H, blocks, B=block, BH=columns, R=16, num_warps=4)
    return out
