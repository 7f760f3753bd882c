"""The settings of the training loop, which ingest writes for it: waited for, and looked at again."""

import os
import time
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from keptset_settings import TrainerSettings

SETTINGS_PATIENCE = 1800.0
"""Seconds that ranks wait for the ingest process to write them, as the two may start in any order."""
SECONDS_BETWEEN_WORDS = 30.0
POLL_SECONDS = 0.2
OF_INGEST = {
    "host",
    "port",
    "internal_token",
    "open_metrics",
    "max_concurrent_requests",
    "max_requests_per_second",
    "max_batch_bytes",
    "max_waiting_batches",
    "shutdown_timeout",
}
"""Settings for which no loop has to begin anew: it never looks at them, but for a word at its start."""


def wait_for_settings(path: Path, patience: float = SETTINGS_PATIENCE) -> TrainerSettings:
    """What the ingest process wrote there.

    Raises:
        ValueError: it is not there within `patience` seconds, or none of this version's.
    """
    deadline, word_at = time.monotonic() + patience, time.monotonic()
    while not path.exists():
        now = time.monotonic()
        if now > deadline:
            raise ValueError(
                f"{path}: waited {patience:.0f} s for it; the ingest process writes it: start "
                'keptset-trainer with trainer.ranks = "external" and this output_dir'
            )
        if now >= word_at and int(os.environ.get("LOCAL_RANK", 0)) == 0:
            print(
                f"trainer: waiting for {path}, which the ingest process writes when it starts "
                f"({deadline - now:.0f} s at most)",
                flush=True,
            )
            word_at = now + SECONDS_BETWEEN_WORDS
        time.sleep(POLL_SECONDS)
    try:
        return TrainerSettings.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(
            f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}; it is not what an ingest process "
            "of this version writes: use one version for both"
        ) from error


def changed_settings(settings: TrainerSettings, path: Path) -> list[str]:
    """Names of those of the loop that are others in `path` by now; none if nothing can be read there."""
    try:
        there = TrainerSettings.model_validate_json(path.read_bytes())
    except OSError:
        return []
    except ValidationError:
        return ["those of another version"]
    return _differing(settings, there)


def check_same(read: list[TrainerSettings]) -> None:
    """All ranks train with the same settings. `read`: what each of them has read, in their order.

    Raises:
        ValueError: ingest has written others between two ranks' looks, or a node saw the older file.
    """
    for rank, settings in enumerate(read):
        if names := _differing(read[0], settings):
            raise ValueError(
                f"rank {rank} has read other settings than rank 0 ({', '.join(names)}), as the ingest "
                "process wrote new ones meanwhile: start the ranks again"
            )


def _differing(one: TrainerSettings, other: TrainerSettings) -> list[str]:
    """Names of the loop's settings whose values are not the same in both."""
    a, b = _flat(one), _flat(other)
    return sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))


def _flat(settings: TrainerSettings) -> dict[str, Any]:
    """`optimizer.lr` -> value."""
    found: dict[str, Any] = {}
    for name, value in settings.model_dump(mode="json", exclude=OF_INGEST).items():
        below = value if isinstance(value, dict) else None
        found |= {name: value} if below is None else {f"{name}.{key}": v for key, v in below.items()}
    return found
