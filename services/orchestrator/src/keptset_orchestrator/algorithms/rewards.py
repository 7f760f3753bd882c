"""What all advantages start from."""

import numpy as np
from numpy.typing import NDArray


def finite_rewards(rewards: NDArray[np.float64]) -> NDArray[np.float64]:
    """The rewards of a group [G] in float64.

    Raises:
        ValueError: one is not finite.
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    bad = np.flatnonzero(~np.isfinite(rewards))
    if len(bad):
        raise ValueError(f"reward {rewards[bad[0]]} of rollout {bad[0]} of the group is not a finite number")
    return rewards
