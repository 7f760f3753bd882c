"""Text to token ids and back without transformers: tokenizer.json and the chat template of a model.

Prompts are rendered and encoded once; completions stay the ids that were sampled (token in, token out) and
are decoded only to be rewarded.
"""

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

Messages = list[dict[str, str]]


class ChatTokenizer:
    """The tokenizer in `directory`, with its chat template.

    Raises:
        ValueError: a file is missing or cannot be read, or there is no chat template.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        path = self.directory / "tokenizer.json"
        if not path.is_file():
            raise ValueError(
                f"orchestrator.tokenizer: {path} does not exist; name a model's directory with tokenizer.json"
            )
        self._tokenizer = Tokenizer.from_file(str(path))
        # A tokenizer.json may ask for truncation or padding; a prompt is what the template says, all of it.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._plain = Tokenizer.from_str(self._tokenizer.to_str())
        self._plain.encode_special_tokens = True
        config = _read_json(self.directory / "tokenizer_config.json")
        named = {key: _token_text(config.get(key)) for key in _SPECIAL_TOKENS}
        self._special = {key: text for key, text in named.items() if text is not None}
        self._template = _compile(_find_template(self.directory, config), self.directory)
        eos = self._special.get("eos_token")
        self.eos_token_id: int | None = None if eos is None else self._tokenizer.token_to_id(eos)
        """Id of the token that ends a turn; None if the tokenizer has none."""
        if eos is not None and self.eos_token_id is None:
            raise ValueError(
                f"{self.directory}: eos_token {eos!r} of tokenizer_config.json is not in tokenizer.json"
            )

    @property
    def vocab_size(self) -> int:
        """One more than the highest id, added ones included; a model's vocabulary may be padded beyond it."""
        return 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())

    def render(self, messages: Messages) -> str:
        """The conversation as text, ready for the assistant's turn.

        Raises:
            ValueError: the template rejects the conversation.
        """
        try:
            return self._template.render(
                messages=messages, tools=None, documents=None, add_generation_prompt=True, **self._special
            )
        except jinja2.TemplateError as error:
            raise ValueError(f"chat template of {self.directory}: {error}") from error

    def encode_messages(self, messages: Messages) -> list[int]:
        """Token ids of the rendered conversation; the template writes the special tokens, none are added."""
        return self.encode(self.render(messages))

    def encode_reply(self, last_id: int | None, messages: Messages) -> list[int]:
        """Token ids of what follows an assistant's turn: its end, some messages, and the mark of the next
        turn.

        The ids so far are not looked at, let alone encoded again: the template is rendered around a stand-in
        for the turn, and only what comes behind it is encoded.

        Args:
            last_id: The last id of the turn. If that ends a turn in the template too, it is not repeated.
            messages: None of them the assistant's.

        Raises:
            ValueError: the template rejects the messages, or shows the turn otherwise than it was.
        """
        turn = {"role": "assistant", "content": _STAND_IN}
        rendered = self.render([{"role": "user", "content": "?"}, turn, *messages])
        _, found, behind = rendered.partition(_STAND_IN)
        if not found or not behind:
            raise ValueError(
                f"chat template of {self.directory}: it drops or changes what the assistant said before, so "
                "a "
                "rollout of several turns would be trained on other tokens than were sampled; choose "
                "another model or "
                "an environment of one turn"
            )
        ids = self.encode(behind)
        return ids[1:] if ids and ids[0] == last_id else ids

    def encode_as_said(self, text: str) -> list[int]:
        """Token ids of what another model said: what looks like a special token in it is text like any
        other.
        """
        return self._plain.encode(text, add_special_tokens=False).ids

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, nothing added."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of all ids, special tokens included.

        An id that the tokenizer has not (a model's head may be padded beyond it) shows as U+FFFD: left out,
        as the library would, a reward would be for a text that was not sampled.
        """
        known = [id_ if self._tokenizer.id_to_token(id_) is not None else None for id_ in token_ids]
        parts, run = list[str](), list[int]()
        for id_ in known:
            if id_ is not None:
                run.append(id_)
                continue
            parts += [self._tokenizer.decode(run, skip_special_tokens=False), "\ufffd"]
            run = []
        return "".join([*parts, self._tokenizer.decode(run, skip_special_tokens=False)])

    def completion_text(self, token_ids: Sequence[int], stop_token_id: int | None = None) -> str:
        """The text of sampled ids without the token that ended them (eos, or the given stop token).

        Only one trailing token goes: special tokens elsewhere were sampled as content and stay visible.
        """
        ids = list(token_ids)
        if ids and (ids[-1] == self.eos_token_id or ids[-1] == stop_token_id):
            ids.pop()
        return self.decode(ids)


_STAND_IN = "KEPTSET-TURN"

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: an object is expected")
    return value


def _token_text(value: Any) -> str | None:
    """A special token is written as its text or as {"content": text, ...}."""
    return value.get("content") if isinstance(value, dict) else value


def _find_template(directory: Path, config: dict[str, Any]) -> str:
    """As in transformers: chat_template.jinja before tokenizer_config.json; of named ones, "default"."""
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    if not isinstance(template, str):
        raise ValueError(
            f"{directory}: no chat template; add chat_template.jinja, or one to tokenizer_config.json"
        )
    return template


def _compile(template: str, directory: Path) -> jinja2.Template:
    """The environment that transformers renders chat templates in, so that both give the same text."""

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        # jinja's own filter escapes HTML characters
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    try:
        return environment.from_string(template)
    except jinja2.TemplateError as error:
        raise ValueError(f"chat template of {directory}: {error}") from error


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for transformers; it renders as its content."""

    tags = {"generation"}  # noqa: RUF012  (jinja's own way)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
