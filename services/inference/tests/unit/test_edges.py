"""Truncation at its edges, in vLLM's own sampler with our capture in it."""

import numpy as np
import pytest
import torch

from keptset_inference.capture.bounds import LOWEST_TOP_P
from keptset_inference.capture.columns import split_columns

from .test_rows import marked
from .test_sampler import VOCABULARY, capture, sample


@pytest.mark.parametrize("top_p", [LOWEST_TOP_P, 1e-9, 1e-7, 1e-3])  # the route raises what is 0 in float32
@pytest.mark.parametrize("seed", range(4))
def test_the_best_token_always_stays(top_p: float, seed: int):
    # mlx-lm#1912: top_p 1e-7 left an empty nucleus, and a random token was sampled
    torch.manual_seed(seed)
    logits = torch.randn(3, VOCABULARY) * 3
    requests = [marked(top_p=top_p, top_k=VOCABULARY - 1, temperature=t) for t in (0.1, 1.0, 2.0)]
    sampled, lists = sample(capture(), logits, requests)
    _, masks, problems = split_columns(lists, np.array(sampled))
    assert problems == []
    best = logits.argmax(-1).tolist()
    assert sampled == best
    assert masks.token_ids.tolist() == best
    assert masks.offsets.tolist() == [0, 1, 2, 3]
