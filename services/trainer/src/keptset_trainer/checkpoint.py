"""Checkpoints: a transformers model directory, plus the optimiser's state and the result of the step."""

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import cached_file

from .durable import finish_directory, new_directory, remove_directory, write_json
from .folders import Folders, numbered

KEEP = 2
"""Checkpoints that stay: the newest, and the one before in case a disk ate it."""
TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
)
ONE_FILE = "1000TB"


def save(
    path: Path,
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    tokenizer_from: Path,
    record: dict[str, Any],
) -> None:
    """Write a checkpoint atomically.

    Args:
        path: of the checkpoint's directory.
        model: saved as transformers does, in one file; tied weights once.
        optimizer: AdamW over `model`'s parameters.
        tokenizer_from: directory whose tokenizer files go along.
        record: what else to remember, as JSON.
    """
    temporary = new_directory(path)
    model.save_pretrained(temporary, max_shard_size=ONE_FILE)
    for pattern in TOKENIZER_FILES:
        for file in tokenizer_from.glob(pattern):
            shutil.copyfile(file, temporary / file.name)
    save_file(optimizer_tensors(model, optimizer), temporary / "optimizer.safetensors")
    write_json(temporary / "checkpoint.json", record)
    finish_directory(temporary, path)


def keep_newest(folders: Folders) -> None:
    """Remove all but the last KEEP checkpoints."""
    for path in list(numbered(folders.checkpoints, "step-").values())[:-KEEP]:
        remove_directory(path)


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The state of every parameter as `<parameter>/<entry>`."""
    return {
        f"{name}/{entry}": value
        for name, parameter in model.named_parameters()
        for entry, value in optimizer.state.get(parameter, {}).items()
    }


def restore_optimizer(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Put the state saved in `path` into `optimizer`.

    Raises:
        ValueError: a saved state belongs to no parameter of the model.
    """
    parameters = dict(model.named_parameters())
    for key, value in load_file(path / "optimizer.safetensors").items():
        name, _, entry = key.rpartition("/")
        if name not in parameters:
            raise ValueError(f"{path}/optimizer.safetensors: the model beside it has no parameter {name}")
        parameter = parameters[name]
        # AdamW counts steps on the CPU unless it is fused or captured
        optimizer.state[parameter][entry] = value if entry == "step" else value.to(parameter.device)


def directory_of(model: str) -> Path:
    """The local directory of a model given as a path or as a hub name."""
    return Path(model) if Path(model).is_dir() else Path(cached_file(model, "config.json")).parent
