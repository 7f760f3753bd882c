"""Algorithms of `[[orchestrator.train.source]]`: from the rewards and scores of rollouts to advantages."""

from typing import Annotated, Literal

from pydantic import Field

from .base import Table


class _WithReference(Table):
    reference_kl: float = Field(default=0.0, ge=0)
    """Weight of log(policy / reference), taken off each token's advantage. Above 0 it needs a reference."""


class GrpoAlgorithm(_WithReference):
    """Reward minus the mean of its group (GRPO, arXiv 2402.03300)."""

    kind: Literal["grpo"] = "grpo"
    """Which algorithm."""
    normalize_std: bool = True
    """Divide by the standard deviation of the group's rewards (+ 1e-4)."""


class RlooAlgorithm(_WithReference):
    """Reward minus the mean of the others of its group (RLOO, arXiv 2402.14740)."""

    kind: Literal["rloo"] = "rloo"
    """Which algorithm."""


class MaxRlAlgorithm(_WithReference):
    """Reward minus the mean of its group, divided by that mean (MaxRL, arXiv 2602.02710)."""

    kind: Literal["max_rl"] = "max_rl"
    """Which algorithm."""


class OpdAlgorithm(Table):
    """On-policy distillation: the advantage of a token is log(reference / policy), rewards do not count."""

    kind: Literal["opd"] = "opd"
    """Which algorithm."""


class OpsdAlgorithm(Table):
    """On-policy self-distillation: as opd, the reference being the policy itself with the solution shown."""

    kind: Literal["opsd"] = "opsd"
    """Which algorithm."""
    hint: str = "The solution is: {solution}"
    """Added to the prompt that the policy scores its own rollouts with."""


class SftAlgorithm(Table):
    """Cross-entropy on the rollouts of a frozen generator; no importance ratio."""

    kind: Literal["sft"] = "sft"
    """Which algorithm."""
    min_reward: float | None = None
    """Rollouts with a lower reward are left out. Unset: all are trained on."""


Algorithm = Annotated[
    GrpoAlgorithm | RlooAlgorithm | MaxRlAlgorithm | OpdAlgorithm | OpsdAlgorithm | SftAlgorithm,
    Field(discriminator="kind"),
]
