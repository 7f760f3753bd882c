"""Settings of every Keptset service and of a whole run; validated anywhere, without torch or vllm."""

from .errors import SettingsError
from .inference import CAPTURE_WIDTH, InferenceSettings
from .load import load_run, load_service
from .orchestrator import (
    OrchestratorSettings,
    ReverseTextSettings,
    SamplingSettings,
    SourceSettings,
    TrainSettings,
)
from .resolve import resolve_run
from .run import RunSettings, WarmStartSettings
from .toml import to_toml
from .trainer import (
    ClippedRatioLoss,
    GeometricMeanLoss,
    Loss,
    OptimizerSettings,
    SequenceProductLoss,
    TrainerSettings,
    TruncatedWeightLoss,
)

__all__ = [
    "CAPTURE_WIDTH",
    "ClippedRatioLoss",
    "GeometricMeanLoss",
    "InferenceSettings",
    "Loss",
    "OptimizerSettings",
    "OrchestratorSettings",
    "ReverseTextSettings",
    "RunSettings",
    "SamplingSettings",
    "SequenceProductLoss",
    "SettingsError",
    "SourceSettings",
    "TrainSettings",
    "TrainerSettings",
    "TruncatedWeightLoss",
    "WarmStartSettings",
    "load_run",
    "load_service",
    "resolve_run",
    "to_toml",
]
