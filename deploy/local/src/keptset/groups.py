"""Process groups: who is left in one, and how to end it. Standard library only, Linux."""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

ORPHAN_GRACE = 2.0
"""Seconds that the rest of a group gets once its leader has gone."""

POLL = 0.05


def members(group: int) -> list[int]:
    """The living processes of a group; zombies do not count, whoever has yet to reap them."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            # The command in parentheses may contain anything, so read from the last parenthesis on.
            state, _parent, its_group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
        except (OSError, ValueError):
            continue  # it ended while we looked
        if int(its_group) == group and state not in "ZX":
            found.append(int(entry.name))
    return found


def send(pid: int, number: int) -> None:
    """Sends a signal to a process, or to a group if negative; one that has gone already is fine."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def end(group: int, grace: float, hurry: Callable[[], bool] = lambda: False) -> bool:
    """Ends a group: SIGTERM to its leader, `grace` seconds, then SIGKILL to all that is left.

    The leader alone is asked, because a service takes its helpers down in its own order; what a leader leaves
    behind is asked as a group and gets ORPHAN_GRACE seconds. `hurry` is polled: true means SIGKILL at once.

    Returns whether everything went without SIGKILL.
    """
    left = members(group)
    leader_asked = group in left
    if leader_asked:
        send(group, signal.SIGTERM)
    deadline = time.monotonic() + grace
    orphans_asked = False
    while left:
        if group not in left and not orphans_asked:
            orphans_asked = True
            send(-group, signal.SIGTERM)
            deadline = min(deadline, time.monotonic() + ORPHAN_GRACE)
        if hurry() or time.monotonic() >= deadline:
            send(-group, signal.SIGKILL)
            # SIGKILL cannot be refused, but a process inside the kernel may take a moment.
            limit = time.monotonic() + 5
            while members(group) and time.monotonic() < limit:
                time.sleep(POLL)
            return False
        time.sleep(POLL)
        left = members(group)
    return True
