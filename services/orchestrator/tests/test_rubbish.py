"""An inference server that sends what is no answer: named, asked again, counted; the run goes on or stops."""

import asyncio
import gzip
import logging
import re
from collections.abc import AsyncIterator, Callable

import msgspec
import pytest
from fastapi import Response
from fastapi.responses import HTMLResponse, StreamingResponse

from keptset_orchestrator import AnswerError, RolloutFailedError, peers

from .driving import Drive
from .fake_inference import FakeInference
from .fake_trainer import FakeTrainer

MSGPACK = "application/msgpack"


def of_bytes(change: Callable[[bytes], bytes], media_type: str = MSGPACK, **headers: str):
    return lambda data: Response(change(data), media_type=media_type, headers=headers)


def a_string_that_is_none(data: bytes) -> bytes:
    return data.replace(b"stop", b"st\xffp").replace(b"length", b"l\xffngth")


async def drip() -> AsyncIterator[bytes]:
    while True:
        yield b"\x82"
        await asyncio.sleep(0.05)


async def flood() -> AsyncIterator[bytes]:
    while True:
        yield bytes(1 << 16)
        await asyncio.sleep(0)


NEVER_DONE = "no answer within 2 s"

UNREADABLE = {
    "half of it": (of_bytes(lambda data: data[: len(data) // 2]), "Input data was truncated"),
    "all but the last byte": (of_bytes(lambda data: data[:-1]), "Input data was truncated"),
    "nothing": (of_bytes(lambda _: b""), "Input data was truncated"),
    "noise": (of_bytes(lambda data: data[::-1]), "cannot be decoded"),
    "a list": (of_bytes(lambda _: msgspec.msgpack.encode([1, 2])), "Expected `object`, got `array`"),
    "other types": (
        of_bytes(lambda data: msgspec.msgpack.encode(msgspec.msgpack.decode(data) | {"choices": 7})),
        r"Expected `array`, got `int` - at `\$.choices`",
    ),
    "letters that are none": (of_bytes(a_string_that_is_none), "cannot be decoded"),
    "a hundred thousand brackets": (
        of_bytes(lambda _: b"\x81\xa1x" + b"\x91" * 100_000),
        "maximum recursion depth",
    ),
    "half of a JSON": (
        of_bytes(lambda _: b'{"choices":[{"index":0,"token_ids":[3,', "application/json"),
        r"'application/json' where application/msgpack was asked for: {\"choices\"",
    ),
    "a page of a proxy": (
        lambda _: HTMLResponse("<html>\n<h1>Bad gateway</h1></html>"),
        "'text/html; charset=utf-8' where .*<h1>Bad gateway",
    ),
    "another encoding than it says": (of_bytes(lambda data: data, **{"content-encoding": "gzip"}), "header"),
    "no end": (lambda _: StreamingResponse(flood(), media_type=MSGPACK), "larger than 1048576 bytes"),
    "a small body that unpacks to a large one": (
        of_bytes(lambda _: gzip.compress(bytes(1 << 24)), **{"content-encoding": "gzip"}),
        "larger than 1048576 bytes; ask for less at a time",
    ),
    "a byte now and then": (
        lambda _: StreamingResponse(drip(), media_type=MSGPACK),
        NEVER_DONE,
    ),
}


@pytest.fixture(autouse=True)
def patience(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    drive.settings.steps = 1
    monkeypatch.setattr(peers, "MOST_ANSWER_BYTES", 1 << 20)


@pytest.mark.parametrize("name", UNREADABLE)
async def test_what_is_no_answer_is_named_counted_and_asked_for_again(
    name: str, drive: Drive, inference: FakeInference, trainer: FakeTrainer, caplog: pytest.LogCaptureFixture
):
    spoil, text = UNREADABLE[name]
    if text == NEVER_DONE:
        drive.settings.request_timeout = 2
    drive.settings.max_concurrent_requests = 1
    inference.spoils = [spoil]
    with caplog.at_level(logging.WARNING):
        (row,) = await drive()
    assert row["rollout/error_rate"] == pytest.approx(1 / 3)
    assert drive.progress.failed_requests == 1
    (said,) = [record.getMessage() for record in caplog.records if "attempt 1 of 5" in record.getMessage()]
    spoiled = inference.requests[0]["request_id"]
    assert said.startswith(f"inference server {inference.url}: request {spoiled} (source reverse-text): ")
    assert re.search(text, said), said

    # the request that was sent again gives what the first one would have given
    drive.settings.output_dir = drive.settings.output_dir.with_name("undisturbed")
    disturbed = trainer.batches[1].content_hash
    inference.reset()
    trainer.reset()
    await drive()
    assert trainer.batches[1].content_hash == disturbed


async def test_a_server_that_sends_nothing_else_stops_the_run_by_name(
    drive: Drive, inference: FakeInference, trainer: FakeTrainer
):
    drive.settings.request_attempts = 2
    inference.spoils = [UNREADABLE["a page of a proxy"][0]] * 8
    with pytest.raises(
        RolloutFailedError,
        match=rf"group reverse-text/1/\d: 2 attempts failed .*{inference.url}: request \S+ .*Bad gateway",
    ):
        await drive()
    assert trainer.puts == []


async def test_what_was_acknowledged_before_the_rubbish_is_there_and_the_run_goes_on_from_it(
    drive: Drive, inference: FakeInference, trainer: FakeTrainer
):
    drive.settings.steps = 3

    def tamper(answer):
        if "reverse-text-2-" not in answer.request_id:
            return answer
        wrong = [
            msgspec.structs.replace(one, logprobs=bytes(len(one.logprobs))[:-4]) for one in answer.choices
        ]
        return msgspec.structs.replace(answer, choices=wrong)

    inference.tamper = tamper
    with pytest.raises(AnswerError, match=r"choice 0: logprobs: has \d+ entries"):
        await drive()
    first = drive.rows()
    assert ([row["step"] for row in first], list(trainer.batches)) == ([1], [1])
    inference.tamper = lambda answer: answer
    rows = await drive()
    assert rows[0] == first[0]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert trainer.puts == [1, 2, 3]
