"""Where settings come from: TOML files, environment variables. Each becomes a nested dictionary."""

import json
import os
import tomllib
from collections.abc import Mapping
from datetime import date, datetime, time
from pathlib import Path as FilePath
from typing import Any

from pydantic_settings import BaseSettings, EnvSettingsSource

from .errors import SettingsError
from .run import RunSettings
from .schema import Path, annotation_at, is_open, is_structured

PREFIX = "KEPTSET_"
DELIMITER = "__"

Tree = dict[str, Any]


class _RunFromEnvironment(RunSettings, BaseSettings):  # type: ignore[misc]
    """RunSettings as pydantic-settings wants it in order to read the environment."""


def merge(*trees: Mapping[str, Any]) -> Tree:
    """Later trees win, key by key; lists are replaced as a whole."""
    merged: Tree = {}
    for tree in trees:
        for key, value in tree.items():
            below = merged.get(key)
            merged[key] = (
                merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
            )
    return merged


def read_toml(path: FilePath) -> Tree:
    """Read one file.

    Raises:
        SettingsError: it is missing, not readable or not TOML; the text names file and line.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SettingsError([f"{path}: no such file; give an existing one with --config"]) from None
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError([f"{path}: cannot be read: {error}"]) from None
    except tomllib.TOMLDecodeError as error:
        raise SettingsError([f"{path}: not TOML: {error}"]) from None


def parse_value(text: str) -> Any:
    """A value as TOML or JSON would write it; anything else is the text itself.

    >>> parse_value("512"), parse_value('{"head_dtype": "float32"}'), parse_value("float32")
    (512, {'head_dtype': 'float32'}, 'float32')
    """
    try:
        table = tomllib.loads(f"value = {text}")
        if table.keys() == {"value"} and not isinstance(table["value"], date | time | datetime):
            return table["value"]
    except tomllib.TOMLDecodeError:
        pass
    try:
        return json.loads(text)
    except ValueError:
        return text


def read_environment() -> Tree:
    """What the variables KEPTSET_... say: `__` between tables, lists and dictionaries as JSON; empty = not set."""
    values: Tree = EnvSettingsSource(
        _RunFromEnvironment,
        case_sensitive=False,
        env_prefix=PREFIX,
        env_nested_delimiter=DELIMITER,
        env_ignore_empty=True,
    )()
    for name in environment_names():
        first = name[len(PREFIX) :].split(DELIMITER)[0].lower()
        if first not in RunSettings.model_fields:
            values[first] = os.environ[name]  # pydantic-settings skips these; validation rejects them
    parsed = _parse_open(values, ())
    assert isinstance(parsed, dict)
    return parsed


def environment_names() -> list[str]:
    """The variables that are meant for us."""
    return sorted(name for name, text in os.environ.items() if name.upper().startswith(PREFIX) and text)


def _parse_open(value: Any, path: Path) -> Any:
    """Numbers and truth values inside vllm and extra_body come as text and are parsed here."""
    annotation = annotation_at(RunSettings, path)
    if isinstance(value, dict):
        return {key: _parse_open(below, (*path, key)) for key, below in value.items()}
    if isinstance(value, str) and (annotation is Any or (annotation and is_open(annotation))):
        return parse_value(value)
    return value


def assign(tree: Tree, path: tuple[str, ...], text: str) -> None:
    """Put the text of a command line option where it belongs."""
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    annotation = annotation_at(RunSettings, path)
    parse = annotation is Any or (annotation is not None and is_structured(annotation))
    tree[path[-1]] = parse_value(text) if parse else text
