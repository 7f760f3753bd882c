"""The demo's model, and processes on it, for all tests that start services."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from .started import Started

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The model of `make demo`, from its cache or made there."""
    directory = ROOT / "runs" / "models" / "reverse-text-4-12-seed0"
    command = [sys.executable, "-m", "keptset_trainer", "warm-start", "--directory", str(directory)]
    if not (directory / "recipe.json").exists():
        subprocess.run(command, check=True, timeout=800)
    return directory


@pytest.fixture
def started(tmp_path: Path, demo_model: Path) -> Iterator[Started]:
    """Starts processes; whatever a failed test leaves is killed."""
    processes = Started(tmp_path, demo_model)
    yield processes
    processes.end()
