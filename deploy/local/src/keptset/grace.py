"""How long each service may take to end by its own bounds, before whoever told it to would cut it off.

Compose and Kubernetes cannot follow a setting: what they say of the defaults is compared with this in tests.
"""

from keptset_settings import DRAIN_SECONDS, RunSettings

INFERENCE_BESIDE = 25.0
"""Beside inference.vllm.shutdown_timeout: what did not end in time is answered (3 s), the engine ends (5 s),
clients read (5 s), processes go."""
TRAINER_BESIDE = 15.0
"""Beside trainer.shutdown_timeout: requests in work end (5 s), processes go."""
OTHERS = 15.0
"""They stop where they are."""


def seconds_to_end(service: str, run: RunSettings) -> float:
    """Seconds that a service of this run needs at most, from SIGTERM on."""
    if service == "trainer":
        return run.trainer.shutdown_timeout + TRAINER_BESIDE
    if service == "inference":
        return _drain(run) + INFERENCE_BESIDE
    return OTHERS


def _drain(run: RunSettings) -> float:
    try:
        return float(run.inference.vllm.get("shutdown_timeout", DRAIN_SECONDS))
    except (TypeError, ValueError):  # which vLLM refuses at its start
        return DRAIN_SECONDS
