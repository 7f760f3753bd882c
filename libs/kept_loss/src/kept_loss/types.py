"""What goes in and what comes out."""

from collections.abc import Sequence
from typing import Any, NamedTuple

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
    def from_arrays(cls, ids: Any, counts: Any, device: torch.device | str | None = None) -> "KeptSet":
        """The flat ids of all positions, and how many belong to each: as ``kept_tokens.KeptTokens`` has them.

        Copies; later changes of the arrays change nothing.

        Args:
            ids: integers [M], as a NumPy array (read-only ones too), a tensor or a list.
            counts: integers [N] that sum to M; 0 for the whole vocabulary.
            device: where the tensors go; None leaves tensors where ``ids`` is and arrays on the CPU.

        Raises:
            ValueError: something else than one dimension of integers, a negative count, counts that do not
                add up, an id that no int32 holds.
        """
        flat, sizes = _integers("ids", ids), _integers("counts", counts)
        if bool((sizes < 0).any()):
            at = int((sizes < 0).nonzero()[0, 0])
            raise ValueError(f"counts: at position {at}: {int(sizes[at])} is negative; 0 means no mask")
        if int(sizes.sum()) != flat.numel():
            raise ValueError(
                f"counts: sum to {int(sizes.sum())}, but there are {flat.numel()} ids; ids and counts must "
                "be of the same positions"
            )
        outside = (flat < 0) | (flat > 2**31 - 1)
        if bool(outside.any()):
            at = int(outside.nonzero()[0, 0])
            raise ValueError(
                f"ids: at entry {at}: {int(flat[at])} is no token id; pass the sets as they were recorded, "
                "without padding"
            )
        target = flat.device if device is None else device
        offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
        return cls(flat.to(target, torch.int32), offsets.to(target))

    @classmethod
    def whole_vocabulary(cls, num_positions: int, device: torch.device | str | None = None) -> "KeptSet":
        """No mask anywhere: ordinary logprobs."""
        return cls(
            torch.zeros(0, dtype=torch.int32, device=device),
            torch.zeros(num_positions + 1, dtype=torch.int64, device=device),
        )

    def select(self, positions: Int64[Tensor, " selected"]) -> "KeptSet":
        """The sets of these positions, in this order."""
        counts = self.offsets.diff()[positions]
        offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        entries = torch.arange(int(offsets[-1]), device=offsets.device)
        moved = torch.repeat_interleave(self.offsets[positions] - offsets[:-1], counts)
        return KeptSet(self.ids[entries + moved], offsets)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "KeptSet":
        """The same on another device."""
        return KeptSet(
            self.ids.to(device, non_blocking=non_blocking), self.offsets.to(device, non_blocking=non_blocking)
        )


def _integers(name: str, values: Any) -> Tensor:
    """A copy as int64."""
    copy = values.detach().clone() if isinstance(values, Tensor) else torch.tensor(values)
    if copy.ndim != 1:
        raise ValueError(f"{name}: has shape {tuple(copy.shape)}, but must have one dimension; flatten it")
    if copy.numel() and (copy.dtype == torch.bool or copy.is_floating_point() or copy.is_complex()):
        raise ValueError(f"{name}: has dtype {copy.dtype}, but must hold integers; convert it")
    return copy.long()


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
