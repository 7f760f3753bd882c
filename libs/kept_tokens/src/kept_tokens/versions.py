"""How a weight version is written: a number in Python, ``v000003`` in directories and answers."""

import reprlib

BASE = "base"
"""What an engine calls the weights it was started with; the same as version 0."""


def version_name(version: int) -> str:
    """``3`` -> ``"v000003"``.

    Raises:
        ValueError: negative.
    """
    if version < 0:
        raise ValueError(f"weight version {version} is negative; versions count from 0, the initial model")
    return f"v{version:06d}"


def version_number(name: str | int) -> int:
    """``"v000003"`` -> ``3``, ``"base"`` -> ``0``; a number stays as it is.

    Raises:
        ValueError: neither of these.
    """
    if isinstance(name, int) and not isinstance(name, bool) and name >= 0:
        return name
    if name == BASE:
        return 0
    if isinstance(name, str) and name[:1] == "v" and name[1:].isascii() and name[1:].isdigit():
        return int(name[1:])
    raise ValueError(
        f"weight version {reprlib.repr(name)} is neither 'base' nor 'v' and a number such as 'v000003'"
    )
