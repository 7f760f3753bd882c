"""Environments: what is asked and how an answer is rewarded."""

from typing import Any

from keptset_settings.orchestrator import ReverseTextSettings

from .base import Environment
from .reverse_text import ReverseText

__all__ = ["Environment", "ReverseText", "make_environment"]


def make_environment(settings: ReverseTextSettings) -> Environment[Any]:
    """The environment that `[[orchestrator.train.source]] environment` describes."""
    return ReverseText(settings.min_letters, settings.max_letters)
