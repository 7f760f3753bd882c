"""The HTTP side of weight updates."""

from dataclasses import asdict
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Request, Response

from keptset_guards import CallerLeft, while_asked

from ..errors import RequestError, json_response
from ..generate.openapi import ERROR
from .transfer import UNIQUE_ID, Transfer
from .update import WeightUpdates

router = APIRouter(tags=["keptset"])

Version = Annotated[int, msgspec.Meta(ge=0, lt=10**6)]


class WeightsRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body."""

    version: Version
    transfer: Transfer | None = None
    """It comes over NCCL, from a trainer that is asked to send it at the same time; None: it is published."""


_OPENAPI: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "required": ["version"],
                    "properties": {
                        "version": {"type": "integer", "minimum": 0, "maximum": 999999},
                        "transfer": {
                            "anyOf": [
                                {"type": "null"},
                                {
                                    "type": "object",
                                    "required": [
                                        "unique_id",
                                        "rank_offset",
                                        "world_size",
                                        "bucket_bytes",
                                        "seconds",
                                        "tensors",
                                    ],
                                    "properties": {
                                        "unique_id": {"type": "string", "pattern": UNIQUE_ID},
                                        "rank_offset": {"type": "integer", "minimum": 1},
                                        "world_size": {"type": "integer", "minimum": 2},
                                        "bucket_bytes": {"type": "integer", "minimum": 1},
                                        "seconds": {"type": "number", "exclusiveMinimum": 0, "maximum": 3600},
                                        "tensors": {"type": "array", "items": {"type": "array"}},
                                    },
                                    "additionalProperties": False,
                                },
                            ]
                        },
                    },
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
                            "instance": {"type": "string"},
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
        update = updates.update(request.version, request.transfer)
        done = await (update if request.transfer is None else while_asked(raw.receive, update))
        return json_response({**asdict(done), "instance": raw.app.state.keptset.instance})
    except CallerLeft:
        return RequestError(
            "whoever asked has left: the transfer was called off", 499, "called_off"
        ).response()
    except RequestError as error:
        return error.response()


__all__ = ["router"]
