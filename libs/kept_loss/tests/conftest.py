"""Random problems; what their errors are held to is in bounds.py."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from kept_loss import KeptLogprobs, KeptSet


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors are tiny here: on a busy machine, waiting for other threads would be most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Problem(NamedTuple):
    hidden: Tensor
    weight: Tensor
    labels: Tensor
    kept: KeptSet
    temperature: Tensor
    grad: Tensor
    """Of the logprobs."""

    def arguments(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, KeptSet, Tensor]:
        """Leaves of ``dtype`` that require gradients, and the rest."""
        hidden = self.hidden.detach().to(dtype).requires_grad_()
        weight = self.weight.detach().to(dtype).requires_grad_()
        heat = torch.float64 if dtype == torch.float64 else torch.float32
        return hidden, weight, self.labels, self.kept, self.temperature.to(heat)


def make_problem(
    seed: int,
    num: int = 12,
    vocab: int = 50,
    size: int = 16,
    *,
    masked: float = 0.7,
    widest: int = 12,
    logits: float = 3.0,
    temperatures: tuple[float, float] = (0.3, 1.7),
) -> Problem:
    """float32 values. A share ``masked`` of the positions has a kept set of 1 to ``widest`` ids.

    ``logits`` is their standard deviation. Half of the labels are the likeliest id: sampled ones
    mostly are.
    """
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num, size, generator=g) * logits / size**0.5
    weight = torch.randn(vocab, size, generator=g)
    labels = torch.randint(vocab, (num,), generator=g)
    likeliest = torch.rand(num, generator=g) < 0.5
    labels = torch.where(likeliest, (hidden @ weight.T).argmax(1), labels)
    rows = []
    for label in labels.tolist():
        if torch.rand((), generator=g).item() >= masked:
            rows.append([])
            continue
        width = int(torch.randint(1, min(widest, vocab) + 1, (), generator=g))
        others = [token for token in torch.randperm(vocab, generator=g).tolist() if token != label]
        rows.append(sorted([label, *others[: width - 1]]))
    low, high = temperatures
    temperature = low + (high - low) * torch.rand(num, generator=g)
    grad = torch.randn(num, generator=g)
    return Problem(hidden, weight, labels, KeptSet.from_rows(rows), temperature, grad)


def gradients(output: KeptLogprobs, hidden: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Of hidden and of weight."""
    got = torch.autograd.grad(output.logprobs, (hidden, weight), grad.to(output.logprobs.dtype))
    return got[0], got[1]


def error(got: Tensor, want: Tensor) -> float:
    """The largest difference in float64; infinite unless NaN stands where NaN must."""
    got, want = got.detach().double(), want.detach().double()
    if not torch.equal(got.isnan(), want.isnan()):
        return float("inf")
    return (got - want).nan_to_num(0).abs().max().item() if got.numel() else 0.0


@pytest.fixture(scope="session")
def new_problem() -> Callable[..., Problem]:
    return make_problem


@pytest.fixture(scope="session")
def grads_of() -> Callable[..., tuple[Tensor, Tensor]]:
    return gradients


@pytest.fixture(scope="session")
def error_of() -> Callable[[Tensor, Tensor], float]:
    return error
