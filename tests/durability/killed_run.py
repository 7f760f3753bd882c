"""A run of the demo whose processes are killed by a schedule, and that is resumed when nobody is left.

KILL_OPTIONS has further options of `keptset run`: for a GPU, `--trainer.device cuda --weights.transfer nccl`.
"""

import json
import os
import shlex
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

from keptset import groups

from ..started import CACHE_BLOCKS, DEMO, UNTIL_ENDED, UNTIL_HEALTHY, Started
from .schedule import Kill

NAME = "killed"
STEP_SECONDS = 2 * UNTIL_HEALTHY
"""For a step with all that was killed before it: an engine starts in 15 s on an idle machine."""

COMMANDS = {
    "orchestrator": "-m keptset_orchestrator ",
    "trainer": "-m keptset_trainer ",
    "inference": "-m keptset_inference ",
    "loop": "-m keptset_trainer.loop ",
}


@dataclass
class KilledRun:
    """One run, from its start to its end."""

    started: Started
    steps: int
    prompts: int
    group_size: int
    level: int
    colocated: bool = False
    checkpoint_interval: int = 1
    killed: list[Kill] = field(default_factory=list)
    recovered: list[tuple[str, float]] = field(default_factory=list)
    """Victims, and seconds from the kill to the next row."""

    @property
    def folder(self) -> Path:
        return self.started.folder / "runs" / NAME

    def rows(self) -> int:
        """Complete rows so far; they may be rewritten, never fewer."""
        path = self.folder / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def go(self, schedule: list[Kill]) -> None:
        """Start, kill, and wait for the end.

        Raises:
            AssertionError: it did not end well, with what it said.
        """
        keptset = self._start(
            "run", DEMO, "--name", NAME, "--orchestrator.steps", self.steps,
            "--orchestrator.train.prompts_per_step", self.prompts,
            "--orchestrator.train.group_size", self.group_size,
            "--orchestrator.max_async_level", self.level, "--colocated", str(self.colocated).lower(),
            "--trainer.row_tokens", 256, "--trainer.checkpoint_interval", self.checkpoint_interval,
            "--inference.vllm.max_num_seqs", 8, "--inference.vllm.num_gpu_blocks_override", CACHE_BLOCKS,
            "--restarts", 20, "--warm_start.directory", self.started.model,
            "--orchestrator.startup_timeout", UNTIL_HEALTHY,
            *shlex.split(os.environ.get("KILL_OPTIONS", "")),
        )  # fmt: skip
        open_kills: list[tuple[str, float, int]] = []
        for kill in schedule:
            keptset = self._until(keptset, kill.after_step, open_kills)
            time.sleep(kill.seconds)
            if self.rows() >= self.steps:  # a step is quicker than was thought
                break
            self._kill(kill.victim, keptset)
            open_kills.append((kill.victim, time.monotonic(), self.rows()))
            self.killed.append(kill)
            if kill.victim == "keptset":
                keptset.wait(timeout=UNTIL_ENDED)
                keptset = self._start("resume", self.folder)
        keptset = self._until(keptset, self.steps, open_kills)
        assert keptset.wait(timeout=UNTIL_ENDED) == 0, self._said()

    def _start(self, *arguments: object) -> "subprocess.Popen[str]":
        return self.started.start("keptset", *arguments)

    def _until(
        self, keptset: "subprocess.Popen[str]", step: int, open_kills: list[tuple[str, float, int]]
    ) -> "subprocess.Popen[str]":
        """Wait for a step's row (0: for all services); whatever was killed before a new row has recovered."""
        latest, before = time.monotonic(), self.rows()
        while True:
            ended = keptset.poll()
            rows = self.rows()
            for entry in [one for one in open_kills if one[2] < rows]:
                open_kills.remove(entry)
                self.recovered.append((entry[0], time.monotonic() - entry[1]))
            if rows >= step and (step > 0 or self._all_started()):
                return keptset
            assert ended is None, f"ended with {ended} after {rows} steps\n{self._said()}"
            if rows > before:
                latest, before = time.monotonic(), rows
            assert time.monotonic() - latest < STEP_SECONDS, (
                f"waited {STEP_SECONDS} s for step {rows + 1}\n{self._said()}"
            )
            time.sleep(0.02)

    def _all_started(self) -> bool:
        said = self.started.output("keptset")
        return all(f"{name:<13} healthy after" in said for name in ("inference", "trainer"))

    def _kill(self, victim: str, keptset: "subprocess.Popen[str]") -> None:
        """SIGKILL; a victim that is not there, because it was killed a moment ago, is killed once it is."""
        if victim == "keptset":
            keptset.kill()
            return
        deadline = time.monotonic() + STEP_SECONDS
        while not (pids := self._pids(victim)):
            assert keptset.poll() is None, self._said()
            assert time.monotonic() < deadline, f"waited {STEP_SECONDS} s for {victim}\n{self._said()}"
            time.sleep(0.02)
        for pid in pids:
            groups.send(pid, signal.SIGKILL)

    def _pids(self, victim: str) -> list[int]:
        if victim == "services":
            return [pid for one in ("orchestrator", "trainer", "inference") for pid in self._pids(one)]
        if victim == "engine":
            servers = self._pids("inference")
            return [pid for server in servers for pid in groups.members(server) if _is_engine(pid)]
        return list(self.started.living(COMMANDS[victim]))

    def _said(self) -> str:
        texts = [self.started.output("keptset"), self.started.output("keptset", "err")]
        for name in ("orchestrator", "trainer", "inference"):
            log = self.folder / "logs" / f"{name}.log"
            if log.exists():
                lines = log.read_text(errors="replace").splitlines()[-25:]
                texts.append("\n".join([f"--- {name}", *lines]))
        return "\n".join([*texts, f"killed: {', '.join(map(str, self.killed))}"])


def _is_engine(pid: int) -> bool:
    try:
        return b"EngineCore" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def results(folder: Path) -> dict[int, str]:
    """Content hash of the batch of each step that the trainer of a run has trained."""
    paths = (folder / "trainer" / "results").glob("step-*.json")
    read = [json.loads(path.read_bytes()) for path in paths]
    return {one["step"]: one["content_hash"] for one in read}


def seed_of_draw() -> int:
    """A seed for a draw: KILL_SEED, or a new one."""
    return int(os.environ.get("KILL_SEED") or int.from_bytes(os.urandom(4), "little"))
