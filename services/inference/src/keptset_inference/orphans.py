"""A small process that outlives the server only to clean up after it.

vLLM's engine and worker processes go on living when the server is killed (SIGKILL, out of memory): 1 GB each.
This process holds the end of a pipe whose other end only the server has. When that closes, however the server
died, it ends every process that carries the server's token in its environment.

Run as a script by `watch_over_children`; needs the standard library only, and Linux's /proc.
"""

import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

TOKEN = "KEPTSET_INFERENCE_SERVER"
"""Environment variable that every process which the server starts inherits."""
GRACE_SECONDS = 5.0
"""Between asking to end and killing."""


def watch_over_children() -> None:
    """Start the process; from here on every process that this one starts is ended with it."""
    token = secrets.token_hex(16)
    # Neither end is inherited unless it is passed on; the other one closes with this process.
    reading, _writing = os.pipe()
    environment = {name: value for name, value in os.environ.items() if name != TOKEN}
    subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, str(reading), token],
        pass_fds=(reading,),
        env=environment,
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C in the terminal is for the server
    )
    os.close(reading)
    os.environ[TOKEN] = token


def processes_with(token: str) -> list[int]:
    """Ids of the processes that carry the token."""
    mark = f"{TOKEN}={token}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:  # gone meanwhile, or somebody else's
                continue
    return found


def end_all(token: str, grace: float = GRACE_SECONDS) -> None:
    """Ask every process with the token to end, kill those that do not."""
    deadline = time.monotonic() + grace
    for number in (signal.SIGTERM, signal.SIGKILL):
        left = processes_with(token)
        for process in left:
            try:
                os.kill(process, number)
            except ProcessLookupError:
                continue
        while number == signal.SIGTERM and processes_with(token) and time.monotonic() < deadline:
            time.sleep(0.1)


def main(reading: int, token: str) -> None:
    """Wait for the server to end, then clean up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.read(reading, 1):
        pass
    end_all(token)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
