"""The HTTP side of sleeping and waking."""

from dataclasses import asdict
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from ..errors import RequestError, json_response
from ..generate.openapi import ERROR
from ..weights.route import Version
from .sleeper import Sleeper

router = APIRouter(tags=["keptset"])


class WakeRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a wake; it may be left out."""

    version: Version | None = None
    """A published version, loaded before anything is sampled; None: the weights that were there."""


def _answers(description: str, *names: str) -> dict[str, Any]:
    types = {name: {"type": "string" if name == "instance" else "number"} for name in names}
    schema = {"type": "object", "properties": types}
    return {
        "200": {"description": description, "content": {"application/json": {"schema": schema}}},
        **{status: ERROR for status in ("400", "404", "409", "422", "500", "503", "504")},
    }


_SLEEP: dict[str, Any] = {"responses": _answers("It sleeps; it may have slept before.", "seconds")}
_WAKE: dict[str, Any] = {
    "requestBody": {
        "required": False,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "properties": {
                        "version": {
                            "anyOf": [
                                {"type": "null"},
                                {"type": "integer", "minimum": 0, "maximum": 999999},
                            ]
                        }
                    },
                    "additionalProperties": False,
                }
            }
        },
    },
    "responses": _answers(
        "It is awake; it may have been before.",
        "version",
        "seconds",
        "pause_seconds",
        "wake_seconds",
        "instance",
    ),
}


@router.post("/keptset/v1/sleep", openapi_extra=_SLEEP, response_class=Response)
async def sleep(raw: Request) -> Response:
    """Let running requests end, then let the GPU go."""
    sleeper: Sleeper = raw.app.state.keptset_sleeper
    try:
        return json_response(asdict(await sleeper.sleep()))
    except RequestError as error:
        return error.response()


@router.post("/keptset/v1/wake", openapi_extra=_WAKE, response_class=Response)
async def wake(raw: Request) -> Response:
    """Come back to the GPU, if it is free, with a published version if one is named."""
    sleeper: Sleeper = raw.app.state.keptset_sleeper
    try:
        try:
            request = msgspec.json.decode(await raw.body() or b"{}", type=WakeRequest)
        except msgspec.DecodeError as error:
            raise RequestError(f'the body must be {{}} or {{"version": n}}: {error}') from error
        done = await sleeper.wake(request.version)
        return json_response({**asdict(done), "instance": raw.app.state.keptset.instance})
    except RequestError as error:
        return error.response()


__all__ = ["router"]
