"""`keptset replay` over a stand-in for the trainer: the run it means, what it hands on, how it ends."""

import json

import pytest

from keptset.__main__ import main

STAND_IN = """
import json, os, sys
print(json.dumps({"arguments": sys.argv[1:], "ours": [n for n in os.environ if n.startswith("KEPTSET_")]}))
sys.exit(int(os.environ["STAND_IN_CODE"]))
"""


@pytest.fixture
def replayed(tmp_path, monkeypatch, capfd):
    """(arguments, code of the trainer's command) -> exit code, what that command was given, errors."""
    package = tmp_path / "fakes" / "keptset_trainer"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fakes"))
    monkeypatch.setenv("KEPTSET_TRAINER__ROW_TOKENS", "7")  # the run's resolved settings count, not today's
    monkeypatch.chdir(tmp_path)

    def do(*arguments: str, code: int = 0):
        monkeypatch.setenv("STAND_IN_CODE", str(code))
        ended = main(["replay", *arguments])
        out, err = capfd.readouterr()
        return ended, json.loads(out) if out else None, err

    return do


@pytest.fixture
def run(tmp_path):
    """A run's directory with what replay looks for."""
    path = tmp_path / "runs" / "short"
    (path / "configs").mkdir(parents=True)
    (path / "configs" / "trainer.toml").touch()
    (path / "trainer").mkdir()
    return path


def test_a_run_by_its_directory_or_by_its_name(replayed, run):
    for named in ("runs/short", "short", str(run)):
        code, given, _ = replayed(named, "--step", "3")
        assert code == 0
        path = str(run) if named == str(run) else "runs/short"
        assert given["arguments"] == [
            *("replay", "--config", f"{path}/configs/trainer.toml"),
            *("--output-dir", f"{path}/trainer"),
            *("--step", "3"),
        ]
        assert given["ours"] == []


@pytest.mark.parametrize("code", [0, 1, 2])
def test_the_exit_code_is_that_of_the_trainers_command(replayed, run, code):
    assert replayed("short", code=code)[0] == code


def test_directories_that_lie_elsewhere_are_those_of_the_settings(replayed, run):
    assert "--output-dir" in replayed("short")[1]["arguments"]
    (run / "trainer").rmdir()
    assert replayed("short")[1]["arguments"] == ["replay", "--config", "runs/short/configs/trainer.toml"]


def test_what_is_no_run_is_said(replayed, tmp_path):
    for arguments, text in ((("nothing",), "nothing: no run; neither nothing/configs"), ((), "name a run")):
        code, given, err = replayed(*arguments)
        assert (code, given) == (1, None)
        assert text in err
