"""Entropy, kept mass and full logprobs: where they are and where they are NaN."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kept_loss import KeptSet, kept_logprobs

Maker = Callable[..., Any]


def test_entropy_of_equal_logits_is_the_log_of_their_number() -> None:
    got = kept_logprobs(
        torch.zeros(2, 4),
        torch.ones(10, 4),
        torch.tensor([3, 5]),
        KeptSet.from_rows([[3, 7], []]),
        torch.ones(2),
    )
    assert got.entropy is not None
    assert got.kept_mass is not None
    torch.testing.assert_close(got.entropy, torch.full((2,), math.log(10)))
    torch.testing.assert_close(got.entropy_kept, torch.tensor([math.log(2), math.log(10)]))
    torch.testing.assert_close(got.kept_mass, torch.tensor([0.2, 1.0]))
    torch.testing.assert_close(got.logprobs, -got.entropy_kept)


@pytest.mark.parametrize("share", [0.01, 0.25, 0.3, 0.9, 1.0])
def test_a_share_of_entropy_looks_at_evenly_spaced_positions(new_problem: Maker, share: float) -> None:
    problem = new_problem(1, 40, masked=0.8)
    arguments = problem.arguments(torch.float32)
    part, whole = kept_logprobs(*arguments, entropy=share), kept_logprobs(*arguments)
    assert part.entropy is not None
    assert whole.entropy is not None
    looked_at = ~part.entropy.isnan()
    assert int(looked_at.sum()) == math.ceil(share * 40)
    assert looked_at[0]
    gaps = looked_at.nonzero().squeeze(1).diff()
    assert not len(gaps) or gaps.max() - gaps.min() <= 1
    torch.testing.assert_close(part.entropy[looked_at], whole.entropy[looked_at])
    assert part.kept_mass is not None
    assert torch.equal(~part.kept_mass.isnan(), looked_at)
    assert torch.equal(part.logprobs, whole.logprobs)


def test_entropy_off_means_none(new_problem: Maker) -> None:
    got = kept_logprobs(*new_problem(1).arguments(torch.float32), entropy=None)
    assert got.entropy is None
    assert got.kept_mass is None
    assert got.full_logprobs is None
    assert got.entropy_kept.isfinite().all()


def test_full_logprob_is_kept_logprob_plus_log_of_kept_mass(new_problem: Maker) -> None:
    got = kept_logprobs(*new_problem(1).arguments(torch.float64), entropy=None, full_logprobs=True)
    assert got.full_logprobs is not None
    assert got.kept_mass is not None
    torch.testing.assert_close(got.full_logprobs, got.logprobs + got.kept_mass.log())
