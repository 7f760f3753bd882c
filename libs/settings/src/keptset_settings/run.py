"""A whole run: all services' tables, and what they inherit from each other."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from .base import Table
from .inference import InferenceSettings
from .orchestrator import OrchestratorSettings
from .trainer import TrainerSettings


class WarmStartSettings(Table):
    """A tiny model trained from nothing on this machine, for demos and tests (keptset-trainer warm-start)."""

    task: Literal["reverse-text"] = "reverse-text"
    """What the model is warmed up on."""
    min_letters: int = Field(default=4, ge=1)
    """Fewest letters of a string."""
    max_letters: int = Field(default=12, ge=1)
    """Most letters of a string."""
    seed: int = 0
    """Seed of the model and of the data."""
    directory: Path | None = None
    """Where the model is cached. Unset: runs/models/<task>-<min>-<max>-seed<seed>."""


class RunSettings(Table):
    name: str = "run"
    """Names the run's directory."""

    runs_dir: Path = Path("runs")
    """Parent of the run's directory."""

    warm_start: WarmStartSettings | None = None
    """Make the model first, if it is not cached yet; services without a model take it."""

    inference: InferenceSettings = InferenceSettings()
    orchestrator: OrchestratorSettings = OrchestratorSettings()
    trainer: TrainerSettings = TrainerSettings()
