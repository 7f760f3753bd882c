"""Ends a run's processes if `keptset` itself is killed: `python -m keptset.watcher`, our first child.

Reads "+<group>" and "-<group>" lines from standard input. `keptset` alone holds the pipe's other end, so
end of file means that it has gone, whatever the cause: then every group still listed is ended, newest first.
A parent-death signal would reach only direct children, and needs code between fork and exec.
"""

import signal
import sys

from keptset.groups import end

GRACE = 5.0
"""Seconds a group gets between SIGTERM and SIGKILL."""


def main() -> None:
    """Watches until end of file."""
    # Whoever signals our parent's terminal or session does not mean us: our work begins then.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: list[int] = []
    for line in sys.stdin:
        group = int(line[1:])
        if line[0] == "+":
            groups.append(group)
        else:
            groups.remove(group)
    for group in reversed(groups):
        end(group, GRACE)


if __name__ == "__main__":
    main()
