"""Settings back into TOML, without secrets."""

from pathlib import PurePath
from typing import Any

import tomli_w
from pydantic import SecretStr

from .base import Table


def plain(value: Any) -> Any:
    """Tables, paths and tuples as what TOML has; unset values and secrets are left out."""
    if isinstance(value, Table):
        value = {name: getattr(value, name) for name in type(value).model_fields}
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items() if v is not None and not isinstance(v, SecretStr)}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, PurePath):
        return value.as_posix()
    return value


def to_toml(settings: Table, table: str | None = None) -> str:
    """TOML that loads to equal settings (but for secrets, which are left out).

    With `table`, everything is put below that table: `to_toml(run.inference, "inference")`.
    """
    content = plain(settings)
    return tomli_w.dumps({table: content} if table else content, multiline_strings=False)
