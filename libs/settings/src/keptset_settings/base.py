"""What every table of settings shares: unknown keys are errors, docstrings are the help text."""

import re
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict


class Table(BaseModel):
    """One TOML table."""

    model_config = ConfigDict(
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,  # it may be a secret
    )


def _name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise ValueError(
            "must be letters, digits, dots, dashes and underscores, beginning with a letter or digit"
        )
    return name


Name = Annotated[str, AfterValidator(_name)]
"""Text that may name a directory or a metric."""

OFF = BeforeValidator(lambda value: None if value == "off" else value)
"""Marks a setting that is "off" in TOML, which has no null, and None in Python."""


def _base_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError('must be a base URL such as "http://127.0.0.1:8000"')
    if parts.username is not None or parts.password is not None:
        raise ValueError("must not carry a password; there is a setting for the API key")
    return url.rstrip("/")


Transfer = Literal["files", "nccl"]
"""How weights get from the trainer to inference."""

BaseUrl = Annotated[str, AfterValidator(_base_url)]
"""http(s) URL that routes are appended to; a trailing slash makes no difference."""


def require_order(low: Any, low_name: str, high: Any, high_name: str, strict: bool = False) -> None:
    """Raise ValueError unless low <= high (low < high if strict)."""
    if low > high or (strict and low == high):
        relation = "must be less than" if strict else "is more than"
        way_out = f"raise {high_name} or lower {low_name}"
        raise ValueError(f"{low_name} = {low} {relation} {high_name} = {high}; {way_out}")


def require_band(low: float, high: float) -> None:
    """Raise ValueError unless low < high and low <= 1 <= high: bounds of a ratio that is 1 on policy."""
    require_order(low, "low", high, "high", strict=True)
    if not low <= 1 <= high:
        wrong = f"low = {low}" if low > 1 else f"high = {high}"
        way_out = "lower low to 1 or less" if low > 1 else "raise high to 1 or more"
        raise ValueError(
            f"{wrong} keeps out the ratio 1, which is every ratio at unchanged weights: every sequence would "
            f"be rejected; {way_out}"
        )
