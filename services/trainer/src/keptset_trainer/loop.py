"""The loop process: `python -m keptset_trainer.loop settings.json PARENT`, started by the ingest process."""

import ctypes
import os
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """On Linux the kernel kills this process with the ingest process; elsewhere the loop looks for it."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(f"trainer: the ingest process {parent} is gone")


def main(settings_path: str, parent: int) -> None:
    """Train until told to stop; an error that a user can act on is one line on stderr."""
    die_with_parent(parent)  # before torch is imported, which takes seconds
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the ingest process passes it on as SIGTERM

    import transformers

    from keptset_settings import TrainerSettings

    from .train import train
    from .train_step import NotFinite

    transformers.utils.logging.disable_progress_bar()
    settings = TrainerSettings.model_validate_json(Path(settings_path).read_bytes())
    try:
        train(settings, parent)
    except (ValueError, NotFinite, OSError) as error:
        sys.exit(f"trainer: {error}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
