"""The Triton backend against the dense reference in float64: on the GPU, or without one in the interpreter.

Shapes are small, because the interpreter takes about 20 ms a program; what needs many blocks calls the
kernels' own functions with small ones.
"""

import math
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kept_loss import KeptSet, dense_kept_logprobs, kept_logprobs

from .bounds import error_bounds, excess, half_unit
from .triton_here import import_kernels, leaves

Maker = Callable[..., Any]


if reason := import_kernels():
    pytest.skip(reason, allow_module_level=True)

triton_backend: Any = import_module("kept_loss.triton_backend")
segments: Any = import_module("kept_loss.kernels.segments")
vocabulary: Any = import_module("kept_loss.kernels.vocabulary")

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")


@pytest.fixture(scope="module")
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def relative(got: Tensor, want: Tensor) -> float:
    """Norm of the difference over the norm of what it should be."""
    return float((got.double() - want).norm() / want.norm().clamp_min(1e-30))


def compare(
    problem: Any, device: str, grads_of: Maker, dtype: torch.dtype = torch.float32, **options: Any
) -> None:
    """Every entry of the outputs and of both gradients within its bound.

    In 16 bits the logits' gradient of unmasked positions, or the masked positions' sum to which theirs is
    added, is rounded once more. The interpreter cuts bfloat16 off instead of rounding it.
    """
    mine = leaves(problem, dtype, device)
    given = problem._replace(hidden=mine[0].detach().cpu(), weight=mine[1].detach().cpu())
    exact = given.arguments(torch.float64)
    got = kept_logprobs(*mine, backend="triton", **options)
    want = dense_kept_logprobs(*exact, **options)
    half_units = 2 if triton_backend.INTERPRETED else 1
    between = 0.0 if dtype == torch.float32 else half_units * torch.finfo(dtype).eps / 2
    bounds = error_bounds(given, options.get("softcap"), rounding=between)
    for name, value, reference in zip(got._fields, got, want, strict=True):
        assert (value is None) == (reference is None), name
        if value is not None and reference is not None:
            assert value.dtype == torch.float32, name
            assert excess(value, reference, bounds.outputs) <= 1, name
    assert (got.logprobs <= 0).all()
    assert got.kept_mass is None or not (got.kept_mass > 1).any()

    got_grads = grads_of(got, *mine[:2], problem.grad.to(device))
    want_grads = grads_of(want, *exact[:2], problem.grad)
    for name, grad, reference in zip(("hidden", "weight"), got_grads, want_grads, strict=True):
        assert grad.dtype == dtype, name
        bound = getattr(bounds, name) + half_units * half_unit(reference, dtype)
        assert excess(grad, reference, bound) <= 1, name


def with_widths(problem: Any, widths: list[int], vocab: int) -> Any:
    """The problem with sets of these widths, each with its label somewhere inside, in no order."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randperm(vocab, generator=generator)[:width].tolist() for width in widths]
    labels = [row[(7 * n) % len(row)] if row else n for n, row in enumerate(rows)]
    return problem._replace(kept=KeptSet.from_rows(rows), labels=torch.tensor(labels))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("masked", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("softcap", [None, 8.0])
def test_equals_dense(
    new_problem: Maker, grads_of: Maker, device: str, dtype: torch.dtype, masked: float, softcap: float | None
) -> None:
    problem = new_problem(1, 8, 300, 40, masked=masked, logits=2.0)
    compare(problem, device, grads_of, dtype, softcap=softcap, full_logprobs=True)


@pytest.mark.parametrize("entropy", ["full", 0.3, None])
@pytest.mark.parametrize("full_logprobs", [False, True])
def test_diagnostics(
    new_problem: Maker, grads_of: Maker, device: str, entropy: Any, full_logprobs: bool
) -> None:
    widths = [0, 1, 2, 5, 0, 1, 3, 1, 0, 50]  # kept_mass of a singleton is computed by itself
    problem = with_widths(new_problem(2, 10), widths, 50)
    compare(problem, device, grads_of, entropy=entropy, full_logprobs=full_logprobs)


@pytest.mark.parametrize("entropy", ["full", 0.3, None])
@pytest.mark.parametrize("widths", [[0, 1, 2, 5, 0], [3, 1, 50], [0, 0]])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_caller_who_knows_how_many_sets_are_empty_gets_the_same_bits(
    new_problem: Maker, device: str, backend: Any, widths: list[int], entropy: Any
) -> None:
    problem = with_widths(new_problem(2, len(widths)), widths, 50)
    asked, known = (
        kept_logprobs(
            *leaves(problem, torch.float32, device), backend=backend, entropy=entropy, num_unmasked=number
        )
        for number in (None, widths.count(0))
    )
    for name, one, other in zip(asked._fields, asked, known, strict=True):
        assert (one is None) == (other is None), name
        if one is not None and other is not None:
            assert torch.equal(one.nan_to_num(-7), other.nan_to_num(-7)), name


class Questions(TorchDispatchMode):
    """Remembers operators whose result's shape only the device knows: the host waits for these."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), options: Any = None) -> Any:
        name = str(operator)
        indices = args[1] if name.startswith("aten.index") and isinstance(args[1], list | tuple) else ()
        by_mask = any(isinstance(one, Tensor) and one.dtype == torch.bool for one in indices)
        if by_mask or "nonzero" in name or "masked_select" in name or "_local_scalar" in name:
            self.asked.append(name)
        return operator(*args, **(options or {}))


@pytest.mark.parametrize("entropy", ["full", None])
@pytest.mark.parametrize(("widths", "asks"), [([1, 2, 5], False), ([0, 0], False), ([0, 2], True)])
def test_the_device_is_asked_nothing_where_all_positions_are_alike(
    new_problem: Maker, device: str, widths: list[int], asks: bool, entropy: Any
) -> None:
    """Wherever the caller knows how many sets are empty: a wait costs what the host could have launched."""
    arguments = leaves(with_widths(new_problem(2, len(widths)), widths, 50), torch.float32, device)
    with Questions() as questions:
        out = kept_logprobs(
            *arguments, backend="triton", entropy=entropy, full_logprobs=True, num_unmasked=widths.count(0)
        )
        out.logprobs.sum().backward()
    assert bool(questions.asked) == asks, questions.asked


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_widths_around_the_borders_of_blocks(
    new_problem: Maker, grads_of: Maker, device: str, dtype: torch.dtype
) -> None:
    widths = [1, 31, 32, 33, 0, 63, 64, 65, 1, 200, 2]
    problem = with_widths(new_problem(3, len(widths), 250, 24), widths, 250)
    compare(problem, device, grads_of, dtype, entropy=None)


def test_hidden_wider_than_a_block(new_problem: Maker, grads_of: Maker, device: str) -> None:
    compare(new_problem(4, 5, 40, 300, masked=0.6), device, grads_of)


def test_a_set_of_thousands_of_ids(new_problem: Maker, grads_of: Maker, device: str) -> None:
    widths = [3, 2200, 2]  # the wide one crosses 34 blocks: more than the join reads at once, twice
    problem = with_widths(new_problem(5, 3, 2500, 16), widths, 2500)
    compare(problem, device, grads_of, entropy=None)


@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_segments_of_any_length(device: str, block: int, dtype: torch.dtype) -> None:
    counts = [3, block, 1, 0, 35 * block + 5, 2 * block - 5 - 3 - 1, block, 16 * block, 2, 7]
    generator = torch.Generator().manual_seed(0)
    ordered = torch.repeat_interleave(torch.tensor(counts)).int()
    order = torch.randperm(len(ordered), generator=generator)  # of the entries that the segments are read in
    source = torch.randn(50, 20, generator=generator).to(dtype)
    rows = torch.randint(50, (len(ordered),), generator=generator).int()
    coefs = torch.randn(len(ordered), generator=generator)
    coefs[::7] = 0
    want = torch.zeros(len(counts), 20, dtype=torch.float64)
    want.index_add_(0, ordered.long(), coefs[order, None].double() * source[rows[order].long()].double())
    arguments = [one.to(device) for one in (source, rows, coefs, ordered)]
    out = torch.full((len(counts), 20), 99.0, device=device)
    segments.segment_sum(*arguments, out, order.to(device), block=block)
    assert (out[3] == 99).all()  # a segment without entries stays as it was
    want[3] = 99
    assert relative(out.cpu(), want) <= (1e-6 if dtype == torch.float32 else 1e-4)


def test_an_id_of_nearly_every_set(new_problem: Maker, grads_of: Maker, device: str) -> None:
    problem = new_problem(6, 80, 30, 16, masked=1.0)
    rows = [[7, 8 + n % 20] if n % 9 else [n % 20 + 8, n % 3] for n in range(80)]
    labels = torch.tensor([row[n % 2] for n, row in enumerate(rows)])
    problem = problem._replace(kept=KeptSet.from_rows(rows), labels=labels)
    compare(problem, device, grads_of, entropy=None)


@pytest.mark.parametrize("softcap", [None, 6.0])
def test_splits_of_the_vocabulary_are_joined(device: str, softcap: float | None) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(70, 40, generator=generator), torch.randn(700, 40, generator=generator)
    heat = 0.5 + torch.rand(70, generator=generator)
    logits = hidden.double() @ weight.double().T
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logprobs = (logits / heat[:, None]).log_softmax(-1)
    want = (logits / heat[:, None]).logsumexp(-1)
    for processors in (1, 4, 1000):
        sums = vocabulary.vocabulary_sums(
            hidden.to(device), weight.to(device), heat.to(device), softcap, processors
        )
        torch.testing.assert_close(sums.logsumexp().cpu().double(), want, rtol=0, atol=1e-5)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        torch.testing.assert_close(sums.entropy().cpu().double(), entropy, rtol=0, atol=1e-5)


def test_unmasked_gradient_in_several_tiles(
    new_problem: Maker, grads_of: Maker, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_backend, "POSITION_BLOCK", 5)
    monkeypatch.setattr(triton_backend, "VOCABULARY_BLOCK", 16)
    compare(new_problem(7, masked=0.3), device, grads_of)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("logits", [1.0, 1e4])
def test_singletons_are_exactly_zero_with_exactly_zero_gradient(
    new_problem: Maker, grads_of: Maker, device: str, dtype: torch.dtype, logits: float
) -> None:
    problem = new_problem(9, masked=1.0, widest=1, logits=logits)
    mine = leaves(problem, dtype, device)
    got = kept_logprobs(*mine, softcap=20.0, entropy=None, backend="triton")
    assert (got.logprobs == 0).all()
    assert (got.entropy_kept == 0).all()
    assert all((grad == 0).all() for grad in grads_of(got, *mine[:2], problem.grad.to(device)))


@pytest.mark.parametrize("masked", [0.0, 1.0])
def test_large_logits_stay_finite(new_problem: Maker, grads_of: Maker, device: str, masked: float) -> None:
    problem = new_problem(10, 8, masked=masked, logits=1e4)
    compare(problem, device, grads_of, full_logprobs=True)
    got = kept_logprobs(*leaves(problem, torch.float32, device), backend="triton")
    assert got.logprobs.isfinite().all()
    assert got.logprobs.min() < -1e3


@pytest.mark.parametrize(("rows", "gap"), [([[0, 1]], 40.0), ([[]], 40.0), ([[]], 15.0)])
def test_gradient_keeps_its_digits_where_the_probability_rounds_to_one(
    device: str, rows: list[list[int]], gap: float
) -> None:
    weight = torch.tensor([[0.0], [-gap]], device=device, requires_grad=True)
    kept = KeptSet.from_rows(rows, device)
    one = torch.ones(1, device=device)
    got = kept_logprobs(one[:, None], weight, one.long() - 1, kept, one, entropy=None, backend="triton")
    got.logprobs.sum().backward()
    other = math.exp(-gap) / (1 + math.exp(-gap))
    assert weight.grad is not None
    assert weight.grad.flatten().tolist() == pytest.approx([other, -other], rel=1e-5, abs=0)
    # the logprob of an unmasked label is as good absolutely
    assert got.logprobs.item() == pytest.approx(-other, rel=1e-5, abs=0 if rows[0] else 5e-7)


def test_float16_gradients_beyond_its_range_in_between(new_problem: Maker, device: str) -> None:
    problem = new_problem(11, 6, masked=0.6, logits=0.1)
    mine, exact = leaves(problem, torch.float16, device), leaves(problem, torch.float64, device)
    grad = torch.full((6,), 2.0**18, device=device)  # a scaled loss; the gradients themselves are small again
    for arguments, options in ((mine, {"backend": "triton"}), (exact, {})):
        hidden, weight, *rest = arguments
        function = kept_logprobs if options else dense_kept_logprobs
        function(hidden * 2**-10, weight * 2**-10, *rest, entropy=None, **options).logprobs.backward(grad)
    for leaf, reference in zip(mine[:2], exact[:2], strict=True):
        assert relative(leaf.grad, reference.grad) <= 1e-2


def test_tied_embedding_gets_both_gradients(new_problem: Maker, device: str) -> None:
    problem = new_problem(8)
    tokens = torch.arange(12, device=device)
    tied = []
    for dtype, function in ((torch.float32, kept_logprobs), (torch.float64, dense_kept_logprobs)):
        _, weight, *rest = leaves(problem, dtype, device)
        options = {"backend": "triton"} if function is kept_logprobs else {}
        function(weight[tokens], weight, *rest, entropy=None, **options).logprobs.sum().backward()
        tied.append(weight.grad)
    assert relative(*tied) <= 3e-6  # twelve positions: terms cancel, and a GPU rounds exp otherwise


def test_frozen_parts(new_problem: Maker, grads_of: Maker, device: str) -> None:
    problem = new_problem(8, masked=0.5)
    hidden, weight, *rest = leaves(problem, torch.float32, device)
    grad = problem.grad.to(device)
    options = {"entropy": None, "backend": "triton"}
    want = grads_of(kept_logprobs(hidden, weight, *rest, **options), hidden, weight, grad)
    kept_logprobs(hidden, weight.detach(), *rest, **options).logprobs.backward(grad)
    assert torch.equal(hidden.grad, want[0])
    assert weight.grad is None
    kept_logprobs(hidden.detach(), weight, *rest, **options).logprobs.backward(grad)
    assert torch.equal(weight.grad, want[1])
    with torch.no_grad():
        assert not kept_logprobs(hidden, weight, *rest, **options).logprobs.requires_grad


def test_diagnostics_have_no_gradient(new_problem: Maker, device: str) -> None:
    mine = leaves(new_problem(8, 4), torch.float32, device)
    got = kept_logprobs(*mine, full_logprobs=True, backend="triton")
    assert [one.requires_grad for one in got] == [True, False, False, False, False]


def test_no_positions(new_problem: Maker, grads_of: Maker, device: str) -> None:
    problem = new_problem(0, num=0)
    mine = leaves(problem, torch.float32, device)
    got = kept_logprobs(*mine, full_logprobs=True, backend="triton")
    assert [tuple(one.shape) for one in got] == [(0,)] * 5
    grad_hidden, grad_weight = grads_of(got, *mine[:2], problem.grad.to(device))
    assert grad_hidden.shape == (0, 16)
    assert (grad_weight == 0).all()


def test_same_call_gives_the_same_bits(new_problem: Maker, grads_of: Maker, device: str) -> None:
    problem = new_problem(12, 20, 60, 24, masked=0.8, widest=40)
    results = []
    for _ in range(2):
        mine = leaves(problem, torch.float32, device)
        got = kept_logprobs(*mine, backend="triton")
        results.append([*got[:4], *grads_of(got, *mine[:2], problem.grad.to(device))])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_nan_comes_through_except_at_singletons(new_problem: Maker, device: str) -> None:
    problem = with_widths(new_problem(6, 6), [0, 3, 1, 0, 3, 1], 50)
    problem.hidden[3:] = torch.nan
    mine = leaves(problem, torch.float32, device)
    got = kept_logprobs(*mine, backend="triton")
    assert got.logprobs.isnan().tolist() == [False, False, False, True, True, False]
    assert got.logprobs[5] == 0
    got.logprobs.sum().backward()
    assert mine[0].grad.isnan().any(1).tolist() == [False, False, False, True, True, False]
    assert mine[1].grad.isnan().any()


def test_strides_and_types_that_kernels_do_not_know(new_problem: Maker, device: str) -> None:
    problem = new_problem(13, 7, temperatures=(0.7, 0.7))
    hidden, weight, labels, kept, temperature = leaves(problem, torch.float32, device)
    want = kept_logprobs(hidden, weight, labels, kept, temperature, backend="triton")
    strided = [
        hidden.detach().T.contiguous().T,
        weight.detach().T.contiguous().T,
        torch.stack([labels, labels * 0], 1)[:, 0],
        KeptSet(*(torch.stack([one, one * 0], 1)[:, 0] for one in kept)),
    ]
    more = torch.cat([temperature[:1], 9 * temperature])  # what a kernel would read that takes it for [7]
    for heat in (more[:1].expand(7), temperature.double()):
        got = kept_logprobs(*strided, heat, backend="triton")
        assert all(torch.equal(a, b) for a, b in zip(got[:4], want[:4], strict=True))


def test_autocast_does_not_reach_inside(new_problem: Maker, grads_of: Maker, device: str) -> None:
    problem = new_problem(14, 6, masked=0.5)
    mine = leaves(problem, torch.float32, device)
    want = kept_logprobs(*mine, backend="triton")
    want_grads = grads_of(want, *mine[:2], problem.grad.to(device))
    with torch.autocast(device, torch.bfloat16):
        got = kept_logprobs(*mine, backend="triton")
        got_grads = grads_of(got, *mine[:2], problem.grad.to(device))
    for a, b in zip((*got[:4], *got_grads), (*want[:4], *want_grads), strict=True):
        assert torch.equal(a, b)
