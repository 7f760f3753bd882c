"""RLOO: the others of the group are the baseline."""

import numpy as np
from numpy.typing import NDArray

from .rewards import finite_rewards


def rloo(rewards: NDArray[np.float64]) -> NDArray[np.float64]:
    """Reward minus the mean of the group's other rewards.

    RLOO (arXiv 2402.14740, section 2.2; Kool et al. 2019): a baseline that does not depend on the rollout
    itself, so the gradient is unbiased. It is G / (G - 1) times reward minus the mean of all.

    Args:
        rewards: [G], G at least 2.

    Returns:
        [G] float64.

    Raises:
        ValueError: a group of one, or a reward that is not finite.
    """
    rewards = finite_rewards(rewards)
    group = len(rewards)
    if group < 2:
        raise ValueError(f"a group of {group} has no others to compare with; set group_size to at least 2")
    if np.all(rewards == rewards[0]):
        return np.zeros_like(rewards)
    advantages: NDArray[np.float64] = rewards - (rewards.sum() - rewards) / (group - 1)
    return advantages
