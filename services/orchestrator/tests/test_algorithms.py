"""Advantages against values computed by hand."""

from functools import partial
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keptset_orchestrator.algorithms import grpo, make_algorithm, max_rl, reference_advantages, rloo
from keptset_settings import (
    GrpoAlgorithm,
    MaxRlAlgorithm,
    OpdAlgorithm,
    OpsdAlgorithm,
    RlooAlgorithm,
    SftAlgorithm,
)

REWARDS = np.array([1.0, 0.0, 0.0, 1.0, 0.5])
groups = st.lists(st.floats(0, 1e3), min_size=2, max_size=16).map(np.array)


def test_grpo_by_hand():
    """Mean 0.5, variance (0.25 + 0.25 + 0.25 + 0.25 + 0) / 5 = 0.2."""
    assert grpo(REWARDS, normalize_std=False) == pytest.approx([0.5, -0.5, -0.5, 0.5, 0])
    scale = 0.2**0.5 + 1e-4
    assert grpo(REWARDS, normalize_std=True) == pytest.approx(np.array([0.5, -0.5, -0.5, 0.5, 0]) / scale)


def test_rloo_by_hand():
    """The others of the first: (0 + 0 + 1 + 0.5) / 4 = 0.375; of the second: 2.5 / 4 = 0.625."""
    assert rloo(REWARDS) == pytest.approx([0.625, -0.625, -0.625, 0.625, 0])


def test_max_rl_by_hand():
    """One success in four: mean 0.25, so (1 - 0.25) / 0.25 = 3 and (0 - 0.25) / 0.25 = -1."""
    assert max_rl(np.array([1.0, 0.0, 0.0, 0.0])) == pytest.approx([3, -1, -1, -1])
    assert max_rl(REWARDS) == pytest.approx([1, -1, -1, 1, 0])


def test_max_rl_is_the_mean_score_of_the_successes():
    """Of G rollouts with K successes the estimator is the sum of the successes' scores over K, less the
    mean.
    """
    scores = np.random.default_rng(0).normal(size=8)
    rewards = np.array([1.0, 0, 1, 0, 0, 1, 0, 0])
    by_definition = scores[rewards > 0].mean() - scores.mean()
    assert (max_rl(rewards) * scores).mean() == pytest.approx(by_definition)


@pytest.mark.parametrize("size", [2, 3, 6])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_max_rl_is_the_gradient_of_the_first_terms_of_log_p(size: int, p: float):
    """Over all groups of a policy that succeeds with probability p, exactly: d/dp of sum_{k<G} pass@k / k."""
    expected = 0.0
    for group in product([0.0, 1.0], repeat=size):
        rewards = np.array(group)
        probability = np.prod(np.where(rewards == 1, p, 1 - p))
        scores = np.where(rewards == 1, 1 / p, -1 / (1 - p))  # d log pi / dp
        expected += probability * float((max_rl(rewards) * scores).mean())
    assert expected == pytest.approx(sum((1 - p) ** (k - 1) for k in range(1, size)))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("p", [0.1, 0.7])
def test_rloo_is_an_unbiased_gradient_and_the_mean_of_all_a_shrunken_one(size: int, p: float):
    """Over all groups of a policy that succeeds with probability p, exactly: d p / d p is 1."""
    found = {rloo: 0.0, partial(grpo, normalize_std=False): 0.0}
    for group in product([0.0, 1.0], repeat=size):
        rewards = np.array(group)
        probability = np.prod(np.where(rewards == 1, p, 1 - p))
        scores = np.where(rewards == 1, 1 / p, -1 / (1 - p))  # d log pi / dp
        for function in found:
            found[function] += probability * float((function(rewards) * scores).mean())
    assert list(found.values()) == pytest.approx([1, (size - 1) / size])


@given(groups, st.floats(1e-300, 1e300))
def test_max_rl_does_not_depend_on_the_scale_of_rewards(rewards: np.ndarray, scale: float):
    whole = np.round(rewards)  # so that no scale makes a reward vanish
    np.testing.assert_allclose(max_rl(whole * scale), max_rl(whole), rtol=1e-9, atol=1e-9)


def test_group_without_success_teaches_max_rl_nothing():
    assert not max_rl(np.zeros(4)).any()
    assert not max_rl(np.full(4, 0.1)).any()


@given(groups)
def test_rloo_is_the_centred_reward_times_g_over_g_minus_1(rewards: np.ndarray):
    expected = grpo(rewards, normalize_std=False) * len(rewards) / (len(rewards) - 1)
    np.testing.assert_allclose(rloo(rewards), expected, atol=1e-9)


@given(groups)
def test_advantages_of_max_rl_sum_to_zero(rewards: np.ndarray):
    advantages = max_rl(rewards)
    assert abs(advantages.sum()) <= 1e-9 * len(rewards) * max(1.0, np.abs(advantages).max())


def test_reward_that_max_rl_cannot_take_is_named():
    with pytest.raises(ValueError, match=r"reward -0\.5 of rollout 1 .*max_rl divides by their mean"):
        max_rl(np.array([1.0, -0.5]))


def test_group_of_one_has_no_others():
    with pytest.raises(ValueError, match="a group of 1 has no others"):
        rloo(np.array([1.0]))


@pytest.mark.parametrize("function", [rloo, max_rl])
def test_reward_that_is_no_number_is_named(function):
    with pytest.raises(ValueError, match="reward nan of rollout 1"):
        function(np.array([0.0, np.nan]))


def test_distillation_by_hand():
    """A token that the reference likes better than the policy is encouraged by exactly that much."""
    reference, policy = np.float32([-1, -2, -0.5]), np.float32([-1.5, -1, -0.5])
    assert reference_advantages(reference, policy, 1.0).tolist() == [0.5, -1.0, 0.0]
    assert reference_advantages(reference, policy, 0.1) == pytest.approx([0.05, -0.1, 0.0])


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (GrpoAlgorithm(normalize_std=False), (0.0, None, False)),
        (GrpoAlgorithm(reference_kl=0.1), (0.1, None, False)),
        (RlooAlgorithm(reference_kl=0.2), (0.2, None, False)),
        (MaxRlAlgorithm(), (0.0, None, False)),
        (OpdAlgorithm(), (1.0, None, False)),
        (OpsdAlgorithm(hint="h"), (1.0, "h", False)),
        (SftAlgorithm(), (0.0, None, True)),
    ],
)
def test_settings_choose_the_algorithm(settings, expected):
    made = make_algorithm(settings)
    assert (made.reference_weight, made.hint, made.cross_entropy) == expected


def test_distillation_ignores_rewards_and_cross_entropy_weighs_all_alike():
    assert not make_algorithm(OpdAlgorithm()).advantages(REWARDS).any()
    assert make_algorithm(SftAlgorithm()).advantages(REWARDS).tolist() == [1.0] * 5
