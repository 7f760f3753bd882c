"""MaxRL: rare successes count for more."""

import numpy as np
from numpy.typing import NDArray

from .rewards import finite_rewards


def max_rl(rewards: NDArray[np.float64]) -> NDArray[np.float64]:
    """Reward minus the group's mean, divided by that mean; 0 where no rollout earned anything.

    MaxRL (Tajwar et al. 2026, arXiv 2602.02710, algorithm 1). log p of a probability of success p is the
    series - sum_k (1 - p)^k / k (equation 4), whose gradient is that of sum_k pass@k / k (equation 5). For
    rewards of 0 and 1 the mean score of the successes among G rollouts is an unbiased gradient of its first G
    terms (theorem 2). Less the mean score of all, and 0 for a group without success, as here, it is that of
    the first G - 1. Other rewards are beyond the paper, which has successes and failures only.

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
    scaled = (
        rewards / rewards.max()
    )  # so that neither the sum of huge rewards nor the mean of tiny ones is lost
    advantages: NDArray[np.float64] = scaled / scaled.mean() - 1
    return advantages
