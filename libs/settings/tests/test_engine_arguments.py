"""Each rule of [inference.vllm]: its refusal with its text, and the neighbour that works."""

import pytest

from keptset_settings import InferenceSettings, SettingsError, resolve_inference
from keptset_settings.engine_arguments import BIASED, ELSEWHERE, REPLACED, UNCAPTURABLE


def resolve(vllm: dict, mask: bool = False, capture: str = "auto") -> InferenceSettings:
    settings = InferenceSettings(model="m", vllm=vllm, enable_return_sampling_mask=mask, capture=capture)
    return resolve_inference(settings)


def problem_of(vllm: dict, **options) -> str:
    with pytest.raises(SettingsError) as error:
        resolve(vllm, **options)
    return str(error.value)


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("model", "x", "model: does not belong here; set model in [inference]"),
        ("host", "x", "host: does not belong here; set host in [inference]"),
        ("port", 1, "port: does not belong here; set port in [inference]"),
        ("api_key", "x", "api_key: does not belong here; set api_key in [inference], better by the variable"),
        ("hf_token", "x", "hf_token: does not belong here; it is a secret; set the variable HF_TOKEN"),
        (
            "return_sampling_mask",
            True,
            "return_sampling_mask: does not belong here; set enable_return_sampling_mask",
        ),
        ("enable_return_sampling_mask", True, "enable_return_sampling_mask: does not belong here; set"),
        (
            "logprobs_mode",
            "raw_logprobs",
            'logprobs_mode = "raw_logprobs": is refused because the ratio needs',
        ),
        ("logprobs_mode", "raw_logprobs", 'remove it or set "processed_logprobs"'),
        (
            "generation_config",
            "auto",
            'generation_config = "auto": is refused because the model\'s own sampling',
        ),
        ("generation_config", "auto", 'remove it or set "vllm"'),
        (
            "override_generation_config",
            {"top_k": 1},
            "override_generation_config: is refused because sampling",
        ),
        ("override_generation_config", {"top_k": 1}, "write them into [orchestrator.train.sampling]"),
        ("logits_processors", ["a:B"], "logits_processors = ['a:B']: is refused because changes logits"),
        ("watermark", "x", 'watermark = "x": is refused because'),
        ("watermark_config", {"a": 1}, "watermark_config: is refused because"),
        ("worker_extension_cls", "a.B", 'worker_extension_cls = "a.B": is refused because ours'),
        (
            "max-model-len",
            9,
            "max-model-len: engine arguments have their Python names here; write max_model_len",
        ),
        ("Dtype", "x", "Dtype: engine arguments have their Python names here; write dtype"),
        ("dtype", None, "dtype: holds a null, which TOML has not; leave it out for the default"),
        ("hf_overrides", {"a": [None]}, "hf_overrides: holds a null"),
    ],
)
def test_refused_with_or_without_capture(name, value, line, mask):
    assert line in problem_of({name: value}, mask=mask)
    assert problem_of({name: value}, mask=mask).startswith(f"[inference.vllm] {name}")


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("speculative_config", {"method": "ngram"}, "our capture reads the set where one token is sampled"),
        ("spec_method", "ngram", "our capture reads the set where one token is sampled"),
        ("spec_model", "x", "our capture reads the set where one token is sampled"),
        ("spec_tokens", 3, "our capture reads the set where one token is sampled"),
    ],
)
def test_refused_only_with_our_own_capture(name, value, why):
    for capture in ("auto", "v1"):
        text = problem_of({name: value}, mask=True, capture=capture)
        assert f"is refused with capture on, because {why}" in text
        assert 'remove it, or set capture = "native", or, where no source truncates, enable_return_sa' in text
    assert resolve({name: value}, mask=True, capture="native").vllm == {name: value}
    assert resolve({name: value}).vllm == {name: value}


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("worker_cls", "a.B", "because capture brings its own worker; remove it, or, where no source trunc"),
        ("scheduler_cls", "a.B", "because capture brings its own scheduler; remove it, or, where no source"),
        ("pipeline_parallel_size", 2, "because capture does not serve pipeline parallel; set 1, or, where"),
    ],
)
def test_refused_with_either_capture(name, value, text):
    for capture in ("auto", "v1", "native"):
        assert text in problem_of({name: value}, mask=True, capture=capture)
    assert resolve({name: value}).vllm == {name: value}


RULES = {**BIASED, **UNCAPTURABLE, **REPLACED}


@pytest.mark.parametrize(("name", "harmless"), [(name, rule[0]) for name, rule in RULES.items()])
def test_every_rule_refuses_whatever_is_not_harmless(name, harmless):
    for value in harmless:
        assert resolve({name: value}, mask=True).vllm == {name: value}
    for value in ("other", 3, {"a": 1}, ["x"]):
        said = problem_of({name: value}, mask=True)
        why, way_out = RULES[name][1:]
        assert "is refused" in said
        assert f"because {why}; {way_out}" in said


@pytest.mark.parametrize("name", ELSEWHERE)
def test_every_argument_with_a_setting_of_its_own_names_it(name):
    assert problem_of({name: "x"}).endswith(f"{name}: does not belong here; {ELSEWHERE[name]}")


def test_every_refused_argument_is_named():
    text = problem_of(
        {"model": "x", "logprobs_mode": "raw", "worker_cls": "a.B", "watermark": "y"}, mask=True
    )
    names = [line.split()[1].rstrip(":") for line in text.splitlines()]
    assert names == ["model", "logprobs_mode", "worker_cls", "watermark"]


@pytest.mark.parametrize(
    "vllm",
    [
        {"logprobs_mode": "processed_logprobs", "generation_config": "vllm"},
        {
            "override_generation_config": {},
            "logits_processors": [],
            "speculative_config": {},
            "worker_cls": "auto",
        },
        {"dtype": "float32", "max_model_len": 64, "enable_log_requests": True, "tensor_parallel_size": 2},
        {"hf_overrides": {"head_dtype": "float32"}, "kv_cache_dtype": "auto"},
    ],
)
def test_what_passes_through(vllm):
    assert resolve(vllm, mask=True).vllm == vllm


def test_a_misspelled_argument_is_told_without_vllm():
    assert "max_modellen: vLLM has no such engine argument, did you mean max_model_len?" in problem_of(
        {"max_modellen": 64}
    )
    assert "`vllm serve --help` names them" in problem_of({"qqq": 64})
