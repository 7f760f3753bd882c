"""Whose turn it is on a GPU that an engine and a trainer share: a lock on a file."""

import fcntl
import os
import socket
from pathlib import Path


class GpuTurn:
    """One process's part in taking turns: engines have it together, the trainer alone.

    The kernel's lock (flock), so that it goes with the process that has it, however that ends. Nobody is
    waited for here: `try_to_take` says at once. Whoever waits knows best what else to look at meanwhile.
    """

    def __init__(self, path: Path, name: str, *, shared: bool) -> None:
        """Open the file, or make it.

        Args:
            path: Of the lock, the same for all who share the GPU.
            name: Of this process, for those who wait for it.
            shared: Others who share it may have the turn at the same time.

        Raises:
            ValueError: the file cannot be made.
        """
        self.path, self.name = path, f"{name}, process {os.getpid()}"
        self.held = False
        self._kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise ValueError(f"gpu_lock = {path}: cannot be opened: {error.strerror}") from error

    def try_to_take(self) -> bool:
        """Whether it is this process's turn now, and stays so until `give_back`."""
        if not self.held:
            try:
                fcntl.flock(self._file, self._kind | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            self.held = True
            text = f"{self.name}{_here()}".encode()
            os.pwrite(self._file, text, 0)
            os.ftruncate(self._file, len(text))
        return True

    def give_back(self) -> None:
        """Let the others have it."""
        fcntl.flock(self._file, fcntl.LOCK_UN)
        self.held = False

    def holder(self) -> str:
        """Who has it, as far as the file says: asked when it could not be taken."""
        text = os.pread(self._file, 1000, 0).decode(errors="replace")
        return text.removesuffix(_here()) or "somebody"


def _here() -> str:
    """Where a process's number means that process: containers number theirs from 1, and have a name each."""
    return f" on {socket.gethostname()}"
