"""The loop process: `python -m keptset_trainer.loop settings.json PARENT RENDEZVOUS`, one a rank.

The ingest process starts as many as `trainer.ranks` says, each with the environment that torchrun would give
it. By hand, without an ingest process, over batches that lie in the spool:

    torchrun --nproc-per-node 2 -m keptset_trainer.loop OUTPUT_DIR/settings.json
"""

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


def main(settings_path: str, parent: int | None = None, rendezvous: str | None = None) -> None:
    """Train until told to stop; an error that a user can act on is one line on stderr."""
    if parent is not None:
        die_with_parent(parent)  # before torch is imported, which takes seconds
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the ingest process passes it on as SIGTERM

    from keptset_settings import TrainerSettings

    settings = TrainerSettings.model_validate_json(Path(settings_path).read_bytes())
    if settings.deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # before cuBLAS is there

    import transformers

    from .ranks import join, leave
    from .train import train
    from .train_step import NotFinite
    from .weight_sender import TransferBroken

    transformers.utils.logging.disable_progress_bar()
    try:
        train(settings, join(settings.device, rendezvous), parent)
    except (ValueError, NotFinite, OSError) as error:
        sys.exit(f"trainer: {error}")
    except TransferBroken as error:
        print(f"trainer: {error}", file=sys.stderr, flush=True)
        os._exit(1)  # leaving the ordinary way waits for the device, which may wait for ever
    leave()


if __name__ == "__main__":
    main(
        sys.argv[1],
        int(sys.argv[2]) if len(sys.argv) > 2 else None,
        sys.argv[3] if len(sys.argv) > 3 else None,
    )
