"""How kept sets travel from the sampler to the scheduler: as columns behind the ids of the logprobs.

vLLM copies `logprob_token_ids` [R, 1 + logprobs] from the device to the host in every step that has logprobs.
Kept sets ride along: 1 + width columns more, which the scheduler takes off again. The border is the width of
`logprobs`.

    [ ids of the logprobs | size of the set, -1 = this row wants none | ids, ascending, padded ]
"""

import numpy as np
from vllm.v1.outputs import LogprobsLists, SamplingMaskLists

from .compact import compact
from .cut import NO_SET, PAD


def split_columns(
    lists: LogprobsLists, sampled: np.ndarray
) -> tuple[LogprobsLists, SamplingMaskLists | None, list[str]]:
    """Take the columns off again.

    Args:
        lists: what came from the device; one row for each request of the step.
        sampled: int [R], the sampled ids; -1 where the row sampled nothing that counts.

    Returns:
        The logprobs as they would be without capture; the sets of all rows (None: no columns came), empty for
        rows that want none and for rows whose set is wrong; what is wrong, one line for each such row.
    """
    width = lists.logprobs.shape[1]
    if lists.logprob_token_ids.shape[1] == width:
        return lists, None, []
    sizes, ids = lists.logprob_token_ids[:, width], lists.logprob_token_ids[:, width + 1 :]
    wanted, fits = sizes != NO_SET, sizes <= ids.shape[1]
    # Behind the ids of a set there is PAD, which is no id that can be sampled.
    holds = (ids == sampled.astype(np.int32)[:, None]).any(1) & (sampled != PAD)
    wrong = wanted & (sampled >= 0) & ~(fits & holds)
    problems = [
        f"row {row}: a set of {sizes[row]} ids in {ids.shape[1]} columns, sampled id {sampled[row]}"
        for row in np.flatnonzero(wrong)
    ]
    counts = np.where(wanted & fits & ~wrong, sizes, 0)
    offsets = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    masks = SamplingMaskLists(compact(ids, counts), offsets)
    plain = lists._replace(logprob_token_ids=np.ascontiguousarray(lists.logprob_token_ids[:, :width]))
    return plain, masks, problems
