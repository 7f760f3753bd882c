"""Whatever is sent to the ingest API, it answers with an error that says why, keeps nothing, and goes on."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kept_tokens.messages import TrainingBatch, decode, encode
from keptset_trainer.app import build_app
from keptset_trainer.folders import Folders
from keptset_trainer.spool import Spool

from .played_loop import PlayedLoop

SHARED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
PATHS = ("/keptset/v1/steps/{step}", "/keptset/v1/status", "/health", "/metrics")


class Ingest:
    """The app over a fresh directory, asked one question at a time."""

    def __init__(self, folder: Path, batch: TrainingBatch) -> None:
        self.folders = Folders(folder / "trainer", folder / "weights")
        self.folders.create()
        options = {"model": "m", "row_tokens": 64, "max_batch_bytes": 1 << 18}
        self.app = build_app(
            Spool(self.folders, 64),
            PlayedLoop(),
            unsafe_ignore_kept_tokens=False,
            full_vocabulary_scores=False,
            stop=lambda reason: pytest.fail(reason),
            **options,
        )
        self.valid = encode(batch)

    def ask(self, method: str, path: str, **content: Any) -> httpx.Response:
        async def once() -> httpx.Response:
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://trainer") as client:
                return await asyncio.wait_for(client.request(method, path, **content), 20)

        return asyncio.run(once())

    def kept(self) -> list[str]:
        return sorted(path.name for path in self.folders.spool.iterdir())


@pytest.fixture(scope="module")
def ingest(tmp_path_factory, make_batch) -> Ingest:
    return Ingest(tmp_path_factory.mktemp("fuzz"), make_batch(1, samples=3))


def refused(answer: httpx.Response) -> None:
    assert 400 <= answer.status_code < 500, answer.text
    error = answer.json()["error"]
    assert error["message"]
    assert set(error) == {"message", "type", "code"}
    assert "Traceback" not in answer.text


scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary()
plain = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(), inner, max_size=4)
)


@settings(max_examples=60, suppress_health_check=SHARED)
@given(st.binary(max_size=300) | plain.map(msgspec.msgpack.encode))
def test_what_is_no_batch_is_refused(ingest, body):
    refused(ingest.ask("PUT", "/keptset/v1/steps/1", content=body))
    assert ingest.kept() == []


def is_the_same(body: bytes, valid: bytes) -> bool:
    """MessagePack has several forms of a number: damage may leave the batch what it was."""
    try:
        return decode(body, TrainingBatch) == decode(valid, TrainingBatch)
    except ValueError:
        return False


@settings(max_examples=100, suppress_health_check=SHARED)
@given(st.data())
def test_a_batch_with_damaged_bytes_is_refused(ingest, data):
    body = bytearray(ingest.valid)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(body) - 1))
        kind = data.draw(st.sampled_from(["flip", "cut", "grow"]))
        if kind == "flip":
            body[place] ^= data.draw(st.integers(1, 255))
        elif kind == "cut":
            del body[place : place + data.draw(st.integers(1, 50))]
        else:
            body[place:place] = data.draw(st.binary(min_size=1, max_size=20))
        if not body:
            break
    if is_the_same(bytes(body), ingest.valid):
        return
    answer = ingest.ask("PUT", "/keptset/v1/steps/1", content=bytes(body))
    refused(answer)
    assert ingest.kept() == []


@settings(max_examples=100, suppress_health_check=SHARED)
@given(st.data())
def test_a_batch_with_other_values_in_its_fields_is_refused(ingest, data):
    step, samples, digest = msgspec.msgpack.decode(ingest.valid)
    sample = data.draw(st.integers(0, len(samples) - 1))
    field = data.draw(st.integers(0, len(samples[sample]) - 1))
    before = samples[sample][field]
    samples[sample][field] = data.draw(plain)
    if samples[sample][field] == before:
        return
    body = msgspec.msgpack.encode([step, samples, digest])
    refused(ingest.ask("PUT", "/keptset/v1/steps/1", content=body))
    assert ingest.kept() == []


@pytest.mark.parametrize("path", PATHS)
def test_requests_made_up_from_the_description_get_an_answer(ingest, path):
    schema = schemathesis.openapi.from_dict(ingest.app.openapi())
    asked = []
    for method in schema[path]:
        operation = schema[path][method]
        cases = operation.as_strategy()
        if "{" in path:  # else there is nothing that could be wrong
            cases |= operation.as_strategy(schemathesis.GenerationMode.NEGATIVE)

        @settings(max_examples=25, suppress_health_check=SHARED)
        @given(cases)
        def check(case: schemathesis.Case) -> None:
            wire = case.as_transport_kwargs(base_url="http://trainer")
            answer = ingest.ask(
                wire["method"], wire["url"], params=wire.get("params"), headers=wire["headers"]
            )
            asked.append(answer.status_code)
            assert answer.status_code < 500, answer.text
            assert answer.headers["content-type"].startswith(("application/json", "text/plain"))

        check()
    assert asked


def test_after_all_that_a_good_batch_is_taken(ingest):
    assert ingest.ask("PUT", "/keptset/v1/steps/1", content=ingest.valid).status_code == 202
    assert ingest.kept() == ["step-000001.msgpack"]
