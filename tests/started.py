"""Real services on the demo's model, in processes that carry a mark, so that what is left over is found."""

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "deploy" / "local" / "reverse-text.toml"
MARK = "E2E_MARK"

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""For services that are started one by one, without `keptset run`, which shares the cores out: the threads of
several would wait for each other longer than they compute."""
CACHE_BLOCKS = 64
"""Of keys and values in an engine, of 128 tokens each; all that a server takes by itself is a gigabyte."""
SMALL_ENGINE = {
    "dtype": "float32",
    "enforce_eager": "true",
    "max_model_len": 128,
    "max_num_seqs": 4,
    "num_gpu_blocks_override": CACHE_BLOCKS,
}
"""Options `--vllm.*` of an inference server that is started alone."""
UNTIL_HEALTHY = 400
"""Seconds that a loaded machine may take to start an engine."""
UNTIL_ENDED = 240
"""Seconds that it may take to end all services, or to answer a question."""


@dataclass
class Started:
    """Processes of one test."""

    folder: Path
    """Where runs go, and where the processes live."""
    model: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    children: list["subprocess.Popen[str]"] = field(default_factory=list)

    def start(
        self,
        module: str,
        *arguments: object,
        name: str | None = None,
        environment: dict[str, str] | None = None,
    ) -> "subprocess.Popen[str]":
        """`python -m module ...`; its output in <folder>/<name>.out and .err (unset: the module).

        `environment` is what it has beside this process's.
        """
        name = name or module
        with (
            (self.folder / f"{name}.out").open("w") as out,
            (self.folder / f"{name}.err").open("w") as err,
        ):
            child = subprocess.Popen(
                # ends with us, also where a process of `pytest -n` is killed and no fixture is torn down
                ["setpriv", "--pdeathsig", "TERM", sys.executable, "-m", module, *map(str, arguments)],
                cwd=self.folder,
                env=os.environ | (environment or {}) | {MARK: self.mark},
                stdout=out,
                stderr=err,
                text=True,
            )
        self.children.append(child)
        return child

    def run(self, *arguments: object) -> "subprocess.Popen[str]":
        """`keptset run` of the demo, named "short": few rollouts, a small cache, the model that is there."""
        patient = ("--orchestrator.startup_timeout", UNTIL_HEALTHY)
        few = ("--orchestrator.train.prompts_per_step", 4, "--orchestrator.train.group_size", 4)
        few += ("--inference.vllm.num_gpu_blocks_override", CACHE_BLOCKS)
        model = ("--warm_start.directory", self.model)
        return self.start("keptset", "run", DEMO, *patient, *arguments, "--name", "short", *model, *few)

    def output(self, name: str, stream: str = "out") -> str:
        """What a process has printed so far."""
        return (self.folder / f"{name}.{stream}").read_text()

    def living(self, what: str = "") -> dict[int, str]:
        """Processes that descend from ours and whose command line contains `what`."""
        found, mark = {}, f"{MARK}={self.mark}".encode()
        for entry in Path("/proc").iterdir():
            if not entry.name.isdecimal():
                continue
            try:
                marked = mark in (entry / "environ").read_bytes().split(b"\0")
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:  # gone meanwhile
                continue
            if marked and what in command:
                found[int(entry.name)] = command
        return found

    def wait_until(self, condition: Callable[[], object], seconds: float, what: str) -> None:
        """Waits, but never for long."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"waited {seconds} s for {what}; running: {self.living()}"
            time.sleep(0.1)

    def assert_nothing_is_left(self) -> None:
        """Helpers that clean up after the services end a moment after them."""
        self.wait_until(lambda: not self.living(), UNTIL_ENDED, "everything to end")

    def end(self) -> None:
        """Kill whatever a failed test leaves."""
        for pid in self.living():
            with suppress(ProcessLookupError):
                os.kill(pid, 9)
        for child in self.children:
            child.wait(timeout=UNTIL_ENDED)
