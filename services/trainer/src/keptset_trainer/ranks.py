"""The processes that train together, one a device: who they are, and the few words they exchange."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")
PATIENCE = timedelta(minutes=10)
"""How long a rank waits for another one inside a step, before it ends with an error."""
SECONDS_BETWEEN_WORDS = 30.0
"""Of the first rank while it works alone, so that the others do not take it for one that is gone."""
BUSY = 2


@dataclass(frozen=True)
class Ranks:
    """This process among those that train together; alone if `group` is None."""

    device: torch.device
    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    """Words between hosts' CPUs (gloo); tensors on `device` go through the default group."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def from_first(self, number: int) -> int:
        """The first rank's number, on all of them."""
        if self.group is None:
            return number
        word = torch.tensor([number])
        dist.broadcast(word, 0, group=self.group)
        return int(word)

    def gathered(self, value: T) -> list[T]:
        """Every rank's value, in the order of the ranks."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def add_up(self, values: Tensor) -> Tensor:
        """The sum over the ranks, in place, without the host waiting for it."""
        if self.group is not None:
            dist.all_reduce(values)
        return values

    def first_alone(self, work: Callable[[], None]) -> None:
        """`work` on the first rank; the others wait until it is done, however long a disk takes.

        Raises:
            RuntimeError: on the others, if the first one failed.
        """
        if self.group is None:
            work()
            return
        error: BaseException | None = None
        if self.is_first:
            with self._busy():
                try:
                    work()
                except BaseException as raised:
                    error = raised
        while (answer := self.from_first(int(error is not None))) == BUSY:
            pass
        if error is not None:
            raise error
        if answer:
            raise RuntimeError(f"rank {self.rank}: rank 0 failed; its log says why")

    @contextmanager
    def _busy(self) -> Iterator[None]:
        """A while in which the first rank says that it is, and says nothing else to the others."""
        over = threading.Event()

        def say() -> None:
            while not over.wait(SECONDS_BETWEEN_WORDS):
                try:
                    self.from_first(BUSY)
                except RuntimeError:  # others are gone, as the first rank's own next word will find
                    return

        thread = threading.Thread(target=say, name="busy", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def found_by_first(self, look: Callable[[], T]) -> T:
        """What the first rank finds, on all of them: on a shared file system another node may see a directory
        as it was a minute ago.

        Raises:
            RuntimeError: on the others, if the first one failed.
        """
        found: list[T] = []
        self.first_alone(lambda: found.append(look()))
        return self.gathered(found)[0][0]


def join(device: str, rendezvous: str | None = None) -> Ranks:
    """Meet the other ranks, if there are any: what torchrun and the ingest process say in the environment.

    Args:
        device: "cpu", "cuda" or "auto"; on CUDA rank n of a host takes its n-th GPU.
        rendezvous: where to meet, a URL for `init_process_group`; None = MASTER_ADDR and MASTER_PORT.

    Raises:
        ValueError: more ranks on this host than GPUs.
    """
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    here = torch.device(kind)
    if kind == "cuda":
        local, gpus = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
        if local >= gpus:
            raise ValueError(
                f"trainer.ranks: rank {local} of this host has no GPU, {gpus} are visible; lower it"
            )
        here = torch.device("cuda", local)
        torch.cuda.set_device(here)
    if size == 1:
        return Ranks(here)
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        init_method=rendezvous or "env://",
        rank=rank,
        world_size=size,
        timeout=PATIENCE,
    )
    words = dist.new_group(backend="gloo", timeout=PATIENCE)
    assert isinstance(words, dist.ProcessGroup)
    return Ranks(here, rank, size, words)


def leave() -> None:
    """Take leave of the other ranks."""
    if dist.is_initialized():
        dist.destroy_process_group()
