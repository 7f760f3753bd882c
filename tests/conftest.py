"""The demo's model, for all tests that start services."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The model of `make demo`, from its cache or made there."""
    directory = ROOT / "runs" / "models" / "reverse-text-4-12-seed0"
    command = [sys.executable, "-m", "keptset_trainer", "warm-start", "--directory", str(directory)]
    if not (directory / "recipe.json").exists():
        subprocess.run(command, check=True, timeout=280)
    return directory
