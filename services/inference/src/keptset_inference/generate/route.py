"""The HTTP side of generate."""

import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.serve.utils.api_utils import with_cancellation
from vllm.exceptions import GracefulHTTPError, VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.logger import init_logger
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.v1.engine.exceptions import EngineDeadError

from kept_tokens.messages import encode

from ..errors import RequestError, json_response
from ..state import FORMATS, EngineFacts, KeptTokensFormat, ServerState, asleep, stopping
from .binary_answer import binary_answer
from .completion import completion
from .json_answer import json_choice, prompt_logprobs, usage
from .openapi import GENERATE
from .request import GenerateRequest, parse_request
from .sampling import Sampling, prepare_sampling

logger = init_logger("vllm.keptset.generate")
router = APIRouter(tags=["keptset"])

FORMAT_HEADER = "X-Kept-Tokens-Format"
MSGPACK = "application/msgpack"
GONE = 499
"""The client has gone; nobody reads this."""


@router.post("/inference/v1/generate", openapi_extra=GENERATE, response_class=Response)
async def generate(raw: Request) -> Response:
    """Token ids in; token ids, processed logprobs and kept sets out."""
    state: ServerState = raw.app.state.keptset
    try:
        body = await raw.body()
        facts = state.facts
        binary, dialect = _wanted_form(raw, state.kept_tokens_format)
        request = parse_request(body, facts.vocab_size, facts.max_model_len)
        _check_model(request.model, facts)
        if binary and request.stream:
            raise RequestError(f"stream = true goes with JSON only: leave `Accept: {MSGPACK}` or stream out")
        sampling = prepare_sampling(request, facts)
        _check_prompt_logprobs(sampling, binary, request.stream)
        if state.phase != "awake":  # it fell asleep while the body came
            raise asleep(state.phase)
        job = _Job(raw, request, sampling, dialect)
        return await (job.stream() if request.stream else job.answer(binary))
    except RequestError as error:
        return error.response()


class _ClosedStream(StreamingResponse):
    """Ends its iterator with the response: a client that leaves while it is being sent to frees its sequences
    now, and not when the garbage is collected.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self.body_iterator.aclose()  # type: ignore[union-attr]


class _Job:
    """One request on its way through the engine."""

    def __init__(
        self, raw: Request, request: GenerateRequest, sampling: Sampling, dialect: KeptTokensFormat
    ) -> None:
        self.raw, self.request, self.sampling, self.dialect = raw, request, sampling, dialect
        self.state: ServerState = raw.app.state.keptset
        self.facts: EngineFacts = self.state.facts
        ours = uuid.uuid4().hex
        self.request_id = request.request_id or ours
        self.num_tokens = 0
        engine: EngineClient = raw.app.state.engine_client
        self.outputs: AsyncGenerator[RequestOutput, None] = engine.generate(
            tokens_input(request.token_ids, cache_salt=request.cache_salt),
            sampling.params,
            ours,  # the client's name may be used twice
            priority=request.priority,
        )

    async def answer(self, binary: bool) -> Response:
        last = await _engine_errors(_last(self.outputs, raw_request=self.raw))
        if last is None:
            return Response(status_code=GONE)
        choices = [completion(part, self.sampling, self.facts.vocab_size) for part in self._whole(last)]
        if binary and last.kv_transfer_params is not None:
            raise RequestError(
                f"the answer has kv_transfer_params, which {MSGPACK} does not hold: accept application/json",
                406,
                "not_acceptable",
            )
        if binary:
            answer = binary_answer(
                self.request_id, self.request.model, choices, candidates=bool(self.sampling.logprobs)
            )
            return Response(encode(answer), media_type=MSGPACK)
        num_tokens = sum(len(choice.token_ids) for choice in choices)
        return json_response(
            {
                **self._head(),
                "usage": usage(len(self.request.token_ids), num_tokens),
                "choices": [json_choice(choice, self.dialect) for choice in choices],
                "prompt_logprobs": prompt_logprobs(last.prompt_logprobs),
                "kv_transfer_params": last.kv_transfer_params,
            }
        )

    async def stream(self) -> Response:
        # What the engine refuses, it refuses before the first chunk: then the answer still has a status.
        first = await _engine_errors(_first(self.outputs, raw_request=self.raw))
        if first is None:
            return Response(status_code=GONE)
        chunk = self._chunk(first)
        return _ClosedStream(self._events(chunk), media_type="text/event-stream")

    async def _events(self, first: bytes | None) -> AsyncIterator[bytes]:
        try:
            if first is not None:
                yield _event(first)
            async for output in self.outputs:
                if (chunk := self._chunk(output)) is not None:
                    yield _event(chunk)
            if self.request.include_usage:
                counts = usage(len(self.request.token_ids), self.num_tokens)
                yield _event(msgspec.json.encode({**self._head(), "choices": [], "usage": counts}))
        except Exception as error:  # the status is sent already, so the stream has to say it
            failure = _as_request_error(error)
            if failure.code == "engine_dead" and self.state.stopping:
                failure = stopping()
            yield b"event: error\n" + _event(msgspec.json.encode(failure.body()))
        finally:
            await self.outputs.aclose()
        yield b"data: [DONE]\n\n"

    def _chunk(self, output: RequestOutput) -> bytes | None:
        choices = [completion(part, self.sampling, self.facts.vocab_size) for part in self._whole(output)]
        choices = [choice for choice in choices if len(choice.token_ids) or choice.finish_reason is not None]
        if not choices:
            return None
        self.num_tokens += sum(len(choice.token_ids) for choice in choices)
        answer = {**self._head(), "choices": [json_choice(choice, self.dialect) for choice in choices]}
        return msgspec.json.encode(answer)

    def _whole(self, output: RequestOutput) -> list[CompletionOutput]:
        """What the engine gave, unless it was aborted as the server breaks or stops."""
        if any(part.finish_reason == "abort" for part in output.outputs):
            if self.state.broken is not None:
                raise RequestError(self.state.broken, 503, "broken")
            if self.state.stopping:
                raise stopping()
        return output.outputs

    def _head(self) -> dict[str, Any]:
        model = self.request.model or self.facts.served_names[0]
        return {
            "request_id": self.request_id,
            "model": model,
            "created": int(time.time()),
            "output_mode": "tokens",
        }


# A client that leaves takes its sequences out of the engine; needs the body to have been read.
@with_cancellation
async def _first(outputs: AsyncGenerator[RequestOutput, None], *, raw_request: Request) -> RequestOutput:
    return await anext(outputs)


@with_cancellation
async def _last(
    outputs: AsyncGenerator[RequestOutput, None], *, raw_request: Request
) -> RequestOutput | None:
    last = None
    async for output in outputs:
        last = output
    return last


async def _engine_errors(waiting: Any) -> Any:
    try:
        return await waiting
    except Exception as error:
        raise _as_request_error(error) from error


def _as_request_error(error: Exception) -> RequestError:
    if isinstance(error, RequestError):
        return error
    if isinstance(error, GracefulHTTPError):
        return RequestError(error.message, int(error.http_status), "engine_busy")
    if isinstance(error, VLLMClientError | ValueError):
        return RequestError(str(error.args[0] if error.args else error))
    if isinstance(error, EngineDeadError):
        return RequestError("the engine has died; the server stops", 503, "engine_dead")
    logger.exception("generate failed")
    return RequestError(f"the engine failed: {error!r}", 500, "engine_error")


def _wanted_form(raw: Request, default: KeptTokensFormat) -> tuple[bool, KeptTokensFormat]:
    """Whether the answer is MessagePack, and the JSON dialect."""
    dialect = raw.headers.get(FORMAT_HEADER, default)
    if dialect not in FORMATS:
        raise RequestError(
            f"{FORMAT_HEADER}: {dialect!r} is no dialect of the kept sets: send one of {', '.join(FORMATS)}"
        )
    accepted = [part.split(";")[0].strip().lower() for part in raw.headers.get("accept", "").split(",")]
    return MSGPACK in accepted, dialect


def _check_model(model: str | None, facts: EngineFacts) -> None:
    if model is not None and model not in facts.served_names:
        raise RequestError(
            f"model = {model!r} is not served here: leave it out, or send a name that GET /v1/models lists",
            404,
            "model_not_found",
        )


def _check_prompt_logprobs(sampling: Sampling, binary: bool, stream: bool) -> None:
    if sampling.params.prompt_logprobs is None and not sampling.params.prompt_logprob_token_ids:
        return
    if binary or stream:
        form, way_out = ("a stream", "stream") if stream else (MSGPACK, f"`Accept: {MSGPACK}`")
        raise RequestError(
            f"sampling_params.prompt_logprobs = {sampling.params.prompt_logprobs}: {form} does not hold "
            f"them: leave {way_out} out, or ask for the prompt's logprobs in a request of their own"
        )


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


__all__ = ["router"]
