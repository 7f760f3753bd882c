"""From our settings to vLLM's engine arguments and its resolved config; what would bias capture is refused
here.
"""

import dataclasses
from typing import Any

from vllm.config import VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext

from keptset_settings import DRAIN_SECONDS, InferenceSettings, is_absent_directory

from .capture_choice import Kind
from .errors import StartError
from .names import did_you_mean

ROWS: dict[Kind, str] = {
    "v1": "keptset_inference.capture.rows:KeptRows",
    "native": "keptset_inference.capture.native_rows:NativeRows",
}
WORKER = "keptset_inference.capture.worker.KeptsetWorker"
WORKER_EXTENSION = "keptset_inference.weights.worker.ReceivesWeights"
SEED_SAFE_WORKER = "keptset_inference.cpu_seeds.SeedSafeCPUWorker"
SCHEDULERS = {
    False: "keptset_inference.capture.scheduler.KeptScheduler",
    True: "keptset_inference.capture.scheduler.KeptAsyncScheduler",
}
STOCK_CPU_WORKER = "vllm.v1.worker.cpu_worker.CPUWorker"
STOCK_WORKERS = (STOCK_CPU_WORKER, "vllm.v1.worker.gpu_worker.Worker")

_OURS = {
    "model": "inference.model",
    "return_sampling_mask": "inference.enable_return_sampling_mask",
    "api_key": "inference.api_key",
    "host": "inference.host",
    "port": "inference.port",
}


def engine_arguments(settings: InferenceSettings) -> AsyncEngineArgs:
    """`[inference.vllm]` with our defaults, as vLLM's arguments.

    Raises:
        StartError: no model, an unknown argument, or one that capture cannot be served with.
    """
    if settings.model is None:
        raise StartError("inference.model is not set: name the directory (or the hub name) of a model")
    if is_absent_directory(settings.model):
        raise StartError(f"inference.model = {settings.model!r}: no such directory")
    known = [field.name for field in dataclasses.fields(AsyncEngineArgs) if not field.name.startswith("_")]
    for name, value in settings.vllm.items():
        if name in _OURS:
            raise StartError(f"inference.vllm.{name} = {value!r}: set {_OURS[name]} instead")
        if name not in known:
            hint = did_you_mean(name, known, "see `vllm serve --help` for the names")
            raise StartError(f"inference.vllm.{name}: vLLM has no such engine argument, {hint}")
    if extension := settings.vllm.get("worker_extension_cls"):
        raise StartError(
            f"inference.vllm.worker_extension_cls = {extension!r}: vLLM takes one, and weights are loaded by "
            "ours; leave it out"
        )
    given = _defaults() | settings.vllm
    if settings.weights_transfer == "nccl":
        if current_platform.is_cpu():
            raise StartError(
                'weights.transfer = "nccl" goes from GPU to GPU, but this engine runs on a CPU: set '
                'weights.transfer = "files"'
            )
        given.setdefault("weight_transfer_config", WeightTransferConfig(backend="nccl"))
    if settings.gpu_lock is not None and frees_memory():
        given["enable_sleep_mode"] = True
    if settings.fp32_lm_head:
        given["hf_overrides"] = _float32_head(given.get("hf_overrides"))
    if settings.enable_return_sampling_mask:
        _refuse(given)
    try:
        return AsyncEngineArgs(model=settings.model, **given)
    except (TypeError, ValueError) as error:
        raise StartError(f"inference.vllm: {error}") from error


def frees_memory() -> bool:
    """Whether memory leaves the device when vLLM sleeps here."""
    return current_platform.is_sleep_mode_available()


def _defaults() -> dict[str, Any]:
    defaults: dict[str, Any] = {
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "shutdown_timeout": DRAIN_SECONDS,
        "load_format": "safetensors",  # other formats may be pickles; whoever needs one names it
        # A progress bar that cannot be written, as the log's disk is full, ends an update half-way.
        "use_tqdm_on_load": False,
    }
    if current_platform.is_cpu():
        defaults["enforce_eager"] = True
    return defaults


def _float32_head(overrides: Any) -> dict[str, Any]:
    """What vLLM calls a head that computes in float32, among the other overrides."""
    if overrides is not None and not isinstance(overrides, dict):
        raise StartError(
            f"inference.vllm.hf_overrides = {overrides!r} does not go with inference.fp32_lm_head: make it a "
            "table, or set head_dtype there yourself"
        )
    dtype = (overrides or {}).get("head_dtype", "float32")
    if dtype != "float32":
        raise StartError(
            f"inference.vllm.hf_overrides.head_dtype = {dtype!r} contradicts inference.fp32_lm_head = true: "
            "leave one of them out"
        )
    return {**(overrides or {}), "head_dtype": "float32"}


def _refuse(given: dict[str, Any]) -> None:
    """What can be seen before anything is loaded; the rest is checked on the resolved config."""
    _require(
        given["logprobs_mode"] == "processed_logprobs",
        "logprobs_mode",
        given["logprobs_mode"],
        "a rollout logprob must be the processed one; leave it out or set 'processed_logprobs'",
    )
    _require(
        given["generation_config"] == "vllm",
        "generation_config",
        given["generation_config"],
        "a model's defaults would bend requests that leave parameters unset; leave it out",
    )
    reasons = {
        "logits_processors": "other logits processors may bend what the set was computed from; leave them "
        "out",
        "override_generation_config": "defaults that bend unset parameters cannot be replayed; leave it out",
        "scheduler_cls": "capture brings its own scheduler; leave it out",
    }
    for name, reason in reasons.items():
        _require(not given.get(name), name, given.get(name), reason)
    worker = given.get("worker_cls", "auto")
    _require(worker == "auto", "worker_cls", worker, "capture brings its own worker; leave it out")
    stages = given.get("pipeline_parallel_size", 1)
    _require(stages == 1, "pipeline_parallel_size", stages, "capture does not serve pipeline parallel; set 1")


def _require(condition: bool, name: str, value: Any, reason: str) -> None:
    if not condition:
        raise StartError(
            f"inference.vllm.{name} = {value!r} does not go with enable_return_sampling_mask: {reason}"
        )


def resolved_config(arguments: AsyncEngineArgs, *, capture: Kind | None) -> VllmConfig:
    """VLLM's resolved config, with our classes in it if capture is on.

    Raises:
        StartError: what the arguments resolve to cannot be captured, or dies on this platform.
    """
    if capture == "native" and current_platform.is_cpu():
        raise StartError(
            "native capture needs vLLM's V2 model runner, and that a GPU: set inference.capture = 'v1', and "
            "leave inference.vllm.speculative_config out"
        )
    if capture is not None:
        arguments.logits_processors = [ROWS[capture]]
    config = arguments.create_engine_config(UsageContext.OPENAI_API_SERVER)
    parallel = config.parallel_config
    parallel.worker_extension_cls = WORKER_EXTENSION
    if current_platform.is_cpu() and parallel.pipeline_parallel_size > 1:
        raise StartError(
            f"inference.vllm.pipeline_parallel_size = {parallel.pipeline_parallel_size}: vLLM's CPU engine "
            "dies at the first request; set 1"
        )
    if capture is None:
        if parallel.worker_cls == STOCK_CPU_WORKER:
            parallel.worker_cls = SEED_SAFE_WORKER
        return config
    _check_resolved(config, capture)
    config.scheduler_config.scheduler_cls = SCHEDULERS[bool(config.scheduler_config.async_scheduling)]
    parallel.worker_cls = WORKER
    return config


def _check_resolved(config: VllmConfig, capture: Kind) -> None:
    """The same rules on what vLLM made of the arguments: defaults, environment and platform included."""
    model, parallel, scheduler = config.model_config, config.parallel_config, config.scheduler_config
    defaults = model.get_diff_sampling_param()
    if capture == "v1":
        _refuse_resolved(config.use_v2_model_runner, "the model runner is V2: unset VLLM_USE_V2_MODEL_RUNNER")
        _refuse_resolved(config.speculative_config is not None, "speculative decoding is on: leave it out")
    else:
        _check_native(config)
    mode = model.logprobs_mode
    _refuse_resolved(mode != "processed_logprobs", f"logprobs_mode is {mode!r}: leave it out")
    source = model.generation_config
    _refuse_resolved(source != "vllm", f"generation_config is {source!r}: leave it out")
    _refuse_resolved(bool(defaults), f"the model's defaults {defaults} bend unset parameters")
    taken = scheduler.scheduler_cls
    _refuse_resolved(taken is not None, f"scheduler_cls is {taken!r}: leave it out")
    worker = parallel.worker_cls
    _refuse_resolved(worker not in STOCK_WORKERS, f"worker_cls is {worker!r}, only {STOCK_WORKERS} are known")
    stages = parallel.pipeline_parallel_size
    _refuse_resolved(stages > 1, f"pipeline_parallel_size is {stages}: set 1")
    kind = model.runner_type
    _refuse_resolved(kind != "generate", f"the runner is {kind!r}: only models that generate are served")


def _check_native(config: VllmConfig) -> None:
    """What vLLM itself refuses together with its masks, which it does not know of here."""
    _refuse_resolved(
        not config.use_v2_model_runner,
        "the model runner is V1, because vLLM's V2 runner does not serve this configuration (its log says "
        "why): set inference.capture = 'v1'",
    )
    drafts = config.speculative_config
    _refuse_resolved(
        drafts is not None and bool(drafts.enable_adaptive_verification),
        "speculative_config.enable_adaptive_verification is on: leave it out",
    )
    _refuse_resolved(
        drafts is not None and drafts.rejection_sample_method == "synthetic",
        "speculative_config.rejection_sample_method is 'synthetic', which takes drafts whatever their "
        "probability, so that logprobs are not those of what was sampled: leave it out",
    )
    _refuse_resolved(
        bool(config.parallel_config.enable_batch_sharded_sampling),
        "enable_batch_sharded_sampling is on: leave it out",
    )
    _refuse_resolved(config.model_config.is_diffusion, "diffusion models sample no tokens one by one")
    _refuse_resolved(config.watermark_config is not None, "watermark_config is set: leave it out")


def _refuse_resolved(there: bool, problem: str) -> None:
    if there:
        raise StartError(f"capture cannot be served: {problem}")


__all__ = ["engine_arguments", "frees_memory", "resolved_config"]
