"""One array a token instead of four, from the scheduler to the API.

What vLLM's messages cost the API process is mostly the number of arrays in them. Where a request wants the
sampled token's logprob only, its rank and logprob travel in front of the ids of its set:

    [ rank | the bits of the logprob | ids of the set, ascending ]
"""

from collections.abc import Sequence

import numpy as np
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import LogprobsLists, SamplingMaskLists

from kept_tokens import KeptTokens, KeptTokensError

from .flag import is_marked

HEAD = 2


def can_pack(params: SamplingParams | None) -> bool:
    """Whether one array holds all that a token of this request is answered with. With stop strings vLLM may
    cut a step's tokens, and with them sets that it takes for sets.
    """
    return params is not None and is_marked(params) and params.logprobs == 0 and not params.detokenize


def pack_rows(logprobs: LogprobsLists, masks: SamplingMaskLists) -> SamplingMaskLists:
    """Put rank and logprob in front of every row of a step that sampled one token a row."""
    assert masks.offsets is not None
    rows = len(masks.offsets) - 1
    offsets = masks.offsets + HEAD * np.arange(rows + 1)
    ranks, bits = logprobs.sampled_token_ranks, _bits(logprobs.logprobs[:, 0])
    if (size := _common(np.diff(masks.offsets))) is not None:
        table = np.empty((rows, HEAD + size), np.int32)
        table[:, 0], table[:, 1], table[:, HEAD:] = ranks, bits, masks.token_ids.reshape(rows, size)
        return SamplingMaskLists(table.reshape(-1), offsets)
    packed = np.empty(offsets[-1], np.int32)
    starts = offsets[:-1]
    packed[starts], packed[starts + 1] = ranks, bits
    packed[_behind_heads(packed, starts)] = masks.token_ids
    return SamplingMaskLists(packed, offsets)


def without_head(row: SamplingMaskLists) -> SamplingMaskLists:
    """The set alone, of one row."""
    return SamplingMaskLists(row.token_ids[HEAD:])


def unpack_rows(chunks: Sequence[SamplingMaskLists]) -> tuple[np.ndarray, np.ndarray, KeptTokens]:
    """Ranks (int32 [T]), logprobs (float32 [T]) and sets of consecutive tokens, one chunk each.

    Raises:
        KeptTokensError: the sets are no sets.
    """
    sizes = np.fromiter((chunk.token_ids.size for chunk in chunks), np.int32, len(chunks))
    if sizes.min() < HEAD:
        raise KeptTokensError("kept_tokens", "has no rank and logprob", position=int(sizes.argmin()))
    packed = np.concatenate([chunk.token_ids for chunk in chunks])
    starts = np.cumsum(sizes) - sizes
    if (size := _common(sizes)) is not None:
        ids = packed.reshape(len(chunks), size)[:, HEAD:].flatten()
    else:
        ids = packed[_behind_heads(packed, starts)]
    kept = KeptTokens(ids, sizes - HEAD, copy=False)
    return packed[starts], packed[starts + 1].view(np.float32), kept


def _bits(logprobs: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(logprobs, np.float32).view(np.int32)


def _common(sizes: np.ndarray) -> int | None:
    """The size that all have: what is of one size moves as a table, several times faster."""
    return int(sizes[0]) if len(sizes) and (sizes == sizes[0]).all() else None


def _behind_heads(packed: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Which entries are ids of sets."""
    inside = np.ones(len(packed), bool)
    inside[starts] = inside[starts + 1] = False
    return inside


__all__ = ["HEAD", "can_pack", "pack_rows", "unpack_rows", "without_head"]
