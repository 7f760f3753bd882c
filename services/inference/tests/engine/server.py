"""A server as a user starts it: a configuration file, a command, real HTTP; nothing left behind."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

import httpx
import pytest
import tomli_w

from keptset import ports

START_TIMEOUT = 400.0
"""Seconds until /health must answer 200; a loaded machine has taken 180."""
ANSWER_TIMEOUT = 400.0
"""Seconds for one answer, with all that others ask of the engine at the same time."""
END_TIMEOUT = 100.0
"""Seconds for processes to go, once the server has ended or was told to."""

_MARK = "TEST_SERVER_MARK"  # not KEPTSET_...: those are settings


def command(config: Path) -> list[str]:
    """The service, started with a configuration file."""
    return [sys.executable, "-m", "keptset_inference", "--config", str(config)]


class Process:
    """A started server and everything that it started, found by their session and their environment."""

    def __init__(
        self, argv: list[str], log: Path, threads: int = 1, environment: dict[str, str] | None = None
    ):
        self.log, self._mark = log, uuid.uuid4().hex
        env = os.environ | {
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(threads),
        }
        with log.open("ab") as output:
            self.popen = subprocess.Popen(
                # ends with us, also where a process of `pytest -n` is killed and no fixture is torn down
                ["setpriv", "--pdeathsig", "TERM", *argv],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=env | (environment or {}) | {_MARK: self._mark},
                start_new_session=True,
            )

    def alive(self) -> list[int]:
        """Process ids of the server and its descendants that still run."""
        mark, found = f"{_MARK}={self._mark}".encode(), []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                state, _, _, session = entry.joinpath("stat").read_text().rpartition(")")[2].split()[:4]
                # a process that gives itself a title overwrites its environment, but stays in the session
                ours = int(session) == self.popen.pid or mark in entry.joinpath("environ").read_bytes()
            except OSError:
                continue  # gone, or somebody else's
            if ours and state not in "ZX":
                found.append(int(entry.name))
        return found

    def titles(self) -> str:
        """What the processes call themselves."""
        found = []
        for pid in self.alive():
            with suppress(OSError):  # gone meanwhile
                found.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode())
        return "\n".join(found)

    def wait_until_gone(self, seconds: float = END_TIMEOUT) -> list[int]:
        """Process ids that are still there after so many seconds; returns as soon as there are none."""
        end = time.monotonic() + seconds
        while True:
            self.popen.poll()  # reaps it
            left = self.alive()
            if not left or time.monotonic() > end:
                return left
            time.sleep(0.1)

    def stop(self) -> None:
        """SIGTERM, and SIGKILL to what is left after a while."""
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGTERM)
        for pid in self.wait_until_gone(20):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.wait_until_gone(5)

    def last_lines(self, lines: int = 40) -> str:
        """The end of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


class Server:
    """A server that answered healthy."""

    def __init__(self, process: Process, url: str, model: str, api_key: str | None, weights: Path | None):
        self.process, self.url, self.model, self.weights = process, url, model, weights
        self.gpu_lock: Path | None = None
        self.headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}

    def client(self, connections: int = 256) -> httpx.AsyncClient:
        """A client for many requests at a time."""
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=0)
        return httpx.AsyncClient(
            base_url=self.url, headers=self.headers, timeout=ANSWER_TIMEOUT, limits=limits
        )

    def call(self, method: str, path: str, **request) -> httpx.Response:
        """One request, waited for."""
        with httpx.Client(base_url=self.url, headers=self.headers, timeout=ANSWER_TIMEOUT) as client:
            return client.request(method, path, **request)

    def generate(self, body: dict, **headers: str) -> httpx.Response:
        """One request to generate."""
        return self.call("POST", "/inference/v1/generate", json=body, headers=headers)

    def update(self, version: int) -> dict:
        """Load a published version; the answer."""
        response = self.call("POST", "/keptset/v1/weights", json={"version": version})
        assert response.status_code == 200, response.text
        return response.json()

    def sleep(self) -> dict:
        """Have it leave the GPU; the answer."""
        response = self.call("POST", "/keptset/v1/sleep")
        assert response.status_code == 200, response.text
        return response.json()

    def wake(self, version: int | None = None) -> dict:
        """Have it come back, perhaps with a published version; the answer."""
        response = self.call("POST", "/keptset/v1/wake", json={"version": version})
        assert response.status_code == 200, response.text
        return response.json()

    def metric(self, name: str) -> float:
        """Sum over the labels of one of vLLM's metrics."""
        lines = self.call("GET", "/metrics").text.splitlines()
        values = [float(line.split()[-1]) for line in lines if line.partition("{")[0] == name]
        assert values, f"no metric {name}"
        return sum(values)


def free_port() -> int:
    """A port that nobody listens on, nor any outgoing connection gets until the server does."""
    return ports.pick("127.0.0.1", set())


def write_config(directory: Path, **inference) -> Path:
    """A file with the table [inference] alone; None is left out."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "inference.toml"
    path.write_text(tomli_w.dumps({"inference": {k: v for k, v in inference.items() if v is not None}}))
    return path


ENGINE = {"dtype": "float32", "enforce_eager": True, "max_model_len": 512, "seed": 0}
"""Engine arguments of every server here."""


@contextmanager
def keptset_server(
    directory: Path,
    model: Path,
    *,
    capture: bool = True,
    api_key: str | None = None,
    weights: Path | None = None,
    kept_tokens_format: str | None = None,
    mask_padded_ids: bool | None = None,
    gpu_lock: Path | None = None,
    threads: int = 1,
    start_timeout: float = START_TIMEOUT,
    **engine,
) -> Iterator[Server]:
    """Our server with these engine arguments on top of ENGINE; its log is directory/server.log."""
    port = free_port()
    config = write_config(
        directory,
        model=str(model),
        port=port,
        api_key=api_key,
        weights_dir=None if weights is None else str(weights),
        enable_return_sampling_mask=capture,
        kept_tokens_format=kept_tokens_format,
        mask_padded_ids=mask_padded_ids,
        gpu_lock=None if gpu_lock is None else str(gpu_lock),
        vllm=ENGINE | engine,
    )
    process = Process(command(config), directory / "server.log", threads)
    with _serving(process, port, str(model), api_key, weights, start_timeout) as server:
        server.gpu_lock = gpu_lock
        yield server


@contextmanager
def stock_server(directory: Path, model: Path, **engine) -> Iterator[Server]:
    """VLLM as it comes, with the settings that ours implies: processed logprobs, no generation config."""
    port = free_port()
    argv = [sys.executable, str(Path(__file__).with_name("stock_vllm.py"))]
    argv += ["--model", str(model), "--host", "127.0.0.1", "--port", str(port), "--enable-scale-out"]
    argv += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
    for name, value in (ENGINE | engine).items():
        argv += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    directory.mkdir(parents=True, exist_ok=True)
    process = Process(argv, directory / "server.log")
    with _serving(process, port, str(model), None, None) as server:
        yield server


@contextmanager
def _serving(process, port, model, api_key, weights, start_timeout=START_TIMEOUT) -> Iterator[Server]:
    try:
        server = Server(process, f"http://127.0.0.1:{port}", model, api_key, weights)
        _wait_for_health(server, start_timeout)
        yield server
    finally:
        process.stop()


def _wait_for_health(server: Server, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        code = server.process.popen.poll()
        if code is not None:
            _fail(server, f"the server ended with {code}")
        try:
            if server.call("GET", "/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    _fail(server, f"the server was not healthy after {seconds:.0f} s")


def _fail(server: Server, why: str) -> NoReturn:
    """The log goes to what the first test captures; the others that share the server repeat one line."""
    print(f"{why}; the end of {server.process.log}:\n{server.process.last_lines()}", file=sys.stderr)
    pytest.fail(f"{why}; its log is {server.process.log}", pytrace=False)
