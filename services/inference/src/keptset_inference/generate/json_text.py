"""JSON text of arrays, column by column: no Python object a token that is not needed."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

NO_EVIDENCE = -9999.0
"""Stands for a logprob that is no finite number: JSON has no -inf. Never sent for a sampled token with a
set."""


def short_floats(values: np.ndarray) -> np.ndarray:
    """float64 of the fewest decimal digits that read back as the same float32.

    A float32 as it is would be written with the 17 digits of a float64. Numbers that are none become
    NO_EVIDENCE.
    """
    exact = np.where(np.isfinite(values), values, np.float32(NO_EVIDENCE)).astype(np.float64)
    magnitude = np.abs(exact)
    with np.errstate(divide="ignore"):
        exponent = np.floor(np.log10(magnitude))
    exponent = np.where(magnitude > 0, exponent, 0).astype(np.int64)
    result, left = exact.copy(), np.ones(exact.shape, bool)
    for digits in (6, 7, 8, 9):
        places = digits - 1 - exponent
        # Beyond 22 the power of ten is no exact float64; such numbers are tiny and stay as they are.
        scale = 10.0 ** np.clip(places, 0, 22)
        rounded = np.round(exact * scale) / scale
        fits = left & (places >= 0) & (places <= 22) & (rounded.astype(np.float32) == exact)
        result[fits] = rounded[fits]
        left &= ~fits
    return result


def json_list(values: Any) -> bytes:
    """Compact JSON of an array (or list) of numbers or null."""
    return msgspec.json.encode(values.tolist() if isinstance(values, np.ndarray) else values)


def items(values: Any) -> list[bytes]:
    """The text of each entry."""
    text = json_list(values)[1:-1]
    return text.split(b",") if text else []


def rows_of(pieces: Sequence[bytes | list[bytes]]) -> bytes:
    """`[...]` of one row for each entry of the lists; constants stand in every row.

    `rows_of([b'{"a":', [b"1", b"2"], b"}"])` is `[{"a":1},{"a":2}]`.
    """
    length = next(len(piece) for piece in pieces if isinstance(piece, list))
    if not length:
        return b"[]"
    text: list[bytes] = [b""] * (length * (len(pieces) + 1))
    stride = len(pieces) + 1
    for place, piece in enumerate(pieces):
        text[place::stride] = piece if isinstance(piece, list) else [piece] * length
    text[len(pieces) :: stride] = [b","] * length
    text[-1] = b""
    return b"[" + b"".join(text) + b"]"


__all__ = ["NO_EVIDENCE", "items", "json_list", "rows_of", "short_floats"]
