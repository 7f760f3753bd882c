"""From what callers hold (bytes, arrays, lists) to the arrays of the wire, never losing a value."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .errors import KeptTokensError

INT32_MAX = 2**31 - 1


def read_only(array: NDArray[Any]) -> NDArray[Any]:
    """A view of ``array`` that refuses writes."""
    view = array.view()
    view.flags.writeable = False
    return view


def int_array(values: ArrayLike, field: str) -> NDArray[Any]:
    """``values`` as a 1-D array of some integer type.

    Raises:
        KeptTokensError: more or fewer than one dimension, or not integers (bool is none).
    """
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError, TypeError) as error:
        raise KeptTokensError(
            field, f"not an array of integers ({error}); pass one flat int32 array"
        ) from error
    if array.size == 0 and array.ndim == 1 and not isinstance(values, np.ndarray):
        return np.zeros(0, np.int32)  # numpy calls an empty list float64
    if array.ndim != 1:
        raise KeptTokensError(
            field, f"has shape {array.shape}, but must be 1-D; flatten it position by position"
        )
    if array.dtype.kind not in "iu":
        raise KeptTokensError(field, f"has dtype {array.dtype}, but must be integers; convert to int32 first")
    return array


def int32_array(values: ArrayLike, field: str, *, copy: bool) -> NDArray[np.int32]:
    """``values`` as a contiguous, read-only int32 array; other integer types only if every value fits.

    ``copy=False`` looks at the caller's memory where that is int32 already; the caller must not write to it.
    """
    array = int_array(values, field)
    if array.dtype != np.int32:
        bounds = np.iinfo(np.int32)
        outside = np.flatnonzero((array > bounds.max) | (array < bounds.min))
        if outside.size:
            entry = int(outside[0])
            raise KeptTokensError(
                field, f"entry {entry} is {array[entry]}, which does not fit int32; ids and counts are int32"
            )
    exact = array.astype(np.int32, order="C", copy=copy)
    return read_only(exact)


def from_buffer(data: object, dtype: np.dtype[Any], field: str) -> NDArray[Any]:
    """The little-endian array that ``data`` holds: a read-only view where it cannot change, else a copy.

    Raises:
        KeptTokensError: not bytes, or a length that is no multiple of the item's size.
    """
    if not isinstance(data, bytes | bytearray | memoryview):
        raise KeptTokensError(
            field, f"is {type(data).__name__}, but must be bytes of {dtype.name}, little-endian"
        )
    if not isinstance(data, bytes):
        data = bytes(data)  # somebody may write to the original
    if len(data) % dtype.itemsize:
        raise KeptTokensError(
            field,
            f"{len(data)} bytes are no whole number of {dtype.name} of {dtype.itemsize} bytes; "
            "send the whole array, little-endian",
        )
    wire = np.frombuffer(data, dtype.newbyteorder("<"))
    return read_only(wire.astype(dtype, copy=False))


def to_buffer(array: NDArray[Any]) -> bytes:
    """The array's bytes, little-endian."""
    return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
