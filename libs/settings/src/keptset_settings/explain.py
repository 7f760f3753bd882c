"""Turns what pydantic says into lines that users can act on."""

from collections.abc import Iterable
from typing import Any

from pydantic import ValidationError

from .errors import UNSET, Path, Problem, written
from .run import RunSettings
from .schema import MISSING, annotation_at, child, field_at, is_secret, kind_of, settings, tables
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
        elif isinstance(value, dict):
            value = UNSET
        if kind == "extra_forbidden":
            problems.setdefault(path, unknown_key(path, known_keys(path[:-1], tree)))
        elif kind == "union_tag_not_found":
            problems[path] = Problem((*path, "kind"), f"missing; say which: {', '.join(_kinds(path))}")
        elif kind == "union_tag_invalid":
            tag = str(found["ctx"]["tag"])
            problems[path] = Problem((*path, "kind"), f"unknown kind, {suggestion(tag, _kinds(path))}", tag)
        elif path in problems:
            problems[path] = Problem(path, f"{problems[path].text}; or {what}", value)
        else:
            problems[path] = Problem(path, what, value)
    return list(problems.values())


def unknown_key(path: Path, known: Iterable[str], origin: str | None = None) -> Problem:
    """A key that does not exist: the nearest that do, or the tables in which it does."""
    key, known = str(path[-1]), list(known)
    elsewhere = list(dict.fromkeys(written(s.path) for s in settings(RunSettings) if s.path[-1] == key))
    if elsewhere and not nearest(key, known):
        return Problem(path, f"unknown key here, there is {' and '.join(elsewhere)}", origin=origin)
    return Problem(path, f"unknown key, {suggestion(key, known)}", origin=origin)


def known_keys(table: Path, tree: Any = None) -> list[str]:
    """The keys of a table; where it comes in kinds, of the kind that `tree` chose, or of all."""
    for key in table:
        tree = child(tree, key)
    kind = child(tree, "kind")
    choices = tables(annotation_at(RunSettings, table))
    chosen = [t for t in choices if kind_of(t) == kind]
    return [name for t in chosen or choices for name in t.model_fields]


def _reworded(message: str) -> str:
    for old, new in (("Input should be", "must be"), ("String should", "must"), ("Value error, ", "")):
        message = message.replace(old, new)
    return message.replace("must be a valid", "must be a")


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
