"""Text to ids and back, and the chat template."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keptset_orchestrator import ChatTokenizer

from .small_tokenizer import END, VOCAB_SIZE, write_tokenizer

CHAT = [{"role": "user", "content": "abc"}]


@pytest.fixture(scope="module")
def tokenizer(tokenizer_dir: Path) -> ChatTokenizer:
    return ChatTokenizer(tokenizer_dir)


def test_any_text_survives_the_round_trip(tokenizer: ChatTokenizer):
    @given(st.text())
    def law(text: str):
        assert tokenizer.decode(tokenizer.encode(text)) == text

    law()


def test_special_tokens_in_a_rendered_chat_are_one_id_each(tokenizer: ChatTokenizer):
    assert tokenizer.render(CHAT) == "<|user|>abc<|end|><|assistant|>"
    letters = [tokenizer.encode(letter)[0] for letter in "abc"]
    assert tokenizer.encode_messages(CHAT) == [3, *letters, END, 4]


def test_only_the_token_that_ended_it_leaves_the_completion(tokenizer: ChatTokenizer):
    ids = tokenizer.encode("ab")
    assert tokenizer.completion_text([*ids, END]) == "ab"
    assert tokenizer.completion_text(ids) == "ab"
    assert tokenizer.completion_text([END, *ids, END, END]) == "<|end|>ab<|end|>"
    assert tokenizer.completion_text([*ids, 2], stop_token_id=2) == "ab"
    assert tokenizer.completion_text([]) == ""


def test_an_id_that_the_tokenizer_has_not_shows(tokenizer: ChatTokenizer):
    """Left out, a reward would be for a text that was not sampled."""
    a, b = tokenizer.encode("ab")
    assert tokenizer.completion_text([a, VOCAB_SIZE, b, VOCAB_SIZE + 7]) == "a\ufffdb\ufffd"


def test_template_in_the_config_gives_the_same(tokenizer: ChatTokenizer, tmp_path: Path):
    other = ChatTokenizer(write_tokenizer(tmp_path, template_file=False))
    assert other.encode_messages(CHAT) == tokenizer.encode_messages(CHAT)
    assert (other.vocab_size, other.eos_token_id) == (VOCAB_SIZE, END)


def test_template_may_refuse_a_conversation(tokenizer: ChatTokenizer):
    with pytest.raises(ValueError, match="unknown role tool"):
        tokenizer.render([{"role": "tool", "content": ""}])


def test_template_cannot_reach_python(tmp_path: Path):
    directory = write_tokenizer(tmp_path)
    (directory / "chat_template.jinja").write_text("{{ ''.__class__.__mro__ }}")
    with pytest.raises(ValueError, match="unsafe"):
        ChatTokenizer(directory).render(CHAT)


def test_generation_blocks_and_loop_controls_render_as_in_transformers(tmp_path: Path):
    directory = write_tokenizer(tmp_path)
    (directory / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{{ {'a': '<'} | tojson }}{% endfor %}"
    )
    assert ChatTokenizer(directory).render([*CHAT, *CHAT]) == 'abc{"a": "<"}'


def test_truncation_in_the_file_does_not_shorten_prompts(tmp_path: Path):
    directory = write_tokenizer(tmp_path)
    content = json.loads((directory / "tokenizer.json").read_text())
    content["truncation"] = {"max_length": 2, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    (directory / "tokenizer.json").write_text(json.dumps(content))
    assert len(ChatTokenizer(directory).encode("abcdef")) == 6


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda d: (d / "tokenizer.json").unlink(), "tokenizer.json does not exist"),
        (lambda d: (d / "chat_template.jinja").unlink(), "no chat template"),
        (lambda d: (d / "chat_template.jinja").write_text("{% if %}"), "chat template of"),
        (lambda d: (d / "tokenizer_config.json").write_text("{"), "tokenizer_config.json: not JSON"),
        (lambda d: (d / "tokenizer_config.json").write_text('{"eos_token": "<x>"}'), "eos_token '<x>'"),
    ],
)
def test_directory_that_cannot_be_used_is_named(tmp_path: Path, spoil, text: str):
    directory = write_tokenizer(tmp_path)
    spoil(directory)
    with pytest.raises(ValueError, match=text):
        ChatTokenizer(directory)
