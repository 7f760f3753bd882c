"""`inference.capture`: which capture records the kept sets, decided before vLLM is imported.

The model runner follows from it, and vLLM reads that from the environment.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

from keptset_settings import InferenceSettings

from .errors import StartError

Kind = Literal["v1", "native"]
RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
V1_ALONE = ("enable_dbo", "ubatch_size")
"""Engine arguments that vLLM's V2 model runner does not serve."""


@dataclass(frozen=True)
class Choice:
    """A capture and why it is this one."""

    kind: Kind
    reason: str


def is_gpu_build() -> bool:
    """Whether the vLLM that is installed is one for GPUs; it is not imported."""
    try:
        return "cpu" not in version("vllm")
    except PackageNotFoundError:  # the CPU build is a package of another name
        return False


def choose_capture(settings: InferenceSettings, environ: Mapping[str, str], *, gpu: bool) -> Choice | None:
    """None if nothing is captured.

    Args:
        settings: those of the service.
        environ: of this process.
        gpu: whether vLLM runs on one.

    Raises:
        StartError: the capture that was asked for does not serve the rest of the configuration.
    """
    if not settings.enable_return_sampling_mask:
        return None
    runner = environ.get(RUNNER, "")
    asked_v1, asked_v2 = runner == "0", runner not in ("", "0")
    drafts = bool(settings.vllm.get("speculative_config"))
    if settings.capture == "v1":
        if asked_v2:
            raise StartError(
                f"{RUNNER}={runner}: capture v1 serves the V1 model runner only; unset it, or set "
                "inference.capture = 'native'"
            )
        if drafts:
            raise StartError(
                "inference.vllm.speculative_config does not go with inference.capture = 'v1', which does not "
                "record what speculative decoding samples: leave it out, or set inference.capture = 'native'"
            )
        return Choice("v1", "inference.capture says so")
    if settings.capture == "native":
        if asked_v1:
            raise StartError(
                f"{RUNNER}={runner}: native capture needs the V2 model runner; unset it, or set "
                "inference.capture = 'v1'"
            )
        return Choice("native", "inference.capture says so")
    if drafts:
        if asked_v1:
            raise StartError(
                f"{RUNNER}={runner} and inference.vllm.speculative_config: only native capture records what "
                "speculative decoding samples, and it needs the V2 model runner; unset one of them"
            )
        return Choice("native", "auto: only it records what speculative decoding samples")
    if asked_v2:
        return Choice("native", f"auto: {RUNNER}={runner} asks for the V2 model runner")
    if asked_v1:
        return Choice("v1", f"auto: {RUNNER}={runner} asks for the V1 model runner")
    if not gpu:
        return Choice("v1", "auto: native capture needs a GPU")
    if alone := [name for name in V1_ALONE if settings.vllm.get(name)]:
        return Choice("v1", f"auto: the V2 model runner does not serve inference.vllm.{alone[0]}")
    return Choice("native", "auto: on a GPU the faster one, as is the V2 model runner")


__all__ = ["RUNNER", "Choice", "Kind", "choose_capture", "is_gpu_build"]
