"""Token-level clipped importance ratio."""

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from .ratio import LossSum, log_ratio_of, ratio_of


def clipped_ratio(
    logprobs: Float[Tensor, " N"],
    rollout_logprobs: Float[Tensor, " N"],
    advantages: Float[Tensor, " N"],
    sequence: Int64[Tensor, " N"],
    num_sequences: int,
    *,
    clip_low: float,
    clip_high: float,
) -> LossSum:
    """- sum_t min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t),  r_t = pi / pi_rollout.

    PPO, arXiv 1707.06347 eq. 7; separate bounds as in DAPO, arXiv 2503.14476. A token counts as clipped where
    the clipped branch is the smaller one: it then has no gradient.
    """
    advantages = advantages.double()
    ratio = ratio_of(log_ratio_of(logprobs, rollout_logprobs))
    free = ratio * advantages
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    return LossSum(
        total=-torch.minimum(free, bounded).sum(),
        clipped=(bounded < free).detach(),
        rejected=torch.zeros(num_sequences, dtype=torch.bool, device=logprobs.device),
    )
