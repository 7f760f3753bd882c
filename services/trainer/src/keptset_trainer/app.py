"""The trainer's HTTP API: takes batches in, gives results out. Knows files only, never torch."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from io import RawIOBase
from itertools import pairwise
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from kept_tokens import KeptTokensError
from kept_tokens.messages import BatchView, StepResult, check_batch, encode
from keptset_guards import UNROUTED, error_body

from . import __version__, errands
from .durable import TEMPORARY, in_words, mapped
from .prometheus import registry_of
from .refusal import Refusal
from .send_routes import add_send_routes
from .spool import Spool, SpoolBroken, SpoolFull, StepConflict
from .watched import WatchedLoop

POLL_SECONDS = 0.02
RETRY_SECONDS = 2
"""After which a batch that found no room may come again."""
BODY_PATIENCE = 60.0
"""Seconds that a client may be silent in the middle of a batch."""
WRITTEN_AT_ONCE = 1 << 20
"""Bytes of a body that are gathered before a thread writes them."""
MESSAGEPACK = "application/msgpack"


PHASES = ("receive", "check", "spool")
"""Of taking a batch in: its answer says how long each took."""


def build_app(
    spool: Spool,
    loop: WatchedLoop,
    *,
    model: str,
    row_tokens: int,
    max_batch_bytes: int,
    unsafe_ignore_kept_tokens: bool,
    full_vocabulary_scores: bool,
    stop: Callable[[str], None],
    sends_weights: bool = False,
    shares_gpu: bool = False,
) -> FastAPI:
    """The application over one output directory and one training loop; `stop(reason)` ends the service."""
    app = FastAPI(title="keptset trainer", version=__version__)
    accepting = asyncio.Lock()
    registry = registry_of(spool)
    add_send_routes(app, spool.folders, sends_weights)

    @app.exception_handler(Refusal)
    async def refuse(request: Request, refusal: Refusal) -> JSONResponse:
        return JSONResponse(refusal.body, refusal.status, refusal.headers)

    @app.exception_handler(RequestValidationError)
    async def explain(request: Request, invalid: RequestValidationError) -> JSONResponse:
        first = invalid.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        return JSONResponse(Refusal(422, "invalid_request", f"{place}: {first['msg']}").body, 422)

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> JSONResponse:
        code = UNROUTED.get(error.status_code, "invalid_request")
        said = error_body(error.status_code, code, f"{request.method} {request.url.path}: {error.detail}")
        return JSONResponse(said, error.status_code, error.headers)

    @app.put("/keptset/v1/steps/{step}")
    async def put_step(step: int, request: Request) -> Response:
        vocab_size = taking_loop(loop, shares_gpu)
        incoming = spool.folders.spool / f"{TEMPORARY}incoming-{time.monotonic_ns()}"
        times = [time.monotonic()]
        try:
            if step == spool.next_step:
                spool.require_room()  # said before the body comes, and once more when it is here
            await receive(request, incoming, max_batch_bytes)
            times.append(time.monotonic())
            size = incoming.stat().st_size
            content_hash = await asyncio.to_thread(
                check, incoming, step, vocab_size, row_tokens, full_vocabulary_scores
            )
            times.append(time.monotonic())
            async with accepting:
                is_new = await asyncio.to_thread(spool.accept, incoming, step, content_hash)
            times.append(time.monotonic())
        except ClientDisconnect:
            raise Refusal(
                400, "incomplete_batch", f"step {step}: the connection ended before the body"
            ) from None
        except StepConflict as conflict:
            there = spool.hashes.get(step)
            raise Refusal(
                409,
                "step_conflict",
                str(conflict),
                step=step,
                content_hash=None if there is None else there.hex(),
                next_step=spool.next_step,
            ) from None
        except SpoolFull as full:
            later = {"retry-after": str(RETRY_SECONDS)}
            raise Refusal(429, "spool_full", str(full), later, step=step) from None
        except SpoolBroken as broken:
            stop(str(broken))
            raise Refusal(500, "spool_broken", str(broken)) from broken
        except TimeoutError:
            raise Refusal(
                408,
                "stalled_batch",
                f"step {step}: waited {BODY_PATIENCE:.0f} s for more of the body; send the batch again",
            ) from None
        except OSError as failure:
            raise Refusal(507, "spool_failed", spool_failure(failure, spool.folders.spool)) from failure
        finally:
            incoming.unlink(missing_ok=True)
        seconds = {name: end - begin for name, (begin, end) in zip(PHASES, pairwise(times), strict=True)}
        if is_new:
            said = ", ".join(f"{name} {value:.2f} s" for name, value in seconds.items())
            print(f"trainer: step {step}: took in {size / 1e6:.1f} MB ({said})", flush=True)
        state = state_of(spool, loop, step)
        answer = {"step": step, "content_hash": content_hash.hex(), "state": state, "seconds": seconds}
        return JSONResponse(answer, 202 if is_new else 200)

    @app.get("/keptset/v1/steps/{step}")
    async def get_step(step: int, request: Request, wait: float = Query(0.0, ge=0, le=3600)) -> Response:
        if step not in spool.hashes:
            raise Refusal(
                404, "unknown_step", f"step {step} was never accepted; the next step is {spool.next_step}"
            )
        deadline = time.monotonic() + wait
        while (result := spool.result(step)) is None:
            if (reason := loop.failure()) is not None:
                raise Refusal(503, "loop_failed", f"step {step} was accepted but not trained: {reason}")
            if time.monotonic() >= deadline or loop.stopping:
                answer = {"step": step, "state": state_of(spool, loop, step)}
                if (training := (loop.state() or {}).get("training")) is not None:
                    answer["training"] = training
                if (absent := loop.absent()) is not None:
                    answer["waits_for"] = absent
                return JSONResponse(answer, 202)
            await asyncio.sleep(POLL_SECONDS)
        version, metrics = result["weight_version"], result["metrics"]
        if MESSAGEPACK in request.headers.get("accept", ""):
            packed = StepResult(step, version, metrics, spool.scores(step))
            return Response(encode(packed), media_type=MESSAGEPACK)
        return JSONResponse({"step": step, "weight_version": version, "metrics": metrics})

    @app.get("/keptset/v1/status")
    async def status() -> dict[str, Any]:
        trained = spool.look_for_results()
        return {
            "service": "trainer",
            "version": __version__,
            "next_step": spool.next_step,
            "trained_step": trained,
            "weight_version": trained,
            "training": (loop.state() or {}).get("training"),
            "vocab_size": loop.vocab_size(),
            "row_tokens": row_tokens,
            "model": model,
            "unsafe_ignore_kept_tokens": unsafe_ignore_kept_tokens,
            "full_vocabulary_scores": full_vocabulary_scores,
            "sends_weights": sends_weights,
            "sending": errands.begun(spool.folders) if sends_weights else None,
            "loop_pid": (loop.state() or {}).get("pid"),
            "shares_gpu": shares_gpu,
        }

    @app.get("/health")
    async def health() -> dict[str, str]:
        require_loop(loop, shares_gpu)
        return {"status": "ok"}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return app


def require_loop(loop: WatchedLoop, shares_gpu: bool) -> None:
    """A loop that is alive and has its model; otherwise the request ends with 503."""
    taking_loop(loop, shares_gpu)
    if (absent := loop.absent()) is not None:
        raise Refusal(503, "ranks_absent", absent)
    if loop.state() is None:
        raise Refusal(503, "starting", loading(shares_gpu))


def taking_loop(loop: WatchedLoop, shares_gpu: bool) -> int:
    """Vocabulary size of a loop that will train what is taken in now; otherwise the request ends with 503.

    Ranks that are away for a while find it in the spool.
    """
    if (reason := loop.failure()) is not None:
        raise Refusal(503, "loop_failed", reason)
    if loop.stopping:
        raise Refusal(503, "stopping", "the trainer is stopping")
    if (vocab_size := loop.vocab_size()) is None:
        raise Refusal(503, "starting", loop.absent() or loading(shares_gpu))
    return vocab_size


def loading(shares_gpu: bool) -> str:
    or_waits = ", or waits for an engine to leave the GPU" if shares_gpu else ""
    return f"the training loop is loading its model{or_waits}"


def state_of(spool: Spool, loop: WatchedLoop, step: int) -> str:
    if step <= spool.look_for_results():
        return "trained"
    return "training" if (loop.state() or {}).get("training") == step else "queued"


async def receive(request: Request, incoming: Path, max_bytes: int) -> None:
    """Stream the body into the file `incoming`, at most `max_bytes` of it.

    Raises:
        Refusal: 413.
        TimeoutError: the client was silent for BODY_PATIENCE seconds.
        OSError: the disk did not take it.
    """
    too_large = Refusal(
        413,
        "batch_too_large",
        f"the batch is larger than trainer.max_batch_bytes = {max_bytes}; send fewer rollouts a step "
        "(orchestrator.train.prompts_per_step, group_size) or raise the bound",
    )
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > max_bytes:
        raise too_large
    received, unwritten = 0, bytearray()
    stream: AsyncIterator[bytes] = request.stream()
    with incoming.open("wb", buffering=0) as file:
        while (chunk := await asyncio.wait_for(anext(stream, None), BODY_PATIENCE)) is not None:
            received += len(chunk)
            if received > max_bytes:
                raise too_large
            unwritten += chunk
            if len(unwritten) >= WRITTEN_AT_ONCE:
                await asyncio.to_thread(write_all, file, unwritten)
                unwritten = bytearray()
        await asyncio.to_thread(write_all, file, unwritten)


def write_all(file: RawIOBase, data: bytearray) -> None:
    """Write all of it; one write to a full disk may take a part."""
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


def check(path: Path, step: int, vocab_size: int, row_tokens: int, full_vocabulary_scores: bool) -> bytes:
    """Check all of the batch in `path`, some samples at a time; its content hash. Anything wrong is a 422."""
    try:
        batch = BatchView(mapped(path))
        if batch.step != step:
            raise ValueError(f"the batch says step {batch.step}, the address says {step}")
        check_batch(batch, vocab_size)
        check_trainable(batch, row_tokens, full_vocabulary_scores)
    except ValueError as error:
        raise Refusal(422, "invalid_batch", str(error), step=step) from None
    return batch.content_hash


def check_trainable(batch: BatchView, row_tokens: int, full_vocabulary_scores: bool) -> None:
    """What the training loop needs of a batch beyond the wire format.

    Raises:
        KeptTokensError: a sequence that fits no row, a reference that this trainer compares nothing with, or
            a batch with no token to train on.
    """
    something = False
    for index, sample in enumerate(batch.samples):
        something = something or 1 in sample.loss_mask
        if sample.reference_weight > 0 and not full_vocabulary_scores:
            raise KeptTokensError(
                "reference_weight",
                f"{sample.reference_weight} asks for a comparison over the whole vocabulary; set "
                "trainer.full_vocabulary_scores = true",
                sample_id=sample.sample_id,
                sample_index=index,
            )
        if sample.num_tokens > row_tokens:
            raise KeptTokensError(
                "token_ids",
                f"has {sample.num_tokens} tokens, but a packed row holds trainer.row_tokens = {row_tokens}; "
                "raise that, or lower max_tokens",
                position=row_tokens,
                sample_id=sample.sample_id,
                sample_index=index,
            )
    if not something:
        raise KeptTokensError(
            "loss_mask",
            f"is 0 on every token of all {len(batch.samples)} samples; there is nothing to train on",
        )


def spool_failure(failure: OSError, folder: Path) -> str:
    return (
        f"the batch was not accepted, {in_words(failure)} ({folder}); free some space or move "
        "trainer.output_dir, then send the batch again"
    )
