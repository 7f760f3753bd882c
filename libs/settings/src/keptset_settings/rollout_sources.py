"""`[[orchestrator.train.source]]` and `[[orchestrator.eval.source]]`: where rollouts come from."""

from typing import Any

from pydantic import Field

from .algorithms import Algorithm
from .base import Name, Table
from .environments import EnvironmentSettings, ReverseTextSettings
from .filters import Filter
from .generators import EndpointSettings, Generator, PolicyGenerator


class SamplingSettings(Table):
    """Sampling parameters; unset ones are neutral, in a source those of [orchestrator.train.sampling]."""

    temperature: float | None = None
    """Divides the logits; 0.01 to 2.0. Neutral: 1.0."""

    top_p: float | None = None
    """Keep the smallest set of tokens whose probabilities sum to this. Neutral: 1.0."""

    top_k: int | None = None
    """Keep at most this many tokens, up to 512. Neutral: -1. A truncating source gets 512 if it sets none."""

    min_p: float | None = None
    """Keep tokens at least this likely relative to the most likely one. Neutral: 0.0."""

    max_tokens: int | None = None
    """The most tokens of one completion. Unset: the rest of the context."""

    seed: int | None = None
    """Seed of the rollouts; each request derives its own from it, the step and the sample. Unset:
    orchestrator.seed."""

    extra_body: dict[str, Any] = Field(default_factory=dict)
    """Further sampling parameters by vLLM's names (bad_words, allowed_token_ids, min_tokens, stop, ...)."""


class SourceSettings(Table):
    """One source of rollouts: an environment, who generates in it, and what is made of the rollouts."""

    name: Name = "reverse-text"
    """Names the source in samples, metrics and errors."""

    ratio: float = Field(default=1.0, gt=0)
    """Share of the prompts, relative to the other sources; exact over time, to within a prompt."""

    group_size: int | None = Field(default=None, ge=1)
    """Rollouts of each prompt. Unset: orchestrator.train.group_size."""

    environment: EnvironmentSettings = ReverseTextSettings()
    """What is asked and how an answer is rewarded."""

    generator: Generator = PolicyGenerator()
    """Who answers."""

    sampling: SamplingSettings = SamplingSettings()
    """Overrides of [orchestrator.train.sampling]. A frozen generator inherits nothing: unset is up to it."""

    algorithm: Algorithm | None = None
    """Unset: [orchestrator.train.algorithm]; for a frozen generator that one too if it is sft, else sft."""

    reference: EndpointSettings | None = None
    """Unset: [orchestrator.train.reference], where the algorithm compares with one."""

    filter: list[Filter] | None = None
    """Unset: [[orchestrator.train.filter]]."""


class EvalSourceSettings(Table):
    """Rollouts that are only looked at. They need no masks, so anything may be sampled, greedily too."""

    name: Name = "reverse-text"
    """Names the source in metrics and errors."""

    interval: int = Field(default=10, ge=1)
    """Evaluated after every so many steps."""

    examples: int = Field(default=32, ge=1)
    """Prompts, the same ones each time; training has others."""

    group_size: int = Field(default=1, ge=1)
    """Rollouts of each prompt: n of avg@n, the largest k of pass@k."""

    pass_reward: float = 1.0
    """A rollout with at least this reward has passed."""

    environment: EnvironmentSettings = ReverseTextSettings()
    """What is asked and how an answer is rewarded."""

    sampling: SamplingSettings = SamplingSettings()
    """Its own; nothing is inherited, what is unset is neutral."""
