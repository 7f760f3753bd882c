"""Numbers in text: what an answer comes to."""

import re
from fractions import Fraction

_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:,\d{3})*(?:\.\d+)?(?![\w])", re.ASCII)


def last_number(text: str) -> Fraction | None:
    """The last number in a text, exactly; None if there is none.

    >>> last_number("3 times 4 is 12."), last_number("1,250.5 or so"), last_number("none")
    (Fraction(12, 1), Fraction(2501, 2), None)
    """
    found = _NUMBER.findall(text)
    return Fraction(found[-1].replace(",", "")) if found else None
