"""Weights as a trainer publishes them: v{n:06d}/ with safetensors, what belongs to them, and a manifest."""

import hashlib
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file


def directory_name(version: int) -> str:
    """Of a version, as its directory and its spans are called."""
    return f"v{version:06d}"


def publish(model: Path, root: Path, version: int) -> Path:
    """Copy a model's directory to root/v{version:06d} and write its manifest; appears in one rename."""
    temporary, final = root / f".{directory_name(version)}.tmp", root / directory_name(version)
    shutil.copytree(model, temporary)
    write_manifest(temporary, version)
    temporary.rename(final)
    return final


def write_manifest(directory: Path, version: int) -> None:
    """Name, shape, type and blake2b-128 of every tensor in model.safetensors."""
    tensors = {
        name: {
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "blake2b": hashlib.blake2b(bytes_of(tensor), digest_size=16).hexdigest(),
        }
        for name, tensor in load_file(directory / "model.safetensors").items()
    }
    manifest = {"version": version, "tensors": tensors}
    (directory / "manifest.json").write_text(json.dumps(manifest))


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Of a tensor of any type; numpy has no bfloat16."""
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()
