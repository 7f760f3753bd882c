"""The command: exit codes, its one line about an error, signals, its routes."""

import asyncio
import math
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from keptset import ports
from keptset_orchestrator.__main__ import main
from keptset_orchestrator.app import make_app
from keptset_orchestrator.progress import Progress
from keptset_settings import to_toml

from .driving import Drive
from .fake_inference import FakeInference
from .fake_trainer import FakeTrainer


@pytest.fixture
def command(drive: Drive, tmp_path: Path) -> list[str]:
    """Starts the orchestrator of `drive`."""
    drive.settings.port = ports.pick("127.0.0.1", set())
    config = tmp_path / "orchestrator.toml"
    config.write_text(to_toml(drive.settings, "orchestrator"))
    return [sys.executable, "-m", "keptset_orchestrator", "--config", str(config)]


PATIENCE = 200
"""Seconds for a process to start, run and end on a busy machine."""


async def finished(process: asyncio.subprocess.Process) -> tuple[int, list[str]]:
    """Exit code and lines of the log."""
    async with asyncio.timeout(PATIENCE):
        _, errors = await process.communicate()
    return process.returncode, errors.decode().splitlines()


async def start(command: list[str]) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(*command, stderr=subprocess.PIPE)


async def test_run_that_ends_exits_with_0_and_a_line_for_each_step(command: list[str], drive: Drive):
    code, lines = await finished(await start(command))
    assert code == 0
    assert [n for n in (1, 2, 3) if any(f"INFO step {n}/3, reward " in line for line in lines)] == [1, 2, 3]
    assert [row["step"] for row in drive.rows()] == [1, 2, 3]


def test_error_is_one_line_and_exit_code_1(command: list[str], inference: FakeInference, caplog):
    inference.capture["proven"] = False
    assert main(command[3:]) == 1
    last = caplog.records[-1]
    assert last.levelname == "ERROR"
    assert last.getMessage().startswith(f"inference server {inference.url} does not capture kept sets")
    assert "\n" not in last.getMessage()
    assert not last.exc_info


def test_debug_shows_where_an_error_comes_from(command: list[str], inference: FakeInference, caplog):
    inference.capture["proven"] = False
    assert main([*command[3:], "--log-level", "debug"]) == 1
    assert caplog.records[-1].exc_info


def test_port_that_is_taken_is_named(command: list[str], inference: FakeInference, caplog):
    assert main([*command[3:], "--port", str(inference.port)]) == 1
    assert f"port = {inference.port}: Address already in use" in caplog.text


def test_settings_that_are_wrong_exit_with_2(command: list[str], capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit) as ended:
        main([*command[3:], "--steps", "0"])
    assert ended.value.code == 2
    assert "steps" in capsys.readouterr().err


async def test_signals_end_the_run_and_the_next_one_goes_on(
    command: list[str], drive: Drive, trainer: FakeTrainer
):
    for step, number in ((1, signal.SIGTERM), (2, signal.SIGINT)):
        trainer.hold_from = step
        process = await start(command)
        async with asyncio.timeout(PATIENCE):
            while step not in trainer.batches:
                await asyncio.sleep(0.01)
            url = f"http://127.0.0.1:{drive.settings.port}"
            async with httpx.AsyncClient(base_url=url, timeout=PATIENCE) as client:
                assert (await client.get("/health")).status_code == 200
                status = {"state": "rollout"}
                while status["state"] == "rollout":  # the trainer has the batch; that has yet to arrive
                    status = (await client.get("/keptset/v1/status")).json()
        assert (status["step"], status["steps"], status["state"]) == (step, 3, "train")
        process.send_signal(number)
        code, lines = await finished(process)
        assert code == 128 + number
        assert f"stopped by {number.name} in step {step} (train)" in lines[-1]
    trainer.hold_from = math.inf
    rows = await drive()
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert trainer.puts == [1, 2, 3]


async def test_metrics_are_gauges_of_the_last_row():
    progress = Progress(steps=3, step=2, requests=5, failed_requests=1)
    progress.row = {"step": 1, "reward/mean": 0.25, "loss": None}
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(make_app(progress)), base_url="http://x"
    ) as client:
        text = (await client.get("/metrics")).text
        progress.state = "failed"
        assert (await client.get("/health")).status_code == 503
    assert "keptset_reward_mean 0.25" in text
    assert "keptset_orchestrator_step 2.0" in text
    assert "keptset_orchestrator_failed_requests_total 1.0" in text
    assert "keptset_loss" not in text


def test_orchestrator_needs_no_torch_vllm_or_transformers():
    code = (
        "import sys, keptset_orchestrator.__main__\n"
        "found = {m.partition('.')[0] for m in sys.modules} & {'torch', 'vllm', 'transformers'}\n"
        "sys.exit(f'imported: {found}' if found else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE)
