"""The repository's vectors, computed outside this package in float64."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kept_loss import KeptSet, dense_kept_logprobs, kept_logprobs

from .bounds import TOLERANCE, error_bounds, excess

VECTORS: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[3] / "tests" / "vectors" / "kept_logprob.json").read_text()
)


@pytest.mark.parametrize("function", [kept_logprobs, dense_kept_logprobs])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("entry", VECTORS, ids=["moderate", "large"])
def test_vectors(
    entry: dict[str, Any],
    dtype: torch.dtype,
    function: Callable[..., Any],
) -> None:
    want = {
        name: torch.tensor(entry[name], dtype=torch.float64)
        for name in entry
        if name not in ("kept", "labels")
    }
    hidden = want["hidden"].to(dtype).requires_grad_()
    weight = want["weight"].to(dtype).requires_grad_()
    temperature = want["temperature"].to(dtype)
    got = function(
        hidden, weight, torch.tensor(entry["labels"]), KeptSet.from_rows(entry["kept"]), temperature
    )
    got.logprobs.backward(want["grad_logprob"].to(dtype))
    assert hidden.grad is not None
    assert weight.grad is not None

    labels, kept = torch.tensor(entry["labels"]), KeptSet.from_rows(entry["kept"])
    problem = SimpleNamespace(**want, labels=labels, kept=kept, grad=want["grad_logprob"])
    bounds = error_bounds(problem, tolerance=1e-14 if dtype == torch.float64 else TOLERANCE)
    assert excess(got.logprobs, want["logprob"], bounds.outputs) <= 1
    assert excess(got.entropy, want["entropy_full_vocabulary"], bounds.outputs) <= 1
    assert excess(hidden.grad, want["grad_hidden"], bounds.hidden) <= 1
    assert excess(weight.grad, want["grad_weight"], bounds.weight) <= 1
