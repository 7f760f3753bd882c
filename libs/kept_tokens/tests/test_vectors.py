"""Every entry of the repository's vectors: what payloads decode to, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from kept_tokens import KeptTokens, KeptTokensError

VECTORS: dict[str, list[dict[str, Any]]] = json.loads(
    (Path(__file__).parents[3] / "tests" / "vectors" / "kept_tokens.json").read_text()
)


def named(kind: str) -> Any:
    return pytest.mark.parametrize("entry", [pytest.param(e, id=e["name"]) for e in VECTORS[kind]])


@named("good")
def test_payload_decodes_to_rows_and_encodes_to_the_same_bytes(entry: dict[str, Any]) -> None:
    kept = KeptTokens.from_base64(entry["kept_tokens"])
    assert kept.rows() == entry["rows"]
    assert kept.to_base64() == entry["kept_tokens"]
    assert list(kept.to_base64()) == ["ids", "counts"]
    assert KeptTokens.from_rows(entry["rows"]) == kept
    assert KeptTokens.from_sampling_mask(kept.to_sampling_mask()) == kept
    assert KeptTokens.from_bytes(*kept.to_bytes()) == kept


@named("malformed")
def test_malformed_payload_is_refused_with_its_reason(entry: dict[str, Any]) -> None:
    knows = {k: entry[k] for k in ("num_tokens", "vocab_size", "sampled_ids", "require_masks") if k in entry}
    with pytest.raises(KeptTokensError, match=entry["because"]):
        KeptTokens.from_base64(entry["kept_tokens"]).check(**knows)
