"""From the engine's output to the bytes that clients read."""

import base64
import json

import msgspec
import numpy as np
import pytest
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput, SamplingMask, WeightVersionSpan
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.outputs import LogprobsLists, SamplingMaskLists

from kept_tokens import KeptTokens
from kept_tokens.answers import GenerateAnswer
from kept_tokens.messages import decode, encode
from keptset_inference.capture.csr import keep_csr, kept_tokens
from keptset_inference.errors import RequestError
from keptset_inference.generate.binary_answer import binary_answer
from keptset_inference.generate.completion import completion
from keptset_inference.generate.json_answer import NO_EVIDENCE, json_choice, prompt_logprobs
from keptset_inference.generate.logprobs import LogprobRows
from keptset_inference.generate.sampling import Sampling

SETS = [[3, 17], [5], [2, 5, 9]]
TOKENS = [17, 5, 2]


def chunks(sets: list[list[int]]) -> list[SamplingMaskLists]:
    """As they come: a chunk of two tokens, then one token each."""
    pair = SamplingMaskLists(
        np.array([*sets[0], *sets[1]], np.int32), np.array([0, len(sets[0]), len(sets[0]) + len(sets[1])])
    )
    return [pair, *(SamplingMaskLists(np.array(row, np.int32)) for row in sets[2:])]


def flat(tokens: list[int], values: list[float], candidates: int = 0) -> LogprobRows:
    """As the output processor fills them: one step a token."""
    rows = LogprobRows()
    for token, value in zip(tokens, values, strict=True):
        ids = [[token, *(900 + i for i in range(candidates))]]
        logprobs = [[value, *(-0.5 if i == 0 else -np.inf for i in range(candidates))]]
        step = LogprobsLists(np.array(ids, np.int32), np.array(logprobs, np.float32), np.array([1]))
        rows.append(step, candidates)
    return rows


def output(tokens=TOKENS, sets=SETS, values=(-0.25, 0.0, -1.5), candidates=0, **changes) -> CompletionOutput:
    fields = {
        "index": 0,
        "text": "",
        "token_ids": tokens,
        "cumulative_logprob": None,
        "logprobs": flat(tokens, list(values), candidates),
        "finish_reason": "length",
        "sampling_mask": SamplingMask(chunks(sets)) if sets is not None else None,
        "weight_versions": [WeightVersionSpan("v000003", 0, len(tokens))],
    }
    return CompletionOutput(**fields | changes)


def sampling(masked: bool = True, logprobs: int | None = 0) -> Sampling:
    return Sampling(SamplingParams(top_k=3, logprobs=logprobs or 0), masked, logprobs)


def answer(out=None, want=None, dialect="kept_tokens") -> bytes:
    choice = completion(out or output(), want or sampling(), 1000)
    return msgspec.json.encode({"choices": [json_choice(choice, dialect)]})


def test_chunks_become_csr():
    assert kept_tokens(chunks(SETS)).rows() == SETS
    assert len(kept_tokens([])) == 0


def test_vllm_keeps_our_chunks_as_they_are(monkeypatch):
    monkeypatch.setattr(SamplingMaskLists, "to_nested_list", SamplingMaskLists.to_nested_list)
    chunk = SamplingMaskLists(np.array([1, 2], np.int32))
    assert chunk.to_nested_list() == [[1, 2]]
    keep_csr()
    assert chunk.to_nested_list()[0] is chunk


def test_the_raw_bytes_can_be_searched_for_the_ids():
    body = answer()
    needle = b'"kept_tokens":{"ids":"'
    assert body.count(needle) == 1
    start = body.index(needle) + len(needle)
    ids = base64.b64decode(body[start : body.index(b'"', start)], validate=True)
    assert np.frombuffer(ids, "<i4").tolist() == [3, 17, 5, 2, 5, 9]
    assert b": " not in body
    assert b", " not in body


def test_each_dialect_has_its_fields_and_no_other():
    choice = json.loads(answer(dialect="kept_tokens"))["choices"][0]
    assert KeptTokens.from_base64(choice["kept_tokens"]).rows() == SETS
    assert "sampling_mask" not in choice
    choice = json.loads(answer(dialect="sampling_mask"))["choices"][0]
    assert choice["sampling_mask"] == SETS
    assert "kept_tokens" not in choice
    choice = json.loads(answer(dialect="both"))["choices"][0]
    assert KeptTokens.from_base64(choice["kept_tokens"]).rows() == choice["sampling_mask"] == SETS


def test_null_says_that_the_request_gets_no_sets():
    body = answer(output(sets=None), sampling(masked=False), "both")
    assert b'"kept_tokens":null,"sampling_mask":null' in body


def test_logprobs_answer_both_shapes_at_once():
    # sglang#5984, vllm#10234: top_p with logprobs=5: -inf in JSON, HTTP 500
    entry = json.loads(answer(output(candidates=2), sampling(logprobs=2)))["choices"][0]["logprobs"][
        "content"
    ][0]
    assert list(entry) == ["token", "token_id", "logprob", "rank", "bytes", "top_logprobs"]
    assert (entry["token"], entry["token_id"], entry["logprob"], entry["rank"], entry["bytes"]) == (
        "token_id:17",
        17,
        -0.25,
        1,
        None,
    )
    best, masked_out = entry["top_logprobs"]
    assert (best["token"], best["token_id"], best["logprob"]) == ("token_id:900", 900, -0.5)
    assert masked_out["logprob"] == NO_EVIDENCE, "JSON has no -inf"


def test_logprobs_that_nobody_asked_for_are_not_answered():
    assert json.loads(answer(want=sampling(logprobs=None)))["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 0.125])
def test_a_logprob_that_is_none_fails_the_request_that_wants_sets(value):
    with pytest.raises(RequestError, match="logprob of token 1") as failed:
        answer(output(values=(-0.25, value, -1.5)))
    assert failed.value.status == 500
    answer(output(sets=None, values=(-0.25, value, -1.5)), sampling(masked=False))


@pytest.mark.parametrize(
    "sets",
    [
        None,
        SETS[:2],
        [[3, 17], [5], [5, 9]],
        [[3, 17], [], [2]],
        [[3, 17], [5], [2, 2]],
        [[3, 17], [5], [2, 1000]],
    ],
)
def test_sets_that_are_missing_or_wrong_fail_the_request(sets):
    # vllm#53826: masks lost on one parallel layout: null with status 200
    with pytest.raises(RequestError, match="choice 0") as failed:
        answer(output(sets=sets))
    assert failed.value.status == 500


def test_fewer_logprobs_than_tokens_fail_the_request():
    # vime#70, open-instruct#1817: fewer logprobs than tokens, filled with 0.0
    with pytest.raises(RequestError, match="2 logprobs for 3 tokens"):
        answer(output(logprobs=flat(TOKENS[:2], [-1.0, -1.0])))
    with pytest.raises(RequestError, match="none logprobs for 3 tokens"):
        answer(output(logprobs=None))
    with pytest.raises(RequestError, match="3 logprobs"):
        answer(output(logprobs=[{}, {}, {}]))


def test_an_output_without_tokens_is_whole():
    choice = json.loads(answer(output(tokens=[], sets=None, values=(), finish_reason="abort")))["choices"][0]
    assert choice["token_ids"] == []
    assert choice["finish_reason"] == "abort"
    assert KeptTokens.from_base64(choice["kept_tokens"]).num_tokens == 0


def test_tokens_that_spell_a_stop_string_stay_with_their_logprobs_and_sets():
    # vllm#47616: a stop string trims the ids, not logprobs and masks
    choice = json.loads(answer(output(finish_reason="stop", stop_reason="z")))["choices"][0]
    assert choice["token_ids"] == TOKENS
    assert len(choice["logprobs"]["content"]) == len(TOKENS)
    assert KeptTokens.from_base64(choice["kept_tokens"]).rows() == SETS
    for ids in (TOKENS[:2], [*TOKENS, 5]):
        with pytest.raises(RequestError, match="choice 0"):
            answer(output(tokens=ids, logprobs=flat(TOKENS, [-0.25, 0.0, -1.5]), values=[0.0] * len(ids)))


def test_an_engine_error_fails_the_request():
    with pytest.raises(RequestError, match="gave the request up") as failed:
        answer(output(finish_reason="error"))
    assert failed.value.status == 500


@pytest.mark.parametrize("moved", [False, True])
def test_a_grammar_that_the_engine_gives_up_is_the_requests_fault(moved: bool):
    """Unless a cache was to come from another server, which can also have failed."""
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a{99999999}"))
    params.extra_args = {"kv_transfer_params": {}} if moved else None
    with pytest.raises(RequestError, match="up" if moved else "structured_outputs: the engine") as failed:
        completion(output(finish_reason="error"), Sampling(params, True, 0), 1000)
    assert failed.value.status == (500 if moved else 400)


def test_msgpack_holds_the_same_as_the_json():
    choice = completion(output(candidates=2), sampling(logprobs=2), 1000)
    decoded = decode(encode(binary_answer("r", None, [choice], candidates=True)), GenerateAnswer)
    arrays = decoded.choices[0].arrays(1000, require_masks=True)
    assert arrays.token_ids.tolist() == TOKENS
    assert arrays.logprobs.tolist() == [-0.25, 0.0, -1.5]
    assert arrays.kept.rows() == SETS
    top = decoded.choices[0].top_logprobs
    assert np.frombuffer(top.counts, "<i4").tolist() == [1, 1, 1], "what is masked out is left out"
    assert np.frombuffer(top.ids, "<i4").tolist() == [900] * 3
    assert np.frombuffer(top.logprobs, "<f4").tolist() == [-0.5] * 3
    assert decoded.choices[0].weight_versions[0].version == "v000003"


@pytest.mark.parametrize("tokens", [1, 300, 70_000])
def test_msgpack_is_12_bytes_a_token_4_a_kept_id_and_256_an_answer(tokens):
    ids = np.arange(3 * tokens, dtype=np.int32) % 3
    offsets = np.arange(0, 3 * tokens + 1, 3)
    out = output(
        tokens=[1] * tokens,
        values=[-1.0] * tokens,
        sampling_mask=SamplingMask([SamplingMaskLists(ids, offsets)]),
        finish_reason="stop",
        stop_reason=151_643,
    )
    body = encode(binary_answer("f" * 32, None, [completion(out, sampling(), 1000)], candidates=False))
    assert len(body) <= 12 * tokens + 4 * 3 * tokens + 256


def test_prompt_logprobs_are_as_in_vllms_own_route():
    logprobs = FlatLogprobs()
    logprobs.append(None)
    logprobs.append_fast([4, 9], [-2.0, -np.inf], iter([3, 1]), [None, "x"])
    assert prompt_logprobs(None) is None
    assert prompt_logprobs(logprobs) == [
        None,
        {
            "4": {"logprob": -2.0, "rank": 3, "decoded_token": None},
            "9": {"logprob": NO_EVIDENCE, "rank": 1, "decoded_token": "x"},
        },
    ]
