"""TOML has types, so a file's values must have theirs; variables and options are text, and are parsed."""

from pathlib import Path as FilePath
from typing import Any

from pydantic import SecretStr

from .errors import Path, Problem
from .run import RunSettings
from .schema import alternatives, annotation_at

TRUTH = {
    **dict.fromkeys(("true", "t", "yes", "y", "on", "1"), "true"),
    **dict.fromkeys(("false", "f", "no", "n", "off", "0"), "false"),
}


def loose_types(tree: Any, origin: str, path: Path = ()) -> list[Problem]:
    """What pydantic would convert without a word: numbers and truths in quotes, 3.0 for 3, 1 for true."""
    if isinstance(tree, dict | list):
        below = tree.items() if isinstance(tree, dict) else enumerate(tree)
        return [problem for key, value in below for problem in loose_types(value, origin, (*path, key))]
    types = set(alternatives(annotation_at(RunSettings, path)))
    wanted = types & {int, float, bool}
    if not wanted or isinstance(tree, bool) or types & {str, SecretStr, FilePath}:
        return []
    way_out = _meant(tree, wanted)
    return [] if way_out is None else [Problem(path, way_out, tree, origin)]


def _meant(value: Any, wanted: set[type]) -> str | None:
    """How to write what was meant; None if it is of a type that fits, or if nothing is meant by it."""
    if isinstance(value, str):
        if bool in wanted and value.lower() in TRUTH:
            return f"is text; write {TRUTH[value.lower()]}, without quotes"
        return f"is text; write {value.strip()}, without quotes" if _is_number(value, wanted) else None
    if wanted == {bool} and value in (0, 1):
        return f"is a number; write {'true' if value else 'false'}"
    if isinstance(value, float) and float not in wanted and value.is_integer():
        return f"has a decimal point; write {int(value)}"
    return None


def _is_number(text: str, wanted: set[type]) -> bool:
    try:
        number = float(text)
    except ValueError:
        return False
    return float in wanted or (int in wanted and number.is_integer())
