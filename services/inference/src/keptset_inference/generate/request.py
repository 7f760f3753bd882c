"""The body of a request, checked field by field. Nothing is ignored, trimmed or filled in silently; of a name
that comes twice the last value counts, as JSON readers have it.
"""

from dataclasses import dataclass
from typing import Any

import msgspec
from vllm.sampling_params import SamplingParams

from ..errors import RequestError
from ..names import FIELDS, PARAMETERS, did_you_mean


@dataclass(frozen=True)
class GenerateRequest:
    """A request whose own fields are right; `sampling` is checked in `sampling.py`."""

    token_ids: list[int]
    """The prompt."""
    sampling: dict[str, Any]
    """vLLM's SamplingParams by their names."""
    model: str | None = None
    request_id: str | None = None
    stream: bool = False
    include_usage: bool = False
    """Streaming: one more chunk at the end, without choices, that counts the tokens."""
    kept_tokens: bool | None = None
    """True: kept sets are required. False: none are wanted. None: if the sampling limits its support."""
    priority: int = 0
    cache_salt: str | None = None
    kv_transfer_params: dict[str, Any] | None = None


SERVED = (
    "token_ids",
    "sampling_params",
    "model",
    "request_id",
    "stream",
    "stream_options",
    "kept_tokens",
    "priority",
    "cache_salt",
    "kv_transfer_params",
)
NOT_SERVED: dict[str, tuple[Any, ...]] = {
    "features": (None,),
    "content_parts": (None,),
    "token_offsets": (None,),
    "reasoning_ended": (None,),
    "reasoning_parser_kwargs": (None,),
    "ec_transfer_params": (None,),
    "return_token_ids": (None, False),
    "output_mode": (None, "tokens"),
}
"""Fields of vLLM's own route that clients send, and the values of theirs that ask for nothing."""


def parse_request(body: bytes, vocab_size: int, max_model_len: int) -> GenerateRequest:
    """Decode and check everything but the sampling parameters.

    Raises:
        RequestError: status 400; the text names field, position, value and way out.
    """
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise RequestError(
            f"the body is {_kind(fields)}, but must be an object with token_ids and sampling_params"
        )
    _check_names(fields)
    stream = _typed(fields, "stream", bool, default=False)
    return GenerateRequest(
        token_ids=_token_ids(fields, vocab_size, max_model_len),
        sampling=_typed(fields, "sampling_params", dict, default={}),
        model=_typed(fields, "model", str),
        request_id=_request_id(fields),
        stream=stream,
        include_usage=_include_usage(fields, stream),
        kept_tokens=_typed(fields, "kept_tokens", bool),
        priority=_priority(fields),
        cache_salt=_cache_salt(fields),
        kv_transfer_params=_typed(fields, "kv_transfer_params", dict),
    )


def shown(value: Any) -> str:
    """A value in an error, at most 60 characters of it."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _check_names(fields: dict[str, Any]) -> None:
    for name, value in fields.items():
        if name in SERVED:
            continue
        if name not in NOT_SERVED:
            raise RequestError(f"{name}: unknown field, {_meant(name)}")
        if not any(value is nothing or value == nothing for nothing in NOT_SERVED[name]):
            raise RequestError(
                f"{name} = {shown(value)} is not served here (token ids in, token ids out): leave it out"
            )


def _meant(name: str) -> str:
    """Where a field belongs that this route does not have at the top, as far as that can be told."""
    if name in SamplingParams.__struct_fields__:
        return f"send it as sampling_params.{name}"
    return FIELDS.get(name) or PARAMETERS.get(name) or did_you_mean(name, SERVED)


def _typed(fields: dict[str, Any], name: str, kind: type, default: Any = None) -> Any:
    value = fields.get(name)
    if value is None:
        return default
    if type(value) is not kind:
        raise RequestError(f"{name} = {shown(value)} is {_kind(value)}, but must be {_NAMES[kind]}")
    return value


def _token_ids(fields: dict[str, Any], vocab_size: int, max_model_len: int) -> list[int]:
    if "token_ids" not in fields:
        raise RequestError("token_ids is missing: send the prompt as a list of token ids")
    ids = fields["token_ids"]
    if not isinstance(ids, list):
        raise RequestError(f"token_ids = {shown(ids)} is {_kind(ids)}, but must be a list of token ids")
    if not ids:
        raise RequestError("token_ids is empty: a prompt has at least one token")
    if set(map(type, ids)) != {int}:
        position = next(i for i, value in enumerate(ids) if type(value) is not int)
        raise RequestError(
            f"token_ids[{position}] = {shown(ids[position])} is {_kind(ids[position])}, not an integer"
        )
    if min(ids) < 0 or max(ids) >= vocab_size:
        position = next(i for i, value in enumerate(ids) if not 0 <= value < vocab_size)
        raise RequestError(
            f"token_ids[{position}] = {shown(ids[position])} is outside the vocabulary: ids are 0 to "
            f"{vocab_size - 1}"
        )
    if len(ids) >= max_model_len:
        raise RequestError(
            f"token_ids has {len(ids)} tokens, but prompt and completion together have room for "
            f"{max_model_len}: send at most {max_model_len - 1}, or start the server with a larger "
            "inference.vllm.max_model_len"
        )
    return ids


def _request_id(fields: dict[str, Any]) -> str | None:
    request_id = _typed(fields, "request_id", str)
    if request_id is not None and not 1 <= len(request_id) <= 256:
        raise RequestError(f"request_id has {len(request_id)} characters, but must have 1 to 256")
    return request_id


def _include_usage(fields: dict[str, Any], stream: bool) -> bool:
    options = _typed(fields, "stream_options", dict)
    if options is None:
        return False
    if not stream:
        raise RequestError("stream_options goes with stream = true only: leave it out")
    known = ["include_usage", "continuous_usage_stats"]
    for name in options:
        if name not in known:
            raise RequestError(f"stream_options.{name}: unknown field, {did_you_mean(name, known)}")
    if options.get("continuous_usage_stats"):
        raise RequestError(
            "stream_options.continuous_usage_stats is not served here: count the token_ids of the chunks"
        )
    return bool(_typed(options, "include_usage", bool, default=False))


def _priority(fields: dict[str, Any]) -> int:
    priority: int = _typed(fields, "priority", int, default=0)
    if not -(2**63) <= priority < 2**63:
        raise RequestError(f"priority = {shown(priority)} does not fit 64 bits")
    return priority


def _cache_salt(fields: dict[str, Any]) -> str | None:
    salt = _typed(fields, "cache_salt", str)
    if salt is not None and not 1 <= len(salt) <= 1024:
        raise RequestError(f"cache_salt has {len(salt)} characters, but must have 1 to 1024")
    return salt


_NAMES = {bool: "true or false", int: "an integer", str: "a string", dict: "an object", list: "a list"}


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    return {bool: "a boolean", int: "an integer", float: "a number"}.get(
        type(value), _NAMES.get(type(value), "?")
    )


__all__ = ["GenerateRequest", "parse_request", "shown"]
