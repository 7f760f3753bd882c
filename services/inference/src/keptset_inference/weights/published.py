"""A published version: the directory v{n:06d}, checked against its manifest and against the running model.

All of this reads files only; the engine is not touched.
"""

import hashlib
import json
import math
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kept_tokens.versions import version_name

from ..errors import RequestError
from .tensors import Tensor, TensorFileError, read_tensors

MANIFEST = "manifest.json"
INDEX = "model.safetensors.index.json"
TIED_HEAD = "lm_head.weight"
_HASHED_AT_ONCE = 4
_WORTH_THREADS = 1 << 24  # bytes
_ITEM_SIZES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


def check_published(root: Path, version: int, expected: Mapping[str, tuple[int, ...]], *, tied: bool) -> Path:
    """The directory of a version that can be loaded.

    Args:
        root: the configured directory of all versions.
        version: n.
        expected: name and shape of each tensor of the model that the engine was started with.
        tied: the head is the embedding; a head of its own may then be there or not.

    Raises:
        RequestError: 404 the version is not there; 409 it is not what its manifest says; 422 it does not fit
            the
            running model.
    """
    directory = _directory(root, version)
    manifest = _manifest(directory, version)
    tensors = _against_manifest(directory, manifest)
    _against_model(directory, tensors, expected, tied)
    _hashes(directory, tensors, manifest)
    return directory


def manifest_bytes(root: Path, version: int) -> bytes | None:
    """The manifest of a version as it stands in its file: equal bytes, equal weights. None: there is none."""
    try:
        return (root / version_name(version) / MANIFEST).read_bytes()
    except (OSError, ValueError):
        return None


def _directory(root: Path, version: int) -> Path:
    try:
        name = version_name(version)
    except ValueError as error:
        raise RequestError(str(error)) from error
    directory = root / name
    if not directory.is_dir():
        raise RequestError(
            f"version {version} is not there: no directory {directory}", 404, "version_not_found"
        )
    inside = root.resolve()
    for path in (directory, *directory.rglob("*")):
        if not Path(os.path.realpath(path)).is_relative_to(inside):
            raise _unlike(f"{path} leads outside {root}: publish files, not links")
        if not path.is_dir() and not path.is_file():  # reading a pipe would wait for ever
            raise _unlike(f"{path} is neither a file nor a directory: publish files")
    return directory


def _manifest(directory: Path, version: int) -> dict[str, Any]:
    path = directory / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise _unlike(f"{path} is missing: a version is published with one") from None
    except (OSError, ValueError, RecursionError) as error:
        raise _unlike(f"{path} cannot be read: {error}") from error
    if (
        not isinstance(manifest, dict)
        or not isinstance(manifest.get("tensors"), dict)
        or not manifest["tensors"]
    ):
        raise _unlike(f"{path} must be an object with a table `tensors`")
    if manifest.get("version") != version:
        raise _unlike(f"{path} is about version {manifest.get('version')!r}, not {version}")
    return manifest


def _against_manifest(directory: Path, manifest: dict[str, Any]) -> dict[str, Tensor]:
    try:
        tensors = read_tensors(directory)
    except (TensorFileError, OSError) as error:
        raise _unlike(str(error)) from error
    stated = manifest["tensors"]
    for name in sorted(stated.keys() - tensors.keys()):
        raise _unlike(f"{directory.name}: the manifest states {name}, which no file holds")
    for name in sorted(tensors.keys() - stated.keys()):
        raise _unlike(
            f"{directory.name}: {tensors[name].file.name} holds {name}, which the manifest does not state"
        )
    for name, tensor in tensors.items():
        entry = stated[name]
        if not isinstance(entry, dict):
            raise _unlike(f"{directory.name}: the manifest's entry of {name} is no object")
        if list(tensor.shape) != entry.get("shape"):
            raise _unlike(
                f"{directory.name}: {name} has shape {list(tensor.shape)}, the manifest says "
                f"{entry.get('shape')}"
            )
        if tensor.dtype != entry.get("dtype"):
            raise _unlike(
                f"{directory.name}: {name} is {tensor.dtype}, the manifest says {entry.get('dtype')!r}"
            )
        size = _ITEM_SIZES.get(tensor.dtype)
        if size is not None and tensor.end - tensor.start != size * math.prod(tensor.shape):
            raise _unlike(
                f"{directory.name}: {name} has {tensor.end - tensor.start} bytes, its shape says otherwise"
            )
    _against_index(directory, tensors)
    return tensors


def _against_index(directory: Path, tensors: dict[str, Tensor]) -> None:
    """An index, if there is one, lists what is there: vLLM loads only the files that it names, and leaves
    the rest of the model as it was.
    """
    path = directory / INDEX
    if not path.exists():
        return
    try:
        listed = json.loads(path.read_bytes())["weight_map"]
        there = {name: tensor.file.name for name, tensor in tensors.items()}
        wrong = {name: file for name, file in there.items() if listed.get(name) != file}
        unknown = sorted(listed.keys() - tensors.keys())
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise _unlike(f"{path} cannot be read: {error!r}; without it all files are loaded") from error
    for name, file in sorted(wrong.items()):
        raise _unlike(f"{path} has {name} in {listed.get(name)!r}, but it is in {file}")
    for name in unknown:
        raise _unlike(f"{path} has {name} in {listed[name]!r}, but no file holds it")


def _against_model(
    directory: Path, tensors: dict[str, Tensor], expected: Mapping[str, tuple[int, ...]], tied: bool
) -> None:
    optional = {TIED_HEAD} if tied else set()
    for name in sorted(expected.keys() - tensors.keys() - optional):
        raise _other_model(f"{directory.name}: {name} is missing, which the running model has")
    for name in sorted(tensors.keys() - expected.keys() - optional):
        raise _other_model(f"{directory.name}: {name} is unknown to the running model")
    for name in sorted(tensors.keys() & expected.keys()):
        if tensors[name].shape != tuple(expected[name]):
            raise _other_model(
                f"{directory.name}: {name} has shape {list(tensors[name].shape)}, "
                f"in the running model it has {list(expected[name])}"
            )
        if tensors[name].dtype not in _ITEM_SIZES:
            raise _other_model(
                f"{directory.name}: {name} is {tensors[name].dtype}; publish {', '.join(_ITEM_SIZES)}"
            )


def _hashes(directory: Path, tensors: dict[str, Tensor], manifest: dict[str, Any]) -> None:
    """Last, because it reads everything."""
    much = sum(tensor.end - tensor.start for tensor in tensors.values()) > _WORTH_THREADS
    with ThreadPoolExecutor(_HASHED_AT_ONCE) as pool:  # reading and hashing leave the interpreter to others
        hashes = list((pool.map if much else map)(Tensor.blake2b, tensors.values()))
    for name, there in zip(tensors, hashes, strict=True):
        stated = manifest["tensors"][name].get("blake2b")
        if there != stated:
            raise _unlike(f"{directory.name}: {name} has the hash {there}, the manifest says {stated!r}")
    files = manifest.get("files", {})
    if not isinstance(files, dict):
        raise _unlike(f"{directory.name}: `files` of the manifest must be a table of names and hashes")
    for name, entry in files.items():
        stated = entry.get("blake2b") if isinstance(entry, dict) else entry
        if not isinstance(stated, str):
            raise _unlike(f"{directory.name}: the manifest has no hash of {name}, but {stated!r}")
        path = directory / name
        if not path.resolve().is_relative_to(directory.resolve()) or not path.is_file():
            raise _unlike(f"{directory.name}: the manifest states {name}, which is not there")
        there = hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
        if there != stated:
            raise _unlike(f"{directory.name}: {name} has the hash {there}, the manifest says {stated!r}")


def _unlike(text: str) -> RequestError:
    return RequestError(text, 409, "version_unusable")


def _other_model(text: str) -> RequestError:
    return RequestError(text, 422, "other_model")


__all__ = ["check_published", "manifest_bytes"]
