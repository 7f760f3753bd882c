"""The plain reference: the whole [N, V] matrix of logits, and autograd."""

from typing import Literal

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from .entropy_sample import sampled_positions
from .types import KeptLogprobs, KeptSet
from .validation import check_options, check_shapes, check_values


def dense_kept_logprobs(
    hidden: Float[Tensor, "positions hidden"],
    weight: Float[Tensor, "vocab hidden"],
    labels: Int64[Tensor, " positions"],
    kept: KeptSet,
    temperature: Float[Tensor, " positions"],
    *,
    softcap: float | None = None,
    entropy: Literal["full"] | float | None = "full",
    full_logprobs: bool = False,
) -> KeptLogprobs:
    """What :func:`kept_loss.kept_logprobs` computes, written down as the formulas say. For tests; slow and
    large.

    float64 is computed and answered in float64, everything else in float32. Same arguments and errors.
    """
    check_shapes(hidden, weight, labels, kept, temperature)
    check_options(softcap, entropy)
    check_values(labels, weight.shape[0], kept, temperature)
    dtype = torch.float64 if torch.float64 in (hidden.dtype, weight.dtype) else torch.float32
    num, vocab_size = hidden.shape[0], weight.shape[0]

    counts = kept.offsets.diff()
    positions = torch.repeat_interleave(counts)
    mask = torch.zeros(num, vocab_size, dtype=torch.bool, device=hidden.device)  # [N, V]
    mask[positions, kept.ids.long()] = True
    mask[counts == 0] = True

    logits = hidden.to(dtype) @ weight.to(dtype).T  # [N, V]
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    scaled = logits / temperature.to(dtype)[:, None]
    over_kept = scaled.masked_fill(~mask, -torch.inf).log_softmax(-1)  # [N, V]
    logprobs = over_kept.gather(1, labels[:, None]).squeeze(1)

    with torch.no_grad():
        over_all = scaled.log_softmax(-1)
        entropy_all = _entropy(over_all)
        mass = over_all.exp().masked_fill(~mask, 0).sum(-1).clamp(max=1).masked_fill(counts == 0, 1)
        sampled = sampled_positions(num, entropy, hidden.device)
        ran = torch.ones_like(sampled) if full_logprobs else sampled
        return KeptLogprobs(
            logprobs,
            None if entropy is None else entropy_all.masked_fill(~sampled, torch.nan),
            _entropy(over_kept),
            None if entropy is None and not full_logprobs else mass.masked_fill(~ran, torch.nan),
            over_all.gather(1, labels[:, None]).squeeze(1) if full_logprobs else None,
        )


def _entropy(logprobs: Tensor) -> Tensor:
    """Nats, [N]; what has probability 0 adds nothing."""
    probabilities = logprobs.exp()
    return -torch.where(probabilities > 0, probabilities * logprobs, 0).sum(-1)
