"""Which prompts a step has, and with which seeds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keptset_orchestrator import ChatTokenizer, ReverseText
from keptset_orchestrator.sources import Source, derive_seed, share_prompts, step_prompts

ratios = st.lists(st.floats(1, 10), min_size=1, max_size=5)  # so that nobody gets none of 100 prompts


@given(ratios, st.integers(100, 1000))
def test_shares_are_all_prompts_and_within_one_of_the_ratio(ratios: list[float], prompts: int):
    shares = share_prompts(prompts, ratios)
    assert sum(shares) == prompts
    for share, ratio in zip(shares, ratios, strict=True):
        assert abs(share - prompts * ratio / sum(ratios)) < 1


def test_equal_remainders_go_to_the_earlier_source():
    assert share_prompts(3, [1, 1]) == [2, 1]


def test_source_without_a_prompt_is_named():
    with pytest.raises(ValueError, match=r"source\[1\].ratio = 0.01: its share of 8 prompts a step is none"):
        share_prompts(8, [1, 0.01])


@pytest.fixture
def tokenizer(tokenizer_dir) -> ChatTokenizer:
    return ChatTokenizer(tokenizer_dir)


def letters(name: str, prompts: int, prompt_seed: int = 0) -> Source:
    return Source(name, ReverseText(8, 12), {"temperature": 1.0}, True, prompts, prompt_seed, 7)


def test_steps_go_through_the_stream_without_gap_or_repetition(tokenizer: ChatTokenizer):
    asked = [p.example for step in (1, 2, 3) for p in step_prompts([letters("a", 4)], step, tokenizer)]
    stream = letters("a", 4).environment.examples(0, 0)
    assert asked == [next(stream) for _ in range(12)]


def test_step_is_the_same_whatever_was_asked_before(tokenizer: ChatTokenizer):
    sources = [letters("a", 2), letters("b", 3, prompt_seed=1)]
    assert step_prompts(sources, 5, tokenizer) == step_prompts(sources, 5, tokenizer)
    assert [p.group for p in step_prompts(sources, 5, tokenizer)] == [
        "a/5/0", "a/5/1", "b/5/2", "b/5/3", "b/5/4",
    ]  # fmt: skip


def test_seeds_of_choices_never_meet():
    """VLLM samples choice i of a request with seed + i."""
    used = {
        derive_seed(seed, step, prompt) + choice
        for seed in range(3)
        for step in range(1, 40)
        for prompt in range(8)
        for choice in range(16)
    }
    assert len(used) == 3 * 39 * 8 * 16
    assert max(used) < 2**53


def test_derived_seeds_never_change():
    assert derive_seed(0, 1, 0) == 3592057780131
