"""Tensors of safetensors files: names, shapes, types and hashes, without torch."""

import hashlib
import json
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_MOST_HEADER_BYTES = 100_000_000  # the format's own limit
_CHUNK = 1 << 24
_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}


class TensorFileError(ValueError):
    """A file that is no safetensors file, or a damaged one."""


@dataclass(frozen=True)
class Tensor:
    """Where a tensor lies."""

    name: str
    dtype: str
    """As torch and numpy spell it: `float32`, `bfloat16`."""
    shape: tuple[int, ...]
    file: Path
    start: int
    """First byte in the file."""
    end: int
    """One past the last byte."""

    def blake2b(self) -> str:
        """Hash (128 bits, hexadecimal) of the tensor's bytes."""
        digest = hashlib.blake2b(digest_size=16)
        with self.file.open("rb") as file:
            file.seek(self.start)
            left = self.end - self.start
            while left:
                chunk = file.read(min(left, _CHUNK))
                if not chunk:
                    raise TensorFileError(f"{self.file.name}: ends inside tensor {self.name}")
                digest.update(chunk)
                left -= len(chunk)
        return digest.hexdigest()


def read_tensors(directory: Path, names: Iterable[str] | None = None) -> dict[str, Tensor]:
    """Every tensor of these files of a directory, by name; of all *.safetensors files if none are given.

    Raises:
        TensorFileError: no such file, a damaged one, or a name that is there twice.
    """
    tensors: dict[str, Tensor] = {}
    files = sorted(directory.glob("*.safetensors") if names is None else (directory / name for name in names))
    if not files:
        raise TensorFileError(f"{directory} holds no *.safetensors file")
    for file in files:
        for tensor in _read_header(file):
            if tensor.name in tensors:
                raise TensorFileError(
                    f"{tensor.name} is in {tensors[tensor.name].file.name} and in {file.name}"
                )
            tensors[tensor.name] = tensor
    return tensors


def _read_header(file: Path) -> list[Tensor]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        head = stream.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else size
        if length > min(size - 8, _MOST_HEADER_BYTES):
            raise TensorFileError(f"{file.name}: {size} bytes are no safetensors file")
        try:
            entries = json.loads(stream.read(length), object_pairs_hook=_distinct)
            base = 8 + length
            tensors = [
                Tensor(
                    name,
                    _DTYPES.get(entry["dtype"], entry["dtype"]),
                    tuple(entry["shape"]),
                    file,
                    base + entry["data_offsets"][0],
                    base + entry["data_offsets"][1],
                )
                for name, entry in entries.items()
                if name != "__metadata__"
            ]
        except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError) as error:
            raise TensorFileError(f"{file.name}: its header is damaged: {error!r}") from error
    for tensor in tensors:
        if not base <= tensor.start <= tensor.end <= size:
            raise TensorFileError(f"{file.name}: {tensor.name} lies outside the file of {size} bytes")
    return tensors


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON whose names differ: of a name that comes twice readers take one or the other."""
    entries = dict(pairs)
    if len(entries) < len(pairs):
        raise ValueError(f"a name comes twice among {sorted(name for name, _ in pairs)[:8]}")
    return entries


__all__ = ["Tensor", "TensorFileError", "read_tensors"]
