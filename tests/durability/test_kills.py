"""kill -9 of anything, at any moment: the run ends with every step once and every group accounted for.

KILL_SEED=n draws the same kills again.
"""

import shutil
import sqlite3
from contextlib import closing

import pytest

from .accounts import settle
from .killed_run import KilledRun, seed_of_draw
from .schedule import VICTIMS, draw


def test_the_same_seed_draws_the_same_kills():
    victims = [*VICTIMS] * 5
    kills = draw(7, victims, 20, 1.0)
    assert kills == draw(7, victims, 20, 1.0) != draw(8, victims, 20, 1.0)
    assert sorted(kill.victim for kill in kills) == sorted(victims)
    assert kills == sorted(kills, key=lambda kill: (kill.after_step, kill.seconds))
    assert all(kill.after_step < 19 for kill in kills)


@pytest.mark.e2e
@pytest.mark.long
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("colocated", [False, True])
def test_a_run_survives_kills_of_anything(started, sections, colocated):
    """Also where engine and trainer take turns: whoever dies holds no turn, and has to wait for the next."""
    seed = seed_of_draw()
    level, interval, steps = (0, 1, 10) if colocated else (1, 3, 20)
    run = KilledRun(
        started,
        steps=steps,
        prompts=2,
        group_size=2,
        level=level,
        colocated=colocated,
        checkpoint_interval=interval,
    )
    victims = ["orchestrator", "trainer", "inference", "keptset"]
    more = [] if colocated else ["orchestrator", "orchestrator", "trainer"]
    schedule = draw(seed, victims + more, run.steps, 1.0)
    print(f"KILL_SEED={seed}: {'; '.join(map(str, schedule))}")
    run.go(schedule)
    settle(run).assert_right()
    turns = ", by turns" if colocated else ""
    sections[f"seconds from kill to the next step (KILL_SEED={seed}){turns}"] = [
        f"{victim:14}{seconds:6.1f}" for victim, seconds in run.recovered
    ]
    started.assert_nothing_is_left()
    the_accounts_see_what_is_missing_and_what_is_there_twice(run)


def the_accounts_see_what_is_missing_and_what_is_there_twice(run: KilledRun) -> None:
    with closing(sqlite3.connect(run.folder / "state.sqlite")) as state, state:
        state.execute("DELETE FROM groups WHERE step = 7 AND position = 1")
    (file,) = (run.folder / "rollouts").glob("step-000009-*")
    shutil.copyfile(file, file.with_stem("step-000009-again"))
    accounts = settle(run)
    assert (accounts.lost_groups, accounts.repeated_batches) == (1, 1)
    assert {fault.split(":")[0] for fault in accounts.faults} >= {"files of step 9", "rollouts of step 9"}
