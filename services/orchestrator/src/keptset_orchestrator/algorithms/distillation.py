"""Distillation: what a reference says of each sampled token, instead of a reward."""

import numpy as np
from numpy.typing import NDArray


def reference_advantages(
    reference_logprobs: NDArray[np.float32], policy_logprobs: NDArray[np.float32], weight: float
) -> NDArray[np.float32]:
    """Weight * (log reference - log policy) of each token: the reverse KL, one sample of it a token.

    With weight 1 and no reward this is on-policy distillation (GKD, arXiv 2306.13649, section 3 with
    on-policy data and the reverse KL; MiniLLM, arXiv 2306.08543, section 2.2: the policy gradient of the
    reverse KL). The advantage of OPSD's objective on sampled tokens (arXiv 2601.18734, equation 9) is the
    same, without gradient as here. Beside a reward, with a small weight, it is the KL penalty of RLHF (arXiv
    2203.02155, equation 2), token by token.

    Both logprobs must be over the whole vocabulary: under truncated sampling the rollout's are not, and are
    higher by -log(kept mass) on every token.

    Args:
        reference_logprobs: [T], at temperature 1.
        policy_logprobs: [T], likewise, of the weights that sampled.
        weight: At least 0.

    Returns:
        [T] float32.
    """
    difference = reference_logprobs.astype(np.float64) - policy_logprobs.astype(np.float64)
    advantages: NDArray[np.float32] = (weight * difference).astype(np.float32)
    return advantages
