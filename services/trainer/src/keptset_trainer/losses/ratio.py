"""What every loss is made of: log ratios in float64, per token and per sequence.

The arguments that all losses take, for the N trained tokens of one row with S sequences:

    logprobs          [N]  the trainer's, with gradient
    rollout_logprobs  [N]  what the token was sampled with
    advantages        [N]
    sequence          [N]  which of the S sequences a token belongs to
    num_sequences     S

Each returns a sum over tokens. Dividing by the number of loss tokens of the whole batch is left to the
caller, so that neither packing nor micro-batches change the result.
"""

import math
from typing import NamedTuple

from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

LARGEST_LOG_RATIO = 20.0
"""A ratio is at most e^20 = 4.9e8: far outside every bound, and its products stay finite."""


class LossSum(NamedTuple):
    """What a loss says of one row."""

    total: Float64[Tensor, ""]
    """To be minimised: the sum over the row's tokens."""
    clipped: Bool[Tensor, " N"]
    """Tokens whose ratio or weight was limited by a bound."""
    rejected: Bool[Tensor, " S"]
    """Sequences that contribute nothing."""


def log_ratio_of(
    logprobs: Float[Tensor, " N"], rollout_logprobs: Float[Tensor, " N"]
) -> Float64[Tensor, " N"]:
    """log(pi / pi_rollout) of every token, with the gradient of `logprobs`."""
    return logprobs.double() - rollout_logprobs.double()


def ratio_of(log_ratio: Float64[Tensor, " N"]) -> Float64[Tensor, " N"]:
    """exp(log_ratio), saturated at e^LARGEST_LOG_RATIO; the gradient is ratio * grad(log_ratio)."""
    overshoot = (log_ratio.detach() - LARGEST_LOG_RATIO).clamp(min=0)
    return (log_ratio - overshoot).exp()


def sum_by_sequence(
    values: Float64[Tensor, " N"], sequence: Int64[Tensor, " N"], num_sequences: int
) -> Float64[Tensor, " S"]:
    """Sum of `values` over the tokens of each sequence."""
    return values.new_zeros(num_sequences).index_add(0, sequence, values)


def outside(log_value: Float64[Tensor, " S"], low: float, high: float) -> Bool[Tensor, " S"]:
    """Where exp(log_value) leaves [low, high]; compared in log space, where nothing overflows."""
    log_low = math.log(low) if low > 0 else -math.inf
    return (log_value < log_low) | (log_value > math.log(high))
