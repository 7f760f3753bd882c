"""How far a program in float32 may be from float64, entry by entry, from the terms that each entry sums."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

TOLERANCE = 5e-7
"""Eight units of float32: a few roundings in every exp and log, and those of a dot product."""


class Bounds(NamedTuple):
    """Largest absolute errors, float64 on the CPU."""

    outputs: Tensor
    """[N], for each of the outputs."""
    hidden: Tensor
    """[N, H], for the gradient."""
    weight: Tensor
    """[V, H], for the gradient."""


def error_bounds(
    problem: Any, softcap: float | None = None, *, tolerance: float = TOLERANCE, rounding: float = 0.0
) -> Bounds:
    """What ``tolerance`` means for every entry of a problem's outputs and gradients.

    A logit's error is relative to the terms of its dot product, ``|h| |w|``, and passes a soft cap by its
    slope: ``s = max(1, max over v of max(|z|, slope |h| |w|) / T)`` is the scale of a position's errors. A
    gradient sums ``d * w`` or ``d * h`` with ``d = |grad| / T * |1[v = label] - p|``; each of its terms may
    be off by ``2 * tolerance * s`` of itself: once for p, once for what p is multiplied by. The slope, at
    most 1, is left out there: its own error is relative to what s holds already. 1 - p is held to the
    sixteenth digit behind the point: the reference has no more.

    Args:
        problem: what the program was given, rounded as it was.
        softcap: c of c * tanh(z / c).
        tolerance: of the type that was computed in.
        rounding: by how much of itself d is rounded before it is multiplied.
    """
    hidden, weight, heat = (
        one.detach().double() for one in (problem.hidden, problem.weight, problem.temperature)
    )
    logits = hidden @ weight.T  # [N, V]
    terms = hidden.norm(dim=1)[:, None] * weight.norm(dim=1)
    if softcap is not None:
        terms *= torch.cosh((logits / softcap).clamp(-300, 300)) ** -2
        logits = softcap * torch.tanh(logits / softcap)
    scaled = logits / heat[:, None]
    scale = (torch.maximum(logits.abs(), terms).amax(1) / heat).clamp(min=1)  # [N]

    counts = problem.kept.offsets.diff()
    inside = (counts == 0)[:, None].repeat(1, len(weight))
    inside[torch.repeat_interleave(counts), problem.kept.ids.long()] = True
    steep = (problem.grad.double().abs() / heat)[:, None]
    p = scaled.masked_fill(~inside, -torch.inf).softmax(1)
    label = problem.labels[:, None]
    d = p.scatter(1, label, p.scatter(1, label, 0).sum(1, keepdim=True)) * steep
    d = d * (2 * tolerance * scale[:, None] + rounding)
    d = torch.maximum(d, 5e-16 * scale[:, None] * steep * inside)
    return Bounds(tolerance * scale, d @ weight.abs(), d.T @ hidden.abs())


def half_unit(values: Tensor, dtype: torch.dtype) -> Tensor:
    """What is lost at most where results are rounded from float32 to a 16-bit type, at the end; as values."""
    if dtype in (torch.float32, torch.float64):
        return torch.zeros_like(values, dtype=torch.float64)
    info = torch.finfo(dtype)
    return (values.detach().double().abs() + info.smallest_normal) * info.eps / 2


def excess(got: Tensor, want: Tensor, bound: Tensor) -> float:
    """The largest error in units of its bound: at most 1 is right. Infinite if NaN is elsewhere."""
    got, want, bound = (one.detach().cpu().double() for one in (got, want, bound))
    if not torch.equal(got.isnan(), want.isnan()):
        return float("inf")
    if not got.numel():
        return 0.0
    return ((got - want).abs().nan_to_num(0) / bound.clamp(min=1e-300)).max().item()
