"""Which prompts a step has, and with which seeds."""

import pytest

from keptset_orchestrator import ChatTokenizer, OrchestratorError, ReverseText
from keptset_orchestrator.preflight import check_lengths
from keptset_orchestrator.sources import Prompt, Source, derive_seed, step_prompts


@pytest.fixture
def tokenizer(tokenizer_dir) -> ChatTokenizer:
    return ChatTokenizer(tokenizer_dir)


def letters(name: str, prompt_seed: int = 0) -> Source:
    return Source(name, ReverseText(8, 12), {"temperature": 1.0}, True, prompt_seed, 7)


def test_steps_go_through_the_stream_without_gap_or_repetition(tokenizer: ChatTokenizer):
    spans = [range(4), range(4, 4), range(4, 12)]
    asked = [
        prompt.example
        for step, span in enumerate(spans, 1)
        for prompt in step_prompts([letters("a")], step, tokenizer, [span])
    ]
    stream = letters("a").environment.examples(0, 0)
    assert asked == [next(stream) for _ in range(12)]


def test_step_is_the_same_whatever_was_asked_before(tokenizer: ChatTokenizer):
    sources, spans = [letters("a"), letters("b", prompt_seed=1)], [range(8, 10), range(12, 15)]
    prompts = step_prompts(sources, 5, tokenizer, spans)
    assert step_prompts(sources, 5, tokenizer, spans) == prompts
    assert [prompt.group for prompt in prompts] == [
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


@pytest.mark.parametrize(
    ("max_tokens", "context", "row", "fits"),
    [
        (None, 11, 11, True),
        (None, 10, None, False),  # nothing is left for an answer
        (None, 11, 10, False),
        (4, 14, 14, True),
        (4, 13, 14, False),
        (4, 14, 13, False),
    ],
)
def test_a_prompt_of_ten_tokens_and_its_longest_answer_must_fit(max_tokens, context, row, fits):
    sampling = {"temperature": 1.0} | ({} if max_tokens is None else {"max_tokens": max_tokens})
    source = Source("s", ReverseText(1, 2), sampling, False, 0, 0)
    prompts = [Prompt(source, "s/1/0", "a", [3] * 10, 0)]
    if fits:
        check_lengths(prompts, context, row)
    else:
        with pytest.raises(OrchestratorError, match="prompt s/1/0 has 10 tokens"):
            check_lengths(prompts, context, row)
