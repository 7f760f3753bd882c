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
    SumsSettings,
    WordProblemsSettings,
)
from .errors import Problem, SettingsError, SettingsWarning
from .filters import Filter, GibberishFilter, RepetitionFilter, ZeroAdvantageFilter
from .generators import EndpointSettings, FrozenGenerator, PolicyGenerator
from .help import help_text, settings_help, settings_table
from .inference import CAPTURE_WIDTH, DRAIN_SECONDS, InferenceSettings
from .load import Examination, examine_settings, load_run, load_service, read_run
from .models import is_absent_directory
from .orchestrator import EvalSettings, OrchestratorSettings, TrainSettings
from .resolve import reachable, resolve_inference, resolve_orchestrator, resolve_run, resolve_trainer
from .rollout_sources import EvalSourceSettings, SamplingSettings, SourceSettings
from .run import RunSettings, WarmStartSettings
from .sampling import inherit, is_truncating, limits
from .secret_files import secret_variables, set_secrets
from .shares import PromptShares
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
    "DRAIN_SECONDS",
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
    "PromptShares",
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
    "SumsSettings",
    "TrainSettings",
    "TrainerSettings",
    "TruncatedWeightLoss",
    "WarmStartSettings",
    "WordProblemsSettings",
    "ZeroAdvantageFilter",
    "examine_settings",
    "help_text",
    "inherit",
    "is_absent_directory",
    "is_frozen",
    "is_truncating",
    "limits",
    "load_run",
    "load_service",
    "policy_sources",
    "reachable",
    "read_run",
    "resolve_inference",
    "resolve_orchestrator",
    "resolve_run",
    "resolve_trainer",
    "secret_variables",
    "service_environment",
    "set_secrets",
    "settings_help",
    "settings_table",
    "to_toml",
    "uses_full_scores",
    "write_service_configs",
]
