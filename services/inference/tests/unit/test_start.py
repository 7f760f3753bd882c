"""What is refused before anything starts: the environment and the engine's arguments."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.sample.ops import topk_topp_sampler

from keptset_inference.arguments import engine_arguments
from keptset_inference.environment import DEFAULTS, prepare_environment
from keptset_inference.errors import StartError
from keptset_settings import DRAIN_SECONDS, InferenceSettings, SettingsError, resolve_inference
from keptset_settings.vllm_names import ENGINE_ARGUMENTS

MODEL = str(Path(__file__).parent)  # a directory, which is all that is looked at here


def settings(on: bool = True, **changes) -> InferenceSettings:
    return InferenceSettings(**{"model": MODEL, "enable_return_sampling_mask": on} | changes)


def refused(capture: bool = True, **vllm) -> str:
    with pytest.raises(StartError) as error:
        engine_arguments(settings(capture, vllm=vllm))
    return str(error.value)


def test_defaults_are_neutral_and_may_be_overridden():
    arguments = engine_arguments(settings(vllm={"dtype": "float32", "shutdown_timeout": 3}))
    assert arguments.model == MODEL
    assert (arguments.logprobs_mode, arguments.generation_config) == ("processed_logprobs", "vllm")
    assert (arguments.dtype, arguments.shutdown_timeout) == ("float32", 3)
    assert arguments.use_tqdm_on_load is False
    assert arguments.enforce_eager, "on a CPU"
    assert engine_arguments(settings()).shutdown_timeout == DRAIN_SECONDS


def test_an_engine_that_takes_turns_can_sleep_where_there_is_cuda(monkeypatch, tmp_path):
    assert not engine_arguments(settings(gpu_lock=tmp_path / "gpu.lock")).enable_sleep_mode, "on a CPU"
    monkeypatch.setattr("keptset_inference.arguments.frees_memory", lambda: True)
    assert engine_arguments(settings(gpu_lock=tmp_path / "gpu.lock")).enable_sleep_mode
    assert not engine_arguments(settings()).enable_sleep_mode


@pytest.mark.parametrize(
    ("vllm", "says"),
    [
        ({"logprobs_mode": "raw_logprobs"}, ["logprobs_mode", "'raw_logprobs'", "processed"]),
        ({"generation_config": "auto"}, ["generation_config", "'auto'", "leave it out"]),
        ({"override_generation_config": {"temperature": 0.3}}, ["override_generation_config", "0.3"]),
        ({"logits_processors": ["a:B"]}, ["logits_processors", "a:B"]),
        ({"worker_cls": "a.B"}, ["worker_cls", "'a.B'"]),
        ({"scheduler_cls": "a.B"}, ["scheduler_cls", "'a.B'"]),
        ({"pipeline_parallel_size": 2}, ["pipeline_parallel_size", "2"]),
    ],
)
def test_what_would_bias_is_refused_with_capture_only(vllm, says):
    text = refused(**vllm)
    for word in [*says, "enable_return_sampling_mask"]:
        assert word in text
    engine_arguments(settings(False, vllm=vllm))
    for capture in ("auto", "v1", "native"):  # no run starts to find that out
        with pytest.raises(SettingsError, match=next(iter(vllm))):
            resolve_inference(settings(vllm=vllm, capture=capture))


@pytest.mark.parametrize("capture", [True, False])
@pytest.mark.parametrize(
    ("vllm", "says"),
    [
        ({"max_model_length": 3}, ["max_model_length", "did you mean max_model_len"]),
        ({"model": "x"}, ["inference.model"]),
        ({"api_key": "x"}, ["inference.api_key"]),
        ({"port": 3}, ["inference.port"]),
        ({"return_sampling_mask": True}, ["inference.enable_return_sampling_mask"]),
        ({"worker_extension_cls": "a.B"}, ["worker_extension_cls = 'a.B'", "leave it out"]),
    ],
)
def test_unknown_arguments_and_our_own_are_refused(capture, vllm, says):
    text = refused(capture, **vllm)
    for word in says:
        assert word in text


def test_a_float32_head_is_an_override_among_others():
    arguments = engine_arguments(settings(fp32_lm_head=True, vllm={"hf_overrides": {"rope_theta": 1.0}}))
    assert arguments.hf_overrides == {"rope_theta": 1.0, "head_dtype": "float32"}
    assert engine_arguments(settings(fp32_lm_head=True)).hf_overrides == {"head_dtype": "float32"}
    assert engine_arguments(settings()).hf_overrides == {}
    for overrides, says in (
        ({"head_dtype": "bfloat16"}, "head_dtype = 'bfloat16'"),
        ("x", "hf_overrides = 'x'"),
    ):
        with pytest.raises(StartError, match=says):
            engine_arguments(settings(fp32_lm_head=True, vllm={"hf_overrides": overrides}))


def test_a_server_needs_a_model():
    with pytest.raises(StartError, match=r"inference\.model is not set"):
        engine_arguments(settings(model=None))
    for path in ("/models/none", "./none", "~/none"):
        with pytest.raises(StartError, match=rf"inference\.model = '{path}': no such directory"):
            engine_arguments(settings(model=path))


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"VLLM_SERVER_DEV_MODE": "1"}, "unset it"),
        ({"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}, "unset it"),
        ({"VLLM_API_KEY": "k"}, "inference.api_key"),
        ({"VLLM_USE_V2_MODEL_RUNNER": "1"}, "unset it"),
    ],
)
def test_variables_that_open_or_bias_the_server_are_refused(environment, says):
    with pytest.raises(StartError, match=next(iter(environment))) as error:
        prepare_environment(settings(capture="v1"), environment)
    assert says in str(error.value)


def test_variables_that_are_off_or_agree_are_taken():
    agreeing = {"VLLM_SERVER_DEV_MODE": "0", "VLLM_API_KEY": "k", "VLLM_USE_V2_MODEL_RUNNER": "0"}
    prepare_environment(settings(api_key="k"), agreeing)
    prepare_environment(settings(False), {"VLLM_USE_V2_MODEL_RUNNER": "1"})


def test_what_is_set_stays_and_the_rest_gets_defaults(tmp_path):
    environment = {"VLLM_CPU_KVCACHE_SPACE": "7"}
    prepare_environment(settings(model=str(tmp_path)), environment)
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == "7"
    assert environment["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    assert environment["HF_HUB_OFFLINE"] == "1", "a directory needs no hub"
    assert set(DEFAULTS) <= set(environment)
    environment = {}
    prepare_environment(settings(False, model="somebody/model"), environment)
    assert not {"VLLM_USE_V2_MODEL_RUNNER", "HF_HUB_OFFLINE"} & set(environment)


@pytest.mark.parametrize(("given", "digits"), [({}, "ieee"), ({"TRITON_F32_DEFAULT": "tf32"}, "tf32")])
def test_kernels_multiply_float32_as_float32_unless_somebody_wants_speed(given, digits):
    prepare_environment(settings(), environment := os.environ | given)
    asked = "from triton import knobs; print(knobs.language.fp32_default)"
    said = subprocess.run([sys.executable, "-c", asked], env=environment, capture_output=True, text=True)
    assert said.stdout.split() == [digits], said.stderr


@pytest.mark.parametrize(("given", "answer"), [({}, "0"), ({"VLLM_USE_FLASHINFER_SAMPLER": "1"}, "1")])
def test_no_request_has_the_engine_compile_a_sampler_unless_somebody_wants_that(monkeypatch, given, answer):
    prepare_environment(settings(), environment := dict(given))
    assert environment["VLLM_USE_FLASHINFER_SAMPLER"] == answer
    monkeypatch.setenv("VLLM_USE_FLASHINFER_SAMPLER", answer)
    monkeypatch.setattr(topk_topp_sampler, "current_platform", SimpleNamespace(is_cuda=lambda: True))
    if answer == "0":
        assert not topk_topp_sampler.flashinfer_sampler_supported()
    else:  # goes on to FlashInfer, if that is there, and to the GPU
        with pytest.raises((ImportError, AttributeError)):
            topk_topp_sampler.flashinfer_sampler_supported()


def test_the_settings_know_the_engine_arguments_of_this_vllm():
    own = {field.name for field in dataclasses.fields(AsyncEngineArgs) if not field.name.startswith("_")}
    assert own - ENGINE_ARGUMENTS == set(), "add these to keptset_settings/vllm_names.py"
    assert ENGINE_ARGUMENTS - own == set(), "take these out of keptset_settings/vllm_names.py"
