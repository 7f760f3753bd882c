"""Group advantages."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keptset_orchestrator.algorithms.grpo import STD_FLOOR, grpo

rewards = st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=32).map(np.array)


@given(rewards, st.booleans())
def test_advantages_sum_to_zero(rewards: np.ndarray, normalize_std: bool):
    advantages = grpo(rewards, normalize_std=normalize_std)
    assert abs(advantages.sum()) <= 1e-9 * len(rewards) * max(1.0, np.abs(advantages).max())


@given(rewards)
def test_normalized_advantages_have_a_variance_below_one(rewards: np.ndarray):
    assert grpo(rewards, normalize_std=True).std() <= 1.0


@given(rewards, st.booleans())
def test_better_rewards_have_better_advantages(rewards: np.ndarray, normalize_std: bool):
    advantages = grpo(rewards, normalize_std=normalize_std)
    order = np.argsort(rewards, kind="stable")
    assert (np.diff(advantages[order]) >= 0).all()


@given(rewards, st.floats(-100, 100))
def test_a_constant_added_to_all_rewards_changes_nothing(rewards: np.ndarray, constant: float):
    moved = grpo(rewards + constant, normalize_std=False)
    np.testing.assert_allclose(moved, grpo(rewards, normalize_std=False), atol=1e-9)


@given(st.floats(-1e6, 1e6), st.integers(1, 64), st.booleans())
def test_equal_rewards_have_no_advantage(reward: float, size: int, normalize_std: bool):
    assert not grpo(np.full(size, reward), normalize_std=normalize_std).any()


def test_standard_deviation_is_the_populations():
    advantages = grpo(np.array([0.0, 1.0]), normalize_std=True)
    np.testing.assert_allclose(advantages, [-0.5 / (0.5 + STD_FLOOR), 0.5 / (0.5 + STD_FLOOR)])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_reward_that_is_no_number_is_named(bad: float):
    with pytest.raises(ValueError, match="of rollout 1 of the group is not a finite number"):
        grpo(np.array([0.0, bad]), normalize_std=True)
