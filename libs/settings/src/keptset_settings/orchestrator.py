"""`[orchestrator]`: sources, batches and the run itself."""

from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr

from .algorithms import Algorithm, GrpoAlgorithm
from .base import BaseUrl, Table, Transfer
from .filters import Filter
from .generators import EndpointSettings
from .rollout_sources import EvalSourceSettings, SamplingSettings, SourceSettings


class TrainSettings(Table):
    prompts_per_step: int = Field(default=8, ge=1)
    """Prompts (groups) in a step's batch."""

    group_size: int = Field(default=16, ge=1)
    """Rollouts of each prompt; their rewards are each other's baseline."""

    algorithm: Algorithm = GrpoAlgorithm()
    """What is made of the policy's rollouts, unless a source says otherwise."""

    reference: EndpointSettings | None = None
    """Scores rollouts for opd and reference_kl: it has vLLM's prompt_logprobs and the policy's tokenizer."""

    filter: list[Filter] | None = None
    """Which rollouts are flagged. Unset: gibberish and repetition are counted, where nothing truncates."""

    sampling: SamplingSettings = SamplingSettings()
    """How the policy samples, unless a source says otherwise."""

    source: list[SourceSettings] = Field(default_factory=lambda: [SourceSettings()], min_length=1)
    """Where rollouts come from."""


class EvalSettings(Table):
    source: list[EvalSourceSettings] = Field(default_factory=list)
    """What is evaluated. None: nothing."""


class OrchestratorSettings(Table):
    host: str = "127.0.0.1"
    """Address of the orchestrator's own /health, /metrics and status."""

    port: int = Field(default=8002, ge=0, le=65535)
    """Port of the same; 0 lets `keptset run` choose a free one."""

    inference_urls: list[BaseUrl] = Field(default_factory=list)
    """Base URLs of the inference servers. A run fills in its own."""

    router_url: BaseUrl | None = None
    """Base URL of a vllm-router that requests for rollouts go through; it is told which of inference_urls to
    choose from. Weights, status and scores go to each server itself. Unset: rollouts do too."""

    inference_api_key: SecretStr | None = None
    """Sent to the inference servers as a bearer token."""

    internal_token: SecretStr | None = None
    """Sent to the trainer, and to what loads weights; its own routes but /health want it too. A run takes
    inference.internal_token."""

    open_metrics: bool = False
    """Let everybody who reaches the port read /metrics."""

    trainer_url: BaseUrl | None = None
    """Base URL of the trainer. A run fills in its own."""

    tokenizer: str | None = None
    """Directory with tokenizer.json and the chat template. A run takes inference.model."""

    output_dir: Path | None = None
    """Where metrics.jsonl goes. A run takes runs/<name>."""

    steps: int = Field(default=30, ge=1)
    """Optimiser steps of the run."""

    seed: int = 0
    """Seed of the prompts, and of rollouts whose sampling sets none."""

    max_async_level: int = Field(default=0, ge=0)
    """Weight versions that rollouts may be behind the step that trains on them. 0: rollouts and training take
    turns. Above 0 they go on side by side, also over a weight update, and ratios have the policy's change in
    them."""

    max_concurrent_requests: int = Field(default=64, ge=1)
    """Requests in flight over all inference servers, and at each endpoint that is not ours."""

    request_timeout: float = Field(default=600.0, gt=0)
    """Seconds that one rollout request may take."""

    request_attempts: int = Field(default=5, ge=1)
    """Attempts at one rollout request before the run stops: connection errors, time-outs, 5xx, 429, answers
    that cannot be read. Never other 4xx, nor an answer that breaks a rule of the kept set."""

    environment_timeout: float = Field(default=60.0, gt=0)
    """Seconds that an environment may take for the reward of one rollout, or for one reply to it."""

    startup_timeout: float = Field(default=300.0, gt=0)
    """Seconds to wait for each peer's health, for the warm start of a model, and later for a peer that cannot
    be reached: it may be starting again."""

    step_timeout: float = Field(default=1800.0, gt=0)
    """Seconds to wait for the trainer to finish a step. Steps that it has to train once more before it, after
    a start, have as long each."""

    weights_transfer: Transfer | None = None
    """Which way the weights take: "files" (if unset) or "nccl". A run takes weights.transfer."""

    weights_timeout: float = Field(default=600.0, gt=0)
    """Seconds to wait for an inference server to load new weights, to fall asleep, or to wake."""

    colocated: bool = False
    """The inference servers share their GPUs with the trainer: they sleep while it steps. A run takes
    colocated."""

    log_level: Literal["debug", "info", "warning"] = "info"
    """What is logged; debug also shows where an error came from."""

    train: TrainSettings = TrainSettings()

    @property
    def start_patience(self) -> float:
        """Seconds until all peers must be healthy: those that share a GPU come up one after the other, and
        perhaps after a step that the trainer was handed before.
        """
        return 2 * self.startup_timeout + self.step_timeout if self.colocated else self.startup_timeout

    eval: EvalSettings = EvalSettings()
