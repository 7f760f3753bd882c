"""The rules of `trainer.ranks = "external"`: a training loop that is not where its ingest process is."""

from .errors import Problem
from .trainer import TrainerSettings

NO_TURNS = (
    "does not go with colocated: engine and trainer take turns by the lock of a file on one machine; set a "
    'number or "auto", or give the ranks GPUs of their own and leave colocated out'
)
NO_NCCL = (
    'does not go with weights.transfer = "nccl": ranks are asked to send through a file, which takes up to a '
    'minute to be seen on the volume of several nodes; set weights.transfer = "files"'
)


def check_external_ranks(settings: TrainerSettings) -> list[Problem]:
    """What needs the ranks on the machine of their ingest process."""
    if settings.ranks != "external":
        return []
    refused = {NO_TURNS: settings.gpu_lock is not None, NO_NCCL: settings.weights_transfer == "nccl"}
    return [Problem(("trainer", "ranks"), why, "external") for why, applies in refused.items() if applies]
