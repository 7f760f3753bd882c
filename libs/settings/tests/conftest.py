"""What all tests of the settings share: an environment without KEPTSET_ variables, and TOML files."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _no_settings_in_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.upper().startswith("KEPTSET_"):
            monkeypatch.delenv(name)


@pytest.fixture
def toml(tmp_path: Path) -> Callable[..., Path]:
    """Writes a file and returns its path."""

    def write(text: str, name: str = "settings.toml") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Calls something that must print problems and exit with 2; returns what it printed."""

    def call(function: Callable[..., object], *arguments: object) -> str:
        with pytest.raises(SystemExit) as exit_:
            function(*arguments)
        printed = capsys.readouterr()
        assert exit_.value.code == 2
        assert printed.out == ""
        assert "Traceback" not in printed.err
        return printed.err

    return call
