"""The sampling parameters: who gets sets, and what is refused with which way out."""

import numpy as np
import pytest

from keptset_inference.capture.bounds import LOWEST_TOP_P
from keptset_inference.capture.flag import is_marked
from keptset_inference.errors import RequestError
from keptset_inference.generate.request import GenerateRequest
from keptset_inference.generate.sampling import KNOWN, prepare_sampling
from keptset_settings.sampling import BENDING, HARMLESS, NEUTRAL

from .facts import facts


def prepare(sampling: dict, *, kept_tokens: bool | None = None, stream: bool = False, **engine):
    request = GenerateRequest(token_ids=[1, 2, 3], sampling=sampling, kept_tokens=kept_tokens, stream=stream)
    return prepare_sampling(request, facts(**engine))


def refusal(sampling: dict, **more) -> str:
    with pytest.raises(RequestError) as refused:
        prepare(sampling, **more)
    assert refused.value.status == 400
    return str(refused.value)


WITH_SETS = [
    {"top_k": 512},
    {"top_k": 1},
    {"top_p": 0.9, "top_k": 20},
    {"min_p": 0.1, "top_k": 20},
    {"min_tokens": 2, "top_k": 20},
    {"bad_words": ["x"], "top_k": 20},
    {"allowed_token_ids": [3, 4]},
    {"structured_outputs": {"regex": "[0-9]"}, "top_k": 20},
    {"top_k": 5, "temperature": 0.01},
    {"top_k": 5, "presence_penalty": 0.0, "frequency_penalty": 0, "repetition_penalty": 1, "logit_bias": {}},
    {"top_k": 5, "seed": 3, "n": 4, "logprobs": 5, "stop_token_ids": [4], "ignore_eos": True},
]
WITHOUT_SETS = [
    {},
    {"top_p": 1.0, "top_k": 0},
    {"top_k": -1},
    {"temperature": 0.0},
    {"temperature": 0, "top_p": 0.5, "top_k": 3},
    {"temperature": 0, "min_tokens": 2},  # vLLM itself drops only what stands above
    {"temperature": 0, "allowed_token_ids": [3, 4], "bad_words": ["x"]},
    {"temperature": 0, "structured_outputs": {"regex": "[0-9]"}},
    {"temperature": 0.005},
    {"repetition_penalty": 1.3, "logit_bias": {"3": 1.0}},
]


@pytest.mark.parametrize("sampling", WITH_SETS)
def test_whatever_limits_the_support_gets_sets(sampling):
    prepared = prepare(sampling)
    assert prepared.masked
    assert is_marked(prepared.params)
    assert prepared.params.logprobs is not None, "the sets travel with the logprobs"
    assert prepared.logprobs == sampling.get("logprobs"), "but only who asked for logprobs gets them"


@pytest.mark.parametrize(
    "alone",
    [
        {"top_p": 0.9},
        {"top_k": 299},
        {"min_p": 0.1},
        {"min_tokens": 2},
        {"bad_words": ["x"]},
        {"allowed_token_ids": [3, 4]},
        {"structured_outputs": {"regex": "[0-9]"}},
    ],
)
def test_each_of_them_is_reason_enough(alone):
    """Where the vocabulary is small enough for sets without a top_k."""
    assert prepare(alone, vocab_size=300).masked


@pytest.mark.parametrize("top_p", [1e-37, 1e-38, 1e-39, 1e-45, 1e-46, 1e-320])
def test_a_top_p_that_would_be_nothing_as_float32_keeps_the_best_id(top_p):
    params = prepare({"top_p": top_p, "top_k": 20}).params
    assert np.float32(params.top_p) >= np.finfo(np.float32).tiny, "flushed to 0 by a GPU otherwise"
    assert params.top_p == max(top_p, LOWEST_TOP_P)
    assert prepare({"top_p": top_p, "top_k": 20}, kept_tokens=False).params.top_p == top_p, "vLLM's business"


@pytest.mark.parametrize("sampling", WITHOUT_SETS)
def test_who_limits_nothing_or_is_greedy_gets_none(sampling):
    prepared = prepare(sampling)
    assert not prepared.masked
    assert not is_marked(prepared.params)


@pytest.mark.parametrize("sampling", WITH_SETS + WITHOUT_SETS)
def test_false_means_none_and_leaves_the_parameters_alone(sampling):
    prepared = prepare(sampling, kept_tokens=False)
    assert not prepared.masked
    assert prepared.params.extra_args is None
    assert prepared.params.logprobs == sampling.get("logprobs")


@pytest.mark.parametrize("sampling", WITH_SETS + WITHOUT_SETS)
def test_without_capture_nobody_gets_sets(sampling):
    assert not prepare(sampling, width=None).masked


def test_true_on_a_small_vocabulary_takes_the_whole_of_it():
    assert prepare({}, kept_tokens=True, vocab_size=512).masked
    assert prepare({"top_k": 600}, kept_tokens=True, vocab_size=300).masked


@pytest.mark.parametrize("top_k", [299, 300, 301, 512, 1000])
def test_a_top_k_gets_masks_however_small_the_vocabulary_is(top_k):
    assert prepare({"top_k": top_k}, vocab_size=300).masked


WAY_OUT = "kept_tokens = false"


@pytest.mark.parametrize(
    ("sampling", "says"),
    [
        ({"top_p": 0.9}, ["top_k", "1000", "set top_k to 1 to 512"]),
        ({"top_p": 0.9, "top_k": -1}, ["top_k = -1", "set top_k to 1 to 512"]),
        ({"min_p": 0.1}, ["top_k"]),
        ({"min_tokens": 1}, ["top_k"]),
        ({"top_k": 513}, ["top_k = 513", "512"]),
        ({"top_k": 1000}, ["top_k = 1000", "512"]),
        ({"top_k": 513, "allowed_token_ids": list(range(600))}, ["top_k = 513"]),
        ({"allowed_token_ids": list(range(600))}, ["top_k"]),
        ({"top_k": 5, "temperature": 0.005}, ["temperature = 0.005", "0.01"]),
        ({"top_k": 5, "presence_penalty": 0.1}, ["presence_penalty = 0.1"]),
        ({"top_k": 5, "frequency_penalty": -0.1}, ["frequency_penalty = -0.1"]),
        ({"top_k": 5, "repetition_penalty": 1.1}, ["repetition_penalty = 1.1"]),
        ({"top_k": 5, "logit_bias": {"3": 1.0}}, ["logit_bias"]),
        ({"top_k": 5, "thinking_token_budget": 0}, ["thinking_token_budget"]),
        ({"top_k": 5, "thinking_token_budget": 9}, ["thinking_token_budget"]),
        ({"top_k": 5, "watermarking": True}, ["watermarking"]),
        ({"top_k": 5, "trace_decode_token_ids": [3]}, ["trace_decode_token_ids"]),
        ({"top_k": 5, "logprob_token_ids": [3], "logprobs": 1}, ["logprob_token_ids"]),
        ({"top_k": 5, "logprobs": -1}, ["logprobs = -1"]),
    ],
)
def test_what_would_not_be_replayed_exactly_is_refused_with_the_way_out(sampling, says):
    text = refusal(sampling)
    for word in [*says, WAY_OUT]:
        assert word in text
    assert not prepare(sampling, kept_tokens=False).masked, "the way out works"


def test_an_engine_that_watermarks_must_be_told_not_to():
    assert "watermarking = false" in refusal({"top_k": 5}, watermarking=True)
    assert prepare({"top_k": 5, "watermarking": False}, watermarking=True).masked


def test_true_where_no_set_can_come_is_refused():
    assert "temperature" in refusal({"temperature": 0.0}, kept_tokens=True)
    assert "enable_return_sampling_mask" in refusal({"top_k": 3}, kept_tokens=True, width=None)
    assert "set top_k" in refusal({}, kept_tokens=True)


@pytest.mark.parametrize(
    ("sampling", "says"),
    [
        ({"topp": 0.9}, ["sampling_params.topp", "did you mean top_p"]),
        ({"extra_args": {"x": 1}}, ["extra_args", "private"]),
        ({"output_kind": 1}, ["output_kind"]),
        ({"flat_logprobs": True}, ["flat_logprobs"]),
        ({"_eos_token_id": 1}, ["_eos_token_id"]),
        ({"guided_regex": "a"}, ["guided_regex: unknown", "structured_outputs", '{"regex"']),
        ({"max_new_tokens": 5}, ["max_new_tokens: unknown", "sampling_params.max_tokens"]),
        ({"top_k": "5"}, ["top_k", "'5'"]),
        ({"top_k": 5.5}, ["top_k", "5.5"]),
        ({"top_p": None}, ["top_p", "None"]),
        ({"top_p": 1.5}, ["top_p", "1.5"]),
        ({"temperature": -1}, ["temperature", "-1"]),
        ({"max_tokens": 0}, ["max_tokens", "0"]),
        ({"max_tokens": 62}, ["max_tokens = 62", "room for 61", "leave"]),
        ({"min_tokens": 62}, ["min_tokens = 62", "61"]),
        ({"n": 0}, ["n "]),
        ({"seed": 2**63}, ["seed", "for all 1", "2**63 - 1"]),
        ({"seed": 2**63 - 3, "n": 4}, ["seed", "for all 4", "2**63 - 4"]),
        ({"seed": -(2**63) - 1}, ["seed"]),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, ["structured"]),
        ({"stop": [""]}, ["stop"]),
    ],
)
def test_wrong_parameters_are_refused(sampling, says):
    text = refusal(sampling)
    for word in says:
        assert word in text


def test_max_tokens_left_out_is_the_rest_of_the_context():
    # vllm#42329: max_tokens left out: 16 tokens each
    assert prepare({}).params.max_tokens == 61
    assert prepare({"max_tokens": None}).params.max_tokens == 61
    assert prepare({"max_tokens": 5}).params.max_tokens == 5
    assert prepare({"max_tokens": 61}).params.max_tokens == 61


def test_text_is_made_only_to_find_stop_strings():
    assert prepare({"stop": ["a"]}).params.detokenize
    assert prepare({"stop": ["a"], "detokenize": False}).params.detokenize
    assert not prepare({"detokenize": True}).params.detokenize


@pytest.mark.parametrize("sampling", [{"stop": ["a"]}, {"bad_words": ["a"], "top_k": 5}])
def test_text_without_a_tokenizer_is_refused_rather_than_ignored(sampling):
    assert "skip_tokenizer_init" in refusal(sampling, tokenizer=False)
    prepare(sampling)


def test_every_known_name_is_one_of_vllms_and_none_is_private():
    assert {"temperature", "top_p", "top_k", "min_p", "seed", "stop", "n"} <= set(KNOWN)
    assert not [name for name in KNOWN if name.startswith("_")]


@pytest.mark.parametrize(
    ("sampling", "says"),
    [
        ({"structured_outputs": {"regex": "a", "disable_any_whitespac": True}}, "disable_any_whitespace"),
        ({"structured_outputs": {"_backend": "x", "regex": "a"}}, "_backend"),
        ({"repetition_detection": {"max_patern_size": 3}}, "max_pattern_size"),
    ],
)
def test_unknown_names_inside_of_tables_are_refused_too(sampling, says):
    assert says in refusal({"top_k": 5, **sampling})


def test_an_error_inside_a_list_shows_its_place():
    assert refusal({"stop": [["a"]]}).startswith("sampling_params.stop[0]: Expected `str`")


@pytest.mark.parametrize(
    "more", [{"stop_token_ids": list(range(12))}, {"stop_token_ids": [3], "allowed_token_ids": [3]}]
)
def test_a_request_that_leaves_nothing_to_sample_is_refused(more):
    sampling = {"top_k": 5, "min_tokens": 2, **more}
    assert "leaves nothing" in refusal(sampling, vocab_size=12)
    assert prepare(sampling | {"min_tokens": 0}, vocab_size=12).masked


@pytest.mark.parametrize("name", [*NEUTRAL, *HARMLESS, *BENDING])
def test_what_a_run_may_ask_for_is_known_here(name):
    """Else a configuration that was checked ends with its first request."""
    assert name in KNOWN
    for neutral in [NEUTRAL[name]] if name in NEUTRAL else BENDING.get(name, ()):
        for others in ({}, {"top_k": 20}):
            prepare({**others, name: neutral})
