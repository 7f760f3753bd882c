"""How the tests of the Triton backend come by its kernels and its arguments."""

import os
import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch


def import_kernels() -> str | None:
    """Import the kernels so that they run here; the reason if they cannot.

    TRITON_INTERPRET is looked at when a kernel is defined. It is gone again afterwards: other tests start
    processes, which inherit the environment.
    """
    if find_spec("triton") is None:
        return "triton is not installed"
    if torch.cuda.is_available() or "TRITON_INTERPRET" in os.environ:
        return None
    kernels = sys.modules.get("kept_loss.kernels")
    if kernels is not None and kernels.INTERPRETED:  # another file has imported them
        return None
    if "triton" in sys.modules:
        return "no GPU, and Triton was imported before, without its interpreter: run this file by itself"
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        import_module("triton.experimental.gluon")  # the first launch would import it, too late
        import_module("kept_loss.triton_backend")
    finally:
        del os.environ["TRITON_INTERPRET"]
    return None


def leaves(problem: Any, dtype: torch.dtype, device: str) -> tuple[Any, ...]:
    """The problem's arguments on the device; hidden and weight are leaves that require gradients."""
    hidden, weight, labels, kept, temperature = problem.arguments(dtype)
    return (
        hidden.detach().to(device).requires_grad_(),
        weight.detach().to(device).requires_grad_(),
        labels.to(device),
        kept.to(device),
        temperature.to(device),
    )
