"""Token-level importance weight, detached and truncated."""

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from .ratio import LossSum, log_ratio_of, ratio_of


def truncated_weight(
    logprobs: Float[Tensor, " N"],
    rollout_logprobs: Float[Tensor, " N"],
    advantages: Float[Tensor, " N"],
    sequence: Int64[Tensor, " N"],
    num_sequences: int,
    *,
    max_weight: float,
) -> LossSum:
    """- sum_t w_t A_t log pi_t,  w_t = min(pi / pi_rollout, max_weight) without gradient.

    Ionides 2008, "Truncated importance sampling"; as a correction for rollouts of another engine: Yao et al.
    2025, "Your efficient RL framework secretly brings you off-policy RL training". Above the bound the weight
    is limited but, unlike with the clipped ratio, the gradient stays.
    """
    ratio = ratio_of(log_ratio_of(logprobs, rollout_logprobs)).detach()
    weight = ratio.clamp(max=max_weight)
    return LossSum(
        total=-(weight * advantages.double() * logprobs.double()).sum(),
        clipped=ratio > max_weight,
        rejected=torch.zeros(num_sequences, dtype=torch.bool, device=logprobs.device),
    )
