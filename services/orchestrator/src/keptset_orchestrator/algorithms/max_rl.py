"""MaxRL: rare successes count for more."""

import numpy as np
from numpy.typing import NDArray

from .rewards import finite_rewards


def max_rl(rewards: NDArray[np.float64]) -> NDArray[np.float64]:
    """Reward minus the group's mean, divided by that mean; 0 where no rollout earned anything.

    MaxRL (Tajwar et al. 2026, arXiv 2602.02710): for rewards of 0 and 1 the average of the scores of the
    successful rollouts is an unbiased gradient of a truncated series for log(probability of success);
    dividing by the mean reward is that average, and subtracting 1 from each is its baseline of zero
    expectation.

    Args:
        rewards: [G], none negative.

    Returns:
        [G] float64; sums to 0 up to rounding.

    Raises:
        ValueError: a reward is negative or not finite.
    """
    rewards = finite_rewards(rewards)
    negative = np.flatnonzero(rewards < 0)
    if len(negative):
        raise ValueError(
            f"reward {rewards[negative[0]]} of rollout {negative[0]} of the group is negative, but max_rl "
            "divides by "
            "their mean; shift the rewards, or choose another algorithm"
        )
    if len(rewards) == 0 or np.all(rewards == rewards[0]):
        return np.zeros_like(rewards)
    advantages: NDArray[np.float64] = rewards / rewards.mean() - 1
    return advantages
