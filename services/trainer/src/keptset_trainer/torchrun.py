"""What torchrun has to be told for ranks that it starts, read off the environment that it gives them."""

import math
from collections.abc import Mapping

SHUTDOWN_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
"""Seconds that torchrun waits for its ranks when it is told to stop, before it kills them."""
SHUTDOWN_SECONDS = 30
"""Of torchrun itself, as of torch 2.13."""


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


def time_to_stop(environment: Mapping[str, str], shutdown_timeout: float) -> str | None:
    """What the first rank of a node says of how long torchrun waits for its ranks; None: nothing.

    Not refused: only a last checkpoint needs that long, and torchrun's option --shutdown-timeout, which its
    ranks do not see, may say otherwise.
    """
    if "TORCHELASTIC_RUN_ID" not in environment or environment.get("LOCAL_RANK") != "0":
        return None
    seconds = int(environment.get(SHUTDOWN_VARIABLE, SHUTDOWN_SECONDS))
    said = f"told to stop, torchrun waits {seconds} s for these ranks"
    if seconds >= shutdown_timeout:
        return f"{said} ({SHUTDOWN_VARIABLE})"
    return (
        f"{said}, and then kills them: less than trainer.shutdown_timeout = {shutdown_timeout:g}, so a last "
        f"checkpoint may be missing; set {SHUTDOWN_VARIABLE}={math.ceil(shutdown_timeout)} in its environment"
    )
