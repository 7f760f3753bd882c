"""`inference.capture`: which capture records the kept sets, decided before vLLM is imported.

The model runner follows from it, and vLLM reads that from the environment.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from keptset_settings import InferenceSettings

from .errors import StartError

Kind = Literal["v1", "native"]
RUNNER = "VLLM_USE_V2_MODEL_RUNNER"


@dataclass(frozen=True)
class Choice:
    """A capture and why it is this one."""

    kind: Kind
    reason: str


def choose_capture(settings: InferenceSettings, environ: Mapping[str, str]) -> Choice | None:
    """None if nothing is captured.

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
    return Choice("v1", "auto: it serves this configuration")


__all__ = ["RUNNER", "Choice", "Kind", "choose_capture"]
