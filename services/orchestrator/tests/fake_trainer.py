"""A trainer that speaks the contract without a model, and misbehaves on demand."""

import asyncio
import math
import time
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from kept_tokens.messages import StepResult, TrainingBatch, check_batch, decode, encode

from .served import Served
from .small_tokenizer import VOCAB_SIZE

METRICS = {"mismatch_kl/mean": 1e-9, "kept/coverage": 1.0, "seconds/train": 0.25, "loss": float("nan")}


class FakeTrainer(Served):
    """Accepts batches in order, "trains" each at once, unless it is told to hold.

    Attributes:
        batches: The accepted batches, by step.
        hold_from: Accepted steps from this one on stay in training.
        put_faults, get_faults: Status codes that the next PUTs or GETs are answered with.
        lose_answers: That many PUTs are accepted, but answered with 503.
        version_off: How far the weights version of a result is from its step.
        puts: Steps of all PUTs that came.
    """

    def __init__(self) -> None:
        self._begin()
        super().__init__(self._app())

    def reset(self) -> None:
        """As after its first start, with nothing accepted."""
        self.revive()
        self._begin()

    def _begin(self) -> None:
        self.vocab_size = VOCAB_SIZE
        self.row_tokens = 256
        self.unsafe = False
        self.full_scores: bool | None = False
        self.token: str | None = None
        self.batches: dict[int, TrainingBatch] = {}
        self.hold_from = math.inf
        self.healthy = True
        self.put_faults: list[int] = []
        self.get_faults: list[int] = []
        self.lose_answers = 0
        self.version_off = 0
        self.puts: list[int] = []

    @property
    def next_step(self) -> int:
        """The first step that is not accepted."""
        return len(self.batches) + 1

    def _app(self) -> FastAPI:
        app = FastAPI()

        @app.middleware("http")
        async def locked(request: Request, go_on: Any) -> Response:
            shown = request.headers.get("authorization")
            wrong = self.token is not None and shown != f"Bearer {self.token}"
            return _error(401) if wrong and request.url.path != "/health" else await go_on(request)

        @app.get("/health")
        async def health() -> Response:
            return Response(status_code=200 if self.healthy else 503)

        @app.get("/keptset/v1/status")
        async def status() -> dict[str, Any]:
            trained = int(min(len(self.batches), self.hold_from - 1))
            return {
                "service": "trainer",
                "version": "0",
                "next_step": self.next_step,
                "trained_step": trained,
                "weight_version": trained,
                "vocab_size": self.vocab_size,
                "row_tokens": self.row_tokens,
                "model": "fake",
                "unsafe_ignore_kept_tokens": self.unsafe,
                **({} if self.full_scores is None else {"full_vocabulary_scores": self.full_scores}),
            }

        @app.put("/keptset/v1/steps/{step}")
        async def put(step: int, request: Request) -> Response:
            data = await request.body()
            self.puts.append(step)
            if self.put_faults:
                return _error(self.put_faults.pop(0))
            batch = decode(data, TrainingBatch)
            check_batch(batch, self.vocab_size)
            assert batch.step == step
            there = self.batches.get(step)
            if there is None and step == self.next_step:
                self.batches[step] = batch
                if self.lose_answers:
                    self.lose_answers -= 1
                    return _error(503)
                return JSONResponse({"step": step}, 202)
            if there is not None and there.content_hash == batch.content_hash:
                return JSONResponse({"step": step}, 200)
            return _error(
                409,
                step=step,
                content_hash=there and there.content_hash.hex(),
                next_step=self.next_step,
            )

        @app.get("/keptset/v1/steps/{step}")
        async def get(step: int, wait: float = 0) -> Response:
            if self.get_faults:
                return _error(self.get_faults.pop(0))
            if step not in self.batches:
                return _error(404)
            deadline = time.monotonic() + wait
            while step >= self.hold_from:
                if time.monotonic() > deadline:
                    return JSONResponse({"state": "training"}, 202)
                await asyncio.sleep(0.01)
            return Response(
                encode(StepResult(step, step + self.version_off, METRICS)), media_type="application/msgpack"
            )

        return app


def _error(code: int, **more: Any) -> JSONResponse:
    return JSONResponse({"error": {"message": f"told to answer {code}", "code": code}, **more}, code)
