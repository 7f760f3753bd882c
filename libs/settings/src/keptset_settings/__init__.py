"""Settings of every Keptset service and of a whole run; validated anywhere, without torch or vllm."""

from .errors import Problem, SettingsError, SettingsWarning
from .help import help_text, settings_table
from .inference import CAPTURE_WIDTH, InferenceSettings
from .load import load_run, load_service, read_run
from .orchestrator import (
    OrchestratorSettings,
    ReverseTextSettings,
    SamplingSettings,
    SourceSettings,
    TrainSettings,
)
from .resolve import resolve_inference, resolve_orchestrator, resolve_run, resolve_trainer
from .run import RunSettings, WarmStartSettings
from .sampling import is_truncating
from .toml import service_environment, to_toml, write_service_configs
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
    "Problem",
    "ReverseTextSettings",
    "RunSettings",
    "SamplingSettings",
    "SequenceProductLoss",
    "SettingsError",
    "SettingsWarning",
    "SourceSettings",
    "TrainSettings",
    "TrainerSettings",
    "TruncatedWeightLoss",
    "WarmStartSettings",
    "help_text",
    "is_truncating",
    "load_run",
    "load_service",
    "read_run",
    "resolve_inference",
    "resolve_orchestrator",
    "resolve_run",
    "resolve_trainer",
    "service_environment",
    "settings_table",
    "to_toml",
    "write_service_configs",
]
