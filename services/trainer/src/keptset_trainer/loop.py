"""The loop process: `python -m keptset_trainer.loop settings.json [PARENT RENDEZVOUS]`, one a rank.

The ingest process starts as many as `trainer.ranks` says, each with the environment that torchrun would give
it, and passes PARENT and RENDEZVOUS. With `trainer.ranks = "external"` it starts none, and torchrun does, on
one node or on several that share the directories (services/trainer/README.md):

    torchrun --nproc-per-node 2 -m keptset_trainer.loop OUTPUT_DIR/settings.json

Without an ingest process the same trains the batches that lie in the spool, and waits for more.
"""

import ctypes
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from keptset_settings import TrainerSettings

    from .claim import Claim

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

    from .claim import Claim
    from .loop_settings import wait_for_settings
    from .torchrun import check_restarts, time_to_stop

    claim = None
    try:
        check_restarts(os.environ)
        settings = wait_for_settings(Path(settings_path))
        if (said := time_to_stop(os.environ, settings.shutdown_timeout)) is not None:
            print(f"trainer: {said}", flush=True)
        if int(os.environ.get("RANK", 0)) == 0:
            ranks = int(os.environ.get("WORLD_SIZE", 1))
            claim = Claim(settings, Path(settings_path), ranks, by_ingest=parent is not None)
            claim.take()
    except (ValueError, OSError) as error:
        sys.exit(f"trainer: {error}")
    words = "they were told to stop"
    try:
        run(settings, parent, rendezvous, claim)
    except SystemExit as error:
        words = str(error)
        raise
    except BaseException as error:
        words = repr(error)
        raise
    finally:
        if claim is not None:
            claim.end(words)


def run(
    settings: "TrainerSettings", parent: int | None, rendezvous: str | None, claim: "Claim | None"
) -> None:
    """Meet the other ranks and train with them; SystemExit says what a user can act on."""
    if settings.deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # before cuBLAS is there
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before OpenMP is: see the README, threads that spin

    import transformers

    from .loop_settings import check_same
    from .ranks import join, leave
    from .train import train
    from .train_step import NotFinite
    from .weight_sender import TransferBroken

    transformers.utils.logging.disable_progress_bar()
    try:
        ranks = join(settings.device, rendezvous)
        check_same(ranks.gathered(settings))
        train(settings, ranks, parent, claim)
    except (ValueError, NotFinite, OSError) as error:
        sys.exit(f"trainer: {error}")
    except TransferBroken as error:
        print(f"trainer: {error}", file=sys.stderr, flush=True)
        if claim is not None:
            claim.end(str(error))
        os._exit(1)  # leaving the ordinary way waits for the device, which may wait for ever
    leave()


if __name__ == "__main__":
    main(
        sys.argv[1],
        int(sys.argv[2]) if len(sys.argv) > 2 else None,
        sys.argv[3] if len(sys.argv) > 3 else None,
    )
