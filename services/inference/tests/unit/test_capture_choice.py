"""Which capture serves a configuration, and what cannot be served."""

from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
from vllm.config.speculative import RejectionSampleMethod

from keptset_inference import capture_choice
from keptset_inference.arguments import _check_resolved, engine_arguments, resolved_config
from keptset_inference.capture_choice import RUNNER, choose_capture
from keptset_inference.environment import prepare_environment
from keptset_inference.errors import StartError
from keptset_settings import InferenceSettings

DRAFTS = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}


def settings(capture: str = "auto", on: bool = True, **vllm) -> InferenceSettings:
    return InferenceSettings(model="m", enable_return_sampling_mask=on, capture=capture, vllm=vllm)


@pytest.mark.parametrize(
    ("capture", "environment", "vllm", "kind", "reason"),
    [
        ("auto", {}, {}, "v1", "needs a GPU"),
        ("auto", {RUNNER: "0"}, {}, "v1", "auto"),
        ("auto", {RUNNER: "1"}, {}, "native", RUNNER),
        ("auto", {}, DRAFTS, "native", "speculative"),
        ("v1", {}, {}, "v1", "inference.capture"),
        ("native", {}, {}, "native", "inference.capture"),
        ("native", {RUNNER: "1"}, DRAFTS, "native", "inference.capture"),
    ],
)
def test_the_choice_and_its_reason(capture, environment, vllm, kind, reason):
    choice = prepare_environment(settings(capture, **vllm), environment)
    assert choice.kind == kind
    assert reason in choice.reason
    assert environment.get(RUNNER) in ({"v1": ["0"], "native": [None, "1"]}[kind]), "vLLM reads it"


@pytest.mark.parametrize(
    ("capture", "environment", "vllm", "says"),
    [
        ("v1", {RUNNER: "1"}, {}, [RUNNER, "'native'"]),
        ("v1", {}, DRAFTS, ["speculative_config", "'native'"]),
        ("native", {RUNNER: "0"}, {}, [RUNNER, "'v1'"]),
        ("auto", {RUNNER: "0"}, DRAFTS, [RUNNER, "speculative_config"]),
    ],
)
def test_what_a_capture_cannot_serve_is_an_error_with_a_way_out(capture, environment, vllm, says):
    with pytest.raises(StartError) as error:
        choose_capture(settings(capture, **vllm), environment, gpu=False)
    for word in says:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("environment", "vllm", "kind", "reason"),
    [
        ({}, {}, "native", "faster"),
        ({RUNNER: "0"}, {}, "v1", RUNNER),
        ({}, {"enable_dbo": True}, "v1", "enable_dbo"),
        ({}, {"enable_dbo": False}, "native", "faster"),
    ],
)
def test_on_a_gpu_the_faster_one_that_serves_is_taken(environment, vllm, kind, reason):
    choice = choose_capture(settings(**vllm), environment, gpu=True)
    assert choice.kind == kind
    assert reason in choice.reason


@pytest.mark.parametrize(
    ("name", "version", "gpu"), [("vllm", "0.32.0", True), ("vllm", "0.32.0+cpu", False)]
)
def test_the_build_of_vllm_says_where_it_runs(monkeypatch, name, version, gpu):
    monkeypatch.setattr(capture_choice, "version", {name: version}.__getitem__)
    assert capture_choice.is_gpu_build() is gpu


def test_nothing_is_chosen_where_nothing_is_captured():
    environment = {RUNNER: "1"}
    assert prepare_environment(settings("v1", on=False, **DRAFTS), environment) is None
    assert environment[RUNNER] == "1"


def resolved(**changes) -> SimpleNamespace:
    """A resolved config that both captures serve, on the runner that is said."""
    fields = {
        "v2": True,
        "drafts": None,
        "sharded": False,
        "diffusion": False,
        "watermark": None,
        "stages": 1,
    }
    fields |= changes
    return SimpleNamespace(
        use_v2_model_runner=fields["v2"],
        speculative_config=fields["drafts"],
        watermark_config=fields["watermark"],
        parallel_config=SimpleNamespace(
            enable_batch_sharded_sampling=fields["sharded"],
            pipeline_parallel_size=fields["stages"],
            worker_cls="vllm.v1.worker.gpu_worker.Worker",
        ),
        scheduler_config=SimpleNamespace(scheduler_cls=None),
        model_config=SimpleNamespace(
            is_diffusion=fields["diffusion"],
            logprobs_mode="processed_logprobs",
            generation_config="vllm",
            runner_type="generate",
            get_diff_sampling_param=dict,
        ),
    )


def drafts(adaptive: bool = False, method: str = "standard") -> SimpleNamespace:
    return SimpleNamespace(enable_adaptive_verification=adaptive, rejection_sample_method=method)


def test_each_capture_takes_its_runner():
    _check_resolved(resolved(), "native")
    for method in get_args(RejectionSampleMethod):
        if method != "synthetic":
            _check_resolved(resolved(drafts=drafts(method=method)), "native")
    _check_resolved(resolved(v2=False), "v1")


@pytest.mark.parametrize(
    ("capture", "changes", "says"),
    [
        ("v1", {}, "V2"),
        ("v1", {"v2": False, "drafts": drafts()}, "speculative"),
        ("native", {"v2": False}, "'v1'"),
        ("native", {"drafts": drafts(True)}, "adaptive"),
        ("native", {"drafts": drafts(method="synthetic")}, "synthetic"),
        ("native", {"sharded": True}, "sharded"),
        ("native", {"diffusion": True}, "diffusion"),
        ("native", {"watermark": object()}, "watermark"),
        ("native", {"stages": 2}, "pipeline"),
    ],
)
def test_what_resolves_to_something_else_is_refused(capture, changes, says):
    with pytest.raises(StartError, match=says):
        _check_resolved(resolved(**changes), capture)


def test_native_capture_needs_a_gpu():
    here = settings("native").model_copy(update={"model": str(Path(__file__).parent)})
    with pytest.raises(StartError, match=r"GPU.*'v1'"):
        resolved_config(engine_arguments(here), capture="native")
