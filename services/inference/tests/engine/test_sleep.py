"""An engine that sleeps: nothing is asked of it, nothing old is in it when it wakes, sets stay exact.

On a CPU the memory stays where it is; routes, order and answers are those of a GPU.
"""

import asyncio
import json

import pytest

from keptset_guards import GpuTurn

from ..models.published import directory_name
from ..models.tiny import tiny_model
from ..models.tokenizer import byte_ids
from .answers import error_of, of_events
from .cases import Case
from .test_weights import CUT, check_exact, serving

pytestmark = pytest.mark.engine


async def test_it_wakes_with_another_version_and_an_empty_cache(tiny, tiny_versions, evidence):
    first, second = (tiny_versions.publish_model(tiny_model(seed=600 + i)) for i in range(2))
    trainer = GpuTurn(tiny.gpu_lock, "the trainer", shared=False)
    prompt = [5 + (11 * i * i) % 256 for i in range(130)]  # several blocks of the cache
    tiny.update(first)
    for _ in range(2):  # the second time from the cache
        await check_exact(tiny, tiny_versions, evidence, prompt, directory_name(first))
    assert not trainer.try_to_take()
    assert tiny.sleep()["seconds"] > 0
    assert tiny.sleep()["seconds"] == 0
    assert trainer.try_to_take()
    assert tiny.call("GET", "/health").json() == {"state": "asleep"}
    status = tiny.call("GET", "/keptset/v1/status").json()
    assert status["sleep"] == {"state": "asleep", "frees_memory": False}
    refused = tiny.generate({"token_ids": prompt, "sampling_params": CUT | {"max_tokens": 1}})
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
    assert "the engine is asleep" in error_of(refused)
    assert tiny.call("POST", "/v1/completions", json={"prompt": "a"}).status_code == 503
    assert tiny.call("POST", "/tokenize", json={"prompt": "a"}).status_code == 200
    assert tiny.call("POST", "/keptset/v1/weights", json={"version": second}).status_code == 409
    trainer.give_back()
    woken = tiny.wake(second)
    assert woken["version"] == second
    assert 0 < woken["wake_seconds"] <= woken["seconds"]
    assert not trainer.try_to_take()
    await check_exact(tiny, tiny_versions, evidence, prompt, directory_name(second))
    assert serving(tiny) == directory_name(second)
    tiny.sleep()
    tiny.wake()
    await check_exact(tiny, tiny_versions, evidence, prompt, directory_name(second))
    assert "the engine merely pauses" in tiny.process.log.read_text()


async def test_requests_that_run_end_before_it_sleeps_and_new_ones_are_refused(tiny, tiny_versions, evidence):
    version = tiny_versions.publish_model(tiny_model(seed=610))
    tiny.update(version)
    case = Case("runs", byte_ids("it ends before the engine sleeps"), CUT | {"max_tokens": 200, "seed": 1})
    body = {"token_ids": case.prompt, "sampling_params": case.sampling_params, "stream": True}
    lines: list[str] = []
    async with tiny.client() as client:
        async with client.stream("POST", "/inference/v1/generate", json=body) as stream:
            sleeping = None
            async for line in stream.aiter_lines():
                lines.append(line)
                if sleeping is None and len(lines) > 5:
                    sleeping = asyncio.create_task(client.post("/keptset/v1/sleep"))
                    while (refused := await client.post("/inference/v1/generate", json=body)).is_success:
                        await asyncio.sleep(0)
                    assert refused.status_code == 503
        assert (await sleeping).status_code == 200
    case.check(evidence, tiny_versions, of_events(lines))
    assert json.loads(lines[-4][6:])["choices"][0]["finish_reason"] == "length"
    tiny.wake(version)
    await check_exact(tiny, tiny_versions, evidence, case.prompt, directory_name(version))


@pytest.mark.parametrize("body", [{"version": -1}, {"version": "1"}, {"level": 2}, []])
def test_a_malformed_wake_is_refused(tiny, body):
    refused = tiny.call("POST", "/keptset/v1/wake", json=body)
    assert refused.status_code == 400
    assert "version" in error_of(refused)
