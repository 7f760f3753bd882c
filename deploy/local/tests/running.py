"""The command in a process of its own, and what is left of it."""

import os
import subprocess
import sys
from pathlib import Path

DEMO = Path(__file__).parents[1] / "reverse-text.toml"


def start(*arguments) -> "subprocess.Popen[str]":
    """Runs the command in a process of its own until its first step is done, which takes a minute."""
    process = subprocess.Popen(
        [sys.executable, "-m", "keptset", *map(str, arguments)],
        env=os.environ | {"FAKE_ORCHESTRATOR": "slow"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert any("step 1/30" in line for line in process.stdout)
    return process


def left_running(work: Path) -> list[str]:
    """Command lines of processes that were started for runs below `work`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                if (entry / "cwd").resolve() == work:
                    found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:
                continue
    return found
