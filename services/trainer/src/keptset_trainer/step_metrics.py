"""Metrics of one step, gathered row by row in float64."""

from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from kept_loss import KeptLogprobs
from kept_tokens.statistics import KeptStatistics

from .losses import LossSum
from .packing import MicroBatch


@dataclass
class Mean:
    """Of the finite values given so far; None if there was none."""

    total: float = 0.0
    count: int = 0
    maximum: float = -np.inf

    def add(self, values: Float64[Tensor, " n"]) -> None:
        if values.numel():
            self.total += float(values.sum())
            self.count += values.numel()
            self.maximum = max(self.maximum, float(values.max()))

    @property
    def value(self) -> float | None:
        return self.total / self.count if self.count else None

    @property
    def largest(self) -> float | None:
        return self.maximum if self.count else None


@dataclass
class StepMetrics:
    """`add` every row, then `result`. Policy logprobs are those of the weights before the step.

    What compares with a rollout is over the tokens that the policy sampled; those that a frozen generator
    said have their own cross-entropy.
    """

    ratio: Mean = field(default_factory=Mean)
    log_ratio_size: Mean = field(default_factory=Mean)
    mismatch_kl: Mean = field(default_factory=Mean)
    entropy_full: Mean = field(default_factory=Mean)
    entropy_kept: Mean = field(default_factory=Mean)
    kept_mass: Mean = field(default_factory=Mean)
    cross_entropy: Mean = field(default_factory=Mean)
    full_logprob: Mean = field(default_factory=Mean)
    reference_kl: Mean = field(default_factory=Mean)
    kept: KeptStatistics = field(default_factory=KeptStatistics)
    loss: float = 0.0
    tokens: int = 0
    loss_tokens: int = 0
    clipped_tokens: int = 0
    sequences: int = 0
    rejected_sequences: int = 0

    def add(self, row: MicroBatch, scored: KeptLogprobs, loss: LossSum, ignored_masks: bool = False) -> None:
        """Count one row in, after its forward pass; `ignored_masks` if it was scored without its masks."""
        policy = ~row.cross_entropy
        log_ratio = (scored.logprobs.detach().double() - row.rollout_logprobs.double())[policy]
        self.ratio.add(torch.exp(log_ratio))
        self.log_ratio_size.add(log_ratio.abs())
        self.mismatch_kl.add(torch.expm1(log_ratio) - log_ratio)
        counts = row.kept.offsets.diff()
        self.kept = self.kept.merge(KeptStatistics.of(counts[policy].cpu().numpy()))
        self.cross_entropy.add(-scored.logprobs.detach().double()[row.cross_entropy])
        if scored.full_logprobs is not None:
            full = scored.full_logprobs.double()
            compared = row.reference_weights > 0
            self.full_logprob.add(full[policy])
            self.reference_kl.add((full - row.reference_logprobs.double())[compared])
        self.entropy_kept.add(known(scored.entropy_kept))
        if scored.entropy is not None:
            self.entropy_full.add(known(scored.entropy))
        if scored.kept_mass is not None and not ignored_masks:
            self.kept_mass.add(known(scored.kept_mass, counts > 0))
        self.loss += float(loss.total.detach())
        self.tokens += row.token_ids.numel()
        self.loss_tokens += row.labels.numel()
        self.clipped_tokens += int(loss.clipped.sum())
        trained = torch.bincount(row.sequence[policy], minlength=row.num_sequences) > 0
        self.sequences += int(trained.sum())
        self.rejected_sequences += int((loss.rejected & trained).sum())

    def result(self, *, grad_norm: float, lr: float, seconds: float, ignored_masks: bool) -> dict[str, float]:
        """The row of metrics. What is not defined (no mask in the batch, entropy off) is left out."""
        metrics = {
            "mismatch_kl/mean": self.mismatch_kl.value,
            "mismatch_kl/max": self.mismatch_kl.largest,
            "ratio/mean": self.ratio.value,
            "ratio/max_abs_log": self.log_ratio_size.largest,
            **self.kept.metrics(),
            "kept/mass_mean": self.kept_mass.value,
            "entropy/full": self.entropy_full.value,
            "entropy/kept": self.entropy_kept.value,
            "loss": self.loss / self.loss_tokens,
            "grad_norm": grad_norm,
            "lr": lr,
            "rejected/sequences": self.rejected_sequences / self.sequences if self.sequences else None,
            "clipped/tokens": self.clipped_tokens / self.loss_tokens,
            "tokens/loss": float(self.loss_tokens),
            "tokens/total": float(self.tokens),
            "tokens/cross_entropy": float(self.cross_entropy.count) if self.cross_entropy.count else None,
            "cross_entropy/mean": self.cross_entropy.value,
            "full/logprob_mean": self.full_logprob.value,
            "reference/kl_mean": self.reference_kl.value,
            "seconds/train": seconds,
            "unsafe/ignore_kept_tokens": 1.0 if ignored_masks else None,
        }
        return {name: value for name, value in metrics.items() if value is not None}


def known(values: Tensor, where: Bool[Tensor, " N"] | None = None) -> Float64[Tensor, " n"]:
    """In float64, without the NaN of positions that were not looked at."""
    values = values.detach().double()
    wanted = ~values.isnan() if where is None else where & ~values.isnan()
    return values[wanted]
