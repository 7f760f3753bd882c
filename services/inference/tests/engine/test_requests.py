"""What the server refuses and how it says so, who may ask at all, and which routes exist."""

import numpy as np
import pytest

from kept_tokens.answers import GenerateAnswer
from kept_tokens.messages import decode

from ..models.tokenizer import END, byte_ids
from .answers import error_of, of_json
from .cases import Allowed, Case, digits_then_end, not_ending_before, only, without_words

pytestmark = pytest.mark.engine

CUT = {"top_k": 20, "top_p": 0.9, "max_tokens": 3}

BENDING = {
    "temperature": {"temperature": 0.005},
    "presence_penalty": {"presence_penalty": 0.5},
    "frequency_penalty": {"frequency_penalty": -0.5},
    "repetition_penalty": {"repetition_penalty": 1.1},
    "logit_bias": {"logit_bias": {"17": 2.0}},
    "thinking_token_budget": {"thinking_token_budget": 4},
    "watermarking": {"watermarking": {"key": "x"}},
}


def ask(server, sampling_params: dict, **body):
    return server.generate({"token_ids": [20, 30, 40], "sampling_params": sampling_params} | body)


@pytest.mark.parametrize("name", BENDING)
def test_what_cannot_be_replayed_is_refused_with_masks(tiny, name):
    refused = ask(tiny, CUT | BENDING[name])
    assert refused.status_code == 400, refused.text
    assert name in error_of(refused)


@pytest.mark.parametrize(
    "name", ["presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"]
)
def test_the_way_out_of_a_refusal_works(tiny, name):
    """Without masks, and without truncation, these are vLLM's own affair."""
    for body in ({"sampling_params": CUT, "kept_tokens": False}, {"sampling_params": {"max_tokens": 3}}):
        answer = ask(tiny, body["sampling_params"] | BENDING[name], kept_tokens=body.get("kept_tokens"))
        assert answer.status_code == 200, answer.text
        assert of_json(answer.json())[0].kept is None


def test_neutral_values_are_no_reason_to_refuse(tiny):
    neutral = {"presence_penalty": 0.0, "frequency_penalty": 0, "repetition_penalty": 1.0, "min_p": 0.0}
    answer = ask(tiny, CUT | neutral | {"stop": [], "stop_token_ids": [], "min_tokens": 0, "seed": None})
    assert answer.status_code == 200, answer.text
    assert of_json(answer.json())[0].kept is not None


def test_greedy_with_required_masks_is_refused(tiny):
    refused = ask(tiny, {"temperature": 0.0, "max_tokens": 2}, kept_tokens=True)
    assert refused.status_code == 400
    assert "temperature" in error_of(refused)
    assert ask(tiny, {"temperature": 0.0, "max_tokens": 2}).status_code == 200


def test_more_choices_than_sequences_at_a_time_wait_their_turn(tiny):
    answer = ask(tiny, CUT | {"n": 20})
    assert answer.status_code == 200, answer.text
    assert [len(choice.kept) for choice in of_json(answer.json())] == [3] * 20


async def test_each_way_to_limit_support_gets_masks_by_itself(tiny, tiny_versions, evidence):
    # slime: top_k or min_p alone: no masks, no error
    # NeMo-RL#3497, verl#702: the model's generation_config brought a penalty. This one's has a penalty,
    # temperature 0.7, top_k 20 and top_p 0.8, and nothing of it acts on what is left unset here.
    prompt = byte_ids("each way")
    letters = byte_ids("abc")
    alone: list[tuple[dict, Allowed | None]] = [
        ({"top_k": 9}, None),
        ({"top_k": 261}, None),
        ({"top_k": 512}, None),
        ({"top_p": 0.5}, None),
        ({"min_p": 0.3}, None),
        ({"bad_words": ["q"]}, without_words("q")),
        ({"allowed_token_ids": letters}, only(letters)),
        ({"min_tokens": 2}, not_ending_before(2, [END])),
        ({"structured_outputs": {"regex": "[0-9]{9}"}}, digits_then_end(9)),
    ]
    async with tiny.client() as client:
        for params, allowed in alone:
            case = Case("each", prompt, params | {"max_tokens": 3, "logprobs": 0}, allowed=allowed)
            choices = await case.send(client)
            case.check(evidence, tiny_versions, choices)
            evidence.count("sets by a single limit", len(choices[0].kept))


MALFORMED = {
    "unknown sampling parameter": ({"sampling_params": {"topp": 0.9}}, "topp"),
    "private sampling parameter": ({"sampling_params": {"extra_args": {"keptset": 1}}}, "extra_args"),
    "unknown field": ({"kept_token": True}, "kept_token"),
    "kept_tokens is no bool": ({"kept_tokens": "yes"}, "kept_tokens"),
    "no ids": ({"token_ids": []}, "token_ids"),
    "ids missing": ({"token_ids": None}, "token_ids"),
    "negative id": ({"token_ids": [5, -1]}, "-1"),
    "id outside the vocabulary": ({"token_ids": [5, 261]}, "261"),
    "id is text": ({"token_ids": ["5"]}, "token_ids"),
    "id is a fraction": ({"token_ids": [5.5]}, "token_ids"),
    "prompt too long": ({"token_ids": [5] * 257}, "256"),
    "prompt and answer too long": ({"token_ids": [5] * 200, "sampling_params": {"max_tokens": 100}}, "256"),
    "top_p of 0": ({"sampling_params": {"top_p": 0.0}}, "top_p"),
    "top_p above 1": ({"sampling_params": {"top_p": 1.5}}, "top_p"),
    "negative temperature": ({"sampling_params": {"temperature": -1}}, "temperature"),
    "top_k is text": ({"sampling_params": {"top_k": "5"}}, "top_k"),
    "top_k of -2": ({"sampling_params": {"top_k": -2}}, "top_k"),
    "no tokens": ({"sampling_params": {"max_tokens": 0}}, "max_tokens"),
    "no choices": ({"sampling_params": {"n": 0}}, "n "),
    "allowed id outside": ({"sampling_params": {"allowed_token_ids": [5, 999]}}, "allowed_token_ids"),
    **{
        f"structured outputs that cannot be followed: {value}": (
            {"sampling_params": {"structured_outputs": {field: value}}},
            "",
        )
        for field, value in (
            ("regex", "("),
            ("regex", "(?=a)b"),
            ("regex", "a{5,2}"),
            ("regex", "\0"),
            ("grammar", "root ::= undefined"),
            ("json", "not json"),
            ("json", '{"type": "nope"}'),
            ("json", '{"type": "string", "pattern": "("}'),
            ("choice", []),
            ("json_object", False),
        )
    },
    "logprobs below 0": ({"sampling_params": {"logprobs": -5}}, "logprobs"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_requests_are_refused(tiny, name):
    change, says = MALFORMED[name]
    body = {"token_ids": [20, 30], "sampling_params": {"max_tokens": 2}} | change
    if body["token_ids"] is None:
        del body["token_ids"]
    refused = tiny.generate(body)
    assert refused.status_code == 400, refused.text
    assert says in error_of(refused)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b'{"token_ids":[5]', b"\xff\xfe"])
def test_a_body_that_is_no_request_is_refused(tiny, content):
    refused = tiny.call("POST", "/inference/v1/generate", content=content)
    assert refused.status_code == 400
    error_of(refused)


def test_an_unknown_dialect_is_refused(tiny):
    body = {"token_ids": [20], "sampling_params": CUT}
    refused = tiny.generate(body, **{"X-Kept-Tokens-Format": "kept_token"})
    assert refused.status_code == 400
    assert "sampling_mask" in error_of(refused), "says which there are"


def test_a_server_that_refused_goes_on(tiny):
    """Runs after the refusals above: none of them may have hurt the engine."""
    assert ask(tiny, CUT).status_code == 200
    assert tiny.call("GET", "/health").status_code == 200


def test_status_says_what_the_server_does(tiny):
    status = tiny.call("GET", "/keptset/v1/status").json()
    assert status["service"] == "inference"
    assert status["model"] == tiny.model
    assert (status["vocab_size"], status["max_model_len"]) == (261, 256)
    capture = status["capture"]
    assert (capture["enabled"], capture["kind"], capture["width"], capture["proven"]) == (
        True,
        "v1",
        512,
        True,
    )
    assert set(status["formats"]) >= {"kept_tokens", "sampling_mask", "both"}
    assert status["kept_tokens_format"] == "kept_tokens"
    assert status["vllm"] == "0.32.0"


KNOWN = [
    ("GET", "/v1/models"), ("POST", "/v1/completions"), ("POST", "/v1/chat/completions"),
    ("POST", "/inference/v1/generate"), ("GET", "/keptset/v1/status"), ("POST", "/keptset/v1/weights"),
    ("GET", "/metrics"), ("GET", "/openapi.json"), ("GET", "/docs"), ("GET", "/redoc"), ("GET", "/version"),
    ("GET", "/load"), ("POST", "/tokenize"), ("POST", "/detokenize"), ("GET", "/ping"),
    ("POST", "/invocations"),
    ("GET", "/keptset/v1/nothing"), ("GET", "/"), ("GET", "/metrics/"), ("GET", "//metrics"),
    ("GET", "/health/../metrics"), ("GET", "/%6detrics"),
]  # fmt: skip


def routes(server) -> set[tuple[str, str]]:
    paths = server.call("GET", "/openapi.json").json()["paths"]
    return {(method.upper(), path) for path, methods in paths.items() for method in methods}


@pytest.mark.parametrize(
    "authorization", [None, "Bearer wrong", "Bearer", "only-for-tests", "Basic b25seQ=="]
)
def test_the_api_key_guards_every_route_but_health(tiny, authorization):
    declared = routes(tiny)
    assert ("POST", "/inference/v1/generate") in declared
    assert ("POST", "/keptset/v1/weights") in declared
    headers = {"Authorization": authorization or ""}
    for method, path in sorted(declared | set(KNOWN)):
        expected = 200 if path == "/health" else 401
        answer = tiny.call(method, path, headers=headers)
        assert answer.status_code == expected, (method, path, answer.status_code)
        if expected == 401:
            error_of(answer)


CLOSED = """
    /collective_rpc /reset_prefix_cache /reset_mm_cache /reset_encoder_cache /sleep /wake_up /is_sleeping
    /server_info /pause /resume /is_paused /init_weight_transfer_engine /start_weight_update /update_weights
    /finish_weight_update /get_world_size /start_profile /stop_profile /scale_elastic_ep /abort_requests
    /v1/load_lora_adapter /v1/unload_lora_adapter /shutdown_weight_transfer_engine /start_draft_weight_update
    /update_weight_version /weight_info /weight_checker /release_kv_cache_memory /fault_tolerance/apply
    /is_scaling_elastic_ep
"""


def test_developer_routes_are_closed(tiny):
    closed = set(CLOSED.split())
    assert not closed & {path for _, path in routes(tiny)}
    for path in closed:
        for method in ("GET", "POST"):
            assert tiny.call(method, path).status_code in (404, 405), (method, path)


def test_msgpack_carries_the_most_likely_tokens_of_the_json(tiny):
    params = {"top_k": 20, "top_p": 0.9, "max_tokens": 6, "logprobs": 4, "seed": 5, "ignore_eos": True}
    body = {"token_ids": [20, 30, 40], "sampling_params": params}
    (from_json,) = of_json(tiny.generate(body).json())
    answer = decode(tiny.generate(body, Accept="application/msgpack").content, GenerateAnswer)
    top = answer.choices[0].top_logprobs
    assert np.frombuffer(answer.choices[0].token_ids, "<i4").tolist() == from_json.token_ids
    counts = np.frombuffer(top.counts, "<i4")
    ids, values = np.frombuffer(top.ids, "<i4"), np.frombuffer(top.logprobs, "<f4")
    ends = np.cumsum(counts)
    for position, expected in enumerate(from_json.top):
        place = slice(ends[position] - counts[position], ends[position])
        finite = {i: value for i, value in expected.items() if value > -9999}
        assert dict(zip(ids[place].tolist(), values[place].tolist(), strict=True)) == pytest.approx(finite)
    assert counts.max() == 4
