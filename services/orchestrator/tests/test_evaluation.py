"""Evaluation: when, on what, sampled how, and what the row says."""

import json
from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keptset_orchestrator import OrchestratorError
from keptset_orchestrator.arrival import Completion
from keptset_orchestrator.evaluation import eval_metrics, pass_at
from keptset_orchestrator.rollouts import Group
from keptset_settings import EvalSourceSettings, ReverseTextSettings, SamplingSettings

from .driving import Drive
from .fake_inference import FakeInference
from .fake_trainer import FakeTrainer

ENDED = Completion(np.array([1], np.int32), np.float32([-1]), None, "stop", None, [(0, 0, 1)])


@given(st.lists(st.booleans(), min_size=1, max_size=7), st.data())
def test_pass_at_k_is_the_share_of_draws_with_a_success(passed: list[bool], data: st.DataObject):
    k = data.draw(st.integers(1, len(passed)))
    draws = [any(drawn) for drawn in combinations(passed, k)]
    assert pass_at(k, len(passed), sum(passed)) == pytest.approx(sum(draws) / len(draws))


@pytest.mark.parametrize(("least", "passed"), [(0.49, 1.0), (0.5, 1.0), (0.51, 0.0)])
def test_a_rollout_with_exactly_the_reward_has_passed(least: float, passed: float):
    metrics = eval_metrics("sums", [Group(SimpleNamespace(), [ENDED], [0.5])], least)
    assert (metrics["eval/sums/pass@1"], metrics["eval/sums/avg@1"]) == (passed, 0.5)


@pytest.fixture
def evaluated(drive: Drive) -> Drive:
    """Training that truncates; every second step an evaluation that truncates otherwise."""
    drive.settings.eval.source = [
        EvalSourceSettings(
            name="held-out",
            interval=2,
            examples=3,
            group_size=4,
            pass_reward=0.2,
            environment=ReverseTextSettings(min_letters=5, max_letters=6),
            sampling=SamplingSettings(temperature=0.6, top_p=0.5, max_tokens=9),
        )
    ]
    return drive


def evaluations(inference: FakeInference) -> list[dict]:
    return [body for body in inference.requests if "-eval-" in body["request_id"]]


async def test_evaluation_follows_every_interval(evaluated: Drive, inference: FakeInference):
    evaluated.settings.steps = 4
    rows = await evaluated()
    assert ["eval/held-out/avg@4" in row for row in rows] == [False, True, False, True]
    assert len(evaluations(inference)) == 2 * 3


async def test_truncated_evaluation_asks_for_no_masks(evaluated: Drive, inference: FakeInference):
    await evaluated()
    for body in evaluations(inference):
        assert body["kept_tokens"] is False
        sampling = body["sampling_params"]
        assert (sampling["temperature"], sampling["top_p"], sampling["top_k"]) == (0.6, 0.5, -1)
        assert (sampling["n"], sampling["max_tokens"]) == (4, 9)


async def test_evaluation_works_on_a_server_without_capture(
    evaluated: Drive, inference: FakeInference, trainer: FakeTrainer
):
    evaluated.settings.train.sampling = SamplingSettings(temperature=1.0, max_tokens=12)
    inference.capture = {"enabled": False, "kind": "off", "width": None, "proven": False}
    assert len(await evaluated()) == 3


async def test_examples_are_the_same_each_time_and_not_those_of_training(
    evaluated: Drive, inference: FakeInference
):
    evaluated.settings.steps = 4
    evaluated.settings.train.source[0].environment = evaluated.settings.eval.source[0].environment
    await evaluated()
    asked = [(tuple(b["token_ids"]), b["sampling_params"]["seed"]) for b in evaluations(inference)]
    assert sorted(asked[:3]) == sorted(asked[3:])
    trained = {tuple(b["token_ids"]) for b in inference.requests if "-eval-" not in b["request_id"]}
    assert not trained & {ids for ids, _ in asked}


async def test_row_has_average_and_pass_rates(evaluated: Drive):
    row = (await evaluated())[1]
    named = {name.removeprefix("eval/held-out/") for name in row if name.startswith("eval/")}
    assert named == {"avg@4", "pass@1", "pass@2", "pass@4", "length_mean", "truncated_share"}
    assert 0 <= row["eval/held-out/pass@1"] <= row["eval/held-out/pass@2"] <= row["eval/held-out/pass@4"] <= 1
    assert row["eval/held-out/length_mean"] <= 9
    assert row["seconds/eval"] > 0


async def test_evaluation_uses_the_weights_of_its_step(evaluated: Drive, inference: FakeInference):
    versions = []

    def note(answer):
        if "-eval-" in answer.request_id:
            versions.append(answer.choices[0].weight_versions[0].version)
        return answer

    inference.tamper = note
    await evaluated()
    assert set(versions) == {"v000002"}
    assert len(versions) == 3


async def test_evaluation_is_not_trained_on(evaluated: Drive, trainer: FakeTrainer):
    await evaluated()
    assert {s.source for batch in trainer.batches.values() for s in batch.samples} == {"reverse-text"}


async def test_evaluation_that_does_not_fit_stops_the_run_before_its_first_step(
    evaluated: Drive, inference: FakeInference
):
    evaluated.settings.eval.source[0].sampling.max_tokens = inference.max_model_len - 1
    with pytest.raises(
        OrchestratorError, match=r"prompt eval-held-out/0/0 has .* does not fit the inference"
    ):
        await evaluated()
    assert inference.requests == []


async def test_rollouts_of_an_evaluation_are_recorded_with_their_sampling(
    evaluated: Drive, inference: FakeInference
):
    await evaluated()
    path = evaluated.settings.output_dir / "rollouts" / "eval-held-out-000002.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["sample_id"] for line in lines] == [
        f"eval-held-out/2/{p}/{i}" for p in range(3) for i in range(4)
    ]
    seeds = sorted(body["sampling_params"]["seed"] + i for body in evaluations(inference) for i in range(4))
    assert sorted(line["sampling"].pop("seed") for line in lines) == seeds
    for line in lines:
        assert line["sampling"] == {
            "temperature": 0.6, "top_p": 0.5, "top_k": -1, "min_p": 0.0, "max_tokens": 9, "truncates": True,
        }  # fmt: skip
        assert line["weight_versions"] == [2]
        assert line["text"]
        assert 0 <= line["reward"] <= 1


async def test_recorded_sampling_of_an_evaluation_has_neutral_defaults_and_the_rest_of_the_context(
    evaluated: Drive, inference: FakeInference
):
    evaluated.settings.eval.source[0].sampling = SamplingSettings()
    await evaluated()
    path = evaluated.settings.output_dir / "rollouts" / "eval-held-out-000002.jsonl"
    lengths = {b["sampling_params"]["seed"]: len(b["token_ids"]) for b in evaluations(inference)}
    for line in map(json.loads, path.read_text().splitlines()):
        sampling, index = line["sampling"], int(line["sample_id"].split("/")[-1])
        before = lengths[sampling.pop("seed") - index]
        assert sampling == {
            "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0,
            "max_tokens": inference.max_model_len - before, "truncates": False,
        }  # fmt: skip
