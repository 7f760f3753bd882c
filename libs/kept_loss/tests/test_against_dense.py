"""kept_logprobs in float32 against the dense reference in float64, forward and gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kept_loss import KeptSet, csr, dense_kept_logprobs, kept_logits, kept_logprobs, vocabulary

from .bounds import error_bounds, excess, half_unit

Maker = Callable[..., Any]


def compare(problem: Any, grads_of: Maker, dtype: torch.dtype = torch.float32, **options: Any) -> None:
    """Every entry of the outputs and of both gradients within its bound."""
    mine = problem.arguments(dtype)
    given = problem._replace(hidden=mine[0].detach(), weight=mine[1].detach())
    exact = given.arguments(torch.float64)
    want = dense_kept_logprobs(*exact, **options)
    got = kept_logprobs(*mine, **options)
    bounds = error_bounds(given, options.get("softcap"))
    for name, value, reference in zip(got._fields, got, want, strict=True):
        assert (value is None) == (reference is None), name
        if value is not None and reference is not None:
            assert value.dtype == torch.float32, name
            assert excess(value, reference, bounds.outputs) <= 1, name
    assert (got.logprobs <= 0).all()
    assert got.kept_mass is None or not (got.kept_mass > 1).any()

    got_grads = grads_of(got, *mine[:2], problem.grad)
    want_grads = grads_of(want, *exact[:2], problem.grad)
    for name, grad, reference in zip(("hidden", "weight"), got_grads, want_grads, strict=True):
        assert grad.dtype == dtype, name
        assert excess(grad, reference, getattr(bounds, name) + half_unit(reference, dtype)) <= 1, name


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    num=st.integers(1, 20),
    vocab=st.integers(1, 70),
    size=st.integers(1, 40),
    masked=st.sampled_from([0.0, 0.6, 1.0]),
    widest=st.integers(1, 70),
    logits=st.sampled_from([0.1, 3.0, 10.0, 30.0, 3000.0]),
    softcap=st.sampled_from([None, 5.0, 30.0]),
    dtype=st.sampled_from([torch.float32, torch.float32, torch.bfloat16]),
    entropy=st.sampled_from(["full", 0.3, None]),
    full_logprobs=st.booleans(),
)
def test_equals_dense(
    new_problem: Maker,
    grads_of: Maker,
    seed: int,
    num: int,
    vocab: int,
    size: int,
    masked: float,
    widest: int,
    logits: float,
    softcap: float | None,
    dtype: torch.dtype,
    entropy: Any,
    full_logprobs: bool,
) -> None:
    # verl#2656: a fused kernel's bug: logprobs up to +123
    problem = new_problem(seed, num, vocab, size, masked=masked, widest=widest, logits=logits)
    options = {"softcap": softcap, "entropy": entropy, "full_logprobs": full_logprobs}
    compare(problem, grads_of, dtype, **options)


@pytest.mark.parametrize("masked", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("softcap", [None, 8.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_of_any_size_give_the_same(
    new_problem: Maker,
    grads_of: Maker,
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
    bounds = error_bounds(problem._replace(hidden=one[0], weight=one[1]), softcap)
    for name, value, reference in zip(got._fields, got, want, strict=True):
        assert excess(value, reference, bounds.outputs) <= 1, name
    got_grads = grads_of(got, *other[:2], problem.grad)
    for name, grad, reference in zip(("hidden", "weight"), got_grads, want_grads, strict=True):
        bound = getattr(bounds, name) + 2 * half_unit(reference, dtype)
        assert excess(grad, reference, bound) <= 1, name


@pytest.mark.parametrize("logits", [3.0, 4000.0])
def test_wide_sets_of_a_large_head(new_problem: Maker, grads_of: Maker, logits: float) -> None:
    problem = new_problem(7, 64, 9000, 256, masked=0.5, widest=600, logits=logits)
    compare(problem, grads_of, full_logprobs=True)


@pytest.mark.parametrize("masked", [0.0, 0.5, 1.0])
def test_logits_of_ten_thousand_stay_finite(new_problem: Maker, grads_of: Maker, masked: float) -> None:
    problem = new_problem(3, 30, 40, 8, masked=masked, temperatures=(1.0, 1.0))
    logits = problem.hidden @ problem.weight.T
    problem = problem._replace(hidden=problem.hidden * (1e4 / logits.abs().amax(-1, keepdim=True)))
    compare(problem, grads_of)
    got = kept_logprobs(*problem.arguments(torch.float32))
    assert got.logprobs.isfinite().all()
    assert got.logprobs.min() < -1e3


@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_set_as_wide_as_the_vocabulary_equals_no_mask(new_problem: Maker, spread: float) -> None:
    problem = new_problem(5, 40, 3000, 16, masked=0.0, logits=spread)
    explicit = KeptSet.from_rows([list(range(3000))] * 40)
    free = kept_logprobs(*problem.arguments(torch.float32))
    wide = kept_logprobs(*problem._replace(kept=explicit).arguments(torch.float32))
    bound = error_bounds(problem).outputs
    assert excess(free.logprobs, wide.logprobs, bound) <= 1
    assert wide.kept_mass is not None
    assert excess(wide.kept_mass, torch.ones(40), bound) <= 1
    assert (wide.kept_mass <= 1).all()


def test_bfloat16_is_computed_in_float32(new_problem: Maker, grads_of: Maker) -> None:
    # Megatron-LM#2206: bfloat16 accumulation: the target's gradient rounded away
    problem = new_problem(11, 40, 300, 64, masked=0.5, widest=80)
    compare(problem, grads_of, torch.bfloat16)  # outputs as good as ever, gradients rounded once


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
