"""Statistics over the whole vocabulary, online and fused with the matmul: no [N, V] tensor."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import INTERPRETED
from .scalars import soft_cap

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = 0.6931471805599453


class VocabularySums(NamedTuple):
    """float32 [P] each, of z / T: what gives logsumexp and entropy."""

    peak: Tensor
    total: Tensor
    """sum of exp(z / T - peak)."""
    weighted: Tensor
    """sum of (z / T - peak) exp(z / T - peak)."""
    others: Tensor | None = None
    """``total`` without the label's term; None unless labels were given."""

    def label_rest(self) -> Tensor:
        """1 - p of the label, as the sum of the others' p: nothing cancels."""
        assert self.others is not None
        return self.others / self.total

    def logsumexp(self) -> Tensor:
        """Over the vocabulary, nats."""
        return self.peak + self.total.log()

    def entropy(self) -> Tensor:
        """Of the whole distribution, nats."""
        return self.total.log() - self.weighted / self.total


@triton.jit
def _sums_kernel(
    hidden, weight, temperature, labels, peaks, totals, weighteds, otherses, N, V, H, softcap, tiles_a_split,
    HAS_CAP: tl.constexpr, HAS_LABELS: tl.constexpr, UPCAST: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """BM positions, one split of the vocabulary; running sums, base 2 and relative to the running peak."""
    n = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    split = tl.program_id(1)
    in_rows = n < N
    scale = LOG2_E / tl.load(temperature + n, mask=in_rows, other=1.0)
    peak = tl.full([BM], -1e30, tl.float32)  # finite: -inf - -inf would be nan
    total = tl.zeros([BM], tl.float32)
    weighted = tl.zeros([BM], tl.float32)
    others = tl.zeros([BM], tl.float32)
    label = tl.zeros([BM], tl.int64)
    if HAS_LABELS:
        label = tl.load(labels + n, mask=in_rows, other=-1)
    k = tl.arange(0, BK)
    h_at = hidden + n[:, None] * H + k[None, :]
    for tile in range(split * tiles_a_split, tl.minimum((split + 1) * tiles_a_split, tl.cdiv(V, BN))):
        v = tile * BN + tl.arange(0, BN)
        in_columns = v < V
        w_at = weight + v.to(tl.int64)[None, :] * H + k[:, None]
        z = tl.zeros([BM, BN], tl.float32)
        for first in range(0, H, BK):
            in_k = first + k < H
            h = tl.load(h_at + first, mask=in_rows[:, None] & in_k[None, :], other=0.0)
            w = tl.load(w_at + first, mask=in_columns[None, :] & in_k[:, None], other=0.0)
            if UPCAST:
                h, w = h.to(tl.float32), w.to(tl.float32)
            z = tl.dot(h, w, z, input_precision="ieee")
        if HAS_CAP:
            z = soft_cap(z, softcap)
        z = tl.where(in_columns[None, :], z * scale[:, None], -1e30)
        top = tl.maximum(peak, tl.max(z, 1))
        z = z - top[:, None]
        e = tl.exp2(z)
        shrink = tl.exp2(peak - top)
        weighted = (weighted + (peak - top) * total) * shrink + tl.sum(z * e, 1)  # 0 times 1e30 is 0
        total = total * shrink + tl.sum(e, 1)
        if HAS_LABELS:
            others = others * shrink + tl.sum(tl.where(v[None, :] == label[:, None], 0.0, e), 1)
        peak = top
    at = split.to(tl.int64) * N + n
    tl.store(peaks + at, peak, mask=in_rows)
    tl.store(totals + at, total, mask=in_rows)
    tl.store(weighteds + at, weighted, mask=in_rows)
    if HAS_LABELS:
        tl.store(otherses + at, others, mask=in_rows)


@triton.jit
def _gradient_kernel(
    logits, labels, temperature, logsumexp, rest, grad, out, first, columns, stride, softcap,
    HAS_CAP: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Gradient of the raw logits of one position and B columns of a block that begins at id ``first``.

    At the label 1 - p is not computed as that, which would cancel, but given.
    """
    n = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * B + tl.arange(0, B)
    inside = c < columns
    z = tl.load(logits + n * stride + c, mask=inside, other=0.0)
    slope = tl.zeros([B], tl.float32) + 1.0
    if HAS_CAP:
        z = soft_cap(z, softcap)
        x = z / softcap
        slope = 1.0 - x * x
    heat = tl.load(temperature + n)
    p = tl.exp(z / heat - tl.load(logsumexp + n))
    label = tl.load(labels + n) - first
    d = tl.where(c == label, tl.load(rest + n), -p) * slope * (tl.load(grad + n) / heat)
    tl.store(out + n * stride + c, d.to(out.dtype.element_ty), mask=inside)


def vocabulary_sums(
    hidden: Tensor,
    weight: Tensor,
    temperature: Tensor,
    softcap: float | None,
    processors: int,
    labels: Tensor | None = None,
) -> VocabularySums:
    """One pass over the vocabulary.

    Args:
        hidden: [P, H].
        weight: [V, H], the same type.
        temperature: float32 [P].
        softcap: c of c * tanh(z / c), or None.
        processors: how many programs run at once.
        labels: int64 [P], if the sums without the labels' terms are wanted too.
    """
    num, width = hidden.shape
    if hidden.dtype == torch.float32 or INTERPRETED:
        rows, columns, depth, warps, stages = 64, 128, 32, 4, 2
    else:
        rows, columns, depth, warps, stages = 128, 256, 64, 8, 3
    blocks, tiles = triton.cdiv(num, rows), triton.cdiv(weight.shape[0], columns)
    splits = max(1, min(tiles, processors // blocks)) if blocks else 1
    tiles_a_split = triton.cdiv(tiles, splits)
    splits = triton.cdiv(tiles, tiles_a_split)
    parts = torch.empty(4, splits, num, dtype=torch.float32, device=hidden.device)
    if num:
        _sums_kernel[(blocks, splits)](
            hidden, weight, temperature, temperature if labels is None else labels, *parts,
            num, weight.shape[0], width, 1.0 if softcap is None else softcap, tiles_a_split,
            HAS_CAP=softcap is not None, HAS_LABELS=labels is not None,
            UPCAST=INTERPRETED and hidden.dtype != torch.float32,
            BM=rows, BN=columns, BK=depth, num_warps=warps, num_stages=stages,
        )  # fmt: skip
    peak = parts[0].amax(0)
    below = parts[0] - peak
    shrink = below.exp2()
    total = (parts[1] * shrink).sum(0)
    weighted = ((parts[2] + below * parts[1]) * shrink).sum(0)
    others = None if labels is None else (parts[3] * shrink).sum(0)
    return VocabularySums(peak * LN_2, total, weighted * LN_2, others)


def logit_gradient(
    logits: Tensor, labels: Tensor, temperature: Tensor, logsumexp: Tensor, rest: Tensor, grad: Tensor,
    first: int, softcap: float | None, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """``grad * d(logprob) / d(raw logit)`` as ``dtype``, for float32 logits [P, C] of ids from ``first``.

    ``rest`` [P] is 1 - p of the label, see :meth:`VocabularySums.label_rest`.
    """
    num, columns = logits.shape
    out = torch.empty(num, columns, dtype=dtype, device=logits.device)
    if out.numel():
        block = min(1024, triton.next_power_of_2(columns))
        _gradient_kernel[(num, triton.cdiv(columns, block))](
            logits, labels, temperature, logsumexp, rest, grad, out, first, columns, logits.stride(0),
            1.0 if softcap is None else softcap, HAS_CAP=softcap is not None, B=block, num_warps=4,
        )  # fmt: skip
    return out
