"""Checkpoints: a transformers model directory, and beside it what training goes on from.

    checkpoint.json               the step, its batch's hash and its result
    model.safetensors, ...        what is published: the model as it computes, and its tokenizer
    state/                        float32 weights and AdamW's moments, each rank's shards in a file of its own

The state is torch.distributed.checkpoint's, in its safetensors form: any number of ranks reads what any other
number wrote. Where in the data a run is, is the step; what is random in a step is seeded by it.
"""

import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.utils import cached_file

from .checkpoint_writer import ShardWriter
from .durable import finish_directory, new_directory, remove_directory, write_json
from .folders import Folders, numbered
from .master_weights import MasterWeights
from .ranks import Ranks

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
MOMENTS = ("exp_avg", "exp_avg_sq")


def save(
    path: Path,
    model: PreTrainedModel,
    weights: MasterWeights,
    optimizer: torch.optim.Optimizer,
    ranks: Ranks,
    tokenizer_from: Path,
    record: dict[str, Any],
) -> None:
    """Write a checkpoint atomically. Every rank calls this; the first one's files make it complete.

    Args:
        path: of the checkpoint's directory.
        model: saved as transformers does, in one file; tied weights once.
        weights: its float32 weights.
        optimizer: AdamW over them.
        ranks: that have shards of them.
        tokenizer_from: directory whose tokenizer files go along.
        record: what else to remember, as JSON.
    """
    temporary = path
    if ranks.is_first:
        temporary = new_directory(path)
    temporary = Path(ranks.gathered(str(temporary))[0])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one rank: meant
        dcp.save(
            state_of(weights, optimizer, ranks),
            storage_writer=ShardWriter(temporary / "state"),
            process_group=ranks.group,
            no_dist=ranks.group is None,
        )
    exported = whole_weights(model, weights, ranks)

    def finish() -> None:
        write_model(temporary, model, exported, tokenizer_from)
        write_json(temporary / "checkpoint.json", record)
        finish_directory(temporary, path)

    ranks.first_alone(finish)


def whole_weights(model: PreTrainedModel, weights: MasterWeights, ranks: Ranks) -> dict[str, Tensor]:
    """What a version consists of, on the first rank's CPU; empty on the others. Every rank calls this."""
    exported = {}
    for name, values in published(model, weights):
        if ranks.is_first:
            exported[name] = values.cpu()
    return exported


def write_model(
    directory: Path, model: PreTrainedModel, exported: dict[str, Tensor], tokenizer_from: Path
) -> None:
    """A transformers model: weights in one file, config, and the tokenizer of another directory."""
    model.save_pretrained(directory, state_dict=exported, max_shard_size=ONE_FILE)
    for pattern in TOKENIZER_FILES:
        for file in tokenizer_from.glob(pattern):
            shutil.copyfile(file, directory / file.name)


def published(model: PreTrainedModel, weights: MasterWeights) -> Iterator[tuple[str, Tensor]]:
    """Names and values of what a version consists of, one at a time; every rank must go through all."""
    for name in weights.named:
        yield name, weights.whole(name)
    kept = persistent(model)
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in kept)


def persistent(model: PreTrainedModel) -> set[str]:
    """Names of the buffers that a state dict has."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in module._buffers.keys() - module._non_persistent_buffers_set
    }


def keep_newest(folders: Folders) -> None:
    """Remove all but the last KEEP checkpoints."""
    for path in list(numbered(folders.checkpoints, "step-").values())[:-KEEP]:
        remove_directory(path)


def state_of(weights: MasterWeights, optimizer: torch.optim.Optimizer, ranks: Ranks) -> dict[str, Tensor]:
    """What training goes on from, as tensors that know which part of the whole they are.

    A parameter that never had a gradient has no moments yet: zeros. Every rank calls this.
    """
    steps, state = [], {}
    for name, parameter in weights.named.items():
        known = optimizer.state.get(parameter, {})
        steps.append(float(known.get("step", 0)))
        state[f"weights/{name}"] = weights.as_sharded(name, parameter.detach())
        for moment in MOMENTS:
            values = known.get(moment)
            if values is None:
                values = torch.zeros_like(parameter, requires_grad=False)
            state[f"{moment}/{name}"] = weights.as_sharded(name, values)
    # A rank that has nothing of a parameter counts no steps of it, and any rank's numbers are saved for all.
    everybody = torch.tensor(ranks.gathered(steps))
    return {**state, "steps": everybody.amax(0)}


def restore(path: Path, weights: MasterWeights, optimizer: torch.optim.Optimizer, ranks: Ranks) -> None:
    """Put what `save` saved in `path` into the weights and the optimiser.

    Raises:
        ValueError: it is of another model.
    """
    state = state_of(weights, optimizer, ranks)
    reader = HuggingFaceStorageReader(str(path / "state"))
    there = reader.read_metadata().state_dict_metadata.keys()
    if there != state.keys():
        raise ValueError(
            f"{path}/state: is of another model than the one beside it; they differ in "
            f"{sorted(there ^ state.keys())[0]}"
        )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is")  # one rank: meant
        dcp.load(state, storage_reader=reader, process_group=ranks.group, no_dist=ranks.group is None)
    for (name, parameter), step in zip(weights.named.items(), state["steps"], strict=True):
        moments = {moment: state[f"{moment}/{name}"] for moment in MOMENTS}
        if step == 0 or parameter.numel() == 0:
            continue
        on_device = optimizer.defaults["fused"]
        optimizer.state[parameter] = {
            "step": step.clone().to(parameter.device) if on_device else step.clone(),
            **{m: v.to_local() if isinstance(v, DTensor) else v for m, v in moments.items()},
        }
    weights.give_back()


def directory_of(model: str) -> Path:
    """The local directory of a model given as a path or as a hub name."""
    return Path(model) if Path(model).is_dir() else Path(cached_file(model, "config.json")).parent
