"""What a step leaves on the disk: a version of the weights, and every n-th one a checkpoint before it.

A trainer that starts again goes on from the newest checkpoint and trains the batches after it once more.
Their versions are there and in use, so they stay as they are; so do their results. What that came to is
saved, so that nothing is trained a third time, however short a trainer's lives are.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from . import checkpoint, weights
from .disk_errors import FROM_ITS_BATCH, writing
from .folders import Folders, numbered
from .master_weights import MasterWeights
from .optimizer import AdamW
from .ranks import Ranks
from .resume import next_start

OTHER_BITS = "other_bits"
"""In a checkpoint's record: whether its weights are other ones than the version of its step."""


class Saver:
    """Of one training loop. Every rank calls the same methods; only the first one writes, but for its own
    part of a checkpoint.

    Args:
        folders: where everything goes.
        interval: steps from one checkpoint to the next.
        tokenizer_from: directory whose tokenizer files go along.
        log: for a line that a person reads.
    """

    def __init__(
        self,
        folders: Folders,
        model: PreTrainedModel,
        weights: MasterWeights,
        optimizer: AdamW,
        ranks: Ranks,
        *,
        interval: int,
        tokenizer_from: Path,
        log: Callable[[str], None],
    ) -> None:
        self.folders, self.ranks, self.interval, self.log = folders, ranks, interval, log
        self.model, self.weights, self.optimizer = model, weights, optimizer
        self.tokenizer_from = tokenizer_from
        self.published = newest_version(folders, ranks)
        """The newest version that was there at the start; steps up to it are trained once more."""
        self.saved = -1
        """Step of the newest checkpoint."""
        self.differs: int | None = None
        """The step whose weights have other bits than its version, if training once more came to others."""

    def begin(self, start: Path | None, record: dict[str, Any]) -> None:
        """The first checkpoint, or the one to start from, and what a killed process may have left undone."""
        if start is None:
            self._checkpoint(record)
        else:
            self.saved = record["step"]
            if record.get(OTHER_BITS):
                self.differs = self.saved
            self._publish(start, self.saved)
        if self.saved < self.published and self.ranks.is_first:
            self.log(
                f"going on from the checkpoint of step {self.saved}: the batches of steps {self.saved + 1} "
                f"to {self.published} are trained once more, from the spool"
            )

    def is_again(self, step: int) -> bool:
        """Whether `step` was trained before the start: its version and its scores are there."""
        return step <= self.published

    def after(self, record: dict[str, Any]) -> None:
        """What a step leaves; its result comes after it."""
        step = record["step"]
        if self.is_again(step):
            if step == self.published:
                other = self._has_other_bits(step)
                self.differs = step if other else None
                self._checkpoint({**record, OTHER_BITS: other})
        elif step % self.interval == 0:
            self._checkpoint(record)
        else:
            with writing(f"step {step}: its weights", self.folders.weights):
                exported = checkpoint.whole_weights(self.model, self.weights, self.ranks)
                write = partial(self._write_model, exported)
                self.ranks.first_alone(lambda: weights.publish_new(write, self.folders, step))

    def at_the_end(self, record: dict[str, Any]) -> None:
        """A checkpoint of the last step, so that the next start has nothing to train once more; what is being
        trained once more stays to be.
        """
        if record["step"] > max(self.saved, self.published):
            self._checkpoint(record, then=next_start(self.saved, record["step"]))
            self.ranks.first_alone(lambda: checkpoint.keep_newest(self.folders))

    def _checkpoint(self, record: dict[str, Any], then: str = FROM_ITS_BATCH) -> None:
        step = record["step"]
        path = self.folders.checkpoint(step)
        what = f"step {step}: its checkpoint" if step > 0 else "the first checkpoint"
        with writing(what, self.folders.checkpoints, then):
            checkpoint.save(
                path, self.model, self.weights, self.optimizer, self.ranks, self.tokenizer_from, record
            )
        self.tokenizer_from, self.saved = path, step
        self._publish(path, step)

    def _publish(self, saved: Path, step: int) -> None:
        """Let inference have a checkpoint's weights; done again it changes nothing."""

        def publish() -> None:
            there = self.folders.version(step).exists()
            if (there and step == self.differs) or (not there and step < self.published):
                return  # a published version never changes, and an old one that is gone does not come back
            with writing(f"step {step}: its weights", self.folders.weights):
                weights.publish(saved, self.folders, step)

        self.ranks.first_alone(publish)

    def _write_model(self, exported: dict[str, Tensor], directory: Path) -> None:
        checkpoint.write_model(directory, self.model, exported, self.tokenizer_from)

    def _has_other_bits(self, step: int) -> bool:
        """Say whether training once more came to the version that the rollouts since then are from."""
        differ = False
        exported = checkpoint.whole_weights(self.model, self.weights, self.ranks)

        def say() -> None:
            nonlocal differ
            there = load_file(self.folders.version(step) / "model.safetensors")
            other = [name for name, tensor in there.items() if not same(tensor, exported.get(name))]
            differ = bool(other)
            if differ:
                self.log(
                    f"step {step} again: other bits in {len(other)} of {len(there)} tensors, as another "
                    "number of ranks or another device rounds otherwise, or a setting was changed; the "
                    "version stays as it was"
                )
            else:
                self.log(f"step {step} again: the same bits as version {step}")

        self.ranks.first_alone(say)
        return bool(self.ranks.from_first(int(differ)))


def same(one: Tensor, other: Tensor | None) -> bool:
    return other is not None and one.dtype == other.dtype and torch.equal(one, other)


def newest_version(folders: Folders, ranks: Ranks) -> int:
    """0 if there is none."""
    return ranks.from_first(max(numbered(folders.weights, "v"), default=0))


__all__ = ["Saver"]
