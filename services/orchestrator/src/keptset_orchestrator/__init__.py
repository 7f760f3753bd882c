"""Collects rollouts, checks their kept sets, and drives trainer and inference step by step."""

from .environments import Environment, ReverseText
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
    "ChatTokenizer",
    "Environment",
    "EnvironmentFaultError",
    "OrchestratorError",
    "PeerMismatchError",
    "PeerRefusedError",
    "PeerUnavailableError",
    "ReverseText",
    "RolloutFailedError",
    "run",
]
