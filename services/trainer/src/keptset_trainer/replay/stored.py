"""What a run still has of a step: its batch and the weights that sampled it, or which setting keeps them."""

from pathlib import Path

from kept_tokens.messages import BatchView

from ..durable import mapped
from ..folders import Folders, numbered


def stored_batch(folders: Folders, step: int | None) -> BatchView:
    """The batch of `step`; None = the newest one that was trained, or else the newest.

    Raises:
        ValueError: it is not there, or cannot be read.
    """
    there = numbered(folders.spool, "step-")
    if step is None:
        if not there:
            raise ValueError(f"{folders.spool} holds no batch: nothing was accepted yet, or it was removed")
        step = max((one for one in there if folders.result(one).exists()), default=max(there))
    if step not in there:
        known = f"it has those of steps {_list(list(there))}" if there else "it has none"
        why = "that step was not accepted yet"
        if folders.result(step).exists():
            needed = max(numbered(folders.results, "step-"), default=step) - step + 1
            why = (
                f"trainer.keep_batches keeps the last ones alone: a run with trainer.keep_batches = {needed} "
                f"and trainer.keep_weights = {needed + 1} would still have it"
            )
        raise ValueError(f"the batch of step {step} is not in {folders.spool} ({known}); {why}")
    try:
        batch = BatchView(mapped(there[step]))
    except ValueError as error:
        raise ValueError(f"{there[step]}: {error}") from None
    if batch.step != step:
        raise ValueError(f"{there[step]} says that it is of step {batch.step}")
    return batch


def stored_weights(folders: Folders, version: int) -> Path:
    """A directory with the model of `version`: as published, or the checkpoint that it was published from.

    Raises:
        ValueError: neither is there any more.
    """
    for path in (folders.version(version), folders.checkpoint(version)):
        if path.is_dir():
            return path
    there = numbered(folders.weights, "v")
    known = f"it has versions {_list(list(there))}" if there else "it has none"
    needed = max(there, default=version) - version + 1
    raise ValueError(
        f"weights version {version} is not in {folders.weights} ({known}) and there is no checkpoint of it; "
        f"trainer.keep_weights keeps the last ones alone: a run with trainer.keep_weights = {needed} would "
        "still have it"
    )


def _list(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
