"""What can be said of a model's name before anybody loads it."""

from pathlib import Path


def is_absent_directory(model: str) -> bool:
    """Whether it is a path at which there is no directory. `name` or `owner/name` may be the hub's."""
    is_path = model.startswith(("/", ".", "~")) or (model.count("/") > 1 and "://" not in model)
    return is_path and not Path(model).is_dir()
