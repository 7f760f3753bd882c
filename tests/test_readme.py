"""The README's lines of Python run as they stand."""

import re
from pathlib import Path
from typing import Any


def test_the_libraries_example_runs():
    text = (Path(__file__).parents[1] / "README.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, Any] = {}
    exec(block, names)
    assert names["sets"].rows() == [[3, 17], [5]]
    assert names["ratio"].shape == (2,)
    assert names["ratio"][1] == 1  # a singleton
