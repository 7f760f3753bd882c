"""metrics.jsonl after crashes."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keptset_orchestrator.metrics_file import MetricsFile
from keptset_orchestrator.rollout_records import RolloutRecord, RolloutRecords


def steps_in(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_rows_come_back(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    MetricsFile(path, 1).append({"step": 1, "reward/mean": 0.1})
    again = MetricsFile(path, 2)
    assert again.steps == {1}
    again.append({"step": 2, "reward/mean": 0.2})
    assert steps_in(path) == [1, 2]


def test_file_cut_anywhere_is_repaired(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    whole = b"".join(json.dumps({"step": n, "reward/mean": n / 7}).encode() + b"\n" for n in (1, 2, 3))

    @settings(max_examples=40)
    @given(st.integers(0, len(whole)))
    def law(length: int):
        path.write_bytes(whole[:length])
        rows = MetricsFile(path, 4)
        assert rows.steps == set(range(1, whole[:length].count(b"\n") + 1))
        for step in range(len(rows.steps) + 1, 4):
            rows.append({"step": step, "reward/mean": step / 7})
        assert path.read_bytes() == whole

    law()


def test_doubled_rows_leave_the_last(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "a": 1}\n{"step": 1, "a": 2}\n')
    MetricsFile(path, 2)
    assert path.read_text() == '{"step": 1, "a": 2}\n'


def test_row_of_a_later_step_is_not_followed_by_an_earlier_one(tmp_path: Path):
    rows = MetricsFile(tmp_path / "metrics.jsonl", 1)
    rows.append({"step": 2})
    for step in (1, 2):
        with pytest.raises(ValueError, match=f"step {step} comes after the row of step 2"):
            rows.append({"step": step})


def test_line_that_is_no_row_is_named(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"reward": 1}\n{"step": 3}\n')
    with pytest.raises(ValueError, match="line 2 is no row"):
        MetricsFile(path, 4)


def test_records_are_found_by_step_and_hash(tmp_path: Path):
    records = RolloutRecords(tmp_path / "rollouts")
    first, second = RolloutRecord(1, "aa", {"x": 1.0}), RolloutRecord(1, "bb", {"x": 2.0})
    records.write(first)
    records.write(second)
    assert records.find(1) == second
    assert records.find(1, "aa") == first
    assert records.find(1, "cc") is None
    assert records.find(2) is None
    records.keep_only(1, "aa")
    assert records.find(1) == first
    records.forget_through(1)
    assert records.find(1) is None


def test_record_that_cannot_be_read_is_named(tmp_path: Path):
    records = RolloutRecords(tmp_path)
    records.write(RolloutRecord(1, "aa", {}))
    (tmp_path / "step-000001-aa.json").write_text("{")
    with pytest.raises(ValueError, match=r"step-000001-aa.json: no record"):
        records.find(1)
