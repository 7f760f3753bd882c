"""`[trainer]`: ingest, model, loss, optimiser, weights."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, SecretStr, model_validator

from .base import OFF, Table, Transfer, require_band


class ClippedRatioLoss(Table):
    """Token-level clipped importance ratio: PPO, arXiv 1707.06347 eq. 7, with asymmetric bounds."""

    kind: Literal["clipped_ratio"] = "clipped_ratio"
    """Which objective."""
    clip_low: float = Field(default=0.2, ge=0, lt=1)
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float = Field(default=0.2, ge=0)
    """The ratio is clipped above at 1 + clip_high."""


class TruncatedWeightLoss(Table):
    """Token-level importance weight, detached and truncated at a bound (TIS)."""

    kind: Literal["truncated_weight"] = "truncated_weight"
    """Which objective."""
    max_weight: float = Field(default=2.0, gt=0)
    """Upper bound of the weight."""


class SequenceProductLoss(Table):
    """Sequence-product importance weight; sequences outside the band are rejected."""

    kind: Literal["sequence_product"] = "sequence_product"
    """Which objective."""
    low: float = Field(default=0.5, ge=0)
    """A sequence whose product of ratios is lower is rejected."""
    high: float = Field(default=2.0, gt=0)
    """A sequence whose product of ratios is higher is rejected."""

    @model_validator(mode="after")
    def _band(self) -> Self:
        require_band(self.low, self.high)
        return self


class GeometricMeanLoss(Table):
    """Token-level ratio; sequences whose geometric-mean ratio leaves the band are rejected."""

    kind: Literal["geometric_mean"] = "geometric_mean"
    """Which objective."""
    low: float = Field(default=0.99, ge=0)
    """A sequence whose geometric-mean ratio is lower is rejected."""
    high: float = Field(default=1.01, gt=0)
    """A sequence whose geometric-mean ratio is higher is rejected."""

    @model_validator(mode="after")
    def _band(self) -> Self:
        require_band(self.low, self.high)
        return self


Loss = Annotated[
    ClippedRatioLoss | TruncatedWeightLoss | SequenceProductLoss | GeometricMeanLoss,
    Field(discriminator="kind"),
]


Decay = Annotated[float, Field(ge=0, lt=1)]


class OptimizerSettings(Table):
    """AdamW."""

    lr: float = Field(default=1e-6, gt=0)
    """Learning rate; with a schedule, the highest."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls after the warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises to lr."""
    decay_steps: int | None = Field(default=None, ge=1)
    """Steps, the warm-up's among them, until the learning rate is min_lr. A run takes orchestrator.steps."""
    min_lr: float = Field(default=0.0, ge=0)
    """What the learning rate falls to."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """Decay rates of the two moments."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are clipped to this norm."""

    @model_validator(mode="after")
    def _schedule(self) -> Self:
        if self.schedule == "constant" and (self.decay_steps is not None or self.min_lr):
            name = "min_lr" if self.decay_steps is None else "decay_steps"
            raise ValueError(
                f'{name} does nothing while schedule = "constant"; set schedule = "linear" or "cosine", '
                "or leave it out"
            )
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr = {self.min_lr:g} is above lr = {self.lr:g}; lower it")
        return self


class TrainerSettings(Table):
    model: str | None = None
    """Directory (or hub name) of the model that training starts from. A run takes inference.model."""

    host: str = "127.0.0.1"
    """Address of the ingest API."""

    port: int = Field(default=8001, ge=0, le=65535)
    """Port of the ingest API; 0 lets `keptset run` choose a free one."""

    internal_token: SecretStr | None = None
    """If set, every route but /health wants it as a bearer token. A run takes inference.internal_token."""

    open_metrics: bool = False
    """Let everybody who reaches the port read /metrics."""

    max_concurrent_requests: int = Field(default=64, ge=1)
    """Requests in work at a time; more are answered with 429 and Retry-After. /health is exempt."""

    max_requests_per_second: float | None = Field(default=None, gt=0)
    """Requests of one client address, with a burst of one second's; more: 429. Unset: any."""

    output_dir: Path | None = None
    """Where the spool, step results and checkpoints go. A run takes runs/<name>/trainer."""

    weights_dir: Path | None = None
    """Root of the published weights. A run takes runs/<name>/weights."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; auto takes CUDA if there is one."""

    ranks: Annotated[int, Field(ge=1)] | Literal["auto", "external"] = 1
    """Processes that train together, one a GPU; auto = one for each visible GPU. "external": the trainer
    starts none and needs no GPU, torchrun does, on any number of nodes (services/trainer/README.md)."""

    ranks_timeout: float = Field(default=60.0, gt=0)
    """Seconds without a sign of life after which external ranks count as away: /health answers 503, and
    batches wait for them. They give a sign twelve times in that time."""

    sharding: Literal["auto", "full", "optimizer"] = "auto"
    """What each of several ranks holds a part of: "full" = all weights (FSDP2), "optimizer" = the float32
    weights and moments, with the model whole on every rank: faster; auto takes it on GPUs with the room."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type that the model computes in and is published in; auto is float32 on a CPU and as the model is
    stored on CUDA. The weights that the optimiser changes are float32."""

    attention: Literal["auto", "sdpa", "varlen"] = "auto"
    """Over packed rows: "varlen" = torch's variable-length FlashAttention, "sdpa" = a mask; auto is varlen on
    CUDA in bfloat16."""

    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile of the model's layers; auto is on with CUDA."""

    cuda_graphs: Literal["auto", "on", "off"] = "auto"
    """Record the layers' kernels and launch them together, as a host may be slower than its GPU; rows are
    filled up to few lengths. auto = if it is possible: bfloat16 on CUDA, varlen attention, whole weights."""

    checkpointing: Literal["off", "selective", "full"] = "off"
    """Activations computed again in the backward pass: none, all but those of matmuls and attention, all."""

    deterministic: bool = False
    """The same step gives the same bits on a GPU too, somewhat slower."""

    seed: int = 0
    """Seed of everything random in the trainer."""

    row_tokens: int = Field(default=2048, ge=1)
    """Tokens of one packed row; a micro-batch is one row. No sequence may be longer."""

    entropy: Annotated[Annotated[float, Field(gt=0, lt=1)] | Literal["full"] | None, OFF] = "full"
    """The entropy diagnostic: over every position ("full"), a share of them, or "off"."""

    full_vocabulary_scores: bool = False
    """Also give, with each step's result, the logprob over the whole vocabulary of every token trained on.
    Then opd, opsd and reference_kl work under truncation: they compare that one with the reference."""

    max_batch_bytes: int = Field(default=1 << 30, ge=1)
    """The largest batch that ingest accepts."""

    max_waiting_batches: int = Field(default=64, ge=2)
    """Accepted batches that may wait to be trained; the next one is answered with 429 until a step is done.
    An orchestrator hands in two at most."""

    weights_transfer: Transfer | None = None
    """Whether inference may also be sent the weights: "nccl" (CUDA). A run takes weights.transfer."""

    bucket_bytes: int = Field(default=256 << 20, ge=1)
    """Bytes of weights that are sent at a time, at least; inference needs two such buffers on its GPU."""

    gpu_lock: Path | None = None
    """File by whose lock engines and trainer take turns on a GPU. If set, the trainer's states are on the GPU
    only while it steps. A run with colocated = true takes runs/<name>/gpu.lock."""

    checkpoint_interval: int = Field(default=1, ge=1)
    """Steps from one checkpoint (float32 weights and moments) to the next; one is written when the trainer is
    told to stop, too, if shutdown_timeout is enough and its GPU is its own. Weights are published after every
    step. After a start, what came after the newest checkpoint is trained once more, from batches that stay in
    the spool for it, and saved."""

    shutdown_timeout: float = Field(default=60.0, gt=0, le=86400)
    """Seconds that the training loop has to leave its step and write a last checkpoint when the trainer is
    told to stop; a larger model needs more. Then it is killed, and the exit code is 1. Whoever stops the
    trainer must wait 15 s longer: `keptset` does, containers are to be told. For external ranks torchrun is
    told, by TORCH_ELASTIC_SHUTDOWN_TIMEOUT."""

    keep_weights: int = Field(default=3, ge=2)
    """Published versions that stay on disk."""

    keep_batches: int = Field(default=2, ge=2)
    """Trained batches that stay on disk, at least, for `keptset replay`, which needs the weights before them
    as well: keep_weights at least one more."""

    unsafe_ignore_kept_tokens: bool = False
    """For comparison only: train as if no masks had come. Marks every metric row."""

    loss: Loss = ClippedRatioLoss()
    """The objective."""

    optimizer: OptimizerSettings = OptimizerSettings()
