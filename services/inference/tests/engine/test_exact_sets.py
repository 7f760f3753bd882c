"""Sets and logprobs of the real engine equal those that transformers computes; 261 ids."""

import asyncio

import pytest

from ..models.tokenizer import byte_ids, text_of
from .cases import TRANSPORTS, Case, mixed_cases, only

pytestmark = pytest.mark.engine


async def send_all(server, cases: list[Case], spread: float):
    """All answers; requests join one after the other within `spread` seconds, and leave as they end."""

    async def later(client, case, delay):
        await asyncio.sleep(delay)
        return await case.send(client)

    async with server.client() as client:
        delays = (spread * i / len(cases) for i in range(len(cases)))
        return await asyncio.gather(*(later(client, c, d) for c, d in zip(cases, delays, strict=True)))


async def test_mixed_batches_with_preemptions_and_chunked_prefill(tiny, tiny_versions, evidence):
    # vllm#29071: preemption, chunked prefill: logprobs lost or doubled
    before = tiny.metric("vllm:num_preemptions_total")
    cases = mixed_cases(seed=1, rounds=6, vocabulary=261, longest_prompt=150, most_tokens=60)
    for spread in (4, 0):  # a quick engine has done with one before the next one comes: then all at once
        answers = await send_all(tiny, cases, spread)
        for case, choices in zip(cases, answers, strict=True):
            case.check(evidence, tiny_versions, choices)
            if case.name == "n":  # verl#438: n > 1: ignored, or identical samples
                assert len({tuple(choice.token_ids) for choice in choices}) == case.sampling_params["n"] == 3
        preemptions = int(tiny.metric("vllm:num_preemptions_total") - before)
        if preemptions:
            break
    evidence.check_edges(floor=2)
    assert evidence.counts["sets"] > 2000
    assert evidence.counts["unmasked logprobs"] > 500
    assert all(evidence.counts[f"sets by {transport}"] for transport in TRANSPORTS)
    assert preemptions, "the KV cache was not small enough to preempt"
    evidence.count("preemptions", preemptions)


async def test_seeds_with_chunked_prefill(tiny, tiny_versions, evidence):
    """Prompts longer than a step with per-request seeds: stock vLLM's engine dies of it on a CPU."""
    cases = [case for case in mixed_cases(2, 16, 261, 20, 24) if case.name == "seed"]
    for i, case in enumerate(cases):
        case.prompt = [5 + (i * 37 + j * j) % 256 for j in range(150)]
        case.transport = "json"
    together = await send_all(tiny, cases, spread=0)
    for case, choices in zip(cases, together, strict=True):
        case.check(evidence, tiny_versions, choices)
    alone = await send_all(tiny, cases[:1], spread=0)
    assert alone[0][0].token_ids == together[0][0].token_ids


async def test_stop_strings_and_stop_ids_end_where_they_should(tiny, tiny_versions, evidence):
    # vllm#47616: a stop string trims the ids, not logprobs and masks
    letters = "abcdefgh"
    common = {"allowed_token_ids": byte_ids(letters), "top_k": 512, "temperature": 1.3, "logprobs": 0}
    cases = []
    for i, transport in enumerate(TRANSPORTS * 2):
        stop = [{"stop": ["e"]}, {"stop": ["bc", "h"], "include_stop_str_in_output": True}][i % 2]
        stop = {"stop_token_ids": byte_ids("cd")} if i % 3 == 0 else stop
        params = common | stop | {"max_tokens": 40, "seed": i}
        prompt = byte_ids(f"stop {i} ")
        cases.append(Case(f"stop {i}", prompt, params, allowed=only(byte_ids(letters)), transport=transport))
    answers = await send_all(tiny, cases, spread=0)
    reasons = set()
    for case, choices in zip(cases, answers, strict=True):
        case.check(evidence, tiny_versions, choices)
        (choice,) = choices
        text = text_of(choice.token_ids)
        if choice.finish_reason == "length":
            continue
        reasons.add(choice.stop_reason)
        if isinstance(choice.stop_reason, int):
            assert choice.token_ids[-1] == choice.stop_reason
            assert not set(choice.token_ids[:-1]) & set(case.sampling_params["stop_token_ids"])
        else:
            assert text.endswith(choice.stop_reason)
            assert not any(stop in text[:-1] for stop in case.sampling_params["stop"])
    assert {type(reason) for reason in reasons} == {int, str}


async def test_a_rollout_that_repeats_itself_ends_with_all_its_sets(tiny, tiny_versions, evidence):
    (only_id,) = byte_ids("a")
    ends = {"repetition_detection": {"max_pattern_size": 1, "min_count": 4}, "max_tokens": 20, "logprobs": 0}
    params = ends | {"allowed_token_ids": [only_id], "top_k": 512}
    cases = [
        Case(name, byte_ids("again "), params, allowed=only([only_id]), transport=name) for name in TRANSPORTS
    ]
    for case, choices in zip(cases, await send_all(tiny, cases, spread=0), strict=True):
        case.check(evidence, tiny_versions, choices)
        (choice,) = choices
        assert (choice.token_ids, choice.finish_reason) == ([only_id] * 4, "repetition")


async def test_every_dialect_says_the_same(tiny, tiny_versions, evidence):
    params = {"top_k": 60, "top_p": 0.97, "temperature": 1.3, "logprobs": 0, "max_tokens": 20, "seed": 5}
    prompt = byte_ids("the same in every dialect")
    answers = {}
    async with tiny.client() as client:
        for transport in TRANSPORTS:
            case = Case(transport, prompt, params | {"ignore_eos": True, "n": 2}, transport=transport)
            answers[transport] = await case.send(client)
            case.check(evidence, tiny_versions, answers[transport])
    for transport, choices in answers.items():
        for one, first in zip(choices, answers["json"], strict=True):
            for name in ("token_ids", "kept", "finish_reason", "stop_reason", "versions"):
                assert getattr(one, name) == getattr(first, name), (transport, name)
            assert one.logprobs == pytest.approx(first.logprobs, rel=1e-6, abs=1e-7), transport


def test_the_bytes_that_deployed_clients_search_for(tiny):
    body = {"token_ids": [7, 8, 9], "sampling_params": {"top_k": 4, "max_tokens": 3}}
    default = tiny.generate(body)
    assert b'"kept_tokens":{"ids":"' in default.content
    assert b"sampling_mask" not in default.content
    assert b": " not in default.content
    assert b", " not in default.content
    masks = tiny.generate(body, **{"X-Kept-Tokens-Format": "sampling_mask"})
    assert b'"sampling_mask":[[' in masks.content
    assert b"kept_tokens" not in masks.content
    both = tiny.generate(body, **{"X-Kept-Tokens-Format": "both"})
    assert b'"kept_tokens":{"ids":"' in both.content
    assert b'"sampling_mask":[[' in both.content
    none = tiny.generate(body | {"kept_tokens": False})
    assert b'"kept_tokens":null' in none.content
