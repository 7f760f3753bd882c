"""The routes by which the orchestrator has weights sent from GPU to GPU."""

import asyncio
from typing import Annotated, Any

from fastapi import FastAPI, Request
from pydantic import BaseModel, ConfigDict, Field

from keptset_guards import CallerLeft, while_asked

from .errands import ErrandFailed, ask
from .folders import Folders
from .refusal import Refusal

GROUP_SECONDS = 60.0
GRACE = 5.0
"""Seconds that the loop's own words about a time-out get to arrive."""
CODES = {"loop_timeout": 504, "peers_missing": 504, "send_failed": 503}
"""Answers to what the loop says; 409 to everything else."""


class SendRequest(BaseModel):
    """The body of send."""

    model_config = ConfigDict(extra="forbid")
    unique_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9+/]{170}[A-Za-z0-9+/=]{2}$")]
    """Of the group, as `group` gave it: base64 of 128 bytes."""
    world_size: Annotated[int, Field(ge=2, le=4096)]
    """Inference's workers, and the trainer."""
    seconds: Annotated[float, Field(gt=0, le=3600)]
    """For all of it."""


def add_send_routes(app: FastAPI, folders: Folders, enabled: bool) -> None:
    """`enabled`: trainer.weights_transfer is "nccl"."""
    one_at_a_time = asyncio.Lock()

    async def do(errand: dict[str, Any], seconds: float) -> dict[str, Any]:
        if not enabled:
            raise Refusal(
                409,
                "no_transfer",
                'this trainer sends no weights: set weights.transfer = "nccl" for all services',
            )
        try:
            async with asyncio.timeout(seconds + GRACE), one_at_a_time:
                answer = await ask(folders, errand, seconds)
        except TimeoutError:
            raise Refusal(
                504, "loop_timeout", f"waited {seconds:g} s for another transfer of weights to end"
            ) from None
        except ErrandFailed as failure:
            raise Refusal(CODES.get(failure.kind, 409), failure.kind, str(failure)) from None
        return {name: value for name, value in answer.items() if name != "name"}

    @app.post("/keptset/v1/weights/group")
    async def group() -> dict[str, Any]:
        return await do({"kind": "group"}, GROUP_SECONDS)

    @app.post("/keptset/v1/weights/{version}/send")
    async def send(version: int, body: SendRequest, request: Request) -> dict[str, Any]:
        errand = {"kind": "send", "version": version, **body.model_dump()}
        try:
            # Whoever asks calls it off by leaving, as the receivers do not come then, or do not stay.
            return await while_asked(request.receive, do(errand, body.seconds))
        except CallerLeft:
            raise Refusal(499, "called_off", "whoever asked has left: it was called off") from None
