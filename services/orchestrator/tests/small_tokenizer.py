"""A byte-level tokenizer of 261 ids with a chat template, written as a model's directory has it."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIALS = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
VOCAB_SIZE = 256 + len(SPECIALS)
END = 1

TEMPLATE = """\
{% for message in messages %}
    {% if message.role not in ["system", "user", "assistant"] %}
        {{ raise_exception("unknown role " + message.role) }}
    {% endif %}
<|{{ message.role }}|>{{ message.content }}{{ eos_token }}
{%- endfor %}
{% if add_generation_prompt %}<|assistant|>{% endif %}
"""


def write_tokenizer(directory: Path, template_file: bool = True) -> Path:
    """Write tokenizer.json, tokenizer_config.json and the template (a file of its own, or in the config)."""
    directory.mkdir(parents=True, exist_ok=True)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: index for index, text in enumerate(SPECIALS + letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"eos_token": "<|end|>", "pad_token": {"content": "<|pad|>", "special": True}}
    if template_file:
        (directory / "chat_template.jinja").write_text(TEMPLATE)
    else:
        config["chat_template"] = TEMPLATE
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory
