"""Logprobs renormalised over the kept set of truncated sampling, without the vocabulary."""

from .api import kept_logprobs
from .batches import ScoredTokens, scored_tokens
from .dense import dense_kept_logprobs
from .parallel import parallel_kept_logprobs
from .types import KeptLogprobs, KeptSet

__all__ = [
    "KeptLogprobs",
    "KeptSet",
    "ScoredTokens",
    "dense_kept_logprobs",
    "kept_logprobs",
    "parallel_kept_logprobs",
    "scored_tokens",
]
