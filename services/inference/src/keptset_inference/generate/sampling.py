"""The sampling parameters of a request, and who gets kept sets."""

from dataclasses import dataclass, fields
from typing import Any

import msgspec
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import (
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)

from ..capture.bounds import LOWEST_TOP_P, widest_set
from ..capture.flag import mark
from ..errors import RequestError
from ..names import PARAMETERS, did_you_mean
from ..state import EngineFacts
from .request import GenerateRequest, shown

LOWEST_TEMPERATURE = 0.01
"""vLLM clamps 0 < temperature below this, silently; a trainer would not."""

_SET_BY_SERVER = {
    "extra_args": "it is private to the server",
    "output_kind": "set stream",
    "skip_clone": "it is private to the server",
    "flat_logprobs": "the server chooses how it keeps logprobs",
    "output_text_buffer_length": "it is private to the server",
}
KNOWN = sorted(
    name
    for name in SamplingParams.__struct_fields__
    if name not in _SET_BY_SERVER and not name.startswith("_")
)
"""What `sampling_params` may hold, by vLLM's names."""
_KNOWN_INSIDE = {
    "structured_outputs": sorted(one.name for one in fields(StructuredOutputsParams) if one.init),
    "repetition_detection": sorted(one.name for one in fields(RepetitionDetectionParams) if one.init),
}
"""What their tables may hold: of these, too, what is unknown would be left out without a word."""


@dataclass(frozen=True)
class Sampling:
    """What the engine gets, and what the answer needs to know about it."""

    params: SamplingParams
    masked: bool
    """This request gets kept sets."""
    logprobs: int | None
    """How many logprobs beside the sampled token's the client wants; None: none at all."""


def prepare_sampling(request: GenerateRequest, facts: EngineFacts) -> Sampling:
    """Check the parameters, decide whether kept sets come, and refuse what could not be replayed.

    Raises:
        RequestError: status 400; the text names field, value and way out.
    """
    given = {"max_tokens": None, **request.sampling}  # vLLM's own default would be 16
    _check_names(given)
    params = _convert(given)
    room = facts.max_model_len - len(request.token_ids)
    if params.max_tokens is None:
        params.max_tokens = room
        if params.min_tokens > room:
            raise RequestError(
                f"sampling_params.min_tokens = {params.min_tokens}, but the context has room for {room} "
                f"tokens after a prompt of {len(request.token_ids)}"
            )
    elif params.max_tokens > room:
        raise RequestError(
            f"sampling_params.max_tokens = {params.max_tokens}, but after a prompt of "
            f"{len(request.token_ids)} tokens the context of {facts.max_model_len} has room for {room}: "
            "send at most that, or leave max_tokens out, which takes the rest of the context"
        )
    _check_seed(params)
    for name in ("stop", "bad_words"):
        if getattr(params, name) and not facts.tokenizer:
            raise RequestError(
                f"sampling_params.{name} = {shown(getattr(params, name))} needs a tokenizer, and this "
                "server was started with inference.vllm.skip_tokenizer_init: send token ids "
                "(stop_token_ids, allowed_token_ids)"
            )
    logprobs = params.logprobs
    masked = _wants_sets(request.kept_tokens, params, facts)
    if masked:
        _check_replayable(params, given, facts)
        params.top_p = max(params.top_p, LOWEST_TOP_P)  # the same set
        if params.logprobs is None:
            params.logprobs = 0  # the sets travel with the logprobs
        mark(params)
    if request.kv_transfer_params is not None:
        params.extra_args = {**(params.extra_args or {}), "kv_transfer_params": request.kv_transfer_params}
    params.detokenize = bool(params.stop)  # text is needed only to find stop strings in it
    params.flat_logprobs = True
    params.output_kind = RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY
    return Sampling(params, masked, logprobs)


def limits_support(params: SamplingParams) -> bool:
    """Whether anything besides the temperature may keep tokens from being sampled.

    A top_k counts however small the vocabulary is: who asks for one, as a truncating source of a run does,
    does not have to know it, and gets the same answer from every model.
    """
    return bool(
        params.top_p < 1
        or params.top_k > 0
        or params.min_p > 0
        or params.min_tokens > 0
        or params.bad_words
        or params.allowed_token_ids is not None
        or params.structured_outputs is not None
    )


def _check_names(given: dict[str, Any]) -> None:
    for name in given:
        if name in _SET_BY_SERVER:
            raise RequestError(f"sampling_params.{name} cannot be sent: {_SET_BY_SERVER[name]}")
        if name not in KNOWN:
            meant = PARAMETERS.get(name) or did_you_mean(name, KNOWN)
            raise RequestError(f"sampling_params.{name}: unknown parameter, {meant}")
    for outer, known in _KNOWN_INSIDE.items():
        value = given.get(outer)
        for name in value if isinstance(value, dict) else ():
            if name not in known:
                raise RequestError(
                    f"sampling_params.{outer}.{name}: unknown parameter, {did_you_mean(name, known)}"
                )


def _convert(given: dict[str, Any]) -> SamplingParams:
    if given.get("stop") and given.get("detokenize") is False:
        # Clients of this route send detokenize = false as a matter of course; no text is ever answered.
        given = given | {"detokenize": True}
    try:
        return msgspec.convert(given, SamplingParams, str_keys=True)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        field = path.rstrip("`").lstrip(".")
        value = f" = {shown(given[field])}" if field in given else ""  # not of an entry: `stop[0]`
        text = f"sampling_params.{field}{value}: {message}" if field else f"sampling_params: {error}"
        raise RequestError(text) from error
    except VLLMValidationError as error:
        raise RequestError(f"sampling_params: {error.args[0]}") from error
    except (ValueError, TypeError, OverflowError) as error:
        raise RequestError(f"sampling_params: {error}") from error


def _check_seed(params: SamplingParams) -> None:
    # vLLM samples choice i with seed + i, as torch takes it: 64 bits. Its -1 means no seed, and is None here.
    if params.seed is not None and not -(2**63) <= params.seed <= 2**63 - params.n:
        raise RequestError(
            f"sampling_params.seed = {params.seed}: choice i is sampled with seed + i, which must fit "
            f"64 bits for all {params.n}: send -2**63 to 2**63 - {params.n}, or leave seed out"
        )


def _wants_sets(asked: bool | None, params: SamplingParams, facts: EngineFacts) -> bool:
    if asked is False:
        return False
    if facts.width is None:
        if asked:
            raise RequestError(
                "kept_tokens = true, but this server does not record kept sets: start it with "
                "inference.enable_return_sampling_mask = true",
                code="capture_off",
            )
        return False
    if asked is None:
        return params.temperature > 0 and limits_support(params)
    if params.temperature == 0:
        raise RequestError(
            "kept_tokens = true, but temperature = 0 is greedy and has no kept set: set a temperature of "
            f"at least {LOWEST_TEMPERATURE}, or leave kept_tokens out"
        )
    return True


def _check_replayable(params: SamplingParams, given: dict[str, Any], facts: EngineFacts) -> None:
    """Refuse what would not be recorded exactly; every way out that there is, is named."""
    assert facts.width is not None
    without = "or send kept_tokens = false if you need no kept sets"
    temperature = given.get("temperature", 1.0)
    if temperature < LOWEST_TEMPERATURE:
        raise RequestError(
            f"sampling_params.temperature = {temperature}: vLLM would clamp it to {LOWEST_TEMPERATURE}; "
            f"send at least that, or 0 for greedy, {without}"
        )
    if params.top_k > facts.width and facts.vocab_size > facts.width:
        raise RequestError(
            f"sampling_params.top_k = {params.top_k}, but at most {facts.width} ids of a kept set are "
            f"recorded: set top_k to 1 to {facts.width}, {without}"
        )
    if widest_set(params, facts.vocab_size) > facts.width:
        raise RequestError(
            f"sampling_params.top_k = {given.get('top_k')}: without a top_k a kept set may be as large as "
            f"the vocabulary of {facts.vocab_size}, and at most {facts.width} ids are recorded: set top_k "
            f"to 1 to {facts.width}, {without}"
        )
    _check_something_is_left(params, facts, without)
    neutral = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
    for name, value in neutral.items():
        if getattr(params, name) != value:
            raise RequestError(
                f"sampling_params.{name} = {getattr(params, name)} bends logits, which a kept set cannot "
                f"replay: leave it out, {without}"
            )
    bends = ["logit_bias", "thinking_token_budget", "trace_decode_token_ids", "logprob_token_ids"]
    for name in bends:
        if getattr(params, name):
            raise RequestError(
                f"sampling_params.{name} = {shown(getattr(params, name))} cannot be sent with kept sets: "
                f"leave it out, {without}"
            )
    if params.thinking_token_budget is not None:
        raise RequestError(
            f"sampling_params.thinking_token_budget = 0 forces tokens: leave it out, {without}"
        )
    if params.watermarking or (facts.watermarking and params.watermarking is not False):
        raise RequestError(
            "sampling_params.watermarking: this engine would watermark the request, which bends logits: send "
            f"watermarking = false, {without}"
        )
    if params.logprobs is not None and params.logprobs < 0:
        raise RequestError(
            f"sampling_params.logprobs = {params.logprobs} (the whole vocabulary) cannot be sent with kept "
            f"sets: send 0 or more, {without}"
        )


def _check_something_is_left(params: SamplingParams, facts: EngineFacts, without: str) -> None:
    """Refuse contradictions that show before anything is tokenised; others fail where they are sampled."""
    if not params.min_tokens or not params.stop_token_ids:
        return
    stops = set(params.stop_token_ids)
    allowed = params.allowed_token_ids
    nothing = stops.issuperset(allowed) if allowed is not None else len(stops) >= facts.vocab_size
    if nothing:
        raise RequestError(
            f"sampling_params.min_tokens = {params.min_tokens} forbids the stop_token_ids for so long, "
            f"which leaves nothing to sample: allow another id, {without}"
        )


__all__ = ["KNOWN", "LOWEST_TEMPERATURE", "Sampling", "limits_support", "prepare_sampling"]
