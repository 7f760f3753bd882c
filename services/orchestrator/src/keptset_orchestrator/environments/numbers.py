"""Numbers in text: what an answer comes to."""

import re
from fractions import Fraction

_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:,\d{3})*(?:\.\d+)?(?![\w])", re.ASCII)
_MINUS = "\u2212"
"""The minus of typeset mathematics, which models write too."""

LONGEST = 1000
"""Characters of a number that could be an answer; Python converts no more than 4300 digits."""


def last_number(text: str) -> Fraction | None:
    """The last number in a text, exactly; None if there is none, or none of at most 1000 characters.

    >>> last_number("3 times 4 is 12."), last_number("1,250.5 or so"), last_number("none")
    (Fraction(12, 1), Fraction(2501, 2), None)
    """
    found = _NUMBER.findall(text.replace(_MINUS, "-"))
    return Fraction(found[-1].replace(",", "")) if found and len(found[-1]) <= LONGEST else None
