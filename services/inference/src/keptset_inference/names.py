"""Names that do not exist: what may have been meant."""

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str], otherwise: str | None = None) -> str:
    """The end of a sentence about an unknown name: the nearest known ones, or else all of them."""
    names = sorted(known)
    found = difflib.get_close_matches(name, names, n=2, cutoff=0.5)
    if found:
        return f"did you mean {' or '.join(found)}?"
    return otherwise or f"known here: {', '.join(names)}"


__all__ = ["did_you_mean"]
