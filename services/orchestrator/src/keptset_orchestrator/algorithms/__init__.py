"""Algorithms: what is made of the rollouts of a prompt. One file each; this one chooses."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from keptset_settings import Algorithm as AlgorithmSettings
from keptset_settings import (
    GrpoAlgorithm,
    MaxRlAlgorithm,
    OpdAlgorithm,
    OpsdAlgorithm,
    RlooAlgorithm,
    SftAlgorithm,
)

from .distillation import reference_advantages
from .grpo import grpo
from .max_rl import max_rl
from .rloo import rloo

__all__ = ["Algorithm", "grpo", "make_algorithm", "max_rl", "reference_advantages", "rloo"]

GroupAdvantages = Callable[[NDArray[np.float64]], NDArray[np.float64]]
"""Rewards of a group [G] to advantages [G]."""


@dataclass(frozen=True)
class Algorithm:
    """What a source's rollouts are trained with.

    Attributes:
        advantages: Of a group; the same at each token of a rollout.
        reference_weight: Of log(reference / policy), added to the advantage token by token; 0: not asked for.
        hint: The reference is the policy itself, with this and the solution in its prompt (opsd).
        cross_entropy: Trained without importance ratio; the advantages are weights.
        min_reward: Rollouts with less are left out.
    """

    advantages: GroupAdvantages
    reference_weight: float = 0.0
    hint: str | None = None
    cross_entropy: bool = False
    min_reward: float | None = None


def make_algorithm(settings: AlgorithmSettings) -> Algorithm:
    """The algorithm that `[orchestrator.train.source.algorithm]` describes."""
    match settings:
        case GrpoAlgorithm():
            return Algorithm(
                partial(grpo, normalize_std=settings.normalize_std), reference_weight=settings.reference_kl
            )
        case RlooAlgorithm():
            return Algorithm(rloo, reference_weight=settings.reference_kl)
        case MaxRlAlgorithm():
            return Algorithm(max_rl, reference_weight=settings.reference_kl)
        case OpdAlgorithm():
            return Algorithm(np.zeros_like, reference_weight=1.0)
        case OpsdAlgorithm():
            return Algorithm(np.zeros_like, reference_weight=1.0, hint=settings.hint)
        case SftAlgorithm():
            return Algorithm(np.ones_like, cross_entropy=True, min_reward=settings.min_reward)
