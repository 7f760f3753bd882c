"""Published weights: version n is the directory v{n:06d}, complete, with a manifest, never changed."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from .durable import finish_directory, new_directory, remove_directory, write_json
from .folders import Folders, numbered

SAFETENSORS_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
BLOCK = 1 << 22
HASHED_AT_ONCE = 4
"""Tensors of a file."""


def publish(checkpoint: Path, folders: Folders, version: int) -> None:
    """Make the model in `checkpoint` version `version`; nothing to do if it is published already.

    Args:
        checkpoint: a finished directory with model.safetensors, config.json and the tokenizer.
        folders: where the versions are.
        version: n of v{n:06d}.

    Raises:
        ValueError: the version is published already, with other weights.
    """
    tensors = tensors_of(checkpoint / "model.safetensors")
    target = folders.version(version)
    if target.exists():
        there = json.loads((target / "manifest.json").read_bytes())["tensors"]
        if there != tensors:
            raise ValueError(
                f"{target} holds other weights than {checkpoint}; a published version never changes: "
                "choose another trainer.weights_dir, or put back the output_dir that belongs to this one"
            )
        return
    temporary = new_directory(target)
    for path in sorted(checkpoint.iterdir()):
        if path.is_file() and path.name != "checkpoint.json":
            link_or_copy(path, temporary / path.name)
    write_json(temporary / "manifest.json", {"version": version, "tensors": tensors})
    finish_directory(temporary, target)


def publish_new(write: Callable[[Path], None], folders: Folders, version: int) -> None:
    """Make the model that `write` writes into a directory version `version`, which is not there yet."""
    target = folders.version(version)
    temporary = new_directory(target)
    write(temporary)
    tensors = tensors_of(temporary / "model.safetensors")
    write_json(temporary / "manifest.json", {"version": version, "tensors": tensors})
    finish_directory(temporary, target)


def keep_newest(folders: Folders, keep: int) -> None:
    """Remove all but the `keep` newest versions."""
    for path in list(numbered(folders.weights, "v").values())[:-keep]:
        remove_directory(path)


def tensors_of(path: Path) -> dict[str, dict[str, Any]]:
    """Name -> {"shape", "dtype", "blake2b" (128 bits over the tensor's bytes, hex)} of a safetensors file."""
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_bytes))
    header.pop("__metadata__", None)

    def described(entry: dict[str, Any]) -> dict[str, Any]:
        start, end = entry["data_offsets"]
        return {
            "shape": entry["shape"],
            "dtype": SAFETENSORS_DTYPES[entry["dtype"]],
            "blake2b": hash_range(path, 8 + header_bytes + start, end - start),
        }

    names = sorted(header)
    with ThreadPoolExecutor(HASHED_AT_ONCE) as pool:  # reading and hashing leave the interpreter to others
        return dict(zip(names, pool.map(lambda name: described(header[name]), names), strict=True))


def hash_range(path: Path, start: int, length: int) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        file.seek(start)
        while length > 0:
            block = file.read(min(BLOCK, length))
            assert block, "the file ends before its last tensor does"
            digest.update(block)
            length -= len(block)
    return digest.hexdigest()


def link_or_copy(source: Path, target: Path) -> None:
    """Both are never written again, so one file on the disk can stand for both."""
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)
