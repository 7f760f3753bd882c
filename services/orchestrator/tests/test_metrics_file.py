"""metrics.jsonl after crashes."""

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keptset_orchestrator.durable import write_durably
from keptset_orchestrator.errors import DiskError
from keptset_orchestrator.metrics_file import MetricsFile


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


def test_full_disk_is_named_and_the_rows_are_there(tmp_path: Path):
    """The kernel refuses in the middle of a row: no file may grow beyond 100 bytes."""
    rows = MetricsFile(tmp_path / "metrics.jsonl", 1)
    rows.append({"step": 1})
    with (
        no_file_larger_than(100),
        pytest.raises(DiskError, match=r"metrics\.jsonl: the disk is full; free some"),
    ):
        rows.append({"step": 2, "text": "x" * 200})
    again = MetricsFile(tmp_path / "metrics.jsonl", 3)
    assert again.steps == {1}
    again.append({"step": 2})
    assert steps_in(tmp_path / "metrics.jsonl") == [1, 2]


def test_full_disk_leaves_the_old_content_and_nothing_beside_it(tmp_path: Path):
    path = tmp_path / "file"
    write_durably(path, b"old")
    with no_file_larger_than(100), pytest.raises(DiskError, match="file: the disk is full"):
        write_durably(path, bytes(1000))
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@contextmanager
def no_file_larger_than(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
