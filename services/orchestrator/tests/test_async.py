"""Rollouts that are up to `max_async_level` versions back: how far, over which updates, and who waits."""

import asyncio
import math
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from kept_tokens.answers import GenerateAnswer, VersionSpan
from keptset_orchestrator import AnswerError, ChatTokenizer, ReverseText, slots
from keptset_orchestrator.arrival import Completion
from keptset_orchestrator.rollouts import Group
from keptset_orchestrator.slots import Slots
from keptset_orchestrator.sources import Prompt, Source
from keptset_orchestrator.state import RunState, StoredGroup
from keptset_orchestrator.step_sampler import StepSampler
from keptset_orchestrator.stored_groups import fingerprint, pack_group, span_of_versions
from keptset_settings import CalculatorSettings, SourceSettings

from .driving import Drive
from .fake_inference import FakeInference
from .fake_trainer import FakeTrainer
from .small_tokenizer import END
from .test_resume import interrupt, interrupt_after


def asked_for(inference: FakeInference) -> list[int]:
    """The step of each request that came."""
    return [int(body["request_id"].split("-")[3]) for body in inference.requests]


def versions_of(trainer: FakeTrainer, step: int) -> list[int]:
    """The weights that sampled the tokens of a batch, a version a span."""
    return [span.version for sample in trainer.batches[step].samples for span in sample.weight_versions]


async def until(condition, seconds: float = 30.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("level", [1, 2, 5])
async def test_steps_are_sampled_ahead_while_the_trainer_works_and_no_further(
    level: int, drive: Drive, inference: FakeInference, trainer: FakeTrainer
):
    drive.settings.max_async_level, drive.settings.steps, trainer.hold_from = level, 8, 1
    run = asyncio.create_task(drive())
    await until(lambda: len(inference.requests) == 2 * (level + 1) and len(trainer.batches) == 2)
    await asyncio.sleep(0.3)  # for what should not come
    assert sorted(set(asked_for(inference))) == list(range(1, level + 2))
    assert sorted(trainer.batches) == [1, 2], "the next batch is there before the trainer asks for it"
    trainer.hold_from = math.inf
    rows = await run
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert trainer.puts == list(range(1, 9))
    assert len(inference.requests) == 16
    for row in rows:
        behind = [row["step"] - 1 - version for version in versions_of(trainer, row["step"])]
        assert 0 <= min(behind) <= max(behind) == row["staleness/max"] <= level
        assert row["staleness/dropped_groups"] == 0
    assert rows[level]["staleness/max"] == level, "nothing was trained when it was sampled"


async def test_steps_that_are_sampled_side_by_side_never_share_an_example(
    drive: Drive, inference: FakeInference, trainer: FakeTrainer, monkeypatch
):
    """However long each takes to find out which examples are its own."""
    cursors = RunState.cursors

    def later_for_earlier_steps(self: RunState, step: int, spans):
        time.sleep(0.02 * (5 - step))
        return cursors(self, step, spans)

    monkeypatch.setattr(RunState, "cursors", later_for_earlier_steps)
    drive.settings.max_async_level, drive.settings.steps = 3, 4
    await drive()
    with closing(sqlite3.connect(drive.settings.output_dir / "state.sqlite")) as database:
        found = database.execute("SELECT step, start, stop FROM cursors ORDER BY step").fetchall()
    assert found == [(step, 2 * (step - 1), 2 * step) for step in range(1, 5)]


async def test_level_0_samples_every_token_with_the_weights_that_are_trained(
    drive: Drive, inference: FakeInference, trainer: FakeTrainer
):
    rows = await drive()
    for row in rows:
        assert set(versions_of(trainer, row["step"])) == {row["step"] - 1}
        assert not [name for name in row if name.startswith("staleness/")]


async def test_request_goes_on_over_an_update_and_every_token_knows_its_version(
    drive: Drive, inference: FakeInference, trainer: FakeTrainer
):
    drive.settings.max_async_level, drive.settings.steps = 1, 2
    inference.holds = lambda body: "-text-2-" in body["request_id"] and inference.weight_version != 1
    rows = await drive()
    spans = [sample.weight_versions for sample in trainer.batches[2].samples]
    mixed = [span for span in spans if len(span) == 2]
    assert mixed
    for first, second in mixed:
        assert (first.version, second.version) == (0, 1)
        assert first.end == second.start
    assert rows[1]["staleness/mixed_share"] > 0
    assert 0 < rows[1]["staleness/mean"] < 1
    assert rows[0]["rollout/error_rate"] == rows[1]["rollout/error_rate"] == 0


async def test_versions_that_fall_or_are_not_published_yet_stop_the_run(
    drive: Drive, inference: FakeInference
):
    drive.settings.max_async_level = 1
    inference.tamper = lambda answer: _with_versions(answer, "v000002")
    with pytest.raises(AnswerError, match="sampled with 'v000002', but this step is sampled with version 0"):
        await drive()


def _with_versions(answer: GenerateAnswer, version: str) -> GenerateAnswer:
    choices = [
        msgspec.structs.replace(c, weight_versions=[VersionSpan(version, 0, len(c.token_ids) // 4)])
        for c in answer.choices
    ]
    return msgspec.structs.replace(answer, choices=choices)


@pytest.mark.parametrize("level", [0, 2])
async def test_finished_groups_are_not_sampled_again_after_a_restart(
    level: int, drive: Drive, inference: FakeInference, trainer: FakeTrainer
):
    drive.settings.max_async_level = level
    inference.delay_of = lambda body: 0.0 if body["request_id"].split("-")[4] == "0" else 60.0
    state = drive.settings.output_dir / "state.sqlite"
    asked = 2 * (level + 1)
    await interrupt(
        drive,
        lambda: len(inference.requests) == asked and _finished(state) == level + 1,
    )
    inference.requests.clear()
    inference.delay_of = None
    await drive()
    assert len(inference.requests) == 6 - (level + 1), "one group of each step was there"
    assert trainer.puts == [1, 2, 3]


def _finished(state: Path) -> int:
    with closing(sqlite3.connect(state)) as database:
        tables = database.execute("SELECT count(*) FROM sqlite_master WHERE name = 'groups'").fetchone()[0]
        return database.execute("SELECT count(*) FROM groups").fetchone()[0] if tables else 0


async def test_groups_beyond_a_lower_bound_are_counted_and_sampled_again(
    drive: Drive, inference: FakeInference, trainer: FakeTrainer, caplog
):
    drive.settings.max_async_level = 2
    trainer.hold_from = 1
    state = drive.settings.output_dir / "state.sqlite"
    await interrupt(drive, lambda: state.exists() and _finished(state) == 6 and 2 in trainer.batches)
    trainer.hold_from = math.inf
    inference.requests.clear()
    drive.settings.max_async_level = 0
    rows = await drive()
    assert asked_for(inference) == [3, 3]
    assert rows[2]["staleness/dropped_groups"] == 2
    assert rows[2]["staleness/max"] == 0
    assert "step 3: 2 finished groups were sampled more than max_async_level = 0 versions ago" in caplog.text


@pytest.mark.parametrize(("level", "usable"), [(1, True), (0, False)])
def test_a_group_that_went_on_over_an_update_is_as_old_as_its_oldest_token(level: int, usable: bool):
    source = Source("s", ReverseText(1, 2), {"temperature": 1.0}, False, 0, 0, 1)
    prompt, spans = Prompt(source, "s/2/0", "a", [3], 0), [(0, 0, 1), (1, 1, 2)]
    said = Completion(np.int32([7, 8]), np.float32([-1, -2]), None, "stop", None, spans)
    group = Group(prompt, [said], [0.5])
    stored = StoredGroup("s/2/0", "s", fingerprint(prompt, 64), span_of_versions(group), pack_group(group))
    state = SimpleNamespace(groups=lambda step: {0: stored})
    sampler = SimpleNamespace(_state=state, _settings=SimpleNamespace(max_async_level=level))
    found, dropped = StepSampler._finished(sampler, 2, [prompt], 64)
    assert (list(found), dropped) == (([0], 0) if usable else ([], 1))


async def test_interrupted_anywhere_it_ends_with_every_step_once(
    drive: Drive, inference: FakeInference, trainer: FakeTrainer
):
    drive.settings.max_async_level, drive.settings.steps = 2, 6
    inference.delay = 0.03
    await interrupt_after(drive, 90, 150, 210, 270, 330)
    rows = await drive()
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert sorted(trainer.batches) == [1, 2, 3, 4, 5, 6]
    files = sorted(path.name for path in (drive.settings.output_dir / "rollouts").iterdir())
    expected = [f"step-{n:06d}-{trainer.batches[n].content_hash.hex()}.jsonl" for n in range(1, 7)]
    assert files == expected


@pytest.mark.parametrize("fair", [True, False])
async def test_slow_prompts_wait_no_longer_than_fast_ones(
    fair: bool, drive: Drive, inference: FakeInference, trainer: FakeTrainer, tokenizer_dir, monkeypatch
):
    """Rollouts of five turns beside those of one, with few places and much sampled ahead. Without an order
    among the steps, each further turn waits behind all that is sampled ahead: that is what the figure shows.
    """
    settings = drive.settings
    settings.max_async_level, settings.steps, settings.max_concurrent_requests = 4, 5, 2
    settings.train.prompts_per_step, settings.train.group_size = 6, 2
    settings.train.source = [
        SourceSettings(name="fast"),
        SourceSettings(name="slow", environment=CalculatorSettings(max_turns=5)),
    ]
    inference.max_model_len = trainer.row_tokens = 2000
    asks = [*ChatTokenizer(tokenizer_dir).encode_as_said("<calc>1*1</calc>"), END]
    inference.says = lambda ids, seed: asks
    settings.train.sampling.max_tokens = 20
    inference.delay = 0.02
    # Time is the number of requests that came: a machine that stands still makes nobody wait longer.
    monkeypatch.setattr(slots, "time", SimpleNamespace(monotonic=lambda: float(len(inference.requests))))
    if not fair:
        monkeypatch.setattr(Slots, "hold", lambda self, step, hold=Slots.hold: hold(self, 0))
    rows = await drive()
    slow, fast = (sum(row[f"source/{name}/wait_p90"] for row in rows[1:]) for name in ("slow", "fast"))
    assert (slow <= 2 * fast) is fair, (slow, fast)


@pytest.mark.parametrize("level", [0, 1])
async def test_server_started_again_between_two_requests_gets_its_weights(
    level: int, drive: Drive, inference: FakeInference, trainer: FakeTrainer
):
    """Nobody saw it go: it just answers with the weights that it was started with."""
    drive.settings.max_async_level, drive.settings.max_concurrent_requests = level, 1
    seen: list[dict] = []

    def restarted(body) -> float:
        if "-text-3-" in body["request_id"] and not seen:
            seen.append(body)
            inference.restarted()
        return 0.0

    inference.delay_of = restarted
    rows = await drive()
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert rows[2]["rollout/error_rate"] > 0
    assert inference.posted == sorted(inference.posted)
    # The weights that it had lost are loaded once more; above level 0 they may be the next ones by then.
    assert len(inference.posted) in ((5,) if level == 0 else (4, 5))
