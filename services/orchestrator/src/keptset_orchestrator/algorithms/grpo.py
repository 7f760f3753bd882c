"""GRPO: the group is its own baseline."""

import numpy as np
from numpy.typing import NDArray

from .rewards import finite_rewards

STD_FLOOR = 1e-4
"""Added to the standard deviation: a group of equal rewards gets advantages of 0, not of 0/0."""


def grpo(rewards: NDArray[np.float64], *, normalize_std: bool) -> NDArray[np.float64]:
    """Reward minus the group's mean, divided by the group's standard deviation + 1e-4 if `normalize_std`.

    GRPO (arXiv 2402.03300, section 4.1.2); without the division as in Dr. GRPO (arXiv 2503.20783, section
    3.2). The standard deviation is the population's (divided by G, not G - 1): the group is all there is, and
    a group of one has 0 and not NaN.

    Args:
        rewards: [G], the rewards of all rollouts of one prompt.
        normalize_std: Divide by the standard deviation.

    Returns:
        [G] float64; sums to 0 up to rounding.

    Raises:
        ValueError: a reward is not finite.
    """
    rewards = finite_rewards(rewards)
    if len(rewards) == 0 or np.all(rewards == rewards[0]):
        return np.zeros_like(rewards)  # the mean of equal numbers may differ from them in the last bit
    centred = rewards - rewards.mean()
    scale = float(rewards.std()) + STD_FLOOR if normalize_std else 1.0
    advantages: NDArray[np.float64] = centred / scale
    return advantages
