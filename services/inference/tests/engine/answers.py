"""An answer of /inference/v1/generate in any of its dialects, brought to one form."""

import base64
import json
from dataclasses import dataclass, field

import httpx
import msgspec
import numpy as np


@dataclass
class Sampled:
    """One choice: T tokens and what came with them."""

    index: int
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[float] | None = None
    """Of the sampled tokens."""
    ranks: list[int] | None = None
    top: list[dict[int, float]] | None = None
    """id -> logprob of the best of each position; JSON only."""
    kept: list[list[int]] | None = None
    """Kept ids of each token."""
    versions: list[tuple[str, int, int]] = field(default_factory=list)
    """(weight version, first token, one past the last)."""


def of_json(answer: dict) -> list[Sampled]:
    """All choices of a JSON answer (or of one event of a stream), in order of their index."""
    return sorted((_choice(choice) for choice in answer["choices"]), key=lambda sampled: sampled.index)


def of_msgpack(body: bytes) -> list[Sampled]:
    """All choices of a MessagePack answer."""
    choices = []
    for raw in msgspec.msgpack.decode(body)["choices"]:
        tokens = np.frombuffer(raw["token_ids"], "<i4").tolist()
        kept = raw.get("kept_tokens")
        logprobs = raw.get("logprobs")
        choices.append(
            Sampled(
                index=raw.get("index", 0),
                token_ids=tokens,
                finish_reason=raw.get("finish_reason"),
                stop_reason=raw.get("stop_reason"),
                logprobs=None if logprobs is None else np.frombuffer(logprobs, "<f4").tolist(),
                kept=None if kept is None else _rows(kept["ids"], kept["counts"], len(tokens)),
                versions=_versions(raw.get("weight_versions")),
            )
        )
    return sorted(choices, key=lambda sampled: sampled.index)


def of_events(lines: list[str]) -> list[Sampled]:
    """The choices of a whole stream of server-sent events, their pieces joined."""
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert data, "a stream without events"
    assert data[-1] == "[DONE]", f"a stream that ends with {data[-1]!r}"
    joined: dict[int, Sampled] = {}
    for event in data[:-1]:
        for piece in of_json(json.loads(event)):
            if piece.index not in joined:
                joined[piece.index] = piece
                continue
            whole = joined[piece.index]
            assert whole.finish_reason is None, f"tokens after {whole.finish_reason!r}"
            whole.finish_reason, whole.stop_reason = piece.finish_reason, piece.stop_reason
            whole.versions = piece.versions or whole.versions  # over the whole answer, with the last event
            if not piece.token_ids:
                continue  # a last event that only says why it ended
            whole.token_ids += piece.token_ids
            for name in ("logprobs", "ranks", "top", "kept"):
                mine, more = getattr(whole, name), getattr(piece, name)
                assert (mine is None) == (more is None), f"{name} only in some events of a stream"
                if mine is not None:
                    mine.extend(more)
    return [joined[index] for index in sorted(joined)]


def error_of(response: httpx.Response) -> str:
    """The message of a refusal; it must have the form that all our errors have."""
    error = response.json()["error"]
    assert set(error) == {"message", "type", "code"}, error
    assert all(isinstance(error[name], str) for name in ("message", "type")), error
    return error["message"]


def _choice(raw: dict) -> Sampled:
    tokens = raw["token_ids"]
    sampled = Sampled(raw["index"], list(tokens), raw["finish_reason"], raw["stop_reason"])
    kept, mask = raw.get("kept_tokens"), raw.get("sampling_mask")
    if kept is not None:
        ids, counts = (base64.b64decode(kept[name], validate=True) for name in ("ids", "counts"))
        sampled.kept = _rows(ids, counts, len(tokens))
    if mask is not None:
        assert len(mask) == len(tokens), f"{len(mask)} masks for {len(tokens)} tokens"
        assert kept is None or sampled.kept == mask, "the two dialects of one answer differ"
        sampled.kept = [list(row) for row in mask]
    if raw["logprobs"] is not None:
        content = raw["logprobs"]["content"]
        assert len(content) == len(tokens), f"{len(content)} logprobs for {len(tokens)} tokens"
        for token, entry in zip(tokens, content, strict=True):
            assert entry["token_id"] == token
            assert entry["token"] == f"token_id:{token}"
            assert entry["bytes"] is None
        sampled.logprobs = [entry["logprob"] for entry in content]
        sampled.ranks = [entry["rank"] for entry in content]
        sampled.top = [
            {top["token_id"]: top["logprob"] for top in entry["top_logprobs"]} for entry in content
        ]
    sampled.versions = _versions(raw.get("weight_versions"))
    return sampled


def _rows(ids: bytes, counts: bytes, tokens: int) -> list[list[int]]:
    flat, per_token = np.frombuffer(ids, "<i4"), np.frombuffer(counts, "<i4")
    assert len(per_token) == tokens, f"{len(per_token)} counts for {tokens} tokens"
    assert per_token.sum() == len(flat), f"{len(flat)} ids, but the counts say {per_token.sum()}"
    return [row.tolist() for row in np.split(flat, np.cumsum(per_token)[:-1])] if tokens else []


def _versions(raw) -> list[tuple[str, int, int]]:
    return [(str(span["version"]), span["start"], span["end"]) for span in raw or ()]
