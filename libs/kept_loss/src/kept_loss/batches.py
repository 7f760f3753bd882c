"""From the padded batches of other trainers to positions: which hidden state predicts which token."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Int, Int64, Shaped
from torch import Tensor

from .types import KeptSet


class ScoredTokens(NamedTuple):
    """The N tokens to be scored, sequence after sequence: the order of ``values[response_mask]``."""

    hidden_positions: Int64[Tensor, " positions"]
    """Where the hidden states that predict them are in ``hidden.flatten(0, 1)``: one token further left."""
    labels: Int64[Tensor, " positions"]
    """The tokens themselves."""
    kept: KeptSet
    """The sets that they were sampled from."""


def scored_tokens(
    token_ids: Int[Tensor, "sequences tokens"],
    response_mask: Shaped[Tensor, "sequences tokens"],
    kept_ids: Any,
    kept_counts: Any,
    *,
    require_sets: bool = True,
) -> ScoredTokens:
    """What :func:`kept_loss.kept_logprobs` needs of a padded batch, as verl or TRL have it.

    A hidden state predicts the token to its right. So the token at t takes the hidden state at t - 1, and the
    label and the set at t. Sets of tokens that are not scored (prompts, tool answers) are left out.

    Args:
        token_ids: [B, T], prompt and response, padded on either side.
        response_mask: [B, T], not 0 (or True) at the tokens that are scored: sampled by the policy.
        kept_ids: integers [M], the flat ids of all tokens, sequence after sequence: an array or a tensor, as
            ``KeptTokens.concat(sequences).ids``.
        kept_counts: integers [B * T] or [B, T], how many of them belong to each token, 0 for none; a sequence
            has one for each of its T tokens (``KeptTokens.pad_tokens``).
        require_sets: refuse a scored token without a set. False scores it over the whole vocabulary: right
            if it was sampled without truncation.

    Returns:
        ScoredTokens, on the device of ``token_ids``.

    Raises:
        ValueError: shapes that do not fit, a scored first token (nothing predicts it), a scored token
            without a set, or what :meth:`KeptSet.from_arrays` refuses.
    """
    if token_ids.ndim != 2 or token_ids.is_floating_point():
        raise ValueError(
            f"token_ids: are {token_ids.dtype} {tuple(token_ids.shape)}, but must be integers [B, T]; add a "
            "dimension to a single sequence"
        )
    if response_mask.shape != token_ids.shape:
        raise ValueError(
            f"response_mask: has shape {tuple(response_mask.shape)}, but must be {tuple(token_ids.shape)} as "
            "token_ids; pad a mask of responses alone with 0 at the prompts"
        )
    device, width = token_ids.device, token_ids.shape[1]
    counts = kept_counts if isinstance(kept_counts, Tensor) else torch.tensor(kept_counts)
    if counts.numel() != token_ids.numel():
        raise ValueError(
            f"kept_counts: has shape {tuple(counts.shape)}, but must have one count for each of "
            f"{token_ids.shape[0]} x {width} tokens; pad each sequence's with 0 as its tokens are"
        )
    kept = KeptSet.from_arrays(kept_ids, counts.flatten(), device)

    scored = (response_mask.to(device) != 0).flatten().nonzero().squeeze(1)  # [N] of B * T
    first = scored[scored % max(1, width) == 0]
    if first.numel():
        raise ValueError(
            f"response_mask: sequence {int(first[0]) // width}: token 0 is to be scored, but no hidden state "
            "predicts it; a response begins behind its prompt"
        )
    chosen = kept.select(scored)
    bare = scored[chosen.offsets.diff() == 0]
    if require_sets and bare.numel():
        raise ValueError(
            f"kept_counts: sequence {int(bare[0]) // width}, token {int(bare[0]) % width}: is scored but has "
            "no set; align the counts with token_ids, or pass require_sets=False if it was sampled without "
            "truncation"
        )
    return ScoredTokens(scored - 1, token_ids.flatten()[scored].long(), chosen)
