"""Where it would be biased or open, the server does not start: a line says why, no process stays. As little
stays of one that is stopped while it starts.

One of each kind; what else is refused, and with which words, is in the unit tests.
"""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from .server import ENGINE, START_TIMEOUT, Process, command, free_port, write_config

pytestmark = pytest.mark.engine

REFUSED = {
    "raw logprobs": ({"logprobs_mode": "raw_logprobs"}, {}, ["logprobs_mode", "processed_logprobs"]),
    "speculative decoding": (
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}},
        {},
        ["speculative_config"],
    ),
    "developer mode": ({}, {"VLLM_SERVER_DEV_MODE": "1"}, ["VLLM_SERVER_DEV_MODE", "unset"]),
}  # fmt: skip


@pytest.fixture(scope="module")
def attempts(tmp_path_factory, tiny_versions):
    """Name -> (exit code, log, processes left), of one attempt each; two at a time."""

    def attempt(name: str):
        engine, environment, _ = REFUSED[name]
        directory = tmp_path_factory.mktemp("refused")
        config = write_config(
            directory,
            model=str(tiny_versions.base),
            port=free_port(),
            enable_return_sampling_mask=True,
            vllm=ENGINE | engine,
        )
        process = Process(command(config), directory / "server.log", environment=environment)
        try:
            process.popen.wait(START_TIMEOUT)
            left = process.wait_until_gone()
        finally:
            process.stop()
        return process.popen.returncode, process.log.read_text(), left

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(REFUSED, pool.map(attempt, REFUSED), strict=True))


@pytest.mark.parametrize("name", REFUSED)
def test_it_refuses_to_start(attempts, name):
    # vllm#26060: speculative decoding: wrong support
    code, log, left = attempts[name]
    assert code not in (0, None), log
    assert code > 0, f"ended by signal {-code}"
    assert left == []
    last = [line for line in log.splitlines() if line.strip()][-1]
    for word in REFUSED[name][2]:
        assert word in last, log
    assert "trigger received signal=SIGINT" not in log, "only the server heeds it"
    assert "Traceback" not in log, log


@pytest.mark.parametrize("capture", [True, False])
def test_ctrl_c_while_it_starts_ends_it(tmp_path, tiny_versions, capture):
    """The signal reaches the engine and its worker as well, which is there and loads the model."""
    config = write_config(
        tmp_path,
        model=str(tiny_versions.base),
        port=free_port(),
        enable_return_sampling_mask=capture,
        vllm=ENGINE,
    )
    process = Process(command(config), tmp_path / "server.log")
    try:
        end = time.monotonic() + START_TIMEOUT
        while "(Worker pid=" not in process.log.read_text():
            assert process.popen.poll() is None, process.last_lines()
            assert time.monotonic() < end, f"no worker yet:\n{process.last_lines()}"
            time.sleep(0.05)
        os.killpg(process.popen.pid, signal.SIGINT)
        assert process.wait_until_gone() == []
    finally:
        process.stop()
    log = process.log.read_text()
    assert process.popen.returncode == 128 + signal.SIGINT, log
    assert "keptset-inference: stopped while starting" in log
    assert "trigger received signal=SIGINT" not in log, "only the server heeds it"
    assert "Traceback" not in log, log
