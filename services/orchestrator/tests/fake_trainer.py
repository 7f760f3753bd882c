"""A trainer that speaks the contract without a model, and misbehaves on demand."""

import asyncio
import math
import time
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from kept_tokens.messages import StepResult, TrainingBatch, check_batch, decode, encode
from keptset_guards import error_body

from .played_group import Group
from .served import Served
from .small_tokenizer import VOCAB_SIZE

METRICS = {"mismatch_kl/mean": 1e-9, "kept/coverage": 1.0, "seconds/train": 0.25, "loss": float("nan")}


class FakeTrainer(Served):
    """Accepts batches in order, "trains" each at once, unless it is told to hold.

    Attributes:
        batches: The accepted batches, by step.
        hold_from: Accepted steps from this one on stay in training.
        again: Steps that are trained once more before those, `seconds_again` each.
        waits_for: What it says that they wait for.
        put_faults, get_faults: Status codes that the next PUTs or GETs are answered with.
        full: That many PUTs are told that too many batches wait.
        busy_with: Steps that it says it is at, another one at each look at its status; PUTs are told the same
            until the last one.
        lose_answers: That many PUTs are accepted, but answered with 503.
        version_off: How far the weights version of a result is from its step.
        puts: Steps of all PUTs that came.
        shares_gpu: It takes turns on its GPU.
        journal: What was asked of it, in order; others may write into it too.
        sends_weights: Whether it can be asked to send weights.
        group: Whose others it waits for when it sends; None: to whom is not played.
        sent: Versions that were sent.
    """

    def __init__(self) -> None:
        self._begin()
        super().__init__(self._app())

    def reset(self) -> None:
        """As after its first start, with nothing accepted."""
        self.revive()
        self._begin()

    def _begin(self) -> None:
        self.vocab_size, self.model = VOCAB_SIZE, "fake"
        self.row_tokens = 256
        self.unsafe = False
        self.full_scores: bool | None = False
        self.token: str | None = None
        self.batches: dict[int, TrainingBatch] = {}
        self.hold_from = math.inf
        self.again: list[int] = []
        self.seconds_again = 0.0
        self.waits_for: str | None = None
        self.healthy = True
        self.can_start: Callable[[], bool] = lambda: True
        self.put_faults: list[int] = []
        self.get_faults: list[int] = []
        self.full: float = 0
        self.busy_with: list[int] = []
        self.lose_answers = 0
        self.version_off = 0
        self.puts: list[int] = []
        self.shares_gpu = False
        self.journal: list[str] = []
        self.sends_weights = False
        self.sending: int | None = None
        self.sent: list[int] = []
        self.group: Group | None = None
        self.groups: list[str] = []

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
            return Response(status_code=200 if self.healthy and self.can_start() else 503)

        @app.get("/keptset/v1/status")
        async def status() -> dict[str, Any]:
            trained = int(min(len(self.batches), self.hold_from - 1))
            at = trained + 1 if trained < len(self.batches) else None
            if self.busy_with:
                at = self.busy_with.pop(0)
            return {
                "service": "trainer",
                "version": "0",
                "next_step": self.next_step,
                "trained_step": trained,
                "weight_version": trained,
                "training": at,
                "sends_weights": self.sends_weights,
                "sending": self.sending,
                "vocab_size": self.vocab_size,
                "row_tokens": self.row_tokens,
                "model": self.model,
                "shares_gpu": self.shares_gpu,
                "unsafe_ignore_kept_tokens": self.unsafe,
                **({} if self.full_scores is None else {"full_vocabulary_scores": self.full_scores}),
            }

        @app.put("/keptset/v1/steps/{step}")
        async def put(step: int, request: Request) -> Response:
            data = await request.body()
            self.puts.append(step)
            self.journal.append(f"put {step}")
            if self.full or self.busy_with:
                self.full = max(0, self.full - 1)
                said = error_body(429, "spool_full", f"step {step}: 64 batches wait to be trained")
                return JSONResponse(said, 429, {"retry-after": "0"})
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
            if self.again:
                await asyncio.sleep(self.seconds_again)
                return JSONResponse({"state": "queued", "training": self.again.pop(0)}, 202)
            while step >= self.hold_from:
                if time.monotonic() > deadline:
                    told = {} if self.waits_for is None else {"waits_for": self.waits_for}
                    return JSONResponse({"state": "training", **told}, 202)
                await asyncio.sleep(0.01)
            return Response(
                encode(StepResult(step, step + self.version_off, METRICS)), media_type="application/msgpack"
            )

        @app.post("/keptset/v1/weights/group")
        async def group() -> dict[str, Any]:
            self.groups.append(f"group-{len(self.groups)}")
            return {"unique_id": self.groups[-1], "bucket_bytes": 8, "tensors": [["w", "float32", [2]]]}

        @app.post("/keptset/v1/weights/{version}/send")
        async def send(version: int, request: Request) -> Response:
            body = await request.json()
            while self.hold_from <= len(self.batches):
                await asyncio.sleep(0.01)  # not in the middle of a step
            if version != len(self.batches):
                return JSONResponse(error_body(409, "other_version", f"holds {len(self.batches)}"), 409)
            self.sending = version
            try:
                if self.group is None:
                    await asyncio.sleep(0.1)
                elif not await self.group.join(
                    body["unique_id"],
                    version,
                    range(1),
                    body["world_size"],
                    body["seconds"],
                    request.receive,
                ):
                    return JSONResponse(error_body(504, "peers_missing", "not all have come"), 504)
            finally:
                self.sending = None
            self.sent.append(version)
            return JSONResponse({"version": version})

        return app


def _error(status: int, **more: Any) -> JSONResponse:
    return JSONResponse({**error_body(status, "fake", f"told to answer {status}"), **more}, status)
