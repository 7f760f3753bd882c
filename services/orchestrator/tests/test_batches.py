"""Every array of a sample is aligned with its tokens."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kept_tokens import KeptTokens, KeptTokensError
from kept_tokens.messages import TrainingBatch, TrainingSample, check_batch, decode, encode
from keptset_orchestrator import ReverseText
from keptset_orchestrator.arrival import Completion
from keptset_orchestrator.batches import build_sample, build_samples
from keptset_orchestrator.rollouts import Group
from keptset_orchestrator.selection import Selection, rollout_metrics, select
from keptset_orchestrator.sources import Prompt, Source

VOCAB = 50


def samples_of(drawn: list[Group], vocab_size: int) -> list[TrainingSample]:
    return [built.sample for built in build_samples(drawn, vocab_size=vocab_size)]


def metrics_of(drawn: list[Group]) -> dict[str, float]:
    built = build_samples(drawn, vocab_size=9)
    return rollout_metrics(built, select(built), len({one.prompt.source.name for one in built}))


ONE_TOKEN = Completion(np.array([1], np.int32), np.array([-1], np.float32), None, "stop", None, [(0, 0, 1)])


def source(truncates: bool, name: str = "letters") -> Source:
    return Source(
        name=name,
        environment=ReverseText(1, 2),
        sampling={"temperature": 0.5},
        truncates=truncates,
        prompt_seed=0,
        sampling_seed=0,
    )


@st.composite
def completions(draw, truncates: bool) -> Completion:
    rows = draw(st.lists(st.sets(st.integers(0, VOCAB - 1), min_size=1, max_size=5), max_size=12))
    tokens = np.array([draw(st.sampled_from(sorted(row))) for row in rows], np.int32)
    logprobs = draw(st.lists(st.floats(-50, 0, width=32), min_size=len(rows), max_size=len(rows)))
    return Completion(
        token_ids=tokens,
        logprobs=np.array(logprobs, np.float32),
        kept=KeptTokens.from_rows([sorted(row) for row in rows]) if truncates else None,
        finish_reason=draw(st.sampled_from(["stop", "length"])),
        stop_token_id=None,
        weight_versions=[(3, 0, len(rows))] if rows else [],
    )


@st.composite
def groups(draw) -> Group:
    truncates = draw(st.booleans())
    size = draw(st.integers(1, 5))
    prompt = Prompt(
        source=source(truncates),
        group=f"letters/1/{draw(st.integers(0, 99))}",
        example="a",
        token_ids=draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9)),
        seed=0,
    )
    return Group(
        prompt=prompt,
        completions=[draw(completions(truncates)) for _ in range(size)],
        rewards=draw(st.lists(st.floats(0, 1), min_size=size, max_size=size)),
    )


@settings(max_examples=30)
@given(st.lists(groups(), min_size=1, max_size=3))
def test_samples_pass_the_trainers_checks_after_the_wire(drawn: list[Group]):
    samples = samples_of(drawn, VOCAB)
    batch = decode(encode(TrainingBatch.build(1, samples)), TrainingBatch)
    check_batch(batch, VOCAB)
    assert batch.samples == samples


@settings(max_examples=40)
@given(groups())
def test_completion_is_found_where_the_loss_mask_is_set(group: Group):
    samples = samples_of([group], VOCAB)
    before = len(group.prompt.token_ids)
    for sample, completion in zip(samples, group.completions, strict=True):
        arrays, tokens = sample.arrays(), len(completion.token_ids)
        assert arrays.loss_mask.tolist() == [False] * before + [True] * tokens
        assert arrays.token_ids.tolist() == group.prompt.token_ids + completion.token_ids.tolist()
        assert (arrays.logprobs[before:] == completion.logprobs).all()
        assert not arrays.logprobs[:before].any()
        assert (arrays.temperatures == np.float32(0.5)).all()
        assert len(set(arrays.advantages[before:].tolist())) <= 1
        assert not arrays.advantages[:before].any()
        assert [tuple(span) for span in sample.weight_versions] == (
            [(3, before, before + tokens)] if tokens else []
        )


@settings(max_examples=40)
@given(groups())
def test_kept_sets_stay_with_their_tokens(group: Group):
    for sample, completion in zip(samples_of([group], VOCAB), group.completions, strict=True):
        assert sample.must_have_masks is group.prompt.source.truncates
        kept = sample.kept()
        if completion.kept is None:
            assert kept is None
            continue
        before = len(group.prompt.token_ids)
        assert not kept.counts[:before].any()
        assert kept.slice(before) == completion.kept


@settings(max_examples=40)
@given(groups())
def test_advantages_of_a_group_sum_to_zero(group: Group):
    samples = samples_of([group], VOCAB)
    whole = [s for s, c in zip(samples, group.completions, strict=True) if len(c.token_ids)]
    if len(whole) == len(samples):
        assert sum(float(s.arrays().advantages[-1]) for s in samples) == pytest.approx(0, abs=1e-5)


def test_context_between_turns_has_no_advantage():
    turns = Completion(
        np.array([1, 2, 3], np.int32),
        np.array([-1, 0, -1], np.float32),
        None,
        "stop",
        None,
        [(0, 0, 1), (0, 2, 3)],
        np.array([True, False, True]),
    )
    prompt = Prompt(source(False), "letters/1/0", "a", [4, 5], 0)
    arrays = build_sample(prompt, 0, turns, 0.5).arrays()
    assert arrays.advantages.tolist() == [0, 0, 0.5, 0, 0.5]
    assert arrays.loss_mask.tolist() == [0, 0, 1, 0, 1]


def test_sample_ids_are_unique_and_name_the_rollout():
    prompt = Prompt(source(False), "letters/7/2", "a", [5], 0)
    samples = samples_of([Group(prompt, [ONE_TOKEN] * 3, [0, 1, 0])], 9)
    assert [s.sample_id for s in samples] == ["letters/7/2/0", "letters/7/2/1", "letters/7/2/2"]
    assert {s.group for s in samples} == {"letters/7/2"}


def test_sample_that_lost_its_masks_is_named():
    group = Group(Prompt(source(True), "letters/1/0", "a", [5], 0), [ONE_TOKEN], [0.0])
    with pytest.raises(KeptTokensError, match=r"letters/1/0/0.*position 1"):
        samples_of([group], 9)


def test_metrics_describe_the_rollouts():
    def completion(tokens: int, reason: str) -> Completion:
        return Completion(
            np.ones(tokens, np.int32), -np.ones(tokens, np.float32), None, reason, None, [(0, 0, tokens)]
        )

    first, second = (Prompt(source(False), f"a/1/{i}", "a", [5], 0) for i in range(2))
    lively = Group(first, [completion(2, "stop"), completion(4, "length")], [0.0, 1.0])
    equal = Group(second, [completion(1, "stop"), completion(1, "stop")], [0.5, 0.5])
    assert metrics_of([lively, equal]) == {
        "reward/mean": 0.5,
        "reward/max": 1.0,
        "reward/min": 0.0,
        "rollout/trainable_share": 0.5,
        "rollout/tokens": 8.0,
        "rollout/length_mean": 2.0,
        "rollout/truncated_share": 0.25,
    }


def test_metrics_of_several_sources_are_told_apart():
    drawn = [
        Group(Prompt(source(False, name), f"{name}/1/0", "a", [5], 0), [ONE_TOKEN] * 2, rewards)
        for name, rewards in (("x", [0.0, 1.0]), ("y", [0.25, 0.25]))
    ]
    metrics = metrics_of(drawn)
    assert (metrics["source/x/reward/mean"], metrics["source/y/reward/mean"]) == (0.5, 0.25)


def test_share_at_the_bound_goes_by_each_sources_top_k():
    """Of tokens that are trained on: not of context, nor of what filters leave out."""

    def group(name: str, top_k: int | None, *rows: list[int]) -> Group:
        tokens = np.array([row[0] if row else 1 for row in rows], np.int32)
        sampled = np.array([bool(row) for row in rows])
        kept = KeptTokens.from_rows(list(rows))
        one = Completion(
            tokens,
            np.zeros(len(rows), np.float32),
            kept,
            "stop",
            None,
            [],
            sampled,
        )
        own = source(True, name)
        own = replace(own, sampling=own.sampling | ({} if top_k is None else {"top_k": top_k}))
        return Group(Prompt(own, f"{name}/1/0", "a", [5], 0), [one] * 2, [0.0, 1.0])

    narrow = group("narrow", 2, [1, 2], [], [3], [1, 4])  # 2 of 3, with context between
    wide = group("wide", 4, [1, 2, 3], [1, 2, 3, 4])  # 1 of 2
    assert metrics_of([narrow, wide])["kept/bound_share"] == pytest.approx(3 / 5)
    assert metrics_of([group("unbounded", None, [1, 2])])["kept/bound_share"] == 0
    built = build_samples([narrow, wide], vocab_size=9)
    chosen = Selection([one.sample for one in built[:2]], [[]] * 4, [False, False, True, True])
    assert rollout_metrics(built, chosen, 2)["kept/bound_share"] == pytest.approx(2 / 3)


def test_empty_completion_is_a_sample_without_loss():
    empty = Completion(np.zeros(0, np.int32), np.zeros(0, np.float32), None, "stop", None, [])
    sample = build_sample(Prompt(source(True), "a/1/0", "a", [5, 6], 0), 0, empty, 1.0)
    assert not sample.arrays().loss_mask.any()
    assert not sample.arrays().advantages.any()
