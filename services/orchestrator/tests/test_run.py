"""A whole run over HTTP: what it sends, what it writes."""

import json
import math
import threading

import pytest

from keptset_orchestrator import EnvironmentFaultError, OrchestratorError
from keptset_orchestrator.environments import reverse_text
from keptset_settings import ReverseTextSettings, SamplingSettings, SourceSettings

from .driving import Drive
from .fake_inference import FakeInference
from .fake_trainer import METRICS, FakeTrainer

ROW = {
    "step",
    "reward/mean",
    "reward/max",
    "reward/min",
    "kept/bound_share",
    "rollout/error_rate",
    "rollout/trainable_share",
    "rollout/tokens",
    "rollout/length_mean",
    "rollout/truncated_share",
    "seconds/rollout",
    "seconds/train",
    "seconds/weights",
    "seconds/weights_pause",
    "seconds/step",
    "weight_version",
}


async def test_all_steps_are_done_in_order(drive: Drive, inference: FakeInference, trainer: FakeTrainer):
    rows = await drive()
    assert [(row["step"], row["weight_version"]) for row in rows] == [(1, 1), (2, 2), (3, 3)]
    assert trainer.puts == [1, 2, 3]
    assert inference.posted == [0, 1, 2, 3]
    assert drive.progress.state == "done"


async def test_row_has_every_metric_of_both_services(drive: Drive, trainer: FakeTrainer):
    rows = await drive()
    for row in rows:
        assert row.keys() == ROW | METRICS.keys()
        assert row["mismatch_kl/mean"] == METRICS["mismatch_kl/mean"]
        assert row["seconds/train"] == METRICS["seconds/train"]
        assert row["seconds/weights_pause"] == 0.25
        assert row["loss"] is None, "JSON has no NaN"
        assert row["rollout/error_rate"] == 0.0
        assert 0 <= row["reward/min"] <= row["reward/mean"] <= row["reward/max"] <= 1
        samples = trainer.batches[row["step"]].samples
        assert row["rollout/tokens"] == sum(sum(sample.loss_mask) for sample in samples)
        assert row["rollout/length_mean"] == row["rollout/tokens"] / 8


async def test_request_carries_the_resolved_sampling(drive: Drive, inference: FakeInference):
    drive.settings.train.sampling.extra_body = {"ignore_eos": False}
    await drive()
    for body in inference.requests:
        sampling = dict(body["sampling_params"])
        assert sampling.pop("seed") >= 0
        assert sampling == {
            "temperature": 0.7,
            "top_p": 0.97,
            "top_k": 512,
            "min_p": 0.0,
            "max_tokens": 12,
            "ignore_eos": False,
            "n": 4,
            "logprobs": 0,
        }
        assert body["kept_tokens"] is True


async def test_same_seeds_ask_for_the_same_again(
    drive: Drive, inference: FakeInference, trainer: FakeTrainer
):
    await drive()
    asked = {(tuple(b["token_ids"]), b["sampling_params"]["seed"]) for b in inference.requests}
    hashes = {step: batch.content_hash for step, batch in trainer.batches.items()}
    inference.reset()
    trainer.reset()
    await drive()
    assert {(tuple(b["token_ids"]), b["sampling_params"]["seed"]) for b in inference.requests} == asked
    assert {step: batch.content_hash for step, batch in trainer.batches.items()} == hashes
    assert len(asked) == 6, "every step has prompts and seeds of its own"


async def test_seed_of_the_prompts_is_not_that_of_the_rollouts(drive: Drive, inference: FakeInference):
    await drive()
    prompts = [body["token_ids"] for body in inference.requests]
    seeds = [body["sampling_params"]["seed"] for body in inference.requests]
    drive.settings.train.sampling.seed = 4
    (drive.settings.output_dir / "metrics.jsonl").unlink()
    inference.reset()
    drive.settings.steps = 4
    await drive()
    assert inference.requests[0]["token_ids"] not in prompts, (
        "the trainer has three steps: this is the fourth"
    )
    assert not {body["sampling_params"]["seed"] for body in inference.requests} & set(seeds)


async def test_samples_of_a_truncating_source_must_have_masks(drive: Drive, trainer: FakeTrainer):
    await drive()
    for batch in trainer.batches.values():
        assert len(batch.samples) == 8
        assert all(sample.must_have_masks for sample in batch.samples)


async def test_source_that_does_not_truncate_trains_without_masks(
    drive: Drive, inference: FakeInference, trainer: FakeTrainer
):
    drive.settings.train.sampling = SamplingSettings(temperature=1.0, max_tokens=12)
    inference.capture = {"enabled": False, "kind": "off", "width": None, "proven": False}
    await drive()
    assert all("kept_tokens" not in body for body in inference.requests)
    for batch in trainer.batches.values():
        assert all(s.kept() is None and not s.must_have_masks for s in batch.samples)


async def test_sources_share_a_step_and_have_rewards_of_their_own(drive: Drive, trainer: FakeTrainer):
    drive.settings.train.prompts_per_step = 4
    long = ReverseTextSettings(min_letters=20, max_letters=22)
    drive.settings.train.source = [
        SourceSettings(name="short", ratio=3),
        SourceSettings(name="long", environment=long, sampling=SamplingSettings(temperature=1.3)),
    ]
    rows = await drive()
    samples = trainer.batches[2].samples
    assert [sample.source for sample in samples] == ["short"] * 12 + ["long"] * 4
    assert [float(s.arrays().temperatures[0]) for s in samples] == pytest.approx([0.7] * 12 + [1.3] * 4)
    assert len({sample.sample_id for sample in samples}) == 16
    for row in rows:
        mean = (3 * row["source/short/reward/mean"] + row["source/long/reward/mean"]) / 4
        assert row["reward/mean"] == pytest.approx(mean)


async def test_source_with_a_small_ratio_has_a_prompt_in_some_steps(drive: Drive, trainer: FakeTrainer):
    drive.settings.train.prompts_per_step, drive.settings.steps = 2, 6
    drive.settings.train.source = [SourceSettings(name="often"), SourceSettings(name="rare", ratio=0.2)]
    rows = await drive()
    having = [step for step, batch in trainer.batches.items() if "rare" in {s.source for s in batch.samples}]
    assert having == [3, 6]
    for row in rows:
        assert ("source/rare/reward/mean" in row) == (row["step"] in having)
        assert "source/often/reward/mean" in row


async def test_unsafe_trainer_marks_every_row(drive: Drive, trainer: FakeTrainer):
    trainer.unsafe = True
    assert [row["unsafe/ignore_kept_tokens"] for row in await drive()] == [1.0] * 3


async def test_no_more_requests_are_in_flight_than_set(drive: Drive, inference: FakeInference):
    drive.settings.train.prompts_per_step = 12
    drive.settings.max_concurrent_requests = 3
    drive.settings.steps = 1
    inference.holds = lambda body: inference.most_in_flight < 3
    await drive()
    assert inference.most_in_flight == 3


async def test_finished_run_has_nothing_left_to_do(
    drive: Drive, inference: FakeInference, trainer: FakeTrainer
):
    rows = await drive()
    inference.requests.clear()
    assert await drive() == rows
    assert inference.requests == []
    assert trainer.puts == [1, 2, 3]


async def test_longer_run_goes_on_where_the_shorter_one_ended(drive: Drive, trainer: FakeTrainer):
    rows = await drive()
    drive.settings.steps = 5
    longer = await drive()
    assert longer[:3] == rows
    assert [row["step"] for row in longer] == [1, 2, 3, 4, 5]
    assert trainer.puts == [1, 2, 3, 4, 5]


async def test_prompt_that_leaves_no_room_is_refused_before_it_is_sampled(
    drive: Drive, inference: FakeInference, trainer: FakeTrainer
):
    trainer.row_tokens = 18
    with pytest.raises(
        OrchestratorError, match=r"prompt reverse-text/1/0 .*row_tokens 18.*max_tokens \(now 12\)"
    ):
        await drive()
    trainer.row_tokens, inference.max_model_len = 256, 18
    with pytest.raises(OrchestratorError, match="max_model_len of 18"):
        await drive()
    assert inference.requests == []


async def test_without_max_tokens_a_row_must_hold_the_whole_context(drive: Drive, trainer: FakeTrainer):
    drive.settings.train.sampling.max_tokens = None
    trainer.row_tokens = 255
    with pytest.raises(
        OrchestratorError, match=r"may reach 256, .*: set the source's max_tokens or raise tr"
    ):
        await drive()
    drive.settings.train.sampling.max_tokens = 12
    assert len(await drive()) == 3


async def test_max_tokens_left_out_is_the_rest_of_the_shortest_context(
    drive: Drive, inference: FakeInference, trainer: FakeTrainer
):
    """Said in every request: a server with a longer context would fill that, beyond a row."""
    # vllm#42329: max_tokens left out: 16 tokens each
    drive.settings.train.sampling.max_tokens = None
    longer = FakeInference()
    longer.max_model_len = 4 * inference.max_model_len
    drive.settings.inference_urls.append(longer.url)
    try:
        await drive()
    finally:
        longer.kill()
    asked = [*inference.requests, *longer.requests]
    assert inference.requests
    assert longer.requests
    for body in asked:
        assert len(body["token_ids"]) + body["sampling_params"]["max_tokens"] == inference.max_model_len
    for batch in trainer.batches.values():
        assert max(sample.num_tokens for sample in batch.samples) <= trainer.row_tokens


@pytest.mark.parametrize(
    ("reward", "text"),
    [
        (lambda *_: math.nan, "reward nan is not a finite"),
        (lambda *_: 1 / 0, "reward raised ZeroDivisionError"),
    ],
)
async def test_reward_that_fails_names_source_and_rollout(
    reward, text: str, drive: Drive, monkeypatch, trainer
):
    monkeypatch.setattr(reverse_text.ReverseText, "reward", reward)
    with pytest.raises(
        EnvironmentFaultError, match=rf"source reverse-text: rollout reverse-text/1/\d/0: {text}"
    ):
        await drive()
    assert trainer.puts == []


async def test_reward_that_hangs_ends_the_run_and_not_the_process(drive: Drive, monkeypatch, trainer):
    release = threading.Event()
    monkeypatch.setattr(reverse_text.ReverseText, "reward", lambda *_: release.wait(60))
    drive.settings.environment_timeout = 2
    with pytest.raises(
        EnvironmentFaultError, match=r"reverse-text/1/\d/0: reward: waited 2 s .*environment_timeout"
    ):
        await drive()
    assert trainer.puts == []
    assert all(thread.daemon for thread in threading.enumerate() if "reward" in thread.name)
    release.set()


async def test_environment_that_runs_out_of_examples_is_named(drive: Drive, monkeypatch):
    monkeypatch.setattr(reverse_text.ReverseText, "examples", lambda self, seed, start: iter("a"[start:]))
    with pytest.raises(EnvironmentFaultError, match="examples 0 to 1: the stream ended after 1"):
        await drive()


@pytest.mark.parametrize("name", ["tokenizer", "output_dir", "trainer_url", "inference_urls"])
async def test_setting_that_a_lone_orchestrator_needs_is_named(name: str, drive: Drive):
    setattr(drive.settings, name, [] if name == "inference_urls" else None)
    with pytest.raises(ValueError, match=rf"\[orchestrator\] {name}: not set"):
        await drive()


async def test_rows_are_strict_json(drive: Drive):
    await drive()
    text = (drive.settings.output_dir / "metrics.jsonl").read_text()
    assert len(text.splitlines()) == 3
    for line in text.splitlines():
        json.loads(line, parse_constant=lambda constant: pytest.fail(f"{constant} is no JSON"))
