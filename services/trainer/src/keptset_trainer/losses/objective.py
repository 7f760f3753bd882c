"""What a row's tokens are trained with: the chosen loss, cross-entropy, a comparison with a reference."""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from kept_loss import KeptLogprobs

from ..micro_batch import MicroBatch
from .ratio import LossSum


def row_loss(loss: Callable[..., LossSum], row: MicroBatch, scored: KeptLogprobs) -> LossSum:
    """`loss` over the tokens that the policy sampled, cross-entropy over those that a frozen generator said.

    - sum_t w_t log pi_t over the latter, w_t being their weights: no ratio, nothing to clip or to reject. To
    the chosen loss they look like tokens of ratio 1 and advantage 0. No branch looks at values, so that a GPU
    is not waited for.
    """
    frozen = row.cross_entropy
    summed = loss(
        scored.logprobs,
        torch.where(frozen, scored.logprobs.detach(), row.rollout_logprobs),
        torch.where(frozen, 0.0, advantages_of(row, scored)),
        row.sequence,
        row.num_sequences,
    )
    weighted = torch.where(frozen, row.advantages.double() * scored.logprobs.double(), 0.0)
    return LossSum(
        total=summed.total - weighted.sum(),
        clipped=summed.clipped & ~frozen,
        rejected=summed.rejected & ~frozen_sequences(row),
    )


def advantages_of(row: MicroBatch, scored: KeptLogprobs) -> Float64[Tensor, " N"]:
    """The advantages, plus weight * (log reference - log policy) where there is a reference.

    Both over the whole vocabulary, and the policy's without gradient: the score-function estimate of the
    reverse KL, one token at a time (see the orchestrator's `distillation`). The rollout's logprob will not do
    under truncation: it is over the kept set, higher by -log(kept mass). Where nothing is cut and the weights
    are those that sampled, it is the same number.
    """
    advantages = row.advantages.double()
    if scored.full_logprobs is None:
        return advantages  # ingest has refused references
    difference = row.reference_logprobs.double() - scored.full_logprobs.double()
    return advantages + row.reference_weights.double() * difference


def frozen_sequences(row: MicroBatch) -> Bool[Tensor, " S"]:
    """Which sequences a frozen generator said."""
    tokens = torch.zeros(row.num_sequences, dtype=torch.int64, device=row.sequence.device)
    return tokens.index_add(0, row.sequence, row.cross_entropy.long()) > 0
