"""A real inference server and a real trainer on the demo's model, for requests that nobody would send."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from keptset import groups
from keptset.ports import pick

START_SECONDS = 400
ENGINE = {
    "dtype": "float32",
    "enforce_eager": "true",
    "max_model_len": "128",
    "max_num_seqs": "64",
    "max_num_batched_tokens": "2048",
    "num_gpu_blocks_override": "256",
}
"""The cache of keys and values small: its pages count only once they are written to."""
BOUNDED = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "0"}
"""Of the CPU kernels of torch up to 1,024 are kept, one a shape: 0.3 GB that would look like a leak for ten
thousand requests.
"""


class Running:
    """One service of its own process group."""

    weights: Path
    """Where the trainer publishes."""

    def __init__(self, folder: Path, module: str, *arguments: object) -> None:
        self.url = f"http://127.0.0.1:{pick('127.0.0.1', set())}"
        self.log = folder / f"{module}.log"
        port = self.url.rpartition(":")[2]
        command = [sys.executable, "-m", module, "--port", port, *map(str, arguments)]
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                # ends with us, also where we are killed
                ["setpriv", "--pdeathsig", "TERM", *command],
                env=os.environ | BOUNDED | {"OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_healthy(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while True:
            assert self.process.poll() is None, self.end_of_log()
            assert time.monotonic() < deadline, f"waited {START_SECONDS} s\n{self.end_of_log()}"
            try:
                if httpx.get(f"{self.url}/health", timeout=5, trust_env=False).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.5)

    def end_of_log(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]

    def megabytes(self) -> float:
        """Memory that the process and all below it wrote to; pages that several share count once.

        Not the libraries' own pages: their part in them depends on who else on the machine uses them.
        """
        parents: dict[int, list[int]] = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                try:
                    parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                except OSError:  # gone meanwhile
                    continue
                parents.setdefault(parent, []).append(int(entry.name))
        total, left = 0, [self.process.pid]
        while left:
            pid = left.pop()
            left += parents.get(pid, [])
            try:
                lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            except OSError:
                continue
            written = (line.split()[1] for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))
            total += sum(map(int, written))
        return total / 1024

    def end(self) -> None:
        groups.end(self.process.pid, 40, lambda: False)
        self.process.wait(100)


@pytest.fixture(scope="session")
def trainer(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A trainer that has published version 0 and no more."""
    folder = tmp_path_factory.mktemp("trainer")
    places = ("--output_dir", folder / "out", "--weights_dir", folder / "weights")
    service = Running(folder, "keptset_trainer", "--model", demo_model, "--row_tokens", 256, *places)
    service.weights = folder / "weights"
    try:
        service.wait_healthy()
        yield service
    finally:
        service.end()


@pytest.fixture(scope="session")
def inference(
    demo_model: Path, trainer: Running, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    """A server that captures, with the trainer's weights."""
    options = [part for name, value in ENGINE.items() for part in (f"--vllm.{name}", value)]
    options += ["--enable_return_sampling_mask", "true", "--max_body_bytes", "65536"]
    options += ["--weights_dir", str(trainer.weights)]
    folder = tmp_path_factory.mktemp("inference")
    service = Running(folder, "keptset_inference", "--model", demo_model, *options)
    try:
        service.wait_healthy()
        yield service
    finally:
        service.end()
