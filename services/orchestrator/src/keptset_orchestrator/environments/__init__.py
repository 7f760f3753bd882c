"""Environments: what is asked and how an answer is rewarded."""

from typing import Any

from keptset_settings import (
    ArithmeticSettings,
    CalculatorSettings,
    EnvironmentSettings,
    ReverseTextSettings,
    SumsSettings,
    WordProblemsSettings,
)

from .arithmetic import Arithmetic
from .base import Environment, MultiTurn
from .calculator import Calculator
from .reverse_text import ReverseText
from .sums import Sums
from .word_problems import WordProblems

__all__ = [
    "Arithmetic",
    "Calculator",
    "Environment",
    "MultiTurn",
    "ReverseText",
    "Sums",
    "WordProblems",
    "make_environment",
]


def make_environment(settings: EnvironmentSettings) -> Environment[Any]:
    """The environment that a source's `environment` describes."""
    match settings:
        case ReverseTextSettings():
            return ReverseText(settings.min_letters, settings.max_letters)
        case ArithmeticSettings():
            return Arithmetic(settings.min_digits, settings.max_digits, settings.grow_every)
        case SumsSettings():
            return Sums(settings.count, settings.min_digits, settings.max_digits)
        case WordProblemsSettings():
            return WordProblems(settings.max_number)
        case CalculatorSettings():
            return Calculator(settings.terms, settings.max_number, settings.max_turns)
