"""The HTTP side of weight updates."""

from dataclasses import asdict
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Request, Response

from ..errors import RequestError, json_response
from ..generate.openapi import ERROR
from .update import WeightUpdates

router = APIRouter(tags=["keptset"])

Version = Annotated[int, msgspec.Meta(ge=0, lt=10**6)]


class WeightsRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body."""

    version: Version


_OPENAPI: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "required": ["version"],
                    "properties": {"version": {"type": "integer", "minimum": 0, "maximum": 999999}},
                    "additionalProperties": False,
                }
            }
        },
    },
    "responses": {
        "200": {
            "description": "The version runs; it may have run before.",
            "content": {
                "application/json": {
                    "schema": {
                        "type": "object",
                        "properties": {
                            "version": {"type": "integer"},
                            "seconds": {"type": "number"},
                            "pause_seconds": {"type": "number"},
                        },
                    }
                }
            },
        },
        **{status: ERROR for status in ("400", "404", "409", "422", "500", "503", "504")},
    },
}


@router.post("/keptset/v1/weights", openapi_extra=_OPENAPI, response_class=Response)
async def weights(raw: Request) -> Response:
    """Put a published version into the engine; running requests go on under it."""
    updates: WeightUpdates = raw.app.state.keptset_updates
    try:
        try:
            request = msgspec.json.decode(await raw.body(), type=WeightsRequest)
        except msgspec.DecodeError as error:
            raise RequestError(f'the body must be {{"version": n}}: {error}') from error
        return json_response(asdict(await updates.update(request.version)))
    except RequestError as error:
        return error.response()


__all__ = ["router"]
