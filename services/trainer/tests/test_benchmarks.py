"""How the table of the step's benchmark judges what was measured more than once."""

import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def table(monkeypatch):
    """The module, by its folder."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import step_table

    yield step_table
    del sys.modules["step_table"]


def row(head: str, ms: float) -> dict[str, Any]:
    usual = {"compiled": True, "checkpointing": "off", "graphs": True, "sharding": "none", "ranks": 1}
    usual |= {"deterministic": False, "batch_kernel": "cuDNN", "varied": False, "shape": "16x", "head": head}
    return usual | {"ms": ms, "tokens_a_second": 1e6 / ms, "mfu": 60 / ms}


def test_several_measurements_of_the_same_count_by_their_mean(table):
    rows = [row("none", 100.0), row("kept", 90.0), row("kept + entropy", 100.0), row("kept", 114.0)]
    rows.append(row("cut-cross-entropy", 150.0))
    for order in (rows, rows[::-1]):
        found = {what: reached for what, _, reached in table.bounds(order, "cuDNN")}
        assert found["kept head against no head, 16 x 1024"] == "+2.0%"
        assert found["MFU, kept head, 16 x 1024"] == f"{60 / 102:.1%}"
        assert found["kept head + entropy against cut-cross-entropy"] == "1.50"
