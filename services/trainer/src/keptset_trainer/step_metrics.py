"""Metrics of one step: summed in float64 on the device, read by the host once, merged over ranks."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from kept_loss import KeptLogprobs
from kept_tokens.statistics import KeptStatistics

from .losses import LossSum
from .micro_batch import MicroBatch


class Mean(NamedTuple):
    """Of some values of one row, on the device: float64 scalars."""

    total: Tensor
    count: Tensor
    maximum: Tensor
    """-inf if there are none."""

    @classmethod
    def of(cls, values: Float64[Tensor, " N"], where: Bool[Tensor, " N"] | None = None) -> "Mean":
        """Of the values `where` that is true."""
        if where is None:
            where = torch.ones_like(values, dtype=torch.bool)
        maximum = values.new_full((), -torch.inf)
        if len(values):
            maximum = values.masked_fill(~where, -torch.inf).max()
        return cls(values.masked_fill(~where, 0).sum(), where.sum().double(), maximum)


class Numbers(NamedTuple):
    """What the device adds up of a row; three scalars each, of which a sum uses one."""

    ratio: Mean
    log_ratio_size: Mean
    mismatch_kl: Mean
    on_policy_log_ratio_size: Mean
    on_policy_mismatch_kl: Mean
    entropy_full: Mean
    entropy_kept: Mean
    kept_mass: Mean
    loss: Mean
    clipped_tokens: Mean
    rejected_sequences: Mean
    cross_entropy: Mean
    full_logprob: Mean
    reference_kl: Mean
    """Full-vocabulary logprob - reference, of sampled tokens: the KL's estimate only if nothing truncates."""
    not_finite: Mean
    """Logprobs, or their ratios, that are no numbers."""


@dataclass
class StepMetrics:
    """`add` every row, then `read`, `merge`, `result`. Logprobs are those of the weights before the step.

    Ratios, entropies, kept sets and clipped tokens are of what the policy sampled; what a frozen generator
    said has its own cross-entropy, and no part in them.

    Attributes:
        version: Of the weights before the step. Tokens that they sampled are on-policy: their ratio is 1 up
            to rounding, however stale others are. None: nobody knows, so none are.
    """

    version: int | None = None
    rows: list[Tensor] = field(default_factory=list)
    """Of each row its Numbers, float64 [numbers, 3], on the device; `read` turns them into `numbers`."""
    numbers: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    """Name -> sum, count, maximum."""
    kept: KeptStatistics = field(default_factory=KeptStatistics)
    tokens: int = 0
    loss_tokens: int = 0
    sequences: int = 0

    def add(
        self,
        row: MicroBatch,
        on_device: MicroBatch,
        scored: KeptLogprobs,
        loss: LossSum,
        ignored_masks: bool = False,
    ) -> None:
        """Count one row in, after its forward pass; the host does not wait for the device.

        Args:
            row: on the host.
            on_device: the same on the device.
            scored: its logprobs.
            loss: its loss.
            ignored_masks: if it was scored without its masks.
        """
        counts = row.kept.offsets.diff()
        self.kept = self.kept.merge(KeptStatistics.of(counts[~row.cross_entropy].numpy()))
        self.tokens += row.token_ids.numel()
        self.loss_tokens += row.labels.numel()
        self.sequences += int(row.has_trained.sum())

        policy = ~on_device.cross_entropy
        of_these = torch.zeros_like(policy) if self.version is None else on_device.versions == self.version
        on_policy = policy & of_these
        logprobs = scored.logprobs.detach().double()
        log_ratio = logprobs - on_device.rollout_logprobs.double()
        nothing = Mean.of(log_ratio[:0])
        full = None if scored.full_logprobs is None else scored.full_logprobs.double()
        has_mass = scored.kept_mass is not None and not ignored_masks
        numbers = Numbers(
            ratio=Mean.of(torch.exp(log_ratio), policy),
            log_ratio_size=Mean.of(log_ratio.abs(), policy),
            mismatch_kl=Mean.of(torch.expm1(log_ratio) - log_ratio, policy),
            on_policy_log_ratio_size=Mean.of(log_ratio.abs(), on_policy),
            on_policy_mismatch_kl=Mean.of(torch.expm1(log_ratio) - log_ratio, on_policy),
            entropy_full=nothing if scored.entropy is None else known(scored.entropy, policy),
            entropy_kept=known(scored.entropy_kept, policy),
            kept_mass=known(scored.kept_mass, on_device.kept.offsets.diff() > 0) if has_mass else nothing,
            loss=Mean.of(loss.total.detach()[None]),
            clipped_tokens=Mean.of(loss.clipped.double(), policy),
            rejected_sequences=Mean.of((loss.rejected & on_device.has_trained).double()),
            cross_entropy=Mean.of(-logprobs, on_device.cross_entropy),
            full_logprob=nothing if full is None else Mean.of(full, policy),
            reference_kl=nothing
            if full is None
            else Mean.of(full - on_device.reference_logprobs.double(), on_device.reference_weights > 0),
            not_finite=Mean.of((~torch.isfinite(torch.exp(log_ratio)) | ~torch.isfinite(logprobs)).double()),
        )
        self.rows.append(torch.stack([torch.stack(one) for one in numbers]))

    def not_finite(self, device: torch.device) -> Float64[Tensor, ""]:
        """Number of logprobs and losses of this rank that are no numbers, on the device."""
        if not self.rows:
            return torch.zeros((), dtype=torch.float64, device=device)
        rows = torch.stack(self.rows)
        at = Numbers._fields.index
        return rows[:, at("not_finite"), 0].sum() + (~torch.isfinite(rows[:, at("loss"), 0])).sum()

    def read(self) -> "StepMetrics":
        """Bring the sums to the host, which waits for the device."""
        totals = [[0.0, 0.0, -np.inf]] * len(Numbers._fields)
        if self.rows:
            table = torch.stack(self.rows)
            totals = torch.cat([table[:, :, :2].sum(0), table[:, :, 2:].amax(0)], 1).tolist()
        self.numbers = {
            name: (total, count, maximum)
            for name, (total, count, maximum) in zip(Numbers._fields, totals, strict=True)
        }
        self.rows = []
        return self

    def merge(self, other: "StepMetrics") -> "StepMetrics":
        """Both together; what was not read is not looked at."""
        numbers = {
            name: (
                self.numbers[name][0] + other.numbers[name][0],
                self.numbers[name][1] + other.numbers[name][1],
                max(self.numbers[name][2], other.numbers[name][2]),
            )
            for name in Numbers._fields
        }
        return StepMetrics(
            version=self.version,
            numbers=numbers,
            kept=self.kept.merge(other.kept),
            tokens=self.tokens + other.tokens,
            loss_tokens=self.loss_tokens + other.loss_tokens,
            sequences=self.sequences + other.sequences,
        )

    def result(self, *, grad_norm: float, lr: float, seconds: float, ignored_masks: bool) -> dict[str, float]:
        """The row of metrics. What is not defined (no mask in the batch, entropy off) is left out."""

        def total(name: str) -> float:
            return self.numbers[name][0]

        def mean(name: str) -> float | None:
            return total(name) / self.numbers[name][1] if self.numbers[name][1] else None

        def maximum(name: str) -> float | None:
            return self.numbers[name][2] if self.numbers[name][1] else None

        sampled = self.numbers["ratio"][1]
        known_version = self.version is not None and sampled > 0
        share = self.numbers["on_policy_mismatch_kl"][1] / sampled if known_version else None
        metrics = {
            "mismatch_kl/mean": mean("mismatch_kl"),
            "mismatch_kl/max": maximum("mismatch_kl"),
            "ratio/mean": mean("ratio"),
            "ratio/max_abs_log": maximum("log_ratio_size"),
            "on_policy/share": share,
            "on_policy/mismatch_kl_mean": mean("on_policy_mismatch_kl"),
            "on_policy/ratio_max_abs_log": maximum("on_policy_log_ratio_size"),
            **self.kept.metrics(),
            "kept/mass_mean": mean("kept_mass"),
            "entropy/full": mean("entropy_full"),
            "entropy/kept": mean("entropy_kept"),
            "loss": total("loss") / self.loss_tokens,
            "grad_norm": grad_norm,
            "lr": lr,
            "rejected/sequences": total("rejected_sequences") / self.sequences if self.sequences else None,
            "clipped/tokens": mean("clipped_tokens"),
            "tokens/loss": float(self.loss_tokens),
            "tokens/total": float(self.tokens),
            "tokens/cross_entropy": self.numbers["cross_entropy"][1] or None,
            "cross_entropy/mean": mean("cross_entropy"),
            "full/logprob_mean": mean("full_logprob"),
            "reference/kl_mean": mean("reference_kl"),
            "seconds/train": seconds,
            "unsafe/ignore_kept_tokens": 1.0 if ignored_masks else None,
        }
        return {name: value for name, value in metrics.items() if value is not None}


def known(values: Tensor, where: Bool[Tensor, " N"] | None = None) -> Mean:
    """Without the NaN of positions that were not looked at."""
    values = values.detach().double()
    wanted = ~values.isnan()
    return Mean.of(values, wanted if where is None else wanted & where)
