"""Tables that come in kinds, as `[trainer.loss]`: a source that names another kind starts the table anew."""

from collections.abc import Callable, Mapping
from typing import Any

from .errors import Path, Problem
from .run import RunSettings
from .schema import annotation_at, kind_of, tables


def leave_kinds(
    earlier: dict[str, Any],
    later: Mapping[str, Any],
    named_by: Callable[[Path], str | None],
    set_by: Callable[[Path], str | None],
) -> list[Problem]:
    """Take out of `earlier` the keys of each kind that `later` replaces by another; a note for each table.

    They are all taken, those of the same name too: what bounds a geometric mean would be a wrong bound of a
    product. A kind that does not exist replaces nothing: it is refused as a whole.

    Args:
        earlier: what the sources that lose say together; changed in place.
        later: what the source that wins says.
        named_by: which option, variable or file said so, of the paths of `later`.
        set_by: the same of the paths of `earlier`.
    """
    notes = []

    def visit(old: dict[str, Any], new: Mapping[str, Any], path: Path) -> None:
        kinds = [kind_of(table) for table in tables(annotation_at(RunSettings, path))]
        was, becomes = old.get("kind"), new.get("kind")
        if len(kinds) > 1 and was != becomes and was in kinds and becomes in kinds:
            dropped = {key: set_by((*path, key)) for key in old if key != "kind"}
            if dropped:
                where = (*path, "kind")
                notes.append(Problem(where, _told(was, dropped), becomes, named_by(where)))
            old.clear()
            return
        for key, below in new.items():
            if isinstance(below, Mapping) and isinstance(old.get(key), dict):
                visit(old[key], below, (*path, key))

    visit(earlier, later, ())
    return notes


def _told(was: str | None, dropped: Mapping[str, str | None]) -> str:
    """What is left out, and how to have it back."""
    said = ", ".join(f"{key} (from {origin})" for key, origin in dropped.items())
    return (
        f"takes the place of {was}, so what was said of that kind is left out: {said}; say again, beside the "
        "kind, what shall hold for this one"
    )
