"""`make soak`: runs with 30 kills each, one after the other, for SOAK_SECONDS; and a table at the end."""

import os
import time
from statistics import median

import pytest

from ..started import Started
from .accounts import settle
from .killed_run import KilledRun, seed_of_draw
from .schedule import VICTIMS, draw

pytestmark = pytest.mark.soak

SECONDS = int(os.environ.get("SOAK_SECONDS", "3600"))
KILLS = 30


@pytest.mark.timeout(SECONDS + 3600)
def test_runs_survive_for_an_hour(tmp_path, demo_model, sections):
    seed, began, done = seed_of_draw(), time.monotonic(), list[KilledRun]()
    lost = repeated = 0
    faults: list[str] = []
    while not done or time.monotonic() - began < SECONDS:
        number = len(done)
        folder = tmp_path / f"run-{number}"
        folder.mkdir()
        processes = Started(folder, demo_model)
        run = KilledRun(
            processes,
            steps=20,
            prompts=2,
            group_size=2,
            level=(seed + number) % 3,
            checkpoint_interval=1 + (seed + number) % 4,
        )
        victims = [VICTIMS[index % len(VICTIMS)] for index in range(KILLS)]
        try:
            run.go(draw(seed + number, victims, run.steps, 1.0))
            processes.assert_nothing_is_left()
        except AssertionError as error:
            faults.append(f"KILL_SEED={seed + number} SOAK_SECONDS=1: {error}")
        finally:
            processes.end()
        done.append(run)
        if faults:
            break
        accounts = settle(run)
        lost, repeated = lost + accounts.lost_groups, repeated + accounts.repeated_batches
        faults += [f"KILL_SEED={seed + number} SOAK_SECONDS=1: {fault}" for fault in accounts.faults]
        print(
            f"run {number + 1}, level {run.level}, seed {seed + number}: {len(run.killed)} kills", flush=True
        )
    sections[f"soak of {time.monotonic() - began:.0f} s, KILL_SEED={seed}"] = table(done, lost, repeated)
    assert (lost, repeated, faults) == (0, 0, [])


def table(runs: list[KilledRun], lost: int, repeated: int) -> list[str]:
    """Kills, recoveries, steps, what was lost and repeated, seconds to recover."""
    recovered = [one for run in runs for one in run.recovered]
    lines = [
        f"runs {len(runs)}, steps {sum(run.rows() for run in runs)}, "
        f"kills {sum(len(run.killed) for run in runs)}, recoveries {len(recovered)}",
        f"groups lost {lost}, batches repeated {repeated}",
    ]
    for victim in (*VICTIMS, "all of them"):
        seconds = [s for name, s in recovered if victim in (name, "all of them")]
        if seconds:
            lines.append(
                f"seconds to recover from a kill of {victim}: median {median(seconds):.1f}, "
                f"worst {max(seconds):.1f} ({len(seconds)})"
            )
    return lines
