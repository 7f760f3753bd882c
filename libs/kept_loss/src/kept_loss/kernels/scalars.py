"""Elementwise functions that every kernel needs to be the same."""

import triton
import triton.language as tl


@triton.jit
def soft_cap(z, cap):
    """The capped logit, cap * tanh(z / cap).

    exp alone would cancel near 0, so small arguments take the series (error < 2e-8).
    """
    x = z / cap
    square = x * x
    series = x * (1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    t = tl.exp(-2 * tl.abs(x))
    whole = tl.where(x < 0, -1.0, 1.0) * (1 - t) / (1 + t)
    return cap * tl.where(square < 0.0625, series, whole)


@triton.jit
def log1p(x):
    """Log(1 + x) for x >= 0, never below 0.

    The GPU's log is good to 2e-7 absolutely, not relatively: small x, where a logprob next to 0 hangs on it,
    take the series (error < 1e-8 of the value).
    """
    small = tl.minimum(x, 0.125)
    series = small * (
        1
        - small
        * (
            1 / 2
            - small
            * (1 / 3 - small * (1 / 4 - small * (1 / 5 - small * (1 / 6 - small * (1 / 7 - small / 8)))))
        )
    )
    return tl.where(x < 0.125, series, tl.log(1 + x))
