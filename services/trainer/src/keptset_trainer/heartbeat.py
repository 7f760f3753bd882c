"""The sign of life of a training loop: a file that its first rank renews. Without torch.

Clocks of nodes differ, so nobody compares times: whoever wants to know whether a loop lives looks whether the
file changes, by a clock of their own.
"""

import json
import os
import socket
import uuid
from dataclasses import asdict, dataclass, field
from pathlib import Path

from .durable import write_json
from .folders import Folders

BEATS = 12
"""In `trainer.ranks_timeout`: a beat every 5 s of 60."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""Another one on each machine and after each of its starts, and the same in all containers of one."""


@dataclass(frozen=True)
class Heartbeat:
    """Written by the first rank of a loop; read by the ingest process and by other loops."""

    loop: str
    """Made anew by every loop: process ids are the same in containers that start alike."""
    beat: int
    pid: int
    host: str
    kernel: str
    """Of the machine: there a lock is seen by everybody, on whichever file system."""
    ranks: int
    """That train together."""
    ended: str | None = None
    """The loop's last words: it is no more."""

    @property
    def who(self) -> str:
        ranks = f"{self.ranks} rank{'s' if self.ranks > 1 else ''}"
        return f"{ranks}, the first of them process {self.pid} on {self.host}"


@dataclass
class Sign:
    """What is seen of a heartbeat: which loop's, and whether it changes."""

    folders: Folders
    last: Heartbeat | None = field(init=False)

    def __post_init__(self) -> None:
        self.last = read(self.folders)

    def changed(self) -> bool:
        """Whether there is another one than the last time."""
        before, self.last = self.last, read(self.folders) or self.last
        return self.last != before


def first(ranks: int) -> Heartbeat:
    """Of a loop that begins in this process."""
    return Heartbeat(uuid.uuid4().hex, 0, os.getpid(), socket.gethostname(), this_kernel(), ranks)


def this_kernel() -> str:
    """What tells this machine from others."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return socket.gethostname()


def read(folders: Folders) -> Heartbeat | None:
    """The last sign; None if there is none or it cannot be read, as from a volume that is away, where two
    loops have written over each other, or from another version.
    """
    try:
        return Heartbeat(**json.loads(folders.heartbeat.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def write(folders: Folders, sign: Heartbeat) -> None:
    """Raises OSError if it cannot be written."""
    write_json(folders.heartbeat, asdict(sign))
