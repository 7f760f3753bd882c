"""A version that comes over NCCL: what the request says of it, in the words of vLLM's weight transfer."""

from typing import Annotated, Any

import msgspec

from ..errors import RequestError
from .published import TIED_HEAD
from .running_model import RunningModel

UNIQUE_ID = r"^[A-Za-z0-9+/]{170}[A-Za-z0-9+/=]{2}$"
DTYPES = ("float64", "float32", "float16", "bfloat16")


class Transfer(msgspec.Struct, forbid_unknown_fields=True):
    """How the workers find the trainer, and what it sends; the trainer's `group` answer has most of it."""

    unique_id: Annotated[str, msgspec.Meta(pattern=UNIQUE_ID)]
    """Of the NCCL group, base64 of 128 bytes. Workers that are in it already stay there."""
    rank_offset: Annotated[int, msgspec.Meta(ge=1)]
    """The rank of this server's first worker; the trainer is rank 0."""
    world_size: Annotated[int, msgspec.Meta(ge=2)]
    bucket_bytes: Annotated[int, msgspec.Meta(ge=1)]
    seconds: Annotated[float, msgspec.Meta(gt=0, le=3600)]
    """For all of it."""
    tensors: list[tuple[str, str, list[int]]]
    """Name, type and shape of each, in the order in which they come."""

    def init_info(self) -> dict[str, Any]:
        """`NCCLWeightTransferInitInfo` of vLLM 0.32."""
        return {
            "nccl_unique_id_b64": self.unique_id,
            "rank_offset": self.rank_offset,
            "world_size": self.world_size,
            "packed": True,
            "packed_buffer_size_bytes": self.bucket_bytes,
        }

    def update_info(self) -> dict[str, Any]:
        """`NCCLWeightTransferUpdateInfo` of vLLM 0.32."""
        names, dtypes, shapes = (list(column) for column in zip(*self.tensors, strict=True))
        return {"names": names, "dtype_names": dtypes, "shapes": shapes}


def check_transfer(version: int, transfer: Transfer, model: RunningModel) -> None:
    """What comes fits the running model: the same tensors, no more and no less.

    Raises:
        RequestError: 422, naming the tensor.
    """
    sent = {name: (dtype, tuple(shape)) for name, dtype, shape in transfer.tensors}
    optional = {TIED_HEAD} if model.tied else set()

    def refuse(text: str) -> RequestError:
        return RequestError(f"version {version}: {text}", 422, "other_model")

    if len(sent) != len(transfer.tensors):
        raise refuse("a tensor is there twice")
    for name in sorted(model.shapes.keys() - sent.keys() - optional):
        raise refuse(f"{name} is missing, which the running model has")
    for name in sorted(sent.keys() - model.shapes.keys() - optional):
        raise refuse(f"{name} is unknown to the running model")
    for name, (dtype, shape) in sorted(sent.items()):
        expected = model.shapes.get(name)
        if expected is not None and shape != tuple(expected):
            raise refuse(f"{name} has shape {list(shape)}, in the running model it has {list(expected)}")
        if dtype not in DTYPES:
            raise refuse(f"{name} is {dtype}; send {', '.join(DTYPES)}")


__all__ = ["Transfer", "check_transfer"]
