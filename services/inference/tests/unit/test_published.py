"""A published version is checked against its manifest and the running model, by reading files."""

import hashlib
import json
import os
import shutil
import struct

import numpy as np
import pytest
from safetensors.numpy import save_file

from keptset_inference.errors import RequestError
from keptset_inference.weights.published import check_published
from keptset_inference.weights.running_model import running_model
from keptset_inference.weights.tensors import TensorFileError, read_tensors

TENSORS = {
    "model.embed_tokens.weight": np.arange(12, dtype=np.float32).reshape(4, 3),
    "model.norm.weight": np.ones(3, np.float32),
}
EXPECTED = {name: tensor.shape for name, tensor in TENSORS.items()}
NORM = "model.norm.weight"


def stated(tensors) -> dict:
    return {
        name: {
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype),
            "blake2b": hashlib.blake2b(tensor.tobytes(), digest_size=16).hexdigest(),
        }
        for name, tensor in tensors.items()
    }


def publish(root, version=3, tensors=TENSORS, **manifest):
    directory = root / f"v{version:06d}"
    directory.mkdir(parents=True)
    save_file(tensors, directory / "model.safetensors")
    written = {"version": version, "tensors": stated(tensors)} | manifest
    (directory / "manifest.json").write_text(json.dumps(written))
    return directory


def check(root, version=3, *, tied=True):
    return check_published(root, version, EXPECTED, tied=tied)


def refused(root, status: int, version=3, *, tied=True) -> str:
    with pytest.raises(RequestError) as error:
        check(root, version, tied=tied)
    assert error.value.status == status, str(error.value)
    return str(error.value)


def test_a_version_as_published_is_taken(tmp_path):
    directory = publish(tmp_path)
    assert check(tmp_path) == directory


def test_files_that_the_manifest_lists_are_checked_too(tmp_path):
    digest = hashlib.blake2b(b"{}", digest_size=16).hexdigest()
    directory = publish(tmp_path, files={"config.json": digest})
    assert "config.json" in refused(tmp_path, 409)
    (directory / "config.json").write_bytes(b"{}")
    check(tmp_path)
    (directory / "config.json").write_bytes(b"{ }")
    assert "config.json" in refused(tmp_path, 409)


def test_a_head_of_its_own_may_be_there_where_it_is_the_embedding(tmp_path):
    publish(tmp_path, tensors=TENSORS | {"lm_head.weight": TENSORS["model.embed_tokens.weight"]})
    check(tmp_path, tied=True)
    assert "lm_head.weight" in refused(tmp_path, 422, tied=False)


def test_what_is_not_there_is_not_found(tmp_path):
    assert "v000003" in refused(tmp_path, 404)
    assert "1" in refused(tmp_path, 400, version=-1)


def rewrite(directory, tensors) -> None:
    save_file(tensors, directory / "model.safetensors")


def header(directory, text: bytes) -> None:
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)


def edit(directory, change) -> None:
    manifest = json.loads((directory / "manifest.json").read_text())
    change(manifest)
    (directory / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda d: (d / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda d: (d / "manifest.json").write_text("{"), "manifest.json"),
        (lambda d: (d / "manifest.json").write_text("[]"), "tensors"),
        (lambda d: (d / "model.safetensors").unlink(), "safetensors"),
        (lambda d: (d / "model.safetensors").write_bytes(b"x"), "safetensors"),
        (lambda d: (d / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 60)), "safetensors"),
        (lambda d: os.truncate(d / "model.safetensors", 200), "outside the file"),
        (lambda d: edit(d, lambda m: m.update(version=4)), "version 4"),
        (lambda d: edit(d, lambda m: m["tensors"].pop(NORM)), NORM),
        (lambda d: edit(d, lambda m: m["tensors"].update(more={})), "more"),
        (lambda d: edit(d, lambda m: m["tensors"].update({NORM: 3})), NORM),
        (lambda d: edit(d, lambda m: m["tensors"][NORM].update(blake2b="00")), NORM),
        (lambda d: edit(d, lambda m: m["tensors"][NORM].pop("blake2b")), NORM),
        (lambda d: edit(d, lambda m: m["tensors"][NORM].update(shape=[4])), NORM),
        (lambda d: edit(d, lambda m: m["tensors"][NORM].update(dtype="float16")), "float32"),
        (lambda d: rewrite(d, TENSORS | {NORM: np.zeros(3, np.float32)}), "hash"),
        (lambda d: shutil.copy(d / "model.safetensors", d / "again.safetensors"), "again.safetensors"),
        (lambda d: (d / "manifest.json").write_text("[" * 100_000), "manifest.json"),
        (lambda d: header(d, b"[" * 100_000), "header is damaged"),
        (lambda d: header(d, b'{"a": 1, "a": 2}'), "comes twice"),
        (lambda d: os.mkfifo(d / "more.safetensors"), "neither a file nor a directory"),
        (lambda d: (d / "around").symlink_to(d / "around"), "around"),
        (lambda d: edit(d, lambda m: m.update(files=["config.json"])), "files"),
        (lambda d: edit(d, lambda m: m.update(files={"config.json": 5})), "config.json"),
    ],
)  # fmt: skip
def test_what_is_not_as_its_manifest_says_is_refused(tmp_path, spoil, says):
    spoil(publish(tmp_path))
    assert says in refused(tmp_path, 409)


@pytest.mark.parametrize("name", TENSORS)
def test_a_damaged_tensor_is_named_where_threads_hash_as_well(tmp_path, monkeypatch, name):
    monkeypatch.setattr("keptset_inference.weights.published._WORTH_THREADS", 0)
    directory = publish(tmp_path)
    assert check_published(tmp_path, 3, EXPECTED, tied=False) == directory
    rewrite(directory, TENSORS | {name: np.full_like(TENSORS[name], 7)})
    assert f"{name} has the hash" in refused(tmp_path, 409)


EMBEDDING = "model.embed_tokens.weight"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def publish_in_two_files(root):
    directory = publish(root)
    (directory / "model.safetensors").unlink()
    save_file({EMBEDDING: TENSORS[EMBEDDING]}, directory / FIRST)
    save_file({NORM: TENSORS[NORM]}, directory / SECOND)
    return directory


@pytest.mark.parametrize(
    ("index", "says"),
    [
        ({"weight_map": {EMBEDDING: FIRST}}, NORM),
        ({"weight_map": {EMBEDDING: FIRST, NORM: FIRST}}, NORM),
        ({"weight_map": {EMBEDDING: FIRST, NORM: SECOND, "more": SECOND}}, "more"),
        ({"weight_map": {}}, EMBEDDING),
        ({"weight_map": [FIRST, SECOND]}, "index.json"),
        ({}, "index.json"),
        ([], "index.json"),
    ],
)
def test_an_index_that_would_leave_out_files_is_refused(tmp_path, index, says):
    """The engine loads what the index lists, and the rest of the model would stay as it was."""
    directory = publish_in_two_files(tmp_path)
    check(tmp_path)
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    assert says in refused(tmp_path, 409)


def test_an_index_of_all_files_is_taken(tmp_path):
    directory = publish_in_two_files(tmp_path)
    index = {"weight_map": {EMBEDDING: FIRST, NORM: SECOND}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    check(tmp_path)


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({NORM: TENSORS[NORM]}, "model.embed_tokens.weight is missing"),
        (TENSORS | {"model.more.weight": np.ones(2, np.float32)}, "model.more.weight is unknown"),
        (TENSORS | {NORM: np.ones(4, np.float32)}, "[4], in the running model it has [3]"),
        (TENSORS | {NORM: np.ones(3, np.int32)}, "int32"),
    ],
)
def test_what_does_not_fit_the_running_model_is_refused(tmp_path, tensors, says):
    publish(tmp_path, tensors=tensors)
    assert says in refused(tmp_path, 422)


def test_links_out_of_the_root_are_refused(tmp_path):
    root, outside = tmp_path / "weights", tmp_path / "outside"
    root.mkdir()
    directory = publish(outside)
    (root / "v000003").symlink_to(directory)
    assert "leads outside" in refused(root, 409)
    (root / "v000003").unlink()
    inside = publish(root)
    (inside / "model.safetensors").rename(outside / "model.safetensors")
    (inside / "model.safetensors").symlink_to(outside / "model.safetensors")
    assert "leads outside" in refused(root, 409)


def test_bfloat16_needs_no_numpy_type(tmp_path):
    header = json.dumps({"w": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}}).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + b"\x80\x3f\x00\x40")
    tensor = read_tensors(tmp_path)["w"]
    assert (tensor.dtype, tensor.shape) == ("bfloat16", (2,))
    assert tensor.blake2b() == hashlib.blake2b(b"\x80\x3f\x00\x40", digest_size=16).hexdigest()


def test_the_running_model_is_read_from_its_directory(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": false}')
    model = running_model(str(tmp_path))
    assert model.shapes == EXPECTED
    assert not model.tied


def test_of_a_model_that_comes_twice_the_files_of_the_index_count(tmp_path):
    save_file(TENSORS, tmp_path / "model-00001-of-00001.safetensors")
    save_file(TENSORS | {"other.name": TENSORS[NORM]}, tmp_path / "consolidated.safetensors")
    (tmp_path / "config.json").write_text("{}")
    index = {"weight_map": dict.fromkeys(TENSORS, "model-00001-of-00001.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    model = running_model(str(tmp_path))
    assert model.shapes == EXPECTED
    assert model.tied


def test_a_model_without_safetensors_cannot_be_updated(tmp_path):
    with pytest.raises(TensorFileError):
        read_tensors(tmp_path)
    with pytest.raises(ValueError, match="cannot be compared"):
        running_model(str(tmp_path))
