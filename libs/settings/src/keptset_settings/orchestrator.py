"""`[orchestrator]`: environments, sampling, batches and the run itself."""

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, SecretStr, model_validator

from .base import BaseUrl, Name, Table, require_order


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
    """Seed of the rollouts; each request derives its own from it, the step and the sample."""

    extra_body: dict[str, Any] = Field(default_factory=dict)
    """Further sampling parameters by vLLM's names (bad_words, allowed_token_ids, min_tokens, stop, ...)."""


class ReverseTextSettings(Table):
    """Reverse a random string of letters; the reward is the similarity to the reversed text."""

    kind: Literal["reverse-text"] = "reverse-text"
    """Which environment."""
    min_letters: int = Field(default=4, ge=1)
    """Fewest letters of a string."""
    max_letters: int = Field(default=12, ge=1)
    """Most letters of a string."""

    @model_validator(mode="after")
    def _letters(self) -> Self:
        require_order(self.min_letters, "min_letters", self.max_letters, "max_letters")
        return self


class SourceSettings(Table):
    """One source of rollouts: an environment and how the policy samples in it."""

    name: Name = "reverse-text"
    """Names the source in samples, metrics and errors."""

    ratio: float = Field(default=1.0, gt=0)
    """Share of the prompts of a step, relative to the other sources."""

    environment: ReverseTextSettings = ReverseTextSettings()
    """What is asked and how an answer is rewarded."""

    sampling: SamplingSettings = SamplingSettings()
    """Overrides of [orchestrator.train.sampling]."""


class TrainSettings(Table):
    prompts_per_step: int = Field(default=8, ge=1)
    """Prompts (groups) in a step's batch."""

    group_size: int = Field(default=16, ge=1)
    """Rollouts of each prompt; their mean reward is the baseline."""

    normalize_std: bool = True
    """Divide the advantages of a group by the standard deviation of its rewards (+ 1e-4)."""

    sampling: SamplingSettings = SamplingSettings()
    """How the policy samples, unless a source says otherwise."""

    source: list[SourceSettings] = Field(default_factory=lambda: [SourceSettings()], min_length=1)
    """Where rollouts come from."""


class OrchestratorSettings(Table):
    host: str = "127.0.0.1"
    """Address of the orchestrator's own /health, /metrics and status."""

    port: int = Field(default=8002, ge=0, le=65535)
    """Port of the same; 0 lets `keptset run` choose a free one."""

    inference_urls: list[BaseUrl] = Field(default_factory=list)
    """Base URLs of the inference servers. A run fills in its own."""

    inference_api_key: SecretStr | None = None
    """Sent to the inference servers as a bearer token."""

    trainer_url: BaseUrl | None = None
    """Base URL of the trainer. A run fills in its own."""

    tokenizer: str | None = None
    """Directory with tokenizer.json and the chat template. A run takes inference.model."""

    output_dir: Path | None = None
    """Where metrics.jsonl goes. A run takes runs/<name>."""

    steps: int = Field(default=30, ge=1)
    """Optimiser steps of the run."""

    seed: int = 0
    """Seed of the prompts."""

    max_concurrent_requests: int = Field(default=64, ge=1)
    """Requests in flight over all inference servers."""

    request_timeout: float = Field(default=600.0, gt=0)
    """Seconds that one rollout request may take."""

    request_attempts: int = Field(default=5, ge=1)
    """Attempts at one rollout request (connection errors, time-outs, 5xx; never 4xx) before the run stops."""

    startup_timeout: float = Field(default=300.0, gt=0)
    """Seconds to wait for each peer's health."""

    step_timeout: float = Field(default=1800.0, gt=0)
    """Seconds to wait for the trainer to finish a step."""

    weights_timeout: float = Field(default=600.0, gt=0)
    """Seconds to wait for an inference server to load new weights."""

    log_level: Literal["debug", "info", "warning"] = "info"
    """What is logged; debug also shows where an error came from."""

    train: TrainSettings = TrainSettings()
