"""Settings of every Keptset service and of a whole run; validated anywhere, without torch or vllm."""

from .algorithms import (
    Algorithm,
    GrpoAlgorithm,
    MaxRlAlgorithm,
    OpdAlgorithm,
    OpsdAlgorithm,
    RlooAlgorithm,
    SftAlgorithm,
)
from .environments import (
    ArithmeticSettings,
    CalculatorSettings,
    EnvironmentSettings,
    ReverseTextSettings,
    WordProblemsSettings,
)
from .errors import Problem, SettingsError, SettingsWarning
from .filters import Filter, GibberishFilter, RepetitionFilter, ZeroAdvantageFilter
from .generators import EndpointSettings, FrozenGenerator, PolicyGenerator
from .help import help_text, settings_table
from .inference import CAPTURE_WIDTH, InferenceSettings
from .load import Examination, examine_settings, load_run, load_service, read_run
from .orchestrator import EvalSettings, OrchestratorSettings, TrainSettings
from .resolve import resolve_inference, resolve_orchestrator, resolve_run, resolve_trainer
from .rollout_sources import EvalSourceSettings, SamplingSettings, SourceSettings
from .run import RunSettings, WarmStartSettings
from .sampling import inherit, is_truncating, limits
from .source_rules import is_frozen, policy_sources, uses_full_scores
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
    "Algorithm",
    "ArithmeticSettings",
    "CalculatorSettings",
    "ClippedRatioLoss",
    "EndpointSettings",
    "EnvironmentSettings",
    "EvalSettings",
    "EvalSourceSettings",
    "Examination",
    "Filter",
    "FrozenGenerator",
    "GeometricMeanLoss",
    "GibberishFilter",
    "GrpoAlgorithm",
    "InferenceSettings",
    "Loss",
    "MaxRlAlgorithm",
    "OpdAlgorithm",
    "OpsdAlgorithm",
    "OptimizerSettings",
    "OrchestratorSettings",
    "PolicyGenerator",
    "Problem",
    "RepetitionFilter",
    "ReverseTextSettings",
    "RlooAlgorithm",
    "RunSettings",
    "SamplingSettings",
    "SequenceProductLoss",
    "SettingsError",
    "SettingsWarning",
    "SftAlgorithm",
    "SourceSettings",
    "TrainSettings",
    "TrainerSettings",
    "TruncatedWeightLoss",
    "WarmStartSettings",
    "WordProblemsSettings",
    "ZeroAdvantageFilter",
    "examine_settings",
    "help_text",
    "inherit",
    "is_frozen",
    "is_truncating",
    "limits",
    "load_run",
    "load_service",
    "policy_sources",
    "read_run",
    "resolve_inference",
    "resolve_orchestrator",
    "resolve_run",
    "resolve_trainer",
    "service_environment",
    "settings_table",
    "to_toml",
    "uses_full_scores",
    "write_service_configs",
]
