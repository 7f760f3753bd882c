"""Gradients in half precision added up in float32, in as few launches as there can be."""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

HAS_TRITON = find_spec("triton") is not None


def kernels_take(tensors: Sequence[Tensor]) -> bool:
    """Whether those of `many_tensors` do: on CUDA, of one type, dense and aligned."""
    if not HAS_TRITON or not all(one.is_cuda and one.dtype == tensors[0].dtype for one in tensors):
        return False
    from . import many_tensors  # not at the top: Triton need not be installed

    return many_tensors.fits(tensors)


class GradientSums:
    """Adds to sums whose memory stays the same from step to step."""

    def __init__(self) -> None:
        self.tables: Any = None

    def add(self, gradients: Sequence[Tensor], sums: Sequence[Tensor], fresh: bool) -> None:
        """`sums` = gradients if `fresh`, else += gradients; pair by pair of the same shape."""
        pairs = list(zip(gradients, sums, strict=True))
        if HAS_TRITON and pairs and pairs[0][1].is_cuda:
            from . import many_tensors  # not at the top: Triton need not be installed

            if self.tables is None:
                self.tables = many_tensors.Tables()
            kind = pairs[0][0].dtype
            fit = [pair for pair in pairs if pair[0].dtype == kind and many_tensors.fits(pair)]
            if fit:
                many_tensors.sum_up(self.tables, *zip(*fit, strict=True), fresh)
            known = {id(pair) for pair in fit}
            pairs = [pair for pair in pairs if id(pair) not in known]
        if pairs:
            rest = [list(group) for group in zip(*pairs, strict=True)]
            (torch._foreach_copy_ if fresh else torch._foreach_add_)(rest[1], rest[0])
