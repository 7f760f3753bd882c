"""From vLLM's sampling-mask channel to `KeptTokens`, without a list of Python ints in between."""

from collections.abc import Sequence

import numpy as np
from vllm.v1.outputs import SamplingMaskLists

from kept_tokens import KeptTokens


def keep_csr() -> None:
    """Let the chunks of a request's sets stay arrays, in the process of the API.

    vLLM turns each chunk into a list of lists of Python ints (6 us a token of 512 ids). This is the only
    method of its that we replace. `RequestOutput.add`, which merges the chunks of a slow reader, extends
    lists of chunks just as it extends lists of lists. Only requests with masks ever have chunks.
    """
    SamplingMaskLists.to_nested_list = lambda self: [self]


def kept_tokens(chunks: Sequence[SamplingMaskLists]) -> KeptTokens:
    """The sets of consecutive tokens, in order; a chunk without offsets is one token."""
    if not chunks:
        return KeptTokens((), ())
    if all(chunk.offsets is None for chunk in chunks):
        counts = np.fromiter((chunk.token_ids.size for chunk in chunks), np.int32, len(chunks))
    else:
        counts = np.concatenate(
            [[chunk.token_ids.size] if chunk.offsets is None else np.diff(chunk.offsets) for chunk in chunks]
        ).astype(np.int32)
    return KeptTokens(np.concatenate([chunk.token_ids for chunk in chunks]), counts, copy=False)


__all__ = ["keep_csr", "kept_tokens"]
