"""A whole run: all services' tables, and what they inherit from each other."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, NonNegativeInt, model_validator

from .base import Name, Table, Transfer, require_order
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
    """Where the model is cached. Unset: <runs_dir>/models/<task>-<min>-<max>-seed<seed>."""

    @model_validator(mode="after")
    def _letters(self) -> Self:
        require_order(self.min_letters, "min_letters", self.max_letters, "max_letters")
        return self


class WeightsSettings(Table):
    """How weights get from the trainer to inference; the three services take it from here."""

    transfer: Transfer = "files"
    """"files": inference reads what the trainer publishes, works everywhere with a shared directory. "nccl":
    from GPU to GPU, through vLLM's weight transfer; the files are published all the same."""


def _different(numbers: list[int]) -> list[int]:
    if len(set(numbers)) < len(numbers):
        raise ValueError("names one twice")
    return numbers


Gpus = Annotated[list[NonNegativeInt], Field(min_length=1), AfterValidator(_different)]


class GpusSettings(Table):
    """Which GPUs `keptset run` gives to whom, counted from 0 among those that it sees itself."""

    inference: Gpus | None = None
    """Of the engine. Unset: as many as it has workers, if the trainer has others then; else all."""
    trainer: Gpus | None = None
    """Of the trainer. Unset: those that the engine leaves; all if it leaves none, or with colocated."""


class RunSettings(Table):
    name: Name = "run"
    """Names the run's directory."""

    runs_dir: Path = Path("runs")
    """Parent of the run's directory."""

    expect_reward: float | None = None
    """Least mean reward of the last five steps; `keptset run` ends with 1 below it. Unset: any will do."""

    restarts: int = Field(default=0, ge=0)
    """How often `keptset run` starts a service that died again without a step being finished in between. 0:
    the run stops with the last lines of its log; `keptset resume` goes on with it."""

    warm_start: WarmStartSettings | None = None
    """Make the model first, if it is not cached yet; services without a model take it."""

    colocated: bool = False
    """One GPU for both: the engine sleeps while the trainer steps, and the trainer's states are in the host's
    memory while the engine samples. Needs orchestrator.max_async_level = 0 and weights.transfer = "files"."""

    gpus: GpusSettings = GpusSettings()
    """Which GPUs of this machine engine and trainer see."""

    weights: WeightsSettings = WeightsSettings()
    """How weights get from the trainer to inference."""

    inference: InferenceSettings = InferenceSettings()
    """The server that samples."""

    orchestrator: OrchestratorSettings = OrchestratorSettings()
    """The process that collects rollouts and drives the other two."""

    trainer: TrainerSettings = TrainerSettings()
    """The process that trains and publishes weights."""
