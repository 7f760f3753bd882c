"""The little of vLLM's config that a logits processor reads."""

from types import SimpleNamespace


def vllm_config(vocabulary: int, max_num_seqs: int = 32) -> SimpleNamespace:
    """Enough for `KeptRows`."""
    return SimpleNamespace(
        model_config=SimpleNamespace(get_vocab_size=lambda: vocabulary),
        scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs),
    )
