"""Who generates the rollouts of a source, and endpoints that are not ours."""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from .base import BaseUrl, Table


def _variable(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or name.upper().startswith("KEPTSET_"):
        raise ValueError(
            "must be the name of an environment variable, such as TEACHER_API_KEY; not the key itself, and "
            "not KEPTSET_..., which are settings"
        )
    return name


class EndpointSettings(Table):
    """A model behind an OpenAI-compatible API that Keptset neither starts nor updates."""

    url: BaseUrl
    """Base URL as OpenAI's clients take it, mostly ending in /v1."""
    model: str
    """Name of the model there."""
    api_key_env: Annotated[str, AfterValidator(_variable)] | None = None
    """Name of the environment variable with the API key. Unset: none is sent."""


class PolicyGenerator(Table):
    """The model that is trained, through the inference servers."""

    kind: Literal["policy"] = "policy"
    """Who generates."""


class FrozenGenerator(EndpointSettings):
    """Another model, through /chat/completions; its text is tokenised here, for the cross-entropy."""

    kind: Literal["frozen"] = "frozen"
    """Who generates."""
    send_seed: bool = True
    """Send a seed with each request; false for an endpoint that refuses one. No run then repeats another."""


Generator = Annotated[PolicyGenerator | FrozenGenerator, Field(discriminator="kind")]
