"""Collects rollouts, checks their kept sets, and drives trainer and inference step by step."""

from .environments import Arithmetic, Calculator, Environment, MultiTurn, ReverseText, Sums, WordProblems
from .errors import (
    AnswerError,
    EnvironmentFaultError,
    OrchestratorError,
    PeerMismatchError,
    PeerRefusedError,
    PeerUnavailableError,
    RolloutFailedError,
)
from .run import run
from .tokenizer import ChatTokenizer

__all__ = [
    "AnswerError",
    "Arithmetic",
    "Calculator",
    "ChatTokenizer",
    "Environment",
    "EnvironmentFaultError",
    "MultiTurn",
    "OrchestratorError",
    "PeerMismatchError",
    "PeerRefusedError",
    "PeerUnavailableError",
    "ReverseText",
    "RolloutFailedError",
    "Sums",
    "WordProblems",
    "run",
]
