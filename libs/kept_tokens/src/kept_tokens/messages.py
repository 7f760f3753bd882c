"""What orchestrator and trainer tell each other: the structs, reading, writing and checking."""

from .layout import (
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
    "SampleArrays",
    "StepResult",
    "TrainingBatch",
    "TrainingSample",
    "WeightSpan",
    "check_batch",
    "check_sample",
    "check_samples",
    "decode",
    "encode",
]
