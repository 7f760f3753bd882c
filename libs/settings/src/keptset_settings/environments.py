"""Environments of `[[orchestrator.train.source]]` and `[[orchestrator.eval.source]]`: what is asked."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from .base import Table, require_order


class ReverseTextSettings(Table):
    """Reverse a random string of letters; the reward is the similarity to the reversed text."""

    kind: Literal["reverse-text"] = "reverse-text"
    """Which environment."""
    min_letters: int = Field(default=4, ge=1)
    """Fewest letters of a string."""
    max_letters: int = Field(default=12, ge=1)
    """Most letters of a string."""

    @model_validator(mode="after")
    def _letters(self) -> Self:
        require_order(self.min_letters, "min_letters", self.max_letters, "max_letters")
        return self


class ArithmeticSettings(Table):
    """Add two random numbers so that a digit carries; the reward is 1 for the sum, else 0."""

    kind: Literal["arithmetic"] = "arithmetic"
    """Which environment."""
    min_digits: int = Field(default=1, ge=1, le=100)
    """Fewest digits of the numbers."""
    max_digits: int = Field(default=4, ge=1, le=100)
    """Most digits of the numbers."""
    grow_every: int = Field(default=0, ge=0)
    """Examples until the numbers get a digit longer, from min_digits on. 0: any length from the start."""

    @model_validator(mode="after")
    def _digits(self) -> Self:
        require_order(self.min_digits, "min_digits", self.max_digits, "max_digits")
        return self


class SumsSettings(Table):
    """Write a list of additions again with their results; the reward is the share of them that are right."""

    kind: Literal["sums"] = "sums"
    """Which environment."""
    count: int = Field(default=8, ge=1, le=1000)
    """Additions in a prompt."""
    min_digits: int = Field(default=1, ge=1, le=100)
    """Fewest digits of the numbers."""
    max_digits: int = Field(default=2, ge=1, le=100)
    """Most digits of the numbers."""

    @model_validator(mode="after")
    def _digits(self) -> Self:
        require_order(self.min_digits, "min_digits", self.max_digits, "max_digits")
        return self


class WordProblemsSettings(Table):
    """Generated word problems whose answer is a number; the reward is 1 if the last number said is right."""

    kind: Literal["word-problems"] = "word-problems"
    """Which environment."""
    max_number: int = Field(default=20, ge=2)
    """The largest number in a problem."""


class CalculatorSettings(Table):
    """Evaluate an expression over several turns, with a calculator that answers `<calc>3*4</calc>`."""

    kind: Literal["calculator"] = "calculator"
    """Which environment."""
    terms: int = Field(default=3, ge=2, le=20)
    """Numbers in an expression."""
    max_number: int = Field(default=99, ge=1)
    """The largest of them."""
    max_turns: int = Field(default=4, ge=1)
    """Turns of the policy; the last one gets no answer of the calculator."""


EnvironmentSettings = Annotated[
    ReverseTextSettings | ArithmeticSettings | SumsSettings | WordProblemsSettings | CalculatorSettings,
    Field(discriminator="kind"),
]
