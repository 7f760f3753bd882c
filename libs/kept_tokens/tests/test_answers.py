"""The MessagePack answer of generate: names, size, and what its reader refuses."""

from typing import Any

import msgspec
import numpy as np
import pytest

from kept_tokens import KeptTokens, KeptTokensError
from kept_tokens.answers import Choice, GenerateAnswer, KeptBytes, TopLogprobs, VersionSpan
from kept_tokens.messages import decode, encode

KEPT = KeptTokens.from_rows([[3, 17], [5]])


def choice(**changes: Any) -> Choice:
    fields: dict[str, Any] = {"logprobs": [-0.25, 0.0], "kept": KEPT, "finish_reason": "stop"}
    return Choice.build(0, **{"token_ids": [17, 5], **fields, **changes})


def test_round_trip() -> None:
    spans = [VersionSpan("base", 0, 1), VersionSpan("v000001", 1, 2)]
    answer = GenerateAnswer("r-1", "m", [choice(weight_versions=spans, stop_reason=2), Choice.build(1, [])])
    again = decode(encode(answer), GenerateAnswer)
    assert again == answer
    arrays = again.choices[0].arrays(vocab_size=18, require_masks=True)
    assert arrays.token_ids.tolist() == [17, 5]
    assert arrays.logprobs is not None
    assert arrays.logprobs.tolist() == [-0.25, 0.0]
    assert arrays.kept == KEPT
    assert again.choices[1].arrays()[1:] == (None, None)


def test_names_are_those_of_the_json_and_none_is_left_out() -> None:
    raw = msgspec.msgpack.decode(encode(GenerateAnswer("r", None, [choice()])))
    assert list(raw) == ["request_id", "choices"]
    (one,) = raw["choices"]
    assert list(one) == ["index", "token_ids", "finish_reason", "logprobs", "kept_tokens"]
    assert one["token_ids"] == np.array([17, 5], "<i4").tobytes()
    assert one["logprobs"] == np.array([-0.25, 0], "<f4").tobytes()
    assert one["kept_tokens"] == dict(zip(("ids", "counts"), KEPT.to_bytes(), strict=True))


def test_a_reader_ignores_names_that_it_does_not_know() -> None:
    raw = msgspec.msgpack.decode(encode(GenerateAnswer("r", None, [choice()])))
    raw["later"] = raw["choices"][0]["later"] = 1
    assert decode(msgspec.msgpack.encode(raw), GenerateAnswer) == GenerateAnswer("r", None, [choice()])


@pytest.mark.parametrize("choices", [1, 2, 64])
def test_size_is_12_bytes_a_token_and_4_a_kept_id(choices: int) -> None:
    tokens, width = 4096 // choices, 9
    kept = KeptTokens(np.tile(np.arange(width), tokens), np.full(tokens, width))
    one = Choice.build(
        0,
        np.zeros(tokens, np.int32),
        logprobs=np.zeros(tokens),
        kept=kept,
        finish_reason="length",
        weight_versions=[VersionSpan("v000012", 0, tokens)],
    )
    answer = GenerateAnswer("cmpl-0123456789abcdef0123456789abcdef", "model", [one] * choices)
    bound = choices * (12 * tokens + 4 * tokens * width) + 256 + 130 * (choices - 1)
    assert len(encode(answer)) <= bound


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"token_ids": [17, 18]}, "token_ids at position 1: 18 is outside"),
        ({"token_ids": [17, -5]}, "token_ids at position 1: -5 is"),
        ({"token_ids": [17, 4]}, "sampled_ids at position 1: the sampled id 4 is not in"),
        ({"token_ids": [17, 5, 5]}, "logprobs: has 2 entries, but there are 3 tokens"),
        ({"token_ids": [17], "logprobs": None}, "counts: has 2 entries, but there are 1 tokens"),
        ({"logprobs": [-0.25, np.nan]}, "logprobs at position 1: nan"),
        ({"logprobs": [0.5, 0]}, "logprobs at position 0: 0.5"),
        ({"logprobs": [-9999.0, 0]}, "logprobs at position 0: -9999.0"),
        ({"logprobs": [-np.inf, 0]}, "logprobs at position 0: -inf"),
        ({"kept": KeptTokens.from_rows([[17, 18], [5]])}, "ids at position 0: 18 is outside"),
        ({"kept": KeptTokens.from_rows([[17], []])}, "counts at position 1: 0, but"),
        ({"kept": None}, "kept_tokens: is missing"),
    ],
)
def test_reader_refuses(changes: dict[str, Any], text: str) -> None:
    wrong = decode(encode(GenerateAnswer("r", None, [choice(**changes)])), GenerateAnswer)
    with pytest.raises(KeptTokensError, match=text):
        wrong.choices[0].arrays(vocab_size=18, require_masks=True)


def test_broken_bytes_are_refused() -> None:
    with pytest.raises(KeptTokensError, match="token_ids: 3 bytes"):
        Choice(0, b"abc").arrays()
    with pytest.raises(KeptTokensError, match="logprobs: 3 bytes"):
        Choice(0, b"", logprobs=b"abc").arrays()
    with pytest.raises(KeptTokensError, match="ids: 3 bytes"):
        Choice(0, b"", kept_tokens=KeptBytes(b"abc", b"")).arrays()


def test_top_logprobs_travel() -> None:
    top = TopLogprobs(b"1234", b"5678", b"9012")
    answer = GenerateAnswer("r", None, [choice(top_logprobs=top)])
    assert decode(encode(answer), GenerateAnswer).choices[0].top_logprobs == top
