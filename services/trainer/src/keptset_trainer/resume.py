"""Where a trainer goes on, read off its directories; without torch, so that ingest can refuse at once."""

import json
from pathlib import Path
from typing import Any

from keptset_settings import TrainerSettings

from .folders import Folders, numbered
from .recipe import check_recipe


def where_to_start(settings: TrainerSettings, folders: Folders) -> tuple[Path | None, dict[str, Any]]:
    """The newest checkpoint, or None at the first start, and its record.

    Incomplete checkpoints do not carry the name, so the newest one is complete. The record holds step,
    content_hash and metrics of the step that it was saved after, and the model that the run began with.

    Raises:
        ValueError: the directories hold something of another run, or steps to be trained once more in
            another way.
    """
    assert settings.model
    model = settings.model
    # Looked at before the checkpoint, which a loop of external ranks writes before them right now.
    published = max(numbered(folders.weights, "v"), default=None)
    trained = max(numbered(folders.results, "step-"), default=None)
    start = next(reversed(numbered(folders.checkpoints, "step-").values()), None)
    if start is None:
        check_untouched(folders, published, trained)
        return None, {"step": 0, "content_hash": None, "metrics": {}, "model": model}
    try:
        record = json.loads((start / "checkpoint.json").read_bytes())
    except FileNotFoundError:
        if start.exists():
            raise
        return where_to_start(settings, folders)  # newer ones have taken its place meanwhile
    check_same_run(start, record, model, folders, published or 0)
    check_recipe(settings, folders, record["step"], published or 0)
    return start, record


def what_is_left(folders: Folders) -> str:
    """What a trainer that has ended without a last checkpoint leaves to the next start, for people."""
    saved = max(numbered(folders.checkpoints, "step-"), default=None)
    published = max(numbered(folders.weights, "v"), default=0)
    return "it had no checkpoint yet" if saved is None else next_start(saved, published)


def next_start(saved: int, published: int) -> str:
    """What one does whose newest checkpoint is that of step `saved`, with the steps up to `published`."""
    goes_on = f"the next start goes on from the checkpoint of step {saved}"
    if published <= saved:
        return f"{goes_on}, the newest step that is published"
    steps = f"step {published}" if published == saved + 1 else f"steps {saved + 1} to {published}"
    return f"{goes_on} and trains {steps} once more, from the spool; weights and results stay as they are"


def check_untouched(folders: Folders, published: int | None, trained: int | None) -> None:
    """Without a checkpoint there are neither weights nor results."""
    for folder, name, newest in (
        (folders.weights, "weights_dir", published),
        (folders.results, "output_dir", trained),
    ):
        if newest is not None:
            raise ValueError(
                f"{folder} holds {newest} and earlier of another run, but {folders.checkpoints} holds no "
                f"checkpoint to go on from; choose another trainer.{name} or put the checkpoint back"
            )


def check_same_run(start: Path, record: dict[str, Any], model: str, folders: Folders, published: int) -> None:
    """A directory belongs to one model, and the batches of versions after the checkpoint are there."""
    if record["model"] != model:
        raise ValueError(
            f"{start} was trained from trainer.model {record['model']!r}, not from {model!r}; "
            "choose another trainer.output_dir and weights_dir, or set the model back"
        )
    missing = [step for step in range(record["step"] + 1, published + 1) if not folders.batch(step).exists()]
    if missing:
        raise ValueError(
            f"{folders.weights} holds version {published}, but the newest checkpoint is {start}, and "
            f"{folders.batch(missing[0])} is not there to be trained once more; put back the newer "
            "checkpoint or that batch, or choose another trainer.output_dir and weights_dir"
        )
