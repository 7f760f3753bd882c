"""The objectives: one file each, and what they share in `ratio`."""

from collections.abc import Callable
from functools import partial

from keptset_settings import (
    ClippedRatioLoss,
    GeometricMeanLoss,
    Loss,
    SequenceProductLoss,
    TruncatedWeightLoss,
)

from .clipped_ratio import clipped_ratio
from .geometric_mean import geometric_mean
from .ratio import LossSum
from .sequence_product import sequence_product
from .truncated_weight import truncated_weight

__all__ = [
    "LossSum",
    "clipped_ratio",
    "geometric_mean",
    "loss_function",
    "sequence_product",
    "truncated_weight",
]


def loss_function(settings: Loss) -> Callable[..., LossSum]:
    """The chosen objective with its bounds filled in; what it is called with is in `ratio`."""
    match settings:
        case ClippedRatioLoss():
            return partial(clipped_ratio, clip_low=settings.clip_low, clip_high=settings.clip_high)
        case TruncatedWeightLoss():
            return partial(truncated_weight, max_weight=settings.max_weight)
        case SequenceProductLoss():
            return partial(sequence_product, low=settings.low, high=settings.high)
        case GeometricMeanLoss():
            return partial(geometric_mean, low=settings.low, high=settings.high)
