"""The pieces of vLLM that we replace or rely on are those that we have read."""

import hashlib
import importlib
import inspect
import json
from pathlib import Path

import pytest
import vllm

from keptset_inference.capture.replaced import PIECES, Piece

PINS = Path(__file__).with_name("pins.json")
"""target -> blake2b of its source; after reading what changed, write down the digest that the test shows."""


def source_of(target: str) -> str:
    module, _, name = target.partition(":")
    found = importlib.import_module(module)
    for part in name.split("."):
        found = inspect.getattr_static(found, part)
    found = getattr(found, "__func__", found)
    return inspect.getsource(getattr(found, "fn", found))  # of a Triton kernel, where there is Triton


def digest_of(target: str) -> str:
    return hashlib.blake2b(source_of(target).encode(), digest_size=16).hexdigest()


def pins() -> dict[str, str]:
    return json.loads(PINS.read_text())


def test_the_version_is_the_one_that_was_read():
    assert vllm.__version__ == "0.32.0"


@pytest.mark.parametrize("piece", PIECES, ids=lambda piece: piece.target)
def test_the_source_is_the_one_that_was_read(piece: Piece):
    digest = digest_of(piece.target)
    assert pins().get(piece.target) == digest, (
        f"{piece.target} changed in vLLM {vllm.__version__}; we {piece.how}, because {piece.reason}. Read it "
        "again, "
        f"then pin {digest} in {PINS.name}. It is not needed any more with: {piece.ends_with}"
    )


def test_every_pin_has_its_piece():
    assert set(pins()) == {piece.target for piece in PIECES}


def test_every_piece_says_why_and_what_ends_it():
    for piece in PIECES:
        assert all((piece.how, piece.reason, piece.ends_with)), piece.target
