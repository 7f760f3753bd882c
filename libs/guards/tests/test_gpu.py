"""Turns on a GPU: engines together or the trainer alone, and nobody who has died."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from keptset_guards import GpuTurn

TAKE = (
    "import sys, time; from pathlib import Path; from keptset_guards import GpuTurn\n"
    "turn = GpuTurn(Path(sys.argv[1]), 'another', shared=False); assert turn.try_to_take()\n"
    "print('has it', flush=True); time.sleep(60)"
)
"""Takes the lock that is its argument."""


def test_engines_have_it_together_and_the_trainer_alone(tmp_path: Path):
    engines = [GpuTurn(tmp_path / "gpu.lock", f"engine {n}", shared=True) for n in range(2)]
    trainer = GpuTurn(tmp_path / "gpu.lock", "the trainer", shared=False)
    assert all(engine.try_to_take() for engine in engines)
    assert not trainer.try_to_take()
    assert trainer.holder().startswith("engine 1, process ")
    engines[0].give_back()
    assert not trainer.try_to_take()
    engines[1].give_back()
    assert trainer.try_to_take()
    assert trainer.try_to_take(), "who has it keeps it"
    assert not engines[0].try_to_take()
    assert engines[0].holder().startswith("the trainer, process ")
    trainer.give_back()
    assert engines[0].try_to_take()
    assert not trainer.held


def test_it_goes_with_a_process_that_is_killed(tmp_path: Path):
    path = tmp_path / "deep" / "gpu.lock"
    with subprocess.Popen([sys.executable, "-c", TAKE, str(path)], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"has it\n"
        turn = GpuTurn(path, "this", shared=True)
        assert not turn.try_to_take()
        assert turn.holder() == f"another, process {other.pid}"
        other.kill()
        deadline = time.monotonic() + 60
        while not turn.try_to_take():
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert turn.holder().startswith("this, process ")


def test_a_container_that_has_it_is_waited_for_by_name_and_not_taken_for_one_of_ours(tmp_path: Path):
    """Of namespaces a container has those that could matter: its processes are numbered from 1."""
    path = tmp_path / "gpu.lock"
    apart = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--uts", "sh", "-c"]
    if subprocess.run([*apart, "hostname box"], capture_output=True, check=False).returncode:
        pytest.skip("this machine makes no namespaces")
    command = [*apart, 'hostname box; exec "$0" -c "$1" "$2"', sys.executable, TAKE, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"has it\n"
        turn = GpuTurn(path, "this", shared=True)
        assert not turn.try_to_take()
        assert turn.holder() == "another, process 1 on box"
        other.kill()
        deadline = time.monotonic() + 60
        while not turn.try_to_take():
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_place_where_no_file_can_be_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"gpu_lock = .*file/gpu\.lock: cannot be opened"):
        GpuTurn(tmp_path / "file" / "gpu.lock", "x", shared=True)
