"""The HTTP side of generate, with an engine that says what the test tells it to."""

import asyncio
import json

import httpx
import numpy as np
import pytest
from fastapi import FastAPI
from vllm.exceptions import QueueOverflowError, VLLMValidationError
from vllm.outputs import RequestOutput, SamplingMask
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.outputs import SamplingMaskLists

from kept_tokens import KeptTokens
from kept_tokens.answers import GenerateAnswer
from kept_tokens.messages import decode
from keptset_inference.capture.flag import is_marked
from keptset_inference.generate.route import router
from keptset_inference.state import ServerState

from .facts import facts
from .test_answers import SETS, TOKENS, flat, output


class Engine:
    """Answers with `outputs`, one after the other; an exception among them is raised."""

    def __init__(self, *outputs, wait: asyncio.Event | None = None) -> None:
        self.outputs, self.wait = outputs, wait
        self.asked: list = []
        self.closed = False

    async def generate(self, prompt, params, request_id, *, priority=0):
        self.asked.append((prompt, params, request_id, priority))
        try:
            for part in self.outputs:
                if isinstance(part, Exception):
                    raise part
                yield part
            if self.wait is not None:
                await self.wait.wait()
        finally:
            self.closed = True


def whole(*completions, finished=True) -> RequestOutput:
    return RequestOutput("x", None, [1, 2, 3], None, list(completions), finished)


def piece(position: int, **changes):
    """The output of a step that samples token `position`."""
    row = SamplingMask([SamplingMaskLists(np.array(SETS[position], np.int32))])
    last = position == len(TOKENS) - 1
    fields = {
        "logprobs": flat(TOKENS[position : position + 1], [-0.5]),
        "sampling_mask": row,
        "finish_reason": "length" if last else None,
        "weight_versions": None,
    }
    return output(tokens=TOKENS[position : position + 1], values=[-0.5], **fields | changes)


async def ask(
    engine: Engine, body: dict | bytes = b"", state: ServerState | None = None, **headers
) -> httpx.Response:
    app = FastAPI()
    app.include_router(router)
    app.state.engine_client, app.state.keptset = engine, state or ServerState(facts())
    content = (
        body if isinstance(body, bytes) and body else json.dumps({"token_ids": [1, 2, 3], **(body or {})})
    )
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=True)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        return await client.post("/inference/v1/generate", content=content, headers=headers)


CUT = {"sampling_params": {"top_k": 3, "logprobs": 0}}


async def test_an_answer_has_the_fields_that_clients_read():
    engine = Engine(whole(output()))
    answer = (await ask(engine, CUT | {"request_id": "mine", "priority": 2})).json()
    assert answer["request_id"] == "mine"
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
    (choice,) = answer["choices"]
    assert choice["token_ids"] == TOKENS
    assert KeptTokens.from_base64(choice["kept_tokens"]).rows() == SETS
    assert choice["weight_versions"] == [{"version": "v000003", "start": 0, "end": 3}]
    ((prompt, params, request_id, priority),) = engine.asked
    assert prompt["prompt_token_ids"] == [1, 2, 3]
    assert is_marked(params)
    assert request_id != "mine", "two clients may use one name"
    assert priority == 2


@pytest.mark.parametrize("asked", [{"prompt_logprobs": 0}, {"prompt_logprobs": 2}])
async def test_prompt_logprobs_are_refused_where_the_answer_does_not_hold_them(asked):
    """Nothing is dropped silently."""
    body = {"sampling_params": CUT["sampling_params"] | asked}
    engine = Engine(whole(output()))
    for answer in (
        await ask(engine, body, accept="application/msgpack"),
        await ask(engine, body | {"stream": True}),
    ):
        assert answer.status_code == 400
        assert "prompt_logprobs" in answer.json()["error"]["message"]
    assert not engine.asked
    assert (await ask(engine, body)).status_code == 200


async def test_the_way_out_of_an_unknown_model_holds_for_one_that_is_called_by_its_path():
    """Errors say no paths, so they cannot say such a name either."""
    state = ServerState(facts(served_names=("/usr/lib/model",)))
    refused = await ask(Engine(), CUT | {"model": "model"}, state)
    assert refused.status_code == 404
    assert "/v1/models" in refused.json()["error"]["message"]
    assert (await ask(Engine(whole(output())), CUT | {"model": "/usr/lib/model"}, state)).status_code == 200


async def test_kv_transfer_params_pass_through_both_ways():
    """Prefill and decode on different nodes: what the connectors say to each other is not ours."""
    body = CUT | {"kv_transfer_params": {"do_remote_decode": True}}
    answered = whole(output())
    answered.kv_transfer_params = {"remote_block_ids": [[3, 4]], "remote_engine_id": "p0"}
    engine = Engine(answered)
    answer = await ask(engine, body)
    assert answer.json()["kv_transfer_params"] == answered.kv_transfer_params
    ((_, params, _, _),) = engine.asked
    assert params.extra_args["kv_transfer_params"] == {"do_remote_decode": True}
    assert is_marked(params), "beside the mark"
    refused = await ask(Engine(answered), body, accept="application/msgpack")
    assert refused.status_code == 406
    assert "application/json" in refused.json()["error"]["message"], "nothing is dropped silently"


async def test_the_header_chooses_the_dialect_and_the_setting_is_the_default():
    state = ServerState(facts(), "both")
    fields = lambda response: {"kept_tokens", "sampling_mask"} & set(response.json()["choices"][0])  # noqa: E731
    assert fields(await ask(Engine(whole(output())), CUT, state)) == {"kept_tokens", "sampling_mask"}
    chosen = await ask(Engine(whole(output())), CUT, state, **{"X-Kept-Tokens-Format": "sampling_mask"})
    assert fields(chosen) == {"sampling_mask"}
    wrong = await ask(Engine(), CUT, state, **{"X-Kept-Tokens-Format": "masks"})
    assert wrong.status_code == 400
    assert "'masks'" in wrong.json()["error"]["message"]


@pytest.mark.parametrize("accept", ["application/msgpack", "text/html, Application/MsgPack;q=0.9"])
async def test_msgpack_is_answered_to_who_accepts_it(accept):
    response = await ask(Engine(whole(output())), CUT, Accept=accept)
    assert response.headers["content-type"] == "application/msgpack"
    answer = decode(response.content, GenerateAnswer)
    assert answer.model is None, "not asked for, and it may be long"
    assert answer.choices[0].arrays(1000, require_masks=True).kept.rows() == SETS


async def test_msgpack_does_not_stream():
    response = await ask(Engine(), CUT | {"stream": True}, Accept="application/msgpack")
    assert response.status_code == 400
    assert "stream" in response.json()["error"]["message"]


def events(response: httpx.Response) -> list:
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.partition("data: ")[2]) for line in lines[:-1]]


async def test_every_chunk_carries_its_tokens_sets():
    # vllm#55935: streaming: chunks without masks
    engine = Engine(*(whole(piece(i), finished=i == 2) for i in range(3)))
    response = await ask(engine, CUT | {"stream": True, "stream_options": {"include_usage": True}})
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, last = events(response)
    assert [chunk["choices"][0]["token_ids"] for chunk in chunks] == [[token] for token in TOKENS]
    rows = [KeptTokens.from_base64(chunk["choices"][0]["kept_tokens"]).rows() for chunk in chunks]
    assert rows == [[row] for row in SETS]
    assert response.text.count('"kept_tokens":{"ids":"') == 3
    assert len({chunk["request_id"] for chunk in chunks}) == 1
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 3


async def test_merged_chunks_of_a_slow_reader_line_up():
    merged = whole(piece(0), finished=False)
    merged.add(whole(piece(1), finished=False), aggregate=True)
    merged.add(whole(piece(2)), aggregate=True)
    from keptset_inference.capture.csr import kept_tokens

    assert kept_tokens(merged.outputs[0].sampling_mask.token_ids).rows() == SETS
    (chunk,) = events(await ask(Engine(merged), CUT | {"stream": True}))
    assert chunk["choices"][0]["token_ids"] == TOKENS
    assert KeptTokens.from_base64(chunk["choices"][0]["kept_tokens"]).rows() == SETS


async def test_chunks_without_news_are_not_sent():
    empty = output(tokens=[], sets=None, values=(), finish_reason=None, weight_versions=None)
    parts = [whole(piece(0), finished=False), whole(empty, finished=False), whole(piece(1), finished=False)]
    engine = Engine(*parts, whole(piece(2)))
    assert len(events(await ask(engine, CUT | {"stream": True}))) == 3


@pytest.mark.parametrize("failure", [RuntimeError("boom"), EngineDeadError(), None])
async def test_a_failure_in_mid_stream_is_an_event(failure):
    second = failure or whole(piece(1, sampling_mask=None), finished=False)
    engine = Engine(whole(piece(0), finished=False), second)
    response = await ask(engine, CUT | {"stream": True})
    first, error = events(response)
    assert first["choices"][0]["token_ids"] == TOKENS[:1]
    assert set(error["error"]) == {"message", "type", "code"}
    assert "event: error\ndata: " in response.text
    assert engine.closed, "the engine is told to stop"


@pytest.mark.parametrize(
    ("failure", "status"),
    [
        (VLLMValidationError("top_p must be in (0, 1]"), 400),
        (ValueError("no"), 400),
        (QueueOverflowError(), 503),
        (EngineDeadError(), 503),
        (RuntimeError("boom"), 500),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_errors_of_the_engine_have_a_status(failure, status, stream):
    response = await ask(Engine(failure), CUT | {"stream": stream})
    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "code"}


@pytest.mark.parametrize("stream", [False, True])
async def test_sets_that_did_not_arrive_are_no_answer(stream):
    response = await ask(Engine(whole(output(sets=None))), CUT | {"stream": stream})
    assert "0 entries" in response.text or "no mask" in response.text or "3 tokens" in response.text
    assert "kept_tokens" not in response.text.partition("message")[0]
    assert response.status_code == (200 if stream and "event: error" in response.text else 500)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_its_sequences(stream):
    engine = Engine(*([whole(piece(0), finished=False)] if stream else []), wait=asyncio.Event())
    app = FastAPI()
    app.include_router(router)
    app.state.engine_client, app.state.keptset = engine, ServerState(facts())
    body = json.dumps({"token_ids": [1], "stream": stream} | CUT).encode()
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> dict:
        if (message := next(messages, None)) is not None:
            return message
        while not engine.asked:
            await asyncio.sleep(0.01)
        return {"type": "http.disconnect"}

    async def send(message: dict) -> None:
        await asyncio.sleep(0)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/inference/v1/generate",
        "headers": [],
        "query_string": b"",
    }
    async with asyncio.timeout(60):
        await app(scope, receive, send)
        while not engine.closed:
            await asyncio.sleep(0.01)


async def test_a_model_that_is_not_served_is_not_found():
    response = await ask(Engine(), CUT | {"model": "other"})
    assert response.status_code == 404
    assert "/v1/models" in response.json()["error"]["message"]
    assert (await ask(Engine(whole(output())), CUT | {"model": "/models/tiny"})).json()[
        "model"
    ] == "/models/tiny"


async def test_a_refused_request_never_reaches_the_engine():
    engine = Engine()
    for body in ({"sampling_params": {"top_p": 0.5}}, {"sampling_params": {"topp": 1}}, b"{"):
        response = await ask(engine, body)
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "invalid_request"
    assert engine.asked == []
