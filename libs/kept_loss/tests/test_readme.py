"""The README's lines run as they are printed."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.mark.filterwarnings("error")
def test_readme_runs() -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 2
    names: dict[str, Any] = {}
    exec(blocks[0], names)
    assert names["embed"].weight.grad is not None
    assert names["lm_head"].weight.grad.abs().sum() > 0
    assert names["kept"].offsets.tolist() == [0, 0, 2, 3, 5]
    assert names["out"].logprobs[2] == 0  # a singleton
    exec(blocks[1], names)
    assert ((names["logprobs"] < 0) == torch.tensor([[0, 0, 1], [0, 0, 1]])).all()
