"""Turns what pydantic says into lines that users can act on."""

import re
from collections.abc import Iterable
from typing import Any

from pydantic import ValidationError

from .errors import UNSET, Path, Problem, written
from .run import RunSettings
from .schema import (
    MISSING,
    alternatives,
    annotation_at,
    child,
    field_at,
    is_secret,
    kind_of,
    settings,
    tables,
)
from .suggest import nearest, suggestion


def explain(error: ValidationError, tree: dict[str, Any]) -> list[Problem]:
    """A problem for each field that is wrong in `tree`, which was validated as a RunSettings."""
    problems: dict[Path, Problem] = {}
    for found in error.errors(include_url=False):
        path, kind = _keys_only(found["loc"], tree), found["type"]
        what, value = _reworded(found["msg"]), found["input"]
        field = field_at(RunSettings, path)
        if field is not None and is_secret(field.annotation):
            value, what = UNSET, "must be text (the value is not shown)"
        if kind == "extra_forbidden":
            problems.setdefault(
                path, unknown_key(path, known_keys(path[:-1], tree), kind=_chosen_kind(path[:-1], tree))
            )
        elif kind == "union_tag_not_found":
            problems[path] = Problem(
                path, f"kind: missing; say which: {', '.join(_kinds(path))}", whole_table=True
            )
            for key in found["input"].keys() - set(known_keys(path)):
                problems[(*path, key)] = unknown_key((*path, key), known_keys(path))
        elif kind == "union_tag_invalid":
            tag = str(found["ctx"]["tag"])
            problems[path] = Problem((*path, "kind"), f"unknown kind, {suggestion(tag, _kinds(path))}", tag)
        elif kind == "value_error" and tables(annotation_at(RunSettings, path)):
            problems[path] = Problem(path, what, whole_table=True)
        elif path in problems:
            problems[path] = Problem(path, f"{problems[path].text}; or {what}", value)
        else:
            problems[path] = Problem(path, what, value)
    return list(problems.values())


def truth_for_number(tree: Any, path: Path = ()) -> list[Problem]:
    """Truth values where a number belongs, which pydantic reads as 0 and 1."""
    if isinstance(tree, dict | list):
        below = tree.items() if isinstance(tree, dict) else enumerate(tree)
        return [problem for key, value in below for problem in truth_for_number(value, (*path, key))]
    types = set(alternatives(annotation_at(RunSettings, path)))
    if not isinstance(tree, bool) or bool in types or not types & {int, float}:
        return []
    return [Problem(path, "must be a number", tree)]


def unknown_key(
    path: Path, known: Iterable[str], origin: str | None = None, kind: str | None = None
) -> Problem:
    """A key that does not exist (in a table of this kind): the nearest that do, or where it does exist."""
    key, known, of_kind = str(path[-1]), list(known), f" of kind {kind}" if kind else ""
    elsewhere = list(dict.fromkeys(written(s.path) for s in settings(RunSettings) if s.path[-1] == key))
    if elsewhere and not kind and not nearest(key, known, cutoff=0.8):
        return Problem(path, f"unknown key here, there is {' and '.join(elsewhere)}", origin=origin)
    return Problem(path, f"unknown key{of_kind}, {suggestion(key, known)}", origin=origin)


def known_keys(table: Path, tree: Any = None) -> list[str]:
    """The keys of a table; where it comes in kinds, of the kind that `tree` chose, or of all."""
    choices, kind = tables(annotation_at(RunSettings, table)), _chosen_kind(table, tree)
    return [name for t in choices if kind in (None, kind_of(t)) for name in t.model_fields]


def _chosen_kind(table: Path, tree: Any) -> str | None:
    """The kind that `tree` chose for a table that comes in several, if it exists."""
    for key in table:
        tree = child(tree, key)
    kinds, kind = _kinds(table), child(tree, "kind")
    return kind if len(kinds) > 1 and kind in kinds else None


def _reworded(message: str) -> str:
    for old, new in _PLAIN_WORDS:
        message = message.replace(old, new)
    return _FOR_PROGRAMMERS.sub("", message)


_FOR_PROGRAMMERS = re.compile(
    r", unable to .*|, got a number with a fractional part| after validation, not \d+"
    r"| or instance of \w+"  # a class of Python's
)


_PLAIN_WORDS = (
    ("Field required", "missing; it has no default"),
    ("Input should", "must"),
    ("List should", "must"),
    ("Value error, ", ""),
    ("a valid integer", "a whole number"),
    ("a valid number", "a number"),
    ("a valid string", "text"),
    ("a valid boolean", "true or false"),
    ("a valid list", "a list"),
    ("a valid tuple", "a list"),
    ("a valid dictionary or object to extract fields from", "a table"),
    ("a valid dictionary", "a table"),
)


def _kinds(path: Path) -> list[str]:
    return [str(kind_of(t)) for t in tables(annotation_at(RunSettings, path))]


def _keys_only(loc: tuple[int | str, ...], tree: Any) -> Path:
    """Pydantic's location without the names of union members, which are no keys."""
    path: Path = ()
    for key in loc:
        below = child(tree, key)
        if below is not MISSING or annotation_at(RunSettings, (*path, key)) is not None:
            path, tree = (*path, key), below
    return path
