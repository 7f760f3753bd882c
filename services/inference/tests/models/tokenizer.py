"""A byte tokenizer: 256 bytes and five specials, no merges, so that every id sequence round-trips."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIALS = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
END = 1
"""Id of `<|end|>`, the end of sequence."""
VOCABULARY = len(SPECIALS) + 256

CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_ids(text: str) -> list[int]:
    """The ids of a text's bytes."""
    return [len(SPECIALS) + byte for byte in text.encode()]


def text_of(ids: list[int]) -> str:
    """The text that ids of bytes spell; specials are left out."""
    return bytes(i - len(SPECIALS) for i in ids if i >= len(SPECIALS)).decode(errors="replace")


def save_tokenizer(directory: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template."""
    # GPT-2's printable stand-ins for bytes: printable latin-1 stands for itself, the rest is moved up
    itself = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = iter(range(256, 512))
    symbols = [chr(byte) if byte in itself else chr(next(moved)) for byte in range(256)]
    vocabulary = {symbol: i for i, symbol in enumerate([*SPECIALS, *symbols])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|end|>", chat_template=CHAT_TEMPLATE
    ).save_pretrained(directory)
