"""Token-level ratio, sequences rejected by their geometric-mean ratio."""

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from .ratio import LossSum, log_ratio_of, outside, ratio_of, sum_by_sequence


def geometric_mean(
    logprobs: Float[Tensor, " N"],
    rollout_logprobs: Float[Tensor, " N"],
    advantages: Float[Tensor, " N"],
    sequence: Int64[Tensor, " N"],
    num_sequences: int,
    *,
    low: float,
    high: float,
) -> LossSum:
    """- sum_t r_t A_t over sequences with low <= exp(mean_{t in s} log r_t) <= high,  r_t = pi / pi_rollout.

    The surrogate of Schulman et al. 2015 (arXiv 1502.05477 eq. 14, without its constraint), guarded by the
    geometric-mean ratio of a sequence (GSPO, arXiv 2507.18071 eq. 7): outside the band the whole sequence is
    rejected and has no gradient.
    """
    log_ratio = log_ratio_of(logprobs, rollout_logprobs)
    total = sum_by_sequence(log_ratio.detach(), sequence, num_sequences)
    tokens = sum_by_sequence(torch.ones_like(total[sequence]), sequence, num_sequences)
    rejected = outside(total / tokens.clamp(min=1), low, high)
    objective = ratio_of(log_ratio) * advantages.double()
    return LossSum(
        total=-torch.where(rejected[sequence], 0.0, objective).sum(),
        clipped=torch.zeros_like(sequence, dtype=torch.bool),
        rejected=rejected,
    )
