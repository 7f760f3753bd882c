"""The README's lines run as they are printed."""

import re
from pathlib import Path
from typing import Any


def test_readme_runs() -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 2
    names: dict[str, Any] = {}
    for block in blocks:
        exec(block, names)
    assert names["kept"] == names["KeptTokens"].from_sampling_mask([[3, 17], [5]])
    assert names["sequence"].counts.tolist() == [0, 0, 0, 2, 1]
    assert names["predicted"].rows() == [[], [], [3, 17], [5]]
    assert names["rectangle"].shape == (2, 512)
    assert len(names["turns"]) == 14
