"""The masked positions: logits of the kept ids, logprobs over them, and d(logprob) / d(logit)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .scalars import log1p, soft_cap


@triton.jit
def _logits_kernel(
    hidden, weight, ids, positions, offsets, out, M, V, H, softcap,
    HAS_CAP: tl.constexpr, SKIP_SINGLETONS: tl.constexpr, B: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """One program: B entries, whatever positions they belong to, so that no width is special."""
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    inside = at < M
    position = tl.load(positions + at, mask=inside, other=0).to(tl.int64)
    row = tl.load(ids + at, mask=inside, other=0).to(tl.int64)
    used = inside & (row >= 0) & (row < V)  # the verdict on the arguments may still be under way
    if SKIP_SINGLETONS:  # their logprob is 0 whatever the logit
        start = tl.load(offsets + position, mask=inside, other=0)
        stop = tl.load(offsets + position + 1, mask=inside, other=0)
        used = used & (stop - start > 1)
    z = tl.zeros([B], tl.float32)
    for first in range(0, H, BH):
        column = first + tl.arange(0, BH)
        mask = used[:, None] & (column < H)[None, :]
        w = tl.load(weight + row[:, None] * H + column[None, :], mask=mask, other=0.0).to(tl.float32)
        h = tl.load(hidden + position[:, None] * H + column[None, :], mask=mask, other=0.0).to(tl.float32)
        z += tl.sum(w * h, 1)
    if HAS_CAP:
        z = soft_cap(z, softcap)
    tl.store(out + at, z, mask=inside)


@triton.jit
def _logprobs_kernel(
    logits, ids, offsets, labels, temperature, logprob, peak_out, log_total_out, rest_out, entropy, M,
    B: tl.constexpr,
):  # fmt: skip
    """One program a position; reads nothing outside the M entries, whatever the offsets say.

    One of the largest entries, whose weight is exactly 1, stays out of the sum, so that log1p keeps the
    others however small they are, and the logprob is a sum of two terms <= 0.
    """
    n = tl.program_id(0).to(tl.int64)
    start = tl.maximum(tl.load(offsets + n), 0)  # the verdict on them may still be under way
    stop = tl.minimum(tl.load(offsets + n + 1), M)
    heat = tl.load(temperature + n)
    label = tl.load(labels + n).to(tl.int32)
    peak = float("-inf")
    for first in range(start, stop, B):
        i = first + tl.arange(0, B)
        z = tl.load(logits + i, mask=i < stop, other=float("-inf"))
        z = tl.div_rn(z, heat)  # the same bits in both loops
        peak = tl.maximum(peak, tl.max(z, 0))
    others = 0.0  # sum of exp(z - peak), one largest entry left out
    peaks = 0
    weighted = 0.0
    not_label = 0.0
    chosen = 0.0
    for first in range(start, stop, B):
        i = first + tl.arange(0, B)
        inside = i < stop
        below = tl.div_rn(tl.load(logits + i, mask=inside, other=0.0), heat) - peak
        e = tl.where(inside, tl.exp(below), 0.0)
        is_peak = inside & (below == 0.0)
        is_label = inside & (tl.load(ids + i, mask=inside, other=-1) == label)
        peaks += tl.sum(is_peak.to(tl.int32), 0)
        others += tl.sum(tl.where(is_peak, 0.0, e), 0)
        weighted += tl.sum(tl.where(inside, below * e, 0.0), 0)
        not_label += tl.sum(tl.where(is_label, 0.0, e), 0)
        chosen += tl.sum(tl.where(is_label, below, 0.0), 0)
    others += (peaks - 1).to(tl.float32)
    u = 1.0 + others
    log_total = log1p(others)
    single = stop - start == 1
    tl.store(logprob + n, tl.where(single, 0.0, chosen - log_total))
    tl.store(peak_out + n, peak)
    tl.store(log_total_out + n, log_total)
    tl.store(rest_out + n, not_label / u)
    tl.store(entropy + n, tl.where(single, 0.0, log_total - weighted / u))


@triton.jit
def _slopes_kernel(
    logits, ids, positions, offsets, labels, temperature, peak, log_total, rest, grad, out, M, softcap,
    HAS_CAP: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """The gradient of each entry's raw logit, grad * d(logprob) / d(raw logit).

    At the label 1 - p is the sum of the others' p: nothing cancels.
    """
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    inside = at < M
    n = tl.load(positions + at, mask=inside, other=0).to(tl.int64)
    start = tl.load(offsets + n, mask=inside, other=0)
    stop = tl.load(offsets + n + 1, mask=inside, other=0)
    heat = tl.load(temperature + n, mask=inside, other=1.0)
    z = tl.load(logits + at, mask=inside, other=0.0)
    below = tl.div_rn(z, heat) - tl.load(peak + n, mask=inside, other=0.0)
    p = tl.exp(below - tl.load(log_total + n, mask=inside, other=0.0))
    label = tl.load(labels + n, mask=inside, other=0).to(tl.int32)
    is_label = tl.load(ids + at, mask=inside, other=-1) == label
    d = tl.where(is_label, tl.load(rest + n, mask=inside, other=0.0), -p) / heat
    if HAS_CAP:
        x = z / softcap
        d = d * (1.0 - x * x)
    d = d * tl.load(grad + n, mask=inside, other=0.0)
    tl.store(out + at, tl.where(stop - start > 1, d, 0.0), mask=inside)


def entry_logits(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    positions: Tensor,
    offsets: Tensor | None,
    softcap: float | None,
) -> Tensor:
    """``z[m] = hidden[positions[m]] . weight[ids[m]]``, soft-capped, float32 [M].

    With ``offsets`` the entries of singletons are not computed and are 0.
    """
    num_entries, width = ids.numel(), hidden.shape[1]
    out = torch.empty(num_entries, dtype=torch.float32, device=hidden.device)
    if num_entries:
        block, columns = 32, min(256, triton.next_power_of_2(width))
        _logits_kernel[(triton.cdiv(num_entries, block),)](
            hidden, weight, ids, positions, positions if offsets is None else offsets, out,
            num_entries, weight.shape[0], width, 1.0 if softcap is None else softcap,
            HAS_CAP=softcap is not None, SKIP_SINGLETONS=offsets is not None,
            B=block, BH=columns, num_warps=4,
        )  # fmt: skip
    return out


def row_logprobs(
    logits: Tensor, ids: Tensor, offsets: Tensor, labels: Tensor, temperature: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``(logprobs, entropy, peak, log_total, rest)``, float32 [N] each; logsumexp = peak + log_total.

    ``rest`` is the probability of the set without the label. Entries of positions without ids mean nothing.
    """
    num = labels.numel()
    logprob, entropy, peak, log_total, rest = torch.empty(5, num, dtype=torch.float32, device=labels.device)
    if num:
        _logprobs_kernel[(num,)](
            logits, ids, offsets, labels, temperature, logprob, peak, log_total, rest, entropy,
            ids.numel(), B=64, num_warps=1,
        )  # fmt: skip
    return logprob, entropy, peak, log_total, rest


def row_slopes(
    logits: Tensor, ids: Tensor, positions: Tensor, offsets: Tensor, labels: Tensor, temperature: Tensor,
    peak: Tensor, log_total: Tensor, rest: Tensor, grad: Tensor, softcap: float | None,
) -> Tensor:  # fmt: skip
    """``grad * d(logprob) / d(raw logit)``, float32 [M]; exactly 0 for a singleton."""
    out = torch.empty_like(logits)
    if ids.numel():
        _slopes_kernel[(triton.cdiv(ids.numel(), 512),)](
            logits, ids, positions, offsets, labels, temperature, peak, log_total, rest, grad, out,
            ids.numel(), 1.0 if softcap is None else softcap, HAS_CAP=softcap is not None, B=512, num_warps=4,
        )  # fmt: skip
    return out
