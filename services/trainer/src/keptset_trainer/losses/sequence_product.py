"""Sequence-level importance weight with a rejection band."""

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from .ratio import LossSum, log_ratio_of, outside, sum_by_sequence


def sequence_product(
    logprobs: Float[Tensor, " N"],
    rollout_logprobs: Float[Tensor, " N"],
    advantages: Float[Tensor, " N"],
    sequence: Int64[Tensor, " N"],
    num_sequences: int,
    *,
    low: float,
    high: float,
) -> LossSum:
    """- sum_t W_s(t) A_t log pi_t,  W_s = prod_{t in s} pi / pi_rollout without gradient.

    Importance sampling over whole sequences (Precup et al. 2000, "Eligibility traces for off-policy policy
    evaluation"). A sequence with W_s outside [low, high] is rejected: weight 0. The product is a sum of log
    ratios; only what is inside the band is exponentiated, so it cannot overflow.
    """
    log_ratio = log_ratio_of(logprobs, rollout_logprobs).detach()
    log_weight = sum_by_sequence(log_ratio, sequence, num_sequences)
    rejected = outside(log_weight, low, high)
    weight = torch.where(rejected, -torch.inf, log_weight).exp()
    return LossSum(
        total=-(weight[sequence] * advantages.double() * logprobs.double()).sum(),
        clipped=torch.zeros_like(sequence, dtype=torch.bool),
        rejected=rejected,
    )
