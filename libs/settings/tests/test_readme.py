"""The README's lines run."""

import re
import sys
from pathlib import Path
from typing import Any


def test_readme_runs(toml, tmp_path, monkeypatch):
    text = (Path(__file__).parents[1] / "README.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    toml("inference.model = 'm'", "run.toml")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["keptset-inference", "--model", "other"])
    names: dict[str, Any] = {}
    exec(block, names)
    assert names["settings"].model == "other"
    assert names["run"].name == "x"
    assert names["run"].inference.model == "m"
