"""Masked positions never cost a tensor of the vocabulary's size."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kept_loss import kept_logprobs

Maker = Callable[..., Any]
NUM, VOCAB, SIZE = 200, 5000, 8


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements that any operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, tuple | list) else (result,):
            if isinstance(one, torch.Tensor):
                self.elements = max(self.elements, one.numel())
        return result


def test_masked_positions_cost_their_ids_only(new_problem: Maker) -> None:
    problem = new_problem(0, NUM, VOCAB, SIZE, masked=1.0)
    hidden, weight, *rest = problem.arguments(torch.float32)
    entries = problem.kept.ids.numel()
    assert entries * SIZE < VOCAB * 4 < NUM * VOCAB // 8  # the sizes tell the cases apart
    with LargestTensor() as seen:
        got = kept_logprobs(hidden, weight.detach(), *rest, entropy=None)
        got.logprobs.backward(problem.grad)
    assert seen.elements <= VOCAB * SIZE  # the head itself
    assert hidden.grad is not None


def test_saved_for_backward_is_small(new_problem: Maker) -> None:
    for masked, most in ((1.0, NUM * SIZE), (0.5, NUM * SIZE)):
        problem = new_problem(0, NUM, VOCAB, SIZE, masked=masked)
        arguments = problem.arguments(torch.float32)
        saved: list[torch.Tensor] = []

        def keep(tensor: torch.Tensor, saved: list[torch.Tensor] = saved) -> torch.Tensor:
            saved.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            kept_logprobs(*arguments, full_logprobs=True)
        own = [one.numel() for one in saved if one.shape != arguments[1].shape]
        assert own
        assert max(own) <= max(most, problem.kept.ids.numel())
