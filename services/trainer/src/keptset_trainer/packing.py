"""Whole sequences into rows, and rows into the tensors that the loss reads."""

from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from jaxtyping import Bool, Float32, Int64
from numpy.typing import NDArray
from torch import Tensor

from kept_loss import KeptSet
from kept_tokens.messages import CROSS_ENTROPY, TrainingSample


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

    loss_mask: Bool[Tensor, " L"]
    """True at the N positions that predict a token to train on."""
    sequence: Int64[Tensor, " N"]
    """Which of the S sequences each of them belongs to."""
    labels: Int64[Tensor, " N"]
    kept: KeptSet
    """The sets that the labels were sampled from; an empty one = the whole vocabulary."""
    temperatures: Float32[Tensor, " N"]
    advantages: Float32[Tensor, " N"]
    rollout_logprobs: Float32[Tensor, " N"]
    cross_entropy: Bool[Tensor, " N"]
    """Said by a frozen generator: no ratio, the advantage is a weight."""
    reference_logprobs: Float32[Tensor, " N"]
    reference_weights: Float32[Tensor, " N"]
    """0 where there is no reference."""

    @property
    def num_sequences(self) -> int:
        """S."""
        return len(self.samples)

    def to(self, device: torch.device) -> "MicroBatch":
        """The same on a device."""
        return MicroBatch(**{field.name: getattr(self, field.name).to(device) for field in fields(self)})

    def without_masks(self) -> "MicroBatch":
        """The same with every kept set the whole vocabulary: biased on purpose, for comparison only."""
        return replace(self, kept=KeptSet.whole_vocabulary(len(self.labels), self.labels.device))


def first_fit_decreasing(lengths: list[int], row_tokens: int) -> list[list[int]]:
    """Indices of `lengths`, row by row: the longest first, each into the first row that has room.

    Raises:
        ValueError: a length that fits no row.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        if length > row_tokens:
            raise ValueError(
                f"sample {index}: {length} tokens do not fit trainer.row_tokens = {row_tokens}; raise it"
            )
        row = next((row for row, free in enumerate(room) if free >= length), None)
        if row is None:
            row = len(rows)
            rows.append([])
            room.append(row_tokens)
        rows[row].append(index)
        room[row] -= length
    return rows


def pack(samples: list[TrainingSample], row_tokens: int) -> list[MicroBatch]:
    """All samples in rows of at most `row_tokens` tokens, whole sequences only."""
    rows = first_fit_decreasing([sample.num_tokens for sample in samples], row_tokens)
    return [pack_row([samples[i] for i in row], row) for row in rows]


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

    def of_tokens(field: str) -> Tensor:
        return torch.from_numpy(np.concatenate([getattr(a, field) for a in arrays])[tokens])

    return MicroBatch(
        token_ids=torch.from_numpy(np.concatenate([a.token_ids for a in arrays]).astype(np.int64)),
        positions=torch.from_numpy(np.arange(borders[-1]) - borders[sequence]),
        borders=torch.from_numpy(borders),
        samples=torch.tensor(indices),
        loss_mask=torch.from_numpy(np.append(trained[1:], False)),
        sequence=torch.from_numpy(sequence[tokens]),
        labels=of_tokens("token_ids").long(),
        kept=KeptSet(ids=torch.from_numpy(ids), offsets=torch.from_numpy(offsets)),
        temperatures=of_tokens("temperatures"),
        advantages=of_tokens("advantages"),
        rollout_logprobs=of_tokens("logprobs"),
        cross_entropy=torch.from_numpy(np.array([s.objective == CROSS_ENTROPY for s in samples])[owner]),
        reference_logprobs=torch.from_numpy(reference_of(samples)[tokens]),
        reference_weights=torch.from_numpy(
            np.array([s.reference_weight for s in samples], np.float32)[owner]
        ),
    )


def reference_of(samples: list[TrainingSample]) -> NDArray[np.float32]:
    """What references say of the tokens of the row, 0 where there is none."""
    found = [(sample.reference(), sample.num_tokens) for sample in samples]
    return np.concatenate([np.zeros(n, np.float32) if one is None else one for one, n in found])


def kept_of(
    samples: list[TrainingSample], tokens: NDArray[np.int64]
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """CSR (ids [M], offsets [N + 1]) of the kept sets of some tokens of the row."""
    counts = np.concatenate(
        [np.frombuffer(sample.kept_counts or bytes(4 * sample.num_tokens), "<i4") for sample in samples]
    )
    ids = np.concatenate([np.frombuffer(sample.kept_ids, "<i4") for sample in samples])
    starts = np.cumsum(counts, dtype=np.int64) - counts
    chosen = counts[tokens].astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(chosen)])
    within = np.arange(offsets[-1]) - np.repeat(offsets[:-1], chosen)
    return ids[np.repeat(starts[tokens], chosen) + within].astype(np.int32), offsets
