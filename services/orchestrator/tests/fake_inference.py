"""An inference server that speaks the contract without a model, and misbehaves on demand."""

import asyncio
import random
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from kept_tokens import KeptTokens
from kept_tokens.answers import Choice, GenerateAnswer, VersionSpan
from kept_tokens.messages import encode
from keptset_guards import error_body

from .fake_endpoint import logprob_of
from .played_group import Group
from .served import Served
from .small_tokenizer import END, VOCAB_SIZE

Fault = str | int | float
"""A status code, "reset" (the connection goes in mid-answer), "hang", "update_running" (409), or seconds of
delay."""


class FakeInference(Served):
    """Samples random tokens, a function of seed, choice and weight version alone. Of a request that went on
    over an update the first half is said to be of the version of before.

    Attributes:
        faults: What happens to the next generate requests, first to last; then all is well again.
        says: The ids that answer a prompt's ids and a seed; None: random ones.
        scored: Bodies of the requests for prompt logprobs that came.
        delay, delay_of: Seconds that a request takes; the latter of its body.
        holds: Which requests are not answered yet, by their bodies; asked again and again.
        tamper: Changes every answer before it leaves.
        spoils: What is sent instead of the next answers, first to last, given their bytes.
        weights_faults: The same as `faults` for POST weights.
        requests: Bodies of the generate requests that came, those that failed included.
        posted: Versions that were posted, to be loaded or to wake with.
        received: Those of them that it was to receive rather than read.
        group: Whose others it waits for when it receives; None: it does not.
        stopping: It was asked to stop: answers go out, nothing new is taken on.
        frozen: It answers no question for its status, nor receives.
        forgets: Versions after whose load it is started again.
        colocated: It takes turns on its GPU.
        asleep: It does not sample.
        sleep_faults: The same as `faults` for POST sleep.
        refused: Requests that came while it was stopping.
        journal: What was asked of it, in order; others may write into it too.
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
        self.vocab_size, self.model = VOCAB_SIZE, "fake"
        self.capture = {"enabled": True, "kind": "v1", "width": 512, "proven": True}
        self.max_model_len = 256
        self.restarted()
        self.healthy = True
        self.api_key: str | None = None
        self.token: str | None = None
        self.faults: list[Fault] = []
        self.weights_faults: list[Fault] = []
        self.says: Callable[[list[int], int], list[int]] | None = None
        self.scored: list[dict[str, Any]] = []
        self.tamper: Callable[[GenerateAnswer], GenerateAnswer] = lambda answer: answer
        self.spoils: list[Callable[[bytes], Response]] = []
        self.delay = 0.0
        self.delay_of: Callable[[dict[str, Any]], float] | None = None
        self.holds: Callable[[dict[str, Any]], bool] = lambda body: False
        self.requests: list[dict[str, Any]] = []
        self.posted: list[int] = []
        self.received: list[int] = []
        self.group: Group | None = None
        self.frozen = False
        self.forgets: list[int] = []
        self.in_flight = self.most_in_flight = self.refused = 0
        self.colocated = self.asleep = self.stopping = False
        self.sleep_faults: list[Fault] = []
        self.journal: list[str] = []

    def restarted(self) -> None:
        """As after another start of the process, so quickly that nobody notices."""
        self.weight_version: int | None = None
        self.instance = uuid.uuid4().hex

    def _app(self) -> FastAPI:
        app = FastAPI()

        @app.get("/health")
        async def health() -> Response:
            return Response(status_code=200 if self.healthy and not self.stopping else 503)

        @app.get("/keptset/v1/status")
        async def status(request: Request) -> Response:
            if self._locked(request):
                return _error(401, "no key")
            if self.frozen:
                await asyncio.sleep(60)
            return JSONResponse(
                {
                    "service": "inference",
                    "version": "0",
                    "model": self.model,
                    "vocab_size": self.vocab_size,
                    "max_model_len": self.max_model_len,
                    "capture": self.capture,
                    "formats": ["kept_tokens"],
                    "kept_tokens_format": "kept_tokens",
                    "weight_version": self.weight_version,
                    "takes_transfers": True,
                    "instance": self.instance,
                    "vllm": "0.32.0",
                    "stopping": self.stopping,
                    "sleep": {"state": "asleep", "frees_memory": True} if self.colocated else None,
                }
            )

        @app.post("/keptset/v1/weights")
        async def weights(request: Request) -> Response:
            if self.stopping:
                self.refused += 1
                return _error(503, "the server was asked to stop", "stopping")
            if self.asleep:
                return _error(409, "it is asleep", "asleep")
            return await load(request)

        @app.post("/keptset/v1/sleep")
        async def sleep(request: Request) -> Response:
            if self.token is not None and request.headers.get("authorization") != f"Bearer {self.token}":
                return _error(401, "no token")
            if not self.colocated:
                return _error(409, "this server has its GPU for itself", "not_colocated")
            if self.sleep_faults:
                return await _misbehave(self.sleep_faults.pop(0))
            self.asleep = True
            self.journal.append("sleep")
            return JSONResponse({"seconds": 0.5})

        @app.post("/keptset/v1/wake")
        async def wake(request: Request) -> Response:
            answer = await load(request)
            if answer.status_code == 200:
                self.asleep = False
                self.journal.append(f"wake {self.weight_version}")
            return answer

        async def load(request: Request) -> Response:
            if self.token is not None and request.headers.get("authorization") != f"Bearer {self.token}":
                return _error(401, "no token")
            body = await request.json()
            version = body["version"]
            if self.frozen:
                await asyncio.sleep(60)
            if self.weights_faults:
                return await _misbehave(self.weights_faults.pop(0))
            self.posted.append(version)
            if "transfer" in body:
                if self.group is not None and not await self._joined(body, request):
                    self.posted.pop()
                    return _error(500, "gave up waiting for the trainer; the previous version runs again")
                self.received.append(version)
            self.weight_version = version
            if version in self.forgets:
                self.forgets.remove(version)
                asyncio.get_running_loop().call_later(0, self.restarted)
            took = {"seconds": 0.5, "pause_seconds": 0.25, "wake_seconds": 0.125}
            return JSONResponse({"version": version, "instance": self.instance, **took})

        @app.post("/inference/v1/generate")
        async def generate(request: Request) -> Response:
            if self._locked(request):
                return _error(401, "no key")
            body = await request.json()
            if self.stopping:
                self.refused += 1
                return _error(503, "the server was asked to stop", "stopping")
            if self.asleep:
                return _error(503, "the engine is asleep", "asleep")
            self.requests.append(body)
            self.journal.append("generate")
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
            try:
                if self.faults:
                    fault = self.faults.pop(0)
                    if not isinstance(fault, float):
                        return await _misbehave(fault)
                    await asyncio.sleep(fault)
                began_with = self.weight_version
                await asyncio.sleep(self.delay if self.delay_of is None else self.delay_of(body))
                while self.holds(body):
                    await asyncio.sleep(0.005)
                answer = self.tamper(self._sample(body, began_with))
            finally:
                self.in_flight -= 1
            assert request.headers["accept"] == "application/msgpack"
            if self.spoils:
                return self.spoils.pop(0)(encode(answer))
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

    async def _joined(self, body: dict[str, Any], request: Request) -> bool:
        assert self.group is not None
        rank, size, seconds = (body["transfer"][name] for name in ("rank_offset", "world_size", "seconds"))
        ranks = range(rank, rank + 1)
        unique_id, version = body["transfer"]["unique_id"], body["version"]
        return await self.group.join(unique_id, version, ranks, size, seconds, request.receive)

    def _locked(self, request: Request) -> bool:
        return self.api_key is not None and request.headers.get("authorization") != f"Bearer {self.api_key}"

    def _sample(self, body: dict[str, Any], began_with: int | None) -> GenerateAnswer:
        params = body["sampling_params"]
        choices = [self._choice(body, params, index, began_with) for index in range(params["n"])]
        return GenerateAnswer(request_id=body["request_id"], model="fake", choices=choices)

    def _choice(
        self, body: dict[str, Any], params: dict[str, Any], index: int, began_with: int | None
    ) -> Choice:
        draw = random.Random(f"{params['seed'] + index}/{self.weight_version}/{body['token_ids']}")
        most = params.get("max_tokens") or self.max_model_len - len(body["token_ids"])
        length = draw.randint(1, most)
        stopped = length < most
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
        half = length // 2 if began_with != self.weight_version else 0
        names = ["base" if v is None else f"v{v:06d}" for v in (began_with, self.weight_version)]
        spans = [VersionSpan(names[0], 0, half), VersionSpan(names[1], half, length)]
        return Choice.build(
            index,
            tokens,
            logprobs=np.array([-draw.random() for _ in tokens], np.float32),
            kept=kept,
            finish_reason="stop" if stopped else "length",
            weight_versions=[span for span in spans if span.end > span.start],
        )


async def _misbehave(fault: Fault) -> Response:
    if fault == "hang":
        await asyncio.sleep(60)
    if fault == "reset":
        return StreamingResponse(_half(), headers={"content-length": "1000"})
    if fault == "update_running":
        return _error(409, "version 0 is being loaded", "update_running")
    return _error(int(fault), f"told to answer {fault}")


async def _half():
    yield b"half"
    raise ConnectionResetError("told to")


def _error(status: int, message: str, code: str = "fake") -> JSONResponse:
    return JSONResponse(error_body(status, code, message), status)
