"""The sets of a step in one array from the engine to the API, instead of one a request.

Each array of more than a few ids is a part of its own of the message. 256 of them a step cost the engine's
sending thread a millisecond, and 256 waits for its turn while the model runner is at work; the receiving
process as much.
"""

from collections.abc import Sequence

import numpy as np
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.outputs import SamplingMaskLists


def carry(outputs: list[EngineCoreOutput], places: Sequence[int], sets: SamplingMaskLists) -> None:
    """Let one output carry the sets of several, in place; one token each.

    Where they belong travels in `cu_num_generated_tokens`, which no output of vLLM's has.

    Args:
        outputs: of a step, for one client.
        places: of the outputs that have sets.
        sets: theirs, in the order of `places`.
    """
    for place in places:
        outputs[place].new_sampling_mask = None
    outputs[places[0]].new_sampling_mask = SamplingMaskLists(sets.token_ids, sets.offsets, list(places))


def rows_of(sets: SamplingMaskLists, rows: Sequence[int]) -> SamplingMaskLists:
    """Some rows of a step, in this order."""
    assert sets.offsets is not None
    if list(rows) == list(range(len(rows))):
        offsets = sets.offsets[: len(rows) + 1]
        return SamplingMaskLists(sets.token_ids[: offsets[-1]], offsets)
    bounds = sets.offsets.tolist()
    return joined([sets.token_ids[bounds[row] : bounds[row + 1]] for row in rows])


def joined(sets: Sequence[np.ndarray]) -> SamplingMaskLists:
    """One after the other."""
    return SamplingMaskLists(np.concatenate(sets), np.cumsum([0, *(one.size for one in sets)]))


def spread(outputs: list[EngineCoreOutput]) -> None:
    """Undo `carry`, in place. Each set becomes an array of its own: a slice would keep the step alive."""
    for output in outputs:
        carrier = output.new_sampling_mask
        if carrier is not None and carrier.cu_num_generated_tokens is not None:
            break
    else:
        return
    ids, offsets = carrier.token_ids, carrier.offsets.tolist()
    for place, start, end in zip(carrier.cu_num_generated_tokens, offsets[:-1], offsets[1:], strict=True):
        outputs[place].new_sampling_mask = SamplingMaskLists(ids[start:end].copy())


__all__ = ["carry", "joined", "rows_of", "spread"]
