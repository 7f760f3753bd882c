"""What orchestrator and trainer tell each other: the structs, reading, writing and checking."""

from .arrangements import cut_sample, join_samples, pad_sample, split_sample
from .batch_view import BatchView
from .layout import (
    CROSS_ENTROPY,
    POLICY_GRADIENT,
    SampleArrays,
    StepResult,
    TrainingBatch,
    TrainingSample,
    WeightSpan,
    decode,
    encode,
)
from .sample_checks import check_batch, check_sample, check_samples

__all__ = [
    "CROSS_ENTROPY",
    "POLICY_GRADIENT",
    "BatchView",
    "SampleArrays",
    "StepResult",
    "TrainingBatch",
    "TrainingSample",
    "WeightSpan",
    "check_batch",
    "check_sample",
    "check_samples",
    "cut_sample",
    "decode",
    "encode",
    "join_samples",
    "pad_sample",
    "split_sample",
]
