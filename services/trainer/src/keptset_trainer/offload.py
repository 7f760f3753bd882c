"""Tensors whose memory leaves the device for a while: the tensors stay who they are, and so do their views.

A storage is copied to the host and shrunk to nothing; later it grows again, perhaps elsewhere, and is filled.
Whoever remembers an address (a recorded CUDA graph, a table of pointers) must forget it.
"""

import gc
from collections.abc import Iterable

import torch
from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor

CHUNK = 1 << 28
"""Bytes of host memory that are taken at a time. A power of two: torch rounds pinned memory up to one."""


class Offload:
    """Memory of one device, and the host's memory that it is copied to, which is kept from time to time."""

    def __init__(self, device: torch.device, chunk: int = CHUNK) -> None:
        """Host memory is pinned if `device` is a GPU."""
        self.device, self.chunk = device, chunk
        self.host: list[Tensor] = []
        self.kept: list[tuple[UntypedStorage, int]] = []
        """What is away, with its bytes."""
        self.scratch: list[tuple[UntypedStorage, int]] = []

    def leave(self, kept: Iterable[Tensor], scratch: Iterable[Tensor] = ()) -> int:
        """Have all of these leave the device; nobody may use them until `come_back`.

        Args:
            kept: come back as they are. What is elsewhere than on the device is left alone.
            scratch: come back as zeros.

        Returns:
            Bytes that left.
        """
        assert not self.kept
        assert not self.scratch
        self.kept = sized(storages(kept, self.device))
        known = {storage._cdata for storage, _ in self.kept}
        others = storages(scratch, self.device)
        self.scratch = sized([storage for storage in others if storage._cdata not in known])
        for piece, place in zip(*self._placed(), strict=True):
            place.copy_(piece, non_blocking=True)
        self._wait()
        for storage, _ in [*self.kept, *self.scratch]:
            assert storage.resizable(), "a storage that somebody else owns"
            storage.resize_(0)
        self._give_back()
        return sum(size for _, size in [*self.kept, *self.scratch])

    def come_back(self) -> int:
        """Put all that left where it can be used; how many bytes.

        Raises:
            ValueError: the device has not the room.
        """
        away = [*self.kept, *self.scratch]
        size = sum(size for _, size in away)
        try:
            for storage, bytes_of_it in away:
                storage.resize_(bytes_of_it)
        except torch.OutOfMemoryError as error:
            raise ValueError(
                f"the trainer's {size / 1e9:.1f} GB do not fit back on {self.device}, with what others have "
                f"there: {str(error).splitlines()[0]}"
            ) from error
        for piece, place in zip(*self._placed(), strict=True):
            piece.copy_(place, non_blocking=True)
        for storage, _ in self.scratch:
            as_bytes(storage).zero_()
        self._wait()
        self.kept, self.scratch = [], []
        return size

    def _placed(self) -> tuple[list[Tensor], list[Tensor]]:
        """Pieces of what is kept, and where each lies on the host, one behind the other."""
        pieces: list[Tensor] = []
        places: list[Tensor] = []
        at = 0
        for storage, _ in self.kept:
            left = as_bytes(storage)
            while len(left):
                number, start = divmod(at, self.chunk)
                while number >= len(self.host):
                    self.host.append(self._more())
                size = min(len(left), self.chunk - start)
                pieces.append(left[:size])
                places.append(self.host[number][start : start + size])
                left, at = left[size:], at + size
        return pieces, places

    def _more(self) -> Tensor:
        return torch.empty(self.chunk, dtype=torch.uint8, pin_memory=self.device.type == "cuda")

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _give_back(self) -> None:
        """To the driver: what torch keeps for the next allocation is as good as taken to another process."""
        if self.device.type == "cuda":
            gc.collect()
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()


def storages(tensors: Iterable[Tensor], device: torch.device) -> list[UntypedStorage]:
    """Each storage on the device once, in the order in which it is met; of a DTensor its local part's."""
    found: dict[int, UntypedStorage] = {}
    for tensor in tensors:
        local = tensor.detach()
        if isinstance(local, DTensor):
            local = local.to_local()
        if local.device.type == device.type:
            storage = local.untyped_storage()
            found.setdefault(storage._cdata, storage)
    return list(found.values())


def sized(several: list[UntypedStorage]) -> list[tuple[UntypedStorage, int]]:
    """With their bytes; what has none is left out."""
    return [(storage, storage.nbytes()) for storage in several if storage.nbytes()]


def as_bytes(storage: UntypedStorage) -> Tensor:
    """All of a storage as uint8 [bytes]."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
