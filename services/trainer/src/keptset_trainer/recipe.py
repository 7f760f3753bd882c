"""The settings that decide what a step comes to: steps that are trained once more need the same."""

import json
from typing import Any

from keptset_settings import TrainerSettings

from .durable import write_json
from .folders import Folders

RECIPE = {"loss", "optimizer", "seed", "dtype", "full_vocabulary_scores", "unsafe_ignore_kept_tokens"}
"""Other settings (ranks, packing, compilation) change how it is rounded and no more."""


def check_recipe(settings: TrainerSettings, folders: Folders, saved: int, published: int) -> None:
    """Steps after the checkpoint have the recipe that they had; any other step may have a new one.

    Args:
        settings: to train with.
        folders: where the recipe of the last start is.
        saved: step of the checkpoint to go on from.
        published: the newest version that is there.

    Raises:
        ValueError: steps would be trained once more in another way.
    """
    if not folders.recipe.exists() or published <= saved:
        return
    before, now = json.loads(folders.recipe.read_bytes()), recipe(settings)
    other = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    if other:
        name = other[0]
        raise ValueError(
            f"trainer.{name} = {json.dumps(now.get(name))}: steps {saved + 1} to {published} came after the "
            f"newest checkpoint and are to be trained once more, as they were, with "
            f"{json.dumps(before.get(name))}. Start with that, which ends with a checkpoint of step "
            f"{published}, stop the trainer, and change it then"
            + (f" (the same holds for {', '.join(other[1:])})" if other[1:] else "")
        )


def write_recipe(settings: TrainerSettings, folders: Folders) -> None:
    """Of the steps that come now; `check_recipe` has let it pass."""
    now = recipe(settings)
    if not folders.recipe.exists() or json.loads(folders.recipe.read_bytes()) != now:
        write_json(folders.recipe, now)


def recipe(settings: TrainerSettings) -> dict[str, Any]:
    """`optimizer.lr` -> value."""
    found: dict[str, Any] = {}
    for name, value in settings.model_dump(mode="json", include=RECIPE).items():
        found |= (
            {f"{name}.{key}": v for key, v in value.items()} if isinstance(value, dict) else {name: value}
        )
    return found
