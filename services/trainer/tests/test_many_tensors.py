"""The kernels over many tensors do what torch does tensor by tensor; here in Triton's interpreter."""

import os
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from keptset_trainer import master_weights
from keptset_trainer.master_weights import MasterCopies
from keptset_trainer.optimizer import adamw, total_norm

SIZES = [(3, 5), (4096,), (1,), (5000, 2), (130,)]


def import_kernels() -> Any:
    """TRITON_INTERPRET is looked at when a kernel is defined, and gone again afterwards."""
    if find_spec("triton") is None:
        pytest.skip("triton is not installed", allow_module_level=True)
    if torch.cuda.is_available():
        return import_module("keptset_trainer.many_tensors")
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        import_module("triton.experimental.gluon")  # the first launch would import it, too late
        return import_module("keptset_trainer.many_tensors")
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]


many_tensors = import_kernels()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def tensors(dtype: torch.dtype = torch.float32, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator).to(dtype).to(DEVICE) for size in SIZES]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_add_up_in_float32(dtype):
    tables = many_tensors.Tables()
    sums = [torch.full_like(one, torch.nan) for one in tensors()]
    first, second = tensors(dtype, 1), tensors(dtype, 2)
    many_tensors.sum_up(tables, first, sums, fresh=True)
    assert all(torch.equal(a, b.float()) for a, b in zip(sums, first, strict=True))
    many_tensors.sum_up(tables, second, sums, fresh=False)
    for total, a, b in zip(sums, first, second, strict=True):
        assert torch.equal(total, a.float() + b.float())


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_a_step_with_gradients_in_half_precision_is_that_with_the_same_in_float32(kind):
    options = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.01}
    halves, results = tensors(kind, seed=1), []
    for gradients in (halves, [one.float() for one in halves]):
        ours = tensors()
        first, second = ([torch.zeros_like(one) for one in ours] for _ in range(2))
        many_tensors.adamw_step(
            many_tensors.Tables(), ours, gradients, first, second, None,
            torch.ones(len(ours), device=DEVICE), torch.tensor(0.5, device=DEVICE),
            torch.tensor(True, device=DEVICE), **options,
        )  # fmt: skip
        results.append([*ours, *first, *second])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert not torch.equal(results[0][0], tensors()[0])


def test_the_only_row_s_gradients_need_no_sum(monkeypatch):
    """As on a GPU, where the kernels take them; here the interpreter does."""
    results = []
    for takes in (True, False):
        monkeypatch.setattr(master_weights, "kernels_take", lambda _, takes=takes: takes)
        model = torch.nn.Linear(5, 3, device=DEVICE, dtype=torch.float16)
        for number, parameter in enumerate(model.parameters()):
            parameter.data = (
                tensors(torch.float16, number)[0].flatten()[: parameter.numel()].view_as(parameter)
            )
            parameter.grad = parameter.detach() * 0.25
        weights = MasterCopies(model, {name: p.detach().float() for name, p in model.named_parameters()})
        optimizer = adamw(weights, lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.01)
        weights.add_up(only=True)
        given = {master.grad.dtype for master in weights.named.values()}
        assert given == ({torch.float16} if takes else {torch.float32})
        assert all(parameter.grad is None for parameter in model.parameters())
        sound, clip = torch.tensor(True, device=DEVICE), torch.tensor(1.0, device=DEVICE)
        assert optimizer.step_in_one_launch(sound, clip)
        results.append([*weights.named.values(), *model.parameters()])
        weights.drop_gradients()
        assert all(master.grad is None for master in weights.named.values())
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_the_norm_of_gradients_in_half_precision_is_not_rounded_to_it():
    gradients = tensors(torch.bfloat16)
    exact = sum(float(one.double().square().sum()) for one in gradients) ** 0.5
    assert abs(float(total_norm(gradients, gradients[0].device)) / exact - 1) < 1e-6
    assert float(total_norm([], torch.device("cpu"))) == 0


# the interpreter does not round to bfloat16 as a GPU does
@pytest.mark.parametrize("dtype", [None, torch.bfloat16 if DEVICE == "cuda" else torch.float16])
def test_steps_are_those_of_torch(dtype):
    ours, theirs = tensors(), [one.requires_grad_() for one in tensors()]
    first, second = ([torch.zeros_like(one) for one in ours] for _ in range(2))
    rounded = None if dtype is None else [torch.zeros_like(one, dtype=dtype) for one in ours]
    options = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.01}
    optimizer = torch.optim.AdamW(theirs, **options)
    tables, clip = many_tensors.Tables(), torch.tensor(0.5, device=DEVICE)
    for number in range(1, 4):
        gradients = tensors(seed=number)
        for parameter, gradient in zip(theirs, gradients, strict=True):
            parameter.grad = gradient * 0.5
        optimizer.step()
        for sound in (False, True):
            many_tensors.adamw_step(
                tables, ours, gradients, first, second, rounded,
                torch.full((len(ours),), float(number), device=DEVICE), clip,
                torch.tensor(sound, device=DEVICE), **options,
            )  # fmt: skip
            if not sound and number == 1:
                assert all(torch.equal(a, b) for a, b in zip(ours, tensors(), strict=True))
    for mine, parameter in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, parameter.detach(), rtol=2e-6, atol=2e-6)
    for name, moments in (("exp_avg", first), ("exp_avg_sq", second)):
        for mine, parameter in zip(moments, theirs, strict=True):
            torch.testing.assert_close(mine, optimizer.state[parameter][name], rtol=2e-6, atol=2e-6)
    if rounded is not None:
        assert all(torch.equal(mine.to(dtype), copy) for mine, copy in zip(ours, rounded, strict=True))


def test_what_is_not_dense_or_not_aligned_does_not_fit():
    whole = torch.zeros(64, 64)
    assert many_tensors.fits([whole])
    assert not many_tensors.fits([whole.T])
    assert not many_tensors.fits([whole.view(-1)[1:]])
