"""The settings as text: for --help, and as the Markdown table of the README."""

import textwrap
from typing import Any, Literal, get_args, get_origin

from pydantic import SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from .base import OFF
from .run import RunSettings
from .schema import Setting, alternatives, settings
from .toml import to_plain, variable

_NAMES: dict[Any, str] = {
    int: "whole number",
    float: "number",
    str: "text",
    bool: "true or false",
    SecretStr: "secret",
}
_BOUNDS = ("ge", "gt", "le", "lt")


def help_text(command: str, service: str | None) -> str:
    """What `COMMAND --help` prints."""
    usage = f"usage: {command} [--config FILE.toml] [--dry-run] [--key value ...]"
    what = f"the table [{service}] or a whole run" if service else "a whole run"
    if service is None:
        usage = f"usage: {command} run FILE.toml ... [--dry-run] [--key value ...]"
    lines = [
        usage,
        "",
        "Settings come from options, else environment variables, else TOML files, else defaults.",
        f"A file holds {what}. Elsewhere lists and tables are JSON.",
        "",
        "  --config FILE.toml  read a file; of several, later ones win",
        "  --dry-run           print the resolved settings as TOML and exit",
        "  --help, --version",
        "",
        "Names may be written with - or _; --key=value is the same as --key value.",
    ]
    return "\n".join(lines) + "\n" + settings_help(service)


def settings_help(service: str | None) -> str:
    """Every setting of a service, or of a whole run, with its meaning, type, default and variable."""
    root = () if service is None else (service,)
    lines: list[str] = []
    table: tuple[str, ...] | None = None
    for setting in settings(RunSettings):
        if setting.path[: len(root)] != root:
            continue
        if setting.path[:-1] != table:
            table = setting.path[:-1]
            lines += ["", f"[{'.'.join(table)}]" if table else "top level"]
        lines += _help_of(setting, len(root))
    return "\n".join(lines) + "\n"


def settings_table() -> str:
    """All settings as a Markdown table: path, type, default, meaning."""
    rows = ["| setting | type | default | meaning |", "|---|---|---|---|"]
    for s in settings(RunSettings):
        kind = f" ({s.variant})" if s.variant else ""
        cells = (f"`{'.'.join(s.path)}`{kind}", _type_of(s), default_text(s.field), meaning(s.field))
        rows.append("| " + " | ".join(map(_cell, cells)) + " |")
    return "\n".join(rows) + "\n"


def type_text(field: FieldInfo) -> str:
    """What may be written, in words: `whole number, 0 to 65535`."""
    members = [m for m in alternatives(field.annotation) if m is not type(None)]
    text = " or ".join(_type(member) for member in members) + (' or "off"' if OFF in field.metadata else "")
    bounds = {name: getattr(m, name) for m in field.metadata for name in _BOUNDS if hasattr(m, name)}
    low = bounds.get("ge", bounds.get("gt"))
    high = bounds.get("le", bounds.get("lt"))
    if "ge" in bounds and "le" in bounds:
        return f"{text}, {low} to {high}"
    parts = [f"at least {low}"] if "ge" in bounds else [f"above {low}"] if "gt" in bounds else []
    parts += [f"at most {high}"] if "le" in bounds else [f"below {high}"] if "lt" in bounds else []
    return ", ".join([text, " and ".join(parts)] if parts else [text])


def default_text(field: FieldInfo) -> str:
    """The default as TOML would write it; `unset` if there is none."""
    default = field.get_default(call_default_factory=True)
    return "unset" if default is None or default is PydanticUndefined else f"`{_toml(to_plain(default))}`"


def meaning(field: FieldInfo) -> str:
    """The docstring in one line."""
    return " ".join((field.description or "").split())


def _cell(text: str) -> str:
    """Markdown that shows the text as it is: `<name>` outside of code would vanish as a tag."""
    parts = text.replace("|", "\\|").split("`")
    return "`".join(part if number % 2 else part.replace("<", "\\<") for number, part in enumerate(parts))


def _type_of(setting: Setting) -> str:
    return " or ".join(map(_toml, setting.choices)) or type_text(setting.field)


def _type(annotation: Any) -> str:
    origin = get_origin(annotation)
    if origin is Literal:
        return " or ".join(_toml(value) for value in get_args(annotation))
    if origin is list:
        return f"list of {' or '.join(map(_type, alternatives(get_args(annotation)[0])))}"
    if origin is tuple:
        return f"list of {len(get_args(annotation))} numbers"
    if origin is dict:
        return "table"
    return _NAMES.get(annotation, "path")


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return str(value)


def _help_of(setting: Setting, skip: int) -> list[str]:
    field, path = setting.field, setting.path
    details = [_type_of(setting), f"default {default_text(field).strip('`')}"]
    if setting.variant:
        details.insert(0, f"for kind = {setting.variant}")
    if any(key.endswith("[]") for key in path):  # inside a list of tables: no option or variable reaches it
        head = f"  {path[-1]}"
    else:
        head = f"  --{'.'.join(path[skip:]).replace('_', '-')}"
        details.append(variable(path))
    indent = " " * 6
    return [head, *_wrap(meaning(field), indent), *_wrap("; ".join(details), indent)]


def _wrap(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, 100, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
