"""The few shapes that rows are filled up to, so that what is recorded for one of them serves many rows."""

from dataclasses import dataclass, replace
from typing import TypeVar

import torch
import torch.nn.functional as F

from .micro_batch import Sequences

Row = TypeVar("Row", bound=Sequences)

SMALLEST = 128
"""Tokens; what a row is filled up to is a multiple of it."""
STEPS = 8
"""Numbers of tokens between one power of two and the next: at most an eighth of a row is filling."""


@dataclass(frozen=True)
class Layout:
    """What the body's shapes follow from."""

    tokens: int
    sequences: int
    longest: int
    """No sequence is longer."""

    @property
    def is_batch(self) -> bool:
        """Whether all sequences are equally long: attention takes such rows for batches."""
        return self.tokens == self.sequences * self.longest

    @classmethod
    def exactly(cls, row: Sequences) -> "Layout":
        """That of a row as it is."""
        return cls(len(row.token_ids), len(row.borders) - 1, row.longest)

    @classmethod
    def around(cls, row: Sequences) -> "Layout":
        """The smallest of the few that holds `row`.

        A row of equally long sequences that needs no more tokens stays what it is.
        """
        exact = cls.exactly(row)
        tokens = with_steps(exact.tokens)
        if exact.is_batch and tokens == exact.tokens:
            return exact
        filling = tokens - exact.tokens
        longest = power_of_two(max(SMALLEST, exact.longest, filling))
        sequences = power_of_two(exact.sequences + (filling > 0))
        around = cls(tokens, sequences, min(longest, tokens))
        # no batch, though its numbers may look like one
        return replace(around, sequences=sequences + 1) if around.is_batch else around


def filled(row: Row, layout: Layout) -> Row:
    """`row` with tokens behind its last sequence, and sequences behind the last one, up to `layout`.

    The tokens are one more sequence, from which nothing is predicted; all further ones are empty. What
    belongs to the row's own sequences and labels stays as it is.
    """
    more = layout.tokens - len(row.token_ids)
    return replace(
        row,
        token_ids=torch.cat([row.token_ids, row.token_ids[:1].expand(more)]),
        positions=torch.cat([row.positions, torch.arange(more)]),
        borders=F.pad(row.borders, (0, layout.sequences + 1 - len(row.borders)), value=layout.tokens),
        longest=layout.longest,
    )


def power_of_two(number: int) -> int:
    """The smallest that is not less."""
    return 1 << (number - 1).bit_length()


def with_steps(tokens: int) -> int:
    """The smallest multiple of SMALLEST that is not less and one of STEPS in its octave."""
    step = max(SMALLEST, power_of_two(tokens) // 2 // STEPS)
    return -(-tokens // step) * step
