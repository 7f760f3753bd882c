"""The README's lines run."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch


def test_readme_runs() -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    embedding = torch.nn.Embedding(20, 8)
    names: dict[str, Any] = {
        "model": SimpleNamespace(
            model=lambda tokens: SimpleNamespace(last_hidden_state=embedding(tokens)),
            lm_head=torch.nn.Linear(8, 20, bias=False),
        ),
        "tokens": torch.tensor([[4, 7, 9, 3]]),
        "sets": SimpleNamespace(
            ids=np.array([7, 8, 9, 2, 3], np.int32), offsets=np.array([0, 2, 3, 5], np.int64)
        ),
        "temperatures": torch.ones(3),
        "rollout_logprobs": torch.zeros(3),
        "advantages": torch.ones(3),
        "loss_mask": torch.tensor([True, False, True]),
    }
    exec(block, names)
    assert embedding.weight.grad is not None
    assert names["model"].lm_head.weight.grad.abs().sum() > 0
    assert names["out"].logprobs[1] == 0
