"""The soft cap of Gemma 2 (arXiv 2408.00118, section 2): z -> c * tanh(z / c)."""

from torch import Tensor


def capped(logits: Tensor, cap: float | None) -> tuple[Tensor, Tensor | None]:
    """The capped logits and their derivative; the logits themselves and None without a cap.

    The derivative, 1 - tanh(x) ** 2, is computed as 4u / (1 + u) ** 2 with u = exp(-2 |x|), which keeps its
    digits where tanh rounds to 1.
    """
    if cap is None:
        return logits, None
    inner = logits / cap
    u = inner.abs().mul_(-2).exp_()
    slope = u.mul(4).div_(u.add_(1).square_())
    return inner.tanh_().mul_(cap), slope
