"""The cut: a row that wants a kept set is left with that set and nothing else, and the set is written down.

Top-k is exact under ties: never more than k ids, of those tied at the k-th value the lowest. Top-p takes the
most likely of these until their mass reaches p, of those tied at its border again the lowest ids; the best
one always stays. Both happen here and not in vLLM, whose GPU kernels may keep more than k ids even without
ties, and whose top-p, on a row that is cut already, searches the whole row many times.
"""

import numpy as np
import torch
from torch import Tensor

from .flag import WIDTH

NO_SET = -1
"""In place of a size: this row wants no set."""
PAD = 2**31 - 1
"""Behind the ids of a set. As a size: the row holds what is no number, and its request must fail."""


def cut_rows(logits: Tensor, top_k: Tensor, top_p: Tensor, limit: int, width: int) -> Tensor:
    """Cut rows in place.

    No host synchronisation on an accelerator.

    Args:
        logits: float32 [R, V], already divided by the temperature.
        top_k: int32 [R], 1 to `width`; 0 leaves the row as it is.
        top_p: float32 [R], above 0; 1 or more for no nucleus.
        limit: ids from here on are masked out before anything else (a padded vocabulary).
        width: the largest of `top_k`, known to the host; at most WIDTH.

    Returns:
        int32 [R, 1 + width]: the size of the set (NO_SET: none wanted; PAD: the row holds NaN or infinity
        and is as it was), then its ids in ascending order, then PAD.
    """
    assert width <= WIDTH
    if logits.device.type != "cpu":
        return cut_on_device(logits, top_k, top_p, limit, width)
    wanted = top_k.nonzero().flatten()
    if len(wanted) == len(logits):
        return cut_on_host(logits, top_k.long(), top_p, limit, width)
    columns = torch.full((len(logits), 1 + width), NO_SET, dtype=torch.int32)
    part = logits[wanted]
    columns[wanted] = cut_on_host(part, top_k[wanted].long(), top_p[wanted], limit, width)
    logits[wanted] = part
    return columns


def cut_on_device(logits: Tensor, top_k: Tensor, top_p: Tensor, limit: int, width: int) -> Tensor:
    """As `cut_rows`, by Triton kernels."""
    from . import cut_kernel as kernels  # Triton is not on every machine

    assert logits.stride(1) == 1
    rows, vocabulary = logits.shape
    limit = min(limit, vocabulary)
    chunk = chunk_of(limit, kernels.CHUNK)
    chunks = max(WIDTH, 1 << (-(-limit // chunk) - 1).bit_length())
    columns = torch.empty((rows, 1 + width), dtype=torch.int32, device=logits.device)
    size = 2 * (chunks + kernels.CANDIDATES + WIDTH)
    scratch = torch.empty((rows, size), dtype=torch.int32, device=logits.device)
    row, set_, work = logits.stride(0), columns.stride(0), scratch.stride(0)
    kernels.read_kernel[rows, -(-limit // kernels.READ)](
        logits, row, top_k, scratch, work, vocabulary, limit, CHUNK=chunk, READ=kernels.READ
    )
    kernels.choose_kernel[rows,](
        logits,
        row,
        top_k,
        top_p,
        columns,
        set_,
        scratch,
        work,
        limit,
        width,
        CHUNKS=chunks,
        WIDTH=WIDTH,
        CHUNK=chunk,
        WORK=kernels.WORK,
        CANDIDATES=kernels.CANDIDATES,
        num_warps=kernels.WARPS,
    )
    kernels.write_kernel[rows, -(-vocabulary // kernels.READ)](
        logits, row, columns, set_, scratch, work, vocabulary, WIDTH=WIDTH, READ=kernels.READ
    )
    return columns


SMALLEST_CHUNK = 8


def chunk_of(limit: int, largest: int) -> int:
    """Ids of a chunk: `largest`, or fewer for a small vocabulary.

    With no more chunks than a set may have ids every chunk would be read again, and hold more candidates than
    there is room for: then the whole row is searched.
    """
    chunk = largest
    while chunk > SMALLEST_CHUNK and limit < 2 * WIDTH * chunk:
        chunk //= 2
    return chunk


def cut_on_host(logits: Tensor, top_k: Tensor, top_p: Tensor, limit: int, width: int) -> Tensor:
    """As `cut_rows` where every row wants a set, on a CPU; the reference of the kernel.

    Rows without a number have the size PAD.
    """
    logits[:, limit:] = -torch.inf
    odd = (logits.amax(1) == torch.inf) | logits.isnan().any(1)
    saved = logits[odd]
    logits[odd] = -torch.inf
    _keep_top_k(logits, top_k, width)
    values = logits.numpy()
    row, token = np.divmod(np.flatnonzero(values > -np.inf), values.shape[1])
    sizes = np.bincount(row, minlength=len(values))
    place = np.arange(len(row)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    ids = np.full((len(values), width), PAD, np.int32)
    ids[row, place] = token
    nucleus = np.flatnonzero(top_p.numpy() < 1)
    if nucleus.size:
        there = np.arange(width) < sizes[nucleus, None]
        known = np.where(there, ids[nucleus], 0)
        kept_values = np.where(there, np.take_along_axis(values[nucleus], known, 1), -np.inf)
        keep = _nucleus(kept_values, top_p.numpy()[nucleus])
        gone = np.nonzero(there & ~keep)
        values[nucleus[gone[0]], known[gone]] = -np.inf
        ids[nucleus] = np.sort(np.where(keep, ids[nucleus], PAD), axis=1)
        sizes[nucleus] = keep.sum(1)
    columns = np.concatenate((sizes[:, None], ids), axis=1).astype(np.int32)
    columns[odd.numpy(), 0] = PAD
    logits[odd] = saved
    return torch.from_numpy(columns)


def _nucleus(values: np.ndarray, top_p: np.ndarray) -> np.ndarray:
    """[m, width] of bools; -inf where there is nothing, ids ascending from left to right."""
    order = np.argsort(-values, axis=1, kind="stable")
    with np.errstate(invalid="ignore"):  # rows without anything
        weights = np.exp(values - values.max(1, keepdims=True))
    ordered = np.take_along_axis(weights, order, 1)
    before = np.cumsum(ordered, axis=1, dtype=np.float64) - ordered
    keep = np.zeros(values.shape, bool)
    inside = before < top_p[:, None].astype(np.float64) * ordered.sum(1, keepdims=True, dtype=np.float64)
    np.put_along_axis(keep, order, inside, 1)
    return keep & (values > -np.inf)


def _keep_top_k(logits: Tensor, top_k: Tensor, widest: int) -> None:
    """Mask out, in place, all but the k largest of each row; of those tied at the k-th the lowest stay."""
    vocabulary = logits.shape[1]
    column = top_k.clamp(max=vocabulary).unsqueeze(1)  # [m, 1]
    top = logits.topk(min(widest + 1, vocabulary), dim=-1).values
    kth = top.gather(1, column - 1)
    beyond = top.gather(1, column.clamp(max=top.shape[1] - 1))
    logits.masked_fill_(logits < kth, -torch.inf)
    # Mostly nothing is tied across the border: then the k-th value has decided alone.
    tie = ((beyond == kth) & (column < vocabulary) & (kth > -torch.inf)).flatten().nonzero().flatten()
    if len(tie):
        part, kth = logits[tie], kth[tie]
        room = column[tie] - (top[tie] > kth).sum(1, keepdim=True)  # how many of the tied ids fit
        tied = part == kth
        logits[tie] = part.masked_fill(tied & (tied.cumsum(1, dtype=torch.int32) > room), -torch.inf)


__all__ = ["NO_SET", "PAD", "cut_on_device", "cut_on_host", "cut_rows"]
