"""How kept sets travel from the sampler to the scheduler: as columns behind the ids of the logprobs.

vLLM copies `logprob_token_ids` [R, 1 + logprobs] from the device to the host in every step that has logprobs.
Kept sets ride along: 1 + width columns more, which the scheduler takes off again. The border is the width of
`logprobs`.

    [ ids of the logprobs | size of the set, -1 = this row wants none | ids, ascending, padded ]
"""

import numpy as np
import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsLists, SamplingMaskLists

NO_SET = -1
PAD = 2**31 - 1


def kept_columns(logprobs: Tensor, width: int) -> Tensor:
    """The finite entries of each row.

    Args:
        logprobs: [R, V], the processed logprobs that the tokens were sampled from.
        width: the most ids that a row may have.

    Returns:
        int32 [R, 1 + width]: the number of finite entries of the whole row (more than `width` if something is
        wrong: nothing can be lost unseen), then their ids in ascending order, then PAD.
    """
    if logprobs.device.type == "cpu":
        return columns_on_host(logprobs, width)
    return columns_on_device(logprobs, width)


def columns_on_device(logprobs: Tensor, width: int) -> Tensor:
    """As `kept_columns`, without waiting for the host."""
    finite = logprobs > -torch.inf
    columns = torch.full((len(logprobs), 1 + width), PAD, dtype=torch.int32, device=logprobs.device)
    columns[:, :1] = finite.sum(1, keepdim=True, dtype=torch.int32)
    values, ids = logprobs.topk(min(width, logprobs.shape[1]), dim=-1)
    ids = torch.where(values > -torch.inf, ids, PAD).sort(dim=-1).values
    columns[:, 1 : 1 + ids.shape[1]] = ids.to(torch.int32)
    return columns


def columns_on_host(logprobs: Tensor, width: int) -> Tensor:
    """As `kept_columns`, in half the time: one pass finds the ids, in the right order already."""
    rows, vocabulary = logprobs.shape
    row, token = np.divmod(np.flatnonzero((logprobs > -torch.inf).numpy()), vocabulary)
    sizes = np.bincount(row, minlength=rows)
    place = np.arange(len(row)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    fits = place < width
    columns = np.full((rows, 1 + width), PAD, np.int32)
    columns[:, 0] = sizes
    columns[row[fits], 1 + place[fits]] = token[fits]
    return torch.from_numpy(columns)


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
    inside = np.arange(ids.shape[1], dtype=np.int32) < sizes[:, None]
    wanted = sizes != NO_SET
    wrong = wanted & (sampled >= 0) & ((sizes > ids.shape[1]) | ~((ids == sampled[:, None]) & inside).any(1))
    problems = [
        f"row {row}: a set of {sizes[row]} ids in {ids.shape[1]} columns, sampled id {sampled[row]}"
        for row in np.flatnonzero(wrong)
    ]
    counts = np.where(wanted & ~wrong, np.minimum(sizes, ids.shape[1]), 0)
    inside &= (counts > 0)[:, None]
    offsets = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    masks = SamplingMaskLists(np.ascontiguousarray(ids[inside]), offsets)
    plain = lists._replace(logprob_token_ids=np.ascontiguousarray(lists.logprob_token_ids[:, :width]))
    return plain, masks, problems
