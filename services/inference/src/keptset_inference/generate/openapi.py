"""What /docs says about generate, which reads its body by itself."""

from typing import Any

ERROR = {
    "description": "The text names the field, the value and the way out.",
    "content": {
        "application/json": {
            "schema": {
                "type": "object",
                "properties": {
                    "error": {
                        "type": "object",
                        "properties": {
                            "message": {"type": "string"},
                            "type": {"type": "string"},
                            "code": {"type": "string"},
                        },
                    }
                },
            }
        }
    },
}
_NULL = {"type": "null"}
_KEPT = {
    "type": "object",
    "description": "Kept ids of all tokens, and how many belong to each; int32, little-endian, base64.",
    "properties": {"ids": {"type": "string"}, "counts": {"type": "string"}},
    "required": ["ids", "counts"],
}
_REQUEST = {
    "type": "object",
    "additionalProperties": False,
    "required": ["token_ids"],
    "properties": {
        "token_ids": {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
        "sampling_params": {
            "type": "object",
            "description": "vLLM's SamplingParams by their names; unknown names are refused.",
            "additionalProperties": True,
            "properties": {
                "temperature": {"type": "number", "default": 1.0},
                "top_p": {"type": "number", "default": 1.0},
                "top_k": {"type": "integer", "default": 0},
                "min_p": {"type": "number", "default": 0.0},
                "max_tokens": {"type": "integer", "description": "Left out: the rest of the context."},
                "n": {"type": "integer", "default": 1},
                "seed": {"type": "integer"},
                "logprobs": {"type": "integer", "description": "0: the sampled token's only."},
                "stop": {"type": "array", "items": {"type": "string"}},
                "stop_token_ids": {"type": "array", "items": {"type": "integer"}},
            },
        },
        "model": {"type": "string"},
        "request_id": {"type": "string"},
        "stream": {"type": "boolean", "default": False},
        "stream_options": {"type": "object", "properties": {"include_usage": {"type": "boolean"}}},
        "kept_tokens": {
            "type": ["boolean", "null"],
            "description": "true: required; false: not wanted; null: if the sampling limits its support.",
        },
        "priority": {"type": "integer", "default": 0},
        "cache_salt": {"type": "string"},
        "kv_transfer_params": {"type": "object"},
    },
}
_CHOICE = {
    "type": "object",
    "properties": {
        "index": {"type": "integer"},
        "token_ids": {"type": "array", "items": {"type": "integer"}},
        "finish_reason": {"type": ["string", "null"]},
        "stop_reason": {"type": ["integer", "string", "null"]},
        "logprobs": {"type": ["object", "null"]},
        "kept_tokens": {"anyOf": [_KEPT, _NULL]},
        "sampling_mask": {
            "type": ["array", "null"],
            "items": {"type": "array", "items": {"type": "integer"}},
        },
        "weight_versions": {
            "type": ["array", "null"],
            "items": {
                "type": "object",
                "properties": {
                    "version": {"type": "string"},
                    "start": {"type": "integer"},
                    "end": {"type": "integer"},
                },
            },
        },
    },
}
_ANSWER = {
    "type": "object",
    "properties": {
        "request_id": {"type": "string"},
        "model": {"type": "string"},
        "created": {"type": "integer"},
        "usage": {"type": "object"},
        "choices": {"type": "array", "items": _CHOICE},
    },
}
GENERATE: dict[str, Any] = {
    "requestBody": {"required": True, "content": {"application/json": {"schema": _REQUEST}}},
    "parameters": [
        {
            "name": "X-Kept-Tokens-Format",
            "in": "header",
            "description": "JSON dialect of the kept sets; the server's setting if left out.",
            "schema": {"type": "string", "enum": ["kept_tokens", "sampling_mask", "both"]},
        }
    ],
    "responses": {
        "200": {
            "description": "The completions; with stream = true as server-sent events, each with its tokens' "
            "sets.",
            "content": {
                "application/json": {"schema": _ANSWER},
                "text/event-stream": {"schema": {"type": "string"}},
                "application/msgpack": {"schema": {"type": "string", "format": "binary"}},
            },
        },
        "400": ERROR,
        "404": ERROR,
        "500": ERROR,
        "503": ERROR,
    },
}
"""`openapi_extra` of the route."""

__all__ = ["ERROR", "GENERATE"]
