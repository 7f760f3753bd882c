"""How large a kept set can become, from the request alone."""

from vllm.sampling_params import SamplingParams


def widest_set(params: SamplingParams, vocabulary: int) -> int:
    """The most ids that a set of this request can have, from what bounds it before anything is computed."""
    width = vocabulary
    if params.top_k > 0:
        width = min(width, params.top_k)
    if params.allowed_token_ids is not None:
        width = min(width, len(set(params.allowed_token_ids)))
    return width
