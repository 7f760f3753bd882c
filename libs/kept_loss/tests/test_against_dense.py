"""kept_logprobs in float32 against the dense reference in float64, forward and gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kept_loss import KeptSet, csr, dense_kept_logprobs, kept_logits, kept_logprobs, vocabulary

Maker = Callable[..., Any]


def compare(problem: Any, grads_of: Maker, error_of: Maker, tolerance: float, **options: Any) -> None:
    """Every output and both gradients, each within ``tolerance`` of its scale.

    The scale of a gradient is that of the terms it sums, ``|grad| / T * 2 (1 - p) * max |other factor|``,
    with 1 - p as far as the reference itself has 7 digits of it.
    """
    exact = problem.arguments(torch.float64)
    want = dense_kept_logprobs(*exact, **options)
    mine = problem.arguments(torch.float32)
    got = kept_logprobs(*mine, **options)
    bound = tolerance * problem.scale(options.get("softcap"))
    for name, value, reference in zip(got._fields, got, want, strict=True):
        assert (value is None) == (reference is None), name
        if value is not None:
            assert error_of(value, reference) <= bound, name
    assert (got.logprobs <= 0).all()
    assert got.kept_mass is None or not (got.kept_mass > 1).any()

    rest = -want.logprobs.detach().expm1().clamp(max=-1e-9)  # 1 - p
    steepest = (problem.grad / problem.temperature).abs() * 2 * rest
    got_grads = grads_of(got, *mine[:2], problem.grad)
    want_grads = grads_of(want, *exact[:2], problem.grad)
    for grad, reference, factor in zip(got_grads, want_grads, (exact[1], exact[0]), strict=True):
        terms = steepest.max().item() * factor.abs().max().item()
        assert error_of(grad, reference) <= bound * terms


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    num=st.integers(1, 20),
    vocab=st.integers(1, 70),
    size=st.integers(1, 40),
    masked=st.sampled_from([0.0, 0.6, 1.0]),
    widest=st.integers(1, 70),
    logits=st.sampled_from([0.1, 3.0, 30.0, 3000.0]),
    softcap=st.sampled_from([None, 5.0, 30.0]),
    entropy=st.sampled_from(["full", 0.3, None]),
    full_logprobs=st.booleans(),
)
def test_equals_dense(
    new_problem: Maker,
    grads_of: Maker,
    error_of: Maker,
    tolerance: float,
    seed: int,
    num: int,
    vocab: int,
    size: int,
    masked: float,
    widest: int,
    logits: float,
    softcap: float | None,
    entropy: Any,
    full_logprobs: bool,
) -> None:
    if softcap is not None:
        logits = min(logits, softcap / 5)  # a saturated cap's gradient is what is left of terms that cancel
    problem = new_problem(seed, num, vocab, size, masked=masked, widest=widest, logits=logits)
    options = {"softcap": softcap, "entropy": entropy, "full_logprobs": full_logprobs}
    compare(problem, grads_of, error_of, tolerance, **options)


@pytest.mark.parametrize("masked", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("softcap", [None, 8.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_of_any_size_give_the_same(
    new_problem: Maker,
    grads_of: Maker,
    error_of: Maker,
    tolerance: float,
    monkeypatch: pytest.MonkeyPatch,
    masked: float,
    softcap: float | None,
    dtype: torch.dtype,
) -> None:
    problem = new_problem(7, 40, 90, 24, masked=masked, widest=60)
    one = problem.arguments(dtype)
    want = kept_logprobs(*one, softcap=softcap, full_logprobs=True)
    want_grads = grads_of(want, *one[:2], problem.grad)
    monkeypatch.setattr(csr, "FAN_IN", 3)
    monkeypatch.setattr(kept_logits, "CHUNK_ELEMENTS", {"cpu": 24 * 11})
    monkeypatch.setattr(vocabulary, "POSITIONS_AT_ONCE", 7)
    monkeypatch.setattr(vocabulary, "VOCABULARY_AT_ONCE", 13)
    other = problem.arguments(dtype)
    got = kept_logprobs(*other, softcap=softcap, full_logprobs=True)
    bound = tolerance * problem.scale(softcap)
    for name, value, reference in zip(got._fields, got, want, strict=True):
        assert error_of(value, reference) <= bound, name
    rounding = 0 if dtype == torch.float32 else 2**-8  # one unit in bfloat16's last place
    for grad, reference in zip(grads_of(got, *other[:2], problem.grad), want_grads, strict=True):
        assert error_of(grad, reference) <= (bound + rounding) * reference.abs().max().item()


@pytest.mark.parametrize("logits", [3.0, 4000.0])
def test_wide_sets_of_a_large_head(
    new_problem: Maker, grads_of: Maker, error_of: Maker, tolerance: float, logits: float
) -> None:
    problem = new_problem(7, 64, 9000, 256, masked=0.5, widest=600, logits=logits)
    compare(problem, grads_of, error_of, tolerance, full_logprobs=True)


@pytest.mark.parametrize("masked", [0.0, 0.5, 1.0])
def test_logits_of_ten_thousand_stay_finite(
    new_problem: Maker, grads_of: Maker, error_of: Maker, tolerance: float, masked: float
) -> None:
    problem = new_problem(3, 30, 40, 8, masked=masked, temperatures=(1.0, 1.0))
    logits = problem.hidden @ problem.weight.T
    problem = problem._replace(hidden=problem.hidden * (1e4 / logits.abs().amax(-1, keepdim=True)))
    compare(problem, grads_of, error_of, tolerance)
    got = kept_logprobs(*problem.arguments(torch.float32))
    want = dense_kept_logprobs(*problem.arguments(torch.float64))
    assert error_of(got.logprobs, want.logprobs) <= tolerance * 1e4
    assert got.logprobs.isfinite().all()
    assert got.logprobs.min() < -1e3


@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_set_as_wide_as_the_vocabulary_equals_no_mask(
    new_problem: Maker, error_of: Maker, tolerance: float, spread: float
) -> None:
    problem = new_problem(5, 40, 3000, 16, masked=0.0, logits=spread)
    explicit = KeptSet.from_rows([list(range(3000))] * 40)
    free = kept_logprobs(*problem.arguments(torch.float32))
    wide = kept_logprobs(*problem._replace(kept=explicit).arguments(torch.float32))
    bound = tolerance * problem.scale()
    assert error_of(free.logprobs, wide.logprobs) <= bound
    assert wide.kept_mass is not None
    assert error_of(wide.kept_mass, torch.ones(40)) <= bound
    assert (wide.kept_mass <= 1).all()


def test_bfloat16_is_computed_in_float32(
    new_problem: Maker, grads_of: Maker, error_of: Maker, tolerance: float
) -> None:
    problem = new_problem(11, 40, 300, 64, masked=0.5, widest=80)
    mine = problem.arguments(torch.bfloat16)
    rounded = problem._replace(hidden=mine[0], weight=mine[1])
    exact = rounded.arguments(torch.float64)
    got, want = kept_logprobs(*mine), dense_kept_logprobs(*exact)
    assert got.logprobs.dtype == torch.float32
    assert error_of(got.logprobs, want.logprobs) <= tolerance * rounded.scale()
    for grad, reference in zip(
        grads_of(got, *mine[:2], problem.grad), grads_of(want, *exact[:2], problem.grad), strict=True
    ):
        assert grad.dtype == torch.bfloat16
        # rounded once: half a unit in the last of bfloat16's 8 bits
        assert ((grad.double() - reference).abs() <= reference.abs() * 2**-8 + 1e-5).all()


def test_autocast_does_not_reach_inside(new_problem: Maker, grads_of: Maker) -> None:
    problem = new_problem(2, masked=0.5)
    plain = problem.arguments(torch.float32)
    want = kept_logprobs(*plain)
    inside = problem.arguments(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        got = kept_logprobs(*inside)
        grads = grads_of(got, *inside[:2], problem.grad)
    assert torch.equal(got.logprobs, want.logprobs)
    for one, other in zip(grads, grads_of(want, *plain[:2], problem.grad), strict=True):
        assert torch.equal(one, other)
