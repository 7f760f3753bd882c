"""The vllm-router that deploy/pins names, started without servers: a run names its own."""

import subprocess
import sys
import time
from pathlib import Path

import httpx

from keptset import ports

OPTIONS = ("--policy", "sticky_least_loaded", "--disable-retries", "--disable-circuit-breaker")
"""As docs/durability.md has them: attempts are counted here, and who is able is known here."""
SECONDS = 60
"""For one answer of a router on a busy machine."""


class RealRouter:
    """A process on a port of its own; may be killed and started again there."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.port = ports.pick("127.0.0.1", set())
        self._metrics = ports.pick("127.0.0.1", {self.port})
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self, *more: str) -> None:
        """Return once it lives."""
        command = [str(Path(sys.executable).with_name("vllm-router")), "--port", str(self.port), *OPTIONS]
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                # ends with us, also where a process of `pytest -n` is killed and no fixture is torn down
                ["setpriv", "--pdeathsig", "TERM", *command, "--prometheus-port", str(self._metrics), *more],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        deadline = time.monotonic() + 60
        while not self._lives():
            assert self._process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)

    def kill(self) -> None:
        """SIGKILL, if it runs."""
        self._process.kill()
        self._process.wait(10)

    def servers(self) -> set[str]:
        """That it sends requests to."""
        return set(httpx.get(f"{self.url}/list_workers", trust_env=False, timeout=SECONDS).json()["urls"])

    def forget_servers(self) -> None:
        """As after its start."""
        for url in self.servers():
            httpx.post(f"{self.url}/remove_worker", params={"url": url}, trust_env=False, timeout=SECONDS)

    def _lives(self) -> bool:
        try:
            return httpx.get(f"{self.url}/liveness", trust_env=False).status_code == 200
        except httpx.TransportError:
            return False
