"""The README's lines run."""

import re
from pathlib import Path
from typing import Any

import numpy as np

from kept_tokens import KeptTokens


def test_readme_runs() -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 2
    one = KeptTokens.from_rows([[3, 17]] * 80)
    names: dict[str, Any] = {
        "answer": {"choices": [{"kept_tokens": one.to_base64()}]},
        "choice": {"sampling_mask": one.to_sampling_mask()},
        "prompt": range(10),
        "tool_answer": KeptTokens.from_rows([[]] * 7),
        "ids": [17] * 90,
        "mask": [0] * 10 + [1] * 80,
        "logprobs": [0] * 10 + [-0.7] * 80,
        "heat": np.ones(90),
        "adv": np.ones(90),
    }
    for block in blocks:
        exec(block, names)
    assert names["rectangle"].shape == (80, 512)
    assert len(names["turns"]) == 107
