"""Filters of rollouts: what is flagged, and whether it is trained on all the same."""

from typing import Annotated, Literal

from pydantic import Field

from .base import Table


class _Filter(Table):
    enforce: bool = True
    """Leave flagged rollouts out of the batch; false only counts them."""


class GibberishFilter(_Filter):
    """Flags a rollout with a rare token that was unlikely, too (CWM, arXiv 2510.02387, section 5.2)."""

    kind: Literal["gibberish"] = "gibberish"
    """Which filter."""
    min_token_id: int = Field(default=100_000, ge=0)
    """Ids from here on are rare: a BPE vocabulary is in the order of its merges."""
    margin: float = Field(default=2.0, ge=0)
    """Unlikely is a logprob below -log(vocabulary size) - margin."""


class RepetitionFilter(_Filter):
    """Flags a rollout that goes round in circles (MiniMax-M1, arXiv 2506.13585, section 3.2)."""

    kind: Literal["repetition"] = "repetition"
    """Which filter."""
    window: int = Field(default=3000, ge=1)
    """So many consecutive tokens that are all likelier than `probability`."""
    probability: float = Field(default=0.99, gt=0, lt=1)
    """Of a token, over the whole vocabulary."""


class ZeroAdvantageFilter(_Filter):
    """Flags a rollout that moves nothing: all its advantages are 0."""

    kind: Literal["zero_advantage"] = "zero_advantage"
    """Which filter."""


Filter = Annotated[GibberishFilter | RepetitionFilter | ZeroAdvantageFilter, Field(discriminator="kind")]


def default_filters() -> list[Filter]:
    """What a source gets that says nothing of filters; it only counts."""
    return [GibberishFilter(enforce=False), RepetitionFilter(enforce=False)]
