"""Ties built on purpose: many ids share one head row, so their logits are equal to the last bit."""

import asyncio

import numpy as np
import pytest
from scipy.stats import chi2

from ..models.tiny import tie_rows, tiny_model
from ..models.tokenizer import byte_ids
from .cases import Case
from .evidence import Evidence
from .reference import MARGIN, Cut, Reference, exact_set

pytestmark = pytest.mark.engine

FALSE_ALARM = 1e-8
"""Of one chi-square test, by the approximation. With the few tests of a session, and cells that expect as
little as 5, a sampler that is right fails less than once in a million sessions."""


class TiedReference:
    """A model whose id i has the head row of id i % distinct, its ties exact in the reference, too."""

    def __init__(self, reference: Reference, distinct: int):
        self._reference, self.vocab_size = reference, reference.vocab_size
        self._row = np.arange(self.vocab_size) % distinct

    def logits(self, prompt: list[int], completion: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """As Reference, every logit the one of its head row."""
        return tuple(logits[:, self._row] for logits in self._reference.logits(prompt, completion))


class OneVersion(dict):
    """The same reference whatever the version is called."""

    def __init__(self, reference: TiedReference):
        super().__init__(base=reference)

    def __missing__(self, version: str) -> TiedReference:
        return self["base"]


async def check_ties(
    server, reference, distinct: int, widths: list[int], often: list[int], evidence: Evidence
):
    """Sets of these widths, for those in `often` frequencies too, on a server that runs the tied model."""
    references = OneVersion(reference)
    async with server.client() as client:
        for width in widths:
            for i, transport in enumerate(["json", "stream", "msgpack"]):
                params = {
                    "top_k": width,
                    "temperature": 1.3,
                    "max_tokens": 6,
                    "n": 2,
                    "logprobs": 0,
                    "ignore_eos": True,
                }
                case = Case(f"ties {width}", byte_ids(f"ties {i} {width}"), params, transport=transport)
                case.check(evidence, references, await case.send(client))
            if width in often:
                await check_frequencies(client, reference, distinct, width, evidence)
        await check_top_p_among_ties(client, reference, widths[-1])
    assert evidence.counts["differ at the edge"] == 0, "a tie may not be decided by chance"


async def check_frequencies(client, reference, distinct: int, width: int, evidence: Evidence) -> None:
    """One position sampled very often: nothing outside the set, equals equally often."""
    cut, prompt, at_a_time, requests = Cut(temperature=2.0, top_k=width), byte_ids(f"often {width}"), 16, 64
    params = {
        "temperature": cut.temperature,
        "top_k": width,
        "max_tokens": 1,
        "n": at_a_time,
        "ignore_eos": True,
    }
    case = Case("often", prompt, params, transport="msgpack")
    answers = await asyncio.gather(*(case.send(client) for _ in range(requests)))
    choices, times = [choice for answer in answers for choice in answer], at_a_time * requests
    _, logits = reference.logits(prompt, [0])
    kept = exact_set(logits[0], cut)
    drawn = np.zeros(reference.vocab_size, int)
    for choice in choices:
        assert choice.kept == [kept.tolist()]
        drawn[choice.token_ids[0]] += 1
    assert drawn[kept].sum() == times
    statistic, freedom = 0.0, 0
    for row in np.unique(kept % distinct):
        equals = drawn[kept[kept % distinct == row]]
        expected = equals.mean()
        if len(equals) > 1 and expected >= 5:
            statistic += ((equals - expected) ** 2 / expected).sum()
            freedom += len(equals) - 1
    assert freedom, "too few draws to judge"
    assert chi2.sf(statistic, freedom) > FALSE_ALARM, f"chi-square {statistic:.0f} at {freedom} degrees"
    evidence.count("draws among equals", times)


async def check_top_p_among_ties(client, reference, width: int) -> None:
    """top_p may cut anywhere among equals, but inside what top_k left and at the right mass."""
    params = {
        "temperature": 1.0,
        "top_k": width,
        "top_p": 0.9,
        "max_tokens": 6,
        "logprobs": 0,
        "ignore_eos": True,
    }
    prompt = byte_ids("ties with top_p")
    (choice,) = await Case("top_p", prompt, params).send(client)
    _, logits = reference.logits(prompt, choice.token_ids)
    for token, kept, x in zip(choice.token_ids, choice.kept, logits, strict=True):
        widest = exact_set(x, Cut(top_k=width))
        assert set(kept) <= set(widest.tolist())
        assert token in kept
        least, most = (len(exact_set(x, Cut(top_k=width, top_p=0.9 + off))) for off in (-MARGIN, MARGIN))
        assert least <= len(kept) <= most


async def test_ties_are_cut_to_the_lowest_ids_and_drawn_evenly(tiny, tiny_versions, evidence):
    distinct = 9  # 29 ids share each logit
    model = tiny_model(seed=3, sharpness=1.5)  # flat: the less likely groups get their share, too
    tie_rows(model, distinct)
    version = tiny_versions.publish_model(model)
    tiny.update(version)
    reference = TiedReference(tiny_versions[f"v{version:06d}"], distinct)
    await check_ties(tiny, reference, distinct, [5, 50, 200], [5, 50, 200], evidence)
