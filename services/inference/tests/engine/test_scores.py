"""Logprobs of a text over the whole vocabulary by vLLM's own route, as self-distillation asks for them."""

import asyncio
import random

import numpy as np
import pytest
from scipy.special import log_softmax

from .cases import Case

pytestmark = pytest.mark.engine


async def test_scores_are_over_the_whole_vocabulary_at_temperature_1_beside_truncated_requests(
    tiny, tiny_versions
):
    version = tiny.call("GET", "/keptset/v1/status").json()["weight_version"]
    reference = tiny_versions["base" if version is None else f"v{version:06d}"]
    draw = random.Random(5)
    texts = [[draw.randrange(5, 261) for _ in range(length)] for length in (2, 9, 130, 255)]
    cut = {"top_p": 0.7, "top_k": 20, "temperature": 0.6, "max_tokens": 40, "ignore_eos": True, "logprobs": 0}
    async with tiny.client() as client:

        async def score(ids: list[int]) -> list[dict]:
            body = {"prompt": ids, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
            answer = await client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            return answer.json()["choices"][0]["prompt_logprobs"]

        others = [Case("beside", ids[:5], cut).send(client) for ids in texts * 3]
        *scored, _ = await asyncio.gather(*map(score, texts), asyncio.gather(*others))
    for ids, entries in zip(texts, scored, strict=True):
        assert entries[0] is None
        found = [entry[str(token)]["logprob"] for entry, token in zip(entries[1:], ids[1:], strict=True)]
        each = log_softmax(reference.logits(ids[:1], ids[1:])[1], axis=-1)
        expected = each[np.arange(len(ids) - 1), ids[1:]]
        np.testing.assert_allclose(found, expected, atol=1e-3)
