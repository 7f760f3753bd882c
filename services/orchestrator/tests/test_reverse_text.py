"""The built-in environment."""

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keptset_orchestrator import ReverseText

ENVIRONMENT = ReverseText(min_letters=4, max_letters=12)


@given(st.integers(0, 2**31), st.integers(0, 10_000), st.integers(0, 50))
def test_stream_that_starts_later_goes_on_as_the_whole_one(seed: int, start: int, skipped: int):
    later = next(ENVIRONMENT.examples(seed, start + skipped))
    assert list(islice(ENVIRONMENT.examples(seed, start), skipped + 1))[-1] == later


def test_examples_are_letters_of_every_length_allowed():
    texts = list(islice(ENVIRONMENT.examples(0, 0), 500))
    assert {len(text) for text in texts} == set(range(4, 13))
    assert set("".join(texts)) == set("abcdefghijklmnopqrstuvwxyz")
    assert len(set(texts)) > 490


def test_seeds_give_different_streams():
    assert next(ENVIRONMENT.examples(0, 0)) != next(ENVIRONMENT.examples(1, 0))


@given(st.text("abcdef", min_size=1, max_size=20))
def test_reversed_text_has_the_full_reward(text: str):
    assert ENVIRONMENT.reward(text, text[::-1]) == 1.0


@pytest.mark.parametrize(
    ("completion", "reward"), [("", 0.0), ("xyz", 0.0), ("ba", 2 * 2 / 5), ("cbaq", 6 / 7)]
)
def test_partly_right_text_has_its_similarity(completion: str, reward: float):
    assert ENVIRONMENT.reward("abc", completion) == pytest.approx(reward)


def test_more_letters_at_least_than_at_most_is_refused():
    with pytest.raises(ValueError, match="min_letters 5 and max_letters 4"):
        ReverseText(5, 4)
