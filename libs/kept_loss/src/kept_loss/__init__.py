"""Logprobs renormalised over the kept set of truncated sampling, without the vocabulary."""
