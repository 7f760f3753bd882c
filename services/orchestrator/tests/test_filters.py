"""Which rollouts are flagged, and what becomes of them."""

import math
from dataclasses import replace

import numpy as np
import pytest

from keptset_orchestrator import ReverseText
from keptset_orchestrator.algorithms import Algorithm, make_algorithm
from keptset_orchestrator.arrival import Completion
from keptset_orchestrator.batches import build_samples
from keptset_orchestrator.filters import make_filters
from keptset_orchestrator.rollouts import Group
from keptset_orchestrator.selection import rollout_metrics, select
from keptset_orchestrator.sources import Prompt, Source
from keptset_settings import (
    GibberishFilter,
    OpdAlgorithm,
    RepetitionFilter,
    SftAlgorithm,
    ZeroAdvantageFilter,
)

VOCAB = 100


def completion(tokens: list[int], logprobs: list[float], sampled: list[bool] | None = None) -> Completion:
    return Completion(
        np.array(tokens, np.int32),
        np.array(logprobs, np.float32),
        None,
        "stop",
        None,
        [(0, 0, len(tokens))],
        None if sampled is None else np.array(sampled),
    )


GOOD = completion([5, 6, 7], [-0.5, -0.5, -0.5])


def source(*filters, algorithm: Algorithm | None = None) -> Source:
    more = {} if algorithm is None else {"algorithm": algorithm}
    made = make_filters(filters, VOCAB)
    return Source("s", ReverseText(1, 2), {"temperature": 1.0}, False, 0, 0, 2, filters=made, **more)


def flags_of(one: Completion, *filters) -> list[str]:
    group = Group(Prompt(source(*filters), "s/1/0", "a", [3], 0), [one, GOOD], [1.0, 0.0])
    return select(build_samples([group], vocab_size=VOCAB)).flags[0]


UNLIKELY = -math.log(VOCAB) - 2.0


@pytest.mark.parametrize(
    ("one", "flagged"),
    [
        (completion([90], [UNLIKELY - 0.01]), True),
        (completion([90], [UNLIKELY + 0.01]), False),  # rare, and likely enough
        (completion([89], [UNLIKELY - 5]), False),  # unlikely, and common
        (completion([90, 5], [-0.1, UNLIKELY - 1]), False),  # not the same token
    ],
)
def test_gibberish_is_a_rare_token_that_was_unlikely(one: Completion, flagged: bool):
    assert flags_of(one, GibberishFilter(min_token_id=90, margin=2.0)) == (["gibberish"] if flagged else [])


SURE, UNSURE = math.log(0.995), math.log(0.98)


@pytest.mark.parametrize(
    ("logprobs", "sampled", "flagged"),
    [
        ([SURE] * 3, None, True),
        ([UNSURE, *[SURE] * 3, UNSURE], None, True),
        ([SURE] * 2, None, False),
        ([SURE, SURE, UNSURE, SURE, SURE], None, False),
        ([SURE, SURE, 0.0, SURE], [True, True, False, True], False),  # context between turns ends a run
    ],
)
def test_repetition_is_a_run_of_sure_tokens(logprobs, sampled, flagged: bool):
    one = completion([5] * len(logprobs), logprobs, sampled)
    found = flags_of(one, RepetitionFilter(window=3, probability=0.99))
    assert found == (["repetition"] if flagged else [])


def built_of(filters, rewards, algorithm: Algorithm | None = None):
    prompt = Prompt(source(*filters, algorithm=algorithm), "s/1/0", "a", [3], 0)
    return build_samples([Group(prompt, [GOOD] * len(rewards), rewards)], vocab_size=VOCAB)


def test_zero_advantages_are_left_out():
    lively, equal = (
        built_of([ZeroAdvantageFilter()], [1.0, 0.0]),
        built_of([ZeroAdvantageFilter()], [1.0, 1.0]),
    )
    chosen = select([*lively, *equal])
    assert chosen.samples == [one.sample for one in lively]
    assert chosen.dropped == [False, False, True, True]
    metrics = rollout_metrics([*lively, *equal], chosen, 1)
    assert (metrics["filter/zero_advantage/share"], metrics["rollout/dropped_share"]) == (0.5, 0.5)
    assert metrics["reward/mean"] == 0.75, "what is left out still has its reward in the row"


def test_rollout_that_the_trainer_compares_is_kept_without_advantage():
    """With opd under truncation all advantages are 0 here, and the reference travels with the sample."""
    scored = replace(GOOD, reference=np.float32([-1, -2, -3]))
    prompt = Prompt(
        source(ZeroAdvantageFilter(), algorithm=make_algorithm(OpdAlgorithm())), "s/1/0", "a", [3], 0
    )
    built = build_samples([Group(prompt, [scored] * 2, [1.0, 1.0])], vocab_size=VOCAB, full_scores=True)
    assert not any(one.sample.arrays().advantages.any() for one in built)
    chosen = select(built)
    assert chosen.flags == [[], []]
    assert rollout_metrics(built, chosen, 1)["rollout/trainable_share"] == 1.0


def test_filter_that_is_not_enforced_only_counts():
    built = built_of([ZeroAdvantageFilter(enforce=False)], [1.0, 1.0])
    chosen = select(built)
    assert chosen.samples == [one.sample for one in built]
    assert rollout_metrics(built, chosen, 1)["filter/zero_advantage/share"] == 1.0


def test_step_of_which_nothing_is_left_changes_nothing(caplog: pytest.LogCaptureFixture):
    built = built_of([RepetitionFilter(window=1, probability=0.1)], [1.0, 0.0])
    chosen = select(built)
    assert len(chosen.samples) == 2
    assert not any(sample.arrays().advantages.any() for sample in chosen.samples)
    assert all(1 in sample.loss_mask for sample in chosen.samples)
    assert "leave nothing of this step's 2 rollouts" in caplog.text


def test_frozen_rollouts_below_the_least_reward_are_left_out():
    algorithm = make_algorithm(SftAlgorithm(min_reward=0.5))
    said = completion([5], [0.0])
    said = Completion(said.token_ids, said.logprobs, None, "stop", None, [])
    prompt = Prompt(source(algorithm=algorithm), "s/1/0", "a", [3], 0)
    built = build_samples([Group(prompt, [said] * 3, [0.4, 0.5, 1.0])], vocab_size=VOCAB)
    chosen = select(built)
    assert chosen.dropped == [True, False, False]
    assert chosen.flags == [["min_reward"], [], []]
    assert {sample.objective for sample in chosen.samples} == {"cross_entropy"}
    assert rollout_metrics(built, chosen, 1)["filter/min_reward/share"] == pytest.approx(1 / 3)
