"""Environment variables that vLLM reads: what we set before it is imported, and what we refuse.

Nothing here imports vllm or torch.
"""

import os
from collections.abc import MutableMapping
from pathlib import Path

from keptset_settings import InferenceSettings

from .capture_choice import RUNNER, Choice, choose_capture, is_gpu_build
from .errors import StartError

DEFAULTS = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    # vLLM's V2 runner samples by FlashInfer wherever no request of a step is greedy, has a seed or asks for
    # processed logprobs, and asks nobody whether it can: FlashInfer compiles that kernel at the first such
    # request, for minutes, with an nvcc and a C++ compiler that neither our images nor `make setup` have, and
    # without them the engine dies.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    # Triton multiplies float32 as TF32 if nobody says otherwise: an engine in float32 would be 5e-3 away from
    # the trainer's logprobs, and from its own on two ranks. Products of other types are not touched.
    "TRITON_F32_DEFAULT": "ieee",
    # Only the CPU build reads these: GiB of the KV cache, and threads that share the cores with everybody
    # else.
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
"""Set where the variable is not set."""


def prepare_environment(
    settings: InferenceSettings, environ: MutableMapping[str, str] = os.environ
) -> Choice | None:
    """Refuse what would open the server or bias it; set defaults. Call before vllm is imported.

    Returns:
        What captures kept sets; None if nothing does.

    Raises:
        StartError: a variable that we cannot serve with is set.
    """
    _refuse_developer_mode(environ)
    _refuse_pickles(environ)
    _refuse_other_key(settings, environ)
    defaults = dict(DEFAULTS)
    choice = choose_capture(settings, environ, gpu=is_gpu_build())
    if choice is not None and choice.kind == "v1":
        defaults[RUNNER] = "0"
    if settings.model is not None and Path(settings.model).is_dir():
        # Everything is there; a look at the hub could only slow the start down.
        defaults |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    for name, value in defaults.items():
        environ.setdefault(name, value)
    return choice


def _refuse_developer_mode(environ: MutableMapping[str, str]) -> None:
    value = environ.get("VLLM_SERVER_DEV_MODE", "")
    if value not in ("", "0"):
        raise StartError(
            f"VLLM_SERVER_DEV_MODE={value} would open vLLM's developer routes (remote calls into the "
            "workers) to everybody who reaches the port: unset it"
        )


def _refuse_pickles(environ: MutableMapping[str, str]) -> None:
    value = environ.get("VLLM_ALLOW_INSECURE_SERIALIZATION", "")
    if value not in ("", "0"):
        raise StartError(
            f"VLLM_ALLOW_INSECURE_SERIALIZATION={value} would let vLLM's processes send each other pickles, "
            "which run code where they are read: unset it"
        )


def _refuse_other_key(settings: InferenceSettings, environ: MutableMapping[str, str]) -> None:
    other = environ.get("VLLM_API_KEY", "")
    ours = settings.api_key.get_secret_value() if settings.api_key is not None else None
    if other and other != ours:
        raise StartError(
            "VLLM_API_KEY is set, but it guards only some routes: set inference.api_key "
            "(KEPTSET_INFERENCE__API_KEY), which guards all but /health, and unset VLLM_API_KEY"
        )


__all__ = ["DEFAULTS", "prepare_environment"]
