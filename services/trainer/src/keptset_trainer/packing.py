"""Whole sequences into rows, and rows into the tensors that the loss reads."""

from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kept_loss import KeptSet
from kept_tokens.batch_view import SamplesView
from kept_tokens.messages import CROSS_ENTROPY, TrainingSample

from .balance import rows_of_ranks
from .micro_batch import MicroBatch, Sequences

UNRECORDED = -1
"""Stands for a version; real ones are never negative."""


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
        begun = self.begun(number)
        return begun.labelled()

    def begun(self, number: int) -> "BegunRow":
        """One row in two steps."""
        row = self.rows[number]
        return BegunRow([self.samples[i] for i in row], row)

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


class BegunRow:
    """A row whose sequences are packed at once and its labels when they are asked for: the device may be at
    the ones while the host is at the others.
    """

    def __init__(self, samples: list[TrainingSample], indices: list[int]) -> None:
        """Of these samples, whose places in the batch are `indices`; of none = `empty_row`."""
        self.samples = samples
        self.sequences = pack_sequences(samples, indices) if samples else empty_row()

    def labelled(self) -> MicroBatch:
        """The whole row, on the host."""
        if isinstance(self.sequences, MicroBatch):
            return self.sequences
        return label(self.sequences, self.samples)


def pack_row(samples: list[TrainingSample], indices: list[int]) -> MicroBatch:
    """One row of the given sequences; `indices` are their places in the batch."""
    return BegunRow(samples, indices).labelled()


def pack_sequences(samples: list[TrainingSample], indices: list[int]) -> Sequences:
    """What the model's body reads of the row."""
    token_ids = [np.frombuffer(sample.token_ids, "<i4") for sample in samples]
    lengths = np.array([len(ids) for ids in token_ids])
    borders = np.concatenate([[0], np.cumsum(lengths)])
    return Sequences(
        token_ids=torch.from_numpy(np.concatenate(token_ids).astype(np.int64)),
        positions=torch.from_numpy(np.arange(borders[-1]) - np.repeat(borders[:-1], lengths)),
        borders=torch.from_numpy(borders),
        samples=torch.tensor(indices),
        longest=int(lengths.max()),
    )


def label(sequences: Sequences, samples: list[TrainingSample]) -> MicroBatch:
    """The row of these sequences, which are those of `samples`, with its labels."""
    arrays = [sample.arrays() for sample in samples]
    borders = sequences.borders.numpy()
    sequence = np.repeat(np.arange(len(samples)), np.diff(borders))

    trained = np.concatenate([a.loss_mask for a in arrays])
    assert not trained[borders[:-1]].any(), "the first token of a sequence is predicted by nothing"
    tokens = np.flatnonzero(trained)  # [N] the tokens to train on; token n + 1 is predicted at n

    ids, offsets = kept_of(samples, tokens)
    owner = sequence[tokens]  # [N]
    frozen = np.array([sample.objective == CROSS_ENTROPY for sample in samples])[owner]  # [N]

    def of_tokens(field: str) -> Tensor:
        return torch.from_numpy(np.concatenate([getattr(a, field) for a in arrays])[tokens])

    return MicroBatch(
        token_ids=sequences.token_ids,
        positions=sequences.positions,
        borders=sequences.borders,
        samples=sequences.samples,
        longest=sequences.longest,
        has_trained=torch.from_numpy(np.bincount(owner[~frozen], minlength=len(samples)) > 0),
        predicting=torch.from_numpy(tokens - 1),
        sequence=torch.from_numpy(owner),
        labels=sequences.token_ids[torch.from_numpy(tokens)],
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
