"""One packed row: what the model's body reads of it, its labels, and their way to a device."""

from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
import torch
from jaxtyping import Bool, Float32, Int64
from torch import Tensor

from kept_loss import KeptSet


@dataclass(frozen=True)
class Sequences:
    """What the model's body reads of one packed row: L tokens in S sequences."""

    token_ids: Int64[Tensor, " L"]
    positions: Int64[Tensor, " L"]
    """Restart at 0 with every sequence."""
    borders: Int64[Tensor, " S+1"]
    """Sequence s is the tokens borders[s] ... borders[s + 1] - 1."""
    samples: Int64[Tensor, " S"]
    """Index of each sequence's sample in the batch."""

    longest: int
    """Tokens of the longest sequence."""

    @property
    def num_sequences(self) -> int:
        """S."""
        return len(self.samples)

    @property
    def is_empty(self) -> bool:
        """Whether it is no row of the batch (`empty_row`)."""
        return int(self.samples[0]) < 0

    def to(self, device: torch.device) -> Self:
        """The same on a device; on its way to a GPU the host does not wait for it."""
        return replace(self, **moved_fields(self, device))


@dataclass(frozen=True)
class MicroBatch(Sequences):
    """One packed row, and its labels: N of its positions predict a token to train on.

    Position n predicts the token at n + 1 of the same sequence, its label. Nothing is predicted across a
    border: the last position of a sequence predicts nothing.
    """

    has_trained: Bool[Tensor, " S"]
    """Whether a sequence has a token to train on that the policy sampled."""

    predicting: Int64[Tensor, " N"]
    """The positions that predict a token to train on, ascending."""
    sequence: Int64[Tensor, " N"]
    """Which of the S sequences each of them belongs to."""
    labels: Int64[Tensor, " N"]
    kept: KeptSet
    """The sets that the labels were sampled from; an empty one = the whole vocabulary."""
    num_unmasked: int
    """How many are empty."""
    temperatures: Float32[Tensor, " N"]
    advantages: Float32[Tensor, " N"]
    rollout_logprobs: Float32[Tensor, " N"]
    versions: Int64[Tensor, " N"]
    """Of the weights that sampled each of them; UNRECORDED where the sample does not say."""
    cross_entropy: Bool[Tensor, " N"]
    """Said by a frozen generator: no ratio, the advantage is a weight."""
    reference_logprobs: Float32[Tensor, " N"]
    reference_weights: Float32[Tensor, " N"]
    """0 where there is no reference."""

    def to(self, device: torch.device, there: Sequences | None = None) -> Self:
        """The same on a device; `there`: its sequences, if they are on the device already."""
        if there is None:
            return super().to(device)
        own = {field.name: getattr(there, field.name) for field in fields(Sequences)}
        return replace(self, **own, **moved_fields(self, device, leave=own))

    def without_masks(self) -> "MicroBatch":
        """The same with every kept set the whole vocabulary: biased on purpose, for comparison only."""
        num, device = len(self.labels), self.labels.device
        return replace(self, kept=KeptSet.whole_vocabulary(num, device), num_unmasked=num)


def moved_fields(row: Sequences, device: torch.device, leave: Collection[str] = ()) -> dict[str, Any]:
    """The tensors of a row by name, kept sets included, on a device; without those to `leave`."""
    values = {field.name: getattr(row, field.name) for field in fields(row) if field.name not in leave}
    names = [name for name, value in values.items() if isinstance(value, Tensor)]
    kept = [name for name, value in values.items() if isinstance(value, KeptSet)]
    together = moved([*(values[name] for name in names), *(x for name in kept for x in values[name])], device)
    rest = together[len(names) :]
    sets = {name: KeptSet(*rest[2 * i : 2 * i + 2]) for i, name in enumerate(kept)}
    return dict(zip(names, together, strict=False)) | sets


ALIGNMENT = 16
"""Bytes; whatever is viewed as numbers begins at a multiple of it."""


def moved(tensors: list[Tensor], device: torch.device) -> list[Tensor]:
    """Tensors of the CPU on `device`, by one transfer, which a GPU's host does not wait for."""
    if device.type == "cpu":
        return tensors
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    starts = np.cumsum([0, *(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)]).tolist()

    def views(together: Tensor) -> list[Tensor]:
        return [
            together[start : start + size].view(tensor.dtype).view(tensor.shape)
            for start, size, tensor in zip(starts, sizes, tensors, strict=False)
        ]

    # pinned: from pageable memory the host would wait
    together = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    for place, tensor in zip(views(together), tensors, strict=True):
        place.copy_(tensor)
    return views(together.to(device, non_blocking=True))
