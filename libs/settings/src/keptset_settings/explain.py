"""Turns what pydantic says into lines that users can act on."""

import difflib
from typing import Any

from pydantic import ValidationError

from .run import RunSettings
from .schema import Path, annotation_at, field_at, is_secret, tables, written


def nearest(key: str, known: list[str]) -> list[str]:
    """The known keys that may have been meant, best first."""
    return difflib.get_close_matches(key, known, n=2, cutoff=0.5)


def unknown_key(path: Path, known: list[str]) -> str:
    """The line for a key that does not exist."""
    found = nearest(str(path[-1]), known)
    hint = f"did you mean {' or '.join(found)}?" if found else f"known here: {', '.join(sorted(known))}"
    return f"{written(path)}: unknown key, {hint}"


def explain(error: ValidationError, tree: dict[str, Any]) -> list[str]:
    """One line for each field that is wrong."""
    lines: dict[Path, str] = {}
    for problem in error.errors(include_url=False):
        path = _in_tree(problem["loc"], tree)
        if problem["type"] == "extra_forbidden":
            known = [n for t in tables(annotation_at(RunSettings, path[:-1])) for n in t.model_fields]
            lines.setdefault(path, unknown_key(path, known))
            continue
        field = field_at(RunSettings, path)
        shown = "***" if field and is_secret(field.annotation) else repr(problem["input"])
        what = problem["msg"].replace("Input should be", "must be").removeprefix("Value error, ")
        if path in lines:
            lines[path] += f"; or {what}"
        else:
            lines[path] = f"{written(path) if path else 'settings'} = {shown}: {what}"
    return list(lines.values())


def _in_tree(loc: tuple[int | str, ...], tree: Any) -> Path:
    """Pydantic's location without the names of union members, which are no keys."""
    path: Path = ()
    for key in loc:
        if (isinstance(tree, dict) and key in tree) or (
            isinstance(tree, list) and isinstance(key, int) and key < len(tree)
        ):
            tree = tree[key]
        elif annotation_at(RunSettings, (*path, key)) is None:
            continue
        else:
            tree = None
        path = (*path, key)
    return path
