"""Evaluation: when, on what, sampled how, and what the row says."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keptset_orchestrator.evaluation import pass_at
from keptset_settings import EvalSourceSettings, ReverseTextSettings, SamplingSettings

from .driving import Drive
from .fake_inference import FakeInference
from .fake_trainer import FakeTrainer


@given(st.lists(st.booleans(), min_size=1, max_size=7), st.data())
def test_pass_at_k_is_the_share_of_draws_with_a_success(passed: list[bool], data: st.DataObject):
    k = data.draw(st.integers(1, len(passed)))
    draws = [any(drawn) for drawn in combinations(passed, k)]
    assert pass_at(k, len(passed), sum(passed)) == pytest.approx(sum(draws) / len(draws))


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
