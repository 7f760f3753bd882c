"""Each loss against a plain loop over sequences and tokens in float64, value and gradient."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keptset_settings import (
    ClippedRatioLoss,
    GeometricMeanLoss,
    SequenceProductLoss,
    TruncatedWeightLoss,
)
from keptset_trainer.losses import loss_function
from keptset_trainer.losses.ratio import log_ratio_of

ALL = [
    ClippedRatioLoss(clip_low=0.2, clip_high=0.3),
    TruncatedWeightLoss(max_weight=1.5),
    SequenceProductLoss(low=0.5, high=2.0),
    GeometricMeanLoss(low=0.9, high=1.1),
]


def naive(settings, logprobs, rollout, advantages, sequence):
    """(sum, gradient of each logprob, clipped, rejected), one token after the other."""
    total, gradient = 0.0, [0.0] * len(logprobs)
    clipped, rejected = [False] * len(logprobs), [False] * (max(sequence) + 1)
    for s in range(max(sequence) + 1):
        tokens = [t for t in range(len(logprobs)) if sequence[t] == s]
        ratios = [math.exp(logprobs[t] - rollout[t]) for t in tokens]
        product = math.prod(ratios)
        if settings.kind == "sequence_product":
            rejected[s] = not settings.low <= product <= settings.high
        if settings.kind == "geometric_mean":
            rejected[s] = bool(tokens) and not settings.low <= product ** (1 / len(tokens)) <= settings.high
        if rejected[s]:
            continue
        for t, ratio in zip(tokens, ratios, strict=True):
            a = advantages[t]
            if settings.kind == "clipped_ratio":
                low, high = 1 - settings.clip_low, 1 + settings.clip_high
                clipped[t] = (a > 0 and ratio > high) or (a < 0 and ratio < low)
                total -= min(ratio * a, min(max(ratio, low), high) * a)
                gradient[t] = 0.0 if clipped[t] else -ratio * a
            elif settings.kind == "truncated_weight":
                clipped[t] = ratio > settings.max_weight
                gradient[t] = -min(ratio, settings.max_weight) * a
                total += gradient[t] * logprobs[t]
            elif settings.kind == "sequence_product":
                gradient[t] = -product * a
                total += gradient[t] * logprobs[t]
            else:
                gradient[t] = -ratio * a
                total += gradient[t]
    return total, gradient, clipped, rejected


@pytest.mark.parametrize("chosen", ALL, ids=lambda chosen: chosen.kind)
@given(seed=st.integers(0, 2**31), spread=st.sampled_from([0.01, 0.1, 0.5, 2.0]))
@settings(max_examples=40, deadline=None)
def test_a_loss_is_the_plain_loop(chosen, seed, spread):
    generator = np.random.default_rng(seed)
    sequence = np.sort(generator.integers(0, 4, 17))
    rollout = -generator.exponential(2.0, 17)
    logprobs = np.minimum(rollout + generator.normal(0, spread, 17), 0)
    advantages = generator.normal(0, 1, 17)
    total, gradient, clipped, rejected = naive(chosen, logprobs, rollout, advantages, sequence.tolist())

    leaf = torch.tensor(logprobs, requires_grad=True)
    summed = loss_function(chosen)(
        leaf, torch.tensor(rollout), torch.tensor(advantages), torch.tensor(sequence), max(sequence) + 1
    )
    summed.total.backward()
    assert summed.total.item() == pytest.approx(total, rel=1e-9, abs=1e-12)
    assert leaf.grad.tolist() == pytest.approx(gradient, rel=1e-9, abs=1e-12)
    assert summed.clipped.tolist() == clipped
    assert summed.rejected.tolist() == rejected


def test_ratios_of_float32_logprobs_are_not_rounded_to_float32():
    logprobs, rollout = torch.tensor([-12.3456789, -0.1]), torch.tensor([-0.1, -12.3456789])
    exact = logprobs.double() - rollout.double()
    assert not torch.equal((logprobs - rollout).double(), exact), "float32 would show"
    assert torch.equal(log_ratio_of(logprobs, rollout), exact)


@pytest.mark.parametrize("chosen", ALL, ids=lambda chosen: chosen.kind)
def test_at_ratio_one_a_good_token_becomes_likelier_and_a_bad_one_less(chosen):
    leaf = torch.tensor([-1.0, -2.0], requires_grad=True)
    summed = loss_function(chosen)(leaf, leaf.detach(), torch.tensor([1.0, -0.5]), torch.tensor([0, 1]), 2)
    summed.total.backward()
    assert leaf.grad.tolist() == [-1.0, 0.5]
    assert not summed.clipped.any()
    assert not summed.rejected.any()


@pytest.mark.parametrize("chosen", [ALL[2], ALL[3]], ids=lambda chosen: chosen.kind)
@pytest.mark.parametrize("log_ratio", [-1e4, -1.0, 1.0, 1e4])
def test_a_rejected_sequence_has_exactly_zero_gradient(chosen, log_ratio):
    leaf = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    rollout = torch.tensor([-1.0 - log_ratio, -1.0 - log_ratio, -1.0])
    summed = loss_function(chosen)(leaf, rollout, torch.ones(3), torch.tensor([0, 0, 1]), 2)
    summed.total.backward()
    assert summed.rejected.tolist() == [True, False]
    assert leaf.grad.tolist() == [0.0, 0.0, -1.0]


@pytest.mark.parametrize("chosen", ALL, ids=lambda chosen: chosen.kind)
@pytest.mark.parametrize("advantage", [-3.0, 0.0, 3.0])
def test_extreme_ratios_stay_finite(chosen, advantage):
    log_ratios = torch.tensor([-1e30, -1e4, -700.0, 0.0, 30.0, 700.0, 1e4, 1e30])
    leaf = torch.full((8,), -1.0, requires_grad=True)
    for order in (log_ratios, log_ratios.flip(0)):
        for sequence in (torch.zeros(8, dtype=torch.long), torch.arange(8)):
            leaf.grad = None
            summed = loss_function(chosen)(leaf, -1 - order, torch.full((8,), advantage), sequence, 8)
            summed.total.backward()
            assert torch.isfinite(summed.total)
            assert torch.isfinite(leaf.grad).all()


def test_a_zero_lower_bound_rejects_nothing_below():
    chosen = GeometricMeanLoss(low=0.0, high=1.1)
    leaf = torch.tensor([-9.0], requires_grad=True)
    summed = loss_function(chosen)(leaf, torch.tensor([-1.0]), torch.ones(1), torch.tensor([0]), 1)
    assert not summed.rejected.any()
