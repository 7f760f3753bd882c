"""A model's name: a directory, or the hub's."""

import pytest

from keptset_settings import is_absent_directory


@pytest.mark.parametrize("name", ["gpt2", "owner/name", "Qwen/Qwen3-0.6B", "s3://bucket/models/one"])
def test_what_may_be_elsewhere_is_not_looked_for_here(name):
    assert not is_absent_directory(name)


@pytest.mark.parametrize("name", ["/nowhere/model", "./model", "../model", "~/model", "runs/models/one"])
def test_a_path_is_looked_for(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert is_absent_directory(name)


def test_a_directory_that_is_there_is_not_absent(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/models/one").mkdir(parents=True)
    for name in ("runs/models/one", "./runs/models/one", str(tmp_path / "runs")):
        assert not is_absent_directory(name)
