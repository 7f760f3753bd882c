"""Top-k that is exact under ties: never more than k ids, the lowest of those tied at the k-th value."""

import torch
from torch import Tensor


def keep_top_k(logits: Tensor, top_k: Tensor, widest: int) -> Tensor:
    """Mask out, in place, all but the k largest of each row; of those tied at the k-th value the lowest ids
    stay.

    No host synchronisation on an accelerator. vLLM's own top-k cannot be left to do it: its PyTorch path
    keeps every id that is tied at the k-th value, its Triton kernel may keep more than k ids even without
    ties.

    Args:
        logits: float32 [R, V].
        top_k: int64 [R], 1 <= k <= V.
        widest: the largest of `top_k`, known to the host.

    Returns:
        `logits`, with -inf outside the kept ids.
    """
    vocabulary = logits.shape[1]
    column = top_k.unsqueeze(1)  # [R, 1]
    top = logits.topk(min(widest + 1, vocabulary), dim=-1).values
    kth = top.gather(1, column - 1)
    if logits.device.type == "cpu":
        # The host may look here, and mostly nothing is tied across the border: then the k-th value decides
        # alone.
        beyond = top.gather(1, column.clamp(max=top.shape[1] - 1))
        if not ((beyond == kth) & (column < vocabulary)).any():
            return logits.masked_fill_(logits < kth, -torch.inf)
    room = column - (top > kth).sum(1, keepdim=True)  # how many of the tied ids fit
    tied = logits == kth
    late = tied & (tied.cumsum(1, dtype=torch.int32) > room)
    return logits.masked_fill_((logits < kth) | late, -torch.inf)
