"""Weights as a stream of byte buffers, cut as vLLM's packed NCCL transfer cuts them."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor


def buckets(tensors: Iterable[Tensor], bucket_bytes: int) -> Iterator[Tensor]:
    """uint8 buffers: tensor after tensor, a new buffer once one has *more* than `bucket_bytes`.

    The receiver cuts by the same rule (vLLM 0.32, `packed_nccl_broadcast_consumer`), from names, shapes and
    types alone, so nothing says how long a buffer is.
    """
    parts: list[Tensor] = []
    size = 0
    for tensor in tensors:
        parts.append(tensor.detach().contiguous().view(-1).view(torch.uint8))
        size += parts[-1].numel()
        if size > bucket_bytes:
            yield torch.cat(parts)
            parts, size = [], 0
    if parts:
        yield torch.cat(parts)
