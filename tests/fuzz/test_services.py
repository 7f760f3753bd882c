"""Real services under requests that nobody would send: no 500, no hang, no growth; good ones are right."""

import asyncio
import itertools
import os
import time

import httpx
import numpy as np
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .mixed_requests import GENERATE, SLEEP, WAKE, WEIGHTS, mixed

pytestmark = [pytest.mark.fuzz, pytest.mark.timeout(1800)]

REQUESTS = int(os.environ.get("FUZZ_REQUESTS", 10_000))
CONCURRENCY = 64
EXAMPLES = 30 if REQUESTS < 10_000 else 200
SECONDS_A_REQUEST = 120
MOST_GROWTH = 1.0
"""Megabytes a thousand requests, after warm-up."""

# Neither service shares a GPU or sends weights by NCCL: sleep, wake, group and send refuse what is right as
# well, which elsewhere would put the engine to sleep or wait for peers.
INFERENCE_ROUTES = (
    ("post", GENERATE),
    ("post", WEIGHTS),
    ("post", SLEEP),
    ("post", WAKE),
    ("get", "/keptset/v1/status"),
    ("get", "/health"),
)
TRAINER_ROUTES = (
    ("put", "/keptset/v1/steps/{step}"),
    ("get", "/keptset/v1/steps/{step}"),
    ("get", "/keptset/v1/status"),
    ("post", f"{WEIGHTS}/group"),
    ("post", f"{WEIGHTS}/{{version}}/send"),
    ("get", "/metrics"),
)


def made_up(url: str, method: str, path: str) -> None:
    """Requests from the service's own description of a route, right and wrong ones."""
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    operation = schema[path][method.upper()]
    cases = operation.as_strategy()
    if method != "get" or "{" in path:  # else there is nothing that could be wrong
        cases |= operation.as_strategy(schemathesis.GenerationMode.NEGATIVE)

    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
    @given(cases)
    def check(case: schemathesis.Case) -> None:
        if "wait" in (case.query or {}):
            case.query["wait"] = 0  # a wait is no hang
        answer = case.call(base_url=url, timeout=SECONDS_A_REQUEST)
        # 503: a weight update, or a batch while another is looked at; never an error of ours
        assert answer.status_code < 500 or answer.status_code == 503, answer.text

    check()


@pytest.mark.parametrize(("method", "path"), INFERENCE_ROUTES)
def test_inference_answers_what_its_description_allows_and_what_not(inference, method, path):
    made_up(inference.url, method, path)
    assert httpx.get(f"{inference.url}/health", timeout=SECONDS_A_REQUEST, trust_env=False).status_code == 200


@pytest.mark.parametrize(("method", "path"), TRAINER_ROUTES)
def test_trainer_answers_what_its_description_allows_and_what_not(trainer, method, path):
    made_up(trainer.url, method, path)
    assert httpx.get(f"{trainer.url}/health", timeout=SECONDS_A_REQUEST, trust_env=False).status_code == 200


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(body=st.binary(max_size=2000))
def test_trainer_refuses_bytes_that_are_no_batch(trainer, body):
    url = f"{trainer.url}/keptset/v1/steps/1"
    answer = httpx.put(url, content=body, timeout=SECONDS_A_REQUEST, trust_env=False)
    assert answer.status_code == 422
    assert answer.json()["error"]["message"]


async def test_good_requests_among_bad_ones_are_right_and_memory_stays(inference, sections):
    """64 at a time; memory is looked at after each hundredth of them, the first fifth being warm-up."""
    requests = enumerate(itertools.islice(mixed(seed=0), REQUESTS))
    done, samples, wrong = 0, list[tuple[int, float]](), list[str]()
    every = max(1, REQUESTS // 100)
    began = time.monotonic()
    # Idle connections are dropped before uvicorn does so (5 s), lest a request meets one that closes.
    limits = httpx.Limits(max_connections=CONCURRENCY, keepalive_expiry=2.0)
    async with httpx.AsyncClient(
        base_url=inference.url, limits=limits, timeout=SECONDS_A_REQUEST, trust_env=False
    ) as client:

        async def one_after_another() -> None:
            nonlocal done
            for number, asked in requests:
                try:
                    headers = {"Content-Type": "application/json", **asked.headers}
                    answer = await client.post(asked.path, content=asked.body, headers=headers)
                    asked.check(answer)
                except (AssertionError, ValueError, httpx.HTTPError) as error:
                    wrong.append(f"request {number} {asked.body[:200]!r}: {type(error).__name__} {error}")
                    if len(wrong) > 20:
                        return
                done += 1
                if done % every == 0:
                    samples.append((done, inference.megabytes()))

        await asyncio.gather(*(one_after_another() for _ in range(CONCURRENCY)))
    seconds = time.monotonic() - began
    assert not wrong, "\n".join(wrong[:10])
    assert done == REQUESTS
    counts, megabytes = np.array([pair for pair in samples if pair[0] > REQUESTS // 5]).T
    slope = np.polyfit(counts / 1000, megabytes, 1)[0]
    line = (
        f"{REQUESTS} requests in {seconds:.0f} s, {CONCURRENCY} at a time: all answered as they must be; "
        f"memory {megabytes[0]:.0f} to {megabytes[-1]:.0f} MB, {slope:+.2f} MB a 1,000 requests"
    )
    sections.setdefault("fuzz", []).append(line)
    if REQUESTS >= 10_000:  # fewer say nothing about a slope
        assert slope < MOST_GROWTH, line
