"""What must hold whatever the numbers are."""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kept_loss import KeptSet, kept_logprobs

Maker = Callable[..., Any]


def rows_of(kept: KeptSet) -> list[list[int]]:
    ends = kept.offsets.tolist()
    return [kept.ids[a:b].tolist() for a, b in pairwise(ends)]


@pytest.mark.parametrize("masked", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("softcap", [None, 4.0])
def test_gradcheck_in_float64(new_problem: Maker, masked: float, softcap: float | None) -> None:
    problem = new_problem(1, 6, 9, 4, masked=masked, widest=6)
    hidden, weight, labels, kept, temperature = problem.arguments(torch.float64)

    def logprobs(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return kept_logprobs(h, w, labels, kept, temperature, softcap=softcap, entropy=None).logprobs

    assert torch.autograd.gradcheck(logprobs, (hidden, weight))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), start=st.integers(0, 12), stop=st.integers(0, 12))
def test_positions_do_not_see_each_other(
    new_problem: Maker, error_of: Maker, seed: int, start: int, stop: int
) -> None:
    start, stop = min(start, stop), max(start, stop)
    problem = new_problem(seed)
    whole = kept_logprobs(*problem.arguments(torch.float64))
    part = kept_logprobs(
        problem.hidden[start:stop].double(),
        problem.weight.double(),
        problem.labels[start:stop],
        KeptSet.from_rows(rows_of(problem.kept)[start:stop]),
        problem.temperature[start:stop].double(),
    )
    for name in ("logprobs", "entropy", "entropy_kept", "kept_mass"):
        assert error_of(getattr(part, name), getattr(whole, name)[start:stop]) <= 1e-12, name


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_order_inside_a_set_does_not_matter(
    new_problem: Maker, grads_of: Maker, error_of: Maker, seed: int
) -> None:
    problem = new_problem(seed)
    generator = torch.Generator().manual_seed(seed)
    shuffled = [
        [row[i] for i in torch.randperm(len(row), generator=generator).tolist()]
        for row in rows_of(problem.kept)
    ]
    one = problem.arguments(torch.float64)
    other = problem._replace(kept=KeptSet.from_rows(shuffled)).arguments(torch.float64)
    got, want = kept_logprobs(*other), kept_logprobs(*one)
    assert error_of(got.logprobs, want.logprobs) <= 1e-13
    for a, b in zip(
        grads_of(got, *other[:2], problem.grad), grads_of(want, *one[:2], problem.grad), strict=True
    ):
        assert error_of(a, b) <= 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("logits", [1.0, 1e4])
def test_singleton_is_exactly_zero_with_exactly_zero_gradient(
    new_problem: Maker, grads_of: Maker, dtype: torch.dtype, logits: float
) -> None:
    # trl#6166, trl#6297: near-deterministic token: NaN logprob, NaN loss
    problem = new_problem(9, masked=1.0, widest=1, logits=logits)
    arguments = problem.arguments(dtype)
    got = kept_logprobs(*arguments, softcap=20.0)
    assert (got.logprobs == 0).all()
    assert (got.entropy_kept == 0).all()
    for grad in grads_of(got, *arguments[:2], problem.grad):
        assert (grad == 0).all()


@pytest.mark.parametrize(("rows", "gap"), [([[0, 1]], 60.0), ([[0, 1]], 20.0), ([[]], 20.0)])
def test_gradient_keeps_its_digits_where_the_probability_rounds_to_one(
    rows: list[list[int]], gap: float
) -> None:
    weight = torch.tensor([[0.0], [-gap]], requires_grad=True)
    kept = KeptSet.from_rows(rows)
    got = kept_logprobs(torch.ones(1, 1), weight, torch.tensor([0]), kept, torch.ones(1)).logprobs
    (grad,) = torch.autograd.grad(got.sum(), weight)
    other = math.exp(-gap) / (1 + math.exp(-gap))
    torch.testing.assert_close(grad, torch.tensor([[other], [-other]]), rtol=1e-6, atol=0)
    torch.testing.assert_close(got, torch.tensor([-other]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("rows", [[[0, 1]], [[]]])
@pytest.mark.parametrize("inner", [0.01, 1.0, 10.0, -10.0, 40.0])
def test_slope_of_a_saturated_softcap_keeps_its_digits(rows: list[list[int]], inner: float) -> None:
    cap = 8.0
    weight = torch.tensor([[inner * cap], [0.0]], requires_grad=True)
    kept = KeptSet.from_rows(rows)
    got = kept_logprobs(
        torch.ones(1, 1), weight, torch.tensor([0]), kept, torch.ones(1), softcap=cap, entropy=None
    ).logprobs
    (grad,) = torch.autograd.grad(got.sum(), weight)
    other = 1 / (1 + math.exp(cap * math.tanh(inner)))
    want = torch.tensor([[other / math.cosh(inner) ** 2], [-other]])
    torch.testing.assert_close(grad, want, rtol=1e-5, atol=0)


def test_nothing_outside_the_set_gets_a_gradient(new_problem: Maker, grads_of: Maker) -> None:
    problem = new_problem(4, masked=1.0)
    arguments = problem.arguments(torch.float32)
    grad_weight = grads_of(kept_logprobs(*arguments), *arguments[:2], problem.grad)[1]
    touched = set(grad_weight.abs().sum(-1).nonzero().squeeze(1).tolist())
    assert touched
    assert touched <= set(problem.kept.ids.tolist())


def test_no_positions(new_problem: Maker, grads_of: Maker) -> None:
    problem = new_problem(0, num=0)
    arguments = problem.arguments(torch.float32)
    got = kept_logprobs(*arguments, full_logprobs=True)
    assert [tuple(one.shape) for one in got if one is not None] == [(0,)] * 5
    grad_hidden, grad_weight = grads_of(got, *arguments[:2], problem.grad)
    assert grad_hidden.shape == (0, 16)
    assert (grad_weight == 0).all()


@pytest.mark.parametrize("masked", [0.0, 1.0])
def test_nan_comes_through_and_is_never_zero(new_problem: Maker, masked: float) -> None:
    problem = new_problem(6, masked=masked, widest=3)
    hidden, *rest = problem.arguments(torch.float32)
    broken = hidden.detach().clone()
    broken[3] = torch.nan
    got = kept_logprobs(broken, *rest).logprobs
    assert got.isnan().tolist() == [n == 3 for n in range(12)]


def test_tied_embedding_gets_both_gradients(new_problem: Maker, error_of: Maker) -> None:
    problem = new_problem(8, size=16)
    _, weight, labels, kept, temperature = problem.arguments(torch.float64)
    tokens = torch.arange(12)
    kept_logprobs(weight[tokens], weight, labels, kept, temperature).logprobs.sum().backward()
    embedding, head = (weight.detach().clone().requires_grad_() for _ in range(2))
    kept_logprobs(embedding[tokens], head, labels, kept, temperature).logprobs.sum().backward()
    assert weight.grad is not None
    assert embedding.grad is not None
    assert head.grad is not None
    assert error_of(weight.grad, embedding.grad + head.grad) <= 1e-13


def test_frozen_head_still_trains_hidden(new_problem: Maker, grads_of: Maker) -> None:
    problem = new_problem(8)
    hidden, weight, *rest = problem.arguments(torch.float32)
    want = grads_of(kept_logprobs(hidden, weight, *rest), hidden, weight, problem.grad)[0]
    frozen = kept_logprobs(hidden, weight.detach(), *rest).logprobs
    (got,) = torch.autograd.grad(frozen, hidden, problem.grad)
    assert torch.equal(got, want)


def test_diagnostics_have_no_gradient(new_problem: Maker) -> None:
    got = kept_logprobs(*new_problem(8).arguments(torch.float32), full_logprobs=True)
    assert [one.requires_grad for one in got if one is not None] == [True, False, False, False, False]


def test_without_autograd_nothing_requires_grad(new_problem: Maker) -> None:
    with torch.no_grad():
        got = kept_logprobs(*new_problem(8).arguments(torch.float32))
    assert not got.logprobs.requires_grad


def test_same_call_gives_the_same_bits(new_problem: Maker, grads_of: Maker) -> None:
    problem = new_problem(12, 300, 500, 32, masked=0.8, widest=200)
    results = []
    for _ in range(2):
        arguments = problem.arguments(torch.float32)
        got = kept_logprobs(*arguments)
        results.append([*got[:4], *grads_of(got, *arguments[:2], problem.grad)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
