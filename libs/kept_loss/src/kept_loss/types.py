"""What goes in and what comes out."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int32, Int64
from torch import Tensor


class KeptSet(NamedTuple):
    """The kept ids of N positions, CSR: those of position n are ``ids[offsets[n]:offsets[n + 1]]``.

    An empty row means the whole vocabulary. The ids of a row are distinct (``kept_tokens.KeptTokens``
    verifies that), in any order.
    """

    ids: Int32[Tensor, " ids"]
    offsets: Int64[Tensor, " positions_plus_1"]

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[int]], device: torch.device | str | None = None) -> "KeptSet":
        """One list of ids a position; an empty one for the whole vocabulary."""
        counts = torch.tensor([0, *map(len, rows)], dtype=torch.int64)
        ids = torch.tensor([token for row in rows for token in row], dtype=torch.int32)
        return cls(ids.to(device), counts.cumsum(0).to(device))

    @classmethod
    def whole_vocabulary(cls, num_positions: int, device: torch.device | str | None = None) -> "KeptSet":
        """No mask anywhere: ordinary logprobs."""
        return cls(
            torch.zeros(0, dtype=torch.int32, device=device),
            torch.zeros(num_positions + 1, dtype=torch.int64, device=device),
        )

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "KeptSet":
        """The same on another device."""
        return KeptSet(
            self.ids.to(device, non_blocking=non_blocking), self.offsets.to(device, non_blocking=non_blocking)
        )


class KeptLogprobs(NamedTuple):
    """One entry a position; all of z / T. Only ``logprobs`` has a gradient."""

    logprobs: Float[Tensor, " positions"]
    """Logprob of the label over its kept set; never above 0."""
    entropy: Float[Tensor, " positions"] | None
    """Entropy (nats) of the distribution over the whole vocabulary; NaN at positions that were not sampled
    for it, None if switched off."""
    entropy_kept: Float[Tensor, " positions"]
    """Entropy (nats) of the distribution over the kept set."""
    kept_mass: Float[Tensor, " positions"] | None
    """Probability of the kept set under the whole vocabulary, at most 1; NaN where the pass over the whole
    vocabulary did not run, None if it ran nowhere for diagnostics."""
    full_logprobs: Float[Tensor, " positions"] | None
    """Logprob of the label over the whole vocabulary; None unless asked for."""
