"""Good and bad requests to an inference server, drawn at random, and what each must be answered with."""

import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from kept_tokens import KeptTokens
from kept_tokens.answers import GenerateAnswer
from kept_tokens.messages import decode

VOCAB_SIZE = 261
MSGPACK = "application/msgpack"
GENERATE = "/inference/v1/generate"
WEIGHTS = "/keptset/v1/weights"
SLEEP = "/keptset/v1/sleep"
WAKE = "/keptset/v1/wake"


@dataclass(frozen=True)
class Asked:
    """One request."""

    path: str
    body: bytes
    check: Callable[[httpx.Response], None]
    """Raises AssertionError if the answer is wrong."""
    headers: dict[str, str] = field(default_factory=dict)


def mixed(seed: int) -> Iterator[Asked]:
    """Two good ones for a bad one, without end."""
    draw = random.Random(seed)
    while True:
        yield good(draw) if draw.random() < 2 / 3 else bad(draw)


def good(draw: random.Random) -> Asked:
    """A request that must be answered, with masks if it truncates."""
    sampling: dict[str, Any] = {
        "temperature": draw.choice([0.6, 1.0, 1.3]),
        "max_tokens": draw.randint(1, 8),
        "n": draw.choice([1, 1, 1, 2, 4]),
        "seed": draw.randrange(2**31),
        "logprobs": 0,
    }
    truncates = draw.random() < 0.7
    if truncates:
        limit = draw.choice(["top_p", "top_k", "min_p"])
        sampling["top_k"] = draw.randint(1, 40) if limit == "top_k" else 512
        if limit != "top_k":
            sampling[limit] = draw.uniform(0.05, 0.99)
    body = {"token_ids": [draw.randrange(5, VOCAB_SIZE) for _ in range(draw.randint(1, 20))]}
    body["sampling_params"] = sampling
    binary = draw.random() < 0.5

    def check(answer: httpx.Response) -> None:
        assert answer.status_code == 200, answer.text
        choices = _read_binary(answer) if binary else _read_json(answer)
        assert len(choices) == sampling["n"]
        for tokens, logprobs, kept in choices:
            assert 1 <= len(tokens) <= sampling["max_tokens"]
            assert len(logprobs) == len(tokens)
            assert all(math.isfinite(value) and -9999 < value <= 0 for value in logprobs)
            assert (kept is not None) == truncates
            if kept is not None:
                kept.check(len(tokens), VOCAB_SIZE, sampled_ids=tokens, require_masks=True)
                assert max(map(len, kept.rows())) <= sampling["top_k"]

    headers = {"Accept": MSGPACK} if binary else {}
    return Asked(GENERATE, json.dumps(body).encode(), check, headers)


Choice = tuple[list[int], list[float], KeptTokens | None]


def _read_binary(answer: httpx.Response) -> list[Choice]:
    found: list[Choice] = []
    for choice in decode(answer.content, GenerateAnswer).choices:
        tokens, logprobs, kept = choice.arrays(VOCAB_SIZE)
        assert logprobs is not None
        found.append((tokens.tolist(), logprobs.tolist(), kept))
    return found


def _read_json(answer: httpx.Response) -> list[Choice]:
    found: list[Choice] = []
    for choice in answer.json()["choices"]:
        kept = choice["kept_tokens"]
        logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        found.append((choice["token_ids"], logprobs, kept and KeptTokens.from_base64(kept)))
    return found


def _refusal(*codes: int) -> Callable[[httpx.Response], None]:
    def check(answer: httpx.Response) -> None:
        assert answer.status_code in codes, f"{answer.status_code}, not {codes}: {answer.text[:300]}"
        assert answer.json()["error"]["message"], answer.text
        assert "Traceback" not in answer.text
        assert "/tmp/" not in answer.text

    return check


def bad(draw: random.Random) -> Asked:
    """A request that must be refused."""
    top_p = {"top_p": 0.9, "top_k": 512}
    bodies: list[tuple[str, Any, tuple[int, ...]]] = [
        (GENERATE, {}, (400,)),
        (GENERATE, {"token_ids": []}, (400,)),
        (GENERATE, {"token_ids": "abc"}, (400,)),
        (GENERATE, {"token_ids": [-1]}, (400,)),
        (GENERATE, {"token_ids": [VOCAB_SIZE]}, (400,)),
        (GENERATE, {"token_ids": [2**70]}, (400,)),
        (GENERATE, {"token_ids": [5] * 500}, (400,)),
        (GENERATE, {"token_ids": [5], "sampling_params": {"top_q": 1}}, (400,)),
        (GENERATE, {"token_ids": [5], "sampling_params": {**top_p, "repetition_penalty": 1.1}}, (400,)),
        (GENERATE, {"token_ids": [5], "sampling_params": {**top_p, "temperature": 0.001}}, (400,)),
        (GENERATE, {"token_ids": [5], "sampling_params": {"temperature": -1}}, (400,)),
        (GENERATE, {"token_ids": [5], "sampling_params": {"max_tokens": 100000}}, (400,)),
        (GENERATE, {"token_ids": [5], "sampling_params": {"n": 0}}, (400,)),
        (GENERATE, {"token_ids": [5], "sampling_params": []}, (400,)),
        (GENERATE, {"token_ids": [5], "model": "other"}, (404,)),
        (GENERATE, {"token_ids": [5], "pad": "x" * 70_000}, (413,)),
        (GENERATE, [1, 2], (400,)),
        (WEIGHTS, {"version": draw.randint(5, 999_999)}, (404, 409)),
        (WEIGHTS, {"version": "../../etc"}, (400,)),
        (WEIGHTS, {"version": -1}, (400,)),
        (WEIGHTS, {}, (400,)),
        (WEIGHTS, {"version": 1, "transfer": {"unique_id": "no"}}, (400,)),
        (SLEEP, {}, (409,)),
        (WAKE, {"version": "1"}, (400,)),
        (WAKE, {"version": 1, "seconds": 1}, (400,)),
        ("/keptset/v1/nothing", {}, (404,)),
    ]
    path, body, codes = draw.choice(bodies)
    if draw.random() < 0.1:
        raw = draw.choice([b"", b"{", b"\xff\xfe", b"NaN", b'{"token_ids": [NaN]}', draw.randbytes(200)])
        return Asked(GENERATE, raw, _refusal(400))
    if draw.random() < 0.05:
        headers = {"X-Kept-Tokens-Format": "xml"}
        return Asked(GENERATE, json.dumps({"token_ids": [5]}).encode(), _refusal(400), headers)
    return Asked(path, json.dumps(body).encode(), _refusal(*codes))
