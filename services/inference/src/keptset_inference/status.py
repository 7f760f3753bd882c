"""`/keptset/v1/status` and `/health`."""

from typing import Any

import vllm
from fastapi import APIRouter, Request, Response
from vllm.v1.engine.exceptions import EngineDeadError

from . import __version__
from .errors import RequestError, json_response
from .state import FORMATS, ServerState, stopping

router = APIRouter(tags=["keptset"])


@router.get("/keptset/v1/status")
async def status(raw: Request) -> dict[str, Any]:
    """What runs here; the orchestrator reads it before the first rollout."""
    state: ServerState = raw.app.state.keptset
    facts = state.facts
    return {
        "service": "inference",
        "version": __version__,
        "model": facts.model,
        "vocab_size": facts.vocab_size,
        "max_model_len": facts.max_model_len,
        # A server that has not proven its capture does not answer at all.
        "capture": {
            "enabled": facts.capture is not None,
            "kind": facts.capture or "off",
            "width": facts.width if facts.capture == "v1" else None,  # native sets have any width
            "proven": facts.capture is not None,
        },
        "formats": list(FORMATS),
        "kept_tokens_format": state.kept_tokens_format,
        "weight_version": state.weight_version,
        "instance": state.instance,
        "workers": facts.workers,
        "takes_transfers": facts.takes_transfers,
        # None: it has its GPU for itself.
        "sleep": {"state": state.phase, "frees_memory": facts.frees_memory} if facts.shares_gpu else None,
        "vllm": vllm.__version__,
        "broken": state.broken,
        "stopping": state.stopping,
    }


@router.get("/health", response_class=Response)
async def health(raw: Request) -> Response:
    """200 as long as the engine lives and is not half-loaded, asleep or awake; 503 once it is asked to stop,
    as whoever balances load is to send nothing here. Never needs a key.
    """
    state: ServerState = raw.app.state.keptset
    if state.stopping:
        return stopping().response()
    if state.broken is not None:
        return RequestError(state.broken, 503, "broken").response()
    try:
        await raw.app.state.engine_client.check_health()
    except EngineDeadError:
        return RequestError("the engine has died", 503, "engine_dead").response()
    return json_response({"state": state.phase})


__all__ = ["router"]
