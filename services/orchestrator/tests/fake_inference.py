"""An inference server that speaks the contract without a model, and misbehaves on demand."""

import asyncio
import random
from collections.abc import Callable
from typing import Any

import numpy as np
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from kept_tokens import KeptTokens
from kept_tokens.answers import Choice, GenerateAnswer, VersionSpan
from kept_tokens.messages import encode

from .fake_endpoint import logprob_of
from .served import Served
from .small_tokenizer import END, VOCAB_SIZE

Fault = str | int | float
"""A status code, "reset" (the connection goes in mid-answer), "hang", or seconds of delay."""


class FakeInference(Served):
    """Samples random tokens, a function of seed, choice and weight version alone.

    Attributes:
        faults: What happens to the next generate requests, first to last; then all is well again.
        says: The ids that answer a prompt's ids and a seed; None: random ones.
        scored: Bodies of the requests for prompt logprobs that came.
        tamper: Changes every answer before it leaves.
        weights_faults: The same as `faults` for POST weights.
        requests: Bodies of the generate requests that came, those that failed included.
        posted: Versions that were posted.
        most_in_flight: The most requests that were worked on at a time.
    """

    def __init__(self) -> None:
        self._begin()
        super().__init__(self._app())

    def reset(self) -> None:
        """As after its first start."""
        self.revive()
        self._begin()

    def _begin(self) -> None:
        self.vocab_size = VOCAB_SIZE
        self.capture = {"enabled": True, "kind": "v1", "width": 512, "proven": True}
        self.max_model_len = 256
        self.weight_version: int | None = None
        self.healthy = True
        self.api_key: str | None = None
        self.token: str | None = None
        self.faults: list[Fault] = []
        self.weights_faults: list[Fault] = []
        self.says: Callable[[list[int], int], list[int]] | None = None
        self.scored: list[dict[str, Any]] = []
        self.tamper: Callable[[GenerateAnswer], GenerateAnswer] = lambda answer: answer
        self.delay = 0.0
        self.requests: list[dict[str, Any]] = []
        self.posted: list[int] = []
        self.in_flight = self.most_in_flight = 0

    def _app(self) -> FastAPI:
        app = FastAPI()

        @app.get("/health")
        async def health() -> Response:
            return Response(status_code=200 if self.healthy else 503)

        @app.get("/keptset/v1/status")
        async def status(request: Request) -> Response:
            if self._locked(request):
                return _error(401, "no key")
            return JSONResponse(
                {
                    "service": "inference",
                    "version": "0",
                    "model": "fake",
                    "vocab_size": self.vocab_size,
                    "max_model_len": self.max_model_len,
                    "capture": self.capture,
                    "formats": ["kept_tokens"],
                    "kept_tokens_format": "kept_tokens",
                    "weight_version": self.weight_version,
                    "vllm": "0.32.0",
                }
            )

        @app.post("/keptset/v1/weights")
        async def weights(request: Request) -> Response:
            if self.token is not None and request.headers.get("authorization") != f"Bearer {self.token}":
                return _error(401, "no token")
            version = (await request.json())["version"]
            if self.weights_faults:
                return await _misbehave(self.weights_faults.pop(0))
            self.posted.append(version)
            self.weight_version = version
            return JSONResponse({"version": version, "seconds": 0.0, "pause_seconds": 0.0})

        @app.post("/inference/v1/generate")
        async def generate(request: Request) -> Response:
            if self._locked(request):
                return _error(401, "no key")
            body = await request.json()
            self.requests.append(body)
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
            try:
                if self.faults:
                    fault = self.faults.pop(0)
                    if not isinstance(fault, float):
                        return await _misbehave(fault)
                    await asyncio.sleep(fault)
                await asyncio.sleep(self.delay)
                answer = self.tamper(self._sample(body))
            finally:
                self.in_flight -= 1
            assert request.headers["accept"] == "application/msgpack"
            return Response(encode(answer), media_type="application/msgpack")

        @app.post("/v1/completions")
        async def completions(request: Request) -> Response:
            if self._locked(request):
                return _error(401, "no key")
            body = await request.json()
            self.scored.append(body)
            entries = [{str(t): {"logprob": logprob_of(n, t)}} for n, t in enumerate(body["prompt"])]
            return JSONResponse({"choices": [{"index": 0, "prompt_logprobs": [None, *entries[1:]]}]})

        return app

    def _locked(self, request: Request) -> bool:
        return self.api_key is not None and request.headers.get("authorization") != f"Bearer {self.api_key}"

    def _sample(self, body: dict[str, Any]) -> GenerateAnswer:
        params = body["sampling_params"]
        choices = [self._choice(body, params, index) for index in range(params["n"])]
        return GenerateAnswer(request_id=body["request_id"], model="fake", choices=choices)

    def _choice(self, body: dict[str, Any], params: dict[str, Any], index: int) -> Choice:
        draw = random.Random(f"{params['seed'] + index}/{self.weight_version}/{body['token_ids']}")
        length = draw.randint(1, params["max_tokens"])
        stopped = length < params["max_tokens"]
        tokens = [draw.randrange(5, self.vocab_size) for _ in range(length - 1)]
        tokens.append(END if stopped else draw.randrange(5, self.vocab_size))
        if self.says is not None:
            tokens = self.says(body["token_ids"], params["seed"] + index)
            length, stopped = len(tokens), tokens[-1] == END
        kept = None
        if body.get("kept_tokens") is not False and (params["top_p"] < 1 or params["top_k"] > 0):
            rows = [
                sorted({token, *draw.sample(range(self.vocab_size), draw.randint(0, 4))}) for token in tokens
            ]
            kept = KeptTokens.from_rows(rows)
        version = "base" if self.weight_version is None else f"v{self.weight_version:06d}"
        return Choice.build(
            index,
            tokens,
            logprobs=np.array([-draw.random() for _ in tokens], np.float32),
            kept=kept,
            finish_reason="stop" if stopped else "length",
            weight_versions=[VersionSpan(version, 0, length)],
        )


async def _misbehave(fault: Fault) -> Response:
    if fault == "hang":
        await asyncio.sleep(60)
    if fault == "reset":
        return StreamingResponse(_half(), headers={"content-length": "1000"})
    return _error(int(fault), f"told to answer {fault}")


async def _half():
    yield b"half"
    raise ConnectionResetError("told to")


def _error(code: int, message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "type": "fake", "code": code}}, code)
