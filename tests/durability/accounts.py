"""What a run that was killed often must have come to: every step once, every group in one batch."""

import json
import sqlite3
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open

from .killed_run import KilledRun, results


@dataclass(frozen=True)
class Accounts:
    """What is missing or there too often; all zero, all empty is right."""

    lost_groups: int
    repeated_batches: int
    faults: list[str]

    def assert_right(self) -> None:
        """Fails with all that is wrong."""
        assert (self.lost_groups, self.repeated_batches, self.faults) == (0, 0, [])


def settle(run: KilledRun) -> Accounts:
    """Compare what rows, rollouts, state, results and weights say of each step."""
    folder, steps = run.folder, range(1, run.steps + 1)
    faults: list[str] = []

    def expect(what: str, found: object, right: object) -> None:
        if found != right:
            faults.append(f"{what}: {found}, not {right}")

    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    expect("rows", [row["step"] for row in rows], list(steps))
    trained = results(folder)
    expect("trained steps", sorted(trained), list(steps))
    repeated = sum(times - 1 for times in Counter(trained.values()).values())
    lost = 0
    for step, row in zip(steps, rows, strict=False):
        files = list((folder / "rollouts").glob(f"step-{step:06d}-*"))
        expect(f"files of step {step}", [f.name for f in files], [f"step-{step:06d}-{trained[step]}.jsonl"])
        repeated += max(0, len(files) - 1)
        lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
        expect(f"rollouts of step {step}", sorted(line["sample_id"] for line in lines), _samples(run, step))
        expect(f"tokens of step {step}", row["rollout/tokens"], float(sum(line["tokens"] for line in lines)))
        expect(f"version of step {step}", row["weight_version"], step)
        behind = [step - 1 - version for line in lines for version in line["weight_versions"]]
        on_policy = row.get("on_policy/ratio_max_abs_log", 0.0)
        expect(f"ratios on-policy of step {step} are 1", on_policy < 1e-4, True)
        expect(f"staleness of step {step} in bounds", 0 <= min(behind) <= max(behind) <= run.level, True)
    state = sqlite3.connect(folder / "state.sqlite")
    for step in steps:
        groups = state.execute("SELECT name, batch FROM groups WHERE step = ?", (step,)).fetchall()
        wanted = {f"reverse-text/{step}/{index}" for index in range(run.prompts)}
        lost += len(wanted - {name for name, _ in groups})
        expect(f"batches of the groups of step {step}", {batch for _, batch in groups}, {trained[step]})
        cursor = state.execute("SELECT start, stop FROM cursors WHERE step = ?", (step,)).fetchall()
        expect(f"examples of step {step}", cursor, [((step - 1) * run.prompts, step * run.prompts)])
    state.close()
    expect("newest weights", max(path.name for path in (folder / "weights").iterdir()), f"v{run.steps:06d}")
    checkpoint = max((folder / "trainer" / "checkpoints").glob("step-*"))
    saved = int(checkpoint.name.removeprefix("step-"))
    expect(f"checkpoint of step {saved} is recent", run.steps - saved < run.checkpoint_interval, True)
    expect("optimiser steps", _optimiser_steps(checkpoint), {float(saved)})
    return Accounts(lost, repeated, faults)


def _samples(run: KilledRun, step: int) -> list[str]:
    pairs = ((prompt, index) for prompt in range(run.prompts) for index in range(run.group_size))
    return sorted(f"reverse-text/{step}/{prompt}/{index}" for prompt, index in pairs)


def _optimiser_steps(checkpoint: Path) -> set[float]:
    """How many steps AdamW has counted for each weight: one trained twice counts twice."""
    found: set[float] = set()
    for path in (checkpoint / "state").rglob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                if name == "steps" or name.endswith("/steps"):
                    found |= set(file.get_tensor(name).tolist())
    return found
