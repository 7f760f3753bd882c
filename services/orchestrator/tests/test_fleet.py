"""Several inference servers: who gets which request, and one that goes and comes back; with a router before
them and without.
"""

import asyncio
import math
from collections.abc import Iterator

import pytest

from kept_tokens.answers import GenerateAnswer
from keptset_orchestrator import ChatTokenizer
from keptset_settings import CalculatorSettings

from .driving import Drive
from .fake_inference import FakeInference
from .fake_trainer import FakeTrainer
from .small_tokenizer import END


@pytest.fixture(params=["direct", "routed"])
def way(request: pytest.FixtureRequest, drive: Drive) -> str:
    """Whether rollouts go by way of the router."""
    if request.param == "routed":
        drive.settings.router_url = request.getfixturevalue("router").url
    return request.param


@pytest.fixture(autouse=True)
def went_that_way(way: str, inference: FakeInference, second: FakeInference) -> Iterator[None]:
    """The router writes a field into each body that we do not write."""
    yield
    assert all(("stream" in body) == (way == "routed") for body in inference.requests + second.requests)


@pytest.mark.parametrize("level", [0, 2])
async def test_server_that_dies_is_taken_back_with_the_newest_weights(
    level: int, drive: Drive, inference: FakeInference, second: FakeInference, trainer: FakeTrainer
):
    settings = drive.settings
    settings.max_async_level, settings.steps, settings.train.prompts_per_step = level, 40, 4
    inference.delay = second.delay = 0.05

    async def restart() -> None:
        while not any("-text-2-" in body["request_id"] for body in second.requests):
            await asyncio.sleep(0.01)
        await asyncio.to_thread(second.kill)
        second.restarted()
        second.requests.clear()
        while 5 not in trainer.batches:
            await asyncio.sleep(0.01)
        second.posted.clear()
        trainer.hold_from = trainer.next_step  # or the run might end before it is back
        await asyncio.to_thread(second.start_again)
        while not second.posted:
            await asyncio.sleep(0.01)
        trainer.hold_from = math.inf

    rows, _ = await asyncio.gather(drive(), restart())
    assert [row["step"] for row in rows] == list(range(1, 41))
    assert trainer.puts == list(range(1, 41))
    assert second.requests, "it takes part again"
    assert second.posted[0] >= 4, "first of all it gets the newest weights"
    assert second.posted == sorted(second.posted)
    for row in rows:
        spans = [span for sample in trainer.batches[row["step"]].samples for span in sample.weight_versions]
        assert all(0 <= row["step"] - 1 - span.version <= level for span in spans)


@pytest.mark.parametrize("alone", [False, True])
async def test_server_that_is_stopped_and_started_again_fails_nothing(
    alone: bool,
    drive: Drive,
    inference: FakeInference,
    second: FakeInference,
    trainer: FakeTrainer,
    caplog: pytest.LogCaptureFixture,
):
    """What it has begun it answers; the rest is done by others, or by itself when it is back. It may take
    long to stop: it is not asked again and again meanwhile.
    """
    settings = drive.settings
    settings.steps, settings.train.prompts_per_step = 4, 8
    if alone:
        settings.inference_urls = [second.url]
    begun, answered = [], []  # the first of step 2, at which it is told to stop

    def stops(body: dict) -> float:
        if "-text-2-" in body["request_id"]:
            begun.append(body["request_id"])
            second.stopping = True
        return 0.0

    def answers(answer: GenerateAnswer) -> GenerateAnswer:
        answered.append(answer.request_id)
        return answer

    second.delay_of, second.tamper, inference.delay = stops, answers, 0.05
    second.holds = lambda body: second.stopping and not second.refused

    async def restart() -> None:
        while f"{second.url} is lost" not in caplog.text or second.in_flight:
            await asyncio.sleep(0.01)
        trainer.hold_from = trainer.next_step  # or the run might end before it is back
        await asyncio.to_thread(second.kill)
        second.restarted()
        second.posted.clear()
        second.stopping, second.delay_of = False, None
        await asyncio.to_thread(second.start_again)
        while not second.posted:
            await asyncio.sleep(0.01)
        trainer.hold_from = math.inf

    rows, _ = await asyncio.gather(drive(), restart())
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert trainer.puts == [1, 2, 3, 4]
    assert len(begun) == 1
    assert begun[0] in answered
    assert rows[1]["rollout/error_rate"] > 0, "the others of step 2 were refused"
    assert second.posted[0] >= 1, "first of all it gets the newest weights"


async def test_turns_of_a_rollout_go_where_its_prefix_is(
    drive: Drive, inference: FakeInference, second: FakeInference, trainer: FakeTrainer, tokenizer_dir
):
    settings = drive.settings
    settings.train.prompts_per_step, settings.train.group_size, settings.steps = 4, 2, 1
    settings.train.source[0].environment = CalculatorSettings(max_turns=4)
    settings.train.sampling.max_tokens = 20
    for server in (inference, second):
        server.max_model_len = 1000
        server.delay = 0.02
        asks = [*ChatTokenizer(tokenizer_dir).encode_as_said("<calc>1*1</calc>"), END]
        server.says = lambda ids, seed, asks=asks: asks
    trainer.row_tokens = 1000
    await drive()
    groups = [
        {body["request_id"].split("-")[4] for body in server.requests} for server in (inference, second)
    ]
    assert all(groups), "both have work"
    assert not groups[0] & groups[1]
    assert len(inference.requests) + len(second.requests) == 4 + 4 * 2 * 3


async def test_server_that_still_loads_for_somebody_else_is_asked_again(
    drive: Drive, inference: FakeInference
):
    """For an orchestrator that was killed while the server loaded."""
    inference.weights_faults = ["update_running", "update_running"]
    assert len(await drive()) == 3
    assert inference.posted == [0, 1, 2, 3]


async def test_answers_of_before_and_after_a_restart_that_nobody_noticed_are_asked_for_again(
    drive: Drive, inference: FakeInference, second: FakeInference, trainer: FakeTrainer
):
    """One answer shows it; another arrives when the server has its weights again."""
    drive.settings.steps, drive.settings.train.prompts_per_step = 2, 4
    second.forgets = [1]
    late: list[str] = []  # the second request that it gets with the weights of its start

    def holds(body: dict) -> bool:
        if second.weight_version is None and second.in_flight > 1 and not late:
            late.append(body["request_id"])
        if body["request_id"] in late:
            return second.weight_version is None
        return "-text-2-" in body["request_id"] and not late

    second.holds = holds
    rows = await drive()
    assert [row["rollout/error_rate"] > 0 for row in rows] == [False, True]
    assert second.posted == [0, 1, 1, 2]
    spans = [span for sample in trainer.batches[2].samples for span in sample.weight_versions]
    assert {span.version for span in spans} == {1}
