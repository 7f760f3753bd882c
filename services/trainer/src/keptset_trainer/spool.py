"""What the ingest process knows of the steps: accepted batches on disk and the results of the loop."""

import json
import os
from pathlib import Path
from typing import Any

from kept_tokens.messages import BatchView, StepResult, decode

from .durable import fsync_path, mapped
from .folders import Folders, numbered


class StepConflict(ValueError):
    """A batch that cannot be accepted beside what is there."""


class SpoolFull(RuntimeError):
    """A batch that may be sent again when another one has been trained."""


class SpoolBroken(RuntimeError):
    """The disk failed after a batch became visible to the training loop: what a crash leaves is unknown."""


class Spool:
    """Accepted steps 1 ... next_step - 1, without gaps. Not thread-safe: one process, one task at a time.

    Args:
        folders: Of the trainer.
        max_waiting: The most batches that wait to be trained. Those that are there already stay.
    """

    def __init__(self, folders: Folders, max_waiting: int) -> None:
        self.folders, self.max_waiting = folders, max_waiting
        self.hashes: dict[int, bytes] = {}
        # Looked at before the results: external ranks remove a batch when its result is there, right now.
        spooled = numbered(folders.spool, "step-")
        for step, path in numbered(folders.results, "step-").items():
            self.hashes[step] = hash_of_result(path)
        for step, path in spooled.items():
            if step not in self.hashes:
                try:
                    self.hashes[step] = whole_batch(path, step)
                except FileNotFoundError:  # external ranks have trained it meanwhile, and others after it
                    self.hashes[step] = hash_of_result(folders.result(step))
        if sorted(self.hashes) != list(range(1, len(self.hashes) + 1)):
            raise ValueError(
                f"{folders.output}: steps {sorted(self.hashes)} are there, not 1, 2, 3 ... without a gap; "
                "put back the missing files of spool/ or results/, or choose another trainer.output_dir"
            )
        self.trained_step = 0
        self.look_for_results()

    @property
    def next_step(self) -> int:
        """The first step that has not been accepted yet."""
        return len(self.hashes) + 1

    def look_for_results(self) -> int:
        """Number of the last trained step."""
        while self.folders.result(self.trained_step + 1).exists():
            self.trained_step += 1
        return self.trained_step

    def require_room(self) -> None:
        """Raise SpoolFull if no new batch may come now."""
        waiting = self.next_step - 1 - self.look_for_results()
        if waiting >= self.max_waiting:
            raise SpoolFull(
                f"step {self.next_step}: {waiting} batches wait to be trained, from step "
                f"{self.trained_step + 1} on, and trainer.max_waiting_batches = {self.max_waiting}; send it "
                "again when that step is done"
            )

    def accept(self, incoming: Path, step: int, content_hash: bytes) -> bool:
        """Take a checked batch in: True if it is new, False if it was there already.

        `incoming` is a file beside the spool's that holds the encoded batch. It is on the disk under its
        final name when this returns True, and left alone otherwise.

        Raises:
            StepConflict: the step is there with other content, or is not the next one.
            SpoolFull: too many wait; nothing was accepted.
            OSError: the disk did not take it; nothing was accepted.
            SpoolBroken: it was renamed into place, but the disk did not confirm the name.
        """
        if step in self.hashes:
            if self.hashes[step] == content_hash:
                return False
            raise StepConflict(
                f"step {step} was accepted with content {self.hashes[step].hex()}, this batch has content "
                f"{content_hash.hex()}; the accepted batch wins: ask for its result with GET"
            )
        if step != self.next_step:
            raise StepConflict(f"step {step} is out of order: the next step is {self.next_step}")
        self.require_room()
        fsync_path(incoming)
        final = self.folders.batch(step)
        os.rename(incoming, final)
        try:
            fsync_path(final.parent)
        except OSError as failure:
            # The loop may be training it already, so it cannot be taken back.
            raise SpoolBroken(
                f"step {step}: the batch is in {final}, but the disk did not confirm its name "
                f"({failure.strerror}); look at the disk, then start the trainer again: "
                "it takes up what is there"
            ) from failure
        self.hashes[step] = content_hash
        return True

    def scores(self, step: int) -> list[bytes]:
        """The logprobs over the whole vocabulary that `step` gave, of each sample; none if they are gone."""
        try:
            return decode(self.folders.score(step).read_bytes(), StepResult).full_logprobs
        except FileNotFoundError:
            return []

    def result(self, step: int) -> dict[str, Any] | None:
        """What the loop wrote after `step`, or None before."""
        try:
            return json.loads(self.folders.result(step).read_bytes())
        except FileNotFoundError:
            return None


def hash_of_result(path: Path) -> bytes:
    """The content hash of the batch that gave it."""
    return bytes.fromhex(json.loads(path.read_bytes())["content_hash"])


def whole_batch(path: Path, step: int) -> bytes:
    """The content hash of a batch in the spool, which is that of its samples.

    Raises:
        ValueError: the file is not what was accepted.
    """
    way_out = "it is not what was accepted; remove it, and the orchestrator gives the step another batch"
    try:
        batch = BatchView(mapped(path))
    except ValueError as error:
        raise ValueError(f"{path}: {error}; {way_out}") from None
    if batch.step != step or batch.hash_of_content() != batch.content_hash:
        raise ValueError(f"{path}: its step or its content hash does not fit; {way_out}")
    return batch.content_hash
