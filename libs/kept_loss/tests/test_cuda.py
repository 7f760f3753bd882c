"""The torch backend on a GPU, and what both backends keep there; skipped where there is none."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kept_loss import KeptSet, dense_kept_logprobs, kept_logprobs

from .bounds import error_bounds, excess, half_unit

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

Maker = Callable[..., Any]


def on_gpu(problem: Any, dtype: torch.dtype) -> tuple[Any, ...]:
    """The problem's arguments as leaves on the GPU."""
    hidden, weight, labels, kept, temperature = problem.arguments(dtype)
    return (
        hidden.detach().cuda().requires_grad_(),
        weight.detach().cuda().requires_grad_(),
        labels.cuda(),
        kept.to("cuda"),
        temperature.cuda(),
    )


@pytest.mark.parametrize("masked", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("softcap", [None, 8.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_dense_in_float64(
    new_problem: Maker, grads_of: Maker, masked: float, softcap: float | None, dtype: torch.dtype
) -> None:
    problem = new_problem(1, 400, 20000, 512, masked=masked, widest=600)
    mine = on_gpu(problem, dtype)
    given = problem._replace(hidden=mine[0].detach().cpu(), weight=mine[1].detach().cpu())
    exact = on_gpu(given, torch.float64)
    got = kept_logprobs(*mine, softcap=softcap, full_logprobs=True, backend="torch")
    want = dense_kept_logprobs(*exact, softcap=softcap, full_logprobs=True)
    bounds = error_bounds(given, softcap)
    for name, value, reference in zip(got._fields, got, want, strict=True):
        assert excess(value, reference, bounds.outputs) <= 1, name
    grad = problem.grad.cuda()
    got_grads, want_grads = grads_of(got, *mine[:2], grad), grads_of(want, *exact[:2], grad)
    for name, one, reference in zip(("hidden", "weight"), got_grads, want_grads, strict=True):
        bound = getattr(bounds, name) + half_unit(reference.cpu(), dtype)
        assert excess(one, reference, bound) <= 1, name


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_same_call_gives_the_same_bits(new_problem: Maker, grads_of: Maker, backend: Any) -> None:
    problem = new_problem(12, 3000, 500, 64, masked=0.8, widest=200)
    results = []
    for _ in range(3):
        arguments = on_gpu(problem, torch.float32)
        got = kept_logprobs(*arguments, backend=backend)
        results.append([*got[:4], *grads_of(got, *arguments[:2], problem.grad.cuda())])
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_singletons_are_exactly_zero(new_problem: Maker, grads_of: Maker, backend: Any) -> None:
    problem = new_problem(9, 500, masked=1.0, widest=1, logits=1e4)
    arguments = on_gpu(problem, torch.bfloat16)
    got = kept_logprobs(*arguments, backend=backend)
    assert (got.logprobs == 0).all()
    assert all((grad == 0).all() for grad in grads_of(got, *arguments[:2], problem.grad.cuda()))


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_masked_positions_take_little_memory(backend: Any) -> None:
    num, vocab, size, width = 16384, 151936, 1024, 8
    hidden = torch.randn(num, size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocab, size, device="cuda", dtype=torch.bfloat16)
    first = torch.randint(vocab - width, (num,), device="cuda")
    ids = (first[:, None] + torch.arange(width, device="cuda")).flatten().int()
    kept = KeptSet(ids, torch.arange(num + 1, device="cuda") * width)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    heat = torch.ones(num, device="cuda")
    got = kept_logprobs(hidden, weight, first, kept, heat, entropy=None, backend=backend)
    got.logprobs.sum().backward()
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < num * vocab  # bytes: a quarter of the logits in float32
    assert peak < 2**30
