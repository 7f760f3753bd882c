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
from collections.abc import Mapping
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


def check_restarts(environment: Mapping[str, str]) -> None:
    """If torchrun starts ranks again, it must give them another store.

    As of torch 2.13 it does not: `_create_c10d_store` of `rendezvous.py` counts on a new one for every retry,
    but `dynamic_rendezvous.py` keeps it. New ranks find the addresses of those that died there and call them.

    Raises:
        ValueError: it was not told to.
    """
    shares = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if shares and (restarts := int(environment.get("TORCHELASTIC_MAX_RESTARTS", 0))) > 0:
        raise ValueError(
            f"torchrun --max-restarts={restarts}: ranks that are started again would look for those that "
            "died, in a store that torchrun keeps; set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in torchrun's "
            "environment and --rdzv-backend=c10d, or leave --max-restarts out"
        )


def main(settings_path: str, parent: int | None = None, rendezvous: str | None = None) -> None:
    """Train until told to stop; an error that a user can act on is one line on stderr."""
    if parent is not None:
        die_with_parent(parent)  # before torch is imported, which takes seconds
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the ingest process passes it on as SIGTERM

    from .claim import Claim
    from .loop_settings import wait_for_settings

    claim = None
    try:
        check_restarts(os.environ)
        settings = wait_for_settings(Path(settings_path))
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
