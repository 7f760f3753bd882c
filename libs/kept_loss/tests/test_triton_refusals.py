"""The Triton backend refuses what the torch backend refuses, in its words, and what it cannot serve."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch

from kept_loss import KeptSet, kept_logprobs

from .triton_here import import_kernels, leaves

Maker = Callable[..., Any]

if reason := import_kernels():
    pytest.skip(reason, allow_module_level=True)

triton_backend: Any = import_module("kept_loss.triton_backend")

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")


@pytest.fixture(scope="module")
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


SETS = KeptSet.from_rows([[1, 5], [], [3]])


@pytest.mark.parametrize(
    "changes",
    [
        {"labels": torch.tensor([1, -100, 3])},
        {"labels": torch.tensor([1, 10, 3])},
        {"labels": torch.tensor([1, 2, 4])},
        {"labels": torch.tensor([2, 2, 2**32 + 3])},
        {"temperature": torch.tensor([1.0, 0.0, 1.0])},
        {"temperature": torch.tensor([1.0, 1.0, torch.nan])},
        {"temperature": torch.tensor([torch.inf, -1.0, 1.0])},
        {"kept": KeptSet(SETS.ids, torch.tensor([0, 2, 2, 2]))},
        {"kept": KeptSet(SETS.ids, torch.tensor([1, 2, 2, 3]))},
        {"kept": KeptSet(SETS.ids, torch.tensor([0, 2, 1, 3]))},
        {"kept": KeptSet(SETS.ids, torch.tensor([0, 10**12, 10**12, 3]))},
        {"kept": KeptSet(SETS.ids, torch.tensor([0, -(10**12), 2, 3]))},
        {"kept": KeptSet(SETS.ids, torch.tensor([0, 0, 0, 10**12]))},
        {"kept": KeptSet.from_rows([[1, 10], [], [3]])},
        {"kept": KeptSet.from_rows([[1], [], [3, -1]])},
        {"kept": KeptSet.from_rows([[1, 2**31 - 1], [], [3]]), "labels": torch.tensor([1, 11, 3])},
        {
            "hidden": torch.zeros(0, 4),
            "labels": torch.zeros(0, dtype=torch.int64),
            "temperature": torch.zeros(0),
            "kept": KeptSet(SETS.ids, torch.zeros(1, dtype=torch.int64)),
        },
    ],
)
def test_refuses_in_the_words_of_the_torch_backend(device: str, changes: dict[str, Any]) -> None:
    good: dict[str, Any] = {
        "hidden": torch.zeros(3, 4),
        "weight": torch.zeros(10, 4),
        "labels": torch.tensor([1, 2, 3]),
        "kept": SETS,
        "temperature": torch.ones(3),
    }
    arguments = {name: value.to(device) for name, value in {**good, **changes}.items()}
    texts = []
    for backend in ("torch", "triton"):
        with pytest.raises(ValueError, match=r"^(labels|temperature|kept\.)") as refused:
            kept_logprobs(**arguments, backend=backend)
        texts.append(str(refused.value))
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("hidden", "weight"), [(torch.float64, torch.float64), (torch.float32, torch.bfloat16)]
)
def test_refuses_types_that_it_does_not_know(
    new_problem: Maker, device: str, hidden: torch.dtype, weight: torch.dtype
) -> None:
    h, w, *rest = leaves(new_problem(0, 3), torch.float32, device)
    with pytest.raises(ValueError, match=f"got {hidden} and {weight}; convert one"):
        kept_logprobs(h.to(hidden), w.to(weight), *rest, backend="triton")
    got = kept_logprobs(h.to(hidden), w.to(weight), *rest, backend="auto").logprobs
    assert got.dtype == hidden  # auto takes the torch backend


def test_refuses_a_cpu_without_the_interpreter(new_problem: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_backend, "INTERPRETED", False)
    with pytest.raises(ValueError, match='backend: Triton needs CUDA, hidden is on cpu; use backend="torch"'):
        kept_logprobs(*new_problem(0, 3).arguments(torch.float32), backend="triton")
