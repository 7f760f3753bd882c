"""Scores the tokens of a stored batch again, each by the weight version that sampled it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from kept_tokens.messages import CROSS_ENTROPY, TrainingSample

from ..balance import first_fit_decreasing
from ..micro_batch import MicroBatch
from ..packing import Rows, versions_of
from ..scorer import Scorer


@dataclass(frozen=True)
class ScoredTokens:
    """Tokens that the policy sampled and that are trained on, N of them, in the order of samples."""

    sample: NDArray[np.int64]
    """Index of the token's sample in the batch."""
    position: NDArray[np.int64]
    """Of the token in its sample, from 0, context included."""
    token_id: NDArray[np.int64]
    kept: NDArray[np.int64]
    """Size of the kept set; 0 = none, the whole vocabulary."""
    rollout: NDArray[np.float64]
    trainer: NDArray[np.float64]
    version: NDArray[np.int64]

    @property
    def log_ratio(self) -> NDArray[np.float64]:
        """Trainer logprob - rollout logprob."""
        return self.trainer - self.rollout

    def __len__(self) -> int:
        """N."""
        return len(self.sample)

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """All of them, ordered by sample and position."""
        columns = [np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(cls)]
        order = np.lexsort((columns[1], columns[0]))
        return cls(*(column[order] for column in columns))


def samples_by_version(samples: Sequence[TrainingSample], without_record: int) -> dict[int, list[int]]:
    """Version -> the samples with a token of it that is trained on; ascending."""
    found: dict[int, list[int]] = {}
    for index, sample in enumerate(samples):
        if sample.objective == CROSS_ENTROPY:
            continue  # a frozen generator said it: there is no ratio
        trained = np.frombuffer(sample.loss_mask, np.uint8) != 0
        for version in np.unique(versions_of(sample, without_record)[trained]).tolist():
            found.setdefault(version, []).append(index)
    return dict(sorted(found.items()))


@torch.no_grad()
def rescore(
    scorer_of: Callable[[int], Scorer],
    samples: Sequence[TrainingSample],
    row_tokens: int,
    device: torch.device,
    without_record: int,
) -> ScoredTokens:
    """Every token by the version that sampled it; one version's model is in memory at a time.

    Args:
        scorer_of: loads the policy of a version.
        samples: of the batch, checked.
        row_tokens: of a packed row.
        device: of the policies.
        without_record: the version of samples that do not say theirs.

    Raises:
        ValueError: a sample that fits no row, or no token that the policy sampled.
    """
    parts = []
    for version, indices in samples_by_version(samples, without_record).items():
        scorer = scorer_of(version)
        lengths = [samples[index].num_tokens for index in indices]
        rows = Rows(samples, [[indices[i] for i in row] for row in first_fit_decreasing(lengths, row_tokens)])
        for row in rows:
            logprobs = scorer.of_row(row.to(device)).logprobs.double().cpu().numpy()
            parts.append(of_row(row, logprobs, samples, version, without_record))
        del scorer
    if not parts:
        raise ValueError("no token of the batch was sampled by the policy, so there is no ratio to look at")
    return ScoredTokens.joined(parts)


def of_row(
    row: MicroBatch,
    logprobs: NDArray[np.float64],
    samples: Sequence[TrainingSample],
    version: int,
    without_record: int,
) -> ScoredTokens:
    """The tokens of a row that `version` sampled."""
    sequence = row.sequence.numpy()
    indices, starts = row.samples.numpy(), row.borders.numpy()
    position = row.predicting.numpy() + 1 - starts[sequence]
    versions = [versions_of(samples[index], without_record) for index in indices.tolist()]
    sampled_by = np.concatenate(versions)[row.predicting.numpy() + 1]
    own = (sampled_by == version) & ~row.cross_entropy.numpy()
    return ScoredTokens(
        sample=indices[sequence][own],
        position=position[own],
        token_id=row.labels.numpy()[own],
        kept=row.kept.offsets.diff().numpy()[own],
        rollout=row.rollout_logprobs.double().numpy()[own],
        trainer=logprobs[own],
        version=sampled_by[own],
    )
