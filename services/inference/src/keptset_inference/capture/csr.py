"""From vLLM's sampling-mask channel to `KeptTokens`, without a list of Python ints in between."""

from collections.abc import Sequence

import numpy as np
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.outputs import SamplingMaskLists

from kept_tokens import KeptTokens

from .carried import spread


def keep_csr() -> None:
    """Let the chunks of a request's sets stay arrays, in the process of the API.

    vLLM turns each chunk into a list of lists of Python ints (6 us a token of 512 ids). `RequestOutput.add`,
    which merges the chunks of a slow reader, extends lists of chunks just as it extends lists of lists. Only
    requests with masks ever have chunks.
    """
    SamplingMaskLists.to_nested_list = lambda self: [self]


_get_output_async = AsyncMPClient.get_output_async


async def _get_spread_output(self: AsyncMPClient) -> EngineCoreOutputs:
    outputs = await _get_output_async(self)
    spread(outputs.outputs)
    return outputs


def spread_steps() -> None:
    """Give each request its sets again where one array has carried those of a step (`carried`), in the
    process of the API; before an engine is started.
    """
    AsyncMPClient.get_output_async = _get_spread_output


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


__all__ = ["keep_csr", "kept_tokens", "spread_steps"]
