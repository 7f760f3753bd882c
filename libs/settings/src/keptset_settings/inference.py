"""`[inference]`: one vLLM server that answers with kept sets."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, SecretStr

from .base import Table, Transfer

CAPTURE_WIDTH = 512
"""The most ids that our own capture keeps of a row (rule 2 of docs/kept-sets.md)."""

DRAIN_SECONDS = 30
"""How long a server that is asked to stop lets running requests finish, unless vllm.shutdown_timeout says."""


class InferenceSettings(Table):
    model: str | None = None
    """Directory (or hub name) of the model that the engine starts with."""

    host: str = "127.0.0.1"
    """Address to listen on."""

    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen on; 0 lets `keptset run` choose a free one."""

    api_key: SecretStr | None = None
    """If set, every route but /health wants `Authorization: Bearer <key>`."""

    internal_token: SecretStr | None = None
    """If set, /metrics and what loads weights, sleeps or wakes want it as a bearer token, in place of the API
    key."""

    open_metrics: bool = False
    """Let everybody who reaches the port read /metrics."""

    max_body_bytes: int = Field(default=32 << 20, ge=1)
    """The largest body of a request; more is answered with 413."""

    max_concurrent_requests: int = Field(default=1024, ge=1)
    """Requests in work at a time; more are answered with 429 and Retry-After; not for /health and
    weights."""

    max_requests_per_second: float | None = Field(default=None, gt=0)
    """Requests of one client address, with a burst of one second's; more: 429. Unset: any."""

    weights_dir: Path | None = None
    """Root of the published weights: version n is the directory v{n:06d} under it. Unset: no updates."""

    enable_return_sampling_mask: bool = False
    """Capture kept sets. A run switches it on by itself if a source truncates; set it by hand for a server
    that is launched alone."""

    capture: Literal["auto", "v1", "native"] = "auto"
    """How to capture, if at all: our own cut on the V1 model runner, or vLLM's native masks on the V2 runner
    (a GPU's). "auto" is the faster one that serves the configuration: "native" on a GPU, unless something
    asks for the V1 runner, and "v1" on a CPU."""

    mask_padded_ids: bool = True
    """Requests with kept sets sample no id that the tokenizer does not have (heads are often padded beyond
    it). The mask acts before everything else, so such ids are in no kept set."""

    fp32_lm_head: bool = False
    """Compute the logits in float32, whatever the model's type (vLLM's `hf_overrides.head_dtype`)."""

    kept_tokens_format: Literal["kept_tokens", "sampling_mask", "both"] = "kept_tokens"
    """JSON dialect of the kept sets; a request may ask for another with the header X-Kept-Tokens-Format."""

    weights_transfer: Transfer | None = None
    """Whether the trainer may also send the weights: "nccl" (CUDA). A run takes weights.transfer."""

    load_timeout: float = Field(default=600.0, gt=0)
    """Seconds that a weight update may take before it is given up; also falling asleep and waking."""

    gpu_lock: Path | None = None
    """File by whose lock engines and trainer take turns on a GPU. If set, the engine starts asleep and can be
    put to sleep and woken. A run with colocated = true takes runs/<name>/gpu.lock."""

    vllm: dict[str, Any] = Field(default_factory=dict)
    """Engine arguments, passed through to vLLM by their Python names (dtype, max_model_len, ...)."""
