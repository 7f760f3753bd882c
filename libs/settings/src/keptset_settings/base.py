"""What every table of settings shares: unknown keys are errors, docstrings are the help text."""

from pydantic import BaseModel, ConfigDict


class Table(BaseModel):
    """One TOML table."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, validate_default=True)
