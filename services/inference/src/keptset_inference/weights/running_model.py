"""What the running model accepts: names and shapes of the files that the engine was started with."""

import json
from dataclasses import dataclass
from pathlib import Path

from .tensors import read_tensors


@dataclass(frozen=True)
class RunningModel:
    """The tensors that a published version must have, no more and no less."""

    directory: Path
    """The files; loading them again is the way back to the first weights."""
    shapes: dict[str, tuple[int, ...]]
    tied: bool
    """The head is the embedding."""


def running_model(model: str, revision: str | None = None) -> RunningModel:
    """Look at a directory, or at the hub's cache of a name.

    Raises:
        ValueError: the files are no safetensors files, or are not on this machine.
    """
    directory = Path(model)
    if not directory.is_dir():
        from huggingface_hub import snapshot_download

        try:
            directory = Path(snapshot_download(model, revision=revision, local_files_only=True))
        except Exception as error:
            raise ValueError(f"the files of {model} are not on this machine: {error}") from error
    try:
        tensors = read_tensors(directory, _listed(directory))
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        config = json.loads((directory / "config.json").read_bytes())
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"weights of {model} cannot be compared: {error}") from error
    return RunningModel(directory, shapes, tied=_tied(config))


def _listed(directory: Path) -> set[str] | None:
    """The files that an index lists: some models come twice, in a second format beside."""
    index = directory / "model.safetensors.index.json"
    return set(json.loads(index.read_bytes())["weight_map"].values()) if index.is_file() else None


def _tied(config: dict[str, object]) -> bool:
    text = config.get("text_config")
    source = text if isinstance(text, dict) and "tie_word_embeddings" in text else config
    return bool(source.get("tie_word_embeddings", True))  # transformers' own default


__all__ = ["RunningModel", "running_model"]
