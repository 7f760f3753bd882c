"""How many prompts of a step each source gets."""

import itertools
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keptset_settings import PromptShares, RunSettings, SettingsError, resolve_run

ratios = st.lists(
    st.one_of(st.integers(1, 20).map(float), st.floats(1e-3, 1e3), st.floats(1e-300, 1e300)),
    min_size=1,
    max_size=6,
)


def counts(shares: PromptShares, step: int) -> list[int]:
    return [len(span) for span in shares.spans(step)]


@given(ratios, st.integers(1, 64), st.integers(1, 40))
def test_shares_are_all_prompts_and_within_one_of_the_ratio_after_every_step(
    ratios: list[float], prompts: int, steps: int
):
    shares = PromptShares(prompts, ratios)
    total = sum(Fraction(str(ratio)) for ratio in ratios)
    for step in range(1, steps + 1):
        spans = shares.spans(step)
        assert sum(map(len, spans)) == prompts
        assert sum(span.stop for span in spans) == step * prompts
        for span, ratio in zip(spans, ratios, strict=True):
            assert abs(span.stop - step * prompts * Fraction(str(ratio)) / total) < 1


@given(ratios, st.integers(1, 16), st.lists(st.integers(1, 50), min_size=2, max_size=8))
def test_step_has_the_same_prompts_whichever_step_was_asked_for_before(
    ratios: list[float], prompts: int, steps: list[int]
):
    asked = PromptShares(prompts, ratios)
    found = [asked.spans(step) for step in steps]
    assert found == [PromptShares(prompts, ratios).spans(step) for step in steps]
    for step in steps:
        before, after = asked.spans(step), asked.spans(step + 1)
        assert [span.stop for span in before] == [span.start for span in after], "no gap, nothing twice"


def test_ratio_of_one_to_two_is_a_third_of_the_run_though_not_of_a_step():
    shares = PromptShares(8, [1, 2])
    assert [counts(shares, step) for step in range(1, 7)] == [[3, 5], [2, 6], [3, 5]] * 2
    assert shares.spans(300)[0].stop == 800


def test_ratio_that_divides_a_step_has_the_same_prompts_in_each():
    assert [counts(PromptShares(8, [3, 1]), step) for step in (1, 2, 1000)] == [[6, 2]] * 3


def test_small_ratio_has_a_prompt_every_few_steps():
    shares = PromptShares(8, [1, 0.05])
    with_one = [step for step in range(1, 50) if counts(shares, step)[1]]
    assert {after - before for before, after in itertools.pairwise(with_one)} == {2, 3}
    assert [span.stop for span in shares.spans(21)] == [160, 8]


def run_with(steps: int, *ratios: float) -> RunSettings:
    sources = [{"name": f"s{n}", "ratio": ratio} for n, ratio in enumerate(ratios)]
    orchestrator = {"steps": steps, "train": {"prompts_per_step": 8, "source": sources}}
    return RunSettings.model_validate({"inference": {"model": "m"}, "orchestrator": orchestrator})


def test_source_without_a_prompt_in_the_whole_run_is_refused_before_anything_starts():
    with pytest.raises(SettingsError) as error:
        resolve_run(run_with(12, 1, 0.01))
    assert str(error.value) == (
        "[orchestrator.train.source[1]] ratio = 0.01: its share of the run's 96 prompts is less than one; "
        "raise it, orchestrator.steps or orchestrator.train.prompts_per_step"
    )
    resolve_run(run_with(13, 1, 0.01))
    resolve_run(run_with(12, 1, 0.1))
