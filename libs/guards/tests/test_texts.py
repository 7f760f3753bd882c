"""Answers do not tell where things are on this machine."""

import pytest

from keptset_guards import without_paths


@pytest.mark.parametrize(
    ("text", "answered"),
    [
        ("{d}/weights/v000003/manifest.json is missing", "manifest.json is missing"),
        ("no directory {d}/v000003: publish it", "no directory v000003: publish it"),
        ("[Errno 2] No such file: '{d}/a b'", "[Errno 2] No such file: 'a b'"),
        ("ask http://127.0.0.1:8000/tmp/x/y again", "ask http://127.0.0.1:8000/tmp/x/y again"),
        ("GET /keptset/v1/steps/3?wait=30", "GET /keptset/v1/steps/3?wait=30"),
        ("send int32 and/or float32, 1/2", "send int32 and/or float32, 1/2"),
        ("two: {d}/a/one, {d}/b/two/", "two: one, two"),
    ],
)
def test_only_the_last_part_of_a_path_is_answered(text, answered, tmp_path):
    assert without_paths(text.format(d=tmp_path)) == answered


def test_of_a_relative_path_only_the_last_part_is_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    text = (
        "no directory runs/x/weights/v000003, ../runs/y or ./runs/z: send application/json, and/or ask runs"
    )
    told = "no directory v000003, y or z: send application/json, and/or ask runs"
    assert without_paths(text) == told
