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
from .json_text import NO_EVIDENCE, items, rows_of, short_floats
from .logprobs import NO_ID, TokenLogprobs


def logprobs_content(logprobs: TokenLogprobs) -> bytes:
    """One entry a token, as JSON text.

    `token` is for clients written against vLLM 0.26 to 0.30, `token_id` for those of 0.32.
    """
    ids, values, ranks = logprobs
    sampled = items(ids[:, 0])
    candidates: bytes | list[bytes] = b"[]"
    if ids.shape[1] > 1:
        candidates = _candidates(ids[:, 1:], values[:, 1:])
    return rows_of(
        [
            b'{"token":"token_id:',
            sampled,
            b'","token_id":',
            sampled,
            b',"logprob":',
            items(short_floats(values[:, 0])),
            b',"rank":',
            items([rank or None for rank in ranks.tolist()]),
            b',"bytes":null,"top_logprobs":',
            candidates,
            b"}",
        ]
    )


def _candidates(ids: np.ndarray, values: np.ndarray) -> list[bytes]:
    """The most likely ids of each position, best first."""
    ranks = items(list(range(1, 1 + ids.shape[1])))
    entries = []
    for row, known, logprobs in zip(ids, ids != NO_ID, short_floats(values), strict=True):
        there = items(row[known])
        entries.append(
            rows_of(
                [
                    b'{"token":"token_id:',
                    there,
                    b'","token_id":',
                    there,
                    b',"logprob":',
                    items(logprobs[known]),
                    b',"rank":',
                    ranks[: len(there)],
                    b',"bytes":null}',
                ]
            )
        )
    return entries


def json_choice(choice: Completion, dialect: KeptTokensFormat) -> dict[str, Any]:
    """One choice, ready for msgspec; only the fields of the dialect that was asked for are there."""
    logprobs = None
    if choice.logprobs is not None:
        logprobs = {"content": msgspec.Raw(logprobs_content(choice.logprobs))}
    answer: dict[str, Any] = {
        "index": choice.index,
        "token_ids": choice.token_ids.tolist(),
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        "logprobs": logprobs,
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
