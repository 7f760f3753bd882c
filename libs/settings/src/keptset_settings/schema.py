"""Walks the tables: what is under a path, and of which type."""

import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import SecretStr
from pydantic.fields import FieldInfo

from .base import Table
from .errors import Path


def alternatives(annotation: Any) -> list[Any]:
    """The members of a union, without Annotated; the annotation itself if it is none."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return alternatives(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return [found for member in get_args(annotation) for found in alternatives(member)]
    return [annotation]


def tables(annotation: Any) -> list[type[Table]]:
    """The tables that a value of this type can be, without those in lists."""
    return [t for t in alternatives(annotation) if isinstance(t, type) and issubclass(t, Table)]


def item_type(annotation: Any) -> Any:
    """The type of the items of a list or tuple, None if it is neither."""
    for member in alternatives(annotation):
        if get_origin(member) in (list, tuple):
            return get_args(member)[0]
    return None


def is_open(annotation: Any) -> bool:
    """Is it a dictionary whose keys are somebody else's (vllm, extra_body)?"""
    return any(get_origin(member) is dict for member in alternatives(annotation))


def is_structured(annotation: Any) -> bool:
    """Does its text form need TOML or JSON, being more than one scalar?"""
    return any(
        get_origin(member) in (list, dict, tuple) or (isinstance(member, type) and issubclass(member, Table))
        for member in alternatives(annotation)
    )


def is_secret(annotation: Any) -> bool:
    """Must its value never be shown?"""
    return SecretStr in alternatives(annotation)


def field_at(root: Any, path: Path) -> FieldInfo | None:
    """The field under a path, None if there is none or if the path leads into an open dictionary."""
    field: FieldInfo | None = None
    for key in path:
        if isinstance(key, int):
            root, field = item_type(root), None
            continue
        field = next((t.model_fields[key] for t in tables(root) if key in t.model_fields), None)
        root = None if field is None else field.annotation
    return field


def annotation_at(root: Any, path: Path) -> Any:
    """The type under a path; None if there is none; Any inside an open dictionary."""
    annotation = root
    for key in path:
        if annotation is Any or is_open(annotation):
            return Any
        if isinstance(key, int):
            annotation = item_type(annotation)
        else:
            field = next((t.model_fields[key] for t in tables(annotation) if key in t.model_fields), None)
            annotation = None if field is None else field.annotation
        if annotation is None:
            return None
    return annotation


MISSING = object()


def child(tree: Any, key: str | int) -> Any:
    """What a nested dictionary or list holds under a key, else MISSING."""
    if isinstance(key, str):
        return tree.get(key, MISSING) if isinstance(tree, dict) else MISSING
    return tree[key] if isinstance(tree, list) and key < len(tree) else MISSING


def has_null(value: Any) -> bool:
    """Is there a None in it?"""
    if isinstance(value, dict):
        return any(map(has_null, value.values()))
    return any(map(has_null, value)) if isinstance(value, list) else value is None


def kind_of(table: type[Table]) -> str | None:
    """The value of `kind` that chooses this table, if it comes in kinds."""
    return table.model_fields["kind"].default if "kind" in table.model_fields else None


@dataclass(frozen=True)
class Setting:
    """One setting that a user can write down."""

    path: tuple[str, ...]
    field: FieldInfo

    variant: str | None = None
    """The `kind` of the table that it belongs to, where there is a choice."""

    choices: tuple[str, ...] = ()
    """For the key `kind` of tables that come in several: what there is."""


def settings(root: type[Table], path: tuple[str, ...] = (), variant: str | None = None) -> Iterator[Setting]:
    """All settings under a table, depth first in the order of the schema; lists of tables as `name[]`."""
    for name, field in root.model_fields.items():
        if variant is not None and name == "kind":
            continue
        here = (*path, name)
        inner = tables(field.annotation)
        if not inner and (item := item_type(field.annotation)) is not None:
            inner = tables(item)
            here = (*path, name + "[]") if inner else here
        if not inner:
            yield Setting(here, field, variant)
        if len(inner) > 1:
            first, kinds = inner[0].model_fields["kind"], tuple(str(kind_of(table)) for table in inner)
            yield Setting((*here, "kind"), first, choices=kinds)
        for table in inner:
            yield from settings(table, here, kind_of(table) if len(inner) > 1 else None)
