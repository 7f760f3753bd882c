"""How large and how small a kept set can become, from the request alone."""

import numpy as np
from vllm.sampling_params import SamplingParams

LOWEST_TOP_P = float(np.finfo(np.float32).tiny)
"""A smaller top_p may be 0 as float32, as which whatever samples takes it, and the nucleus of 0 is nothing.
From here down the best id alone is kept."""


def widest_set(params: SamplingParams, vocabulary: int) -> int:
    """The most ids that a set of this request can have, from what bounds it before anything is computed."""
    width = vocabulary
    if params.top_k > 0:
        width = min(width, params.top_k)
    if params.allowed_token_ids is not None:
        width = min(width, len(set(params.allowed_token_ids)))
    return width
