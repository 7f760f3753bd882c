"""The README's lines run."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch


def read_only(values: list[int]) -> np.ndarray:
    """As the arrays of kept_tokens.KeptTokens are."""
    array = np.array(values, np.int32)
    array.flags.writeable = False
    return array


@pytest.mark.filterwarnings("error")
def test_readme_runs() -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 2
    embedding = torch.nn.Embedding(20, 8)
    names: dict[str, Any] = {
        "model": SimpleNamespace(
            model=lambda tokens: SimpleNamespace(last_hidden_state=embedding(tokens)),
            lm_head=torch.nn.Linear(8, 20, bias=False),
        ),
        "tokens": torch.tensor([[4, 7, 9, 3]]),
        "sets": SimpleNamespace(ids=read_only([7, 8, 9, 2, 3]), counts=read_only([2, 1, 2])),
        "temperatures": torch.ones(3),
        "rollout_logprobs": torch.zeros(3),
        "advantages": torch.ones(3),
        "loss_mask": torch.tensor([True, False, True]),
        "batch_ids": torch.tensor([[0, 4, 7], [1, 9, 3]]),
        "response_mask": torch.tensor([[False, False, True], [False, True, True]]),
        "batch_sets": SimpleNamespace(ids=read_only([5, 7, 9, 2, 3]), counts=read_only([0, 0, 2, 0, 1, 2])),
    }
    exec(blocks[0], names)
    assert embedding.weight.grad is not None
    assert names["model"].lm_head.weight.grad.abs().sum() > 0
    assert names["out"].logprobs[1] == 0
    exec(blocks[1], names)
    assert ((names["logprobs"] < 0) == torch.tensor([[0, 0, 1], [0, 0, 1]])).all()
