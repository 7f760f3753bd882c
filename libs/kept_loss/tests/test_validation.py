"""What is refused, and that the text says where."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kept_loss import KeptSet, dense_kept_logprobs, kept_logprobs

HIDDEN, WEIGHT = torch.zeros(3, 4), torch.zeros(10, 4)
GOOD: dict[str, Any] = {
    "hidden": HIDDEN,
    "weight": WEIGHT,
    "labels": torch.tensor([1, 2, 3]),
    "kept": KeptSet.from_rows([[1, 5], [], [3]]),
    "temperature": torch.ones(3),
}

SETS = SimpleNamespace(ids=[1, 5, 3], counts=[2, 0, 1])
"""As kept_tokens.KeptTokens holds them."""


def offsets(*values: int) -> KeptSet:
    return KeptSet(GOOD["kept"].ids, torch.tensor(values))


@pytest.mark.parametrize("function", [kept_logprobs, dense_kept_logprobs])
@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"hidden": torch.zeros(1, 3, 4)}, r"hidden: has shape \(1, 3, 4\)"),
        ({"hidden": torch.zeros(3, 4, dtype=torch.int32)}, "hidden: has dtype"),
        ({"weight": torch.zeros(10, 5)}, r"weight: has shape \(10, 5\)"),
        ({"labels": torch.tensor([1, 2])}, r"labels: has shape \(2,\)"),
        ({"labels": torch.tensor([1, 2, 3], dtype=torch.int32)}, "labels: has dtype torch.int32"),
        ({"labels": torch.tensor([1, -100, 3])}, "labels: at position 1: -100 is outside"),
        ({"labels": torch.tensor([1, 10, 3])}, "labels: at position 1: 10 is outside"),
        (
            {"labels": torch.tensor([1, 2, 4])},
            r"labels: at position 2: 4 is not in its kept set \(1 ids: 3\)",
        ),
        ({"temperature": torch.tensor([1.0, 0.0, 1.0])}, "temperature: at position 1: 0.0"),
        ({"temperature": torch.tensor([1.0, -1.0, 1.0])}, "temperature: at position 1: -1.0"),
        ({"temperature": torch.tensor([1.0, 1.0, torch.nan])}, "temperature: at position 2: nan"),
        ({"temperature": torch.tensor([torch.inf, 1.0, 1.0])}, "temperature: at position 0: inf"),
        ({"temperature": torch.ones(3, dtype=torch.bfloat16)}, "temperature: has dtype torch.bfloat16"),
        ({"kept": offsets(0, 2, 2)}, r"kept.offsets: has shape \(3,\)"),
        ({"kept": offsets(0, 2, 2, 2)}, "kept.offsets: go from 0 to 2"),
        ({"kept": offsets(1, 2, 2, 3)}, "kept.offsets: go from 1 to 3"),
        ({"kept": offsets(0, 2, 1, 3)}, "kept.offsets: at position 1: fall from 2 to 1"),
        ({"kept": offsets(0, 99, 99, 3)}, "kept.offsets: at position 2: fall from 99 to 3"),
        ({"kept": KeptSet.from_rows([[1, 10], [], [3]])}, "kept.ids: at position 0: 10 is outside"),
        ({"kept": KeptSet.from_rows([[1], [], [3, -1]])}, "kept.ids: at position 2: -1 is outside"),
        ({"kept": KeptSet(GOOD["kept"].ids.long(), GOOD["kept"].offsets)}, "kept.ids: has dtype torch.int64"),
        ({"temperature": 0.7}, r"temperature: is of type float 0.7, .*torch.full\(\(N,\), 0.7\)"),
        ({"temperature": None}, "temperature: is None, but must be a float32 tensor"),
        ({"labels": [1, 2, 3]}, "labels: is of type list, but must be an int64 tensor"),
        ({"hidden": HIDDEN.numpy()}, "hidden: is of type ndarray"),
        ({"weight": torch.nn.Linear(4, 10)}, "weight: is of type Linear, .*lm_head.weight"),
        ({"kept": None}, r"kept: is None, .*KeptSet.whole_vocabulary\(N\)"),
        ({"kept": [[1, 5], [], [3]]}, "kept: is of type list, .*KeptSet.from_rows"),
        ({"kept": SETS}, r"kept: is of type SimpleNamespace, .*KeptSet.from_arrays\(kept.ids, kept.counts\)"),
        ({"kept": KeptSet([1, 5, 3], GOOD["kept"].offsets)}, "kept.ids: is of type list"),  # type: ignore[arg-type]
        ({"kept": KeptSet(GOOD["kept"].ids, None)}, "kept.offsets: is None"),  # type: ignore[arg-type]
        ({"softcap": 0.0}, "softcap: 0.0"),
        ({"softcap": "30"}, "softcap: '30'"),
        ({"entropy": 0.0}, "entropy: 0.0"),
        ({"entropy": 1.5}, "entropy: 1.5"),
        ({"entropy": "half"}, "entropy: 'half'"),
        ({"entropy": [0.5]}, r"entropy: \[0.5\]"),
    ],
)
def test_refused(function: Callable[..., Any], changes: dict[str, Any], text: str) -> None:
    function(**GOOD)
    with pytest.raises(ValueError, match=text):
        function(**{**GOOD, **changes})


def test_backends() -> None:
    assert torch.equal(kept_logprobs(**GOOD, backend="torch").logprobs, kept_logprobs(**GOOD).logprobs)
    with pytest.raises(ValueError, match="backend: 'cuda'"):
        kept_logprobs(**GOOD, backend="cuda")  # type: ignore[arg-type]
