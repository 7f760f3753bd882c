"""Answers as JSON, in the dialects that clients read.

The bytes matter: a deployed client cuts the ids out of the raw body by searching for
`"kept_tokens":{"ids":"`, so the JSON is compact and `ids` comes first.
"""

import base64
import io
import math
from typing import Any

import msgspec
import numpy as np
from vllm.logprobs import FlatLogprobs

from ..state import KeptTokensFormat
from .completion import Completion

NO_EVIDENCE = -9999.0
"""Stands for a logprob that is no finite number: JSON has no -inf. Never sent for a sampled token with a
set."""


class Candidate(msgspec.Struct):
    """One of the most likely tokens of a position."""

    token: str
    """`token_id:17`, for clients written against vLLM 0.26 to 0.30."""
    token_id: int
    """For clients of vLLM 0.32."""
    logprob: float
    rank: int | None
    bytes: None = None


class Position(Candidate):
    """The sampled token of a position, and the most likely ones, best first."""

    top_logprobs: list[Candidate] = []


def logprobs_content(flat: FlatLogprobs) -> list[Position]:
    """One entry a token."""
    ids, values, ranks = flat.token_ids, flat.logprobs, flat.ranks
    content = []
    for start, end in zip(flat.start_indices, flat.end_indices, strict=True):
        top = [
            Candidate(f"token_id:{ids[i]}", ids[i], _finite(values[i]), ranks[i] or None)
            for i in range(start + 1, end)
        ]
        content.append(
            Position(
                f"token_id:{ids[start]}",
                ids[start],
                _finite(values[start]),
                ranks[start] or None,
                top_logprobs=top,
            )
        )
    return content


def json_choice(choice: Completion, dialect: KeptTokensFormat) -> dict[str, Any]:
    """One choice, ready for msgspec; only the fields of the dialect that was asked for are there."""
    answer: dict[str, Any] = {
        "index": choice.index,
        "token_ids": choice.token_ids.tolist(),
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        "logprobs": None if choice.logprobs is None else {"content": logprobs_content(choice.logprobs)},
    }
    if dialect != "sampling_mask":
        answer["kept_tokens"] = None if choice.kept is None else choice.kept.to_base64()
    if dialect != "kept_tokens":
        answer["sampling_mask"] = None if choice.kept is None else choice.kept.to_sampling_mask()
    answer["weight_versions"] = choice.weight_versions
    answer["routed_experts"] = None if choice.routed_experts is None else npy_base64(choice.routed_experts)
    return answer


def usage(num_prompt_tokens: int, num_completion_tokens: int) -> dict[str, int]:
    """Token counts, by OpenAI's names."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
    }


def prompt_logprobs(flat: FlatLogprobs | None) -> list[dict[str, dict[str, Any]] | None] | None:
    """As vLLM's own route: per prompt token a map from id to logprob and rank, null for the first."""
    if flat is None:
        return None
    positions: list[dict[str, dict[str, Any]] | None] = []
    for start, end in zip(flat.start_indices, flat.end_indices, strict=True):
        entries = {
            str(flat.token_ids[i]): {
                "logprob": _finite(flat.logprobs[i]),
                "rank": flat.ranks[i] or None,
                "decoded_token": flat.decoded_tokens[i],
            }
            for i in range(start, end)
        }
        positions.append(entries or None)
    return positions


def npy_base64(array: np.ndarray) -> str:
    """An array as vLLM's route sends one: the bytes of a .npy file in base64."""
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode("ascii")


def _finite(value: float) -> float:
    return value if math.isfinite(value) else NO_EVIDENCE


__all__ = ["NO_EVIDENCE", "json_choice", "logprobs_content", "npy_base64", "prompt_logprobs", "usage"]
