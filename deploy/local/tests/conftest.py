"""The command `keptset` in an empty folder, over stand-ins for the services."""

import os
from pathlib import Path

import pytest

from keptset.__main__ import main

HERE = Path(__file__).parent


@pytest.fixture
def work(tmp_path, monkeypatch):
    """An empty folder to be in, with stand-ins in place of the services."""
    for name in ("inference", "trainer", "orchestrator"):
        package = tmp_path / "fakes" / f"keptset_{name}"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "__main__.py").write_text(
            f"import runpy, sys\nsys.argv[1:1] = [{name!r}]\n"
            f"runpy.run_path({str(HERE / 'fake_service.py')!r}, run_name='__main__')\n"
        )
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    others = [path] if (path := os.environ.get("PYTHONPATH")) else []
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "fakes"), *others]))
    monkeypatch.setenv("COLUMNS", "200")
    return folder


@pytest.fixture
def keptset(work, capfd):
    """Runs the command in this process, which saves its imports; returns code, output, errors."""

    def call(*arguments, **variables):
        with pytest.MonkeyPatch.context() as patch:
            for name, text in variables.items():
                patch.setenv(name, text)
            try:
                code = main([str(a) for a in arguments])
            except SystemExit as error:
                code = error.code
        return code, *capfd.readouterr()

    return call
