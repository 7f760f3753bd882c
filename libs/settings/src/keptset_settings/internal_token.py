"""The secret that the services of a run share among themselves."""

from .errors import Problem
from .inference import InferenceSettings
from .orchestrator import OrchestratorSettings
from .run import RunSettings
from .trainer import TrainerSettings


def share_internal_token(run: RunSettings) -> list[Problem]:
    """Give the token that one table sets to those that leave it unset; what is wrong if two differ."""
    tables: dict[str, InferenceSettings | TrainerSettings | OrchestratorSettings] = {
        "inference": run.inference,
        "trainer": run.trainer,
        "orchestrator": run.orchestrator,
    }
    given = {name: table.internal_token for name, table in tables.items() if table.internal_token is not None}
    if not given:
        return []
    first, token = next(iter(given.items()))
    for table in tables.values():
        if table.internal_token is None:
            table.internal_token = token
    why = f"differs from [{first}] internal_token, so services would refuse each other; leave one of them out"
    return [Problem((name, "internal_token"), why) for name, other in given.items() if other != token]
