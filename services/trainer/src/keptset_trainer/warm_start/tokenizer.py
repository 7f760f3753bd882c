"""A byte-level tokenizer without merges: 256 bytes and five special tokens."""

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
"""Ids 0 ... 4; `<|end|>` ends every message and is the eos token."""
PAD, END, SYSTEM, USER, ASSISTANT = range(5)
VOCAB_SIZE = len(SPECIAL) + 256

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Ids: the special tokens, then the 256 byte symbols in the order of their (printable) characters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL[PAD],
        eos_token=SPECIAL[END],
        additional_special_tokens=[SPECIAL[SYSTEM], SPECIAL[USER], SPECIAL[ASSISTANT]],
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped
