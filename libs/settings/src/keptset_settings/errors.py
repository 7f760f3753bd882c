"""Errors and warnings of this library: one line for each problem, with the field as users write it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

Path = tuple[str | int, ...]


def written(path: Path) -> str:
    """A path as users write it: `[orchestrator.train.source[0].sampling] top_p`."""
    last = max((n for n, key in enumerate(path) if isinstance(key, str)), default=0)
    parts = [f"[{key}]" if isinstance(key, int) else f".{key}" for key in path]
    table, name = "".join(parts[:last]), "".join(parts[last:])
    return f"[{table[1:]}] {name[1:]}" if table else name[1:]


class _Unset:
    def __repr__(self) -> str:
        return "unset"


UNSET = _Unset()


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with one setting."""

    path: Path
    """Where; empty if it is about no setting in particular."""

    text: str
    """What is wrong, and the way out."""

    value: Any = field(default=UNSET)
    """The value, if showing it helps."""

    origin: str | None = None
    """The variable, option or file that said so, if known."""

    whole_table: bool = False
    """The path is a table's, and the text names its keys."""

    def __str__(self) -> str:
        """The line that the user reads."""
        shown = f" = {_toml_like(self.value)}" if _is_showable(self.value) else ""
        place = f"{written(self.path)}{shown}: " if self.path else ""
        if self.whole_table:
            place = written((*self.path, ""))
        return f"{place}{self.text}{f' (from {self.origin})' if self.origin else ''}"


class SettingsError(ValueError):
    """Settings that cannot be used; the text has a line for each problem."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        distinct = {str(problem): problem for problem in problems}
        self.problems = list(distinct.values())
        super().__init__("\n".join(distinct))

    def with_origins(self, origin: Callable[[Path], str | None]) -> "SettingsError":
        """The same, each problem saying which variable, option or file it comes from."""
        return SettingsError([replace(p, origin=p.origin or origin(p.path)) for p in self.problems])


class SettingsWarning(UserWarning):
    """Something was decided for the user that could be written down instead."""


def _is_showable(value: Any) -> bool:
    """Scalars and lists of them, unless it may hold a secret: tables, URLs with a password."""
    if isinstance(value, list | tuple):
        return all(map(_is_showable, value))
    return isinstance(value, bool | int | float) or (
        isinstance(value, str) and not ("://" in value and "@" in value)
    )


def _toml_like(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    text = f'"{value}"' if isinstance(value, str) else repr(value)
    return text if len(text) <= 200 else text[:197] + "..."
