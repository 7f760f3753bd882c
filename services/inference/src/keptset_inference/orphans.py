"""A small process that outlives the server only to clean up after it.

vLLM's engine and worker processes go on living when the server is killed (SIGKILL, out of memory): 1 GB
each. This process holds the end of a pipe whose other end only the server has. When that closes, however the
server died, it ends every process that the server had started.

Run as a script by `watch_over_children`; needs the standard library only, and Linux's /proc.
"""

import os
import secrets
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

TOKEN = "KEPTSET_INFERENCE_SERVER"
"""Environment variable that every process which the server starts inherits."""
GRACE_SECONDS = 5.0
"""Between asking to end and killing."""
KILL_SECONDS = 60.0
"""For the kernel to end what was killed; a process may hang in a driver, and nobody can help that."""

Process = tuple[int, int]
"""A process id and when it started: ids are used again, pairs are not."""


def watch_over_children() -> None:
    """Start the process; from here on every process that this one starts is ended with it."""
    token = secrets.token_hex(16)
    # Neither end is inherited unless it is passed on; the other one closes with this process.
    reading, _writing = os.pipe()
    environment = {name: value for name, value in os.environ.items() if name != TOKEN}
    subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, str(reading), str(os.getpid()), token],
        pass_fds=(reading,),
        env=environment,
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C in the terminal is for the server
    )
    os.close(reading)
    os.environ[TOKEN] = token


def all_processes() -> dict[int, tuple[int, int]]:
    """Process id -> (its parent's, when it started); without those that have ended."""
    processes = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # gone meanwhile
                continue
            if fields[0] not in "ZX":
                processes[int(entry.name)] = (int(fields[1]), int(fields[19]))
    return processes


def descendants(roots: set[int]) -> set[Process]:
    """Every process below these."""
    processes = all_processes()
    found: set[Process] = set()
    parents = set(roots)
    while parents:
        children = {(pid, start) for pid, (parent, start) in processes.items() if parent in parents} - found
        found |= children
        parents = {pid for pid, _ in children}
    return found


def with_token(token: str) -> set[Process]:
    """Processes that carry the token; one that has given itself a title does not any more."""
    mark = f"{TOKEN}={token}".encode()
    found = set()
    for pid, (_, start) in all_processes().items():
        try:
            if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.add((pid, start))
        except OSError:  # gone meanwhile, or somebody else's
            continue
    return found


def end_all(known: set[Process], token: str, grace: float = GRACE_SECONDS) -> None:
    """Ask them, those below them and those with the token to end; kill those that do not.

    Gives up on what still runs KILL_SECONDS after that, or is not ours to end, and says so.
    """
    deadline = time.monotonic() + grace
    asked: set[Process] = set()
    while True:
        known |= with_token(token)
        known |= descendants({pid for pid, start in known if is_alive(pid, start)})
        left = {(pid, start) for pid, start in known if is_alive(pid, start)}
        if not left:
            return
        if time.monotonic() > deadline + KILL_SECONDS:
            print(f"keptset-inference: could not end {sorted(pid for pid, _ in left)}", file=sys.stderr)
            return
        late = time.monotonic() > deadline
        for pid, _ in left if late else left - asked:
            try:
                os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
            except (ProcessLookupError, PermissionError):  # gone, or it has become somebody else's
                continue
        asked |= left
        time.sleep(0.1)


def is_alive(pid: int, start: int) -> bool:
    """Whether this very process still runs."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return fields[0] not in "ZX" and int(fields[19]) == start


def main(reading: int, server: int, token: str) -> None:
    """Look on until the server ends, then clean up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    known: set[Process] = set()
    started = time.monotonic()
    while True:
        # Often while the engine starts; later its processes stay the same.
        pause = 0.5 if time.monotonic() - started < 120 else 5.0
        if select.select([reading], [], [], pause)[0]:
            break
        known |= descendants({server})
    known -= {entry for entry in known if entry[0] == os.getpid()}
    end_all(known, token)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
