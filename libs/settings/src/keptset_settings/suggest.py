"""Which key was probably meant."""

import difflib
from collections.abc import Iterable


def nearest(key: str, known: Iterable[str], cutoff: float = 0.5) -> list[str]:
    """The known keys that are most similar, best first, with those nearly as similar; empty if none is near.

    `cutoff` is the least similarity, 0 to 1, as difflib.SequenceMatcher.ratio has it.

    >>> nearest("top_pp", ["top_p", "top_k", "seed"])
    ['top_p']
    """
    scored = [(difflib.SequenceMatcher(None, key, name).ratio(), name) for name in set(known)]
    scored.sort(key=lambda pair: (-pair[0], pair[1]))
    bound = max(cutoff, scored[0][0] - 0.05) if scored else 0.0
    return [name for ratio, name in scored[:3] if ratio >= bound]


def suggestion(key: str, known: Iterable[str]) -> str:
    """`did you mean top_p?`, or the list of what is known if nothing is near."""
    known = sorted(set(known))
    found = nearest(key.lower().replace("-", "_"), known)
    return f"did you mean {' or '.join(found)}?" if found else f"known here: {', '.join(known)}"
