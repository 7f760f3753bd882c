"""The policy's logprob of every trained token over the whole vocabulary, sample by sample."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from kept_loss import KeptLogprobs
from kept_tokens.messages import TrainingSample

from .micro_batch import MicroBatch
from .ranks import Ranks


class FullScores:
    """`add` every row after its forward pass, then `of_samples`, which waits for the device."""

    def __init__(self) -> None:
        self.rows: list[tuple[Tensor, Tensor, Tensor]] = []

    def add(self, row: MicroBatch, scored: KeptLogprobs) -> None:
        """Count one row in; it was scored with full_logprobs."""
        assert scored.full_logprobs is not None
        self.rows.append((row.samples, row.sequence, scored.full_logprobs.detach().float()))

    def of_samples(self, samples: Sequence[TrainingSample], ranks: Ranks) -> list[bytes]:
        """float32 [T] for each sample: 0 where a token is not trained on, or its row was not added.

        Nothing on other ranks than the first.
        """
        rows = [tuple(tensor.cpu().numpy() for tensor in row) for row in self.rows]
        everybody = ranks.gathered(rows)
        if not ranks.is_first:
            return []
        scores = [np.zeros(sample.num_tokens, "<f4") for sample in samples]
        for indices, owners, values in (row for rank in everybody for row in rank):
            for position, index in enumerate(indices.tolist()):
                # a row has its trained tokens in the order of its sequences
                scores[index][samples[index].arrays().loss_mask] = values[owners == position]
        return [one.tobytes() for one in scores]
