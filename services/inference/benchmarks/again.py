"""A request once more, as production asks for it: a seeded one samples the same tokens from the same sets.

With logprobs = 0 the sets travel packed, on a way that a request for the logprobs of the whole vocabulary
never takes. What is beside a request in its batch may move logits by their rounding: tokens are compared up
to the first one that differs, and a set may have other ids at its border.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Position:
    """What was said of one sampled token."""

    token: int
    ids: np.ndarray
    """Ascending, the set."""
    logprobs: np.ndarray
    """Of these; where only the sampled token's is known, of size 1."""


@dataclass(frozen=True)
class Rounding:
    """How far two runs of the same request may be apart."""

    nats: float
    """Of a logprob; ids so close to the least likely of a set may be missing in the other."""
    mass: float
    """Of the others that are missing: a nucleus behind which little is left may end elsewhere."""


ROUNDING = {"float32": Rounding(1e-3, 1e-3), "bfloat16": Rounding(1.0, 0.1)}

NAMES = ("tokens", "sets_equal", "wrong", "other_tokens")


def compare(first: list[Position], again: list[Position], rounding: Rounding) -> dict[str, int]:
    """Count the tokens that are the same, their sets that are, those whose sets or logprobs rounding does not
    explain, and whether another token came after them.
    """
    counts = dict.fromkeys(NAMES, 0)
    if len(first) != len(again) and all(a.token == b.token for a, b in zip(first, again, strict=False)):
        counts["wrong"] += 1  # the same tokens, and one of the two ends earlier
    for one, other in zip(first, again, strict=False):
        if one.token != other.token:
            counts["other_tokens"] = 1
            break
        counts["tokens"] += 1
        counts["sets_equal"] += np.array_equal(one.ids, other.ids)
        counts["wrong"] += not explained(one, other, rounding)
    return counts


def explained(one: Position, other: Position, rounding: Rounding) -> bool:
    """Whether two positions with the same token are the same up to rounding.

    Args:
        one: all logprobs of its set are known.
        other: only the sampled token's is.
        rounding: how far they may be apart.
    """
    if other.token not in other.ids:
        return False
    of_token = one.logprobs[one.ids == one.token]
    if len(of_token) != 1 or abs(float(of_token[0] - other.logprobs[0])) > rounding.nats:
        return False
    missing = ~np.isin(one.ids, other.ids) & (one.logprobs > one.logprobs.min() + rounding.nats)
    return float(np.exp(one.logprobs[missing].astype(np.float64)).sum()) <= rounding.mass


def enough(counts: dict[str, int], asked: int) -> bool:
    """Whether what was compared is a fair part of what the first runs compared."""
    return counts["tokens"] >= max(asked // 20, 1)
