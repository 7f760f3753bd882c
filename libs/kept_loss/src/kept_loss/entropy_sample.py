"""Which positions the entropy diagnostic looks at."""

from typing import Literal

import torch
from torch import Tensor


def sampled_positions(
    num_positions: int, entropy: Literal["full"] | float | None, device: torch.device
) -> Tensor:
    """Mark all, none, or ``ceil(share * N)`` evenly spaced positions, beginning with the first; bool [N].

    Evenly spaced rather than drawn: the same call looks at the same positions, on every rank and device.
    """
    if entropy is None:
        return torch.zeros(num_positions, dtype=torch.bool, device=device)
    if entropy == "full":
        return torch.ones(num_positions, dtype=torch.bool, device=device)
    marks = torch.ceil(torch.arange(num_positions + 1, dtype=torch.float64, device=device) * float(entropy))
    return marks[1:] > marks[:-1]
