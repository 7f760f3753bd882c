"""NCCL's C interface, as far as weights are sent by it.

Not `torch.cuda.nccl`: its `init_rank` raises SystemError on every Python before 3.13
(https://github.com/pytorch/pytorch/issues/38019), and it has no `ncclCommAbort`.
"""

import ctypes
import functools

import torch
from torch import Tensor

SONAME = "libnccl.so.2"
UNIQUE_ID_BYTES = 128
TYPES = {torch.uint8: 1, torch.float32: 7}
"""`ncclDataType_t`."""
SUM = 0
"""`ncclRedOp_t`."""


class NcclError(RuntimeError):
    """What NCCL says that has failed."""


class UniqueId(ctypes.Structure):
    """`ncclUniqueId`, which is passed by value."""

    _fields_ = (("internal", ctypes.c_char * UNIQUE_ID_BYTES),)


class Library:
    """NCCL as it is in this process: torch has loaded it, and the name finds that one.

    Raises:
        NcclError: there is none.
    """

    def __init__(self, path: str = SONAME) -> None:
        try:
            library = ctypes.CDLL(path)  # its calls let other threads of Python run
        except OSError as error:
            raise NcclError(f"NCCL, which torch for CUDA brings, is not there: {error}") from error
        number, pointer, size = ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t
        self.functions = {}
        for name, *arguments in (
            ("ncclGetVersion", ctypes.POINTER(number)),
            ("ncclGetUniqueId", ctypes.POINTER(UniqueId)),
            ("ncclCommInitRank", ctypes.POINTER(pointer), number, UniqueId, number),
            ("ncclAllReduce", pointer, pointer, size, number, number, pointer, pointer),
            ("ncclBroadcast", pointer, pointer, size, number, number, pointer, pointer),
            ("ncclCommAbort", pointer),
        ):
            self.functions[name] = getattr(library, name)
            self.functions[name].argtypes, self.functions[name].restype = arguments, number
        for name, *arguments in (("ncclGetErrorString", number), ("ncclGetLastError", pointer)):
            self.functions[name] = getattr(library, name)
            self.functions[name].argtypes, self.functions[name].restype = arguments, ctypes.c_char_p

    def call(self, name: str, *arguments: object) -> None:
        """Call one that answers with an `ncclResult_t`.

        Raises:
            NcclError: it is not `ncclSuccess`.
        """
        if result := self.functions[name](*arguments):
            said = self.functions["ncclGetErrorString"](result).decode()
            last = (self.functions["ncclGetLastError"](None) or b"").decode().strip()
            raise NcclError(f"{name}: {said}" + (f" ({last})" if last else ""))

    def version(self) -> str:
        """Such as 2.28.9."""
        code = ctypes.c_int()
        self.call("ncclGetVersion", ctypes.byref(code))
        return f"{code.value // 10000}.{code.value // 100 % 100}.{code.value % 100}"

    def unique_id(self) -> bytes:
        """That the ranks of a new group find each other by; this process must be one of them."""
        made = UniqueId()
        self.call("ncclGetUniqueId", ctypes.byref(made))
        return ctypes.string_at(ctypes.addressof(made), UNIQUE_ID_BYTES)


@functools.cache
def library() -> Library:
    """The process's own."""
    return Library()


class Communicator:
    """A rank of a group, on the current device. The constructor waits, without a bound, for all others.

    Args:
        unique_id: UNIQUE_ID_BYTES, of `Library.unique_id`.
        world_size: ranks of the group.
        rank: this one.

    Raises:
        NcclError: NCCL refuses.
    """

    def __init__(self, unique_id: bytes, world_size: int, rank: int, nccl: Library | None = None) -> None:
        assert len(unique_id) == UNIQUE_ID_BYTES, len(unique_id)
        self.nccl = nccl or library()
        self.pointer = ctypes.c_void_p()
        by_value = UniqueId.from_buffer_copy(unique_id)
        self.nccl.call("ncclCommInitRank", ctypes.byref(self.pointer), world_size, by_value, rank)

    def all_reduce(self, tensor: Tensor, stream: int) -> None:
        """Sum of all ranks, in place; `stream`: a `cudaStream_t`."""
        count, kind = tensor.numel(), TYPES[tensor.dtype]
        at = _address(tensor)
        self.nccl.call("ncclAllReduce", at, at, count, kind, SUM, self.pointer, stream)

    def broadcast(self, tensor: Tensor, root: int, stream: int) -> None:
        """The root's to all others, in place; `stream`: a `cudaStream_t`."""
        count, kind = tensor.numel(), TYPES[tensor.dtype]
        at = _address(tensor)
        self.nccl.call("ncclBroadcast", at, at, count, kind, root, self.pointer, stream)

    def abort(self) -> None:
        """Leave the group, and end what waits in it on the device."""
        pointer, self.pointer = self.pointer, ctypes.c_void_p()
        self.nccl.call("ncclCommAbort", pointer)


def _address(tensor: Tensor) -> int:
    assert tensor.is_contiguous()
    return tensor.data_ptr()
