"""Whole sequences into rows, and rows into the tensors that the loss reads."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import overload

import numpy as np
import torch
from jaxtyping import Bool, Float32, Int64
from numpy.typing import NDArray
from torch import Tensor

from kept_loss import KeptSet
from kept_tokens.batch_view import SamplesView
from kept_tokens.messages import CROSS_ENTROPY, TrainingSample

from .balance import rows_of_ranks


@dataclass(frozen=True)
class MicroBatch:
    """One packed row of L tokens in S sequences, of which N positions predict a token to train on.

    Position n predicts the token at n + 1 of the same sequence, its label; the second half is about labels.
    Nothing is predicted across a border: the last position of a sequence predicts nothing.
    """

    token_ids: Int64[Tensor, " L"]
    positions: Int64[Tensor, " L"]
    """Restart at 0 with every sequence."""
    borders: Int64[Tensor, " S+1"]
    """Sequence s is the tokens borders[s] ... borders[s + 1] - 1."""
    samples: Int64[Tensor, " S"]
    """Index of each sequence's sample in the batch."""

    longest: int
    """Tokens of the longest sequence."""
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

    @property
    def num_sequences(self) -> int:
        """S."""
        return len(self.samples)

    @property
    def is_empty(self) -> bool:
        """Whether it is no row of the batch (`empty_row`)."""
        return int(self.samples[0]) < 0

    def to(self, device: torch.device) -> "MicroBatch":
        """The same on a device; on its way to a GPU the host does not wait for it."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        names = [name for name, value in values.items() if isinstance(value, Tensor)]
        *tensors, ids, offsets = moved([*(values[name] for name in names), *self.kept], device)
        return replace(self, **dict(zip(names, tensors, strict=True)), kept=KeptSet(ids, offsets))

    def without_masks(self) -> "MicroBatch":
        """The same with every kept set the whole vocabulary: biased on purpose, for comparison only."""
        num, device = len(self.labels), self.labels.device
        return replace(self, kept=KeptSet.whole_vocabulary(num, device), num_unmasked=num)


UNRECORDED = -1
"""Stands for a version; real ones are never negative."""
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


class Rows(Sequence[MicroBatch]):
    """A rank's rows, each packed when it is asked for: one is in memory at a time, and only the bytes of the
    rank's own samples are read.
    """

    def __init__(self, samples: Sequence[TrainingSample], rows: list[list[int]]) -> None:
        """`samples` of the whole batch, and which of them each row has; none = `empty_row`."""
        self.samples, self.rows = samples, rows

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.rows)

    @overload
    def __getitem__(self, number: int) -> MicroBatch: ...
    @overload
    def __getitem__(self, number: slice) -> "Rows": ...

    def __getitem__(self, number: int | slice) -> "MicroBatch | Rows":
        """Packed now; a slice is not."""
        if isinstance(number, slice):
            return Rows(self.samples, self.rows[number])
        row = self.rows[number]
        return pack_row([self.samples[i] for i in row], row) if row else empty_row()

    @property
    def indices(self) -> list[int]:
        """Which samples are in the rows, ascending."""
        return sorted(index for row in self.rows for index in row)

    def own_samples(self) -> Iterator[TrainingSample]:
        """The samples in the rows, in the order of `indices`."""
        return (self.samples[index] for index in self.indices)

    def loss_tokens(self) -> int:
        """Tokens to train on in all rows."""
        return sum(sample.loss_mask.count(1) for sample in self.own_samples())


def pack(samples: Sequence[TrainingSample], row_tokens: int, rank: int = 0, ranks: int = 1) -> Rows:
    """A rank's share of all samples in rows of at most `row_tokens` tokens, whole sequences only.

    Every rank has the same number of rows; where a rank's would hold nothing, it is `empty_row`.

    Raises:
        ValueError: a sample that fits no row.
    """
    lengths = (
        samples.lengths() if isinstance(samples, SamplesView) else [sample.num_tokens for sample in samples]
    )
    return Rows(samples, rows_of_ranks(lengths, row_tokens, ranks)[rank])


def pack_row(samples: list[TrainingSample], indices: list[int]) -> MicroBatch:
    """One row of the given sequences; `indices` are their places in the batch."""
    arrays = [sample.arrays() for sample in samples]
    lengths = np.array([len(a.token_ids) for a in arrays])
    borders = np.concatenate([[0], np.cumsum(lengths)])
    sequence = np.repeat(np.arange(len(samples)), lengths)

    trained = np.concatenate([a.loss_mask for a in arrays])
    assert not trained[borders[:-1]].any(), "the first token of a sequence is predicted by nothing"
    tokens = np.flatnonzero(trained)  # [N] the tokens to train on; token n + 1 is predicted at n

    ids, offsets = kept_of(samples, tokens)
    owner = sequence[tokens]  # [N]
    frozen = np.array([sample.objective == CROSS_ENTROPY for sample in samples])[owner]  # [N]

    def of_tokens(field: str) -> Tensor:
        return torch.from_numpy(np.concatenate([getattr(a, field) for a in arrays])[tokens])

    return MicroBatch(
        token_ids=torch.from_numpy(np.concatenate([a.token_ids for a in arrays]).astype(np.int64)),
        positions=torch.from_numpy(np.arange(borders[-1]) - borders[sequence]),
        borders=torch.from_numpy(borders),
        samples=torch.tensor(indices),
        longest=int(lengths.max()),
        has_trained=torch.from_numpy(np.bincount(owner[~frozen], minlength=len(samples)) > 0),
        predicting=torch.from_numpy(tokens - 1),
        sequence=torch.from_numpy(owner),
        labels=of_tokens("token_ids").long(),
        kept=KeptSet(ids=torch.from_numpy(ids), offsets=torch.from_numpy(offsets)),
        num_unmasked=int((np.diff(offsets) == 0).sum()),
        temperatures=of_tokens("temperatures"),
        advantages=of_tokens("advantages"),
        rollout_logprobs=of_tokens("logprobs"),
        versions=torch.from_numpy(np.concatenate([versions_of(s, UNRECORDED) for s in samples])[tokens]),
        cross_entropy=torch.from_numpy(frozen),
        reference_logprobs=torch.from_numpy(reference_of(samples)[tokens]),
        reference_weights=torch.from_numpy(
            np.array([s.reference_weight for s in samples], np.float32)[owner]
        ),
    )


def empty_row() -> MicroBatch:
    """A row in which nothing is trained, for a rank that has none left while others still do."""
    tokens, nothing = 8, torch.zeros(0)
    return MicroBatch(
        token_ids=torch.zeros(tokens, dtype=torch.int64),
        positions=torch.arange(tokens),
        borders=torch.tensor([0, tokens]),
        samples=torch.tensor([-1]),
        longest=tokens,
        has_trained=torch.tensor([False]),
        predicting=nothing.long(),
        sequence=nothing.long(),
        labels=nothing.long(),
        kept=KeptSet.whole_vocabulary(0),
        num_unmasked=0,
        temperatures=nothing,
        advantages=nothing,
        rollout_logprobs=nothing,
        versions=nothing.long(),
        cross_entropy=nothing.bool(),
        reference_logprobs=nothing,
        reference_weights=nothing,
    )


def reference_of(samples: list[TrainingSample]) -> NDArray[np.float32]:
    """What references say of the tokens of the row, 0 where there is none."""
    found = [(sample.reference(), sample.num_tokens) for sample in samples]
    return np.concatenate([np.zeros(n, np.float32) if one is None else one for one, n in found])


def versions_of(sample: TrainingSample, without_record: int) -> NDArray[np.int64]:
    """The version that sampled each token [T]; `without_record` where the sample does not say."""
    versions = np.full(sample.num_tokens, without_record)
    for version, start, end in sample.weight_versions:
        versions[start:end] = version
    return versions


def kept_of(
    samples: list[TrainingSample], tokens: NDArray[np.int64]
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """CSR (ids [M], offsets [N + 1]) of the kept sets of the tokens to train on; no other has one."""
    counts = [np.frombuffer(s.kept_counts or bytes(4 * s.num_tokens), "<i4") for s in samples]
    ids = np.concatenate([np.frombuffer(sample.kept_ids, "<i4") for sample in samples])
    offsets = np.concatenate([[0], np.cumsum(np.concatenate(counts)[tokens], dtype=np.int64)])
    assert offsets[-1] == len(ids), "a kept set on a token that is not trained on"
    return ids.astype(np.int32, copy=False), offsets
