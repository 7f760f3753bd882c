"""The body of a request: what is taken, and how the rest is refused."""

import json

import pytest

from keptset_inference.errors import RequestError
from keptset_inference.generate.request import parse_request


def parse(**fields):
    return parse_request(json.dumps({"token_ids": [1, 2]} | fields).encode(), vocab_size=100, max_model_len=8)


def refusal(**fields) -> str:
    with pytest.raises(RequestError) as refused:
        parse(**fields)
    assert refused.value.status == 400
    return str(refused.value)


def test_a_request_of_ids_alone_is_whole():
    request = parse()
    assert request.token_ids == [1, 2]
    assert request.sampling == {}
    assert (request.stream, request.kept_tokens, request.model) == (False, None, None)


def test_every_field_arrives():
    request = parse(
        sampling_params={"top_k": 3},
        model="m",
        request_id="r",
        stream=True,
        stream_options={"include_usage": True},
        kept_tokens=False,
        priority=-3,
        cache_salt="s",
        kv_transfer_params={"a": 1},
    )
    assert request.sampling == {"top_k": 3}
    assert (request.model, request.request_id, request.cache_salt) == ("m", "r", "s")
    assert (request.stream, request.include_usage, request.kept_tokens) == (True, True, False)
    assert (request.priority, request.kv_transfer_params) == (-3, {"a": 1})


def test_fields_of_vllms_route_that_ask_for_nothing_are_taken():
    parse(features=None, output_mode="tokens", return_token_ids=False, token_offsets=None)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"token_ids": []}, ["token_ids", "empty"]),
        ({"token_ids": "12"}, ["token_ids", "'12'", "list"]),
        ({"token_ids": [1, True]}, ["token_ids[1]", "True", "boolean"]),
        ({"token_ids": [1, None]}, ["token_ids[1]", "null"]),
        ({"token_ids": [1, 2.0]}, ["token_ids[1]", "2.0"]),
        ({"token_ids": [1, -1]}, ["token_ids[1]", "-1", "0 to 99"]),
        ({"token_ids": [1, 100]}, ["token_ids[1]", "100", "0 to 99"]),
        ({"token_ids": [2**70]}, ["token_ids[0]", "0 to 99"]),
        ({"token_ids": [1] * 8}, ["8 tokens", "at most 7", "max_model_len"]),
        ({"kept_token": True}, ["kept_token", "did you mean kept_tokens"]),
        ({"prompt": "abc"}, ["prompt: unknown field", "token_ids", "/tokenize"]),
        ({"messages": []}, ["messages: unknown field", "token_ids", "/tokenize"]),
        ({"input_ids": [1]}, ["input_ids: unknown field", "token_ids"]),
        ({"top_p": 0.9}, ["top_p: unknown field", "sampling_params.top_p"]),
        ({"structured_outputs": {}}, ["sampling_params.structured_outputs"]),
        ({"response_format": {}}, ["sampling_params.structured_outputs", "json"]),
        ({"guided_regex": "a"}, ["sampling_params.structured_outputs", "regex"]),
        ({"max_completion_tokens": 3}, ["sampling_params.max_tokens"]),
        ({"kept_tokens": "yes"}, ["kept_tokens", "'yes'", "true or false"]),
        ({"kept_tokens": 1}, ["kept_tokens", "1"]),
        ({"stream": 1}, ["stream"]),
        ({"sampling_params": [1]}, ["sampling_params", "object"]),
        ({"request_id": ""}, ["request_id"]),
        ({"request_id": "x" * 257}, ["request_id", "257"]),
        ({"priority": 2**63}, ["priority"]),
        ({"cache_salt": ""}, ["cache_salt"]),
        ({"features": {"mm_hashes": {}}}, ["features", "leave it out"]),
        ({"output_mode": "text"}, ["output_mode", "'text'"]),
        ({"stream_options": {"include_usage": True}}, ["stream_options", "stream = true"]),
        (
            {"stream": True, "stream_options": {"include_usag": True}},
            ["include_usag", "did you mean include_usage"],
        ),
    ],
)
def test_a_refusal_names_field_value_and_way_out(fields, says):
    text = refusal(**fields)
    for word in says:
        assert word in text


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b"3", b'{"token_ids":[5]', b"\xff\xfe", b"[" * 100_000]
)
def test_a_body_that_is_no_object_is_refused(body):
    with pytest.raises(RequestError, match="the body"):
        parse_request(body, 100, 8)


def test_a_missing_prompt_is_named():
    with pytest.raises(RequestError, match="token_ids is missing"):
        parse_request(b"{}", 100, 8)
