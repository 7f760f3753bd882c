"""Ids that a model's head has and its tokenizer does not: padding of the vocabulary, never to be sampled."""

from vllm.config import VllmConfig
from vllm.tokenizers import cached_tokenizer_from_config

KEY = "keptset_known_ids"
"""In `VllmConfig.additional_config`, which reaches every process of the engine."""


def mask_unknown_ids(config: VllmConfig) -> int:
    """Ask the processes that sample to keep requests with kept sets from ids that the tokenizer has not.

    Returns:
        How many ids are left: one more than the tokenizer's highest.
    """
    vocabulary = config.model_config.get_vocab_size()
    tokenizer = cached_tokenizer_from_config(config.model_config)
    if tokenizer is None:  # skip_tokenizer_init: nothing is known
        return vocabulary
    known = min(1 + max(tokenizer.get_vocab().values()), vocabulary)
    if known < vocabulary:  # else the config, of which answers carry a hash, stays as without capture
        config.additional_config = {**config.additional_config, KEY: known}
    return known


def known_ids(config: VllmConfig) -> int:
    """Ids from here on are masked out; the whole vocabulary if nothing is."""
    vocabulary: int = config.model_config.get_vocab_size()
    more = getattr(config, "additional_config", None)
    return min(more.get(KEY, vocabulary), vocabulary) if isinstance(more, dict) else vocabulary


__all__ = ["KEY", "known_ids", "mask_unknown_ids"]
