"""One line for whatever the disk refuses while the loop writes: what, where, why, and what is safe."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

from .durable import in_words

FROM_ITS_BATCH = "every accepted batch is there, and the step is trained from it"


class DiskRefused(OSError):
    """Something could not be written. What was acknowledged is there; a start goes on from it."""


@contextmanager
def writing(what: str, where: Path, then: str = FROM_ITS_BATCH) -> Iterator[None]:
    """Name the errors of the disk in the body.

    Args:
        what: Is written, with its step.
        where: The folder that it goes into.
        then: What becomes of it after the next start.

    Raises:
        DiskRefused: the disk did not take it, whichever library wrote.
    """
    try:
        yield
    except (OSError, SafetensorError, CheckpointException) as error:
        refused = _error_of_the_disk(error)
        if refused is None:
            raise
        raise DiskRefused(
            f"{what} cannot be written to {where}: {in_words(refused)}; free some space or look at the disk, "
            f"then start again: {then}"
        ) from error


def _error_of_the_disk(error: BaseException) -> OSError | None:
    """The OSError inside what torch and safetensors make of it."""
    if isinstance(error, OSError):
        return error
    if isinstance(error, CheckpointException):
        causes = [cause for cause, _ in error.failures.values()]
        return next((found for cause in causes if (found := _error_of_the_disk(cause))), None)
    number = re.search(r"os error (\d+)", str(error)) if isinstance(error, SafetensorError) else None
    return OSError(int(number[1]), os.strerror(int(number[1]))) if number else None
