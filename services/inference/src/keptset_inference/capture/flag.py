"""The private mark on requests that want kept sets: set by our route, read where tokens are sampled."""

import secrets

from vllm.sampling_params import SamplingParams

from keptset_settings import CAPTURE_WIDTH as WIDTH

from .bounds import LOWEST_TOP_P

FLAG = "keptset_kept_tokens"
"""Key in `SamplingParams.extra_args`, which vLLM carries to the sampler without looking at it."""

_ours = secrets.token_hex(16)
# Clients reach extra_args on vLLM's own routes (`vllm_xargs`), so the value is one that they cannot know.


def mark(params: SamplingParams) -> None:
    """Ask for the kept sets of this request."""
    params.extra_args = {**(params.extra_args or {}), FLAG: _ours}


def is_marked(params: SamplingParams | None) -> bool:
    """Whether this request wants kept sets. Any process; who set the mark was checked at the door."""
    return params is not None and bool(params.extra_args) and FLAG in params.extra_args


def check_mark(params: SamplingParams) -> None:
    """Refuse a mark that somebody else set. Only in the process of the API.

    Raises:
        ValueError: the mark is not ours, or the request cannot be captured exactly.
    """
    if not is_marked(params):
        return
    if params.extra_args[FLAG] != _ours:
        raise ValueError(
            f"extra_args.{FLAG} is private: leave it out and send the request to /inference/v1/generate, "
            "which answers with kept sets"
        )
    # What the route has made sure of; sampling would be wrong without it.
    assert params.temperature >= 0.01
    assert params.top_p >= LOWEST_TOP_P
    assert params.logprobs is not None
    assert params.logprobs >= 0


__all__ = ["FLAG", "WIDTH", "check_mark", "is_marked", "mark"]
